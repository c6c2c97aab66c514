// expr - see the header.
#include "ops/expr.h"

#include <assert.h>
#include <string.h>

void expr_begin(Expr *e, Ctx *ctx) {
  e->ctx = ctx;
  e->status = ST_OK;
  e->grad_enabled = ctx->grad_enabled;
  e->n = 0;
  ctx->grad_enabled = false;
}

Status expr_end(Expr *e) {
  for (int i = 0; i < e->n; i++) tensor_release(e->ctx, e->made[i]);
  e->ctx->grad_enabled = e->grad_enabled;
  return e->status;
}

// Takes over a tensor that was made with `status`.
static Tensor *own(Expr *e, Status status, Tensor *made) {
  e->status = status;
  if (status != ST_OK) return NULL;
  assert(e->n < EXPR_MAX);
  e->made[e->n++] = made;
  return made;
}

Tensor *expr_n(Expr *e, OpId id, const OpArgs *args, Tensor **in, int n_in) {
  if (e->status != ST_OK) return NULL;
  for (int j = 0; j < n_in; j++)
    if (!in[j]) return NULL;
  Tensor *made = NULL;
  Status status = ops_call(e->ctx, id, args, in, n_in, &made);
  return own(e, status, made);
}

Tensor *expr1(Expr *e, OpId id, Tensor *a) { return expr_n(e, id, NULL, &a, 1); }

Tensor *expr2(Expr *e, OpId id, Tensor *a, Tensor *b) {
  Tensor *in[] = {a, b};
  return expr_n(e, id, NULL, in, 2);
}

Tensor *expr3(Expr *e, OpId id, Tensor *a, Tensor *b, Tensor *c) {
  Tensor *in[] = {a, b, c};
  return expr_n(e, id, NULL, in, 3);
}

Tensor *expr_scalar(Expr *e, DType dtype, double value) {
  if (e->status != ST_OK) return NULL;
  Tensor *scalar = NULL;
  Status status = tensor_scalar(e->ctx, dtype, value, &scalar);
  return own(e, status, scalar);
}

Tensor *expr2s(Expr *e, OpId id, Tensor *a, double b) {
  return a ? expr2(e, id, a, expr_scalar(e, a->dtype, b)) : NULL;
}

Tensor *expr_cast(Expr *e, Tensor *a, DType dtype) {
  OpArgs as = {.n_list = -1};
  as.v[0].i = dtype;
  return expr_n(e, OP_cast, &as, &a, 1);
}

static Tensor *alias(Expr *e, Tensor *a, const TensorSpec *spec) {
  Tensor *made = NULL;
  Status status = tensor_alias(e->ctx, a, spec, &made);
  return own(e, status, made);
}

Tensor *expr_view(Expr *e, Tensor *a, int ndim, const int64_t *shape) {
  if (e->status != ST_OK || !a) return NULL;
  if (!tensor_contiguous(a)) a = expr1(e, OP_contiguous, a);
  if (!a) return NULL;
  TensorSpec spec = {.dtype = a->dtype, .ndim = ndim};
  if (ndim) memcpy(spec.shape, shape, (size_t)ndim * sizeof *shape);
  spec_row_major(&spec);
  spec.offset = a->offset;
  assert(spec_numel(&spec) == tensor_numel(a));
  return alias(e, a, &spec);
}

Tensor *expr_expand(Expr *e, Tensor *a, int ndim, const int64_t *shape) {
  if (e->status != ST_OK || !a) return NULL;
  TensorSpec spec = {.dtype = a->dtype, .ndim = ndim, .offset = a->offset};
  for (int d = 0; d < ndim; d++) {
    int own = d - (ndim - a->ndim);
    spec.shape[d] = shape[d];
    spec.stride[d] = own < 0 || (a->shape[own] == 1 && shape[d] != 1) ? 0 : a->stride[own];
  }
  return alias(e, a, &spec);
}

Tensor *expr_transpose(Expr *e, Tensor *a) {
  if (e->status != ST_OK || !a) return NULL;
  TensorSpec spec;
  tensor_spec(a, &spec);
  int last = spec.ndim - 1;
  int64_t shape = spec.shape[last], stride = spec.stride[last];
  spec.shape[last] = spec.shape[last - 1], spec.stride[last] = spec.stride[last - 1];
  spec.shape[last - 1] = shape, spec.stride[last - 1] = stride;
  return alias(e, a, &spec);
}

Tensor *expr_sum_to(Expr *e, Tensor *a, const TensorSpec *spec) {
  if (e->status != ST_OK || !a) return NULL;
  OpArgs args = {.n_list = 0};
  int lead = a->ndim - spec->ndim;
  int64_t terms = 1;
  for (int d = 0; d < a->ndim; d++) {
    if (d >= lead && spec->shape[d - lead] == a->shape[d]) continue;
    args.list[args.n_list++] = d;
    terms *= a->shape[d];
  }
  if (args.n_list == 0) return a;
  if (terms == 1) return expr_view(e, a, spec->ndim, spec->shape);
  return expr_view(e, expr_n(e, OP_sum, &args, &a, 1), spec->ndim, spec->shape);
}

void expr_give(Expr *e, GradCall *call, int j, Tensor *t) {
  if (e->status != ST_OK || !t) return;
  e->status = grad_give(call, j, tensor_retain(t));
}

void expr_give_op(Expr *e, GradCall *call, int j, OpId id, const OpArgs *args, Tensor **in,
                  int n_in) {
  Tensor *target = call->din[j];
  if (!target) {
    expr_give(e, call, j, expr_n(e, id, args, in, n_in));
    return;
  }
  if (e->status != ST_OK) return;
  for (int k = 0; k < n_in; k++)
    if (!in[k]) return;
  OpArgs defaults;
  if (!args) {
    op_args_default(op_row(id), &defaults);
    args = &defaults;
  }
  e->status = op_apply_into(e->ctx, op_row(id), in, n_in, args, &target,
                            (unsigned)(call->accumulate >> j & 1));
}

Status grad_by_op(GradCall *call, OpId bwd, const OpArgs *args, Tensor **in, int n_in, int n) {
  Tensor *out[OP_MAX_OUT] = {NULL};
  bool made[OP_MAX_OUT] = {false};
  unsigned accumulate = 0;
  Status status = ST_OK;
  Device *device = in[0]->storage->device;
  for (int j = 0; j < n; j++) {
    if (j >= call->n_in || !grad_wants(call, j)) continue;
    out[j] = call->din[j];
    if (out[j]) {
      accumulate |= (unsigned)(call->accumulate >> j & 1) << j;
      continue;
    }
    TRY_TO(failed, tensor_new(call->ctx, device, &call->in_spec[j], MEM_ACTIVATIONS, &out[j]));
    made[j] = true;
  }
  TRY_TO(failed, op_apply_into(call->ctx, op_row(bwd), in, n_in, args, out, accumulate));
  for (int j = 0; j < n; j++)
    if (made[j]) call->din[j] = out[j];
  return ST_OK;
failed:
  for (int j = 0; j < n; j++)
    if (made[j]) tensor_release(call->ctx, out[j]);
  return status;
}
