// test_reference - f32 results and gradients against PyTorch's, which tests/reference.py wrote to
// tests/golden/ops.safetensors.
#include "core/safetensors.h"
#include "core/tape.h"
#include "core/weights.h"
#include "ops/ops.h"
#include "ops/optim.h"
#include "tests/op_cases.h"
#include "tests/tests.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static Ctx *ctx;
static Safetensors *file;

static void set_up(void) {
  ck_assert_int_eq(ctx_new(0, &ctx), ST_OK);
  ck_assert_int_eq(ops_init(ctx), ST_OK);
  ck_assert_msg(safetensors_open(&file, "tests/golden/ops.safetensors") == ST_OK, "%s",
                status_message());
}

static void tear_down(void) {
  safetensors_close(file);
  ck_assert_uint_eq(pool_total(ctx->pool).current, 0);
  ctx_delete(ctx);
}

static const SafetensorsEntry *entry_of(const char *key, const char *what, int k) {
  char name[64];
  snprintf(name, sizeof name, "%s.%s%d", key, what, k);
  return safetensors_find(file, name);
}

// The tensor of an entry; NULL if there is none.
static Tensor *load(const char *key, const char *what, int k) {
  const SafetensorsEntry *e = entry_of(key, what, k);
  Tensor *t;
  if (!e) return NULL;
  TensorSpec spec = {.dtype = e->dtype, .ndim = e->n_dims};
  for (int d = 0; d < e->n_dims; d++) spec.shape[d] = e->shape[d];
  ck_assert_int_eq(tensor_new(ctx, &ctx->cpu, &spec, MEM_ACTIVATIONS, &t), ST_OK);
  if (e->n_bytes) memcpy(tensor_data(t), e->data, (size_t)e->n_bytes);
  t->depends_data = true;
  return t;
}

static double element(const Tensor *t, int64_t i) {
  double v = 0;
  ck_assert_int_eq(tensor_read(t, i, &v), ST_OK);
  return v;
}

// 30 roundings of f32, relative to the largest value; integers are equal.
static void expect_close(const char *name, const char *what, int k, const Tensor *got,
                         const Tensor *want) {
  char a[160], b[160];
  bool same = got && got->dtype == want->dtype && got->ndim == want->ndim;
  for (int d = 0; same && d < got->ndim; d++) same = got->shape[d] == want->shape[d];
  ck_assert_msg(same, "%s: %s%d is %s, PyTorch's is %s", name, what, k,
                got ? format_tensor(a, sizeof a, got) : "absent", format_tensor(b, sizeof b, want));
  double scale = 0;
  int64_t n = tensor_numel(want);
  for (int64_t i = 0; i < n; i++) scale = fmax(scale, fabs(element(want, i)));
  double tolerance = dtype_is_float(want->dtype) ? 30 * 0x1p-24 * fmax(scale, 0.1) : 0;
  for (int64_t i = 0; i < n; i++) {
    double x = element(got, i), y = element(want, i);
    ck_assert_msg(fabs(x - y) <= tolerance, "%s: %s%d at %lld is %.9g, PyTorch says %.9g", name,
                  what, k, (long long)i, x, y);
  }
}

static void check_case(const char *key, const char *words) {
  char name[32];
  snprintf(name, sizeof name, "%.*s", (int)strcspn(words, ";"), words);
  const Op *op = op_find(name);
  ck_assert_msg(op, "there is no op %s", name);
  OpArgs args;
  case_args(op, words + strlen(name) + 1, &args);
  Tensor *in[CASE_MAX_IN] = {NULL}, *out[OP_MAX_OUT], *outs[OP_MAX_OUT], *douts[OP_MAX_OUT];
  int n_in = 0, n = 0;
  for (int j = 0; j < CASE_MAX_IN; j++) {
    in[j] = load(key, "in", j);
    if (!in[j]) continue;
    n_in = j + 1;
    in[j]->requires_grad = entry_of(key, "din", j) != NULL;
  }
  ck_assert_msg(op_apply(ctx, op, in, n_in, &args, out) == ST_OK, "%s", status_message());
  for (int k = 0; k < op->n_out; k++) {
    Tensor *want = load(key, "out", k);
    if (!want) continue;
    expect_close(words, "out", k, out[k], want);
    tensor_release(ctx, want);
    douts[n] = load(key, "dout", k);
    if (douts[n]) outs[n++] = out[k];
  }
  bool wants = false;
  for (int j = 0; j < n_in; j++) wants |= in[j] && in[j]->requires_grad;
  if (wants)
    ck_assert_msg(backward(ctx, outs, douts, n, BACKWARD_B, NULL) == ST_OK, "%s: %s", words,
                  status_message());
  for (int j = 0; j < n_in; j++) {
    Tensor *want = load(key, "din", j);
    if (want) expect_close(words, "din", j, in[j]->grad, want);
    tensor_release(ctx, want);
    tensor_release(ctx, in[j]);
  }
  while (n > 0) tensor_release(ctx, douts[--n]);
  for (int k = 0; k < op->n_out; k++) tensor_release(ctx, out[k]);
}

static bool is_case(const char *key) { return key[0] >= '0' && key[0] <= '9'; }

START_TEST(ops_agree_with_pytorch) {
  int n_cases = 0;
  for (int64_t i = 0; i < safetensors_n_metadata(file); i++) {
    SafetensorsPair pair = safetensors_metadata_at(file, i);
    if (!is_case(pair.key)) continue;
    check_case(pair.key, pair.value);
    n_cases++;
  }
  ck_assert_int_ge(n_cases, 120);
}
END_TEST

START_TEST(every_visible_row_has_a_reference) {
  for (int id = 0; id < OP_COUNT; id++) {
    const Op *op = op_row((OpId)id);
    if ((op->flags & OP_HIDDEN)) continue;
    bool found = false;
    size_t length = strlen(op->name);
    for (int64_t i = 0; i < safetensors_n_metadata(file); i++) {
      SafetensorsPair pair = safetensors_metadata_at(file, i);
      found |= is_case(pair.key) && strncmp(pair.value, op->name, length) == 0 &&
               pair.value[length] == ';';
    }
    ck_assert_msg(found, "the row %s has no case in tests/reference.py", op->name);
  }
}
END_TEST

// ---- optimizers: 5 steps
typedef Status (*Step)(WeightSet *set, const double *options, int step);

static Status step_adamw(WeightSet *set, const double *o, int step) {
  AdamwOptions options = {o[0], o[1], o[2], o[3], o[4], 0.5, step};
  return optim_adamw(ctx, set, &options);
}
static Status step_sgd(WeightSet *set, const double *o, int step) {
  SgdOptions options = {o[0], o[1], o[2], o[3], 0.5, o[4] != 0, step == 1};
  return optim_sgd(ctx, set, &options);
}

// grad_scale is 1/2, so the gradients are doubled; a second parameter is frozen and stays.
static void check_optimizer(const char *key, Step update, DType dtype, double tolerance) {
  double options[5];
  int n = 0, used;
  for (const char *at = safetensors_metadata(file, key);
       n < 5 && sscanf(at, "%lf%n", &options[n], &used) == 1; at += used)
    n++;
  ck_assert_int_eq(n, 5);
  Tensor *w[2];
  Param *params[2];
  static const int64_t shape[] = {7};
  for (int i = 0; i < 2; i++) {
    ck_assert_int_eq(param_new(ctx, i ? "frozen" : "w", dtype, 1, shape, &w[i]), ST_OK);
    Recipe recipe = {.kind = RECIPE_DATA, .data = load(key, "p", 0)};
    params[i] = w[i]->param;
    ck_assert_int_eq(param_recipe(ctx, params[i], &recipe), ST_OK);
  }
  params[1]->frozen = true;
  WeightSet *set;
  ck_assert_int_eq(weightset_new(ctx, params, 2, 0, 0, 1, &set), ST_OK);
  for (int step = 1; step <= 5; step++) {
    GradUse *use;
    ck_assert_int_eq(param_grad_buffer(ctx, params[0], 0, &use), ST_OK);
    Tensor *g = load(key, "g", step), *want = load(key, "p", step), *start = load(key, "p", 0);
    for (int64_t i = 0; i < 7; i++)
      if (dtype == DT_F64)
        ((double *)tensor_data(use->grad))[i] = 2 * element(g, i);
      else
        ((float *)tensor_data(use->grad))[i] = 2 * (float)element(g, i);
    use->written = true;
    ck_assert_msg(update(set, options, step) == ST_OK, "%s", status_message());
    weightset_zero_grads(set);
    for (int64_t i = 0; i < 7; i++) {
      double got = element(w[0], i);
      ck_assert_msg(fabs(got - element(want, i)) <= tolerance * fmax(1, fabs(element(want, i))),
                    "%s in %s, step %d: parameter %lld is %.9g, PyTorch says %.9g", key,
                    dtype_name(dtype), step, (long long)i, got, element(want, i));
      if (dtype != DT_BF16) ck_assert_double_eq(element(w[1], i), element(start, i));
    }
    tensor_release(ctx, g);
    tensor_release(ctx, want);
    tensor_release(ctx, start);
  }
  weightset_release(ctx, set);
  for (int i = 0; i < 2; i++) tensor_release(ctx, w[i]);
}

START_TEST(optimizers_agree_with_pytorch) {
  static const DType dtypes[] = {DT_F32, DT_F64, DT_BF16};
  static const double tolerances[] = {0x1p-21, 0x1p-22, 0x1p-7};
  for (int d = 0; d < 3; d++) {
    check_optimizer("adamw", step_adamw, dtypes[d], tolerances[d]);
    check_optimizer("sgd", step_sgd, dtypes[d], tolerances[d]);
    check_optimizer("sgd_momentum", step_sgd, dtypes[d], tolerances[d]);
    check_optimizer("sgd_nesterov", step_sgd, dtypes[d], tolerances[d]);
  }
}
END_TEST

START_TEST(norms_of_gradients_agree_with_a_plain_sum) {
  static const int64_t shape[] = {1000};
  Tensor *w[2];
  Param *params[2];
  for (int i = 0; i < 2; i++) {
    ck_assert_int_eq(param_new(ctx, i ? "b" : "a", DT_F32, 1, shape, &w[i]), ST_OK);
    params[i] = w[i]->param;
  }
  WeightSet *set;
  ck_assert_int_eq(weightset_new(ctx, params, 2, 0, 0, 1, &set), ST_OK);
  GradUse *use;
  ck_assert_int_eq(param_grad_buffer(ctx, params[0], 0, &use), ST_OK);
  double sum = 0, out[2];
  for (int i = 0; i < 1000; i++) {
    float g = 0.01f * (float)((i * 37) % 101 - 50);
    ((float *)tensor_data(use->grad))[i] = g;
    sum += (double)g * (double)g;
  }
  use->written = true;
  ck_assert_int_eq(optim_grad_norms(ctx, set, false, out), ST_OK);
  ck_assert_double_eq_tol(out[0], sum, 1e-12 * sum);
  ck_assert_double_eq(out[1], 0);
  ck_assert_int_eq(optim_grad_norms(ctx, set, true, out), ST_OK);
  ck_assert_double_eq(out[0], (double)(0.01f * 50));
  ck_assert_double_eq(out[1], 0);
  ((float *)tensor_data(use->grad))[999] = NAN;
  for (int kind = 0; kind < 2; kind++) {
    ck_assert_int_eq(optim_grad_norms(ctx, set, kind, out), ST_OK);
    ck_assert(isnan(out[0]));
  }
  weightset_release(ctx, set);
  for (int i = 0; i < 2; i++) tensor_release(ctx, w[i]);
}
END_TEST

static Status no_shape(OpCall *call) { return fail(ST_ENOMEM, "%s: a fault", call->op->name); }

// Else the next update would take its zeros for the weights.
START_TEST(a_copy_of_bf16_weights_that_cannot_be_filled_is_not_kept) {
  static const int64_t shape[] = {8};
  Tensor *w;
  WeightSet *set;
  ck_assert_int_eq(param_new(ctx, "w", DT_BF16, 1, shape, &w), ST_OK);
  Recipe recipe = {.kind = RECIPE_CONSTANT, .a = 0.5};
  ck_assert_int_eq(param_recipe(ctx, w->param, &recipe), ST_OK);
  ck_assert_int_eq(weightset_new(ctx, &w->param, 1, 0, 0, 1, &set), ST_OK);
  const CoreOps *core_ops = ctx->core_ops;
  Op cast = *core_ops->cast;
  CoreOps faulty = {.contiguous = core_ops->contiguous, .cast = &cast};
  cast.shape = no_shape;
  ctx->core_ops = &faulty;
  SgdOptions options = {.lr = 1, .grad_scale = 1, .is_first = true};
  ck_assert_int_eq(optim_prepare(ctx, set, 0), ST_ENOMEM);
  ck_assert_int_eq(optim_sgd(ctx, set, &options), ST_ENOMEM);
  ck_assert_uint_eq(pool_use(ctx->pool, MEM_OPTIMIZER).current, 0);
  ctx->core_ops = core_ops;
  ck_assert_int_eq(optim_sgd(ctx, set, &options), ST_OK); // the gradient is 0
  for (int64_t i = 0; i < 8; i++) ck_assert_double_eq(element(w, i), 0.5);
  weightset_release(ctx, set);
  tensor_release(ctx, w);
}
END_TEST

Suite *reference_suite(void);
Suite *reference_suite(void) {
  Suite *suite = suite_create("reference");
  TCase *tcase = tcase_create("pytorch");
  tcase_add_checked_fixture(tcase, set_up, tear_down);
  tcase_add_test(tcase, ops_agree_with_pytorch);
  tcase_add_test(tcase, every_visible_row_has_a_reference);
  tcase_add_test(tcase, optimizers_agree_with_pytorch);
  tcase_add_test(tcase, a_copy_of_bf16_weights_that_cannot_be_filled_is_not_kept);
  tcase_add_test(tcase, norms_of_gradients_agree_with_a_plain_sum);
  suite_add_tcase(suite, tcase);
  return suite;
}
