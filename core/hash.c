// hash - 64-bit mixing, for keys of random streams, name tables and fingerprints.
#include "core/hash.h"

#include <string.h>

uint64_t hash_bytes(const void *data, size_t n_bytes, uint64_t seed) {
  const unsigned char *bytes = data;
  uint64_t h = hash_mix(seed, n_bytes);
  for (size_t at = 0; at < n_bytes; at += 8) {
    size_t n = n_bytes - at < 8 ? n_bytes - at : 8;
    uint64_t word = 0;
    for (size_t i = 0; i < n; i++) word |= (uint64_t)bytes[at + i] << (8 * i);
    h = hash_mix(h, word);
  }
  return h;
}

uint64_t hash_string(const char *string, uint64_t seed) {
  return hash_bytes(string, strlen(string), seed);
}
