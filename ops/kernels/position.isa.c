// position - kernels that depend on where an element is: rotary embedding and dropout.
#include "ops/kernels/kernels_isa.h"
#include "ops/kernels/threads.h"

enum { MAX_ROTATED = 1024, PHILOX_LANES = 16, PHILOX_WORDS = 4 * PHILOX_LANES };

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) at 16
// counters in a row: words[4 i + w] is word w of counter (block + i, sample, step).
static void philox(uint32_t *words, uint64_t block, uint64_t sample, uint64_t step, uint64_t key) {
  uint32_t c0[PHILOX_LANES], c1[PHILOX_LANES], c2[PHILOX_LANES], c3[PHILOX_LANES];
  for (int i = 0; i < PHILOX_LANES; i++) {
    uint64_t at = block + (uint64_t)i;
    c0[i] = (uint32_t)at;
    c1[i] = (uint32_t)sample;
    c2[i] = (uint32_t)step;
    c3[i] = (uint32_t)(at >> 32) | (uint32_t)((sample >> 32) << 16);
  }
  uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
  for (int round = 0; round < 10; round++) {
    for (int i = 0; i < PHILOX_LANES; i++) {
      uint64_t p0 = (uint64_t)0xD2511F53u * c0[i], p1 = (uint64_t)0xCD9E8D57u * c2[i];
      uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1[i] ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3[i] ^ k1;
      c0[i] = n0, c1[i] = (uint32_t)p1, c2[i] = n2, c3[i] = (uint32_t)p0;
    }
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  for (int i = 0; i < PHILOX_LANES; i++) {
    words[4 * i] = c0[i], words[4 * i + 1] = c1[i];
    words[4 * i + 2] = c2[i], words[4 * i + 3] = c3[i];
  }
}

#define BODY "ops/kernels/position.inc"
#include "ops/kernels/each_real.inc"
