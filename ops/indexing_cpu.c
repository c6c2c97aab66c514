// indexing_cpu - gather, scatter and sorting on the CPU. Inputs are row-major (the rows say so) and
// the indices have been checked.
#include "ops/dense_cpu.h"
#include "ops/kernels/gather.h"
#include "ops/kernels/threads.h"
#include "ops/movement.h"
#include "ops/rows.h"

#include <string.h>

// x as [outer, size, inner] around dimension d.
typedef struct Around {
  int64_t outer, size, inner;
} Around;

static Around around(const Tensor *t, int d) {
  Around a = {1, t->shape[d], 1};
  for (int k = 0; k < d; k++) a.outer *= t->shape[k];
  for (int k = d + 1; k < t->ndim; k++) a.inner *= t->shape[k];
  return a;
}

// t cut to the sizes of `like` in all dimensions but d.
static Tensor cut_to(const Tensor *t, const Tensor *like, int d) {
  Tensor cut = *t;
  for (int k = 0; k < t->ndim; k++)
    if (k != d) cut.shape[k] = like->shape[k];
  return cut;
}

// The indices as i64: where they lie, or in the scratch, which is moved on.
static const int64_t *read_index(const Tensor *index, char **scratch) {
  if (index->dtype == DT_I64 && tensor_contiguous(index)) return tensor_data(index);
  int64_t *copy = (int64_t *)(void *)*scratch;
  dense_read(index, NULL, DT_I64, copy);
  *scratch += dense_bytes(tensor_numel(index), DT_I64);
  return copy;
}

static int64_t index_bytes(const Tensor *index) { return dense_bytes(tensor_numel(index), DT_I64); }

// ---- gather
int64_t gather_workspace(const OpCall *call) {
  const Tensor *x = call->in[0], *index = call->in[1];
  if (index->ndim != x->ndim) return index_bytes(index); // index_select of a matrix, say
  Tensor cut = cut_to(x, index, (int)call->args.v[0].i);
  return index_bytes(index) +
         (tensor_contiguous(&cut) ? 0 : dense_bytes(tensor_numel(&cut), x->dtype));
}

typedef struct Gather {
  const char *a;
  const int64_t *at;
  Around from, to;
  size_t element; // bytes
  bool rows;      // one index a row, not one an element
} Gather;

// The address of what element `place` of the result is.
static const char *gather_source(const Gather *g, int64_t place) {
  int64_t i = place % g->to.inner, j = place / g->to.inner % g->to.size;
  int64_t o = place / (g->to.inner * g->to.size), row = g->at[g->rows ? j : place];
  return g->a + (size_t)((o * g->from.size + row) * g->from.inner + i) * g->element;
}

// Adds to the result, or writes one of another dtype: chunk by chunk.
static void gather_chunks(const Gather *g, DType dtype, Tensor *out, bool adds) {
  enum { CHUNK = 512 };
  double chunk[CHUNK]; // as wide as any element
  int64_t numel = tensor_numel(out);
  for (int64_t at = 0; at < numel; at += CHUNK) {
    int64_t n = numel - at < CHUNK ? numel - at : CHUNK;
    for (int64_t i = 0; i < n; i++)
      memcpy((char *)chunk + (size_t)i * g->element, gather_source(g, at + i), g->element);
    Tensor part = *out;
    part.ndim = 1;
    part.shape[0] = n;
    part.stride[0] = 1;
    part.offset += at;
    dense_write(&part, dtype, chunk, adds);
  }
}

static void gather(const KernelCall *call, bool rows) {
  const Tensor *x = call->in[0], *index = call->in[1];
  Tensor *out = call->out[0];
  if (tensor_numel(out) == 0) return;
  int d = (int)call->args->v[0].i;
  char *scratch = call->workspace;
  Tensor cut = rows ? *x : cut_to(x, index, d);
  Gather g = {tensor_data(x), read_index(index, &scratch), around(&cut, d),
              around(out, d), dtype_size(x->dtype),        rows};
  if (!tensor_contiguous(&cut)) {
    dense_read(&cut, NULL, x->dtype, scratch);
    g.a = scratch;
  }
  bool adds = call->accumulate & 1;
  if (adds || out->dtype != x->dtype)
    gather_chunks(&g, x->dtype, out, adds);
  else if (rows)
    gather_rows(tensor_data(out), g.a, g.at, g.from.outer, g.from.size, g.to.size, g.from.inner,
                g.element);
  else
    gather_elements(tensor_data(out), g.a, g.at, g.from.outer, g.from.size, g.to.size, g.from.inner,
                    g.element);
}
void cpu_gather(const KernelCall *call) { gather(call, false); }
void cpu_index_select(const KernelCall *call) { gather(call, true); }

// ---- scatter
// What sums are made in.
static DType sum_type(DType dtype) {
  return dtype == DT_F64 ? DT_F64 : dtype_is_float(dtype) ? DT_F32 : DT_I64;
}

int64_t scatter_workspace(const OpCall *call, int64_t result_numel) {
  const Tensor *source = call->in[call->n_in - 1 == 2 ? 2 : 0];
  DType dtype = sum_type(source->dtype);
  return index_bytes(call->in[1]) + dense_bytes(tensor_numel(source), dtype) +
         dense_bytes(result_numel, dtype);
}

static void scatter_i64(int64_t *out, const int64_t *a, const int64_t *at, Around to, int64_t n,
                        bool rows) {
  for (int64_t place = 0; place < to.outer * n * to.inner; place++) {
    int64_t i = place % to.inner, j = place / to.inner % n, o = place / (to.inner * n);
    int64_t *sum = out + (o * to.size + at[rows ? j : place]) * to.inner + i;
    *sum = (int64_t)((uint64_t)*sum + (uint64_t)a[place]);
  }
}

static void scatter_run(void *out, DType dtype, const void *a, const int64_t *at, Around to,
                        int64_t n, bool rows, bool adds) {
  if (dtype == DT_I64) {
    if (!adds) memset(out, 0, (size_t)(to.outer * to.size * to.inner) * sizeof(int64_t));
    scatter_i64(out, a, at, to, n, rows);
  } else if (dtype == DT_F64) {
    (rows ? scatter_rows_f64 : scatter_elements_f64)(out, a, at, to.outer, to.size, n, to.inner,
                                                     adds);
  } else {
    (rows ? scatter_rows_f32 : scatter_elements_f32)(out, a, at, to.outer, to.size, n, to.inner,
                                                     adds);
  }
}

// out (+)= source at its indices; straight into the result, or by way of scratch where it is of a
// narrower type or only a part of it is indexed.
static void scatter(const KernelCall *call, const Tensor *source, bool rows, bool adds) {
  const Tensor *index = call->in[1];
  Tensor *out = call->out[0];
  if (tensor_numel(out) == 0) return;
  int d = (int)call->args->v[0].i;
  char *scratch = call->workspace;
  const int64_t *at = read_index(index, &scratch);
  DType dtype = sum_type(source->dtype);
  const void *a = tensor_data(source);
  if (source->dtype != dtype) {
    dense_read(source, NULL, dtype, scratch);
    a = scratch;
    scratch += dense_bytes(tensor_numel(source), dtype);
  }
  Tensor cut = rows ? *out : cut_to(out, index, d);
  Around to = around(&cut, d), from = around(source, d);
  if (out->dtype == dtype && tensor_contiguous(&cut)) {
    if (!adds && tensor_numel(&cut) < tensor_numel(out))
      memset(tensor_data(out), 0, (size_t)tensor_numel(out) * dtype_size(dtype));
    scatter_run(tensor_data(out), dtype, a, at, to, from.size, rows, adds);
    return;
  }
  scatter_run(scratch, dtype, a, at, to, from.size, rows, false);
  if (!adds) memset(tensor_data(out), 0, (size_t)tensor_numel(out) * dtype_size(out->dtype));
  dense_write(&cut, dtype, scratch, adds);
}
void cpu_gather_bwd(const KernelCall *call) {
  scatter(call, call->in[0], false, call->accumulate & 1);
}
void cpu_index_select_bwd(const KernelCall *call) {
  scatter(call, call->in[0], true, call->accumulate & 1);
}

void cpu_scatter_add(const KernelCall *call) {
  dense_copy(call->in[0], call->out[0], call->accumulate & 1);
  scatter(call, call->in[2], false, true);
}

// ---- one_hot
void cpu_one_hot(const KernelCall *call) {
  const Tensor *x = call->in[0];
  int64_t n = tensor_numel(x), classes = call->args->v[0].i, *out = tensor_data(call->out[0]);
  if (!(call->accumulate & 1)) memset(out, 0, (size_t)(n * classes) * sizeof *out);
  for (int64_t i = 0; i < n; i++) {
    Tensor one = *x;
    one.ndim = 0;
    one.offset += i;
    int64_t label;
    dense_read(&one, NULL, DT_I64, &label);
    out[i * classes + label]++;
  }
}

// ---- sorting
typedef struct Item {
  int64_t key, index;
} Item;

int64_t sort_workspace(int64_t line) {
  return dense_bytes(line, DT_F64) + 2 * line * (int64_t)sizeof(Item);
}

// A real number as an integer of the same order: NaN above all, -0 equal to 0.
static int64_t ordered(double value) {
  if (value != value) return INT64_MAX;
  value += 0.0;
  int64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits < 0 ? bits ^ INT64_MAX : bits;
}

// Merge sort, stable; the result is in a, b is scratch of the same size.
static void sort_items(Item *a, Item *b, int64_t n) {
  Item *from = a, *to = b;
  for (int64_t width = 1; width < n; width *= 2) {
    for (int64_t start = 0; start < n; start += 2 * width) {
      int64_t middle = start + width < n ? start + width : n;
      int64_t end = start + 2 * width < n ? start + 2 * width : n;
      int64_t left = start, right = middle;
      for (int64_t k = start; k < end; k++)
        to[k] = left < middle && (right >= end || from[left].key <= from[right].key)
                    ? from[left++]
                    : from[right++];
    }
    Item *swap = from;
    from = to, to = swap;
  }
  if (from != a) memcpy(a, from, (size_t)n * sizeof *a);
}

// Reads a line and sorts it: the items, first to last.
static const Item *sorted_line(const KernelCall *call, const Tensor *line, bool descending) {
  int64_t n = line->shape[0];
  int64_t *keys = call->workspace;
  Item *items = (Item *)(void *)((char *)call->workspace + dense_bytes(n, DT_F64));
  bool real = dtype_is_float(line->dtype);
  dense_read(line, NULL, real ? DT_F64 : DT_I64, keys);
  for (int64_t i = 0; i < n; i++) {
    int64_t key = keys[i];
    if (real) {
      double value;
      memcpy(&value, &key, sizeof value);
      key = ordered(value);
    }
    items[i] = (Item){descending ? ~key : key, i};
  }
  sort_items(items, items + n, n);
  return items;
}

// Line `at` along dimension d, as a 1-d view.
static Tensor line_of(const Tensor *t, int d, int64_t at) {
  Tensor line = *t;
  for (int k = t->ndim - 1; k >= 0; k--) {
    if (k == d) continue;
    line.offset += at % t->shape[k] * t->stride[k];
    at /= t->shape[k];
  }
  line.ndim = 1;
  line.shape[0] = t->shape[d];
  line.stride[0] = t->stride[d];
  return line;
}

// values (may be NULL) and positions of the first elements of each sorted line.
static void sort_lines(const KernelCall *call, int d, bool descending, Tensor *values,
                       Tensor *positions) {
  const Tensor *x = call->in[0];
  if (tensor_numel(positions) == 0) return;
  int64_t k = positions->shape[d], lines = tensor_numel(positions) / k;
  bool adds = values && (call->accumulate & 1);
  size_t element = dtype_size(x->dtype);
  for (int64_t at = 0; at < lines; at++) {
    Tensor line = line_of(x, d, at), order = line_of(positions, d, at);
    const Item *items = sorted_line(call, &line, descending);
    int64_t *indices = tensor_data(&order);
    for (int64_t i = 0; i < k; i++) indices[i * order.stride[0]] = items[i].index;
    if (!values) continue;
    Tensor result = line_of(values, d, at);
    for (int64_t i = 0; i < k; i++) {
      Tensor from = part_of(&line, 0, items[i].index, 1), to = part_of(&result, 0, i, 1);
      if (adds || to.dtype != from.dtype)
        dense_copy(&from, &to, adds);
      else
        memcpy(tensor_data(&to), tensor_data(&from), element);
    }
  }
}
void cpu_sort(const KernelCall *call) {
  sort_lines(call, (int)call->args->v[0].i, call->args->v[1].i, call->out[0], call->out[1]);
}
void cpu_argsort(const KernelCall *call) {
  sort_lines(call, (int)call->args->v[0].i, call->args->v[1].i, NULL, call->out[0]);
}
void cpu_topk(const KernelCall *call) {
  sort_lines(call, (int)call->args->v[1].i, call->args->v[2].i, call->out[0], call->out[1]);
}
