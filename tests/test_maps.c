// test_maps - maps over strided arrays of every dtype, copies and sums by index, rotary embedding,
// dropout, and the flat optimizers, against plain loops.
#include "ops/kernels/elementwise.h"
#include "ops/kernels/gather.h"
#include "ops/kernels/threads.h"
#include "tests/numbers.h"
#include "tests/tests.h"

// ---- maps ---------------------------------------------------------------------------------------

// out[i,j,k] = a[k,j,i] - b[j], the shape given in an order that no operand is contiguous in.
START_TEST(a_map_follows_strides_and_broadcasts) {
  static const int64_t shapes[][3] = {
      {3, 4, 5}, {1, 70, 40}, {40, 1, 90}, {33, 17, 1}, {2, 3, 3000}};
  for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
    for (int threads = 1; threads <= 2; threads++) {
      int64_t I = shapes[s][0], J = shapes[s][1], K = shapes[s][2], n = I * J * K;
      float *a = random_f32(n), *b = random_f32(J), *out = zeros(n * 4);
      threads_set(threads);
      MapShape m = {3, {I, J, K}, {{J * K, K, 1}, {1, I, I * J}, {0, 1, 0}}};
      for (int accumulate = 0; accumulate < 2; accumulate++) {
        map_binary(BINARY_sub, DT_F32, &m, out, a, b, accumulate);
        for (int64_t i = 0; i < I; i++)
          for (int64_t j = 0; j < J; j++)
            for (int64_t k = 0; k < K; k++) {
              float one = a[k * I * J + j * I + i] - b[j];
              ck_assert(out[(i * J + j) * K + k] == (accumulate ? one + one : one));
            }
      }
      // The same with the output transposed: out[k,j,i].
      MapShape back = {3, {I, J, K}, {{1, I, I * J}, {1, I, I * J}, {0, 1, 0}}};
      map_binary(BINARY_sub, DT_F32, &back, out, a, b, false);
      for (int64_t i = 0; i < n; i++) ck_assert(out[i] == a[i] - b[i / I % J]);
      free(a), free(b), free(out);
    }
  threads_set(1);
}
END_TEST

START_TEST(a_map_takes_eight_dims_none_and_empty_ones) {
  float a[256], out[256];
  MapShape m = {
      8, {2, 2, 2, 2, 2, 2, 2, 2}, {{128, 64, 32, 16, 8, 4, 2, 1}, {1, 2, 4, 8, 16, 32, 64, 128}}};
  for (int i = 0; i < 256; i++) a[i] = (float)i;
  map_unary(UNARY_neg, DT_F32, &m, out, a, 0, 0, false);
  for (int i = 0; i < 256; i++) {
    int reversed = 0;
    for (int bit = 0; bit < 8; bit++) reversed |= (i >> bit & 1) << (7 - bit);
    ck_assert(out[i] == -a[reversed]);
  }
  MapShape scalar = {0};
  map_unary(UNARY_square, DT_F32, &scalar, out, a + 3, 0, 0, false);
  ck_assert(out[0] == 9);
  MapShape empty = {2, {5, 0}, {{0, 1}, {0, 1}}};
  map_unary(UNARY_square, DT_F32, &empty, out, a + 7, 0, 0, false);
  ck_assert(out[0] == 9);
}
END_TEST

START_TEST(integers_wrap_and_divide_towards_zero) {
  int64_t a[] = {7, -7, 5, INT64_MIN, INT64_MAX, 3}, b[] = {2, 2, 0, -1, 1, -2}, out[6];
  int32_t small[] = {INT32_MAX, -5}, one[] = {1, 1}, sum[2];
  MapShape m = map_flat(6), two = map_flat(2);
  map_binary(BINARY_div, DT_I64, &m, out, a, b, false);
  ck_assert(out[0] == 3 && out[1] == -3 && out[2] == 0 && out[3] == INT64_MIN && out[5] == -1);
  map_binary(BINARY_add, DT_I64, &m, out, a, b, false);
  ck_assert(out[4] == INT64_MIN);
  map_binary(BINARY_pow, DT_I64, &m, out, a, b, false);
  ck_assert(out[0] == 49 && out[2] == 1 && out[5] == 0);
  map_binary(BINARY_add, DT_I32, &two, sum, small, one, false);
  ck_assert(sum[0] == INT32_MIN && sum[1] == -4);
}
END_TEST

START_TEST(bf16_rounds_to_nearest_even) {
  float a[] = {1, 1.00390625f, 1.01171875f, NAN, INFINITY, 3.4e38f, -0.0f, 1e-40f};
  static const uint16_t want[] = {0x3f80, 0x3f80, 0x3f82, 0x7fc0, 0x7f80, 0x7f80, 0x8000, 0x0001};
  uint16_t out[8], sum[8];
  MapShape m = map_flat(8);
  map_cast(DT_BF16, DT_F32, &m, out, a);
  for (int i = 0; i < 8; i++) ck_assert_int_eq(out[i], want[i]);
  map_binary(BINARY_add, DT_BF16, &m, sum, out, out, false);
  ck_assert_int_eq(sum[0], 0x4000);
}
END_TEST

START_TEST(casts_saturate_and_bool_is_not_zero) {
  double a[] = {1.9, -1.9, 300, -1, 1e30, -1e30, (double)NAN, 0};
  uint8_t u8[8], flags[8];
  int32_t i32[8];
  int64_t i64[8];
  MapShape m = map_flat(8);
  map_cast(DT_U8, DT_F64, &m, u8, a), map_cast(DT_I32, DT_F64, &m, i32, a);
  map_cast(DT_I64, DT_F64, &m, i64, a), map_cast(DT_BOOL, DT_F64, &m, flags, a);
  ck_assert(u8[0] == 1 && u8[1] == 0 && u8[2] == 255 && u8[3] == 0 && u8[6] == 0);
  ck_assert(i32[1] == -1 && i32[2] == 300 && i32[4] == INT32_MAX && i32[5] == INT32_MIN &&
            i32[6] == 0);
  ck_assert(i64[4] == INT64_MAX && i64[5] == INT64_MIN && i64[6] == 0);
  ck_assert(flags[0] == 1 && flags[3] == 1 && flags[6] == 1 && flags[7] == 0);
  int64_t exact = ((int64_t)1 << 53) + 1, same; // not a double
  MapShape one = map_flat(1);
  map_cast(DT_I64, DT_I64, &one, &same, &exact);
  ck_assert(same == exact);
}
END_TEST

START_TEST(comparisons_logic_and_where) {
  float a[] = {1, 2, NAN, 4}, b[] = {1, 3, NAN, 2}, picked[4];
  uint8_t lt[4], ge[4], ne[4], both[4], not_lt[4];
  MapShape m = map_flat(4);
  map_compare(COMPARE_lt, DT_F32, &m, lt, a, b), map_compare(COMPARE_ge, DT_F32, &m, ge, a, b);
  map_compare(COMPARE_ne, DT_F32, &m, ne, a, b);
  ck_assert(!lt[0] && lt[1] && !lt[2] && !lt[3] && ge[0] && !ge[1] && !ge[2] && ge[3] && ne[2]);
  map_logic(LOGIC_and, &m, both, ge, ne), map_logic(LOGIC_not, &m, not_lt, lt, NULL);
  ck_assert(!both[0] && both[3] && not_lt[0] && !not_lt[1]);
  map_where(DT_F32, &m, picked, lt, a, b);
  ck_assert(picked[0] == 1 && picked[1] == 2 && isnan(picked[2]) && picked[3] == 2);
  uint8_t any, all;
  reduce_any(&any, lt, 1, 4, 1), reduce_all(&all, lt, 1, 4, 1);
  ck_assert(any && !all);
  int64_t count[2];
  reduce_sum_int(count, DT_BOOL, not_lt, 1, 2, 2);
  ck_assert(count[0] == 2 && count[1] == 1);
}
END_TEST

// ---- by index -----------------------------------------------------------------------------------

START_TEST(gather_and_scatter_are_each_others_transpose) {
  enum { O = 3, SIZE = 7, N = 50, I = 70 };
  float *a = random_f32(O * SIZE * I), *out = zeros(4 * O * N * I), *back = zeros(4 * O * SIZE * I),
        *again = zeros(4 * O * SIZE * I);
  double *want = zeros(8 * O * SIZE * I);
  int64_t index[N], *each = zeros(8 * O * N * I);
  for (int i = 0; i < N; i++) index[i] = (i * i + 3) % SIZE;
  for (int i = 0; i < O * N * I; i++) each[i] = (i * 31 + i / 7) % SIZE;
  for (int elements = 0; elements < 2; elements++) {
    if (elements)
      gather_elements(out, a, each, O, SIZE, N, I, 4);
    else
      gather_rows(out, a, index, O, SIZE, N, I, 4);
    memset(want, 0, 8 * O * SIZE * I);
    for (int o = 0; o < O; o++)
      for (int j = 0; j < N; j++)
        for (int i = 0; i < I; i++) {
          int64_t at = (o * N + j) * I + i, from = elements ? each[at] : index[j];
          ck_assert(out[at] == a[(o * SIZE + from) * I + i]);
          want[(o * SIZE + from) * I + i] += (double)out[at];
        }
    for (int threads = 1; threads <= 3; threads++) {
      threads_set(threads);
      float *to = threads == 1 ? back : again;
      if (elements)
        scatter_elements_f32(to, out, each, O, SIZE, N, I, false);
      else
        scatter_rows_f32(to, out, index, O, SIZE, N, I, false);
      assert_close(to, want, O * SIZE * I, 1e-6, "scatter");
      if (threads > 1) assert_same(back, again, 4 * O * SIZE * I, "scatter with more threads");
    }
  }
  threads_set(1);
  free(a), free(out), free(back), free(again), free(want), free(each);
}
END_TEST

// ---- positions ----------------------------------------------------------------------------------

START_TEST(rope_turns_pairs_and_its_inverse_turns_them_back) {
  enum { B = 2, T = 5, H = 3, D = 12, ROTATED = 8, N = B * T * H * D };
  float *x = random_f32(N), y[N], back[N];
  FOR_LEVELS(k) for (int interleaved = 0; interleaved < 2; interleaved++) {
    HeadStrides at = {T * H * D, H * D, D};
    Rope r = {.B = B,
              .T = T,
              .H = H,
              .D = D,
              .n_rotated = ROTATED,
              .x = x,
              .y = y,
              .x_at = at,
              .y_at = at,
              .first_position = 4,
              .theta = 10000,
              .interleaved = interleaved};
    k->rope_f32(&r);
    for (int i = 0; i < N; i++) {
      int d = i % D, t = i / (H * D) % T;
      int pair = interleaved ? d / 2 : d % (ROTATED / 2),
          second = interleaved ? d % 2 : d / (ROTATED / 2);
      int other = interleaved ? d ^ 1 : (d + ROTATED / 2) % ROTATED;
      double angle = (t + 4) * pow(10000, -2.0 * pair / ROTATED),
             partner = (double)x[i - d + (d < ROTATED ? other : d)];
      double want = d >= ROTATED
                        ? (double)x[i]
                        : (double)x[i] * cos(angle) + (second ? 1 : -1) * partner * sin(angle);
      ck_assert_msg(fabs((double)y[i] - want) < 1e-6, "%d: %g, want %g", i, (double)y[i], want);
    }
    Rope inverse = r;
    inverse.x = y, inverse.y = back, inverse.inverse = true;
    k->rope_f32(&inverse);
    for (int i = 0; i < N; i++) ck_assert(fabs((double)back[i] - (double)x[i]) < 1e-6);
  }
  free(x);
}
END_TEST

// The published words of Philox4x32-10 at counter 0, key 0 (Random123, kat_vectors), found by where
// keeping an element flips.
START_TEST(dropout_draws_philox_words) {
  static const uint32_t words[] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
  float one[4] = {1, 1, 1, 1}, out[4];
  FOR_LEVELS(k) for (int w = 0; w < 4; w++) {
    Dropout d = {.samples = 1, .elements = 4, .x = one, .y = out, .p = words[w] / 4294967296.0};
    k->dropout_f32(&d);
    ck_assert(out[w] != 0);
    d.p = (words[w] + 1.0) / 4294967296.0;
    k->dropout_f32(&d);
    ck_assert(out[w] == 0);
  }
}
END_TEST

START_TEST(a_mask_depends_on_element_sample_and_step_alone) {
  enum { S = 5, E = 333, N = S * E };
  float *x = zeros(4 * N), whole[N], part[N], other[N];
  for (int i = 0; i < N; i++) x[i] = 1;
  FOR_LEVELS(k) for (int threads = 1; threads <= 2; threads++) {
    threads_set(threads);
    Dropout d = {.samples = S, .elements = E, .x = x, .y = whole, .p = 0.3, .key = 99, .step = 7};
    k->dropout_f32(&d);
    double kept = 0;
    for (int i = 0; i < N; i++) kept += whole[i] != 0;
    ck_assert(fabs(kept / N - 0.7) < 0.05);
    for (int s = 0; s < S; s++) // a shard [10, 110) of a single sample
    {
      Dropout shard = {.samples = 1,
                       .elements = 100,
                       .x = x,
                       .y = part,
                       .p = 0.3,
                       .key = 99,
                       .first_sample = s,
                       .first_element = 10,
                       .step = 7};
      k->dropout_f32(&shard);
      assert_same(part, whole + s * E + 10, 400, "mask of a shard");
    }
    d.step = 8, d.y = other;
    k->dropout_f32(&d);
    ck_assert(memcmp(other, whole, sizeof other) != 0);
    d.p = 1;
    k->dropout_f32(&d);
    for (int i = 0; i < N; i++) ck_assert(other[i] == 0);
    d.p = 0;
    k->dropout_f32(&d);
    for (int i = 0; i < N; i++) ck_assert(other[i] == 1);
  }
  threads_set(1);
  free(x);
}
END_TEST

// ---- optimizers ---------------------------------------------------------------------------------

START_TEST(adamw_follows_its_formula) {
  enum { N = 77 };
  FOR_LEVELS(k) {
    float *p = random_f32(N), *g = random_f32(N), *m = zeros(4 * N), *v = zeros(4 * N);
    double *want = widened(p, N), m64[N] = {0}, v64[N] = {0};
    for (int step = 1; step <= 4; step++) {
      Adamw a = {N, p, g, m, v, 0.01, 0.9, 0.99, 1e-8, 0.1, 0.5, step};
      k->adamw_f32(&a);
      for (int i = 0; i < N; i++) {
        double grad = 0.5 * (double)g[i];
        m64[i] = 0.9 * m64[i] + 0.1 * grad, v64[i] = 0.99 * v64[i] + 0.01 * grad * grad;
        want[i] -= 0.01 * 0.1 * want[i];
        want[i] -=
            0.01 * (m64[i] / (1 - pow(0.9, step))) / (sqrt(v64[i] / (1 - pow(0.99, step))) + 1e-8);
      }
    }
    assert_close(p, want, N, 1e-6, "adamw");
    free(p), free(g), free(m), free(v), free(want);
  }
}
END_TEST

START_TEST(sgd_follows_its_formula) {
  enum { N = 77 };
  FOR_LEVELS(k) for (int variant = 0; variant < 3; variant++) { // plain, momentum, Nesterov
    float *p = random_f32(N), *g = random_f32(N), *m = zeros(4 * N);
    double *want = widened(p, N), m64[N] = {0};
    for (int step = 0; step < 3; step++) {
      Sgd s = {N, p, g, variant ? m : NULL, 0.1, 0.9, 0, 0.01, 2, variant == 2, step == 0};
      k->sgd_f32(&s);
      for (int i = 0; i < N; i++) {
        double d = 2 * (double)g[i] + 0.01 * want[i];
        m64[i] = step == 0 ? d : 0.9 * m64[i] + d;
        want[i] -= 0.1 * (variant == 0 ? d : variant == 1 ? m64[i] : d + 0.9 * m64[i]);
      }
    }
    assert_close(p, want, N, 1e-6, "sgd");
    free(p), free(g), free(m), free(want);
  }
}
END_TEST

START_TEST(flat_kernels_agree_with_loops_at_any_offset_and_thread_count) {
  enum { N = 100001 };
  float *x = random_f32(N + 20), *y = random_f32(N + 20), *z = zeros(4 * (N + 20));
  FOR_LEVELS(k)
  for (int threads = 1; threads <= 2; threads++)
    for (int offset = 0; offset < 18; offset += 5) {
      threads_set(threads);
      double sum = 0;
      for (int i = 0; i < N; i++) sum += (double)x[offset + i] * (double)x[offset + i];
      double got = k->sum_squares_f32(x + offset, N);
      ck_assert(fabs(got - sum) < 1e-12 * sum);
      memcpy(z, x + offset, 4 * N);
      ck_assert(k->sum_squares_f32(z, N) == got);
      memcpy(z + offset, y, 4 * N);
      k->axpy_f32(z + offset, x, N, 0.5), k->scale_f32(z + offset, N, 2);
      for (int i = 0; i < N; i++)
        ck_assert(fabs((double)z[offset + i] - (2 * (double)y[i] + (double)x[i])) < 1e-6);
      z[offset] = NAN;
      k->scale_f32(z + offset, N, 0);
      for (int i = 0; i < N; i++) ck_assert(z[offset + i] == 0);
      k->fill_f32(z + offset, N, 3);
      for (int i = 0; i < N; i++) ck_assert(z[offset + i] == 3);
    }
  threads_set(1);
  free(x), free(y), free(z);
}
END_TEST

Suite *maps_suite(void);
Suite *maps_suite(void) {
  Suite *suite = suite_create("maps");
  TCase *tcase = tcase_create("maps");
  tcase_set_timeout(tcase, 120);
  tcase_add_test(tcase, a_map_follows_strides_and_broadcasts);
  tcase_add_test(tcase, a_map_takes_eight_dims_none_and_empty_ones);
  tcase_add_test(tcase, integers_wrap_and_divide_towards_zero);
  tcase_add_test(tcase, bf16_rounds_to_nearest_even);
  tcase_add_test(tcase, casts_saturate_and_bool_is_not_zero);
  tcase_add_test(tcase, comparisons_logic_and_where);
  tcase_add_test(tcase, gather_and_scatter_are_each_others_transpose);
  tcase_add_test(tcase, rope_turns_pairs_and_its_inverse_turns_them_back);
  tcase_add_test(tcase, dropout_draws_philox_words);
  tcase_add_test(tcase, a_mask_depends_on_element_sample_and_step_alone);
  tcase_add_test(tcase, adamw_follows_its_formula);
  tcase_add_test(tcase, sgd_follows_its_formula);
  tcase_add_test(tcase, flat_kernels_agree_with_loops_at_any_offset_and_thread_count);
  suite_add_tcase(suite, tcase);
  return suite;
}
