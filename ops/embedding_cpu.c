// embedding_cpu - rows of a table on the CPU; dropout by ops/kernels.
#include "ops/kernels/kernels.h"
#include "ops/kernels/threads.h"
#include "ops/ops.h"
#include "ops/rows.h"
#include "ops/stage.h"

#include <string.h>

enum { ROW_GRAIN = 64, COLUMN_GRAIN = 64 };

typedef struct Gather {
  const char *table;
  char *out;
  const int64_t *ids;
  size_t row_bytes;
} Gather;

static void gather_rows(void *context, int64_t begin, int64_t end) {
  const Gather *g = context;
  for (int64_t r = begin; r < end; r++)
    memcpy(g->out + (size_t)r * g->row_bytes, g->table + (size_t)g->ids[r] * g->row_bytes,
           g->row_bytes);
}

void cpu_embedding(const KernelCall *call) {
  const Tensor *w = call->in[0], *ids = call->in[1];
  Gather g = {tensor_data(w), tensor_data(call->out[0]), tensor_data(ids),
              (size_t)w->shape[1] * dtype_size(w->dtype)};
  parallel_for(tensor_numel(ids), ROW_GRAIN, gather_rows, &g);
}

typedef struct Scatter {
  const void *dy;
  void *out;
  const int64_t *ids;
  int64_t n, rows, columns;
  DType from, to;
  bool accumulate;
} Scatter;

static float widen1(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

static double element(const void *p, DType dtype, int64_t at) {
  if (dtype == DT_F32) return (double)((const float *)p)[at];
  if (dtype == DT_F64) return ((const double *)p)[at];
  return (double)widen1(((const uint16_t *)p)[at]);
}

// Columns [begin, end) of all rows, in the order of the ids: threads never meet.
static void scatter_columns(void *context, int64_t begin, int64_t end) {
  const Scatter *s = context;
  size_t width = dtype_size(s->to);
  if (!s->accumulate)
    for (int64_t r = 0; r < s->rows; r++)
      memset((char *)s->out + (size_t)(r * s->columns + begin) * width, 0,
             (size_t)(end - begin) * width);
  for (int64_t i = 0; i < s->n; i++) {
    int64_t to = s->ids[i] * s->columns, from = i * s->columns;
    if (s->from == DT_F32 && s->to == DT_F32) {
      float *out = (float *)s->out + to;
      const float *dy = (const float *)s->dy + from;
      for (int64_t c = begin; c < end; c++) out[c] += dy[c];
    } else if (s->to == DT_F32) {
      float *out = (float *)s->out + to;
      for (int64_t c = begin; c < end; c++) out[c] += (float)element(s->dy, s->from, from + c);
    } else {
      double *out = (double *)s->out + to;
      for (int64_t c = begin; c < end; c++) out[c] += element(s->dy, s->from, from + c);
    }
  }
}

// out[rows, C] is f32 or f64; a bf16 result goes through the workspace.
void cpu_embedding_bwd(const KernelCall *call) {
  const Tensor *dy = call->in[0], *ids = call->in[1];
  Tensor *out = call->out[0];
  Stage stage = stage_begin(call);
  bool accumulate = call->accumulate & 1;
  Scatter s = {.dy = tensor_data(dy),
               .ids = tensor_data(ids),
               .n = tensor_numel(ids),
               .rows = out->shape[0],
               .columns = out->shape[1],
               .from = dy->dtype,
               .to = out->dtype == DT_F64 ? DT_F64 : DT_F32,
               .accumulate = accumulate};
  s.out = stage_out(&stage, out, accumulate);
  parallel_for(s.columns, COLUMN_GRAIN, scatter_columns, &s);
  stage_end(&stage);
}

void cpu_dropout(const KernelCall *call) {
  const Tensor *x = call->in[0];
  const OpArgs *args = call->args;
  if (tensor_numel(x) == 0) return;
  Stage stage = stage_begin(call);
  Dropout dropout = {.samples = args->v[3].i,
                     .elements = tensor_numel(x) / args->v[3].i,
                     .p = args->v[0].f,
                     .key = (uint64_t)args->v[1].i,
                     .first_sample = args->v[2].i,
                     .step = args->v[4].i,
                     .accumulate = call->accumulate & 1};
  dropout.x = stage_in(&stage, x);
  dropout.y = stage_out(&stage, call->out[0], dropout.accumulate);
  if (is_f64(x))
    cpu_kernels()->dropout_f64(&dropout);
  else
    cpu_kernels()->dropout_f32(&dropout);
  stage_end(&stage);
}
