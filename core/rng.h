// rng - random numbers as pure functions of (key, index).
//
// There is no generator state anywhere: the value at an index depends on the key and the index
// alone, so a shard of a parameter, a slice of a mask or a resumed run gets what the whole would
// have got. Keys come from rng_key(seed, name); more coordinates (step, sample, ordinal) are folded
// in with hash_mix.
//
//   key (64 bits) ----------------------> Philox key words
//   index -> block = index / values ----> counter words 0, 1
//   domain (uniform, normal, ...) ------> counter word 2, so that streams of one key never meet
//
// Uniform and normal values are drawn in f64 and rounded last: an f32 parameter is the f64 one
// rounded.
#ifndef RILLE_CORE_RNG_H
#define RILLE_CORE_RNG_H

#include <stdint.h>

#include "core/hash.h"

#ifdef __cplusplus
extern "C" {
#endif

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, 2.2):
// out[4] = 128 random bits for counter[4] under key[2].
static inline void rng_philox(uint32_t out[4], const uint32_t counter[4], const uint32_t key[2]) {
  uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
  uint32_t k0 = key[0], k1 = key[1];
  for (int round = 0; round < 10; round++) {
    uint64_t p0 = (uint64_t)0xd2511f53u * c0;
    uint64_t p1 = (uint64_t)0xcd9e8d57u * c2;
    c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
    c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
    c1 = (uint32_t)p1;
    c3 = (uint32_t)p0;
    k0 += 0x9e3779b9u; // golden ratio
    k1 += 0xbb67ae85u; // sqrt(3) - 1
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

// The key of a named stream under a seed (a parameter's name, "order", "dropout", ...).
uint64_t rng_key(uint64_t seed, const char *name);

// 32 and 64 random bits.
uint32_t rng_u32(uint64_t key, int64_t index);
uint64_t rng_u64(uint64_t key, int64_t index);

// Uniform in [0, 1), a multiple of 2^-53.
double rng_uniform(uint64_t key, int64_t index);

// Standard normal (Box, Muller 1958); |value| <= 8.6.
double rng_normal(uint64_t key, int64_t index);

// out[i] = the value at first_index + i, i = 0 .. n-1: rng_u32, lo + (hi - lo) rng_uniform in
// [lo, hi), mean + std rng_normal. first_index >= 0. The cost is one Philox block for 4 (u32) or 2
// values.
void rng_fill_u32(uint32_t *out, int64_t n, uint64_t key, int64_t first_index);
void rng_fill_uniform_f32(float *out, int64_t n, uint64_t key, int64_t first_index, double lo,
                          double hi);
void rng_fill_uniform_f64(double *out, int64_t n, uint64_t key, int64_t first_index, double lo,
                          double hi);
void rng_fill_normal_f32(float *out, int64_t n, uint64_t key, int64_t first_index, double mean,
                         double std);
void rng_fill_normal_f64(double *out, int64_t n, uint64_t key, int64_t first_index, double mean,
                         double std);

// Where i goes in a random permutation of [0, n): a bijection of [0, n) for every key. 0 <= i < n.
// A Feistel network on the next power of 4, walked until the value falls below n (Black, Rogaway,
// "Ciphers with arbitrary finite domains", CT-RSA 2002): on average at most 4 passes.
uint64_t rng_permute(uint64_t key, uint64_t i, uint64_t n);

#ifdef __cplusplus
}
#endif
#endif
