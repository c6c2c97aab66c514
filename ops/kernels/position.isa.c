// position - kernels that depend on where an element is: rotary embedding and dropout.
#include "ops/kernels/kernels_isa.h"
#include "ops/kernels/threads.h"

typedef uint64_t vec_u64 __attribute__((vector_size(VECTOR_BYTES)));
enum { MAX_ROTATED = 1024, PHILOX_LANES = LANES_f64, PHILOX_WORDS = 4 * PHILOX_LANES };

// The product of the lower halves of each lane.
INLINE vec_u64 multiply_u32(vec_u64 a, uint64_t b) {
#if VECTOR_BYTES == 64
  return (vec_u64)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64((int64_t)b));
#elif VECTOR_BYTES == 32
  return (vec_u64)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x((int64_t)b));
#else
  return (a & 0xffffffffu) * b;
#endif
}

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) at
// PHILOX_LANES counters in a row: words[4 i + w] is word w of counter (block + i, sample, step). A
// lane of 64 bits holds one word; what is above it is never looked at.
static void philox(uint32_t *words, uint64_t block, uint64_t sample, uint64_t step, uint64_t key) {
  const uint64_t low = 0xffffffffu;
  vec_u64 c0, c1 = (vec_u64){0} + (sample & low), c2 = (vec_u64){0} + (step & low), c3;
  for (int i = 0; i < PHILOX_LANES; i++) c0[i] = block + (uint64_t)i;
  c3 = (c0 >> 32) | (sample >> 32 << 16);
  uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
  for (int round = 0; round < 10; round++) {
    vec_u64 p0 = multiply_u32(c0, 0xD2511F53u), p1 = multiply_u32(c2, 0xCD9E8D57u);
    c0 = (p1 >> 32) ^ c1 ^ k0, c1 = p1;
    c2 = (p0 >> 32) ^ c3 ^ k1, c3 = p0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  uint64_t first[PHILOX_LANES], second[PHILOX_LANES]; // words 0 and 1, words 2 and 3
  c0 = (c0 & low) | (c1 << 32), c2 = (c2 & low) | (c3 << 32);
  memcpy(first, &c0, sizeof c0), memcpy(second, &c2, sizeof c2);
  for (int i = 0; i < PHILOX_LANES; i++) {
    words[4 * i] = (uint32_t)first[i], words[4 * i + 1] = (uint32_t)(first[i] >> 32);
    words[4 * i + 2] = (uint32_t)second[i], words[4 * i + 3] = (uint32_t)(second[i] >> 32);
  }
}

#define BODY "ops/kernels/position.inc"
#include "ops/kernels/each_real.inc"
