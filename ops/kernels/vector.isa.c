// vector - contiguous element-wise runs, conversions and the flat optimizers.
#include "ops/kernels/kernels_isa.h"
#include "ops/kernels/threads.h"
#include "ops/kernels/vmath.h"

enum { FLAT_BLOCK = 16384, SUM_BLOCK = 4096 }; // elements a block of flat work, of a sum

void KERNEL(widen)(float *out, const uint16_t *a, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = widen_bf16(a[i]);
}

void KERNEL(narrow)(uint16_t *out, const float *a, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = narrow_bf16(a[i]);
}

#define BODY "ops/kernels/vector.inc"
#include "ops/kernels/each_real.inc"
