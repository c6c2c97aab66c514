// rows_last - ops on rows of the last dimension: softmax, norms, cross-entropy.
#include "ops/rows_last.h"
#include "ops/expr.h"
#include "ops/rows.h"
#include "ops/shapes.h"
#include "ops/stage.h"

#include <string.h>

// ---- softmax and log_softmax
static Status shape_softmax_like(OpCall *call) {
  const Tensor *x = call->in[call->n_in - 1];
  if (x->ndim == 0) return shape_fail(call, "x needs at least one dimension");
  int dim = 0;
  TRY(shape_dim(call, call->args.v[0].i, x->ndim, &dim));
  call->args.v[0].i = dim;
  shape_like(&call->out[0], x);
  call->workspace = stage_bytes(call);
  if (dim != x->ndim - 1) // columns are gathered into rows: each input and the result
    call->workspace += (call->n_in + 1) * spec_numel(&call->out[0]) * (int64_t)sizeof(double);
  return ST_OK;
}
Status shape_softmax(OpCall *call) { return shape_softmax_like(call); }
Status shape_log_softmax(OpCall *call) { return shape_softmax_like(call); }
Status shape_softmax_bwd(OpCall *call) { return shape_softmax_like(call); }
Status shape_log_softmax_bwd(OpCall *call) { return shape_softmax_like(call); }

static Status grad_softmax_like(GradCall *call, OpId bwd) {
  Expr e;
  expr_begin(&e, call->ctx);
  Tensor *in[] = {call->dout[0], call->out[0]};
  expr_give_op(&e, call, 0, bwd, call->args, in, 2);
  return expr_end(&e);
}
Status grad_softmax(GradCall *call) { return grad_softmax_like(call, OP_softmax_bwd); }
Status grad_log_softmax(GradCall *call) { return grad_softmax_like(call, OP_log_softmax_bwd); }

// ---- norms: hidden outputs mean and rstd of each row (mean is unused by rms_norm)
static Status shape_norm(OpCall *call) {
  const Tensor *x = call->in[0];
  if (x->ndim == 0) return shape_fail(call, "x needs at least one dimension");
  int64_t columns = x->shape[x->ndim - 1];
  for (int j = 1; j < call->n_in; j++) {
    const Tensor *p = call->in[j];
    if (!p) continue;
    if (p->ndim != 1 || p->shape[0] != columns)
      return shape_fail(call, "weight and bias must be [%lld], the last size of x",
                        (long long)columns);
    if (p->dtype != x->dtype) return shape_fail(call, "x, weight and bias must have one dtype");
  }
  shape_like(&call->out[0], x);
  for (int i = 1; i < 3; i++) {
    call->out[i].dtype = wide_dtype(x->dtype);
    call->out[i].ndim = 1;
    call->out[i].shape[0] = columns ? tensor_numel(x) / columns : 0;
  }
  call->workspace = stage_bytes(call);
  return ST_OK;
}
Status shape_layer_norm(OpCall *call) { return shape_norm(call); }
Status shape_rms_norm(OpCall *call) { return shape_norm(call); }

Status shape_norm_bwd(OpCall *call) {
  const Tensor *x = call->in[1];
  shape_like(&call->out[0], x);
  for (int i = 1; i < 3; i++) {
    call->out[i].dtype = x->dtype;
    call->out[i].ndim = 1;
    call->out[i].shape[0] = x->shape[x->ndim - 1];
  }
  call->workspace = norm_bwd_workspace(call);
  return ST_OK;
}

static Status grad_norm(GradCall *call, bool is_rms) {
  OpArgs args = {.n_list = -1};
  args.v[0].i = is_rms;
  Tensor *in[] = {call->dout[0], call->in[0], call->saved[0], call->saved[1],
                  call->n_in > 1 ? call->in[1] : NULL};
  return grad_by_op(call, OP_norm_bwd, &args, in, 5, 3);
}
Status grad_layer_norm(GradCall *call) { return grad_norm(call, false); }
Status grad_rms_norm(GradCall *call) { return grad_norm(call, true); }

// ---- cross-entropy: hidden output lse, the logsumexp of each row
Status shape_cross_entropy_each(OpCall *call) {
  const Tensor *logits = call->in[0], *targets = call->in[1];
  bool fits = logits->ndim >= 1 && targets->ndim == logits->ndim - 1;
  for (int d = 0; fits && d < targets->ndim; d++) fits = targets->shape[d] == logits->shape[d];
  if (!fits) return shape_fail(call, "logits [..., V] need targets [...]");
  if (targets->dtype != DT_I64)
    return fail_hint(shape_fail(call, "targets must be i64"), "convert with targets:to(\"i64\")");
  if (logits->dtype != DT_F32 && logits->dtype != DT_F64 && logits->dtype != DT_BF16)
    return shape_fail(call, "logits must be floating point");
  shape_like(&call->out[0], targets);
  call->out[0].dtype = wide_dtype(logits->dtype);
  call->out[1] = call->out[0];
  call->workspace = stage_bytes(call);
  call->index_in = 1;
  call->index_limit = logits->shape[logits->ndim - 1];
  call->index_skip = call->args.v[0].i;
  return ST_OK;
}

Status shape_cross_entropy_bwd(OpCall *call) {
  shape_like(&call->out[0], call->in[1]);
  call->workspace = stage_bytes(call);
  return ST_OK;
}

Status grad_cross_entropy_each(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  Tensor *in[] = {call->dout[0], call->in[0], call->in[1], call->saved[0]};
  expr_give_op(&e, call, 0, OP_cross_entropy_bwd, call->args, in, 4);
  return expr_end(&e);
}
