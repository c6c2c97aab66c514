// embedding - rows of a table by id, and dropout: shape rules and gradients.
#include "ops/expr.h"
#include "ops/random.h"
#include "ops/rows.h"
#include "ops/shapes.h"
#include "ops/stage.h"

#include <string.h>

Status shape_embedding(OpCall *call) {
  Tensor *w = call->in[0], *ids = call->in[1];
  if (w->ndim != 2) return shape_fail(call, "weight must be [V, C]");
  if (ids->dtype != DT_I64)
    return fail_hint(shape_fail(call, "ids must be i64"), "convert with ids:to(\"i64\")");
  if (ids->ndim + 1 > MAX_DIMS) return shape_fail(call, "ids has too many dimensions");
  int64_t first = call->args.v[0].i, vocab = call->args.v[1].i;
  if (first < 0 || vocab < 0 || (first > 0 && vocab == 0))
    return fail_hint(fail(ST_EVALUE, "embedding: rows from %lld on of a table of %lld",
                          (long long)first, (long long)vocab),
                     "a part of a table says where it begins and how many rows the table has");
  shape_like(&call->out[0], ids);
  call->out[0].dtype = w->dtype;
  call->out[0].shape[call->out[0].ndim++] = w->shape[1];
  call->index_in = 1;
  call->index_limit = vocab ? vocab : w->shape[0];
  return ST_OK;
}

Status grad_embedding(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  OpArgs args = {.n_list = -1};
  args.v[0].i = call->in_spec[0].shape[0];
  args.v[1].i = call->args->v[0].i;
  Tensor *in[] = {call->dout[0], call->in[1]};
  expr_give_op(&e, call, 0, OP_embedding_bwd, &args, in, 2);
  return expr_end(&e);
}

Status shape_embedding_bwd(OpCall *call) {
  const Tensor *dy = call->in[0];
  call->out[0].dtype = dy->dtype;
  call->out[0].ndim = 2;
  call->out[0].shape[0] = call->args.v[0].i;
  call->out[0].shape[1] = dy->shape[dy->ndim - 1];
  call->workspace = stage_bytes(call);
  return ST_OK;
}

// ---- dropout: its backward is the same mask on dy
Status shape_dropout(OpCall *call) {
  double p = call->args.v[0].f;
  int64_t samples = call->args.v[3].i, numel = tensor_numel(call->in[0]);
  if (!(p >= 0 && p < 1)) return fail(ST_EVALUE, "dropout: p is %g, it must be in [0, 1)", p);
  if (samples < 1 || (numel && numel % samples != 0))
    return fail_hint(shape_fail(call, "x does not divide into the microbatch's %lld samples",
                                (long long)samples),
                     "the first dimension must be the batch, or batch times time");
  int64_t inner = call->args.v[5].i, whole = call->args.v[6].i, offset = call->args.v[7].i;
  if (inner < 0 || offset < 0 || (inner && (offset > whole - inner || numel / samples % inner)))
    return shape_fail(call, "%lld elements from %lld on are no part of %lld of a sample",
                      (long long)inner, (long long)offset, (long long)whole);
  shape_like(&call->out[0], call->in[0]);
  call->workspace = stage_bytes(call);
  return ST_OK;
}

Status grad_dropout(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  expr_give_op(&e, call, 0, OP_dropout, call->args, &call->dout[0], 1);
  return expr_end(&e);
}

Status ops_dropout(Ctx *ctx, Tensor *x, double p, const SamplePart *part, Tensor **out) {
  RandomCall random = {0};
  TRY(ctx_random_call(ctx, &random));
  OpArgs args = {.n_list = -1};
  args.v[0].f = p;
  args.v[1].i = (int64_t)random.key;
  args.v[2].i = random.first_sample;
  args.v[3].i = random.n_samples;
  args.v[4].i = random.step;
  args.v[5].i = part ? part->inner : 0;
  args.v[6].i = part ? part->whole : 0;
  args.v[7].i = part ? part->offset : 0;
  if (random.n_samples == 0) { // outside a step: each row is a sample of its own
    args.v[2].i = 0;
    args.v[3].i = x->ndim && x->shape[0] ? x->shape[0] : 1;
  }
  return op_apply(ctx, op_row(OP_dropout), &x, 1, &args, out);
}
