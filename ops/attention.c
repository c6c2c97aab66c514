// attention - scaled dot-product attention and rotary embedding: shape rules and gradients.
//
// The backward reads q, k, v, the result and lse, the logsumexp of each query's scores; no T x T
// matrix is kept (FlashAttention, arXiv:2205.14135).
#include "ops/attention.h"

#include "ops/expr.h"
#include "ops/rows.h"
#include "ops/shapes.h"
#include "ops/stage.h"

#include <math.h>
#include <string.h>

enum { MAX_HEAD_SIZE = 256 }; // of the CPU kernel

// What both forms of the op have in common, after their shapes are known.
static Status check_attention(OpCall *call, const Heads *h, const Tensor *mask, DType dtype,
                              ArgValue *window, ArgValue *scale) {
  if (h->D > MAX_HEAD_SIZE)
    return shape_fail(call, "a head may have at most %d elements, not %lld", MAX_HEAD_SIZE,
                      (long long)h->D);
  if (h->H < 1 || h->Hkv < 1 || h->H % h->Hkv != 0)
    return fail(ST_EVALUE, "%s: %lld query heads cannot share %lld key heads (must divide)",
                call->op->name, (long long)h->H, (long long)h->Hkv);
  if (window->i < 0)
    return fail(ST_EVALUE, "%s: window is %lld, it must be at least 1, or 0 for none",
                call->op->name, (long long)window->i);
  if (scale->f == 0) scale->f = 1 / sqrt((double)h->D);
  call->flops = 4.0 * (double)(h->B * h->H * h->T) * (double)h->S * (double)h->D;
  if (!mask) return ST_OK;
  const int64_t full[] = {h->B, h->H, h->T, h->S};
  bool fits = mask->ndim <= 4;
  for (int d = 0; fits && d < mask->ndim; d++) {
    int64_t want = full[4 - mask->ndim + d];
    fits = mask->shape[d] == want || mask->shape[d] == 1;
  }
  if (!fits)
    return shape_fail(call, "mask must broadcast to [%lld, %lld, %lld, %lld]", (long long)h->B,
                      (long long)h->H, (long long)h->T, (long long)h->S);
  if (mask->dtype != dtype)
    return fail_hint(shape_fail(call, "mask must have the dtype of q"),
                     "a bool mask becomes additive by rille.where(mask, 0, -inf)");
  if (mask->requires_grad && call->records)
    return fail_hint(
        fail(ST_EVALUE, "%s: mask wants a gradient, which this op does not give", call->op->name),
        "compute the scores with matmul and softmax, or detach the mask");
  return ST_OK;
}

static void result_specs(OpCall *call, const Heads *h, DType dtype) {
  call->out[1] = (TensorSpec){.dtype = wide_dtype(dtype), .ndim = 3, .shape = {h->B, h->H, h->T}};
  call->workspace = stage_bytes(call);
}

Status shape_attention(OpCall *call) {
  Tensor *q = call->in[0], *k = call->in[1], *v = call->in[2];
  if (q->ndim != 4 || k->ndim != 4 || v->ndim != 4)
    return shape_fail(call, "q, k and v must be [batch, time, heads, size]");
  bool fits = k->shape[0] == q->shape[0] && k->shape[3] == q->shape[3];
  for (int d = 0; d < 4; d++) fits = fits && k->shape[d] == v->shape[d];
  if (!fits) return shape_fail(call, "k and v must be alike, and share batch and head size with q");
  if (k->dtype != q->dtype || v->dtype != q->dtype)
    return shape_fail(call, "q, k and v must have one dtype");
  Heads h = heads_of(q, k);
  TRY(check_attention(call, &h, call->n_in > 3 ? call->in[3] : NULL, q->dtype, &call->args.v[1],
                      &call->args.v[2]));
  shape_like(&call->out[0], q);
  result_specs(call, &h, q->dtype);
  return ST_OK;
}

Status shape_attention_packed(OpCall *call) {
  Tensor *qkv = call->in[0];
  int64_t heads = call->args.v[0].i;
  if (call->args.v[1].i == 0) call->args.v[1].i = heads;
  int64_t all = heads + 2 * call->args.v[1].i;
  if (qkv->ndim != 3) return shape_fail(call, "qkv must be [batch, time, width]");
  if (heads < 1 || call->args.v[1].i < 1 || qkv->shape[2] % all != 0)
    return shape_fail(call, "its width must be a multiple of heads + 2 kv_heads = %lld",
                      (long long)all);
  Heads h = heads_of_packed(qkv, &call->args);
  TRY(check_attention(call, &h, call->n_in > 1 ? call->in[1] : NULL, qkv->dtype, &call->args.v[3],
                      &call->args.v[4]));
  shape_like(&call->out[0], qkv);
  call->out[0].shape[2] = heads * h.D;
  result_specs(call, &h, qkv->dtype);
  return ST_OK;
}

Status shape_attention_bwd(OpCall *call) {
  for (int i = 0; i < 3; i++) shape_like(&call->out[i], call->in[1 + i]);
  Heads h = heads_of(call->in[1], call->in[2]);
  call->workspace = attention_bwd_bytes(call, &h);
  return ST_OK;
}

Status shape_attention_packed_bwd(OpCall *call) {
  shape_like(&call->out[0], call->in[1]);
  Heads h = heads_of_packed(call->in[1], &call->args);
  call->workspace = attention_bwd_bytes(call, &h);
  return ST_OK;
}

Status grad_attention(GradCall *call) {
  Tensor *in[] = {call->dout[0],
                  call->in[0],
                  call->in[1],
                  call->in[2],
                  call->out[0],
                  call->saved[0],
                  call->n_in > 3 ? call->in[3] : NULL};
  return grad_by_op(call, OP_attention_bwd, call->args, in, 7, 3);
}

Status grad_attention_packed(GradCall *call) {
  Tensor *in[] = {call->dout[0], call->in[0], call->out[0], call->saved[0],
                  call->n_in > 1 ? call->in[1] : NULL};
  return grad_by_op(call, OP_attention_packed_bwd, call->args, in, 5, 1);
}

// ---- rotary embedding: its backward turns the other way
Status shape_rope(OpCall *call) {
  Tensor *x = call->in[0], *positions = call->n_in > 1 ? call->in[1] : NULL;
  if (x->ndim != 4) return shape_fail(call, "x must be [batch, time, heads, size]");
  if (x->dtype != DT_F32 && x->dtype != DT_F64 && x->dtype != DT_BF16)
    return shape_fail(call, "x must be floating point");
  int64_t *n_rotated = &call->args.v[2].i;
  if (*n_rotated == 0) *n_rotated = x->shape[3];
  if (*n_rotated < 0 || *n_rotated > x->shape[3] || *n_rotated % 2 != 0)
    return shape_fail(call, "n_rotated is %lld, it must be even and at most the head size",
                      (long long)*n_rotated);
  if (positions &&
      (positions->dtype != DT_I64 || positions->ndim != 1 || positions->shape[0] != x->shape[1]))
    return shape_fail(call, "positions must be i64[%lld]", (long long)x->shape[1]);
  shape_like(&call->out[0], x);
  call->workspace = stage_bytes(call);
  return ST_OK;
}

Status grad_rope(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  OpArgs back = *call->args;
  back.v[4].i = !back.v[4].i;
  Tensor *in[] = {call->dout[0], call->n_in > 1 ? call->in[1] : NULL};
  expr_give_op(&e, call, 0, OP_rope, &back, in, in[1] ? 2 : 1);
  return expr_end(&e);
}
