// vector - contiguous element-wise runs, conversions and the flat optimizers.
#include "core/bf16.h"
#include "ops/kernels/kernels_isa.h"
#include "ops/kernels/threads.h"
#include "ops/kernels/vmath.h"

enum { FLAT_BLOCK = 16384, SUM_BLOCK = 4096 }; // elements a block of flat work, of a sum

void KERNEL(widen)(float *out, const uint16_t *a, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = bf16_widen(a[i]);
}

void KERNEL(narrow)(uint16_t *out, const float *a, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = bf16_narrow(a[i]);
}

double KERNEL(multiply_adds)(int64_t rounds) {
  enum { CHAINS = 12 };
  vec_f32 x[CHAINS], a = set1_f32(0.5f), b = set1_f32(0.25f), sum = {0};
  for (int i = 0; i < CHAINS; i++) x[i] = set1_f32((float)i);
  for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) x[i] = fma_f32(x[i], a, b);
  }
  for (int i = 0; i < CHAINS; i++) sum += x[i];
  volatile float sink = hsum_f32(sum); // so that the chains are not optimized away
  (void)sink;
  return (double)rounds * CHAINS * LANES_f32 * 2;
}

#define BODY "ops/kernels/vector.inc"
#include "ops/kernels/each_real.inc"
