// gemm_onednn - BLAS=onednn: f32 products by oneDNN's dnnl_sgemm, one thread a call.
#include "ops/kernels/gemm_library.inc"

#include <omp.h>
#include <oneapi/dnnl/dnnl.h>

static void library_begin(void) { omp_set_num_threads(1); } // of this thread: the pool is ours

static void library_sgemm(const Gemm *g, const float *a, const float *b, float *c, int64_t m) {
  dnnl_sgemm(g->trans_a ? 'T' : 'N', g->trans_b ? 'T' : 'N', m, g->n, g->k, (float)g->alpha, a,
             g->lda, b, g->ldb, (float)g->beta, c, g->ldc);
}

const char *gemm_library(void) { return "onednn"; }
void gemm_f32(const Gemm *gemm) { gemm_by_library(gemm, library_begin, library_sgemm); }
void gemm_f64(const Gemm *gemm) { cpu_kernels()->gemm_f64(gemm); }
