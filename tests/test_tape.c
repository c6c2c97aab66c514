// test_tape - the graph and its two halves, parameters and their sets, scopes: the promises of
// tape.h, weights.h and scope.h.
#include "core/tape.h"
#include "core/weights.h"
#include "ops/ops.h"
#include "tests/tests.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_MADE = 64 };

static Ctx *ctx;
static int line;
static Tensor *made[MAX_MADE]; // by the graph being built
static int n_made;

static Where script_line(void *user) {
  (void)user;
  return (Where){"model.lua", line};
}

static void set_up(void) {
  ck_assert_int_eq(ctx_new(0, &ctx), ST_OK);
  ck_assert_int_eq(ops_init(ctx), ST_OK);
  ctx->where = script_line;
  n_made = 0; // of a test that failed
  line = 1;
}

static void tear_down(void) {
  ck_assert_uint_eq(pool_total(ctx->pool).current, 0);
  ctx_delete(ctx);
  ctx = NULL;
}

static void must(Status status) { ck_assert_msg(status == ST_OK, "%s", status_message()); }

// ---- small words for graphs
static Tensor *own(Tensor *t) {
  ck_assert_int_lt(n_made, MAX_MADE);
  return made[n_made++] = t;
}

static void drop_made(void) {
  while (n_made > 0) tensor_release(ctx, made[--n_made]);
}

static Tensor *call(OpId id, const OpArgs *args, Tensor **in, int n) {
  Tensor *out;
  must(ops_call(ctx, id, args, in, n, &out));
  return own(out);
}
static Tensor *call1(OpId id, Tensor *a) { return call(id, NULL, &a, 1); }
static Tensor *call2(OpId id, Tensor *a, Tensor *b) {
  Tensor *in[] = {a, b};
  return call(id, NULL, in, 2);
}

static Tensor *param(const char *name, DType dtype, int ndim, const int64_t *shape) {
  Tensor *t;
  must(param_new(ctx, name, dtype, ndim, shape, &t));
  Recipe recipe = {.kind = RECIPE_NORMAL, .b = 0.5};
  must(param_recipe(ctx, t->param, &recipe));
  return t;
}

// A data tensor: counts up in eighths.
static Tensor *data(DType dtype, int64_t rows, int64_t columns, bool grad) {
  int64_t shape[] = {rows, columns}, n = rows * columns;
  double *values = malloc((size_t)n * sizeof *values);
  ck_assert_ptr_nonnull(values);
  for (int64_t i = 0; i < n; i++) values[i] = 0.125 * (double)((i * 7) % 23 - 11);
  Tensor *wide, *t;
  must(tensor_from_data(ctx, DT_F64, 2, shape, values, &wide));
  free(values);
  OpArgs cast = {.n_list = -1, .v = {{.i = dtype}}};
  must(ops_call(ctx, OP_cast, &cast, &wide, 1, &t));
  tensor_release(ctx, wide);
  t->depends_data = true;
  t->requires_grad = grad;
  return t;
}

static double at(const Tensor *t, int64_t i) {
  double v = 0;
  must(tensor_read(t, i, &v));
  return v;
}

static Tensor *finished_grad(Tensor *p) {
  Tensor *grad;
  must(param_grad(ctx, p->param, &grad));
  return grad;
}

// ---- I then W is B
enum { N_PARAMS = 3, ROWS = 5, IN = 8, OUT = 8 };

typedef Tensor *(*Build)(Tensor *x, Tensor **p);

static Tensor *linear(Tensor *x, Tensor *w) { return call2(OP_linear, x, w); }

static Tensor *build_plain(Tensor *x, Tensor **p) {
  Tensor *in[] = {x, p[0], p[2]};
  return call(OP_linear, NULL, in, 3);
}
static Tensor *build_transposed(Tensor *x, Tensor **p) {
  return call2(OP_matmul, call1(OP_tanh, call2(OP_matmul, x, call1(OP_t, p[0]))), p[1]);
}
static Tensor *build_normalised(Tensor *x, Tensor **p) { // w / sqrt(sum w^2 over rows)
  OpArgs over = {.n_list = 1, .list = {1}, .v = {{.i = 1}}};
  Tensor *squares = call1(OP_square, p[0]), *norm = call(OP_sum, &over, &squares, 1);
  return linear(linear(x, call2(OP_div, p[0], call1(OP_sqrt, norm))), p[1]);
}
static Tensor *build_reused(Tensor *x, Tensor **p) {
  return linear(call1(OP_gelu, linear(x, p[0])), p[0]);
}
static Tensor *build_mixed(Tensor *x, Tensor **p) { // a product and an element-wise op
  OpArgs over = {.n_list = 1, .list = {0}};
  Tensor *sums = call(OP_sum, &over, &p[0], 1);
  Tensor *y = call2(OP_mul, linear(x, p[0]), sums);
  return call2(OP_add, linear(y, p[0]), call2(OP_mul, y, p[2]));
}
// One vector three times element-wise and twice in products, in turns.
static Tensor *in_turns(Tensor *x, Tensor *c) {
  OpArgs last = {.n_list = -1, .v = {{.i = 1}}};
  Tensor *y = x;
  for (int turn = 0; turn < 3; turn++) {
    y = call1(OP_tanh, call2(OP_mul, y, c));
    if (turn == 2) break;
    Tensor *v = call2(OP_matmul, y, c);
    y = call2(OP_add, y, call(OP_unsqueeze, &last, &v, 1));
  }
  return y;
}
static Tensor *build_both(Tensor *x, Tensor **p) { return in_turns(linear(x, p[0]), p[2]); }
static Tensor *build_both_made(Tensor *x, Tensor **p) {
  return in_turns(linear(x, p[0]), call1(OP_exp, p[2]));
}
static Tensor *build_joined(Tensor *x, Tensor **p) {
  Tensor *halves[] = {p[0], p[1]};
  Tensor *y = linear(x, call(OP_cat, NULL, halves, 2));
  OpArgs first = {.n_list = -1, .v = {{.i = 1}, {.i = 4}, {.i = 12}, {.i = 1}}};
  return linear(call(OP_slice, &first, &y, 1), p[0]);
}
static Tensor *build_tied(Tensor *x, Tensor **p) { // one weight in two units
  ctx->place.unit = 0;
  Tensor *y = call1(OP_tanh, linear(x, p[0]));
  ctx->place.unit = 3;
  y = linear(y, p[0]);
  ctx->place.unit = 1;
  y = call2(OP_add, y, p[2]);
  ctx->place.unit = 0;
  return y;
}
static Tensor *build_cast(Tensor *x, Tensor **p) {
  OpArgs cast = {.n_list = -1, .v = {{.i = DT_F32}}};
  return linear(linear(x, call(OP_cast, &cast, &p[0], 1)), call(OP_cast, &cast, &p[0], 1));
}
static Tensor *build_norms(Tensor *x, Tensor **p) { // gains and biases beside products
  Tensor *in[] = {x, p[2], p[2]};
  Tensor *y = call(OP_layer_norm, NULL, in, 3);
  in[0] = linear(y, p[0]);
  return linear(call(OP_layer_norm, NULL, in, 3), p[1]);
}

static const struct {
  const char *name;
  Build build;
  DType dtype; // of the parameters
} graphs[] = {
    {"a plain weight and bias", build_plain, DT_F32},
    {"a transposed weight", build_transposed, DT_F32},
    {"a normalised weight", build_normalised, DT_F32},
    {"a weight used twice", build_reused, DT_F32},
    {"a weight in products and element-wise", build_mixed, DT_F32},
    {"a leaf in products and element-wise, in turns", build_both, DT_F32},
    {"a made vector in products and element-wise, in turns", build_both_made, DT_F32},
    {"joined weights", build_joined, DT_F32},
    {"a weight tied in two units", build_tied, DT_F32},
    {"a bf16 weight through a cast", build_cast, DT_BF16},
    {"gains and biases", build_norms, DT_F32},
};
enum { N_GRAPHS = sizeof graphs / sizeof *graphs };

typedef struct Gradients {
  float of[N_PARAMS][OUT * IN], x[ROWS * IN];
  bool given[N_PARAMS];
  bool late[N_PARAMS]; // not complete before W
} Gradients;

static void read_gradients(Tensor **p, const Tensor *x, Gradients *out) {
  memset(out->of, 0, sizeof out->of);
  for (int k = 0; k < N_PARAMS; k++) {
    Tensor *grad = finished_grad(p[k]);
    out->given[k] = grad != NULL;
    if (grad)
      for (int64_t i = 0; i < tensor_numel(grad); i++) out->of[k][i] = (float)at(grad, i);
  }
  for (int64_t i = 0; i < ROWS * IN; i++) out->x[i] = (float)at(x->grad, i);
}

// Forward and backward of n_mb microbatches.
static void run_graph(int g, bool split, int n_mb, Gradients *out) {
  set_up();
  static const int64_t square[] = {OUT, IN}, vector[] = {OUT};
  Tensor *p[N_PARAMS] = {param("a", graphs[g].dtype, 2, square),
                         param("b", graphs[g].dtype, 2, square),
                         param("c", graphs[g].dtype, 1, vector)};
  Tensor *x = data(DT_F32, ROWS, IN, true);
  memset(out, 0, sizeof *out);
  for (int mb = 0; mb < n_mb; mb++) {
    Tensor *y = graphs[g].build(x, p), *dy = data(DT_F32, y->shape[0], y->shape[1], false);
    Backward *w = NULL;
    must(backward(ctx, &y, &dy, 1, split ? BACKWARD_I : BACKWARD_B, &w));
    if (split && mb == 0)
      for (int k = 0; k < N_PARAMS; k++) out->late[k] = !finished_grad(p[k]);
    if (split) must(backward_w(ctx, w));
    backward_delete(ctx, w);
    tensor_release(ctx, dy);
    drop_made();
  }
  read_gradients(p, x, out);
  tensor_release(ctx, x);
  for (int k = 0; k < N_PARAMS; k++) tensor_release(ctx, p[k]);
  tear_down();
}

START_TEST(i_then_w_gives_the_bits_of_b) {
  for (int g = 0; g < N_GRAPHS; g++) {
    Gradients whole, split;
    run_graph(g, false, 2, &whole);
    run_graph(g, true, 2, &split);
    ck_assert_msg(memcmp(whole.x, split.x, sizeof whole.x) == 0, "%s: dx differs", graphs[g].name);
    for (int k = 0; k < N_PARAMS; k++) {
      ck_assert_int_eq(whole.given[k], split.given[k]);
      ck_assert_msg(memcmp(whole.of[k], split.of[k], sizeof whole.of[k]) == 0,
                    "%s: the gradient of parameter %d differs", graphs[g].name, k);
    }
  }
}
END_TEST

// The I of two microbatches, then their W; n_idle[mb] weight gradients have run early after each I.
// Returns how many there were.
static int run_idle(int g, const int n_idle[2], Gradients *out) {
  set_up();
  static const int64_t square[] = {OUT, IN}, vector[] = {OUT};
  Tensor *p[N_PARAMS] = {param("a", graphs[g].dtype, 2, square),
                         param("b", graphs[g].dtype, 2, square),
                         param("c", graphs[g].dtype, 1, vector)};
  Tensor *x = data(DT_F32, ROWS, IN, true), *dy[2];
  Backward *w[2];
  int n_done = 0;
  memset(out, 0, sizeof *out);
  for (int mb = 0; mb < 2; mb++) {
    Tensor *y = graphs[g].build(x, p);
    dy[mb] = data(DT_F32, y->shape[0], y->shape[1], false);
    must(backward(ctx, &y, &dy[mb], 1, BACKWARD_I, &w[mb]));
    bool did = true;
    for (int k = 0; k < n_idle[mb] && did; k++) {
      must(backward_idle(ctx, &did));
      n_done += did;
    }
  }
  for (int mb = 0; mb < 2; mb++) {
    must(backward_w(ctx, w[mb]));
    backward_delete(ctx, w[mb]);
    tensor_release(ctx, dy[mb]);
  }
  bool did;
  must(backward_idle(ctx, &did));
  ck_assert(!did);
  drop_made();
  read_gradients(p, x, out);
  tensor_release(ctx, x);
  for (int k = 0; k < N_PARAMS; k++) tensor_release(ctx, p[k]);
  tear_down();
  return n_done;
}

START_TEST(weight_gradients_that_run_early_give_the_same_bits) {
  static const int orders[][2] = {{0, 0}, {1, 0}, {0, 1}, {0, 2}, {1, 2}, {0, 9}, {9, 9}};
  int most = 0;
  for (int g = 0; g < N_GRAPHS; g++) {
    Gradients whole, early;
    run_graph(g, false, 2, &whole);
    for (size_t i = 0; i < sizeof orders / sizeof *orders; i++) {
      int n = run_idle(g, orders[i], &early);
      if (n > most) most = n;
      for (int k = 0; k < N_PARAMS; k++)
        ck_assert_msg(memcmp(whole.of[k], early.of[k], sizeof whole.of[k]) == 0,
                      "%s: the gradient of parameter %d differs", graphs[g].name, k);
    }
  }
  ck_assert_int_ge(most, 4); // two products in each of two microbatches
}
END_TEST

START_TEST(weights_wait_for_w_and_gains_ride_with_i) {
  Gradients split;
  run_graph(N_GRAPHS - 1, true, 1, &split);
  ck_assert(split.late[0] && split.late[1]);
  ck_assert(!split.late[2]);
  run_graph(1, true, 1, &split); // through a transposition too
  ck_assert(split.late[0] && split.late[1]);
}
END_TEST

// ---- errors of the tape
static void expect_failure(Status status, Status want, const char *first, const char *second) {
  ck_assert_int_eq(status, want);
  ck_assert_msg(strstr(status_message(), first), "\"%s\" does not say \"%s\"", status_message(),
                first);
  ck_assert_msg(strstr(status_message(), second), "\"%s\" does not say \"%s\"", status_message(),
                second);
}

START_TEST(a_changed_tensor_is_found_at_backward_with_both_lines) {
  Tensor *x = data(DT_F32, 2, 3, true), *b = data(DT_F32, 2, 3, false);
  line = 10;
  Tensor *y = call2(OP_mul, x, b), *sum = call1(OP_sum, y);
  line = 20;
  Tensor *in[] = {b, x};
  ctx->grad_enabled = false;
  must(op_apply_inplace(ctx, op_row(OP_add), in, 2, NULL));
  ctx->grad_enabled = true;
  expect_failure(backward(ctx, &sum, NULL, 1, BACKWARD_B, NULL), ST_ESTATE, "mul at model.lua:10",
                 "changed at model.lua:20");
  drop_made();
  tensor_release(ctx, x);
  tensor_release(ctx, b);
}
END_TEST

static const int64_t four[] = {4, 4};

// How a parameter is changed between forward and backward.
static void change_by_step(Tensor *w) { weightset_stepped(ctx, w->param->set); }
static void change_in_place(Tensor *w) {
  Tensor *in[] = {w, w};
  ctx->grad_enabled = false;
  must(op_apply_inplace(ctx, op_row(OP_add), in, 2, NULL));
  ctx->grad_enabled = true;
}

START_TEST(a_changed_parameter_is_found_at_backward_with_both_lines) {
  void (*const changes[])(Tensor *) = {change_by_step, change_in_place};
  for (int c = 0; c < 2; c++) {
    Tensor *w = param("h.3.weight", DT_F32, 2, four), *x = data(DT_F32, 2, 4, true);
    line = 10;
    Tensor *y = linear(x, w), *sum = call1(OP_sum, y);
    line = 20;
    changes[c](w);
    Status status = backward(ctx, &sum, NULL, 1, BACKWARD_B, NULL);
    expect_failure(status, ST_ESTATE, "linear at model.lua:10", "changed at model.lua:20");
    ck_assert_ptr_nonnull(strstr(status_message(), "h.3.weight"));
    drop_made();
    tensor_release(ctx, x);
    tensor_release(ctx, w);
  }
}
END_TEST

START_TEST(a_step_is_found_through_a_view_of_a_parameter) {
  Tensor *w = param("w", DT_F32, 2, four), *x = data(DT_F32, 2, 4, true);
  line = 10;
  Tensor *sum = call1(OP_sum, call2(OP_matmul, x, call1(OP_t, w)));
  line = 20;
  weightset_stepped(ctx, w->param->set);
  expect_failure(backward(ctx, &sum, NULL, 1, BACKWARD_B, NULL), ST_ESTATE,
                 "matmul at model.lua:10", "changed at model.lua:20");
  drop_made();
  tensor_release(ctx, x);
  tensor_release(ctx, w);
}
END_TEST

START_TEST(in_place_on_a_leaf_that_wants_a_gradient_is_refused) {
  Tensor *x = data(DT_F32, 2, 3, true), *w = param("w", DT_F32, 2, four);
  double before = at(x, 0);
  Tensor *in[] = {x, x};
  expect_failure(op_apply_inplace(ctx, op_row(OP_add), in, 2, NULL), ST_ESTATE, "add_", "leaf");
  ck_assert_double_eq(at(x, 0), before);
  in[0] = in[1] = w;
  expect_failure(op_apply_inplace(ctx, op_row(OP_mul), in, 2, NULL), ST_ESTATE, "mul_", "leaf");
  Tensor *y = call1(OP_exp, x);
  in[0] = in[1] = y;
  expect_failure(op_apply_inplace(ctx, op_row(OP_mul), in, 2, NULL), ST_ESTATE, "mul_", "recorded");
  drop_made();
  tensor_release(ctx, x);
  tensor_release(ctx, w);
}
END_TEST

START_TEST(a_graph_serves_one_backward) {
  Tensor *x = data(DT_F32, 2, 3, true), *sum = call1(OP_sum, call1(OP_exp, x));
  must(backward(ctx, &sum, NULL, 1, BACKWARD_B, NULL));
  line = 7;
  expect_failure(backward(ctx, &sum, NULL, 1, BACKWARD_B, NULL), ST_ESTATE, "sum at model.lua:1",
                 "before");
  drop_made();
  tensor_release(ctx, x);
}
END_TEST

START_TEST(backward_needs_one_number_or_a_gradient) {
  Tensor *x = data(DT_F32, 2, 3, true), *y = call1(OP_exp, x), *z = data(DT_F32, 1, 1, false);
  expect_failure(backward(ctx, &y, NULL, 1, BACKWARD_B, NULL), ST_ESHAPE, "f32[2, 3]", "single");
  expect_failure(backward(ctx, &z, NULL, 1, BACKWARD_B, NULL), ST_ESTATE, "nothing", "gradient");
  drop_made();
  tensor_release(ctx, x);
  tensor_release(ctx, z);
}
END_TEST

START_TEST(integers_carry_no_gradient) {
  Tensor *x = data(DT_F32, 2, 3, true), *out[2];
  OpArgs k = {.n_list = -1, .v = {{.i = 2}, {.i = -1}, {.i = 1}}};
  must(ops_call(ctx, OP_topk, &k, &x, 1, out));
  ck_assert(out[0]->requires_grad && out[0]->node);
  ck_assert(!out[1]->requires_grad && !out[1]->node);
  OpArgs cast = {.n_list = -1, .v = {{.i = DT_I64}}};
  ck_assert(!call(OP_cast, &cast, &x, 1)->node);
  tensor_release(ctx, out[0]);
  tensor_release(ctx, out[1]);
  drop_made();
  tensor_release(ctx, x);
}
END_TEST

START_TEST(a_list_of_inputs_has_a_limit) {
  Tensor *x = data(DT_F32, 1, 2, true), *in[OP_MAX_VARIADIC + 1], *out;
  for (int j = 0; j <= OP_MAX_VARIADIC; j++) in[j] = x;
  expect_failure(ops_call(ctx, OP_cat, NULL, in, OP_MAX_VARIADIC + 1, &out), ST_EVALUE, "cat: 65",
                 "64");
  Tensor *sum = call1(OP_sum, call(OP_cat, NULL, in, OP_MAX_VARIADIC)); // one tensor 64 times
  must(backward(ctx, &sum, NULL, 1, BACKWARD_B, NULL));
  ck_assert_double_eq(at(x->grad, 0), OP_MAX_VARIADIC);
  drop_made();
  tensor_release(ctx, x);
}
END_TEST

START_TEST(a_dry_run_places_no_parameter) {
  Tensor *w = param("w", DT_F32, 2, four), *x;
  TensorSpec spec = {.dtype = DT_F32, .ndim = 2, .shape = {3, 4}};
  must(tensor_new(ctx, &ctx->meta, &spec, MEM_ACTIVATIONS, &x));
  x->requires_grad = x->depends_data = true;
  ctx->dry_run = true;
  Tensor *y = call2(OP_matmul, x, call1(OP_t, w)), *sum = call1(OP_sum, linear(y, w));
  must(backward(ctx, &sum, NULL, 1, BACKWARD_B, NULL));
  ck_assert_ptr_null(w->storage);
  ck_assert_int_eq(pool_use(ctx->pool, MEM_PARAMETERS).peak, 0);
  ck_assert(tensor_is_meta(x->grad));
  Tensor *both[] = {call1(OP_neg, w), w}, *douts[] = {both[0], both[0]};
  must(backward(ctx, both, douts, 2, BACKWARD_B, NULL)); // from w itself too
  ck_assert_ptr_null(w->storage);
  ck_assert_ptr_null(finished_grad(w));
  drop_made();
  tensor_release(ctx, x);
  tensor_release(ctx, w);
}
END_TEST

// Shapes alone say nothing of a gradient: a parameter that has its place keeps what it had.
START_TEST(a_backward_on_meta_gives_no_parameter_a_gradient) {
  for (int begins_at_param = 0; begins_at_param < 2; begins_at_param++) {
    Tensor *w = param("w", DT_F32, 2, four), *x;
    TensorSpec spec = {.dtype = DT_F32, .ndim = 2, .shape = {4, 4}};
    spec_row_major(&spec);
    must(param_place(ctx, w->param));
    must(tensor_new(ctx, &ctx->meta, &spec, MEM_ACTIVATIONS, &x));
    Tensor *out = begins_at_param ? w : linear(x, w);
    must(backward(ctx, &out, &x, 1, BACKWARD_B, NULL));
    out = call1(OP_mean, linear(x, w));
    must(backward(ctx, &out, NULL, 1, BACKWARD_B, NULL));
    ck_assert_ptr_null(finished_grad(w));
    Tensor *sum = call1(OP_sum, w);
    must(backward(ctx, &sum, NULL, 1, BACKWARD_B, NULL));
    out = call1(OP_mean, linear(x, w));
    must(backward(ctx, &out, NULL, 1, BACKWARD_B, NULL));
    for (int i = 0; i < 16; i++) ck_assert_double_eq(at(finished_grad(w), i), 1);
    drop_made();
    tensor_release(ctx, x);
    tensor_release(ctx, w);
  }
}
END_TEST

// ---- long chains
enum { CHAIN = 100000 };

static Tensor *chain(Tensor *x) {
  Tensor *y = tensor_retain(x);
  for (int i = 0; i < CHAIN; i++) {
    Tensor *next;
    must(ops_call(ctx, OP_neg, NULL, &y, 1, &next));
    tensor_release(ctx, y);
    y = next;
  }
  return y;
}

START_TEST(a_chain_of_100000_nodes_is_released_without_recursion) {
  Tensor *x = data(DT_F32, 1, 1, true);
  tensor_release(ctx, chain(x));
  Tensor *y = chain(x);
  must(backward(ctx, &y, NULL, 1, BACKWARD_B, NULL));
  ck_assert_double_eq(at(x->grad, 0), 1);
  tensor_release(ctx, y);
  tensor_release(ctx, x);
}
END_TEST

// ---- a region that runs again in backward
typedef struct Region {
  Tensor *x, *w; // borrowed
  uint64_t sequence;
  int n_runs;
} Region;

static Status region_run(Region *region, Tensor **out) {
  Tensor *in[] = {region->x, region->w}, *h, *a;
  region->n_runs++;
  TRY(ops_call(ctx, OP_linear, NULL, in, 2, &h));
  Status status = ops_call(ctx, OP_gelu, NULL, &h, 1, &a);
  tensor_release(ctx, h);
  TRY(status);
  in[0] = a;
  status = ops_call(ctx, OP_linear, NULL, in, 2, out);
  tensor_release(ctx, a);
  return status;
}

static Status region_grad(GradCall *call_) {
  Region *region = call_->user;
  bool grad = ctx->grad_enabled;
  uint64_t sequence = ctx->sequence;
  Tensor *y = NULL;
  ctx->grad_enabled = true;
  ctx->sequence = region->sequence;
  Status status = region_run(region, &y);
  ctx->sequence = sequence;
  if (status == ST_OK) status = backward_extend(call_, &y, &call_->dout[0], 1);
  ctx->grad_enabled = grad;
  tensor_release(ctx, y);
  return status;
}

static Status region_shape(OpCall *call_) {
  (void)call_;
  return ST_OK;
}

static int n_dropped;
static void region_drop(Ctx *c, void *user) {
  (void)c, (void)user;
  n_dropped++;
}

static const Op region_op = {.id = -1,
                             .name = "region",
                             .inputs = "token",
                             .args = "",
                             .needs = "token:",
                             .defer = "",
                             .n_out = 1,
                             .shape = region_shape,
                             .grad = region_grad};

// exp -> region -> sum; recomputed: the region keeps nothing and runs again.
static void run_region(bool recomputed, BackwardKind kind, float *dw, float *dx) {
  set_up();
  Tensor *w = param("w", DT_F32, 2, four), *leaf = data(DT_F32, 3, 4, true);
  Region region = {.x = call1(OP_tanh, leaf), .w = w};
  Tensor *y, *token = data(DT_F32, 1, 1, true);
  if (recomputed) {
    region.sequence = ctx->sequence;
    ctx->sequence += 16;
    ctx->grad_enabled = false;
    must(region_run(&region, &y));
    ctx->grad_enabled = true;
    must(tape_record_custom(ctx, &region_op, &token, 1, NULL, &y, 1, &region, region_drop));
  } else {
    must(region_run(&region, &y));
  }
  own(y);
  Tensor *sum = call1(OP_sum, call1(OP_square, y));
  n_dropped = 0;
  Backward *rest = NULL;
  must(backward(ctx, &sum, NULL, 1, kind, &rest));
  if (kind == BACKWARD_I) must(backward_w(ctx, rest));
  backward_delete(ctx, rest);
  ck_assert_int_eq(region.n_runs, recomputed ? 2 : 1);
  for (int i = 0; i < 16; i++) dw[i] = (float)at(finished_grad(w), i);
  for (int i = 0; i < 12; i++) dx[i] = (float)at(leaf->grad, i);
  drop_made();
  ck_assert_int_eq(n_dropped, recomputed);
  tensor_release(ctx, token);
  tensor_release(ctx, leaf);
  tensor_release(ctx, w);
  tear_down();
}

START_TEST(a_recomputed_region_gives_the_same_bits) {
  float dw[16], dx[12], dw2[16], dx2[12];
  run_region(false, BACKWARD_B, dw, dx);
  for (int kind = 0; kind < 2; kind++) {
    run_region(true, kind ? BACKWARD_I : BACKWARD_B, dw2, dx2);
    ck_assert_mem_eq(dw, dw2, sizeof dw);
    ck_assert_mem_eq(dx, dx2, sizeof dx);
  }
}
END_TEST

// ---- parameters and their sets
static void expect_equal(const Tensor *t, const double *want) {
  for (int64_t i = 0; i < tensor_numel(t); i++)
    ck_assert_msg(at(t, i) == want[i], "element %lld is %.9g, not %.9g", (long long)i, at(t, i),
                  want[i]);
}

START_TEST(gathering_keeps_values_and_pads) {
  static const int64_t a_shape[] = {3, 5}, b_shape[] = {7};
  for (int dp = 1; dp <= 5; dp += 2) {
    Tensor *a = param("a", DT_F32, 2, a_shape), *b = param("b", DT_F32, 1, b_shape);
    double before[15];
    must(param_place(ctx, a->param)); // b is placed by the set
    for (int i = 0; i < 15; i++) before[i] = at(a, i);
    Param *params[] = {a->param, b->param};
    WeightSet *set;
    must(weightset_new(ctx, params, 2, 0, 0, dp, &set));
    ck_assert_int_eq(set->numel % (16 * dp), 0);
    ck_assert_int_ge(set->numel, 16 + 16);
    ck_assert_int_eq(b->offset % 16, 0);
    ck_assert_ptr_eq(a->storage, b->storage);
    expect_equal(a, before);
    ck_assert_double_ne(at(b, 0), 0);
    Tensor *alone = param("b", DT_F32, 1, b_shape); // the same name, placed alone
    must(param_place(ctx, alone->param));
    for (int i = 0; i < 7; i++) ck_assert_double_eq(at(b, i), at(alone, i));
    weightset_release(ctx, set);
    tensor_release(ctx, alone);
    tensor_release(ctx, a);
    tensor_release(ctx, b);
  }
}
END_TEST

START_TEST(initial_values_do_not_depend_on_sharding) {
  static const int64_t full[] = {6, 8};
  static const DType dtypes[] = {DT_F32, DT_F64, DT_BF16};
  for (int d = 0; d < 3; d++) {
    for (int kind = RECIPE_NORMAL; kind <= RECIPE_UNIFORM; kind++) {
      Recipe recipe = {.kind = (RecipeKind)kind, .a = -0.5, .b = 1.5};
      Tensor *whole = param("h.0.w", dtypes[d], 2, full);
      must(param_recipe(ctx, whole->param, &recipe));
      must(param_place(ctx, whole->param));
      for (int half = 0; half < 4; half++) { // of the rows, of the columns
        Tensor *part = param("h.0.w", dtypes[d], 2, full);
        must(param_recipe(ctx, part->param, &recipe));
        int dim = half / 2;
        int64_t n = full[dim] / 2, first = half % 2 * n;
        Shard shard = {.dim = dim, .full = full[dim], .n_runs = 1, .runs = {{first, n, true}}};
        must(param_shard(ctx, part->param, &shard, n));
        must(param_place(ctx, part->param));
        int64_t row = dim == 0 ? first : 0, column = dim == 1 ? first : 0;
        for (int64_t r = 0; r < part->shape[0]; r++)
          for (int64_t c = 0; c < part->shape[1]; c++)
            ck_assert_double_eq(at(part, r * part->shape[1] + c),
                                at(whole, (row + r) * 8 + column + c));
        tensor_release(ctx, part);
      }
      tensor_release(ctx, whole);
    }
  }
}
END_TEST

// 2^26, 1, -2^26 in f32: only the order decides what is left.
START_TEST(uses_of_a_parameter_are_summed_in_unit_order) {
  static const int64_t one[] = {1};
  static const double slopes[] = {0x1p26, 1, -0x1p26};
  static const int order[][3] = {{0, 1, 2}, {2, 1, 0}, {1, 2, 0}};
  for (int k = 0; k < 3; k++) {
    Tensor *w = param("w", DT_F32, 1, one);
    for (int use = 0; use < 3; use++) {
      Tensor *slope;
      ctx->place.unit = order[k][use];
      must(tensor_scalar(ctx, DT_F32, slopes[order[k][use]], &slope));
      Tensor *y = call2(OP_mul, w, slope);
      must(backward(ctx, &y, NULL, 1, BACKWARD_B, NULL));
      tensor_release(ctx, slope);
      drop_made();
    }
    ctx->place.unit = 0;
    ck_assert_double_eq(at(finished_grad(w), 0), 0); // (2^26 + 1) - 2^26, 1 lost
    tensor_release(ctx, w);
  }
}
END_TEST

START_TEST(unwritten_gradients_are_zero_and_forgotten_ones_overwritten) {
  static const int64_t two[] = {2};
  Tensor *a = param("a", DT_F32, 1, two), *b = param("b", DT_F32, 1, two);
  Param *params[] = {a->param, b->param};
  WeightSet *set;
  must(weightset_new(ctx, params, 2, 0, 0, 1, &set));
  for (int turn = 0; turn < 2; turn++) {
    Tensor *y = call1(OP_sum, call1(OP_square, a));
    must(backward(ctx, &y, NULL, 1, BACKWARD_B, NULL));
    drop_made();
    must(weightset_finish_grads(ctx, set));
    for (int64_t i = 0; i < set->numel; i++)
      ck_assert_double_eq(at(set->grad, i), i < 2 ? 2 * at(a, i) : 0);
    weightset_zero_grads(set);
    ck_assert_ptr_null(finished_grad(a));
  }
  weightset_release(ctx, set);
  tensor_release(ctx, a);
  tensor_release(ctx, b);
}
END_TEST

// ---- scopes: what is neither saved nor returned goes at once
enum { T = 4, C = 16, BYTES = T * C * 4 }; // f32[T, C], a multiple of 64 bytes

static Tensor *adopted(OpId id, Tensor *a, Tensor *b) {
  Tensor *in[] = {a, b}, *out;
  must(ops_call(ctx, id, NULL, in, b ? 2 : 1, &out));
  must(scope_adopt(ctx, out));
  return own(out);
}

// x -linear-> h -gelu-> a -add-> s -linear-> y: gelu keeps h for I; the linears keep x and s for W;
// a is kept by nobody.
START_TEST(live_bytes_follow_the_formula) {
  static const int64_t square[] = {C, C};
  Tensor *w1 = param("w1", DT_F32, 2, square), *w2 = param("w2", DT_F32, 2, square);
  Tensor *x = data(DT_F32, T, C, false);
  must(param_place(ctx, w1->param));
  must(param_place(ctx, w2->param));
  Arena i = {.name = "I"}, w = {.name = "W"};
  ctx->arena_i = &i;
  ctx->arena_w = &w;
  ctx->place.step = 12;
  ctx->place.microbatch = 3;
  Scope outer, scope;
  scope_open(ctx, &outer);
  scope_open(ctx, &scope);
  Tensor *h = adopted(OP_linear, x, w1), *a = adopted(OP_gelu, h, NULL);
  Tensor *s = adopted(OP_add, a, a), *y = adopted(OP_linear, s, w2);
  ck_assert_uint_eq(pool_use(ctx->pool, MEM_ACTIVATIONS).current, 5 * BYTES);
  must(scope_close(ctx, &scope, &y, 1));
  ck_assert_uint_eq(pool_use(ctx->pool, MEM_ACTIVATIONS).current, 4 * BYTES); // a is gone
  ck_assert_uint_eq(i.bytes, BYTES);
  ck_assert_uint_eq(w.bytes, 2 * BYTES);
  expect_failure(tensor_alive(a), ST_ESTATE, "step 12", "microbatch 3");
  must(tensor_alive(h)); // kept by gelu
  ck_assert_int_eq(op_apply(ctx, op_row(OP_exp), &a, 1, NULL, &h), ST_ESTATE);
  must(scope_close(ctx, &outer, &y, 1));

  Tensor *dy = data(DT_F32, T, C, false);
  Backward *rest;
  must(backward(ctx, &y, &dy, 1, BACKWARD_I, &rest));
  ck_assert_uint_eq(i.bytes, 0);         // h is gone
  ck_assert_uint_eq(w.bytes, 4 * BYTES); // x, s and the gradients at both linears
  ck_assert_uint_eq(pool_use(ctx->pool, MEM_ACTIVATIONS).current, 5 * BYTES); // and y
  must(backward_w(ctx, rest));
  backward_delete(ctx, rest);
  ck_assert_uint_eq(w.bytes, 0);
  ck_assert_uint_eq(pool_use(ctx->pool, MEM_ACTIVATIONS).current, 3 * BYTES); // x, y, dy
  ck_assert_uint_eq(w.peak, 4 * BYTES);
  ctx->arena_i = ctx->arena_w = NULL;
  drop_made();
  tensor_release(ctx, dy);
  tensor_release(ctx, x);
  tensor_release(ctx, w1);
  tensor_release(ctx, w2);
}
END_TEST

Suite *tape_suite(void);
Suite *tape_suite(void) {
  Suite *suite = suite_create("tape");
  TCase *alone = tcase_create("halves"); // make their own contexts
  tcase_add_test(alone, i_then_w_gives_the_bits_of_b);
  tcase_add_test(alone, weight_gradients_that_run_early_give_the_same_bits);
  tcase_add_test(alone, weights_wait_for_w_and_gains_ride_with_i);
  tcase_add_test(alone, a_recomputed_region_gives_the_same_bits);
  suite_add_tcase(suite, alone);
  TCase *tcase = tcase_create("tape");
  tcase_add_checked_fixture(tcase, set_up, tear_down);
  tcase_add_test(tcase, a_changed_tensor_is_found_at_backward_with_both_lines);
  tcase_add_test(tcase, a_changed_parameter_is_found_at_backward_with_both_lines);
  tcase_add_test(tcase, a_step_is_found_through_a_view_of_a_parameter);
  tcase_add_test(tcase, in_place_on_a_leaf_that_wants_a_gradient_is_refused);
  tcase_add_test(tcase, a_graph_serves_one_backward);
  tcase_add_test(tcase, backward_needs_one_number_or_a_gradient);
  tcase_add_test(tcase, integers_carry_no_gradient);
  tcase_add_test(tcase, a_list_of_inputs_has_a_limit);
  tcase_add_test(tcase, a_backward_on_meta_gives_no_parameter_a_gradient);
  tcase_add_test(tcase, a_dry_run_places_no_parameter);
  tcase_add_test(tcase, a_chain_of_100000_nodes_is_released_without_recursion);
  tcase_add_test(tcase, gathering_keeps_values_and_pads);
  tcase_add_test(tcase, initial_values_do_not_depend_on_sharding);
  tcase_add_test(tcase, uses_of_a_parameter_are_summed_in_unit_order);
  tcase_add_test(tcase, unwritten_gradients_are_zero_and_forgotten_ones_overwritten);
  tcase_add_test(tcase, live_bytes_follow_the_formula);
  suite_add_tcase(suite, tcase);
  return suite;
}
