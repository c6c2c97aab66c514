// tape - recording nodes and keeping what backward needs. The walk is in backward.c.
#include "core/tape.h"

#include "core/tape_impl.h"
#include "core/weights.h"

#include <assert.h>
#include <string.h>

static size_t node_bytes(int n_in, int n_out, int n_saved) {
  return sizeof(Node) + (size_t)n_in * (sizeof(Edge) + sizeof(TensorSpec)) +
         (size_t)(n_in + n_out + n_saved) * sizeof(Kept) + (size_t)n_out * sizeof(Tensor *);
}

static Status node_new(Ctx *ctx, const Op *op, int n_in, int n_out, int n_saved, Node **out) {
  Node *node;
  TRY(struct_alloc(ctx, node_bytes(n_in, n_out, n_saved), &node));
  memset(node, 0, sizeof *node);
  char *at = (char *)(node + 1);
  node->in_spec = (void *)at;
  at += (size_t)n_in * sizeof(TensorSpec);
  node->edges = (void *)at;
  at += (size_t)n_in * sizeof(Edge);
  node->kept = (void *)at;
  at += (size_t)(n_in + n_out + n_saved) * sizeof(Kept);
  node->dout = (void *)at;
  memset(node->edges, 0, (size_t)((char *)(node->dout + n_out) - (char *)node->edges));
  node->refs = 1;
  node->op = op;
  node->n_in = n_in;
  node->n_out = n_out;
  node->n_saved = n_saved;
  node->sequence = ctx->sequence++;
  node->unit = ctx->place.unit;
  node->module = ctx->module;
  node->where = ctx_where(ctx);
  *out = node;
  return ST_OK;
}

void node_drop_kept(Ctx *ctx, Kept *kept) {
  if (!kept->tensor) return;
  if (!kept->tensor->param) arena_drop(kept->tensor);
  tensor_release(ctx, kept->tensor);
  tensor_release(ctx, kept->base);
  kept->tensor = kept->base = NULL;
}

static void node_free(Ctx *ctx, Node *node) {
  for (int k = 0; k < node->n_in + node->n_out + node->n_saved; k++)
    node_drop_kept(ctx, &node->kept[k]);
  for (int j = 0; j < node->n_in; j++) {
    if (node->edges[j].node) node_release(ctx, node->edges[j].node);
    tensor_release(ctx, node->edges[j].leaf);
  }
  for (int i = 0; i < node->n_out; i++) tensor_release(ctx, node->dout[i]);
  if (node->drop) node->drop(ctx, node->user);
  struct_free(ctx, node, node_bytes(node->n_in, node->n_out, node->n_saved));
}

Node *node_retain(Node *node) {
  node->refs++;
  return node;
}

// A long chain must not recurse: the outermost release frees, inner ones only queue.
void node_release(Ctx *ctx, Node *node) {
  assert(node->refs > 0);
  if (--node->refs > 0) return;
  node->next = ctx->dying;
  ctx->dying = node;
  if (ctx->releasing) return;
  ctx->releasing = true;
  while (ctx->dying) {
    Node *top = ctx->dying;
    ctx->dying = top->next;
    node_free(ctx, top);
  }
  ctx->releasing = false;
}

// Keeps a tensor for backward: an alias that owns its storage, or the parameter and its version.
static Status keep(Ctx *ctx, Kept *kept, Tensor *tensor, Arena *arena) {
  if (tensor->param) {
    kept->tensor = tensor_retain(tensor);
    kept->version = tensor_version(tensor, NULL);
    return ST_OK;
  }
  TRY(tensor_detach(ctx, tensor, &kept->tensor));
  Tensor *base = tensor_base(tensor);
  if (base) kept->base = tensor_retain(base);
  kept->version = tensor_version(tensor, base);
  arena_save(arena, kept->tensor);
  return ST_OK;
}

// Masks over a call's inputs.
static unsigned gradient_mask(Tensor **in, int n_in) {
  unsigned mask = 0;
  for (int j = 0; j < n_in && j < OP_MAX_IN; j++)
    if (in[j] && in[j]->requires_grad) mask |= 1u << j;
  return mask;
}

// Does any wanted gradient with D, or any without, read what `reads` (by input) says?
static void readers(Tensor **in, unsigned wanted, const unsigned reads[OP_MAX_IN], unsigned defer,
                    unsigned *by_i, unsigned *by_w) {
  *by_i = *by_w = 0;
  for (int j = 0; j < OP_MAX_IN; j++) {
    if (!(wanted >> j & 1)) continue;
    bool waits = !in[j]->depends_data && ((defer >> j & 1) || in[j]->deferred);
    *(waits ? by_w : by_i) |= reads[j];
  }
}

static Status keep_all(OpCall *call, const OpNeeds *needs, Node *node, Tensor **out) {
  Ctx *ctx = call->ctx;
  unsigned wanted = gradient_mask(call->in, call->n_in);
  unsigned in_i, in_w, out_i, out_w, saved_i, saved_w;
  readers(call->in, wanted, needs->in, needs->defer, &in_i, &in_w);
  readers(call->in, wanted, needs->out, needs->defer, &out_i, &out_w);
  readers(call->in, wanted, needs->saved, needs->defer, &saved_i, &saved_w);
  Kept *kept = node->kept;
  for (int j = 0; j < call->n_in && j < OP_MAX_IN; j++)
    if (call->in[j] && ((in_i | in_w) >> j & 1))
      TRY(keep(ctx, &kept[j], call->in[j], in_w >> j & 1 ? ctx->arena_w : ctx->arena_i));
  kept += call->n_in;
  for (int i = 0; i < call->n_out; i++)
    if ((out_i | out_w) >> i & 1)
      TRY(keep(ctx, &kept[i], out[i], out_w >> i & 1 ? ctx->arena_w : ctx->arena_i));
  kept += call->n_out;
  for (int k = 0; k < call->n_saved; k++)
    if ((saved_i | saved_w) >> k & 1)
      TRY(keep(ctx, &kept[k], out[call->n_out + k],
               saved_w >> k & 1 ? ctx->arena_w : ctx->arena_i));
  return ST_OK;
}

static void link_inputs(Node *node, Tensor **in, unsigned defer) {
  for (int j = 0; j < node->n_in; j++) {
    Tensor *t = in[j];
    Edge *edge = &node->edges[j];
    if (!t) continue;
    tensor_spec(t, &node->in_spec[j]);
    edge->wanted = t->requires_grad;
    edge->has_data = t->depends_data;
    edge->defer = j < OP_MAX_IN && (defer >> j & 1);
    if (!t->requires_grad) continue;
    if (t->node) {
      edge->node = node_retain(t->node);
      edge->out_index = t->out_index;
      if (edge->defer && !t->depends_data) t->node->deferred = true;
    } else {
      edge->leaf = tensor_retain(t);
    }
  }
}

static void link_outputs(Node *node, Tensor **out, Tensor **in) {
  node->has_data = false;
  for (int j = 0; j < node->n_in; j++)
    if (in[j] && in[j]->depends_data) node->has_data = true;
  for (int i = 0; i < node->n_out; i++) {
    Tensor *t = out[i];
    if (!t || !dtype_is_float(t->dtype)) continue;
    t->requires_grad = true;
    t->node = node_retain(node);
    t->out_index = i;
  }
}

Status tape_record(OpCall *call, const OpNeeds *needs, Tensor **out) {
  Ctx *ctx = call->ctx;
  Node *node;
  TRY(node_new(ctx, call->op, call->n_in, call->n_out, call->n_saved, &node));
  op_args_copy(&node->args, &call->args);
  node->needs = *needs;
  Status status = keep_all(call, needs, node, out);
  if (status == ST_OK) {
    link_inputs(node, call->in, needs->defer);
    link_outputs(node, out, call->in);
  }
  node_release(ctx, node);
  return status;
}

Status tape_record_custom(Ctx *ctx, const Op *op, Tensor **in, int n_in, const OpArgs *args,
                          Tensor **out, int n_out, void *user, void (*drop)(Ctx *ctx, void *user)) {
  Node *node;
  OpCall call = {.ctx = ctx, .op = op, .n_in = n_in, .in = in, .n_out = n_out};
  TRY(node_new(ctx, op, n_in, n_out, 0, &node));
  if (args)
    op_args_copy(&node->args, args);
  else
    node->args.n_list = -1;
  op_needs(op, &node->needs);
  Status status = keep_all(&call, &node->needs, node, out);
  if (status == ST_OK) {
    node->user = user;
    node->drop = drop;
    link_inputs(node, in, node->needs.defer);
    link_outputs(node, out, in);
  }
  node_release(ctx, node);
  return status;
}

Where node_where(const Node *node) { return node->where; }
const char *node_module(const Node *node) { return node->module; }
const Op *node_op(const Node *node) { return node->op; }
