// reduce - sums and their like over some dimensions: shape rules and gradients.
#include "ops/expr.h"
#include "ops/rows.h"
#include "ops/shapes.h"

#include <string.h>

// The result's shape: reduced dimensions become 1 (keepdim) or vanish.
static void reduced_shape(const Tensor *x, unsigned dims, bool keepdim, TensorSpec *out) {
  out->ndim = 0;
  for (int d = 0; d < x->ndim; d++) {
    bool gone = dims >> d & 1;
    if (gone && !keepdim) continue;
    out->shape[out->ndim++] = gone ? 1 : x->shape[d];
  }
}

static Status shape_reduction(OpCall *call) {
  unsigned dims = 0;
  TRY(shape_dims(call, call->in[0]->ndim, &dims));
  call->out[0].dtype = call->in[0]->dtype;
  reduced_shape(call->in[0], dims, call->args.v[0].i, &call->out[0]);
  return ST_OK;
}

Status shape_sum(OpCall *call) {
  TRY(shape_reduction(call));
  DType dtype = call->in[0]->dtype;
  if (dtype == DT_BOOL || dtype == DT_I32 || dtype == DT_U8) call->out[0].dtype = DT_I64;
  return ST_OK;
}

// dy with the reduced dimensions back, as a broadcast view of the input's shape.
static Tensor *expand_back(Expr *e, const GradCall *call, Tensor *t) {
  if (e->status != ST_OK || !t) return NULL;
  const TensorSpec *x = &call->in_spec[0];
  unsigned dims = 0;
  OpCall names = {.op = call->op, .args = *call->args};
  e->status = shape_dims(&names, x->ndim, &dims);
  TensorSpec kept = {.ndim = x->ndim};
  for (int d = 0; d < x->ndim; d++) kept.shape[d] = dims >> d & 1 ? 1 : x->shape[d];
  return expr_expand(e, expr_view(e, t, kept.ndim, kept.shape), x->ndim, x->shape);
}

Status grad_sum(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  expr_give(&e, call, 0, expand_back(&e, call, call->dout[0]));
  return expr_end(&e);
}
