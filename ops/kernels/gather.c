// gather - copies by index run over targets; sums are cut by columns, so that one thread alone adds
// to an element, in the order of the indices.
#include "ops/kernels/gather.h"

#include "ops/kernels/threads.h"

#include <string.h>

enum { COPY_WORK = 65536, STRIP = 64 }; // bytes a block, columns a task

typedef struct Index {
  char *out;
  const char *a;
  const int64_t *index;
  int64_t outer, size, n, inner;
  int64_t element; // bytes
  bool accumulate;
  int64_t n_strips, first;
} Index;

// The row of an index in a table that begins at x->first; -1: it is not there.
static inline int64_t row_of(const Index *x, int64_t j) {
  uint64_t row = (uint64_t)x->index[j] - (uint64_t)x->first;
  return row < (uint64_t)x->size ? (int64_t)row : -1;
}

static void gather_row_items(void *context, int64_t begin, int64_t end) {
  const Index *x = context;
  int64_t bytes = x->inner * x->element;
  for (int64_t at = begin; at < end; at++) {
    int64_t o = at / x->n, row = row_of(x, at % x->n);
    if (row >= 0)
      memcpy(x->out + at * bytes, x->a + (o * x->size + row) * bytes, (size_t)bytes);
    else
      memset(x->out + at * bytes, 0, (size_t)bytes);
  }
}

void gather_rows(void *out, const void *a, const int64_t *index, int64_t outer, int64_t size,
                 int64_t n, int64_t inner, size_t element) {
  Index x = {out, a, index, outer, size, n, inner, (int64_t)element, false, 0, 0};
  parallel_for(outer * n, COPY_WORK / (inner * x.element + 1) + 1, gather_row_items, &x);
}

void gather_part(void *out, const void *a, const int64_t *index, int64_t first, int64_t size,
                 int64_t n, int64_t inner, size_t element) {
  Index x = {out, a, index, 1, size, n, inner, (int64_t)element, false, 0, first};
  parallel_for(n, COPY_WORK / (inner * x.element + 1) + 1, gather_row_items, &x);
}

static void gather_element_items(void *context, int64_t begin, int64_t end) {
  const Index *x = context;
  for (int64_t at = begin; at < end; at++) {
    int64_t o = at / (x->n * x->inner), i = at % x->inner;
    memcpy(x->out + at * x->element,
           x->a + ((o * x->size + x->index[at]) * x->inner + i) * x->element, (size_t)x->element);
  }
}

void gather_elements(void *out, const void *a, const int64_t *index, int64_t outer, int64_t size,
                     int64_t n, int64_t inner, size_t element) {
  Index x = {out, a, index, outer, size, n, inner, (int64_t)element, false, 0, 0};
  parallel_for(outer * n * inner, COPY_WORK / 16, gather_element_items, &x);
}

// A task of a sum: one entry of outer, STRIP columns of inner.
static int64_t strip_of(const Index *x, int64_t task, int64_t *o, int64_t *column) {
  *o = task / x->n_strips;
  *column = task % x->n_strips * STRIP;
  return x->inner - *column < STRIP ? x->inner - *column : STRIP;
}

static void clear_strip(const Index *x, int64_t o, int64_t column, int64_t width) {
  if (x->accumulate) return;
  for (int64_t s = 0; s < x->size; s++)
    memset(x->out + ((o * x->size + s) * x->inner + column) * x->element, 0,
           (size_t)(width * x->element));
}

#define SCATTER(R, T)                                                                              \
  static void scatter_row_tasks_##R(void *context, int64_t begin, int64_t end) {                   \
    const Index *x = context;                                                                      \
    for (int64_t task = begin; task < end; task++) {                                               \
      int64_t o, column, width = strip_of(x, task, &o, &column);                                   \
      clear_strip(x, o, column, width);                                                            \
      for (int64_t j = 0; j < x->n; j++) {                                                         \
        int64_t row = row_of(x, j);                                                                \
        if (row < 0) continue;                                                                     \
        T *restrict to = (T *)(void *)x->out + (o * x->size + row) * x->inner + column;            \
        const T *from = (const T *)(const void *)x->a + (o * x->n + j) * x->inner + column;        \
        for (int64_t i = 0; i < width; i++) to[i] += from[i];                                      \
      }                                                                                            \
    }                                                                                              \
  }                                                                                                \
  static void scatter_element_tasks_##R(void *context, int64_t begin, int64_t end) {               \
    const Index *x = context;                                                                      \
    for (int64_t task = begin; task < end; task++) {                                               \
      int64_t o, column, width = strip_of(x, task, &o, &column);                                   \
      clear_strip(x, o, column, width);                                                            \
      for (int64_t j = 0; j < x->n; j++) {                                                         \
        int64_t at = (o * x->n + j) * x->inner + column;                                           \
        const T *from = (const T *)(const void *)x->a + at;                                        \
        T *to = (T *)(void *)x->out + o * x->size * x->inner + column;                             \
        for (int64_t i = 0; i < width; i++) to[x->index[at + i] * x->inner + i] += from[i];        \
      }                                                                                            \
    }                                                                                              \
  }                                                                                                \
  void scatter_rows_##R(T *out, const T *a, const int64_t *index, int64_t outer, int64_t size,     \
                        int64_t n, int64_t inner, bool accumulate) {                               \
    Index x = {(char *)out,                                                                        \
               (const char *)a,                                                                    \
               index,                                                                              \
               outer,                                                                              \
               size,                                                                               \
               n,                                                                                  \
               inner,                                                                              \
               sizeof(T),                                                                          \
               accumulate,                                                                         \
               (inner + STRIP - 1) / STRIP,                                                        \
               0};                                                                                 \
    parallel_for(outer *x.n_strips, COPY_WORK / ((n + size) * STRIP + 1) + 1,                      \
                 scatter_row_tasks_##R, &x);                                                       \
  }                                                                                                \
  void scatter_part_##R(T *out, const T *a, const int64_t *index, int64_t first, int64_t size,     \
                        int64_t n, int64_t inner, bool accumulate) {                               \
    Index x = {(char *)out, (const char *)a, index,     1,          size,                          \
               n,           inner,           sizeof(T), accumulate, (inner + STRIP - 1) / STRIP,   \
               first};                                                                             \
    parallel_for(x.n_strips, COPY_WORK / ((n + size) * STRIP + 1) + 1, scatter_row_tasks_##R, &x); \
  }                                                                                                \
  void scatter_elements_##R(T *out, const T *a, const int64_t *index, int64_t outer, int64_t size, \
                            int64_t n, int64_t inner, bool accumulate) {                           \
    Index x = {(char *)out,                                                                        \
               (const char *)a,                                                                    \
               index,                                                                              \
               outer,                                                                              \
               size,                                                                               \
               n,                                                                                  \
               inner,                                                                              \
               sizeof(T),                                                                          \
               accumulate,                                                                         \
               (inner + STRIP - 1) / STRIP,                                                        \
               0};                                                                                 \
    parallel_for(outer *x.n_strips, COPY_WORK / ((n + size) * STRIP + 1) + 1,                      \
                 scatter_element_tasks_##R, &x);                                                   \
  }
SCATTER(f32, float)
SCATTER(f64, double)
