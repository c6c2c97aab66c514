// rng - random numbers as pure functions of (key, index).
//
// Invariants
//  1  The value at an index is computed by one inline function whichever call asks for it, so no
//     slice bound can change a bit.
#include "core/rng.h"

#include <assert.h>
#include <math.h>

// Counter word 2. The numbers are part of what a seed means.
enum { DOMAIN_U64 = 0, DOMAIN_NORMAL = 1, DOMAIN_U32 = 2 };

typedef struct {
  double even, odd;
} Pair;

static inline void block_at(uint32_t out[4], uint64_t key, uint64_t block, uint32_t domain) {
  const uint32_t counter[4] = {(uint32_t)block, (uint32_t)(block >> 32), domain, 0};
  const uint32_t words[2] = {(uint32_t)key, (uint32_t)(key >> 32)};
  rng_philox(out, counter, words);
}

static inline uint64_t join(uint32_t low, uint32_t high) { return (uint64_t)high << 32 | low; }

// [0, 1) with 53 bits.
static inline double unit(uint64_t bits) { return (double)(bits >> 11) * 0x1p-53; }

static inline Pair uniform_pair(uint64_t key, uint64_t block) {
  uint32_t w[4];
  block_at(w, key, block, DOMAIN_U64);
  return (Pair){unit(join(w[0], w[1])), unit(join(w[2], w[3]))};
}

static inline Pair normal_pair(uint64_t key, uint64_t block) {
  uint32_t w[4];
  block_at(w, key, block, DOMAIN_NORMAL);
  double u = 1.0 - unit(join(w[0], w[1])); // (0, 1]: the logarithm is finite
  double angle = 6.283185307179586477 * unit(join(w[2], w[3]));
  double radius = sqrt(-2.0 * log(u));
  return (Pair){radius * cos(angle), radius * sin(angle)};
}

uint64_t rng_key(uint64_t seed, const char *name) { return hash_string(name, seed); }

uint32_t rng_u32(uint64_t key, int64_t index) {
  uint32_t w[4];
  assert(index >= 0);
  block_at(w, key, (uint64_t)index / 4, DOMAIN_U32);
  return w[index % 4];
}

uint64_t rng_u64(uint64_t key, int64_t index) {
  uint32_t w[4];
  assert(index >= 0);
  block_at(w, key, (uint64_t)index / 2, DOMAIN_U64);
  return index % 2 ? join(w[2], w[3]) : join(w[0], w[1]);
}

double rng_uniform(uint64_t key, int64_t index) {
  assert(index >= 0);
  Pair pair = uniform_pair(key, (uint64_t)index / 2);
  return index % 2 ? pair.odd : pair.even;
}

double rng_normal(uint64_t key, int64_t index) {
  assert(index >= 0);
  Pair pair = normal_pair(key, (uint64_t)index / 2);
  return index % 2 ? pair.odd : pair.even;
}

void rng_fill_u32(uint32_t *out, int64_t n, uint64_t key, int64_t first_index) {
  assert(first_index >= 0);
  for (int64_t i = 0; i < n;) {
    uint32_t w[4];
    uint64_t index = (uint64_t)(first_index + i);
    block_at(w, key, index / 4, DOMAIN_U32);
    for (uint64_t lane = index % 4; lane < 4 && i < n; lane++) out[i++] = w[lane];
  }
}

// Rounding may reach hi, which [lo, hi) excludes.
static inline double scale_f64(double u, double lo, double hi) {
  double value = lo + (hi - lo) * u;
  return value >= hi ? nextafter(hi, lo) : value;
}

static inline float scale_f32(double u, double lo, double hi) {
  float value = (float)(lo + (hi - lo) * u);
  return (double)value >= hi ? nextafterf(value, (float)lo) : value;
}

// The four fills: out[i] = value(pair element at first_index + i). The first and the last pair may
// be half wanted.
#define FILL(pair_at, value)                                     \
  do {                                                           \
    assert(first_index >= 0);                                    \
    int64_t i = 0;                                               \
    if (n > 0 && first_index % 2) {                              \
      double x = pair_at(key, (uint64_t)first_index / 2).odd;    \
      out[i++] = value(x);                                       \
    }                                                            \
    for (; i < n; i += 2) {                                      \
      Pair pair = pair_at(key, (uint64_t)(first_index + i) / 2); \
      out[i] = value(pair.even);                                 \
      if (i + 1 < n) out[i + 1] = value(pair.odd);               \
    }                                                            \
  } while (0)

#define UNIFORM_F32(u) scale_f32(u, lo, hi)
#define UNIFORM_F64(u) scale_f64(u, lo, hi)
#define NORMAL_F32(z) (float)(mean + std * (z))
#define NORMAL_F64(z) (mean + std * (z))

void rng_fill_uniform_f32(float *out, int64_t n, uint64_t key, int64_t first_index, double lo,
                          double hi) {
  FILL(uniform_pair, UNIFORM_F32);
}

void rng_fill_uniform_f64(double *out, int64_t n, uint64_t key, int64_t first_index, double lo,
                          double hi) {
  FILL(uniform_pair, UNIFORM_F64);
}

void rng_fill_normal_f32(float *out, int64_t n, uint64_t key, int64_t first_index, double mean,
                         double std) {
  FILL(normal_pair, NORMAL_F32);
}

void rng_fill_normal_f64(double *out, int64_t n, uint64_t key, int64_t first_index, double mean,
                         double std) {
  FILL(normal_pair, NORMAL_F64);
}

// Rounds of the Feistel network: 4 suffice for large halves (Luby, Rackoff 1988); tiny domains,
// where a half is one or two bits, need more to look uniform.
enum { FEISTEL_ROUNDS = 12 };

uint64_t rng_permute(uint64_t key, uint64_t i, uint64_t n) {
  assert(i < n);
  int half = 1; // bits of each half: the domain is [0, 4^half)
  while (half < 32 && (n - 1) >> (2 * half)) half++;
  const uint64_t mask = (UINT64_C(1) << half) - 1;
  do {
    uint64_t left = i >> half, right = i & mask;
    for (uint64_t round = 0; round < FEISTEL_ROUNDS; round++) {
      uint64_t next = left ^ (hash_mix(hash_mix(key, round), right) >> 32 & mask);
      left = right;
      right = next;
    }
    i = left << half | right;
  } while (i >= n);
  return i;
}
