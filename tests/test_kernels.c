// test_kernels - the CPU kernels, at every level of instructions that this machine runs, against
// plain formulas in f64; backward against finite differences of those formulas; and bit for bit
// against themselves at other offsets, lengths and thread counts.
#include "core/poll.h"
#include "core/spans.h"
#include "ops/kernels/gather.h"
#include "ops/kernels/kernels.h"
#include "ops/kernels/threads.h"
#include "tests/numbers.h"
#include "tests/tests.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define X(name) +1
enum { N_UNARY_FNS = 0 UNARY_LIST(X), N_BINARY_FNS = 0 BINARY_LIST(X) };
#undef X

// ---- threads ------------------------------------------------------------------------------------

static void count_blocks(void *context, int64_t begin, int64_t end) {
  int64_t *seen = context;
  for (int64_t i = begin; i < end; i++) __atomic_fetch_add(&seen[i], 1, __ATOMIC_RELAXED);
}

START_TEST(parallel_for_visits_each_item_once) {
  int64_t seen[1000];
  for (int threads = 1; threads <= 5; threads += 2) {
    threads_set(threads);
    for (int64_t grain = 1; grain < 1200; grain = grain * 3 + 1) {
      memset(seen, 0, sizeof seen);
      parallel_for(1000, grain, count_blocks, seen);
      for (int i = 0; i < 1000; i++) ck_assert_int_eq(seen[i], 1);
    }
  }
  threads_set(1);
}
END_TEST

static void nested(void *context, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++)
    parallel_for(10, 1, count_blocks, (int64_t *)context + i * 10);
}

START_TEST(a_nested_parallel_for_runs_on_its_own_thread) {
  int64_t seen[500] = {0};
  threads_set(3);
  parallel_for(50, 1, nested, seen);
  threads_set(1);
  for (int i = 0; i < 500; i++) ck_assert_int_eq(seen[i], 1);
}
END_TEST

START_TEST(fewer_threads_do_not_run_the_last_job_again) {
  int64_t seen[64] = {0};
  for (int turn = 0; turn < 20; turn++) {
    threads_set(4);
    parallel_for(64, 1, count_blocks, seen);
    threads_set(3);
  }
  threads_set(1);
  for (int i = 0; i < 64; i++) ck_assert_int_eq(seen[i], 20);
}
END_TEST

static int n_polls;
static void poll_once(void) { n_polls++; }
static void dawdle(void *context, int64_t begin, int64_t end) {
  (void)context, (void)begin, (void)end;
  volatile double x = 0;
  for (int i = 0; i < 400000; i++) x = x + 1;
}

START_TEST(the_poll_hook_runs_between_blocks_and_not_too_often) {
  for (int threads = 1; threads <= 2; threads++) {
    threads_set(threads);
    poll_hook = poll_once;
    n_polls = 0;
    int64_t seen[1000] = {0};
    parallel_for(1000, 1, count_blocks, seen);
    ck_assert_int_le(n_polls, 20);
    n_polls = 0;
    parallel_for(20, 1, dawdle, NULL);
    ck_assert_int_ge(n_polls, 1);
    ck_assert_int_le(n_polls, 20);
    poll_hook = NULL;
  }
  threads_set(1);
}
END_TEST

// A product of a few milliseconds on one thread is one block.
START_TEST(the_poll_hook_runs_within_a_product) {
  enum { M = 500, N = 300, K = 1200 };
  float *a = calloc(M * K, sizeof *a), *b = calloc(K * N, sizeof *b), *c = calloc(M * N, sizeof *c);
  Gemm gemm = {
      .m = M, .n = N, .k = K, .a = a, .b = b, .c = c, .lda = K, .ldb = N, .ldc = N, .alpha = 1};
  threads_set(1);
  poll_hook = poll_once;
  n_polls = 0;
  double start = clock_now();
  gemm_f32(&gemm);
  double most = (clock_now() - start) * 1e4 + 1; // one in 100 us
  poll_hook = NULL;
  ck_assert_int_ge(n_polls, 4);
  ck_assert(n_polls <= most);
  free(a);
  free(b);
  free(c);
}
END_TEST

// ---- vector functions ---------------------------------------------------------------------------

static double d_sigmoid(double x) { return 1 / (1 + exp(-x)); }
static double d_rsqrt(double x) { return 1 / sqrt(x); }
static double d_square(double x) { return x * x; }
static double d_reciprocal(double x) { return 1 / x; }
static double d_neg(double x) { return -x; }

// Errors in units of the last place of the result, plus an absolute part where a function crosses
// zero by cancellation.
static const struct {
  UnaryFn fn;
  const char *name;
  double (*want)(double);
  double ulp, absolute;
} unary_cases[] = {{UNARY_exp, "exp", exp, 2, 0},
                   {UNARY_log, "log", log, 2, 0},
                   {UNARY_tanh, "tanh", tanh, 4, 0},
                   {UNARY_erf, "erf", erf, 4, 0},
                   {UNARY_sigmoid, "sigmoid", d_sigmoid, 4, 1.2e-38},
                   {UNARY_sqrt, "sqrt", sqrt, 0.51, 0},
                   {UNARY_rsqrt, "rsqrt", d_rsqrt, 2, 0},
                   {UNARY_gelu, "gelu", d_gelu, 8, 2.5e-7},
                   {UNARY_gelu_tanh, "gelu_tanh", d_gelu_tanh, 8, 2.5e-7},
                   {UNARY_silu, "silu", d_silu, 6, 4e-37},
                   {UNARY_relu, "relu", d_relu, 0, 0},
                   {UNARY_abs, "abs", fabs, 0, 0},
                   {UNARY_neg, "neg", d_neg, 0, 0},
                   {UNARY_square, "square", d_square, 0.51, 0},
                   {UNARY_reciprocal, "reciprocal", d_reciprocal, 0.51, 0}};
enum { N_UNARY_CASES = sizeof unary_cases / sizeof *unary_cases };

static double unit_in_last_place(double x) {
  int exponent;
  frexp(fabs(x), &exponent);
  return ldexp(1, (exponent < -125 ? -125 : exponent) - 24);
}

START_TEST(vector_functions_agree_with_libm_over_all_floats) {
  enum { N = 1 << 17 };
  float *x = zeros(N * 4), *y = zeros(N * 4);
  for (uint32_t i = 0; i < N;
       i++) { // every 32771st bit pattern, subnormals, infinities and NaN too
    uint32_t bits = i * 32771u;
    if (i < 8)
      bits = (uint32_t[]){0,           0x80000000u, 0x7f800000u, 0xff800000u,
                          0x7fc00000u, 1,           0x80000001u, 0x007fffffu}[i];
    memcpy(&x[i], &bits, 4);
  }
  FOR_LEVELS(k) for (int c = 0; c < N_UNARY_CASES; c++) {
    k->unary_f32(unary_cases[c].fn, y, x, N, 0, 0);
    for (int i = 0; i < N; i++) {
      double want = unary_cases[c].want((double)x[i]);
      float rounded = (float)want;
      if (isnan(want)) {
        ck_assert_msg(isnan(y[i]), "%s %s(%g) is %g", k->level, unary_cases[c].name, (double)x[i],
                      (double)y[i]);
        continue;
      }
      if (isinf(rounded) || isinf(y[i])) {
        bool near_top = fabs(want) > 3.4028e38 && fabs(want) < 3.4029e38;
        ck_assert_msg(near_top || y[i] == rounded || (isinf(x[i]) && isnan(y[i])),
                      "%s %s(%g) is %g", k->level, unary_cases[c].name, (double)x[i], (double)y[i]);
        continue;
      }
      double error = fabs((double)y[i] - want);
      double bound = unary_cases[c].ulp * unit_in_last_place(want) + unary_cases[c].absolute;
      ck_assert_msg(error <= bound, "%s %s(%.9g) is %.9g, want %.9g (%.2f ulp)", k->level,
                    unary_cases[c].name, (double)x[i], (double)y[i], want,
                    error / unit_in_last_place(want));
    }
  }
  free(x), free(y);
}
END_TEST

START_TEST(an_elements_bits_do_not_depend_on_its_place) {
  enum { N = 150 };
  float *a = random_f32(N + 20), *b = random_f32(N + 20), *out = zeros(4 * (N + 40));
  for (int i = 0; i < N; i++) a[i] *= 5, b[i] *= 3;
  FOR_LEVELS(k) {
    for (int fn = 0; fn < N_UNARY_FNS + N_BINARY_FNS; fn++) {
      float alone[N];
      for (int i = 0; i < N; i++)
        if (fn < N_UNARY_FNS)
          k->unary_f32((UnaryFn)fn, &alone[i], &a[i], 1, -0.5, 0.5);
        else
          k->binary_f32((BinaryFn)(fn - N_UNARY_FNS), &alone[i], &a[i], &b[i], 1);
      for (int offset = 0; offset < 18; offset++)
        for (int n = 1; n + offset <= N; n += n < 40 ? 1 : 37) {
          float *to = out + offset % 5;
          if (fn < N_UNARY_FNS)
            k->unary_f32((UnaryFn)fn, to, a + offset, n, -0.5, 0.5);
          else
            k->binary_f32((BinaryFn)(fn - N_UNARY_FNS), to, a + offset, b + offset, n);
          assert_same(to, alone + offset, n * 4, "element");
        }
    }
  }
  free(a), free(b), free(out);
}
END_TEST

// Derivatives of the *_bwd rows by central differences of the forward formula, in f64.
static const struct {
  BinaryFn fn;
  double (*forward)(double);
  bool takes_result;
} slope_cases[] = {{BINARY_abs_bwd, fabs, false},
                   {BINARY_log_bwd, log, false},
                   {BINARY_sqrt_bwd, sqrt, true},
                   {BINARY_rsqrt_bwd, d_rsqrt, true},
                   {BINARY_tanh_bwd, tanh, true},
                   {BINARY_sigmoid_bwd, d_sigmoid, true},
                   {BINARY_erf_bwd, erf, false},
                   {BINARY_relu_bwd, d_relu, false},
                   {BINARY_gelu_bwd, d_gelu, false},
                   {BINARY_gelu_tanh_bwd, d_gelu_tanh, false},
                   {BINARY_silu_bwd, d_silu, false},
                   {BINARY_square_bwd, d_square, false},
                   {BINARY_reciprocal_bwd, d_reciprocal, true}};

START_TEST(slopes_agree_with_finite_differences) {
  FOR_LEVELS(k) for (size_t c = 0; c < sizeof slope_cases / sizeof *slope_cases; c++) {
    for (double x = -4.05; x < 4.2; x += 0.1) {
      if (x < 0.2 && (slope_cases[c].forward == log || slope_cases[c].forward == sqrt ||
                      slope_cases[c].forward == d_rsqrt))
        continue;
      if (fabs(x) < 0.3 && slope_cases[c].forward == d_reciprocal) continue;
      double h = 1e-5, dy = 1.5, f = slope_cases[c].forward(x), got64;
      double want = dy * (slope_cases[c].forward(x + h) - slope_cases[c].forward(x - h)) / (2 * h);
      double operand = slope_cases[c].takes_result ? f : x;
      k->binary_f64(slope_cases[c].fn, &got64, &dy, &operand, 1);
      ck_assert_msg(fabs(got64 - want) < 1e-8 * (1 + fabs(want)),
                    "case %d at %g: %.12g, want %.12g", (int)c, x, got64, want);
      float dy32 = (float)dy, operand32 = (float)operand, got;
      k->binary_f32(slope_cases[c].fn, &got, &dy32, &operand32, 1);
      ck_assert_msg(fabs((double)got - want) < 3e-6 * (1 + fabs(want)),
                    "case %d at %g: %g, want %g", (int)c, x, (double)got, want);
    }
  }
}
END_TEST

// ---- reductions ---------------------------------------------------------------------------------

static double reduce_want(ReduceFn fn, const double *a, int64_t red, int64_t step,
                          int64_t correction) {
  double sum = 0, top = -HUGE_VAL, low = HUGE_VAL, rest = 0;
  for (int64_t r = 0; r < red; r++) {
    sum += a[r * step], top = fmax(top, a[r * step]), low = fmin(low, a[r * step]);
  }
  switch (fn) {
  case REDUCE_sum: return sum;
  case REDUCE_mean: return sum / (double)red;
  case REDUCE_max: return top;
  case REDUCE_min: return low;
  case REDUCE_logsumexp:
    for (int64_t r = 0; r < red; r++) rest += exp(a[r * step] - top);
    return top + log(rest);
  case REDUCE_var:
    for (int64_t r = 0; r < red; r++)
      rest += (a[r * step] - sum / (double)red) * (a[r * step] - sum / (double)red);
    return rest / (double)(red - correction);
  }
  return 0;
}

START_TEST(reductions_agree_with_the_formula_and_with_themselves) {
  static const int64_t shapes[][3] = {{3, 2, 1},    {5, 37, 1},  {1, 100000, 1}, {2, 5000, 1},
                                      {1, 200, 70}, {3, 130, 5}, {7, 3, 33}};
  FOR_LEVELS(k)
  for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
    for (int fn = REDUCE_sum; fn <= REDUCE_var; fn++) {
      int64_t outer = shapes[s][0], red = shapes[s][1], inner = shapes[s][2],
              n = outer * red * inner;
      float *a = random_f32(n + 20), *out = zeros(4 * outer * inner),
            *again = zeros(4 * outer * inner);
      for (int64_t i = 0; i < n; i++) a[i] += 1; // sums that do not cancel
      double *a64 = widened(a, n), *want = zeros(8 * outer * inner),
             *out64 = zeros(8 * outer * inner);
      for (int64_t o = 0; o < outer * inner; o++)
        want[o] =
            reduce_want((ReduceFn)fn, a64 + o / inner * red * inner + o % inner, red, inner, 1);
      threads_set(1);
      Reduce r = {outer, red, inner, a, out, 1, false};
      k->reduce_f32((ReduceFn)fn, &r);
      assert_close(out, want, outer * inner, 3e-6, "reduce");
      Reduce r64 = {outer, red, inner, a64, out64, 1, false};
      k->reduce_f64((ReduceFn)fn, &r64);
      assert_close64(out64, want, outer * inner, 1e-12, "reduce f64");
      threads_set(2);
      memmove(a + 3, a, (size_t)n * 4);
      r.a = a + 3, r.out = again;
      k->reduce_f32((ReduceFn)fn, &r);
      assert_same(again, out, 4 * outer * inner, "reduce at another offset, with 2 threads");
      r.accumulate = true;
      k->reduce_f32((ReduceFn)fn, &r);
      for (int64_t i = 0; i < outer * inner; i++) ck_assert(again[i] == out[i] + out[i]);
      free(a), free(out), free(again), free(a64), free(want), free(out64);
    }
  threads_set(1);
}
END_TEST

START_TEST(extrema_pass_nan_on_and_argmax_takes_the_first) {
  FOR_LEVELS(k) for (int at = 0; at < 40; at++) {
    float a[40], out;
    for (int i = 0; i < 40; i++) a[i] = (float)(i % 7);
    int64_t index;
    k->argmax_f32(&index, a, 1, 40, 1);
    ck_assert_int_eq(index, 6);
    a[at] = NAN;
    Reduce r = {1, 40, 1, a, &out, 0, false};
    k->reduce_f32(REDUCE_max, &r);
    ck_assert(isnan(out));
    k->reduce_f32(REDUCE_min, &r);
    ck_assert(isnan(out));
    k->argmax_f32(&index, a, 1, 40, 1);
    ck_assert_int_eq(index, at);
  }
}
END_TEST

START_TEST(logsumexp_of_infinities) {
  FOR_LEVELS(k) for (int inner = 1; inner <= 2; inner++) {
    float a[8] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY,
                  -INFINITY, -INFINITY, -INFINITY, -INFINITY},
          out[2];
    Reduce r = {1, 8 / inner, inner, a, out, 0, false};
    k->reduce_f32(REDUCE_logsumexp, &r);
    ck_assert(out[0] == -INFINITY);
    a[2] = INFINITY;
    k->reduce_f32(REDUCE_logsumexp, &r);
    ck_assert(out[0] == INFINITY);
  }
}
END_TEST

// ---- rows ---------------------------------------------------------------------------------------

enum { ROWS = 5, COLUMNS = 37 };

static void softmax_want(const double *x, double *y, const void *is_log) {
  for (int r = 0; r < ROWS; r++, x += COLUMNS, y += COLUMNS) {
    double lse = reduce_want(REDUCE_logsumexp, x, COLUMNS, 1, 0);
    for (int c = 0; c < COLUMNS; c++) y[c] = is_log ? x[c] - lse : exp(x[c] - lse);
  }
}

START_TEST(softmax_and_log_softmax_forward_and_backward) {
  enum { N = ROWS * COLUMNS };
  float *x = random_f32(N), *dy = random_f32(N), y[N], dx[N];
  double *x64 = widened(x, N), *dy64 = widened(dy, N), want[N], want_dx[N], got[N], got_dx[N];
  FOR_LEVELS(k) for (int is_log = 0; is_log < 2; is_log++) {
    softmax_want(x64, want, is_log ? "log" : NULL);
    differences(softmax_want, is_log ? "log" : NULL, x64, dy64, N, N, want_dx);
    Softmax s = {ROWS, COLUMNS, x, y, y, dy, dx, false},
            s64 = {ROWS, COLUMNS, x64, got, got, dy64, got_dx, false};
    (is_log ? k->log_softmax_f32 : k->softmax_f32)(&s);
    (is_log ? k->log_softmax_bwd_f32 : k->softmax_bwd_f32)(&s);
    (is_log ? k->log_softmax_f64 : k->softmax_f64)(&s64);
    (is_log ? k->log_softmax_bwd_f64 : k->softmax_bwd_f64)(&s64);
    assert_close(y, want, N, 1e-6, "softmax");
    assert_close64(got, want, N, 1e-14, "softmax f64");
    assert_close(dx, want_dx, N, 3e-6, "softmax backward");
    assert_close64(got_dx, want_dx, N, 1e-8, "softmax backward f64");
  }
  free(x), free(dy), free(x64), free(dy64);
}
END_TEST

typedef struct NormCase {
  bool is_rms;
  const double *gamma, *beta, *x;
  int what; // of what the differences are taken: x, gamma, beta
} NormCase;

static void norm_want(const double *moved, double *y, const void *context) {
  const NormCase *c = context;
  const double *x = c->what == 0 ? moved : c->x, *gamma = c->what == 1 ? moved : c->gamma,
               *beta = c->what == 2 ? moved : c->beta;
  for (int r = 0; r < ROWS; r++, x += COLUMNS, y += COLUMNS) {
    double mean = 0, var = 0;
    for (int i = 0; i < COLUMNS && !c->is_rms; i++) mean += x[i] / COLUMNS;
    for (int i = 0; i < COLUMNS; i++) var += (x[i] - mean) * (x[i] - mean) / COLUMNS;
    for (int i = 0; i < COLUMNS; i++)
      y[i] = (x[i] - mean) / sqrt(var + 1e-5) * gamma[i] + (beta ? beta[i] : 0);
  }
}

START_TEST(norms_forward_and_backward) {
  enum { N = ROWS * COLUMNS, C = COLUMNS };
  float *x = random_f32(N), *dy = random_f32(N), *gamma = random_f32(C), *beta = random_f32(C);
  double *x64 = widened(x, N), *dy64 = widened(dy, N), *gamma64 = widened(gamma, C),
         *beta64 = widened(beta, C);
  void *workspace = zeros((int64_t)norm_workspace(ROWS, C, 8));
  FOR_LEVELS(k) for (int rms = 0; rms < 2; rms++) {
    float y[N], dx[N], dgamma[C] = {0}, dbeta[C] = {0}, mean[ROWS], rstd[ROWS];
    double want[N], want_dx[N], want_dgamma[C], want_dbeta[C], y64[N], dx64[N], dgamma64[C],
        dbeta64[C], mean64[ROWS], rstd64[ROWS];
    NormCase c = {rms, gamma64, rms ? NULL : beta64, x64, 0};
    norm_want(x64, want, &c);
    differences(norm_want, &c, x64, dy64, N, N, want_dx);
    c.what = 1;
    differences(norm_want, &c, gamma64, dy64, C, N, want_dgamma);
    c.what = 2;
    differences(norm_want, &c, beta64, dy64, C, N, want_dbeta);
    Norm n = {ROWS,
              C,
              rms,
              1e-5,
              x,
              gamma,
              rms ? NULL : beta,
              y,
              rms ? NULL : mean,
              rstd,
              dy,
              dx,
              dgamma,
              rms ? NULL : dbeta,
              false,
              true,
              workspace};
    Norm n64 = {ROWS,
                C,
                rms,
                1e-5,
                x64,
                gamma64,
                rms ? NULL : beta64,
                y64,
                rms ? NULL : mean64,
                rstd64,
                dy64,
                dx64,
                dgamma64,
                rms ? NULL : dbeta64,
                false,
                false,
                workspace};
    k->norm_f32(&n), k->norm_bwd_f32(&n), k->norm_f64(&n64), k->norm_bwd_f64(&n64);
    assert_close(y, want, N, 2e-6, "norm"), assert_close64(y64, want, N, 1e-13, "norm f64");
    assert_close(dx, want_dx, N, 5e-6, "norm dx"),
        assert_close64(dx64, want_dx, N, 1e-8, "norm dx f64");
    assert_close(dgamma, want_dgamma, C, 5e-6, "dgamma"),
        assert_close64(dgamma64, want_dgamma, C, 1e-8, "dgamma f64");
    if (!rms)
      assert_close(dbeta, want_dbeta, C, 5e-6, "dbeta"),
          assert_close64(dbeta64, want_dbeta, C, 1e-8, "dbeta f64");
  }
  free(x), free(dy), free(gamma), free(beta), free(x64), free(dy64), free(gamma64), free(beta64),
      free(workspace);
}
END_TEST

static void cross_entropy_want(const double *x, double *loss, const void *context) {
  const CrossEntropy *c = context;
  for (int r = 0; r < ROWS; r++, x += COLUMNS) {
    double lse = reduce_want(REDUCE_logsumexp, x, COLUMNS, 1, 0), flat = 0;
    for (int i = 0; i < COLUMNS; i++) flat += (lse - x[i]) / COLUMNS;
    loss[r] = c->targets[r] == c->ignore_index ? 0
                                               : (1 - c->smoothing) * (lse - x[c->targets[r]]) +
                                                     c->smoothing * flat + c->z_loss * lse * lse;
  }
}

START_TEST(cross_entropy_forward_and_backward) {
  enum { N = ROWS * COLUMNS };
  float *x = random_f32(N), *seed = random_f32(ROWS), loss[ROWS], lse[ROWS], dx[N];
  double *x64 = widened(x, N), *seed64 = widened(seed, ROWS), want[ROWS], want_dx[N], loss64[ROWS],
         lse64[ROWS], dx64[N];
  int64_t targets[ROWS] = {0, 36, -100, 17, 5};
  FOR_LEVELS(k) for (int variant = 0; variant < 4; variant++) {
    CrossEntropy c = {.rows = ROWS,
                      .columns = COLUMNS,
                      .logits = x,
                      .targets = targets,
                      .ignore_index = -100,
                      .smoothing = variant & 1 ? 0.1 : 0,
                      .z_loss = variant & 2 ? 0.01 : 0,
                      .loss = loss,
                      .lse = lse,
                      .seed = seed,
                      .dlogits = dx};
    cross_entropy_want(x64, want, &c);
    differences(cross_entropy_want, &c, x64, seed64, N, ROWS, want_dx);
    k->cross_entropy_f32(&c), k->cross_entropy_bwd_f32(&c);
    assert_close(loss, want, ROWS, 2e-6, "loss"), assert_close(dx, want_dx, N, 3e-6, "dlogits");
    c.accumulate = true;
    k->cross_entropy_bwd_f32(&c);
    for (int i = 0; i < N; i++) want_dx[i] *= 2;
    assert_close(dx, want_dx, N, 3e-6, "accumulated dlogits");
    for (int i = 0; i < N; i++) want_dx[i] /= 2;
    c.accumulate = false, c.logits = x64, c.loss = loss64, c.lse = lse64, c.seed = seed64,
    c.dlogits = dx64;
    k->cross_entropy_f64(&c), k->cross_entropy_bwd_f64(&c);
    assert_close64(loss64, want, ROWS, 1e-13, "loss f64"),
        assert_close64(dx64, want_dx, N, 1e-8, "dlogits f64");
  }
  free(x), free(seed), free(x64), free(seed64);
}
END_TEST

// A row's bits: alone, at another offset, among others, with 1 and 2 threads.
START_TEST(a_rows_bits_do_not_depend_on_the_other_rows) {
  enum { R = 70, C = 531 };
  float *x = random_f32(R * C + 8), *dy = random_f32(R * C + 8), *y = zeros(R * C * 4),
        *dx = zeros(R * C * 4);
  float *gamma = random_f32(C), *mean = zeros(R * 4), *rstd = zeros(R * 4),
        *one = zeros(C * 4 + 64), *done = zeros(C * 4), m1, r1;
  FOR_LEVELS(k) for (int threads = 1; threads <= 2; threads++) {
    threads_set(threads);
    Softmax s = {R, C, x, y, y, dy, dx, false};
    k->softmax_f32(&s), k->softmax_bwd_f32(&s);
    for (int r = 0; r < R; r += 23) {
      Softmax alone = {1, C, x + r * C, one + r % 7, one + r % 7, dy + r * C, done, false};
      k->softmax_f32(&alone), k->softmax_bwd_f32(&alone);
      assert_same(one + r % 7, y + r * C, C * 4, "softmax row"),
          assert_same(done, dx + r * C, C * 4, "softmax backward row");
    }
    Norm n = {.rows = R,
              .columns = C,
              .eps = 1e-5,
              .x = x,
              .gamma = gamma,
              .y = y,
              .mean = mean,
              .rstd = rstd,
              .dy = dy,
              .dx = dx};
    k->norm_f32(&n), k->norm_bwd_f32(&n);
    for (int r = 0; r < R; r += 23) {
      Norm alone = {.rows = 1,
                    .columns = C,
                    .eps = 1e-5,
                    .x = x + r * C,
                    .gamma = gamma,
                    .y = one + r % 7,
                    .mean = &m1,
                    .rstd = &r1,
                    .dy = dy + r * C,
                    .dx = done};
      k->norm_f32(&alone), k->norm_bwd_f32(&alone);
      assert_same(one + r % 7, y + r * C, C * 4, "norm row"),
          assert_same(done, dx + r * C, C * 4, "norm backward row");
    }
  }
  threads_set(1);
  free(x), free(dy), free(y), free(dx), free(gamma), free(mean), free(rstd), free(one), free(done);
}
END_TEST

Suite *kernels_suite(void);
Suite *kernels_suite(void) {
  Suite *suite = suite_create("kernels");
  TCase *tcase = tcase_create("kernels");
  tcase_set_timeout(tcase, 120);
  tcase_add_test(tcase, parallel_for_visits_each_item_once);
  tcase_add_test(tcase, a_nested_parallel_for_runs_on_its_own_thread);
  tcase_add_test(tcase, fewer_threads_do_not_run_the_last_job_again);
  tcase_add_test(tcase, the_poll_hook_runs_between_blocks_and_not_too_often);
  tcase_add_test(tcase, the_poll_hook_runs_within_a_product);
  tcase_add_test(tcase, vector_functions_agree_with_libm_over_all_floats);
  tcase_add_test(tcase, an_elements_bits_do_not_depend_on_its_place);
  tcase_add_test(tcase, slopes_agree_with_finite_differences);
  tcase_add_test(tcase, reductions_agree_with_the_formula_and_with_themselves);
  tcase_add_test(tcase, extrema_pass_nan_on_and_argmax_takes_the_first);
  tcase_add_test(tcase, logsumexp_of_infinities);
  tcase_add_test(tcase, softmax_and_log_softmax_forward_and_backward);
  tcase_add_test(tcase, norms_forward_and_backward);
  tcase_add_test(tcase, cross_entropy_forward_and_backward);
  tcase_add_test(tcase, a_rows_bits_do_not_depend_on_the_other_rows);
  suite_add_tcase(suite, tcase);
  return suite;
}
