// reduce - sums and their like over some dimensions: shape rules and gradients.
//
// A shape rule leaves the list argument normalised: the reduced dimensions, ascending, none
// negative.
#include "ops/reduce.h"
#include "ops/expr.h"
#include "ops/rows.h"
#include "ops/shapes.h"

#include <string.h>

// ---- shapes
// The result's shape: reduced dimensions become 1 (keepdim) or vanish. *count: elements a result is
// made of.
static Status shape_reduction(OpCall *call, bool keepdim, int64_t *count) {
  const Tensor *x = call->in[0];
  TensorSpec *out = &call->out[0];
  unsigned dims = 0;
  TRY(shape_dims(call, x->ndim, &dims));
  out->dtype = x->dtype;
  out->ndim = call->args.n_list = 0;
  *count = 1;
  for (int d = 0; d < x->ndim; d++) {
    bool gone = dims >> d & 1;
    if (gone) {
      call->args.list[call->args.n_list++] = d;
      *count *= x->shape[d];
    }
    if (!gone || keepdim) out->shape[out->ndim++] = gone ? 1 : x->shape[d];
  }
  return ST_OK;
}

static Status shape_nothing(const OpCall *call) {
  return fail_hint(shape_fail(call, "there is nothing to take it of"),
                   "a reduced dimension has size 0");
}

static Status shape_simple(OpCall *call) {
  int64_t count;
  TRY(shape_reduction(call, call->args.v[0].i, &count));
  call->workspace = reduce_workspace(call);
  return ST_OK;
}

static Status shape_of_some(OpCall *call) { // undefined for no elements
  int64_t count;
  TRY(shape_reduction(call, call->args.v[0].i, &count));
  if (count == 0) return shape_nothing(call);
  call->workspace = reduce_workspace(call);
  return ST_OK;
}

Status shape_sum(OpCall *call) {
  TRY(shape_simple(call));
  if (!dtype_is_float(call->in[0]->dtype)) call->out[0].dtype = DT_I64;
  return ST_OK;
}

Status shape_mean(OpCall *call) { return shape_of_some(call); }
Status shape_max(OpCall *call) { return shape_of_some(call); }
Status shape_min(OpCall *call) { return shape_of_some(call); }
Status shape_logsumexp(OpCall *call) { return shape_simple(call); }

static Status shape_index(OpCall *call) {
  TRY(shape_of_some(call));
  call->out[0].dtype = DT_I64;
  return ST_OK;
}
Status shape_argmax(OpCall *call) { return shape_index(call); }
Status shape_argmin(OpCall *call) { return shape_index(call); }

static Status shape_truth(OpCall *call) {
  TRY(shape_simple(call));
  call->out[0].dtype = DT_BOOL;
  return ST_OK;
}
Status shape_any(OpCall *call) { return shape_truth(call); }
Status shape_all(OpCall *call) { return shape_truth(call); }

Status shape_var(OpCall *call) {
  int64_t count, correction = call->args.v[0].i;
  TRY(shape_reduction(call, call->args.v[1].i, &count));
  if (count <= correction)
    return fail_hint(shape_fail(call, "%lld elements are too few for correction %lld",
                                (long long)count, (long long)correction),
                     "correction = 0 divides by the number of elements");
  call->workspace = reduce_workspace(call);
  return ST_OK;
}

Status shape_cumsum(OpCall *call) {
  int dim;
  TRY(shape_dim(call, call->args.v[0].i, call->in[0]->ndim, &dim));
  call->args.v[0].i = dim;
  shape_like(&call->out[0], call->in[0]);
  if (!dtype_is_float(call->in[0]->dtype)) call->out[0].dtype = DT_I64;
  call->workspace = cumsum_workspace(call);
  return ST_OK;
}

// ---- gradients
// t, with a result's shape, with the reduced dimensions back: as a view of x's shape.
static Tensor *expand_back(Expr *e, const GradCall *call, Tensor *t) {
  if (e->status != ST_OK || !t) return NULL;
  TensorSpec kept = call->in_spec[0];
  for (int i = 0; i < call->args->n_list; i++) kept.shape[call->args->list[i]] = 1;
  return expr_expand(e, expr_view(e, t, kept.ndim, kept.shape), kept.ndim, call->in_spec[0].shape);
}

static int64_t reduced_count(const GradCall *call) {
  int64_t n = 1;
  for (int i = 0; i < call->args->n_list; i++) n *= call->in_spec[0].shape[call->args->list[i]];
  return n;
}

// t * factor / divisor; bf16 by way of f32, which holds both.
static Tensor *scale(Expr *e, Tensor *t, double factor, double divisor) {
  if (!t) return NULL;
  DType dtype = t->dtype;
  if (dtype == DT_BF16) t = expr_cast(e, t, DT_F32);
  if (factor != 1) t = expr2s(e, OP_mul, t, factor);
  t = expr2s(e, OP_div, t, divisor);
  return dtype == DT_BF16 ? expr_cast(e, t, dtype) : t;
}

Status grad_sum(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  expr_give(&e, call, 0, expand_back(&e, call, call->dout[0]));
  return expr_end(&e);
}

Status grad_mean(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  Tensor *each = scale(&e, call->dout[0], 1, (double)reduced_count(call));
  expr_give(&e, call, 0, expand_back(&e, call, each));
  return expr_end(&e);
}

// d var / dx = 2 (x - mean) / (n - correction)
Status grad_var(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  OpArgs over = *call->args;
  over.v[0].i = true; // mean's keepdim
  Tensor *x = call->in[0], *mean = expr_n(&e, OP_mean, &over, &x, 1);
  double rest = (double)(reduced_count(call) - call->args->v[0].i);
  Tensor *dy = scale(&e, call->dout[0], 2, rest);
  Tensor *in[] = {expr2(&e, OP_sub, x, mean), expand_back(&e, call, dy)};
  expr_give_op(&e, call, 0, OP_mul, NULL, in, 2);
  return expr_end(&e);
}

// Elements equal to the result share its gradient evenly.
static Status grad_extreme(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  Tensor *hit = expr2(&e, OP_eq, call->in[0], expand_back(&e, call, call->out[0]));
  OpArgs over = *call->args;
  over.v[0].i = call->out[0]->ndim == call->in_spec[0].ndim; // keepdim
  Tensor *share = expr_n(&e, OP_sum, &over, &hit, 1), *dy = call->dout[0];
  share = share ? expr2(&e, OP_div, dy, expr_cast(&e, share, dy->dtype)) : NULL;
  Tensor *in[] = {expand_back(&e, call, share), expr_cast(&e, hit, dy->dtype)};
  expr_give_op(&e, call, 0, OP_mul, NULL, in, 2);
  return expr_end(&e);
}
Status grad_max(GradCall *call) { return grad_extreme(call); }
Status grad_min(GradCall *call) { return grad_extreme(call); }

// d log sum exp / dx = exp(x - y); 0 where all x are -infinity.
Status grad_logsumexp(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  Tensor *y = call->out[0], *zero = expr_scalar(&e, y->dtype, 0);
  Tensor *shift = expr3(&e, OP_where, expr1(&e, OP_isfinite, y), y, zero);
  Tensor *share = expr1(&e, OP_exp, expr2(&e, OP_sub, call->in[0], expand_back(&e, call, shift)));
  Tensor *in[] = {share, expand_back(&e, call, call->dout[0])};
  expr_give_op(&e, call, 0, OP_mul, NULL, in, 2);
  return expr_end(&e);
}

// The sum runs back from the other end.
Status grad_cumsum(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  OpArgs back = *call->args;
  back.v[1].i = !back.v[1].i;
  expr_give_op(&e, call, 0, OP_cumsum, &back, &call->dout[0], 1);
  return expr_end(&e);
}
