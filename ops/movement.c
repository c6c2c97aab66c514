// movement - ops that copy elements to new places: shape rules and gradients.
#include "ops/movement.h"
#include "ops/expr.h"
#include "ops/rows.h"
#include "ops/shapes.h"

#include <string.h>

// ---- cat, stack
// The inputs of cat agree in all dimensions but d.
Status shape_cat(OpCall *call) {
  int d = 0;
  if (call->n_in < 1) return fail(ST_EVALUE, "%s: there are no inputs", call->op->name);
  const Tensor *first = call->in[0];
  TRY(shape_dim(call, call->args.v[0].i, first->ndim, &d));
  call->args.v[0].i = d;
  shape_like(&call->out[0], first);
  for (int j = 1; j < call->n_in; j++) {
    const Tensor *t = call->in[j];
    bool fits = t->ndim == first->ndim;
    for (int k = 0; fits && k < t->ndim; k++) fits = k == d || t->shape[k] == first->shape[k];
    if (!fits) return shape_fail(call, "all sizes but that of dimension %d must agree", d);
    call->out[0].shape[d] += t->shape[d];
  }
  return ST_OK;
}

Status shape_stack(OpCall *call) {
  int at = 0;
  if (call->n_in < 1) return fail(ST_EVALUE, "%s: there are no inputs", call->op->name);
  const Tensor *first = call->in[0];
  if (first->ndim == MAX_DIMS) return shape_fail(call, "%d dimensions are the most", MAX_DIMS);
  TRY(shape_dim(call, call->args.v[0].i, first->ndim + 1, &at));
  call->args.v[0].i = at;
  TensorSpec *out = &call->out[0];
  out->dtype = first->dtype;
  out->ndim = first->ndim + 1;
  for (int d = 0; d < out->ndim; d++)
    out->shape[d] = d == at ? call->n_in : first->shape[d < at ? d : d - 1];
  for (int j = 1; j < call->n_in; j++) {
    const Tensor *t = call->in[j];
    if (t->ndim != first->ndim ||
        (t->ndim && memcmp(t->shape, first->shape, (size_t)t->ndim * sizeof *t->shape) != 0))
      return shape_fail(call, "all shapes must agree");
  }
  return ST_OK;
}

// Each input gets its part of dy, as a view.
Status grad_cat(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  int64_t d = call->args->v[0].i, at = 0;
  for (int j = 0; j < call->n_in && e.status == ST_OK; j++) {
    OpArgs part = {.n_list = -1, .v = {{.i = d}, {.i = at}, {.i = 0}, {.i = 1}}};
    at += call->in_spec[j].shape[d];
    part.v[2].i = at;
    if (!grad_wants(call, j)) continue;
    Tensor *view = NULL;
    e.status = ops_call(call->ctx, OP_slice, &part, &call->dout[0], 1, &view);
    if (e.status == ST_OK) e.status = grad_give(call, j, view);
  }
  return expr_end(&e);
}

Status grad_stack(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  for (int j = 0; j < call->n_in && e.status == ST_OK; j++) {
    OpArgs part = {.n_list = -1, .v = {{.i = call->args->v[0].i}, {.i = j}}};
    if (!grad_wants(call, j)) continue;
    Tensor *view = NULL;
    e.status = ops_call(call->ctx, OP_select, &part, &call->dout[0], 1, &view);
    if (e.status == ST_OK) e.status = grad_give(call, j, view);
  }
  return expr_end(&e);
}

// ---- tile
// Sizes of x and its repetitions, aligned at the last dimension. Returns the number of dimensions.
static int tile_plan(const OpArgs *args, int ndim, const int64_t *shape, int64_t *size,
                     int64_t *times) {
  int n = args->n_list > ndim ? args->n_list : ndim;
  for (int d = 0; d < n; d++) {
    int own = d - (n - ndim), given = d - (n - args->n_list);
    size[d] = own < 0 ? 1 : shape[own];
    times[d] = given < 0 ? 1 : args->list[given];
  }
  return n;
}

Status shape_tile(OpCall *call) {
  const Tensor *x = call->in[0];
  const OpArgs *args = &call->args;
  if (args->n_list < 0 || args->n_list > MAX_DIMS)
    return fail(ST_EVALUE, "tile: 0 to %d repetitions are wanted", MAX_DIMS);
  for (int i = 0; i < args->n_list; i++)
    if (args->list[i] < 0)
      return fail(ST_EVALUE, "tile: %lld repetitions", (long long)args->list[i]);
  int64_t size[MAX_DIMS], times[MAX_DIMS];
  TensorSpec *out = &call->out[0];
  out->dtype = x->dtype;
  out->ndim = tile_plan(args, x->ndim, x->shape, size, times);
  for (int d = 0; d < out->ndim; d++) TRY(checked_mul(times[d], size[d], &out->shape[d]));
  return ST_OK;
}

// The repetitions are summed, one dimension after the other.
Status grad_tile(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  const TensorSpec *x = &call->in_spec[0];
  int64_t size[MAX_DIMS], times[MAX_DIMS];
  int n = tile_plan(call->args, x->ndim, x->shape, size, times);
  Tensor *t = call->dout[0];
  int64_t outer = 1;
  for (int d = 0; d < n; d++) {
    int64_t inner = 1;
    for (int k = d + 1; k < n; k++) inner *= times[k] * size[k];
    if (times[d] != 1) {
      OpArgs over = {.n_list = 1, .list = {1}};
      t = expr_view(&e, t, 4, (int64_t[]){outer, times[d], size[d], inner});
      t = expr_n(&e, OP_sum, &over, &t, 1);
    }
    outer *= size[d];
  }
  expr_give(&e, call, 0, expr_view(&e, t, x->ndim, x->shape));
  return expr_end(&e);
}

// ---- pad, roll, triangles, masked_fill
Status shape_pad(OpCall *call) {
  const Tensor *x = call->in[0];
  const OpArgs *args = &call->args;
  if (args->n_list < 0 || args->n_list % 2 != 0 || args->n_list > 2 * x->ndim)
    return fail_hint(shape_fail(call, "%d numbers are given", args->n_list < 0 ? 0 : args->n_list),
                     "give {before, after} of the last dimension, then of the one before, ...");
  shape_like(&call->out[0], x);
  for (int i = 0; i < args->n_list; i++) {
    if (args->list[i] < 0)
      return fail_hint(fail(ST_EVALUE, "pad: %lld is negative", (long long)args->list[i]),
                       "x:slice(dim, start, stop) cuts");
    call->out[0].shape[x->ndim - 1 - i / 2] += args->list[i];
  }
  return ST_OK;
}

Status grad_pad(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  Tensor *t = call->dout[0];
  const TensorSpec *x = &call->in_spec[0];
  for (int i = 0; i < call->args->n_list; i += 2) {
    int d = x->ndim - 1 - i / 2;
    int64_t before = call->args->list[i];
    OpArgs part = {.n_list = -1,
                   .v = {{.i = d}, {.i = before}, {.i = before + x->shape[d]}, {.i = 1}}};
    t = expr_n(&e, OP_slice, &part, &t, 1);
  }
  expr_give(&e, call, 0, t);
  return expr_end(&e);
}

Status shape_roll(OpCall *call) {
  int d = 0;
  TRY(shape_dim(call, call->args.v[1].i, call->in[0]->ndim, &d));
  call->args.v[1].i = d;
  shape_like(&call->out[0], call->in[0]);
  return ST_OK;
}

Status grad_roll(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  OpArgs back = *call->args;
  int64_t n = call->in_spec[0].shape[back.v[1].i];
  back.v[0].i = n ? -(back.v[0].i % n) : 0;
  expr_give_op(&e, call, 0, OP_roll, &back, &call->dout[0], 1);
  return expr_end(&e);
}

static Status shape_triangle(OpCall *call) {
  if (call->in[0]->ndim < 2) return shape_fail(call, "a matrix is wanted");
  shape_like(&call->out[0], call->in[0]);
  return ST_OK;
}
Status shape_tril(OpCall *call) { return shape_triangle(call); }
Status shape_triu(OpCall *call) { return shape_triangle(call); }

// The op of x, with its arguments, of dy.
static Status grad_same_op(GradCall *call, OpId id, const OpArgs *args, Tensor **in, int n_in) {
  Expr e;
  expr_begin(&e, call->ctx);
  expr_give_op(&e, call, 0, id, args, in, n_in);
  return expr_end(&e);
}
Status grad_tril(GradCall *call) {
  return grad_same_op(call, OP_tril, call->args, &call->dout[0], 1);
}
Status grad_triu(GradCall *call) {
  return grad_same_op(call, OP_triu, call->args, &call->dout[0], 1);
}

Status shape_masked_fill(OpCall *call) {
  const Tensor *x = call->in[0], *mask = call->in[1];
  if (mask->dtype != DT_BOOL) return shape_fail(call, "mask must be bool");
  TensorSpec both;
  TRY(shape_broadcast(call, call->in, 2, &both));
  shape_like(&call->out[0], x);
  bool grows = both.ndim != x->ndim;
  for (int d = 0; !grows && d < x->ndim; d++) grows = both.shape[d] != x->shape[d];
  if (grows) return shape_fail(call, "mask must broadcast to x");
  double value = call->args.v[0].f;
  bool integer = !dtype_is_float(x->dtype);
  if (integer && !(value >= -9007199254740992.0 && value <= 9007199254740992.0))
    return fail(ST_EVALUE, "masked_fill: %g does not fit %s", value, dtype_name(x->dtype));
  return ST_OK;
}

Status grad_masked_fill(GradCall *call) {
  OpArgs zero = {.n_list = -1};
  Tensor *in[] = {call->dout[0], call->in[1]};
  return grad_same_op(call, OP_masked_fill, &zero, in, 2);
}
