// elementwise - shape rules and gradients of element-wise ops. Formulas stand beside each gradient;
// dy is the gradient of the result, and broadcasting is undone by summing (expr_sum_to).
#include "ops/elementwise.h"
#include "ops/expr.h"
#include "ops/rows.h"
#include "ops/shapes.h"

#include <string.h>

// ---- shapes
static Status shape_unary(OpCall *call) {
  shape_like(&call->out[0], call->in[0]);
  return ST_OK;
}

static Status shape_binary(OpCall *call, bool gives_bool) {
  call->out[0].dtype = gives_bool ? DT_BOOL : call->in[0]->dtype;
  return shape_broadcast(call, call->in, 2, &call->out[0]);
}

#define X(name, fn) \
  Status shape_##name(OpCall *call) { return shape_unary(call); }
UNARY_ROWS(X)
#undef X
#define X(name, fn) \
  Status shape_##name(OpCall *call) { return shape_binary(call, false); }
BINARY_ROWS(X)
#undef X
#define X(name, fn) \
  Status shape_##name(OpCall *call) { return shape_binary(call, true); }
BOOL_BINARY_ROWS(X)
#undef X
#define X(name, fn) \
  Status shape_##name(OpCall *call) { return shape_unary(call); }
BACKWARD_ROWS(X)
#undef X

Status shape_clamp(OpCall *call) {
  if (call->args.v[0].f > call->args.v[1].f)
    return fail(ST_EVALUE, "clamp: lo %g is above hi %g", call->args.v[0].f, call->args.v[1].f);
  return shape_unary(call);
}

Status shape_where(OpCall *call) {
  if (call->in[1]->dtype != call->in[2]->dtype)
    return fail_hint(shape_fail(call, "a and b must have one dtype"), "convert one with x:to()");
  call->out[0].dtype = call->in[1]->dtype;
  return shape_broadcast(call, call->in, 3, &call->out[0]);
}

Status shape_cast(OpCall *call) {
  shape_like(&call->out[0], call->in[0]);
  call->out[0].dtype = (DType)call->args.v[0].i;
  return ST_OK;
}

Status shape_contiguous(OpCall *call) { return shape_unary(call); }

static Status shape_to_bool(OpCall *call) {
  shape_like(&call->out[0], call->in[0]);
  call->out[0].dtype = DT_BOOL;
  return ST_OK;
}
Status shape_logical_not(OpCall *call) { return shape_to_bool(call); }
Status shape_isfinite(OpCall *call) { return shape_to_bool(call); }

// ---- gradients
// Gives input j the gradient t, summed over what was broadcast.
static void give_sum(Expr *e, GradCall *call, int j, Tensor *t) {
  expr_give(e, call, j, expr_sum_to(e, t, &call->in_spec[j]));
}

Status grad_add(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  for (int j = 0; j < 2; j++)
    if (grad_wants(call, j)) give_sum(&e, call, j, call->dout[0]);
  return expr_end(&e);
}

Status grad_sub(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  if (grad_wants(call, 0)) give_sum(&e, call, 0, call->dout[0]);
  if (grad_wants(call, 1)) give_sum(&e, call, 1, expr1(&e, OP_neg, call->dout[0]));
  return expr_end(&e);
}

Status grad_mul(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  for (int j = 0; j < 2; j++)
    if (grad_wants(call, j))
      give_sum(&e, call, j, expr2(&e, OP_mul, call->dout[0], call->in[1 - j]));
  return expr_end(&e);
}

// d(a/b)/da = 1/b, d(a/b)/db = -a/b^2
Status grad_div(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  Tensor *b = call->in[1], *over_b = expr2(&e, OP_div, call->dout[0], b);
  if (grad_wants(call, 0)) give_sum(&e, call, 0, over_b);
  if (grad_wants(call, 1)) {
    Tensor *t = expr2(&e, OP_div, expr2(&e, OP_mul, over_b, call->in[0]), b);
    give_sum(&e, call, 1, expr1(&e, OP_neg, t));
  }
  return expr_end(&e);
}

// d(a^b)/da = b a^(b-1) (0 where b = 0), d(a^b)/db = a^b log a (0 where a = 0 and b >= 0)
Status grad_pow(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  Tensor *a = call->in[0], *b = call->in[1], *dy = call->dout[0];
  Tensor *zero = expr_scalar(&e, dy->dtype, 0);
  if (grad_wants(call, 0)) {
    Tensor *slope = expr2(&e, OP_mul, b, expr2(&e, OP_pow, a, expr2s(&e, OP_sub, b, 1)));
    slope = expr3(&e, OP_where, expr2s(&e, OP_eq, b, 0), zero, slope);
    give_sum(&e, call, 0, expr2(&e, OP_mul, dy, slope));
  }
  if (grad_wants(call, 1)) {
    Tensor *slope = expr2(&e, OP_mul, expr2(&e, OP_pow, a, b), expr1(&e, OP_log, a));
    Tensor *at_zero = expr2(&e, OP_logical_and, expr2s(&e, OP_eq, a, 0), expr2s(&e, OP_ge, b, 0));
    give_sum(&e, call, 1, expr2(&e, OP_mul, dy, expr3(&e, OP_where, at_zero, zero, slope)));
  }
  return expr_end(&e);
}

// The winner gets dy; equal ones half each.
static Status grad_choice(GradCall *call, OpId wins) {
  Expr e;
  expr_begin(&e, call->ctx);
  for (int j = 0; j < 2; j++) {
    if (!grad_wants(call, j)) continue;
    Tensor *mine = call->in[j], *other = call->in[1 - j], *dy = call->dout[0];
    Tensor *more = expr_cast(&e, expr2(&e, wins, mine, other), dy->dtype);
    Tensor *same = expr_cast(&e, expr2(&e, OP_eq, mine, other), dy->dtype);
    Tensor *weight = expr2(&e, OP_add, more, expr2s(&e, OP_mul, same, 0.5));
    give_sum(&e, call, j, expr2(&e, OP_mul, dy, weight));
  }
  return expr_end(&e);
}
Status grad_maximum(GradCall *call) { return grad_choice(call, OP_gt); }
Status grad_minimum(GradCall *call) { return grad_choice(call, OP_lt); }

Status grad_neg(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  expr_give(&e, call, 0, expr1(&e, OP_neg, call->dout[0]));
  return expr_end(&e);
}

Status grad_sign(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  Tensor *zero;
  e.status = tensor_zeros(call->ctx, call->dout[0]->storage->device, call->in_spec[0].dtype,
                          call->in_spec[0].ndim, call->in_spec[0].shape, MEM_ACTIVATIONS, &zero);
  if (e.status == ST_OK) e.status = grad_give(call, 0, zero);
  return expr_end(&e);
}

// dx = bwd(dy, x), or of the result where the kernel reads that.
static Status grad_pair(GradCall *call, OpId bwd, Tensor *with) {
  Expr e;
  expr_begin(&e, call->ctx);
  Tensor *in[] = {call->dout[0], with};
  expr_give_op(&e, call, 0, bwd, NULL, in, 2);
  return expr_end(&e);
}
#define READS_X(name) \
  Status grad_##name(GradCall *call) { return grad_pair(call, OP_##name##_bwd, call->in[0]); }
#define READS_OUT(name) \
  Status grad_##name(GradCall *call) { return grad_pair(call, OP_##name##_bwd, call->out[0]); }
READS_X(abs)
READS_X(square)
READS_X(log)
READS_X(erf)
READS_X(relu)
READS_X(gelu)
READS_X(gelu_tanh)
READS_X(silu)
READS_OUT(reciprocal)
READS_OUT(sqrt)
READS_OUT(rsqrt)
READS_OUT(tanh)
READS_OUT(sigmoid)

Status grad_exp(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  Tensor *in[] = {call->dout[0], call->out[0]};
  expr_give_op(&e, call, 0, OP_mul, NULL, in, 2);
  return expr_end(&e);
}

// Within [lo, hi], ends included, dy passes.
Status grad_clamp(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  Tensor *x = call->in[0], *dy = call->dout[0];
  Tensor *inside = expr2(&e, OP_logical_and, expr2s(&e, OP_ge, x, call->args->v[0].f),
                         expr2s(&e, OP_le, x, call->args->v[1].f));
  expr_give(&e, call, 0, expr2(&e, OP_mul, dy, expr_cast(&e, inside, dy->dtype)));
  return expr_end(&e);
}

Status grad_where(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  Tensor *cond = call->in[0], *dy = call->dout[0];
  for (int j = 1; j < 3; j++) {
    if (!grad_wants(call, j)) continue;
    Tensor *zero = expr_scalar(&e, dy->dtype, 0);
    give_sum(&e, call, j, expr3(&e, OP_where, cond, j == 1 ? dy : zero, j == 1 ? zero : dy));
  }
  return expr_end(&e);
}

Status grad_cast(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  OpArgs back = {.n_list = -1};
  back.v[0].i = call->in_spec[0].dtype;
  expr_give_op(&e, call, 0, OP_cast, &back, &call->dout[0], 1);
  return expr_end(&e);
}

Status grad_contiguous(GradCall *call) { return grad_give(call, 0, tensor_retain(call->dout[0])); }
