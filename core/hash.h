// hash - 64-bit mixing, for keys of random streams, name tables and fingerprints.
//
// Not for secrets. The results are part of what a seed means: changing a constant changes every
// initial weight and data order.
#ifndef RILLE_CORE_HASH_H
#define RILLE_CORE_HASH_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// A bijection on 64 bits in which every input bit changes each output bit with probability 1/2.
// The finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014; constants: Stafford's mix 13).
static inline uint64_t hash_u64(uint64_t x) {
  x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
  return x ^ (x >> 31);
}

// Folds `value` into the hash `h`; the order of calls matters. A bijection in either argument.
static inline uint64_t hash_mix(uint64_t h, uint64_t value) {
  return hash_u64(h ^ hash_u64(value + UINT64_C(0x9e3779b97f4a7c15)));
}

// Hash of n_bytes bytes, the same on every machine. Strings of different length differ though one
// is the other padded with zeros.
uint64_t hash_bytes(const void *data, size_t n_bytes, uint64_t seed);

// hash_bytes of a string without its terminator.
uint64_t hash_string(const char *string, uint64_t seed);

#ifdef __cplusplus
}
#endif
#endif
