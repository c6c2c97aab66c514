// gemm - matrix product with the promises that training needs of it.
//
//     C[m,n] = act(alpha * op(A)[m,k] op(B)[k,n] + beta * C[m,n] + bias[n])        row-major
//
// op(A)[i,l] is a[i*lda + l], or a[l*lda + i] with trans_a; op(B)[l,j] is b[l*ldb + j], or
// b[j*ldb + l] with trans_b. Strides and leading dimensions count elements.
//
// Invariants:
//  1. C[i,j] depends on row i of op(A), column j of op(B), k, and the scalars: not on m, n, batch,
//  the
//     leading dimensions, transposition, alignment, or the number of threads.
//  2. Its sum runs over l ascending in blocks whose size is a function of k; blocks are added to C
//     in order. A block is one chain of multiply-adds from zero, or, of f32 at the level amx and
//     k >= 32, a chain of sums over 32 k of products of bf16 pieces, which is rounded less often:
//     its errors are as small (tests/test_gemm.c), but operands below 2^-110 lose bits.
//  3. k = 0 is allowed: C = act(beta * C + bias). beta = 0 never reads C.
#ifndef RILLE_OPS_KERNELS_GEMM_H
#define RILLE_OPS_KERNELS_GEMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum Activation { ACT_NONE, ACT_RELU, ACT_GELU, ACT_GELU_TANH, ACT_SILU } Activation;

typedef struct Gemm {
  int64_t m, n, k;
  bool trans_a, trans_b;
  bool bf16_a, bf16_b; // a or b holds bf16, widened while it is packed; c is f32 then
  const void *a, *b;   // f32 or f64, as the kernel called
  void *c;             // [m,n]; must overlap neither a nor b
  int64_t lda, ldb, ldc;
  double alpha, beta;
  int64_t batch; // number of products; 0 counts as 1
  int64_t stride_a, stride_b,
      stride_c;     // from one product of the batch to the next; a, b: 0 repeats
  const void *bias; // [n], or NULL; the same for the whole batch
  Activation act;
  void *preact; // NULL, or [m,n] like c (same ldc, stride_c): the value before act, for backward
} Gemm;

// The product on the CPU, of f32 (accumulated in f32) and of f64 matrices; by the library that the
// build chose with BLAS= (gemm_<blas>.c). Invariants 1 and 2 are promises of BLAS=rille; with
// another library they hold as far as the library's own do.
void gemm_f32(const Gemm *gemm);
void gemm_f64(const Gemm *gemm);

// "rille", "onednn", "openblas".
const char *gemm_library(void);

#ifdef __cplusplus
}
#endif
#endif
