// attention - what the shape rules and the CPU kernels of attention share.
#ifndef RILLE_OPS_ATTENTION_H
#define RILLE_OPS_ATTENTION_H

#include "core/op.h"

// Sizes: batch, queries, keys, query heads, key heads, elements of a head.
typedef struct Heads {
  int64_t B, T, S, H, Hkv, D;
} Heads;

static inline Heads heads_of(const Tensor *q, const Tensor *k) {
  Heads h = {q->shape[0], q->shape[1], k->shape[1], q->shape[2], k->shape[2], q->shape[3]};
  return h;
}

// args of attention_packed: heads, kv_heads first.
static inline Heads heads_of_packed(const Tensor *qkv, const OpArgs *args) {
  int64_t H = args->v[0].i, Hkv = args->v[1].i;
  Heads h = {qkv->shape[0], qkv->shape[1], qkv->shape[1], H, Hkv, qkv->shape[2] / (H + 2 * Hkv)};
  return h;
}

// Bytes of scratch of a backward call on the CPU.
int64_t attention_bwd_bytes(const OpCall *call, const Heads *h);

#endif
