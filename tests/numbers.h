// numbers - what tests of kernels share: levels, random arrays, comparisons, finite differences.
#ifndef RILLE_TESTS_NUMBERS_H
#define RILLE_TESTS_NUMBERS_H

#include "ops/kernels/kernels.h"
#include "tests/tests.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *const level_names[] __attribute__((unused)) = {"plain", "avx2", "avx512", "amx"};
enum { N_LEVEL_NAMES = sizeof level_names / sizeof *level_names };
#define FOR_LEVELS(K)                                    \
  for (int level_ = 0; level_ < N_LEVEL_NAMES; level_++) \
    for (const CpuKernels *K = cpu_kernels_of(level_names[level_]); K; K = NULL)

// Activations, in f64.
static inline double d_gelu(double x) { return 0.5 * x * erfc(-x * M_SQRT1_2); }
static inline double d_gelu_tanh(double x) {
  return 0.5 * x * (1 + tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x)));
}
static inline double d_silu(double x) { return x / (1 + exp(-x)); }
static inline double d_relu(double x) { return x <= 0 ? 0 : x; }

static uint64_t seed_state = 1;
static inline double uniform(void) { // in [-1, 1)
  seed_state = seed_state * 6364136223846793005u + 1442695040888963407u;
  return (double)(seed_state >> 11) / 4503599627370496.0 - 1;
}

static inline void *zeros(int64_t bytes) {
  void *block = calloc(1, (size_t)bytes + 64);
  ck_assert_ptr_nonnull(block);
  return block;
}

static inline float *random_f32(int64_t n) {
  float *x = zeros(n * 4);
  for (int64_t i = 0; i < n; i++) x[i] = (float)uniform();
  return x;
}
static inline double *widened(const float *x, int64_t n) {
  double *y = zeros(n * 8);
  for (int64_t i = 0; i < n; i++) y[i] = (double)x[i];
  return y;
}

static inline void assert_close(const float *got, const double *want, int64_t n, double tolerance,
                                const char *what) {
  double largest = 0;
  for (int64_t i = 0; i < n; i++) largest = fmax(largest, fabs(want[i]));
  for (int64_t i = 0; i < n; i++)
    ck_assert_msg(fabs((double)got[i] - want[i]) <= tolerance * largest + 1e-30,
                  "%s[%ld]: got %.9g, want %.9g", what, (long)i, (double)got[i], want[i]);
}
static inline void assert_close64(const double *got, const double *want, int64_t n,
                                  double tolerance, const char *what) {
  double largest = 0;
  for (int64_t i = 0; i < n; i++) largest = fmax(largest, fabs(want[i]));
  for (int64_t i = 0; i < n; i++)
    ck_assert_msg(fabs(got[i] - want[i]) <= tolerance * largest + 1e-30,
                  "%s[%ld]: got %.17g, want %.17g", what, (long)i, got[i], want[i]);
}
static inline void assert_same(const void *a, const void *b, int64_t bytes, const char *what) {
  for (int64_t i = 0; i < bytes; i++)
    ck_assert_msg(((const char *)a)[i] == ((const char *)b)[i], "%s: bits differ at byte %ld", what,
                  (long)i);
}

// dx = central differences of sum(dy * forward(x)), the reference for a backward kernel.
typedef void (*Forward)(const double *x, double *y, const void *context);
static inline void differences(Forward forward, const void *context, const double *x,
                               const double *dy, int64_t n_x, int64_t n_y, double *dx) {
  double *moved = zeros(n_x * 8), *y1 = zeros(n_y * 8), *y2 = zeros(n_y * 8), h = 1e-5;
  memcpy(moved, x, (size_t)n_x * 8);
  for (int64_t i = 0; i < n_x; i++) {
    moved[i] = x[i] + h;
    forward(moved, y1, context);
    moved[i] = x[i] - h;
    forward(moved, y2, context);
    moved[i] = x[i];
    dx[i] = 0;
    for (int64_t j = 0; j < n_y; j++) dx[i] += dy[j] * (y1[j] - y2[j]) / (2 * h);
  }
  free(moved), free(y1), free(y2);
}

#endif
