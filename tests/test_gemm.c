// test_gemm - products at every level of instructions that this machine runs: against sums in f64,
// bit for bit against themselves cut and turned otherwise, and with numbers at the ends of f32.
#include "ops/kernels/gemm.h"
#include "ops/kernels/threads.h"
#include "tests/numbers.h"
#include "tests/tests.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct Product {
  int64_t m, n, k;
  bool ta, tb;
  double alpha, beta;
  bool has_bias;
  Activation act;
} Product;

static double activate(Activation act, double x) {
  switch (act) {
  case ACT_NONE: return x;
  case ACT_RELU: return d_relu(x);
  case ACT_GELU: return d_gelu(x);
  case ACT_GELU_TANH: return d_gelu_tanh(x);
  case ACT_SILU: return d_silu(x);
  }
  return x;
}

static void check_product(const CpuKernels *k, Product p) {
  int64_t lda = (p.ta ? p.m : p.k) + 3, ldb = (p.tb ? p.k : p.n) + 1, ldc = p.n + 5;
  int64_t size_a = lda * (p.ta ? p.k : p.m), size_b = ldb * (p.tb ? p.n : p.k), size_c = ldc * p.m;
  float *a = random_f32(size_a), *b = random_f32(size_b), *c = random_f32(size_c),
        *bias = random_f32(p.n);
  float *pre = zeros(size_c * 4);
  double *want = widened(c, size_c), *want_pre = zeros(size_c * 8);
  double *a64 = widened(a, size_a), *b64 = widened(b, size_b), *c64 = widened(c, size_c),
         *bias64 = widened(bias, p.n), *pre64 = zeros(size_c * 8);
  for (int64_t i = 0; i < p.m; i++)
    for (int64_t j = 0; j < p.n; j++) {
      double sum = 0;
      for (int64_t l = 0; l < p.k; l++)
        sum += a64[p.ta ? l * lda + i : i * lda + l] * b64[p.tb ? j * ldb + l : l * ldb + j];
      sum = p.alpha * sum + (p.beta == 0 ? 0 : p.beta * want[i * ldc + j]) +
            (p.has_bias ? bias64[j] : 0);
      want_pre[i * ldc + j] = sum;
      want[i * ldc + j] = activate(p.act, sum);
    }
  Gemm gemm = {.m = p.m,
               .n = p.n,
               .k = p.k,
               .trans_a = p.ta,
               .trans_b = p.tb,
               .a = a,
               .b = b,
               .c = c,
               .lda = lda,
               .ldb = ldb,
               .ldc = ldc,
               .alpha = p.alpha,
               .beta = p.beta,
               .bias = p.has_bias ? bias : NULL,
               .act = p.act,
               .preact = pre};
  k->gemm_f32(&gemm);
  double tolerance = 1e-6 + 4e-8 * (double)p.k;
  assert_close(c, want, size_c, tolerance, "gemm f32");
  assert_close(pre, want_pre, size_c, tolerance, "preact f32");
  gemm.a = a64, gemm.b = b64, gemm.c = c64, gemm.bias = p.has_bias ? bias64 : NULL,
  gemm.preact = pre64;
  k->gemm_f64(&gemm);
  assert_close64(c64, want, size_c, 1e-13, "gemm f64");
  assert_close64(pre64, want_pre, size_c, 1e-13, "preact f64");
  free(a), free(b), free(c), free(bias), free(pre), free(want), free(want_pre);
  free(a64), free(b64), free(c64), free(bias64), free(pre64);
}

START_TEST(gemm_agrees_with_the_formula) {
  static const int64_t shapes[][3] = {
      {1, 1, 1},    {3, 5, 7},     {14, 32, 16}, {15, 33, 17}, {64, 48, 100},   {1, 100, 64},
      {100, 1, 64}, {37, 70, 401}, {200, 90, 0}, {5, 3, 800},  {173, 200, 390}, {130, 40, 1100}};
  FOR_LEVELS(k)
  for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
    for (int variant = 0; variant < 12; variant++) {
      threads_set(1 + variant % 2);
      Product p = {shapes[s][0],
                   shapes[s][1],
                   shapes[s][2],
                   variant & 1,
                   variant & 2,
                   variant % 3 == 2 ? 0.5 : 1,
                   (double[]){0, 1, -0.5}[variant % 3],
                   variant & 4,
                   (Activation)(variant % 5)};
      check_product(k, p);
    }
  threads_set(1);
}
END_TEST

START_TEST(gemm_bits_depend_on_row_and_column_alone) {
  enum { M = 150, N = 130, K = 500 };
  float *a = random_f32(M * K + 40), *b = random_f32(K * N + 40), *whole = zeros(M * N * 4),
        *part = zeros(M * N * 4 + 80);
  float *at = zeros(M * K * 4), *bt = zeros(K * N * 4);
  for (int i = 0; i < M; i++)
    for (int l = 0; l < K; l++) at[l * M + i] = a[i * K + l];
  for (int l = 0; l < K; l++)
    for (int j = 0; j < N; j++) bt[j * K + l] = b[l * N + j];
  static const int64_t depths[] = {12, 31, 32, 128, 129, K}; // a block of k, and more
  FOR_LEVELS(k) for (int deep = 0; deep < 6; deep++) {
    int64_t depth = depths[deep];
    threads_set(1);
    Gemm all = {.m = M,
                .n = N,
                .k = depth,
                .a = a,
                .b = b,
                .c = whole,
                .lda = K,
                .ldb = N,
                .ldc = N,
                .alpha = 1};
    k->gemm_f32(&all);
    for (int threads = 1; threads <= 2; threads++)
      for (int64_t m = 1; m <= M; m += m < 18 ? 1 : 44)
        for (int64_t n = 1; n <= N; n += n < 4 ? 1 : 31)
          for (int trans = 0; trans < 4; trans++) {
            threads_set(threads);
            int64_t i0 = (m * 7) % (M - m + 1), j0 = (n * 5) % (N - n + 1);
            Gemm some = {.m = m,
                         .n = n,
                         .k = depth,
                         .trans_a = trans & 1,
                         .trans_b = trans & 2,
                         .a = trans & 1 ? at + i0 : a + i0 * K,
                         .b = trans & 2 ? bt + j0 * K : b + j0,
                         .c = part + m % 3,
                         .lda = trans & 1 ? M : K,
                         .ldb = trans & 2 ? K : N,
                         .ldc = n,
                         .alpha = 1};
            k->gemm_f32(&some);
            for (int64_t i = 0; i < m; i++)
              assert_same(part + m % 3 + i * n, whole + (i0 + i) * N + j0, n * 4, "gemm row");
          }
  }
  threads_set(1);
  free(a), free(b), free(whole), free(part), free(at), free(bt);
}
END_TEST

// Sizes that make several blocks of k, strips of columns and groups of rows; ends of all of them.
// On AMX neither side is held whole: A is in the whole product, B in the first part of it.
START_TEST(gemm_bits_are_the_same_across_blocks) {
  enum { M = 820, N = 1610, K = 520 };
  float *a = random_f32(M * K), *b = random_f32(K * N), *at = zeros(M * K * 4),
        *bt = zeros(K * N * 4), *whole = zeros(M * N * 4), *part = zeros(M * N * 4);
  for (int i = 0; i < M; i++)
    for (int l = 0; l < K; l++) at[l * M + i] = a[i * K + l];
  for (int l = 0; l < K; l++)
    for (int j = 0; j < N; j++) bt[j * K + l] = b[l * N + j];
  FOR_LEVELS(k) for (int variant = 0; variant < 8; variant++) {
    // All of C on one thread first, then parts of it, both ways around, on one and two.
    int64_t i0 = variant == 0 ? 0 : variant * 3, j0 = variant == 0 ? 0 : variant * 61;
    int64_t m = variant == 0 ? M : M - i0 - variant, n = variant == 0 ? N : N - j0 - 5 * variant;
    bool ta = variant & 1, tb = variant & 2;
    threads_set(variant & 4 ? 2 : 1);
    Gemm g = {.m = m,
              .n = n,
              .k = K,
              .trans_a = ta,
              .trans_b = tb,
              .a = ta ? at + i0 : a + i0 * K,
              .b = tb ? bt + j0 * K : b + j0,
              .c = variant == 0 ? whole : part,
              .lda = ta ? M : K,
              .ldb = tb ? K : N,
              .ldc = n,
              .alpha = 1};
    k->gemm_f32(&g);
    for (int64_t i = 0; variant > 0 && i < m; i++)
      assert_same(part + i * n, whole + (i0 + i) * N + j0, n * 4, "gemm row");
    for (int64_t i = 0; variant == 0 && i < m; i += 13)
      for (int64_t j = i % 11; j < n; j += 11) {
        double sum = 0;
        for (int64_t l = 0; l < K; l++) sum += (double)a[i * K + l] * (double)b[l * N + j];
        ck_assert_msg(fabs((double)whole[i * N + j] - sum) <= 1e-4, "%s: %ld,%ld", k->level,
                      (long)i, (long)j);
      }
  }
  threads_set(1);
  free(a), free(b), free(at), free(bt), free(whole), free(part);
}
END_TEST

START_TEST(batched_gemm_and_bf16_inputs) {
  enum { M = 20, N = 40, K = 70, BATCH = 5 };
  float *a = random_f32(BATCH * M * K), *b = random_f32(BATCH * K * N),
        *a_wide = zeros(4 * BATCH * M * K), *b_wide = zeros(4 * BATCH * K * N),
        *c = zeros(4 * BATCH * M * N), *one = zeros(4 * M * N);
  uint16_t *a16 = zeros(2 * BATCH * M * K), *b16 = zeros(2 * BATCH * K * N);
  FOR_LEVELS(k) {
    k->narrow(a16, a, BATCH * M * K), k->narrow(b16, b, BATCH * K * N);
    k->widen(a_wide, a16, BATCH * M * K), k->widen(b_wide, b16, BATCH * K * N);
    for (int variant = 0; variant < 8; variant++) {
      bool trans = variant & 1, bf16_a = variant & 2, bf16_b = variant & 4;
      Gemm g = {.m = M,
                .n = N,
                .k = K,
                .trans_a = trans,
                .trans_b = trans,
                .bf16_a = bf16_a,
                .bf16_b = bf16_b,
                .a = bf16_a ? (const void *)a16 : a,
                .b = bf16_b ? (const void *)b16 : b,
                .c = c,
                .lda = trans ? M : K,
                .ldb = trans ? K : N,
                .ldc = N,
                .alpha = 1,
                .batch = BATCH,
                .stride_a = M * K,
                .stride_b = K * N,
                .stride_c = M * N};
      k->gemm_f32(&g);
      for (int i = 0; i < BATCH; i++) {
        Gemm single = g;
        single.batch = 0, single.bf16_a = single.bf16_b = false;
        single.a = (bf16_a ? a_wide : a) + i * M * K;
        single.b = (bf16_b ? b_wide : b) + i * K * N;
        single.c = one;
        k->gemm_f32(&single);
        assert_same(c + i * M * N, one, 4 * M * N, "batch");
      }
    }
  }
  free(a), free(b), free(a_wide), free(b_wide), free(c), free(one), free(a16), free(b16);
}
END_TEST

// The largest error of an element, in units of 2^-24 of the sum of its |a b|.
static double error_of(const CpuKernels *k, const float *a, const float *b, int64_t M, int64_t N,
                       int64_t K) {
  float *c = zeros(M * N * 4);
  Gemm g = {
      .m = M, .n = N, .k = K, .a = a, .b = b, .c = c, .lda = K, .ldb = N, .ldc = N, .alpha = 1};
  k->gemm_f32(&g);
  double worst = 0;
  for (int64_t i = 0; i < M; i++)
    for (int64_t j = 0; j < N; j++) {
      double sum = 0, size = 0;
      for (int64_t l = 0; l < K; l++) {
        double term = (double)a[i * K + l] * (double)b[l * N + j];
        sum += term, size += fabs(term);
      }
      worst = fmax(worst, fabs((double)c[i * N + j] - sum) / size);
    }
  free(c);
  return worst * 0x1p24;
}

// Multiply-adds in f32 and sums of bf16 pieces are held to the same bounds; a product of pieces
// less, and those of 32 and 64 k are exceeded.
START_TEST(gemm_errs_by_a_few_roundings) {
  enum { M = 33, N = 40 };
  FOR_LEVELS(k) for (int64_t K = 4; K < 3000; K *= 2) {
    float *a = random_f32(M * K), *b = random_f32(K * N);
    for (int round = 0; round < 3; round++) { // either sign, positive, of sizes that differ
      for (int64_t i = 0; round > 0 && i < M * K; i++) a[i] = fabsf(a[i]);
      for (int64_t i = 0; round > 0 && i < N * K; i++) b[i] = fabsf(b[i]);
      for (int64_t i = 0; round > 1 && i < M * K; i++) a[i] *= (float)exp(20 * uniform());
      double error = error_of(k, a, b, M, N, K), most = round == 0 ? 6 : 20;
      ck_assert_msg(error <= most, "%s, K %ld, round %d: %g", k->level, (long)K, round, error);
    }
    for (int64_t i = 0; i < M * K; i++) a[i] *= 0x1p-76F; // pieces are still above 2^-126
    double tiny = error_of(k, a, b, M, N, K);
    ck_assert_msg(tiny <= 20, "%s, K %ld, tiny: %g", k->level, (long)K, tiny);
    free(a), free(b);
  }
}
END_TEST

// Rows and columns with numbers that bf16 cannot hold are as f32 has them, and the others are not
// touched by them.
START_TEST(gemm_of_numbers_at_the_ends_of_f32) {
  enum { M = 70, N = 90, K = 300 };
  float *a = random_f32(M * K), *b = random_f32(K * N), *at = zeros(M * K * 4),
        *bt = zeros(K * N * 4), *plain = zeros(M * N * 4), *c = zeros(M * N * 4);
  static const struct {
    int row, l; // of a; columns of b have the same
    float value;
  } ends[] = {{3, 0, INFINITY}, {20, 299, -INFINITY}, {33, 150, NAN},  {69, 31, INFINITY},
              {50, 7, FLT_MAX}, {51, 200, -FLT_MAX},  {52, 16, 1e-42F}};
  enum { N_ENDS = sizeof ends / sizeof *ends };
  FOR_LEVELS(k) for (int variant = 0; variant < 8; variant++) {
    bool in_a = variant & 1, ta = variant & 2, tb = variant & 4;
    Gemm g = {.m = M,
              .n = N,
              .k = K,
              .a = a,
              .b = b,
              .c = plain,
              .lda = K,
              .ldb = N,
              .ldc = N,
              .alpha = 1};
    k->gemm_f32(&g);
    float *saved = zeros(N_ENDS * 4);
    bool is_odd[M > N ? M : N] = {false};
    for (int e = 0; e < N_ENDS; e++) {
      float *x = in_a ? &a[ends[e].row * K + ends[e].l] : &b[ends[e].l * N + ends[e].row];
      saved[e] = *x, *x = ends[e].value, is_odd[ends[e].row] = true;
    }
    for (int i = 0; i < M; i++)
      for (int l = 0; l < K; l++) at[l * M + i] = a[i * K + l];
    for (int l = 0; l < K; l++)
      for (int j = 0; j < N; j++) bt[j * K + l] = b[l * N + j];
    g.trans_a = ta, g.a = ta ? at : a, g.lda = ta ? M : K;
    g.trans_b = tb, g.b = tb ? bt : b, g.ldb = tb ? K : N;
    g.c = c;
    k->gemm_f32(&g);
    for (int i = 0; i < M; i++)
      for (int j = 0; j < N; j++) {
        double want = 0;
        for (int l = 0; l < K; l++) want += (double)a[i * K + l] * (double)b[l * N + j];
        float got = c[i * N + j];
        if (!is_odd[in_a ? i : j])
          ck_assert_msg(got == plain[i * N + j], "%s: %d,%d of another row", k->level, i, j);
        else if (isfinite(want))
          ck_assert_msg(fabs((double)got - want) <= 1e-5 * fmax(1, fabs(want)),
                        "%s, variant %d: %d,%d is %g, want %g", k->level, variant, i, j,
                        (double)got, want);
        else
          ck_assert_msg(isnan(want) ? isnan(got) : (double)got == want,
                        "%s, variant %d: %d,%d is %g, want %g", k->level, variant, i, j,
                        (double)got, want);
      }
    for (int e = 0; e < N_ENDS; e++)
      *(in_a ? &a[ends[e].row * K + ends[e].l] : &b[ends[e].l * N + ends[e].row]) = saved[e];
    free(saved);
  }
  free(a), free(b), free(at), free(bt), free(plain), free(c);
}
END_TEST

// Sums of pieces overflow where the sum of the numbers would not, or to NaN.
START_TEST(gemm_overflows_as_multiply_adds_do) {
  enum { K = 64, N = 40 };
  static const float factors[][2] = {
      {1.0039e30F, 1.003e30F}, {-1.0039e30F, 1.003e30F}, {3.385e38F, 1.004F}, {1.004F, 3.385e38F}};
  FOR_LEVELS(k) for (int i = 0; i < 4; i++) {
    float *a = zeros(K * 4), *b = random_f32(K * N), *c = zeros(N * 4);
    a[9] = factors[i][0], b[9 * N + 5] = factors[i][1];
    Gemm g = {
        .m = 1, .n = N, .k = K, .a = a, .b = b, .c = c, .lda = K, .ldb = N, .ldc = N, .alpha = 1};
    k->gemm_f32(&g);
    float want = factors[i][0] * factors[i][1];
    ck_assert_msg(c[5] == want, "%s: %g x %g is %g", k->level, (double)factors[i][0],
                  (double)factors[i][1], (double)c[5]);
    free(a), free(b), free(c);
  }
}
END_TEST

Suite *gemm_suite(void);
Suite *gemm_suite(void) {
  Suite *suite = suite_create("gemm");
  TCase *tcase = tcase_create("gemm");
  tcase_set_timeout(tcase, 60);
  tcase_add_test(tcase, gemm_agrees_with_the_formula);
  tcase_add_test(tcase, gemm_bits_depend_on_row_and_column_alone);
  tcase_add_test(tcase, gemm_bits_are_the_same_across_blocks);
  tcase_add_test(tcase, batched_gemm_and_bf16_inputs);
  tcase_add_test(tcase, gemm_errs_by_a_few_roundings);
  tcase_add_test(tcase, gemm_of_numbers_at_the_ends_of_f32);
  tcase_add_test(tcase, gemm_overflows_as_multiply_adds_do);
  suite_add_tcase(suite, tcase);
  return suite;
}
