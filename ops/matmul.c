// matmul - matrix products: shape rules and gradients.
//
//   y = a b        da = dy b'       db = a' dy      (leading dimensions that were broadcast are
//   summed) y = act(z), z = x w' + bias
//                  dz = dy act'(z)  dx = dz w       dw = dz' x      dbias = column sums of dz
#include "ops/matmul.h"
#include "ops/expr.h"
#include "ops/rows.h"
#include "ops/shapes.h"

#include <string.h>

Status shape_matmul(OpCall *call) {
  Tensor *a = call->in[0], *b = call->in[1];
  if (a->ndim == 0 || b->ndim == 0) return shape_fail(call, "operands need at least one dimension");
  int64_t k_a = a->shape[a->ndim - 1];
  int64_t k_b = b->shape[b->ndim == 1 ? 0 : b->ndim - 2];
  if (k_a != k_b)
    return fail_hint(
        shape_fail(call, "inner sizes differ (%lld and %lld)", (long long)k_a, (long long)k_b),
        "a[..., M, K] needs b[..., K, N]; b:t() swaps the last two dimensions");
  TensorSpec *out = &call->out[0];
  out->dtype = a->dtype;
  int lead_a = a->ndim > 2 ? a->ndim - 2 : 0, lead_b = b->ndim > 2 ? b->ndim - 2 : 0;
  int lead = lead_a > lead_b ? lead_a : lead_b;
  for (int d = 0; d < lead; d++) {
    int own_a = d - (lead - lead_a), own_b = d - (lead - lead_b);
    int64_t n_a = own_a < 0 ? 1 : a->shape[own_a], n_b = own_b < 0 ? 1 : b->shape[own_b];
    if (n_a != n_b && n_a != 1 && n_b != 1)
      return shape_fail(call, "leading dimensions do not broadcast (%lld and %lld)", (long long)n_a,
                        (long long)n_b);
    out->shape[d] = n_a == 1 ? n_b : n_a;
  }
  out->ndim = lead;
  if (a->ndim > 1) out->shape[out->ndim++] = a->shape[a->ndim - 2];
  if (b->ndim > 1) out->shape[out->ndim++] = b->shape[b->ndim - 1];
  call->flops = 2.0 * (double)spec_numel(out) * (double)k_a;
  call->workspace = matmul_workspace(call);
  return ST_OK;
}

// t as a matrix: a vector gets a dimension of 1 in front (a row) or behind (a column).
static Tensor *as_matrix(Expr *e, Tensor *t, bool as_row) {
  if (!t || t->ndim != 1) return t;
  int64_t shape[2] = {as_row ? 1 : t->shape[0], as_row ? t->shape[0] : 1};
  return expr_view(e, t, 2, shape);
}

// The gradient of the result with the dimensions that vectors had lost.
static Tensor *dy_as_matrix(Expr *e, const GradCall *call) {
  Tensor *dy = call->dout[0];
  bool a_vector = call->in_spec[0].ndim == 1, b_vector = call->in_spec[1].ndim == 1;
  if (!a_vector && !b_vector) return dy;
  int64_t shape[MAX_DIMS + 2];
  int lead = dy->ndim - !a_vector - !b_vector, n = lead;
  memcpy(shape, dy->shape, (size_t)lead * sizeof *shape);
  shape[n++] = a_vector ? 1 : dy->shape[lead];
  shape[n++] = b_vector ? 1 : dy->shape[dy->ndim - 1];
  return expr_view(e, dy, n, shape);
}

// Gives a product to input j: straight into its place if the shapes agree, else summed to its
// shape.
static void give_product(Expr *e, GradCall *call, int j, Tensor *a, Tensor *b) {
  if (e->status != ST_OK || !a || !b) return;
  const TensorSpec *spec = &call->in_spec[j];
  int ndim = a->ndim > b->ndim ? a->ndim : b->ndim;
  bool same = spec->ndim == ndim;
  for (int d = 0; same && d < ndim - 2; d++) {
    int own_a = d - (ndim - a->ndim), own_b = d - (ndim - b->ndim);
    int64_t n_a = own_a < 0 ? 1 : a->shape[own_a], n_b = own_b < 0 ? 1 : b->shape[own_b];
    same = spec->shape[d] == (n_a == 1 ? n_b : n_a);
  }
  Tensor *in[] = {a, b};
  if (same) {
    expr_give_op(e, call, j, OP_matmul, NULL, in, 2);
    return;
  }
  TensorSpec matrix = *spec;
  if (spec->ndim == 1) { // a row of a, a column of b
    matrix.ndim = 2;
    matrix.shape[0] = j == 0 ? 1 : spec->shape[0];
    matrix.shape[1] = j == 0 ? spec->shape[0] : 1;
  }
  Tensor *sum = expr_sum_to(e, expr2(e, OP_matmul, a, b), &matrix);
  expr_give(e, call, j, expr_view(e, sum, spec->ndim, spec->shape));
}

// b[K,N] met every row of a[..., M, K]: its gradient is one product over all rows, not a batch to
// sum.
static void give_shared(Expr *e, GradCall *call, Tensor *dy) {
  Tensor *a = call->in[0];
  int64_t k = a->shape[a->ndim - 1], n = dy->shape[dy->ndim - 1];
  int64_t rows = shape_product(a->shape, 0, a->ndim - 1);
  Tensor *flat_a = expr_view(e, a, 2, (int64_t[]){rows, k});
  Tensor *flat_dy = expr_view(e, dy, 2, (int64_t[]){rows, n});
  Tensor *in[] = {flat_a ? expr_transpose(e, flat_a) : NULL, flat_dy};
  expr_give_op(e, call, 1, OP_matmul, NULL, in, 2);
}

Status grad_matmul(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  Tensor *dy = dy_as_matrix(&e, call);
  if (grad_wants(call, 0))
    give_product(&e, call, 0, dy, expr_transpose(&e, as_matrix(&e, call->in[1], false)));
  if (grad_wants(call, 1)) {
    const TensorSpec *a = &call->in_spec[0], *b = &call->in_spec[1];
    if (b->ndim == 2 && a->ndim > 2)
      give_shared(&e, call, dy);
    else
      give_product(&e, call, 1, expr_transpose(&e, as_matrix(&e, call->in[0], true)), dy);
  }
  return expr_end(&e);
}

// ---- linear
Status shape_linear(OpCall *call) {
  Tensor *x = call->in[0], *w = call->in[1], *bias = call->n_in > 2 ? call->in[2] : NULL;
  if (w->ndim != 2) return shape_fail(call, "w must be [N, K]");
  if (x->ndim < 1 || x->shape[x->ndim - 1] != w->shape[1])
    return shape_fail(call, "the last size of x must be %lld", (long long)w->shape[1]);
  if (bias && (bias->ndim != 1 || bias->shape[0] != w->shape[0]))
    return shape_fail(call, "bias must be [%lld]", (long long)w->shape[0]);
  if (x->dtype != w->dtype || (bias && bias->dtype != x->dtype))
    return fail_hint(shape_fail(call, "x, w and bias must have one dtype"),
                     "convert with x:to(\"%s\")", dtype_name(w->dtype));
  int64_t act = call->args.v[0].i;
  if (act < 0 || act > ACT_SILU)
    return fail(ST_EVALUE, "%s: there is no act %lld", call->op->name, (long long)act);
  shape_like(&call->out[0], x);
  call->out[0].shape[x->ndim - 1] = w->shape[0];
  call->out[1] = call->out[0]; // z, which the gradient of act reads
  call->n_saved = call->records && act != ACT_NONE ? 1 : 0;
  call->flops = 2.0 * (double)spec_numel(&call->out[0]) * (double)w->shape[1];
  call->workspace = linear_workspace(call);
  return ST_OK;
}

OpId linear_act_backward(int64_t act) {
  switch ((Activation)act) {
  case ACT_RELU: return OP_relu_bwd;
  case ACT_GELU: return OP_gelu_bwd;
  case ACT_GELU_TANH: return OP_gelu_tanh_bwd;
  case ACT_SILU: return OP_silu_bwd;
  case ACT_NONE: break;
  }
  return OP_COUNT;
}

Status grad_linear(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  const TensorSpec *x = &call->in_spec[0], *w = &call->in_spec[1];
  int64_t act = call->args->v[0].i;
  Tensor *dy = call->dout[0];
  int64_t n = w->shape[0], k = w->shape[1], rows = shape_product(x->shape, 0, x->ndim - 1);
  Tensor *dz = act == ACT_NONE ? dy : expr2(&e, linear_act_backward(act), dy, call->saved[0]);
  Tensor *flat = expr_view(&e, dz, 2, (int64_t[]){rows, n});
  if (grad_wants(call, 0)) {
    if (call->din[0]) { // [rows, K] over the same bytes
      Tensor *whole = call->din[0], *in[] = {flat, call->in[1]};
      call->din[0] = expr_view(&e, whole, 2, (int64_t[]){rows, k});
      expr_give_op(&e, call, 0, OP_matmul, NULL, in, 2);
      call->din[0] = whole;
    } else {
      Tensor *dx = expr2(&e, OP_matmul, flat, call->in[1]);
      expr_give(&e, call, 0, expr_view(&e, dx, x->ndim, x->shape));
    }
  }
  if (grad_wants(call, 1)) {
    Tensor *flat_x = expr_view(&e, call->in[0], 2, (int64_t[]){rows, k});
    Tensor *in[] = {expr_transpose(&e, flat), flat_x};
    expr_give_op(&e, call, 1, OP_matmul, NULL, in, 2);
  }
  if (call->n_in > 2 && grad_wants(call, 2)) {
    OpArgs over_rows = {.n_list = 1};
    expr_give_op(&e, call, 2, OP_sum, &over_rows, &flat, 1);
  }
  return expr_end(&e);
}
