// test_attention - attention against its formula with the whole T x S matrix in f64, backward
// against finite differences of that formula; masks, windows, grouped heads, slices of a fused
// buffer.
#include "ops/kernels/kernels.h"
#include "ops/kernels/threads.h"
#include "tests/numbers.h"
#include "tests/tests.h"

#include <stdio.h>

typedef struct Problem {
  int64_t B, T, S, H, Hkv, D;
  bool causal;
  int64_t window;
  bool has_mask;
} Problem;

// One buffer [B, max(T,S), (H + 2 Hkv), D] holds q, k and v side by side, as a fused projection
// would.
static int64_t width(const Problem *p) { return (p->H + 2 * p->Hkv) * p->D; }
static int64_t steps(const Problem *p) { return p->T > p->S ? p->T : p->S; }
static int64_t size_qkv(const Problem *p) { return p->B * steps(p) * width(p); }
static int64_t size_out(const Problem *p) { return p->B * p->T * p->H * p->D; }

static const double *the_mask; // [H, T, S]

static bool sees(const Problem *p, int64_t i, int64_t j) {
  int64_t own = i + p->S - p->T;
  if (p->causal && j > own) return false;
  if (p->window && j <= own - p->window) return false;
  return !(p->window && !p->causal && j >= own + p->window);
}

static void formula(const double *qkv, double *out, const void *context) {
  const Problem *p = context;
  double scale = 1 / sqrt((double)p->D), *s = zeros(p->S * 8);
  for (int64_t b = 0; b < p->B; b++)
    for (int64_t h = 0; h < p->H; h++)
      for (int64_t i = 0; i < p->T; i++) {
        const double *batch = qkv + b * steps(p) * width(p), *q = batch + i * width(p) + h * p->D;
        int64_t hkv = h / (p->H / p->Hkv);
        double *o = out + ((b * p->T + i) * p->H + h) * p->D, top = -HUGE_VAL, sum = 0;
        for (int64_t j = 0; j < p->S; j++) {
          const double *k = batch + j * width(p) + (p->H + hkv) * p->D;
          s[j] = 0;
          for (int64_t d = 0; d < p->D; d++) s[j] += scale * q[d] * k[d];
          if (p->has_mask) s[j] += the_mask[(h * p->T + i) * p->S + j];
          if (!sees(p, i, j)) s[j] = -HUGE_VAL;
          top = fmax(top, s[j]);
        }
        for (int64_t d = 0; d < p->D; d++) o[d] = 0;
        for (int64_t j = 0; j < p->S; j++) sum += s[j] == (double)-INFINITY ? 0 : exp(s[j] - top);
        for (int64_t j = 0; j < p->S; j++) {
          const double *v = batch + j * width(p) + (p->H + p->Hkv + hkv) * p->D;
          for (int64_t d = 0; d < p->D && s[j] > (double)-INFINITY; d++)
            o[d] += exp(s[j] - top) / sum * v[d];
        }
      }
  free(s);
}

// The kernel's arguments for a problem whose values are f32 (element 4) or f64 (8).
static Attention arguments(const Problem *p, char *qkv, char *dqkv, int64_t element) {
  HeadStrides in = {steps(p) * width(p), width(p), p->D},
              o = {p->T * p->H * p->D, p->H * p->D, p->D};
  int64_t k = p->H * p->D * element, v = (p->H + p->Hkv) * p->D * element;
  Attention a = {.B = p->B,
                 .T = p->T,
                 .S = p->S,
                 .H = p->H,
                 .Hkv = p->Hkv,
                 .D = p->D,
                 .q = qkv,
                 .k = qkv + k,
                 .v = qkv + v,
                 .q_at = in,
                 .k_at = in,
                 .v_at = in,
                 .scale = 1 / sqrt((double)p->D),
                 .causal = p->causal,
                 .window = p->window,
                 .out_at = o,
                 .dout_at = o,
                 .dq = dqkv,
                 .dk = dqkv + k,
                 .dv = dqkv + v,
                 .dq_at = in,
                 .dk_at = in,
                 .dv_at = in};
  a.mask_at.head = p->T * p->S, a.mask_at.row = p->S, a.mask_at.column = 1;
  return a;
}

// NaN where the gradients go: they are written without being read.
static void spoil(const Problem *p, float *d, double *d64) {
  for (int64_t row = 0; row < p->B * steps(p); row++)
    for (int64_t i = 0, t = row % steps(p); i < width(p); i++)
      if (t < (i < p->H * p->D ? p->T : p->S))
        d64[row * width(p) + i] = (double)(d[row * width(p) + i] = NAN);
}

static void check(const CpuKernels *k, Problem p, bool has_gradient) {
  int64_t n = size_qkv(&p), n_out = size_out(&p), n_mask = p.H * p.T * p.S;
  float *qkv = random_f32(n), *dqkv = zeros(n * 4), *out = zeros(n_out * 4),
        *dout = random_f32(n_out), *mask = random_f32(n_mask);
  double *qkv64 = widened(qkv, n), *dqkv64 = zeros(n * 8), *out64 = zeros(n_out * 8),
         *dout64 = widened(dout, n_out), *mask64 = widened(mask, n_mask);
  double *want = zeros(n_out * 8), *want_d = zeros(n * 8), *lse = zeros(p.B * p.H * p.T * 8);
  spoil(&p, dqkv, dqkv64);
  the_mask = mask64;
  formula(qkv64, want, &p);
  Attention a = arguments(&p, (char *)qkv, (char *)dqkv, 4),
            a64 = arguments(&p, (char *)qkv64, (char *)dqkv64, 8);
  a.out = out, a.lse = lse, a.dout = dout, a.mask = p.has_mask ? mask : NULL;
  a.workspace = zeros((int64_t)attention_workspace(&a, 8)), a64.workspace = a.workspace;
  k->attention_f32(&a);
  assert_close(out, want, n_out, 2e-6, "attention");
  if (has_gradient) {
    k->attention_bwd_f32(&a);
    differences(formula, &p, qkv64, dout64, n, n_out, want_d);
    assert_close(dqkv, want_d, n, 5e-6, "attention backward");
    a.accumulate_dq = a.accumulate_dk = a.accumulate_dv = true;
    k->attention_bwd_f32(&a);
    for (int64_t i = 0; i < n; i++) want_d[i] *= 2;
    assert_close(dqkv, want_d, n, 5e-6, "accumulated attention backward");
    for (int64_t i = 0; i < n; i++) want_d[i] /= 2;
  }
  a64.out = out64, a64.lse = lse, a64.dout = dout64, a64.mask = p.has_mask ? mask64 : NULL;
  k->attention_f64(&a64);
  assert_close64(out64, want, n_out, 1e-13, "attention f64");
  if (has_gradient) {
    k->attention_bwd_f64(&a64);
    assert_close64(dqkv64, want_d, n, 2e-8, "attention backward f64");
  }
  free(qkv), free(dqkv), free(out), free(dout), free(mask), free(qkv64), free(dqkv64), free(out64);
  free(dout64), free(mask64), free(want), free(want_d), free(lse), free(a.workspace);
}

START_TEST(attention_agrees_with_the_formula_and_its_differences) {
  static const Problem problems[] = {
      {1, 1, 1, 1, 1, 4, true, 0, false},    {2, 5, 5, 2, 1, 8, true, 0, false},
      {1, 7, 7, 4, 2, 3, false, 0, false},   {1, 6, 9, 2, 2, 5, true, 0, true},
      {1, 9, 6, 1, 1, 4, true, 0, false},    {1, 20, 20, 1, 1, 2, true, 5, false},
      {1, 12, 15, 2, 1, 3, false, 4, true},  {1, 35, 35, 1, 1, 2, true, 0, false},
      {1, 70, 135, 2, 1, 1, true, 0, false}, {1, 70, 135, 1, 1, 1, false, 0, false}};
  FOR_LEVELS(k) for (size_t i = 0; i < sizeof problems / sizeof *problems; i++) {
    threads_set(1 + (int)i % 2);
    check(k, problems[i], true);
  }
  threads_set(1);
}
END_TEST

START_TEST(attention_over_many_tiles_agrees_with_the_formula) {
  static const Problem problems[] = {{1, 300, 300, 2, 1, 64, true, 0, false},
                                     {1, 130, 290, 1, 1, 48, false, 0, false},
                                     {1, 270, 270, 1, 1, 33, true, 100, false},
                                     {1, 40, 400, 1, 1, 96, true, 0, true},
                                     {1, 1, 200, 3, 1, 64, true, 0, false}};
  FOR_LEVELS(k)
  for (size_t i = 0; i < sizeof problems / sizeof *problems; i++) check(k, problems[i], false);
}
END_TEST

// Over many tiles differences are too slow: f32 against f64, whose code is the one checked above.
START_TEST(attention_backward_over_many_tiles_is_the_same_with_1_and_3_threads_and_close_to_f64) {
  static const Problem problems[] = {{1, 300, 300, 2, 1, 64, true, 0, false},
                                     {1, 150, 290, 2, 2, 48, true, 70, false},
                                     {2, 200, 150, 1, 1, 16, false, 0, false}};
  FOR_LEVELS(k) for (size_t i = 0; i < sizeof problems / sizeof *problems; i++) {
    const Problem *p = &problems[i];
    int64_t n = size_qkv(p), n_out = size_out(p), n_lse = p->B * p->H * p->T;
    float *qkv = random_f32(n), *d1 = zeros(n * 4), *d3 = zeros(n * 4), *o1 = zeros(n_out * 4),
          *o3 = zeros(n_out * 4), *dout = random_f32(n_out), *lse = zeros(n_lse * 4);
    double *qkv64 = widened(qkv, n), *d64 = zeros(n * 8), *o64 = zeros(n_out * 8),
           *dout64 = widened(dout, n_out), *lse64 = zeros(n_lse * 8), *workspace = zeros(n_lse * 8);
    for (int threads = 1; threads <= 3; threads += 2) {
      Attention a = arguments(p, (char *)qkv, (char *)(threads == 1 ? d1 : d3), 4);
      a.out = threads == 1 ? o1 : o3, a.lse = lse, a.dout = dout, a.workspace = workspace;
      threads_set(threads);
      k->attention_f32(&a), k->attention_bwd_f32(&a);
    }
    assert_same(o1, o3, n_out * 4, "attention with 3 threads");
    assert_same(d1, d3, n * 4, "attention backward with 3 threads");
    Attention a = arguments(p, (char *)qkv64, (char *)d64, 8);
    a.out = o64, a.lse = lse64, a.dout = dout64, a.workspace = workspace;
    k->attention_f64(&a), k->attention_bwd_f64(&a);
    assert_close(o1, o64, n_out, 2e-6, "attention"),
        assert_close(d1, d64, n, 4e-6, "attention backward");
    free(qkv), free(d1), free(d3), free(o1), free(o3), free(dout), free(lse);
    free(qkv64), free(d64), free(o64), free(dout64), free(lse64), free(workspace);
  }
  threads_set(1);
}
END_TEST

START_TEST(a_querys_bits_do_not_depend_on_the_other_queries) {
  enum { S = 210, D = 40 };
  float *q = random_f32(S * D), *k_ = random_f32(S * D + 3), *v = random_f32(S * D + 5),
        *all = zeros(S * D * 4), *one = zeros(S * D * 4), *lse = zeros(S * 4);
  HeadStrides at = {S * D, D, D};
  FOR_LEVELS(k) {
    Attention a = {.B = 1,
                   .T = S,
                   .S = S,
                   .H = 1,
                   .Hkv = 1,
                   .D = D,
                   .q = q,
                   .k = k_ + 3,
                   .v = v + 5,
                   .q_at = at,
                   .k_at = at,
                   .v_at = at,
                   .scale = 0.2,
                   .causal = true,
                   .out = all,
                   .out_at = at,
                   .lse = lse};
    k->attention_f32(&a);
    for (int64_t n = 1; n < S; n += 13) { // query n - 1 alone, as the last of n keys
      Attention b = a;
      b.T = 1, b.S = n, b.q = q + (n - 1) * D, b.out = one;
      k->attention_f32(&b);
      assert_same(one, all + (n - 1) * D, D * 4, "query alone");
    }
  }
  free(q), free(k_), free(v), free(all), free(one), free(lse);
}
END_TEST

START_TEST(a_query_that_sees_no_key_gives_zero) {
  FOR_LEVELS(k) {
    float q[8] = {1, 1, 1, 1, 1, 1, 1, 1}, k1[4] = {1, 2, 3, 4}, v[4] = {1, 2, 3, 4}, out[8],
          lse[2];
    float dq[8], dk[4], dv[4], workspace[2];
    HeadStrides at = {8, 4, 4};
    Attention a = {.B = 1,
                   .T = 2,
                   .S = 1,
                   .H = 1,
                   .Hkv = 1,
                   .D = 4,
                   .q = q,
                   .k = k1,
                   .v = v,
                   .q_at = at,
                   .k_at = at,
                   .v_at = at,
                   .scale = 0.5,
                   .causal = true,
                   .out = out,
                   .out_at = at,
                   .lse = lse,
                   .dout = q,
                   .dout_at = at,
                   .dq = dq,
                   .dk = dk,
                   .dv = dv,
                   .dq_at = at,
                   .dk_at = at,
                   .dv_at = at,
                   .workspace = workspace};
    k->attention_f32(&a), k->attention_bwd_f32(&a);
    for (int i = 0; i < 4; i++)
      ck_assert(out[i] == 0 && out[4 + i] == v[i] && dq[i] == 0 && dv[i] == 1);
    ck_assert(lse[0] == -INFINITY);
  }
}
END_TEST

Suite *attention_suite(void);
Suite *attention_suite(void) {
  Suite *suite = suite_create("attention");
  TCase *tcase = tcase_create("attention");
  tcase_set_timeout(tcase, 120);
  tcase_add_test(tcase, attention_agrees_with_the_formula_and_its_differences);
  tcase_add_test(tcase, attention_over_many_tiles_agrees_with_the_formula);
  tcase_add_test(
      tcase, attention_backward_over_many_tiles_is_the_same_with_1_and_3_threads_and_close_to_f64);
  tcase_add_test(tcase, a_querys_bits_do_not_depend_on_the_other_queries);
  tcase_add_test(tcase, a_query_that_sees_no_key_gives_zero);
  suite_add_tcase(suite, tcase);
  return suite;
}
