// attention_cpu - attention and rotary embedding on the CPU, by ops/kernels.
#include "ops/attention.h"

#include "ops/kernels/kernels.h"
#include "ops/ops.h"
#include "ops/rows.h"
#include "ops/stage.h"

#include <string.h>

// A [B, T, H, D] tensor as the kernel sees it: widened copies are dense.
static HeadStrides strides_of(const Tensor *t) {
  if (t->dtype == DT_BF16) {
    HeadStrides dense = {t->shape[1] * t->shape[2] * t->shape[3], t->shape[2] * t->shape[3],
                         t->shape[3]};
    return dense;
  }
  return (HeadStrides){t->stride[0], t->stride[1], t->stride[2]};
}

// bf16 inputs that are views are widened row by row into a dense copy.
static const void *stage_heads(Stage *stage, const Tensor *t) {
  if (t->dtype != DT_BF16 || tensor_contiguous(t)) return stage_in(stage, t);
  float *wide = (float *)(void *)stage->at;
  const uint16_t *from = tensor_data(t);
  int64_t row = t->shape[t->ndim - 1], rows = tensor_numel(t) / (row ? row : 1);
  for (int64_t r = 0; r < rows; r++) {
    int64_t at = 0, rest = r;
    for (int d = t->ndim - 2; d >= 0; d--) {
      at += rest % t->shape[d] * t->stride[d];
      rest /= t->shape[d];
    }
    cpu_kernels()->widen(wide + r * row, from + at, row);
  }
  stage->at += (tensor_numel(t) * (int64_t)sizeof(float) + 63) / 64 * 64;
  return wide;
}

static void set_mask(Attention *a, Stage *stage, const Tensor *mask) {
  if (!mask) return;
  a->mask = stage_heads(stage, mask);
  int64_t stride[4] = {0, 0, 0, 0}, dense = 1;
  for (int d = mask->ndim - 1; d >= 0; d--) {
    int64_t step = mask->dtype == DT_BF16 ? dense : mask->stride[d];
    stride[4 - mask->ndim + d] = mask->shape[d] == 1 ? 0 : step;
    dense *= mask->shape[d];
  }
  a->mask_at.batch = stride[0];
  a->mask_at.head = stride[1];
  a->mask_at.row = stride[2];
  a->mask_at.column = stride[3];
}

static Attention sized(const Heads *h, const ArgValue *causal_window_scale) {
  Attention a = {.B = h->B, .T = h->T, .S = h->S, .H = h->H, .Hkv = h->Hkv, .D = h->D};
  a.causal = causal_window_scale[0].i;
  a.window = causal_window_scale[1].i;
  a.scale = causal_window_scale[2].f;
  return a;
}

static const void *shifted(const void *base, int64_t elements, bool wide) {
  return (const char *)base + elements * (int64_t)(wide ? sizeof(double) : sizeof(float));
}

// Points q, k, v (or dq, dk, dv) into one packed [B, T, (H + 2 Hkv) D] array.
typedef struct Packed {
  HeadStrides at;
  int64_t k, v; // where they begin
} Packed;

static Packed packed_at(const Tensor *qkv, const Heads *h) {
  int64_t width = qkv->shape[2];
  bool is_dense = qkv->dtype == DT_BF16;
  Packed p = {{is_dense ? h->T * width : qkv->stride[0], is_dense ? width : qkv->stride[1], h->D},
              h->H * h->D,
              (h->H + h->Hkv) * h->D};
  return p;
}

static void set_packed(Attention *a, Stage *stage, const Tensor *qkv, const Heads *h) {
  Packed p = packed_at(qkv, h);
  bool wide = is_f64(qkv);
  a->q = stage_heads(stage, qkv);
  a->k = shifted(a->q, p.k, wide);
  a->v = shifted(a->q, p.v, wide);
  a->q_at = a->k_at = a->v_at = p.at;
}

static HeadStrides dense_heads(const Heads *h) {
  HeadStrides at = {h->T * h->H * h->D, h->H * h->D, h->D};
  return at;
}

static void run_forward(const Attention *a, bool wide) {
  if (wide)
    cpu_kernels()->attention_f64(a);
  else
    cpu_kernels()->attention_f32(a);
}

static void run_backward(const Attention *a, bool wide) {
  if (wide)
    cpu_kernels()->attention_bwd_f64(a);
  else
    cpu_kernels()->attention_bwd_f32(a);
}

void cpu_attention(const KernelCall *call) {
  const Tensor *q = call->in[0], *k = call->in[1], *v = call->in[2];
  if (tensor_numel(call->out[0]) == 0) return;
  Stage stage = stage_begin(call);
  Heads h = heads_of(q, k);
  Attention a = sized(&h, call->args->v);
  a.q = stage_heads(&stage, q), a.q_at = strides_of(q);
  a.k = stage_heads(&stage, k), a.k_at = strides_of(k);
  a.v = stage_heads(&stage, v), a.v_at = strides_of(v);
  set_mask(&a, &stage, call->n_in > 3 ? call->in[3] : NULL);
  a.out = stage_out(&stage, call->out[0], false);
  a.out_at = dense_heads(&h);
  a.lse = tensor_data(call->out[1]);
  run_forward(&a, is_f64(q));
  stage_end(&stage);
}

void cpu_attention_packed(const KernelCall *call) {
  const Tensor *qkv = call->in[0];
  if (tensor_numel(call->out[0]) == 0) return;
  Stage stage = stage_begin(call);
  Heads h = heads_of_packed(qkv, call->args);
  Attention a = sized(&h, call->args->v + 2);
  set_packed(&a, &stage, qkv, &h);
  set_mask(&a, &stage, call->n_in > 1 ? call->in[1] : NULL);
  a.out = stage_out(&stage, call->out[0], false);
  a.out_at = dense_heads(&h);
  a.lse = tensor_data(call->out[1]);
  run_forward(&a, is_f64(qkv));
  stage_end(&stage);
}

int64_t attention_bwd_bytes(const OpCall *call, const Heads *h) {
  Attention a = {.B = h->B, .T = h->T, .S = h->S, .H = h->H, .Hkv = h->Hkv, .D = h->D};
  return stage_bytes(call) + (int64_t)attention_workspace(&a, sizeof(double)) + 64;
}

// dout, out and lse of a backward call; they are dense or [B, T, H D] with dense heads.
static void set_results(Attention *a, Stage *stage, const Tensor *dout, const Tensor *out,
                        const Tensor *lse, const Heads *h) {
  a->dout = stage_heads(stage, dout);
  HeadStrides heads = dense_heads(h);
  if (dout->dtype == DT_BF16)
    a->dout_at = heads;
  else if (dout->ndim == 4)
    a->dout_at = strides_of(dout);
  else
    a->dout_at = (HeadStrides){dout->stride[0], dout->stride[1], h->D};
  const void *result = stage_in(stage, out);
  memcpy(&a->out, &result, sizeof result); // backward only reads it
  a->out_at = heads;
  a->lse = tensor_data(lse);
}

void cpu_attention_bwd(const KernelCall *call) {
  const Tensor *q = call->in[1], *k = call->in[2], *v = call->in[3];
  Stage stage = stage_begin(call);
  Heads h = heads_of(q, k);
  Attention a = sized(&h, call->args->v);
  a.q = stage_heads(&stage, q), a.q_at = strides_of(q);
  a.k = stage_heads(&stage, k), a.k_at = strides_of(k);
  a.v = stage_heads(&stage, v), a.v_at = strides_of(v);
  set_mask(&a, &stage, call->in[6]);
  set_results(&a, &stage, call->in[0], call->in[4], call->in[5], &h);
  a.accumulate_dq = call->accumulate & 1;
  a.accumulate_dk = call->accumulate & 2;
  a.accumulate_dv = call->accumulate & 4;
  HeadStrides kv = {h.S * h.Hkv * h.D, h.Hkv * h.D, h.D};
  a.dq = stage_out(&stage, call->out[0], a.accumulate_dq), a.dq_at = dense_heads(&h);
  a.dk = stage_out(&stage, call->out[1], a.accumulate_dk), a.dk_at = kv;
  a.dv = stage_out(&stage, call->out[2], a.accumulate_dv), a.dv_at = kv;
  a.workspace = stage.at;
  run_backward(&a, is_f64(q));
  stage_end(&stage);
}

void cpu_attention_packed_bwd(const KernelCall *call) {
  const Tensor *qkv = call->in[1];
  Stage stage = stage_begin(call);
  Heads h = heads_of_packed(qkv, call->args);
  Attention a = sized(&h, call->args->v + 2);
  set_packed(&a, &stage, qkv, &h);
  set_mask(&a, &stage, call->in[4]);
  set_results(&a, &stage, call->in[0], call->in[2], call->in[3], &h);
  bool adds = call->accumulate & 1, wide = is_f64(qkv);
  Packed p = packed_at(qkv, &h);
  p.at.time = qkv->shape[2], p.at.batch = h.T * qkv->shape[2]; // the gradient is dense
  char *d = stage_out(&stage, call->out[0], adds);
  size_t width = wide ? sizeof(double) : sizeof(float);
  a.dq = d;
  a.dk = d + (size_t)p.k * width;
  a.dv = d + (size_t)p.v * width;
  a.dq_at = a.dk_at = a.dv_at = p.at;
  a.accumulate_dq = a.accumulate_dk = a.accumulate_dv = adds;
  a.workspace = stage.at;
  run_backward(&a, wide);
  stage_end(&stage);
}

void cpu_rope(const KernelCall *call) {
  const Tensor *x = call->in[0], *positions = call->n_in > 1 ? call->in[1] : NULL;
  if (tensor_numel(x) == 0) return;
  Stage stage = stage_begin(call);
  const OpArgs *args = call->args;
  Rope rope = {.B = x->shape[0],
               .T = x->shape[1],
               .H = x->shape[2],
               .D = x->shape[3],
               .theta = args->v[0].f,
               .first_position = args->v[1].i,
               .n_rotated = args->v[2].i,
               .interleaved = args->v[3].i,
               .inverse = args->v[4].i,
               .positions = positions ? tensor_data(positions) : NULL,
               .accumulate = call->accumulate & 1};
  rope.x = stage_heads(&stage, x);
  rope.x_at = strides_of(x);
  rope.y = stage_out(&stage, call->out[0], rope.accumulate);
  rope.y_at = (HeadStrides){rope.T * rope.H * rope.D, rope.H * rope.D, rope.D};
  if (is_f64(x))
    cpu_kernels()->rope_f64(&rope);
  else
    cpu_kernels()->rope_f32(&rope);
  stage_end(&stage);
}
