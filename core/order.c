// order - which tokens a sample is: a pure function of (seed, sample number).
#include "core/order.h"

#include "core/rng.h"

#include <assert.h>

int64_t order_n_windows(int64_t n_tokens, int64_t T) {
  assert(T >= 1);
  return n_tokens > T ? (n_tokens - 1) / T : 0;
}

int64_t order_window(uint64_t seed, int64_t sample, int64_t n_windows) {
  assert(sample >= 0 && n_windows >= 1);
  int64_t epoch = sample / n_windows, i = sample % n_windows;
  uint64_t key = hash_mix(rng_key(seed, "order"), (uint64_t)epoch);
  return (int64_t)rng_permute(key, (uint64_t)i, (uint64_t)n_windows);
}
