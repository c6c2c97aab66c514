// gemm_library - what the variants of gemm_f32 over a BLAS library share: rows are cut into blocks
// of a size that does not depend on threads, the library runs serially in each, bias and activation
// follow.
//
// bf16 operands and products of batches that repeat an operand stay with our own kernel.
#ifndef RILLE_OPS_KERNELS_GEMM_LIBRARY_H
#define RILLE_OPS_KERNELS_GEMM_LIBRARY_H

#include "ops/kernels/kernels.h"
#include "ops/kernels/threads.h"

#include <string.h>

enum { LIBRARY_ROWS = 256 };

// c[m, n] = alpha op(a) op(b) + beta c for m rows, with g's other sizes.
typedef void (*LibrarySgemm)(const Gemm *g, const float *a, const float *b, float *c, int64_t m);

typedef struct LibraryJob {
  const Gemm *gemm;
  void (*begin)(void);
  LibrarySgemm sgemm;
  int64_t blocks; // of rows, a product
} LibraryJob;

static inline UnaryFn library_activation(Activation act) {
  switch (act) {
  case ACT_RELU: return UNARY_relu;
  case ACT_GELU: return UNARY_gelu;
  case ACT_GELU_TANH: return UNARY_gelu_tanh;
  case ACT_SILU: return UNARY_silu;
  case ACT_NONE: break;
  }
  return UNARY_copy;
}

// Bias, the value before the activation, and the activation, on m finished rows at `at` in c.
static inline void library_finish(const Gemm *g, int64_t at, int64_t m) {
  const CpuKernels *k = cpu_kernels();
  for (int64_t i = 0; i < m; i++) {
    float *row = (float *)g->c + at + i * g->ldc;
    if (g->bias) k->binary_f32(BINARY_add, row, row, g->bias, g->n);
    if (g->preact) memcpy((float *)g->preact + at + i * g->ldc, row, (size_t)g->n * sizeof *row);
    if (g->act != ACT_NONE) k->unary_f32(library_activation(g->act), row, row, g->n, 0, 0);
  }
}

static inline void library_blocks(void *context, int64_t begin, int64_t end) {
  const LibraryJob *job = context;
  const Gemm *g = job->gemm;
  job->begin();
  for (int64_t i = begin; i < end; i++) {
    int64_t product = i / job->blocks, row = i % job->blocks * LIBRARY_ROWS;
    int64_t m = g->m - row < LIBRARY_ROWS ? g->m - row : LIBRARY_ROWS;
    const float *a = (const float *)g->a + product * g->stride_a;
    const float *b = (const float *)g->b + product * g->stride_b;
    int64_t at = product * g->stride_c + row * g->ldc;
    job->sgemm(g, a + (g->trans_a ? row : row * g->lda), b, (float *)g->c + at, m);
    library_finish(g, at, m);
  }
}

static inline void gemm_by_library(const Gemm *gemm, void (*begin)(void), LibrarySgemm sgemm) {
  if (gemm->bf16_a || gemm->bf16_b || gemm->k == 0) {
    cpu_kernels()->gemm_f32(gemm);
    return;
  }
  int64_t batch = gemm->batch ? gemm->batch : 1;
  LibraryJob job = {gemm, begin, sgemm, (gemm->m + LIBRARY_ROWS - 1) / LIBRARY_ROWS};
  parallel_for(batch * job.blocks, 1, library_blocks, &job);
}

#endif
