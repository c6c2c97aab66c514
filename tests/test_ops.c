// test_ops - the table of op_cases.h in every mode: gradients by finite differences, accumulation,
// dtypes, shape errors, the meta device, bits, failing allocations.
#include "core/rng.h"
#include "core/tape.h"
#include "core/weights.h"
#include "ops/kernels/threads.h"
#include "tests/op_cases.h"
#include "tests/tests.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static Ctx *ctx;

static void set_up(void) {
  ck_assert_int_eq(ctx_new(0, &ctx), ST_OK);
  ck_assert_int_eq(ops_init(ctx), ST_OK);
}

static void tear_down(void) {
  ck_assert_uint_eq(pool_total(ctx->pool).current, 0); // nothing leaked
  ctx_delete(ctx);
  ctx = NULL;
}

// ---- a call of a case
typedef struct Run {
  const OpCase *c;
  const Op *op;
  OpArgs args;
  CaseInputs inputs;
  Tensor *out[OP_MAX_OUT];
  char name[160];
} Run;

static void run_begin(Run *run, const OpCase *c, DType dtype, bool grad) {
  memset(run, 0, sizeof *run);
  run->c = c;
  run->op = op_row(c->op);
  case_args(run->op, c->args, &run->args);
  case_name(run->op, c->inputs, c->args, run->name, sizeof run->name);
  ck_assert_msg(case_leaves(ctx, c->inputs, dtype, grad, &run->inputs) == ST_OK, "%s: %s",
                run->name, status_message());
}

static Status run_forward(Run *run) {
  TRY(case_views(ctx, &run->inputs));
  Status status = op_apply(ctx, run->op, run->inputs.x, run->inputs.n, &run->args, run->out);
  if (status != ST_OK) memset(run->out, 0, sizeof run->out);
  return status;
}

static void run_must(Run *run) {
  ck_assert_msg(run_forward(run) == ST_OK, "%s: %s", run->name, status_message());
}

static void run_drop(Run *run) {
  for (int i = 0; i < run->op->n_out; i++) {
    tensor_release(ctx, run->out[i]);
    run->out[i] = NULL;
  }
  case_release_views(ctx, &run->inputs);
}

static void run_end(Run *run) {
  run_drop(run);
  case_release(ctx, &run->inputs);
}

static double element(const Tensor *t, int64_t i) {
  double v = 0;
  ck_assert_int_eq(tensor_read(t, i, &v), ST_OK);
  return v;
}

// A gradient for output k: values that depend on (salt, k, i) alone, exact in bf16.
static double dout_value(int salt, int k, int64_t i) {
  return 0.125 * (double)(1 + (rng_u32(17, (salt * 4 + k) * 1000000 + i) & 15)) - 1.0;
}

static Tensor *make_dout(const Tensor *out, int salt, int k) {
  int64_t n = tensor_numel(out);
  double *values = malloc((size_t)(n + 1) * sizeof *values);
  ck_assert_ptr_nonnull(values);
  for (int64_t i = 0; i < n; i++) values[i] = dout_value(salt, k, i);
  Tensor *wide, *narrow;
  ck_assert_int_eq(tensor_from_data(ctx, DT_F64, out->ndim, out->shape, values, &wide), ST_OK);
  free(values);
  OpArgs cast = {.n_list = -1, .v = {{.i = out->dtype}}};
  ck_assert_int_eq(ops_call(ctx, OP_cast, &cast, &wide, 1, &narrow), ST_OK);
  tensor_release(ctx, wide);
  return narrow;
}

// Backward of what run_forward gave, with gradients of `salt`.
static Status run_backward(Run *run, int salt) {
  Tensor *outs[OP_MAX_OUT], *douts[OP_MAX_OUT];
  int n = 0;
  for (int k = 0; k < run->op->n_out; k++) {
    if (!run->out[k]->requires_grad) continue;
    outs[n] = run->out[k];
    douts[n++] = make_dout(run->out[k], salt, k);
  }
  Status status = n ? backward(ctx, outs, douts, n, BACKWARD_B, NULL) : ST_OK;
  while (n > 0) tensor_release(ctx, douts[--n]);
  return status;
}

static bool has_gradient(const OpCase *c) {
  return op_row(c->op)->grad && !(c->flags & (CASE_NO_GRAD | CASE_BIG));
}

// ---- the table is complete
START_TEST(every_row_has_a_case) {
  for (int id = 0; id < OP_COUNT; id++) {
    bool found = false;
    for (int i = 0; i < n_op_cases; i++) found |= op_cases[i].op == (OpId)id;
    for (int i = 0; i < n_covered_rows; i++)
      found |= covered_rows[i].hidden == (OpId)id && (op_row((OpId)id)->flags & OP_HIDDEN);
    ck_assert_msg(found, "the row %s has no case in tests/op_cases.c", op_row((OpId)id)->name);
  }
}
END_TEST

START_TEST(every_row_that_takes_two_shapes_has_an_error_case) {
  for (int id = 0; id < OP_COUNT; id++) {
    const Op *op = op_row((OpId)id);
    if ((op->flags & OP_HIDDEN) || !strchr(op->inputs, ' ')) continue;
    bool found = false;
    for (int i = 0; i < n_error_cases; i++)
      found |= error_cases[i].op == (OpId)id && error_cases[i].status == ST_ESHAPE;
    ck_assert_msg(found, "the row %s has no shape error in tests/op_cases.c", op->name);
  }
}
END_TEST

// ---- (a) gradients by central differences, in f64
// sum over outputs and elements of out * dout
static double weighted_sum(Run *run) {
  double sum = 0;
  for (int k = 0; k < run->op->n_out; k++) {
    Tensor *out = run->out[k];
    if (!dtype_is_float(out->dtype)) continue;
    int64_t n = tensor_numel(out);
    for (int64_t i = 0; i < n; i++) sum += element(out, i) * dout_value(1, k, i);
  }
  return sum;
}

static double value_with(Run *run, Tensor *leaf, int64_t i, double value) {
  double *at = (double *)tensor_data(leaf) + i, old = *at;
  *at = value;
  ctx->grad_enabled = false;
  run_must(run);
  double sum = weighted_sum(run);
  run_drop(run);
  ctx->grad_enabled = true;
  *at = old;
  return sum;
}

static void check_gradient(Run *run, int j) {
  Tensor *leaf = run->inputs.leaf[j];
  int64_t n = tensor_numel(leaf);
  for (int64_t i = 0; i < n; i++) {
    double x = ((double *)tensor_data(leaf))[i], h = 1e-5 * (fabs(x) > 1 ? fabs(x) : 1);
    double slope = (value_with(run, leaf, i, x + h) - value_with(run, leaf, i, x - h)) / (2 * h);
    double got = leaf->grad ? element(leaf->grad, i) : 0;
    ck_assert_msg(fabs(got - slope) <= 1e-7 * (1 + fabs(slope)) + 1e-8,
                  "%s: gradient of input %d at %lld is %.12g, finite differences say %.12g",
                  run->name, j, (long long)i, got, slope);
  }
}

START_TEST(gradients_agree_with_finite_differences) {
  for (int c = 0; c < n_op_cases; c++) {
    if (!has_gradient(&op_cases[c])) continue;
    Run run;
    run_begin(&run, &op_cases[c], DT_F64, true);
    run_must(&run);
    ck_assert_msg(run_backward(&run, 1) == ST_OK, "%s: %s", run.name, status_message());
    run_drop(&run);
    for (int j = 0; j < run.inputs.n; j++)
      if (run.inputs.leaf[j] && run.inputs.leaf[j]->requires_grad) check_gradient(&run, j);
    run_end(&run);
  }
}
END_TEST

// ---- (b) accumulation into parameters' gradients
// Replaces float leaves by parameters of the same values; their gradients start as garbage.
static void make_params(Run *run) {
  for (int j = 0; j < run->inputs.n; j++) {
    Tensor *leaf = run->inputs.leaf[j], *param;
    if (!leaf || !leaf->requires_grad) continue;
    char name[16];
    snprintf(name, sizeof name, "p%d", j);
    ck_assert_int_eq(param_new(ctx, name, leaf->dtype, leaf->ndim, leaf->shape, &param), ST_OK);
    Recipe recipe = {RECIPE_DATA, 0, 0, leaf};
    ck_assert_int_eq(param_recipe(ctx, param->param, &recipe), ST_OK);
    leaf->requires_grad = false;
    ck_assert_int_eq(param_place(ctx, param->param), ST_OK);
    GradUse *use;
    ck_assert_int_eq(param_grad_buffer(ctx, param->param, 0, &use), ST_OK);
    for (int64_t i = 0; i < tensor_numel(use->grad); i++)
      if (use->grad->dtype == DT_F64)
        ((double *)tensor_data(use->grad))[i] = (double)NAN;
      else
        ((float *)tensor_data(use->grad))[i] = NAN;
    run->inputs.leaf[j] = param;
  }
}

static void expect_param_grads(Run *run, const Run *want1, const Run *want2, double tolerance) {
  for (int j = 0; j < run->inputs.n; j++) {
    Tensor *t = run->inputs.leaf[j], *grad;
    if (!t || !t->param) continue;
    ck_assert_int_eq(param_grad(ctx, t->param, &grad), ST_OK);
    Tensor *first = want1->inputs.leaf[j]->grad,
           *second = want2 ? want2->inputs.leaf[j]->grad : NULL;
    for (int64_t i = 0; i < tensor_numel(t); i++) {
      double want = first ? element(first, i) : 0;
      if (second) want += element(second, i);
      double got = grad ? element(grad, i) : 0;
      ck_assert_msg(fabs(got - want) <= tolerance * (1 + fabs(want)),
                    "%s: %s gradient of input %d at %lld is %.9g, not %.9g", run->name,
                    want2 ? "accumulated" : "overwritten", j, (long long)i, got, want);
    }
  }
}

static void forward_backward(Run *run, int salt) {
  run_must(run);
  ck_assert_msg(run_backward(run, salt) == ST_OK, "%s: %s", run->name, status_message());
  run_drop(run);
}

static void check_accumulation(DType dtype, double tolerance) {
  for (int c = 0; c < n_op_cases; c++) {
    if (!has_gradient(&op_cases[c])) continue;
    if (dtype != DT_F64 && op_cases[c].op == OP_cast) continue; // its result is wider
    Run one, two, both;
    run_begin(&one, &op_cases[c], DT_F64, true);
    run_begin(&two, &op_cases[c], DT_F64, true);
    run_begin(&both, &op_cases[c], dtype, true);
    make_params(&both);
    forward_backward(&one, 1);
    forward_backward(&two, 2);
    forward_backward(&both, 1);
    expect_param_grads(&both, &one, NULL, tolerance);
    forward_backward(&both, 2);
    expect_param_grads(&both, &one, &two, tolerance);
    run_end(&one);
    run_end(&two);
    run_end(&both);
  }
}

START_TEST(gradients_overwrite_then_accumulate) { check_accumulation(DT_F64, 1e-12); }
END_TEST

// The gradients of bf16 parameters are collected as f32.
START_TEST(gradients_of_bf16_parameters_are_f32) { check_accumulation(DT_BF16, 0.06); }
END_TEST

// ---- (c) f32 and bf16 against f64
static double largest(const Tensor *t) {
  double most = 0;
  for (int64_t i = 0; i < tensor_numel(t); i++) most = fmax(most, fabs(element(t, i)));
  return most;
}

static void expect_close(const Run *run, const char *what, const Tensor *got, const Tensor *want,
                         double tolerance) {
  double scale = fmax(largest(want), 1e-3);
  for (int64_t i = 0; i < tensor_numel(want); i++) {
    double a = element(got, i), b = element(want, i);
    ck_assert_msg(fabs(a - b) <= tolerance * scale, "%s: %s %s at %lld is %.9g, f64 says %.9g",
                  run->name, dtype_name(got->dtype), what, (long long)i, a, b);
  }
}

// Tolerances are relative to the largest value: 20 roundings of f32, 4 of bf16, more in gradients.
static void compare_dtype(const OpCase *c, DType dtype, double tolerance) {
  Run wide, narrow;
  bool grad = has_gradient(c);
  if (c->loose > 0) tolerance *= c->loose;
  run_begin(&wide, c, DT_F64, grad);
  run_begin(&narrow, c, dtype, grad);
  run_must(&wide);
  run_must(&narrow);
  for (int k = 0; k < wide.op->n_out; k++)
    expect_close(&wide, "result", narrow.out[k], wide.out[k], tolerance);
  if (grad) {
    ck_assert_int_eq(run_backward(&wide, 1), ST_OK);
    ck_assert_int_eq(run_backward(&narrow, 1), ST_OK);
    for (int j = 0; j < wide.inputs.n; j++) {
      if (!wide.inputs.leaf[j] || !wide.inputs.leaf[j]->grad) continue;
      ck_assert_msg(narrow.inputs.leaf[j]->grad, "%s: no gradient in %s", wide.name,
                    dtype_name(dtype));
      ck_assert_int_eq(narrow.inputs.leaf[j]->grad->dtype, dtype);
      expect_close(&wide, "gradient", narrow.inputs.leaf[j]->grad, wide.inputs.leaf[j]->grad,
                   3 * tolerance);
    }
  }
  run_end(&wide);
  run_end(&narrow);
}

START_TEST(f32_agrees_with_f64) {
  for (int c = 0; c < n_op_cases; c++)
    if (!(op_cases[c].flags & CASE_BIG)) compare_dtype(&op_cases[c], DT_F32, 20 * 0x1p-24);
}
END_TEST

START_TEST(bf16_agrees_with_f64) {
  for (int c = 0; c < n_op_cases; c++)
    if (!(op_cases[c].flags & CASE_BIG)) compare_dtype(&op_cases[c], DT_BF16, 4 * 0x1p-8);
}
END_TEST

// ---- (d) errors
START_TEST(errors_name_the_op_and_the_shapes) {
  for (int c = 0; c < n_error_cases; c++) {
    const ErrorCase *e = &error_cases[c];
    const Op *op = op_row(e->op);
    OpArgs args;
    CaseInputs inputs;
    Tensor *out[OP_MAX_OUT] = {NULL};
    char name[160];
    case_name(op, e->inputs, e->args, name, sizeof name);
    case_args(op, e->args, &args);
    ck_assert_int_eq(case_leaves(ctx, e->inputs, DT_F32, false, &inputs), ST_OK);
    ck_assert_int_eq(case_views(ctx, &inputs), ST_OK);
    Status status = op_apply(ctx, op, inputs.x, inputs.n, &args, out);
    ck_assert_msg(status == e->status, "%s: gave %s (%s)", name, status_words(status),
                  status_message());
    const char *words = status_message();
    size_t length = strlen(op->name);
    ck_assert_msg(strncmp(words, op->name, length) == 0 && words[length] == ':',
                  "%s: \"%s\" does not begin with the op's name", name, words);
    for (int k = 0; k < 4 && e->words[k]; k++)
      ck_assert_msg(strstr(words, e->words[k]), "%s: \"%s\" does not say \"%s\"", name, words,
                    e->words[k]);
    case_release(ctx, &inputs);
  }
}
END_TEST

// ---- (e) the meta device
static void to_meta(CaseInputs *inputs) {
  for (int j = 0; j < inputs->n; j++) {
    Tensor *leaf = inputs->leaf[j], *meta;
    if (!leaf) continue;
    TensorSpec spec;
    tensor_spec(leaf, &spec);
    ck_assert_int_eq(tensor_new(ctx, &ctx->meta, &spec, MEM_ACTIVATIONS, &meta), ST_OK);
    meta->requires_grad = leaf->requires_grad;
    tensor_release(ctx, leaf);
    inputs->leaf[j] = meta;
  }
}

START_TEST(meta_gives_the_same_shapes_and_touches_no_memory) {
  for (int c = 0; c < n_op_cases; c++) {
    const OpCase *oc = &op_cases[c];
    Run cpu, meta;
    run_begin(&cpu, oc, DT_F32, has_gradient(oc));
    run_must(&cpu);
    run_begin(&meta, oc, DT_F32, has_gradient(oc));
    to_meta(&meta.inputs);
    size_t structures = pool_use(ctx->pool, MEM_STRUCTURES).current;
    size_t others = pool_total(ctx->pool).current - structures;
    pool_reset_peaks(ctx->pool);
    run_must(&meta);
    if (has_gradient(oc)) { // the tape runs dry too
      Tensor *outs[OP_MAX_OUT], *douts[OP_MAX_OUT];
      int n = 0;
      for (int k = 0; k < meta.op->n_out; k++)
        if (meta.out[k]->requires_grad) outs[n] = meta.out[k], douts[n++] = meta.out[k];
      ck_assert_msg(backward(ctx, outs, douts, n, BACKWARD_B, NULL) == ST_OK, "%s: %s", meta.name,
                    status_message());
    }
    size_t scalars = 64 * 64; // constants of formulas
    ck_assert_msg(pool_use(ctx->pool, MEM_ACTIVATIONS).peak +
                          pool_use(ctx->pool, MEM_WORKSPACE).peak <=
                      others + scalars,
                  "%s: memory on meta", meta.name);
    for (int k = 0; k < cpu.op->n_out; k++) {
      ck_assert_msg(tensor_is_meta(meta.out[k]), "%s: a result is not on meta", meta.name);
      ck_assert_ptr_null(meta.out[k]->storage->data);
      ck_assert_int_eq(meta.out[k]->dtype, cpu.out[k]->dtype);
      ck_assert_int_eq(meta.out[k]->ndim, cpu.out[k]->ndim);
      for (int d = 0; d < cpu.out[k]->ndim; d++)
        ck_assert_msg(meta.out[k]->shape[d] == cpu.out[k]->shape[d], "%s: another shape on meta",
                      meta.name);
    }
    run_end(&cpu);
    run_end(&meta);
  }
}
END_TEST

// ---- (f) bits
static bool same_bits(const Tensor *a, const Tensor *b) {
  if (a->dtype != b->dtype || tensor_numel(a) != tensor_numel(b)) return false;
  Tensor *dense[2];
  const Tensor *from[] = {a, b};
  for (int k = 0; k < 2; k++) {
    Tensor *t;
    ck_assert_int_eq(tensor_detach(ctx, from[k], &t), ST_OK);
    ck_assert_int_eq(ops_call(ctx, OP_contiguous, NULL, &t, 1, &dense[k]), ST_OK);
    tensor_release(ctx, t);
  }
  size_t bytes = (size_t)tensor_numel(a) * dtype_size(a->dtype);
  bool same = bytes == 0 || memcmp(tensor_data(dense[0]), tensor_data(dense[1]), bytes) == 0;
  for (int k = 0; k < 2; k++) tensor_release(ctx, dense[k]);
  return same;
}

// t's values in a fresh storage, `skew` elements behind an aligned address.
static Tensor *skewed(Tensor *t, int64_t skew) {
  int64_t room = tensor_numel(t) + skew;
  Tensor *big, *part;
  ck_assert_int_eq(tensor_zeros(ctx, &ctx->cpu, t->dtype, 1, &room, MEM_ACTIVATIONS, &big), ST_OK);
  TensorSpec spec;
  tensor_spec(t, &spec);
  spec_row_major(&spec);
  spec.alias = true;
  spec.offset = skew;
  ck_assert_int_eq(tensor_alias(ctx, big, &spec, &part), ST_OK);
  tensor_release(ctx, big);
  OpArgs cast = {.n_list = -1, .v = {{.i = t->dtype}}};
  ck_assert_int_eq(op_apply_into(ctx, op_row(OP_cast), &t, 1, &cast, &part, 0), ST_OK);
  return part;
}

// The results of the run's op on other tensors; released by the caller.
static void apply(Run *run, Tensor **in, Tensor **out) {
  ck_assert_msg(op_apply(ctx, run->op, in, run->inputs.n, &run->args, out) == ST_OK, "%s: %s",
                run->name, status_message());
}

static void expect_same(Run *run, Tensor **out, const char *what) {
  for (int k = 0; k < run->op->n_out; k++) {
    ck_assert_msg(same_bits(run->out[k], out[k]), "%s in %s: other bits %s", run->name,
                  dtype_name(run->inputs.leaf[0]->dtype), what);
    tensor_release(ctx, out[k]);
  }
}

static void check_layouts(Run *run) {
  for (int skew = 0; skew < 2; skew++) {
    Tensor *in[CASE_MAX_IN] = {NULL}, *out[OP_MAX_OUT];
    for (int j = 0; j < run->inputs.n; j++)
      if (run->inputs.x[j]) in[j] = skewed(run->inputs.x[j], skew);
    apply(run, in, out);
    expect_same(run, out, skew ? "at an odd offset" : "from row-major inputs");
    for (int j = 0; j < run->inputs.n; j++) tensor_release(ctx, in[j]);
  }
}

static Tensor *entry(Tensor *t, int64_t i) {
  OpArgs args = {.n_list = -1, .v = {{.i = 0}, {.i = i}, {.i = i + 1}, {.i = 1}}};
  Tensor *part;
  ck_assert_int_eq(ops_call(ctx, OP_slice, &args, &t, 1, &part), ST_OK);
  return part;
}

// Entry i of dimension 0 alone gives what it gave among the others.
static void check_rows(Run *run) {
  bool first_only = run->c->flags & CASE_IN0_ROWS;
  int64_t n = run->inputs.x[0]->shape[0];
  for (int64_t i = 0; i<n; i += n> 4 ? n / 3 : 1) {
    Tensor *in[CASE_MAX_IN] = {NULL}, *out[OP_MAX_OUT];
    for (int j = 0; j < run->inputs.n; j++) {
      if (!run->inputs.x[j]) continue;
      in[j] = j == 0 || !first_only ? entry(run->inputs.x[j], i) : tensor_retain(run->inputs.x[j]);
    }
    OpArgs args = run->args;
    if (run->c->op == OP_view) run->args.list[0] = 1;
    apply(run, in, out);
    run->args = args;
    for (int k = 0; k < run->op->n_out; k++) {
      Tensor *part = entry(run->out[k], i);
      ck_assert_msg(same_bits(part, out[k]), "%s in %s: other bits for entry %lld alone", run->name,
                    dtype_name(run->inputs.leaf[0]->dtype), (long long)i);
      tensor_release(ctx, part);
      tensor_release(ctx, out[k]);
    }
    for (int j = 0; j < run->inputs.n; j++) tensor_release(ctx, in[j]);
  }
}

static void check_bits(DType dtype) {
  int threads = threads_count();
  for (int c = 0; c < n_op_cases; c++) {
    Run run;
    run_begin(&run, &op_cases[c], dtype, false);
    threads_set(1);
    run_must(&run);
    if (op_cases[c].op != OP_view) check_layouts(&run);
    if (op_cases[c].flags & (CASE_ROWS | CASE_IN0_ROWS)) check_rows(&run);
    if (op_cases[c].flags & CASE_BIG) {
      Tensor *out[OP_MAX_OUT];
      threads_set(3);
      apply(&run, run.inputs.x, out);
      expect_same(&run, out, "on 3 threads");
    }
    run_end(&run);
  }
  threads_set(threads);
}

START_TEST(bits_are_a_function_of_values_f32) { check_bits(DT_F32); }
END_TEST
START_TEST(bits_are_a_function_of_values_f64) { check_bits(DT_F64); }
END_TEST
START_TEST(bits_are_a_function_of_values_bf16) { check_bits(DT_BF16); }
END_TEST

// Gradients too, on 1 and 3 threads.
START_TEST(gradients_have_the_same_bits_on_any_threads) {
  int threads = threads_count();
  for (int c = 0; c < n_op_cases; c++) {
    if (!op_row(op_cases[c].op)->grad || !(op_cases[c].flags & CASE_BIG)) continue;
    Run one, three;
    threads_set(1);
    run_begin(&one, &op_cases[c], DT_F32, true);
    forward_backward(&one, 1);
    threads_set(3);
    run_begin(&three, &op_cases[c], DT_F32, true);
    forward_backward(&three, 1);
    for (int j = 0; j < one.inputs.n; j++)
      if (one.inputs.leaf[j] && one.inputs.leaf[j]->grad)
        ck_assert_msg(same_bits(one.inputs.leaf[j]->grad, three.inputs.leaf[j]->grad),
                      "%s: other bits in the gradient of input %d on 3 threads", one.name, j);
    run_end(&one);
    run_end(&three);
  }
  threads_set(threads);
}
END_TEST

// ---- (g) dtypes: what is refused, and in which words
// Rows without OP_FLOAT that still refuse a dtype of their float inputs.
static bool refuses(const Op *op, DType dtype) {
  if (op->flags & OP_FLOAT) return !dtype_is_float(dtype);
  switch (op->id) {
  case OP_cross_entropy_each:
  case OP_rope: return !dtype_is_float(dtype);
  default: return false; // of a list that is ops.def's, not ours
  }
}

START_TEST(dtypes_are_taken_or_refused_by_name) {
  for (int c = 0; c < n_op_cases; c++) {
    const OpCase *oc = &op_cases[c];
    if ((c > 0 && op_cases[c - 1].op == oc->op) || !strpbrk(oc->inputs, "npud")) continue;
    for (int d = 0; d < DTYPE_COUNT; d++) {
      Run run;
      run_begin(&run, oc, (DType)d, false);
      Status status = run_forward(&run);
      if (refuses(run.op, (DType)d)) {
        ck_assert_msg(status == ST_EDTYPE || status == ST_ESHAPE, "%s takes %s", run.name,
                      dtype_name((DType)d));
        ck_assert_msg(strstr(status_message(), run.op->name) &&
                          strstr(status_message(), dtype_name((DType)d)) &&
                          strstr(status_message(), "floating point"),
                      "%s: \"%s\" does not explain the dtype", run.name, status_message());
      } else {
        ck_assert_msg(status == ST_OK, "%s does not take %s: %s", run.name, dtype_name((DType)d),
                      status_message());
      }
      run_end(&run);
    }
  }
}
END_TEST

// ---- (i) every allocation fails once
static Status forward_and_backward(Run *run) {
  Status status = run_forward(run);
  if (status == ST_OK && has_gradient(run->c)) {
    Tensor *outs[OP_MAX_OUT], *douts[OP_MAX_OUT];
    int n = 0;
    for (int k = 0; k < run->op->n_out; k++)
      if (run->out[k]->requires_grad) outs[n] = run->out[k], douts[n++] = run->out[k];
    if (n > 0) status = backward(ctx, outs, douts, n, BACKWARD_B, NULL);
  }
  return status;
}

static void drop_gradients(Run *run) {
  for (int j = 0; j < run->inputs.n; j++) {
    if (!run->inputs.leaf[j]) continue;
    tensor_release(ctx, run->inputs.leaf[j]->grad);
    run->inputs.leaf[j]->grad = NULL;
  }
}

START_TEST(a_failing_allocation_leaves_nothing_behind) {
  for (int c = 0; c < n_op_cases; c++) {
    if (op_cases[c].flags & CASE_BIG) continue;
    Run run;
    run_begin(&run, &op_cases[c], DT_F32, has_gradient(&op_cases[c]));
    size_t before = pool_total(ctx->pool).current;
    Status status = ST_ENOMEM;
    for (int64_t n = 1; status == ST_ENOMEM; n++) {
      ck_assert_msg(n < 500, "%s never succeeds", run.name);
      pool_fail_at(ctx->pool, n);
      status = forward_and_backward(&run);
      pool_fail_at(ctx->pool, 0);
      ck_assert_msg(status == ST_OK || status == ST_ENOMEM, "%s, allocation %lld: %s", run.name,
                    (long long)n, status_message());
      run_drop(&run);
      drop_gradients(&run);
      ck_assert_msg(pool_total(ctx->pool).current == before,
                    "%s: failing allocation %lld leaks %lld bytes", run.name, (long long)n,
                    (long long)(pool_total(ctx->pool).current - before));
      ck_assert(ctx->grad_enabled);
    }
    run_end(&run);
  }
}
END_TEST

Suite *ops_suite(void);
Suite *ops_suite(void) {
  Suite *suite = suite_create("ops");
  TCase *tcase = tcase_create("table");
  tcase_add_checked_fixture(tcase, set_up, tear_down);
  tcase_add_test(tcase, every_row_has_a_case);
  tcase_add_test(tcase, every_row_that_takes_two_shapes_has_an_error_case);
  tcase_add_test(tcase, gradients_agree_with_finite_differences);
  tcase_add_test(tcase, gradients_overwrite_then_accumulate);
  tcase_add_test(tcase, gradients_of_bf16_parameters_are_f32);
  tcase_add_test(tcase, f32_agrees_with_f64);
  tcase_add_test(tcase, bf16_agrees_with_f64);
  tcase_add_test(tcase, errors_name_the_op_and_the_shapes);
  tcase_add_test(tcase, meta_gives_the_same_shapes_and_touches_no_memory);
  tcase_add_test(tcase, bits_are_a_function_of_values_f32);
  tcase_add_test(tcase, bits_are_a_function_of_values_f64);
  tcase_add_test(tcase, bits_are_a_function_of_values_bf16);
  tcase_add_test(tcase, gradients_have_the_same_bits_on_any_threads);
  tcase_add_test(tcase, dtypes_are_taken_or_refused_by_name);
  tcase_add_test(tcase, a_failing_allocation_leaves_nothing_behind);
  suite_add_tcase(suite, tcase);
  return suite;
}
