// gemm_openblas - BLAS=openblas: f32 products by OpenBLAS's cblas_sgemm, one thread a call.
#include "ops/kernels/gemm_library.inc"

#include <cblas.h>

static void library_begin(void) { openblas_set_num_threads(1); } // the pool is ours

static void library_sgemm(const Gemm *g, const float *a, const float *b, float *c, int64_t m) {
  cblas_sgemm(CblasRowMajor, g->trans_a ? CblasTrans : CblasNoTrans,
              g->trans_b ? CblasTrans : CblasNoTrans, (blasint)m, (blasint)g->n, (blasint)g->k,
              (float)g->alpha, a, (blasint)g->lda, b, (blasint)g->ldb, (float)g->beta, c,
              (blasint)g->ldc);
}

const char *gemm_library(void) { return "openblas"; }
void gemm_f32(const Gemm *gemm) { gemm_by_library(gemm, library_begin, library_sgemm); }
void gemm_f64(const Gemm *gemm) { cpu_kernels()->gemm_f64(gemm); }
