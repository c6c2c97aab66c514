// movement_cpu - copies of parts, on the CPU: a part is a view struct, the element-wise copy does
// the rest, for any strides and dtypes, and adds where a call accumulates.
#include "ops/dense_cpu.h"
#include "ops/movement.h"
#include "ops/rows.h"

#include <string.h>

// A 0-d tensor shown as every element of t.
static Tensor spread(const Tensor *scalar, const Tensor *t) {
  Tensor all = *t;
  all.dtype = scalar->dtype;
  all.storage = scalar->storage;
  all.offset = scalar->offset;
  memset(all.stride, 0, sizeof all.stride);
  return all;
}

// A 0-d tensor over `value`, which is one of t's type.
static Tensor constant(const Tensor *t, double number, Storage *memory, void *value) {
  memory->data = value;
  Tensor scalar = {.dtype = t->dtype, .storage = memory};
  dense_write(&scalar, DT_F64, &number, false);
  return scalar;
}

static void copy_in_order(const KernelCall *call) { // view, reshape, flatten: the same order
  const Tensor *x = call->in[0];
  Tensor out = *call->out[0];
  out.ndim = x->ndim;
  TensorSpec spec;
  tensor_spec(x, &spec);
  spec_row_major(&spec);
  memcpy(out.shape, spec.shape, sizeof out.shape);
  memcpy(out.stride, spec.stride, sizeof out.stride);
  dense_copy(x, &out, call->accumulate & 1);
}
void cpu_reshape(const KernelCall *call) { copy_in_order(call); }
void cpu_flatten(const KernelCall *call) { copy_in_order(call); }

void cpu_cat(const KernelCall *call) {
  int d = (int)call->args->v[0].i;
  int64_t at = 0;
  for (int j = 0; j < call->n_in; j++) {
    Tensor part = part_of(call->out[0], d, at, call->in[j]->shape[d]);
    dense_copy(call->in[j], &part, call->accumulate & 1);
    at += call->in[j]->shape[d];
  }
}

void cpu_stack(const KernelCall *call) {
  int d = (int)call->args->v[0].i;
  for (int j = 0; j < call->n_in; j++) {
    Tensor part = part_of(call->out[0], d, j, 1);
    part.ndim--;
    for (int k = d; k < part.ndim; k++) {
      part.shape[k] = part.shape[k + 1];
      part.stride[k] = part.stride[k + 1];
    }
    dense_copy(call->in[j], &part, call->accumulate & 1);
  }
}

// x into each of the boxes of the result that it fits.
void cpu_tile(const KernelCall *call) {
  const Tensor *x = call->in[0], *out = call->out[0];
  if (tensor_numel(out) == 0) return;
  int lead = out->ndim - x->ndim;
  int64_t boxes = tensor_numel(out) / tensor_numel(x);
  for (int64_t b = 0; b < boxes; b++) {
    Tensor part = *out;
    int64_t rest = b;
    for (int d = out->ndim - 1; d >= 0; d--) {
      int64_t size = d < lead ? 1 : x->shape[d - lead], times = out->shape[d] / size;
      part = part_of(&part, d, rest % times * size, size);
      rest /= times;
    }
    dense_copy(x, &part, call->accumulate & 1);
  }
}

// The frame is filled slab by slab, so that no element is written twice.
void cpu_pad(const KernelCall *call) {
  const Tensor *x = call->in[0];
  bool adds = call->accumulate & 1;
  uint64_t value;
  Storage memory = {0};
  Tensor scalar = constant(x, call->args->v[0].f, &memory, &value), inner = *call->out[0];
  for (int i = 0; i < call->args->n_list; i += 2) {
    int d = x->ndim - 1 - i / 2;
    int64_t before = call->args->list[i], after = call->args->list[i + 1];
    Tensor slabs[] = {part_of(&inner, d, 0, before),
                      part_of(&inner, d, before + x->shape[d], after)};
    for (int k = 0; k < 2; k++) {
      Tensor fill = spread(&scalar, &slabs[k]);
      dense_copy(&fill, &slabs[k], adds);
    }
    inner = part_of(&inner, d, before, x->shape[d]);
  }
  dense_copy(x, &inner, adds);
}

void cpu_roll(const KernelCall *call) {
  const Tensor *x = call->in[0];
  Tensor *out = call->out[0];
  int d = (int)call->args->v[1].i;
  int64_t n = x->shape[d];
  if (n == 0) return;
  int64_t shift = call->args->v[0].i % n;
  if (shift < 0) shift += n;
  Tensor head = part_of(x, d, 0, n - shift), tail = part_of(x, d, n - shift, shift);
  Tensor to_head = part_of(out, d, shift, n - shift), to_tail = part_of(out, d, 0, shift);
  dense_copy(&head, &to_head, call->accumulate & 1);
  dense_copy(&tail, &to_tail, call->accumulate & 1);
}

// Rows of the last dimension keep the columns [from, to); the rest is zero.
static void triangle(const KernelCall *call, bool lower) {
  const Tensor *x = call->in[0], *out = call->out[0];
  bool adds = call->accumulate & 1;
  if (tensor_numel(x) == 0) return;
  int r = x->ndim - 2, c = x->ndim - 1;
  int64_t rows = x->shape[r], columns = x->shape[c], diagonal = call->args->v[0].i;
  if (!adds) memset(tensor_data(out), 0, (size_t)tensor_numel(out) * dtype_size(out->dtype));
  for (int64_t row = 0; row < rows; row++) { // all matrices at once
    int64_t edge = row + diagonal + (lower ? 1 : 0);
    edge = edge < 0 ? 0 : edge > columns ? columns : edge;
    int64_t from = lower ? 0 : edge, n = lower ? edge : columns - edge;
    Tensor from_row = part_of(x, r, row, 1), to_row = part_of(out, r, row, 1);
    Tensor a = part_of(&from_row, c, from, n), b = part_of(&to_row, c, from, n);
    dense_copy(&a, &b, adds);
  }
}
void cpu_tril(const KernelCall *call) { triangle(call, true); }
void cpu_triu(const KernelCall *call) { triangle(call, false); }

void cpu_masked_fill(const KernelCall *call) {
  uint64_t value;
  Storage memory = {0};
  Tensor scalar = constant(call->in[0], call->args->v[0].f, &memory, &value);
  Tensor *in[] = {call->in[1], &scalar, call->in[0]};
  KernelCall where = *call;
  where.n_in = 3;
  where.in = in;
  cpu_where(&where);
}
