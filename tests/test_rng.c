// Tests of core/rng, core/hash and core/dtype.
#include "core/rng.h"

#include "core/dtype.h"
#include "tests/tests.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

// Random123's published known answers for philox4x32 with 10 rounds (its kat_vectors file).
static const struct {
  uint32_t counter[4], key[2], out[4];
} known[] = {
    {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
    {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
     {0xffffffff, 0xffffffff},
     {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
    {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     {0xa4093822, 0x299f31d0},
     {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
};

START_TEST(philox_known_answers) {
  for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
    uint32_t out[4];
    rng_philox(out, known[i].counter, known[i].key);
    for (int w = 0; w < 4; w++) ck_assert_uint_eq(out[w], known[i].out[w]);
  }
}
END_TEST

// SplitMix64's published first outputs for seed 0: the finalizer of multiples of the golden ratio.
START_TEST(hash_known_answers) {
  const uint64_t golden = UINT64_C(0x9e3779b97f4a7c15);
  ck_assert(hash_u64(golden) == UINT64_C(0xe220a8397b1dcdaf));
  ck_assert(hash_u64(2 * golden) == UINT64_C(0x6e789e6aa1b965f4));
  ck_assert(hash_u64(3 * golden) == UINT64_C(0x06c45d188009454f));
}
END_TEST

// Each flipped input bit changes each output bit in half of the cases: 4096 trials, 64 x 64 pairs;
// 6 standard deviations of a binomial(4096, 1/2) are 192.
static void check_avalanche(bool in_value) {
  enum { TRIALS = 4096 };
  static int flips[64][64];
  memset(flips, 0, sizeof flips);
  for (uint64_t trial = 0; trial < TRIALS; trial++) {
    uint64_t h = hash_u64(trial * 2 + 1), value = trial;
    for (int bit = 0; bit < 64; bit++) {
      uint64_t flip = UINT64_C(1) << bit;
      uint64_t other = in_value ? hash_mix(h, value ^ flip) : hash_mix(h ^ flip, value);
      uint64_t changed = hash_mix(h, value) ^ other;
      for (int o = 0; o < 64; o++) flips[bit][o] += (int)(changed >> o & 1);
    }
  }
  for (int bit = 0; bit < 64; bit++)
    for (int o = 0; o < 64; o++) ck_assert_int_le(abs(flips[bit][o] - TRIALS / 2), 192);
}

START_TEST(hash_mix_avalanche) {
  check_avalanche(true);
  check_avalanche(false);
}
END_TEST

static int compare_u64(const void *a, const void *b) {
  const uint64_t *x = a, *y = b;
  return *x < *y ? -1 : *x > *y;
}

START_TEST(hash_bytes_differ) {
  // Prefixes of zeros and of a pattern, under two seeds: all hashes differ, also when truncated.
  unsigned char bytes[100];
  uint64_t seen[400];
  int n = 0;
  for (int pattern = 0; pattern < 2; pattern++) {
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (unsigned char)(pattern * (int)i);
    for (size_t length = 0; length < sizeof bytes; length++)
      for (uint64_t seed = 0; seed < 2; seed++)
        if (length > 1 || !pattern) seen[n++] = hash_bytes(bytes, length, seed) >> 16;
  }
  qsort(seen, (size_t)n, sizeof *seen, compare_u64);
  for (int i = 1; i < n; i++) ck_assert(seen[i - 1] != seen[i]);
  ck_assert(hash_string("ab", 7) == hash_bytes("ab", 2, 7));
  ck_assert(rng_key(1, "wte.weight") != rng_key(1, "wpe.weight"));
  ck_assert(rng_key(1, "wte.weight") != rng_key(2, "wte.weight"));
}
END_TEST

// Any slice, filled alone, has the values of the whole and of the one-element functions.
START_TEST(fill_is_independent_of_slices) {
  enum { N = 41 };
  const uint64_t key = rng_key(3, "h.0.mlp.fc.weight");
  const int64_t bases[] = {0, 1, (INT64_C(1) << 34) - 20, INT64_C(1) << 62};
  for (int b = 0; b < 4; b++) {
    for (int64_t from = 0; from < N; from++) {
      for (int64_t n = 0; from + n <= N; n++) {
        double d[N + 1];
        float f[N + 1];
        uint32_t u[N + 1];
        int64_t first = bases[b] + from;
        d[n] = -77, f[n] = -77, u[n] = 77;
        rng_fill_normal_f64(d, n, key, first, 0, 1);
        for (int64_t i = 0; i < n; i++) ck_assert(d[i] == rng_normal(key, first + i));
        rng_fill_normal_f32(f, n, key, first, 2, 3);
        for (int64_t i = 0; i < n; i++) ck_assert(f[i] == (float)(2 + 3 * d[i]));
        rng_fill_uniform_f64(d, n, key, first, 0, 1);
        for (int64_t i = 0; i < n; i++) ck_assert(d[i] == rng_uniform(key, first + i));
        rng_fill_uniform_f32(f, n, key, first, -1, 1);
        for (int64_t i = 0; i < n; i++) ck_assert(f[i] == (float)(-1 + 2 * d[i]));
        rng_fill_u32(u, n, key, first);
        for (int64_t i = 0; i < n; i++) ck_assert(u[i] == rng_u32(key, first + i));
        ck_assert(d[n] == -77 && f[n] == -77 && u[n] == 77);
      }
    }
  }
}
END_TEST

// Streams of neighbouring keys, of the two halves of a block, and of the two distributions of one
// key are uncorrelated: |correlation| < 6 / sqrt(n).
START_TEST(streams_are_uncorrelated) {
  enum { N = 200000 };
  double *x = malloc(N * sizeof *x), *y = malloc(N * sizeof *y);
  for (int pair = 0; pair < 4; pair++) {
    rng_fill_normal_f64(x, N, 1, 0, 0, 1);
    if (pair == 0) rng_fill_normal_f64(y, N, 2, 0, 0, 1);
    if (pair == 1) rng_fill_normal_f64(y, N, UINT64_C(1) << 32 | 1, 0, 0, 1);
    if (pair == 2) rng_fill_normal_f64(y, N, 1, 1, 0, 1);
    if (pair == 3) rng_fill_uniform_f64(y, N, 1, 0, -sqrt(3), sqrt(3));
    double sum = 0, squares = 0;
    for (int i = 0; i < N; i++) {
      sum += x[i] * y[i];
      squares += x[i] * x[i] * y[i] * y[i];
    }
    ck_assert_double_lt(fabs(sum / N), 6 / sqrt(N));
    if (pair < 2) ck_assert_double_lt(fabs(squares / N - 1), 6 * 3 / sqrt(N));
  }
  free(x);
  free(y);
}
END_TEST

// Chi-square of `counts` against equal cells, as standard deviations from its mean.
static double chi_square_z(const int *counts, int cells, double total) {
  double chi = 0, expected = total / cells;
  for (int i = 0; i < cells; i++) chi += pow(counts[i] - expected, 2) / expected;
  return (chi - (cells - 1)) / sqrt(2.0 * (cells - 1));
}

START_TEST(uniform_is_uniform) {
  enum { N = 1 << 20, CELLS = 1000 };
  static int counts[CELLS], joint[CELLS];
  memset(counts, 0, sizeof counts);
  memset(joint, 0, sizeof joint);
  double previous = 0;
  for (int64_t i = 0; i < N; i++) {
    double u = rng_uniform(5, i);
    ck_assert(u >= 0 && u < 1);
    counts[(int)(u * CELLS)]++;
    if (i % 2) joint[(int)(u * 25) * 40 + (int)(previous * 40)]++;
    previous = u;
  }
  ck_assert_double_lt(fabs(chi_square_z(counts, CELLS, N)), 5);
  ck_assert_double_lt(fabs(chi_square_z(joint, CELLS, 0.5 * N)), 5);
}
END_TEST

// Cells of equal probability under the normal distribution function, and the first four moments.
START_TEST(normal_is_normal) {
  enum { N = 1 << 20, CELLS = 512 };
  static int counts[CELLS];
  memset(counts, 0, sizeof counts);
  double m1 = 0, m2 = 0, m3 = 0, m4 = 0;
  for (int64_t i = 0; i < N; i++) {
    double z = rng_normal(6, i);
    ck_assert(isfinite(z));
    counts[(int)(0.5 * erfc(-z * sqrt(0.5)) * CELLS)]++;
    m1 += z, m2 += z * z, m3 += z * z * z, m4 += z * z * z * z;
  }
  ck_assert_double_lt(fabs(chi_square_z(counts, CELLS, N)), 5);
  // Standard deviations of the moments of n samples: sqrt(1, 2, 15, 96) / sqrt(n).
  ck_assert_double_lt(fabs(m1 / N), 5 / sqrt(N));
  ck_assert_double_lt(fabs(m2 / N - 1), 5 * sqrt(2.0 / N));
  ck_assert_double_lt(fabs(m3 / N), 5 * sqrt(15.0 / N));
  ck_assert_double_lt(fabs(m4 / N - 3), 5 * sqrt(96.0 / N));
}
END_TEST

START_TEST(uniform_f32_never_reaches_hi) {
  // Half of the f64 values in [1, 1 + 2^-23) round to the excluded end.
  float out[1000];
  rng_fill_uniform_f32(out, 1000, 9, 0, 1, 1 + 0x1p-23);
  for (int i = 0; i < 1000; i++) ck_assert(out[i] == 1.0f);
  double d[1000];
  rng_fill_uniform_f64(d, 1000, 9, 0, 1, 1 + 0x1p-52);
  for (int i = 0; i < 1000; i++) ck_assert(d[i] == 1.0);
  rng_fill_uniform_f32(out, 1000, 9, 0, 2, 2);
  for (int i = 0; i < 1000; i++) ck_assert(out[i] == 2.0f);
}
END_TEST

START_TEST(permute_is_a_bijection) {
  const uint64_t sizes[] = {1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 1000, 4096, 4097, 100003};
  static unsigned char seen[100003];
  for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
    for (uint64_t key = 0; key < 3; key++) {
      memset(seen, 0, sizeof seen);
      for (uint64_t i = 0; i < sizes[s]; i++) {
        uint64_t at = rng_permute(key, i, sizes[s]);
        ck_assert(at < sizes[s]);
        ck_assert(!seen[at]++);
      }
    }
  }
  ck_assert(rng_permute(1, UINT64_MAX - 1, UINT64_MAX) < UINT64_MAX);
  ck_assert(rng_permute(1, 5, (UINT64_C(1) << 62) + 1) <= UINT64_C(1) << 62);
}
END_TEST

// All permutations of 4 elements appear equally often over keys; in a larger set each position goes
// everywhere equally often, and neighbours do not stay neighbours.
START_TEST(permute_is_random) {
  enum { KEYS = 48000 };
  int order[256] = {0}, counts[24], n_orders = 0;
  for (uint64_t key = 0; key < KEYS; key++) {
    int code = 0;
    for (uint64_t i = 0; i < 4; i++) code = code * 4 + (int)rng_permute(hash_u64(key), i, 4);
    order[code]++;
  }
  for (int i = 0; i < 256; i++)
    if (order[i]) counts[n_orders++] = order[i];
  ck_assert_int_eq(n_orders, 24);
  ck_assert_double_lt(fabs(chi_square_z(counts, 24, KEYS)), 5);

  enum { N = 100 };
  static int cells[N], steps[N];
  memset(cells, 0, sizeof cells);
  memset(steps, 0, sizeof steps);
  for (uint64_t key = 0; key < KEYS; key++) {
    int a = (int)rng_permute(key, 17, N), b = (int)rng_permute(key, 18, N);
    cells[a]++;
    steps[(b - a + N) % N]++;
  }
  ck_assert_int_eq(steps[0], 0);
  ck_assert_double_lt(fabs(chi_square_z(cells, N, KEYS)), 5);
  ck_assert_double_lt(fabs(chi_square_z(steps + 1, N - 1, KEYS)), 5);
}
END_TEST

START_TEST(dtype_names_and_sizes) {
  DType dtype = DT_U8;
  ck_assert_uint_eq(dtype_size(DT_F32), sizeof(float));
  ck_assert_uint_eq(dtype_size(DT_F64), sizeof(double));
  ck_assert_uint_eq(dtype_size(DT_BF16), 2);
  ck_assert_uint_eq(dtype_size(DT_I64), 8);
  ck_assert_uint_eq(dtype_size(DT_BOOL), 1);
  for (int i = 0; i < DTYPE_COUNT; i++) {
    ck_assert_int_eq(dtype_from_name(&dtype, dtype_name((DType)i)), ST_OK);
    ck_assert_int_eq(dtype, i);
    ck_assert_int_eq(dtype_from_name(&dtype, dtype_safetensors_name((DType)i)), ST_OK);
    ck_assert_int_eq(dtype, i);
  }
  dtype = DT_I32;
  ck_assert_int_eq(dtype_from_name(&dtype, "f33"), ST_EDTYPE);
  ck_assert_int_eq(dtype, DT_I32);
  ck_assert_ptr_nonnull(strstr(status_message(), "f33"));
  ck_assert_ptr_nonnull(strstr(status_message(), " f32 f64 bf16 i64 i32 u8 bool"));
}
END_TEST

Suite *rng_suite(void);
Suite *rng_suite(void) {
  Suite *suite = suite_create("rng");
  TCase *tests = tcase_create("rng");
  tcase_set_timeout(tests, 60);
  tcase_add_test(tests, philox_known_answers);
  tcase_add_test(tests, hash_known_answers);
  tcase_add_test(tests, hash_mix_avalanche);
  tcase_add_test(tests, hash_bytes_differ);
  tcase_add_test(tests, fill_is_independent_of_slices);
  tcase_add_test(tests, streams_are_uncorrelated);
  tcase_add_test(tests, uniform_is_uniform);
  tcase_add_test(tests, normal_is_normal);
  tcase_add_test(tests, uniform_f32_never_reaches_hi);
  tcase_add_test(tests, permute_is_a_bijection);
  tcase_add_test(tests, permute_is_random);
  tcase_add_test(tests, dtype_names_and_sizes);
  suite_add_tcase(suite, tests);
  return suite;
}
