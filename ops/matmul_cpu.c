// matmul_cpu - matrix products on the CPU, by ops/kernels/gemm.
#include "ops/kernels/kernels.h"
#include "ops/matmul.h"
#include "ops/ops.h"
#include "ops/rows.h"

#include <assert.h>
#include <string.h>

// A matrix operand: where it begins, how its rows lie, and the strides of its leading dimensions.
typedef struct Matrix {
  const char *data;
  size_t width; // bytes an element
  bool trans, bf16;
  int64_t ld;
  int64_t lead[MAX_DIMS]; // by the result's leading dimensions; 0 where broadcast
} Matrix;

// Reads a tensor of any rank as a matrix; n_lead leading dimensions of the result.
static Matrix read_matrix(const Tensor *t, bool vector_is_row, int n_lead) {
  Matrix m = {.data = tensor_data(t), .width = dtype_size(t->dtype), .bf16 = t->dtype == DT_BF16};
  int own = t->ndim > 2 ? t->ndim - 2 : 0;
  for (int d = 0; d < n_lead; d++) {
    int from = d - (n_lead - own);
    m.lead[d] = from < 0 || t->shape[from] == 1 ? 0 : t->stride[from];
  }
  if (t->ndim == 1) { // [1,K] or [K,1]
    m.ld = vector_is_row ? t->shape[0] : 1;
    return m;
  }
  int64_t rows = t->shape[t->ndim - 2], columns = t->shape[t->ndim - 1];
  int64_t down = t->stride[t->ndim - 2], along = t->stride[t->ndim - 1];
  m.trans = !(along == 1 && (down >= columns || rows == 1)); // see matrix_like in core/op.c
  m.ld = m.trans ? along : down;
  int64_t least = m.trans ? rows : columns;
  if (m.ld < least) m.ld = least; // one row only: any stride will do
  return m;
}

// out = c, or out += c, for a bf16 result that was computed in f32.
static void narrow_result(Tensor *out, float *c, bool accumulate) {
  uint16_t *to = tensor_data(out);
  int64_t n = tensor_numel(out);
  if (accumulate) {
    enum { CHUNK = 1024 };
    float old[CHUNK];
    for (int64_t at = 0; at < n; at += CHUNK) {
      int64_t m = n - at < CHUNK ? n - at : CHUNK;
      cpu_kernels()->widen(old, to + at, m);
      for (int64_t i = 0; i < m; i++) c[at + i] += old[i];
    }
  }
  cpu_kernels()->narrow(to, c, n);
}

static void run_gemm(const Gemm *gemm, bool is_f64) {
  if (is_f64)
    gemm_f64(gemm);
  else
    gemm_f32(gemm);
}

void cpu_matmul(const KernelCall *call) {
  const Tensor *a = call->in[0], *b = call->in[1], *out = call->out[0];
  int n_lead = out->ndim - (a->ndim > 1) - (b->ndim > 1);
  Matrix ma = read_matrix(a, true, n_lead), mb = read_matrix(b, false, n_lead);
  Gemm gemm = {.m = a->ndim > 1 ? a->shape[a->ndim - 2] : 1,
               .n = b->ndim > 1 ? b->shape[b->ndim - 1] : 1,
               .k = a->shape[a->ndim - 1],
               .trans_a = ma.trans,
               .trans_b = mb.trans,
               .bf16_a = ma.bf16,
               .bf16_b = mb.bf16,
               .lda = ma.ld,
               .ldb = mb.ld,
               .alpha = 1,
               .beta = call->accumulate & 1 ? 1 : 0};
  gemm.ldc = gemm.n;
  if (tensor_numel(out) == 0) return;
  bool rows_fold = !ma.trans && n_lead > 0; // a[.., M, K] b[K, N]: one tall product
  for (int d = 0; d < n_lead; d++) {
    if (mb.lead[d] != 0) rows_fold = false;
    int64_t below = d == n_lead - 1 ? gemm.m * gemm.lda : ma.lead[d + 1] * out->shape[d + 1];
    if (ma.lead[d] != below) rows_fold = false;
  }
  int64_t lead = 1;
  for (int d = 0; d < n_lead; d++) lead *= out->shape[d];
  int inner = n_lead - 1; // the last leading dimension goes to the batched kernel
  if (rows_fold) {
    gemm.m *= lead;
    lead = 1;
  } else if (n_lead > 0) {
    gemm.batch = out->shape[inner];
    gemm.stride_a = ma.lead[inner];
    gemm.stride_b = mb.lead[inner];
    gemm.stride_c = gemm.m * gemm.n;
    lead /= gemm.batch;
  }
  bool narrow = out->dtype == DT_BF16; // computed in f32, in the workspace
  char *c = narrow ? call->workspace : tensor_data(out);
  size_t step = (size_t)(gemm.m * gemm.n * (gemm.batch ? gemm.batch : 1)) *
                (narrow ? sizeof(float) : dtype_size(out->dtype));
  if (narrow) gemm.beta = 0;
  for (int64_t i = 0; i < lead; i++) {
    int64_t rest = i, at_a = 0, at_b = 0;
    for (int d = inner - 1; d >= 0; d--) {
      at_a += rest % out->shape[d] * ma.lead[d];
      at_b += rest % out->shape[d] * mb.lead[d];
      rest /= out->shape[d];
    }
    gemm.a = ma.data + at_a * (int64_t)ma.width;
    gemm.b = mb.data + at_b * (int64_t)mb.width;
    gemm.c = c + (size_t)i * step;
    run_gemm(&gemm, out->dtype == DT_F64);
  }
  if (narrow) narrow_result(call->out[0], call->workspace, call->accumulate & 1);
}

int64_t matmul_workspace(const OpCall *call) {
  return call->out[0].dtype == DT_BF16 ? (int64_t)sizeof(float) * spec_numel(&call->out[0]) : 0;
}

int64_t linear_workspace(const OpCall *call) {
  if (call->out[0].dtype != DT_BF16) return 0;
  return (int64_t)sizeof(float) *
         (spec_numel(&call->out[0]) * (1 + call->n_saved) + call->in[1]->shape[0]);
}

void cpu_linear(const KernelCall *call) {
  const Tensor *x = call->in[0], *w = call->in[1];
  const Tensor *bias = call->n_in > 2 ? call->in[2] : NULL;
  Tensor *out = call->out[0], *z = call->n_out > 1 ? call->out[1] : NULL;
  bool narrow = out->dtype == DT_BF16;
  Gemm gemm = {.m = 1,
               .n = w->shape[0],
               .k = w->shape[1],
               .trans_b = true,
               .bf16_a = narrow,
               .bf16_b = narrow,
               .a = tensor_data(x),
               .b = tensor_data(w),
               .c = tensor_data(out),
               .lda = w->shape[1],
               .ldb = w->shape[1],
               .ldc = w->shape[0],
               .alpha = 1,
               .bias = bias ? tensor_data(bias) : NULL,
               .act = (Activation)call->args->v[0].i,
               .preact = z ? tensor_data(z) : NULL};
  for (int d = 0; d < x->ndim - 1; d++) gemm.m *= x->shape[d];
  if (gemm.m == 0 || gemm.n == 0) return;
  if (narrow) {
    float *c = call->workspace;
    int64_t n = gemm.m * gemm.n;
    gemm.c = c;
    if (z) gemm.preact = c + n;
    if (bias) {
      float *wide = c + n * (z ? 2 : 1);
      cpu_kernels()->widen(wide, tensor_data(bias), gemm.n);
      gemm.bias = wide;
    }
  }
  run_gemm(&gemm, out->dtype == DT_F64);
  if (narrow) {
    narrow_result(out, gemm.c, false);
    if (z) narrow_result(z, gemm.preact, false);
  }
}
