// dense_cpu - see the header. Scratch is shown to the element-wise copy as a tensor of its own.
#include "ops/dense_cpu.h"

#include "ops/rows.h"

#include <string.h>

void dense_copy(const Tensor *from, Tensor *to, bool accumulate) {
  OpArgs none = {.n_list = -1};
  Tensor view = *from, *in[] = {&view}, *out[] = {to};
  KernelCall call = {
      .args = &none, .n_in = 1, .n_out = 1, .in = in, .out = out, .accumulate = accumulate};
  cpu_cast(&call);
}

// A row-major tensor over `memory` with t's shape.
static Tensor scratch_like(const Tensor *t, DType dtype, Storage *memory) {
  TensorSpec spec;
  tensor_spec(t, &spec);
  spec_row_major(&spec);
  Tensor scratch = {.dtype = dtype, .ndim = t->ndim, .storage = memory};
  for (int d = 0; d < t->ndim; d++) {
    scratch.shape[d] = spec.shape[d];
    scratch.stride[d] = spec.stride[d];
  }
  return scratch;
}

void dense_read(const Tensor *t, const int *order, DType dtype, void *to) {
  Tensor view = *t;
  for (int d = 0; order && d < t->ndim; d++) {
    view.shape[d] = t->shape[order[d]];
    view.stride[d] = t->stride[order[d]];
  }
  Storage memory = {.data = to};
  Tensor scratch = scratch_like(&view, dtype, &memory);
  dense_copy(&view, &scratch, false);
}

void dense_write(Tensor *t, DType dtype, const void *from, bool accumulate) {
  Storage memory = {0};
  memcpy(&memory.data, &from, sizeof from); // only read
  Tensor scratch = scratch_like(t, dtype, &memory);
  dense_copy(&scratch, t, accumulate);
}
