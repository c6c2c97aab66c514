// indexing - gather and scatter by index tensors, one_hot, sorting: shape rules and gradients.
//
// What gather reads, its gradient adds to; so index_select, topk and sort. The additions come in
// the order of the indices.
#include "ops/expr.h"
#include "ops/movement.h"
#include "ops/rows.h"
#include "ops/shapes.h"

#include <string.h>

// ---- gather, scatter_add
// index[...] picks along d: of the other dimensions it may use a part of x.
static Status check_gather(OpCall *call, const Tensor *x, const Tensor *index, int *d) {
  TRY(shape_dim(call, call->args.v[0].i, x->ndim, d));
  call->args.v[0].i = *d;
  TRY(shape_integer(call, 1));
  bool fits = index->ndim == x->ndim;
  for (int k = 0; fits && k < x->ndim; k++) fits = k == *d || index->shape[k] <= x->shape[k];
  if (!fits)
    return shape_fail(call, "index must have as many dimensions, none larger but dimension %d", *d);
  call->index_in = 1;
  call->index_limit = x->shape[*d];
  return ST_OK;
}

Status shape_gather(OpCall *call) {
  int d = 0;
  TRY(check_gather(call, call->in[0], call->in[1], &d));
  shape_like(&call->out[0], call->in[1]);
  call->out[0].dtype = call->in[0]->dtype;
  call->workspace = gather_workspace(call);
  return ST_OK;
}

// The shape of what is scattered to, as a backward row's list argument gives it.
static void list_spec(const OpCall *call, TensorSpec *out) {
  out->dtype = call->in[0]->dtype;
  out->ndim = call->args.n_list;
  memcpy(out->shape, call->args.list, (size_t)out->ndim * sizeof *out->shape);
}

static OpArgs shape_args(const GradCall *call, int64_t dim) {
  OpArgs args = {.v = {{.i = dim}}, .n_list = call->in_spec[0].ndim};
  memcpy(args.list, call->in_spec[0].shape, (size_t)args.n_list * sizeof *args.list);
  return args;
}

Status shape_gather_bwd(OpCall *call) {
  list_spec(call, &call->out[0]);
  call->workspace = scatter_workspace(call, spec_numel(&call->out[0]));
  return ST_OK;
}
Status shape_index_select_bwd(OpCall *call) { return shape_gather_bwd(call); }

Status grad_gather(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  OpArgs args = shape_args(call, call->args->v[0].i);
  Tensor *in[] = {call->dout[0], call->in[1]};
  expr_give_op(&e, call, 0, OP_gather_bwd, &args, in, 2);
  return expr_end(&e);
}

Status shape_scatter_add(OpCall *call) {
  const Tensor *x = call->in[0], *index = call->in[1], *src = call->in[2];
  int d = 0;
  TRY(check_gather(call, x, index, &d));
  bool same = src->ndim == index->ndim && src->dtype == x->dtype;
  for (int k = 0; same && k < src->ndim; k++) same = src->shape[k] == index->shape[k];
  if (!same) return shape_fail(call, "src must have index's shape and x's dtype");
  shape_like(&call->out[0], x);
  call->workspace = scatter_workspace(call, tensor_numel(x));
  return ST_OK;
}

Status grad_scatter_add(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  Tensor *dy = call->dout[0], *in[] = {dy, call->in[1]};
  if (grad_wants(call, 2)) expr_give_op(&e, call, 2, OP_gather, call->args, in, 2);
  if (grad_wants(call, 0)) expr_give(&e, call, 0, dy);
  return expr_end(&e);
}

// ---- index_select
Status shape_index_select(OpCall *call) {
  const Tensor *x = call->in[0], *index = call->in[1];
  int d = 0;
  TRY(shape_dim(call, call->args.v[0].i, x->ndim, &d));
  call->args.v[0].i = d;
  TRY(shape_integer(call, 1));
  if (index->ndim != 1) return shape_fail(call, "index must have one dimension");
  shape_like(&call->out[0], x);
  call->out[0].shape[d] = index->shape[0];
  call->index_in = 1;
  call->index_limit = x->shape[d];
  call->workspace = gather_workspace(call);
  return ST_OK;
}

Status grad_index_select(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  OpArgs args = shape_args(call, call->args->v[0].i);
  Tensor *in[] = {call->dout[0], call->in[1]};
  expr_give_op(&e, call, 0, OP_index_select_bwd, &args, in, 2);
  return expr_end(&e);
}

// ---- one_hot
Status shape_one_hot(OpCall *call) {
  const Tensor *x = call->in[0];
  int64_t classes = call->args.v[0].i;
  TRY(shape_integer(call, 0));
  if (classes < 1) return fail(ST_EVALUE, "one_hot: %lld classes", (long long)classes);
  if (x->ndim == MAX_DIMS) return shape_fail(call, "%d dimensions are the most", MAX_DIMS);
  shape_like(&call->out[0], x);
  call->out[0].dtype = DT_I64;
  call->out[0].shape[call->out[0].ndim++] = classes;
  call->index_in = 0;
  call->index_limit = classes;
  return ST_OK;
}

// ---- sorting
static Status shape_sorted(OpCall *call, int64_t dim, int *d) {
  TRY(shape_dim(call, dim, call->in[0]->ndim, d));
  shape_like(&call->out[0], call->in[0]);
  call->workspace = sort_workspace(call->in[0]->shape[*d]);
  return ST_OK;
}

Status shape_sort(OpCall *call) {
  int d = 0;
  TRY(shape_sorted(call, call->args.v[0].i, &d));
  call->args.v[0].i = d;
  call->out[1] = call->out[0];
  call->out[1].dtype = DT_I64;
  return ST_OK;
}

Status shape_argsort(OpCall *call) {
  int d = 0;
  TRY(shape_sorted(call, call->args.v[0].i, &d));
  call->args.v[0].i = d;
  call->out[0].dtype = DT_I64;
  return ST_OK;
}

Status shape_topk(OpCall *call) {
  int64_t k = call->args.v[0].i;
  int d = 0;
  TRY(shape_sorted(call, call->args.v[1].i, &d));
  call->args.v[1].i = d;
  if (k < 0 || k > call->in[0]->shape[d])
    return shape_fail(call, "k is %lld, dimension %d holds %lld", (long long)k, d,
                      (long long)call->in[0]->shape[d]);
  call->out[0].shape[d] = k;
  call->out[1] = call->out[0];
  call->out[1].dtype = DT_I64;
  return ST_OK;
}

// dy goes to where the values came from.
static Status grad_sorted(GradCall *call, int64_t dim) {
  if (!call->dout[0]) return ST_OK;
  Expr e;
  expr_begin(&e, call->ctx);
  OpArgs args = shape_args(call, dim);
  Tensor *in[] = {call->dout[0], call->out[1]};
  expr_give_op(&e, call, 0, OP_gather_bwd, &args, in, 2);
  return expr_end(&e);
}
Status grad_sort(GradCall *call) { return grad_sorted(call, call->args->v[0].i); }
Status grad_topk(GradCall *call) { return grad_sorted(call, call->args->v[1].i); }
