// backward - the walk over the tape. The order and its invariants are in tape.h.
#include "core/tape.h"

#include "core/tape_impl.h"
#include "core/weights.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// A max-heap of nodes by sequence.
typedef struct Heap {
  Node **nodes; // retained
  int n, room;
} Heap;

// A node whose GEMM-like gradients wait for W, with the output gradients they need.
typedef struct Task {
  Node *node;    // retained
  uint64_t need; // inputs
  Tensor *dout[OP_MAX_OUT];
} Task;

struct Backward {
  BackwardKind kind;
  Heap data_nodes, param_nodes; // with D; without
  Task *tasks;
  int n_tasks, tasks_room, next_task; // those before next_task have run
  bool holds;                         // B: tasks are kept for the wait of a node with OP_SUMS
  Tensor **leaves;                    // retained: those that got a gradient they may not own alone
  int n_leaves, leaves_room;
  struct Backward *next; // of ctx->halves
};

static Status heap_push(Heap *heap, Node *node) {
  if (heap->n == heap->room) {
    int room = heap->room ? 2 * heap->room : 64;
    Node **grown = realloc(heap->nodes, (size_t)room * sizeof *grown);
    if (!grown) return fail(ST_ENOMEM, "out of memory for a backward over %d nodes", room);
    heap->nodes = grown;
    heap->room = room;
  }
  int at = heap->n++;
  while (at > 0 && heap->nodes[(at - 1) / 2]->sequence < node->sequence) {
    heap->nodes[at] = heap->nodes[(at - 1) / 2];
    at = (at - 1) / 2;
  }
  heap->nodes[at] = node_retain(node);
  node->queued = true;
  return ST_OK;
}

static Node *heap_pop(Heap *heap) {
  Node *top = heap->nodes[0], *last = heap->nodes[--heap->n];
  int at = 0;
  for (int child = 1; child < heap->n; child = 2 * at + 1) {
    if (child + 1 < heap->n && heap->nodes[child + 1]->sequence > heap->nodes[child]->sequence)
      child++;
    if (heap->nodes[child]->sequence < last->sequence) break;
    heap->nodes[at] = heap->nodes[child];
    at = child;
  }
  if (heap->n > 0) heap->nodes[at] = last;
  top->queued = false;
  return top;
}

// May its storage be added to in place: nobody else looks at it.
static bool exclusive(const Tensor *t) {
  return t->refs == 1 && !t->weak && t->storage->owners == 1 && t->storage->saves == 0 &&
         tensor_contiguous(t);
}

static Status make_exclusive(Ctx *ctx, Tensor **slot) {
  Tensor *copy;
  if (exclusive(*slot)) return ST_OK;
  TRY(op_apply(ctx, ctx->core_ops->contiguous, slot, 1, NULL, &copy));
  tensor_release(ctx, *slot);
  *slot = copy;
  return ST_OK;
}

// slot += owned (owned is taken over).
static Status accumulate(Ctx *ctx, Tensor **slot, Tensor *owned) {
  if (!*slot) {
    *slot = owned;
    return ST_OK;
  }
  Status status = make_exclusive(ctx, slot);
  if (status == ST_OK) status = op_cast_into(ctx, *slot, owned, true);
  tensor_release(ctx, owned);
  return status;
}

// A leaf's gradient is the script's: at the end it lies in a storage of its own. Until then it may
// be the one that a node or the caller has too: most of those are gone by then, and nothing is
// copied.
static Status give_leaf(Ctx *ctx, Backward *run, Tensor *leaf, Tensor *owned) {
  if (leaf->grad) return accumulate(ctx, &leaf->grad, owned);
  if (run->n_leaves == run->leaves_room) {
    int room = run->leaves_room ? 2 * run->leaves_room : 8;
    Tensor **grown = realloc(run->leaves, (size_t)room * sizeof(Tensor *));
    if (!grown) {
      tensor_release(ctx, owned);
      return fail(ST_ENOMEM, "out of memory for the gradients of %d leaves", room);
    }
    run->leaves = grown;
    run->leaves_room = room;
  }
  run->leaves[run->n_leaves++] = tensor_retain(leaf);
  leaf->grad = owned;
  return ST_OK;
}

static Status own_leaves(Ctx *ctx, Backward *run, Status status) {
  for (int i = 0; i < run->n_leaves; i++) {
    Tensor *leaf = run->leaves[i];
    if (status == ST_OK && leaf->grad) status = make_exclusive(ctx, &leaf->grad);
    tensor_release(ctx, leaf);
  }
  run->n_leaves = 0;
  return status;
}

static Status schedule(Backward *run, Node *node) {
  if (node->queued) return ST_OK;
  return heap_push(node->has_data ? &run->data_nodes : &run->param_nodes, node);
}

// Where the gradient of an edge is collected, if a kernel may write there itself; borrowed. The f32
// gradient of a bf16 parameter is written as f32.
static Status direct_target(Ctx *ctx, Node *node, int j, bool is_dry, Tensor **target, bool *adds,
                            GradUse **use) {
  Edge *edge = &node->edges[j];
  *target = NULL;
  *adds = true;
  *use = NULL;
  if (edge->node || !edge->leaf->param) {
    // Always in place, so that a bf16 sum is rounded once, in a stage as in one process.
    Tensor **slot = edge->node ? &edge->node->dout[edge->out_index] : &edge->leaf->grad;
    if (!*slot || (*slot)->dtype != node->in_spec[j].dtype) return ST_OK;
    TRY(make_exclusive(ctx, slot));
    *target = *slot;
    return ST_OK;
  }
  if (is_dry || !edge->leaf->storage) return ST_OK; // nothing to keep
  TRY(param_grad_buffer(ctx, edge->leaf->param, node->unit, use));
  *target = (*use)->grad;
  *adds = (*use)->written;
  return ST_OK;
}

// The buffer of a parameter += owned (owned is taken over).
static Status give_param(Ctx *ctx, GradUse *use, Tensor *owned) {
  Status status = op_cast_into(ctx, use->grad, owned, use->written);
  use->written = true;
  tensor_release(ctx, owned);
  return status;
}

// A gradient that no kernel wrote in place goes to its edge.
static Status deliver(Ctx *ctx, Backward *run, Node *node, int j, Tensor *din, GradUse *use) {
  Edge *edge = &node->edges[j];
  if (edge->node) {
    TRY(accumulate(ctx, &edge->node->dout[edge->out_index], din));
    return schedule(run, edge->node);
  }
  if (!edge->leaf->param) return give_leaf(ctx, run, edge->leaf, din);
  if (use) return give_param(ctx, use, din);
  tensor_release(ctx, din);
  return ST_OK;
}

static Status changed_since(const Node *node, const Kept *kept) {
  const Tensor *t = kept->tensor;
  Where then = node->where, now = t->param ? t->param->set->stepped : t->storage->written;
  char shape[128];
  format_tensor(shape, sizeof shape, t);
  return fail_hint(fail(ST_ESTATE,
                        "%s at %s:%d needs %s%s%s%s as it was, but it was changed at %s:%d",
                        node->op->name, then.source ? then.source : "?", then.line,
                        t->param ? "parameter " : "tensor ", t->param ? t->param->name : "",
                        t->param ? " " : "", shape, now.source ? now.source : "?", now.line),
                   "run backward before changing it, or change a copy (x:clone())");
}

// The kept tensors of a call, checked against the versions they had.
static Status collect_kept(Node *node, unsigned in_mask, unsigned out_mask, unsigned saved_mask,
                           Tensor **in, Tensor **out, Tensor **saved) {
  for (int k = 0; k < node->n_in + node->n_out + node->n_saved; k++) {
    Kept *kept = &node->kept[k];
    bool wanted;
    Tensor **slot;
    if (k < node->n_in) {
      wanted = k < OP_MAX_IN && (in_mask >> k & 1);
      slot = &in[k];
    } else if (k < node->n_in + node->n_out) {
      wanted = out_mask >> (k - node->n_in) & 1;
      slot = &out[k - node->n_in];
    } else {
      wanted = saved_mask >> (k - node->n_in - node->n_out) & 1;
      slot = &saved[k - node->n_in - node->n_out];
    }
    *slot = NULL;
    if (!wanted || !kept->tensor) continue;
    const Tensor *t = kept->tensor;
    if (tensor_version(t, kept->base) != kept->version) return changed_since(node, kept);
    *slot = kept->tensor;
  }
  return ST_OK;
}

// Are the gradients of a node's outputs shapes alone? Then so are those of its inputs.
static bool are_meta(Tensor *const *dout, int n) {
  for (int i = 0; i < n; i++)
    if (dout[i] && tensor_is_meta(dout[i])) return true;
  return false;
}

// The gradients of the inputs in `need`, delivered.
static Status differentiate(Ctx *ctx, Backward *run, Node *node, Tensor **dout, uint64_t need) {
  if (!need) return ST_OK;
  Tensor *in[OP_MAX_VARIADIC], *din[OP_MAX_VARIADIC];
  Tensor *out[OP_MAX_OUT], *saved[OP_MAX_OUT], *direct[OP_MAX_VARIADIC];
  GradUse *uses[OP_MAX_VARIADIC];
  unsigned in_mask = 0, out_mask = 0, saved_mask = 0;
  for (int j = 0; j < node->n_in && j < OP_MAX_IN; j++) {
    if (!(need >> j & 1)) continue;
    in_mask |= node->needs.in[j];
    out_mask |= node->needs.out[j];
    saved_mask |= node->needs.saved[j];
  }
  TRY(collect_kept(node, in_mask, out_mask, saved_mask, in, out, saved));
  GradCall call = {.ctx = ctx,
                   .op = node->op,
                   .args = &node->args,
                   .user = node->user,
                   .run = run,
                   .n_in = node->n_in,
                   .n_out = node->n_out,
                   .in = in,
                   .out = out,
                   .saved = saved,
                   .in_spec = node->in_spec,
                   .dout = dout,
                   .need = need,
                   .din = din};
  bool is_dry = are_meta(dout, node->n_out);
  for (int j = 0; j < node->n_in; j++) {
    din[j] = direct[j] = NULL;
    uses[j] = NULL;
    if (!(need >> j & 1)) continue;
    bool adds;
    TRY(direct_target(ctx, node, j, is_dry, &direct[j], &adds, &uses[j]));
    for (int k = 0; k < j; k++) // the same target twice in one call: the later one is added after
      if (direct[k] && direct[k] == direct[j]) direct[j] = NULL;
    din[j] = direct[j];
    if (direct[j] && adds) call.accumulate |= UINT64_C(1) << j;
  }
  int unit = ctx->place.unit;
  ctx->place.unit = node->unit;
  Status status = node->op->grad(&call);
  ctx->place.unit = unit;
  for (int j = 0; j < node->n_in; j++) {
    if (!(need >> j & 1)) continue;
    bool in_place = direct[j] && din[j] == direct[j];
    if (in_place && uses[j]) uses[j]->written = true;
    if (in_place || !din[j]) continue;
    if (status == ST_OK)
      status = deliver(ctx, run, node, j, din[j], uses[j]);
    else
      tensor_release(ctx, din[j]);
  }
  return status;
}

// Splits a node's wanted inputs into those of I and those that wait for W (inv. 2).
static void split_needs(const Node *node, uint64_t *by_i, uint64_t *by_w) {
  *by_i = *by_w = 0;
  for (int j = 0; j < node->n_in; j++) {
    const Edge *edge = &node->edges[j];
    if (!edge->wanted) continue;
    bool waits = !edge->has_data && node->has_data &&
                 (edge->defer || (edge->node ? edge->node->deferred : edge->leaf->deferred));
    *(waits ? by_w : by_i) |= UINT64_C(1) << j;
  }
}

static void drop_all_kept(Ctx *ctx, Node *node) {
  for (int k = 0; k < node->n_in + node->n_out + node->n_saved; k++)
    node_drop_kept(ctx, &node->kept[k]);
}

// Drops what the inputs of `later` do not read (inv. 4).
static void drop_read(Ctx *ctx, Node *node, uint64_t later) {
  unsigned in = 0, out = 0, saved = 0;
  for (int j = 0; j < OP_MAX_IN && j < node->n_in; j++) {
    if (!(later >> j & 1)) continue;
    in |= node->needs.in[j];
    out |= node->needs.out[j];
    saved |= node->needs.saved[j];
  }
  Kept *kept = node->kept;
  for (int j = 0; j < node->n_in; j++)
    if (!(j < OP_MAX_IN && (in >> j & 1))) node_drop_kept(ctx, &kept[j]);
  for (int i = 0; i < node->n_out; i++)
    if (!(out >> i & 1)) node_drop_kept(ctx, &kept[node->n_in + i]);
  for (int k = 0; k < node->n_saved; k++)
    if (!(saved >> k & 1)) node_drop_kept(ctx, &kept[node->n_in + node->n_out + k]);
}

static Status push_task(Ctx *ctx, Backward *run, Node *node, uint64_t need) {
  if (run->n_tasks == run->tasks_room) {
    int room = run->tasks_room ? 2 * run->tasks_room : 32;
    Task *grown = realloc(run->tasks, (size_t)room * sizeof *grown);
    if (!grown) return fail(ST_ENOMEM, "out of memory for %d weight gradients", room);
    run->tasks = grown;
    run->tasks_room = room;
  }
  Task *task = &run->tasks[run->n_tasks++];
  *task = (Task){.node = node_retain(node), .need = need};
  for (int i = 0; i < node->n_out; i++) {
    if (!node->dout[i]) continue;
    task->dout[i] = tensor_retain(node->dout[i]);
    arena_save(ctx->arena_w, task->dout[i]);
  }
  return ST_OK;
}

static void task_release(Ctx *ctx, Task *task) {
  for (int i = 0; i < OP_MAX_OUT; i++) {
    if (!task->dout[i]) continue;
    arena_drop(task->dout[i]);
    tensor_release(ctx, task->dout[i]);
  }
  node_release(ctx, task->node);
}

static void drop_douts(Ctx *ctx, Node *node) {
  for (int i = 0; i < node->n_out; i++) {
    tensor_release(ctx, node->dout[i]);
    node->dout[i] = NULL;
  }
}

// The next weight gradient of a half.
static Status run_task(Ctx *ctx, Backward *run) {
  Task task = run->tasks[run->next_task++]; // the list may move meanwhile
  Status status = differentiate(ctx, run, task.node, task.dout, task.need);
  drop_all_kept(ctx, task.node);
  Task *done = &run->tasks[run->next_task - 1];
  for (int i = 0; i < OP_MAX_OUT; i++) {
    if (!done->dout[i]) continue;
    arena_drop(done->dout[i]);
    tensor_release(ctx, done->dout[i]);
    done->dout[i] = NULL;
  }
  return status;
}

// All weight gradients that were kept back.
static Status flush(Ctx *ctx, Backward *run) {
  Status status = ST_OK;
  run->holds = false;
  while (run->next_task < run->n_tasks && status == ST_OK) status = run_task(ctx, run);
  return status;
}

// Whether the weight gradients of a node are to be kept back: in I; and in B from a consumer of
// what will sum gradients over ranks until that has been visited. FIFO, so that inv. 1 holds.
static bool holds_back(Backward *run, const Node *node) {
  if (run->kind == BACKWARD_I || run->holds) return true;
  for (int j = 0; j < node->n_in; j++) {
    const Edge *edge = &node->edges[j];
    if (edge->wanted && edge->has_data && edge->node && (edge->node->op->flags & OP_SUMS))
      run->holds = true;
  }
  return run->holds;
}

// One node of the I walk (or, in W, one without D: everything at once).
static Status visit(Ctx *ctx, Backward *run, Node *node) {
  if (node->consumed)
    return fail_hint(fail(ST_ESTATE, "%s at %s:%d: backward has passed here before", node->op->name,
                          node->where.source ? node->where.source : "?", node->where.line),
                     "a graph serves one backward; run forward again");
  uint64_t by_i, by_w;
  split_needs(node, &by_i, &by_w);
  Status status;
  if (by_w && holds_back(run, node)) {
    status = differentiate(ctx, run, node, node->dout, by_i);
    if (status == ST_OK) status = push_task(ctx, run, node, by_w);
    if (status == ST_OK) drop_read(ctx, node, by_w);
  } else {
    status = differentiate(ctx, run, node, node->dout, by_i | by_w);
    drop_all_kept(ctx, node);
  }
  node->consumed = true;
  drop_douts(ctx, node);
  if (status == ST_OK && run->holds && (node->op->flags & OP_SUMS)) status = flush(ctx, run);
  return status;
}

// After work of unit `unit`: the next is of unit `next`.
static void tell(const Ctx *ctx, const Backward *run, int unit, int next) {
  if (ctx->watch && next < unit && run->param_nodes.n == 0)
    ctx->watch->done_above(ctx->watch->user, next);
}

static Status walk(Ctx *ctx, Backward *run, Heap *heap) {
  Status status = ST_OK;
  bool tells = run->kind == BACKWARD_B && heap == &run->data_nodes;
  while (heap->n > 0 && status == ST_OK) {
    Node *node = heap_pop(heap);
    status = visit(ctx, run, node);
    bool ends_unit = heap->n == 0 || heap->nodes[0]->unit != node->unit;
    if (status == ST_OK && run->kind == BACKWARD_B && ends_unit) status = flush(ctx, run);
    if (tells && heap->n > 0) tell(ctx, run, node->unit, heap->nodes[0]->unit);
    node_release(ctx, node);
  }
  return status;
}

// ---- backwards with weight gradients that wait, in the order in which they began

static void half_enter(Ctx *ctx, Backward *run) {
  Backward **at = &ctx->halves;
  while (*at) at = &(*at)->next;
  *at = run;
}

static void half_leave(Ctx *ctx, const Backward *run) {
  Backward **at = &ctx->halves;
  while (*at && *at != run) at = &(*at)->next;
  if (*at) *at = run->next;
}

void backward_delete(Ctx *ctx, Backward *run) {
  if (!run) return;
  half_leave(ctx, run);
  Heap *heaps[] = {&run->data_nodes, &run->param_nodes};
  for (int h = 0; h < 2; h++) {
    for (int k = 0; k < heaps[h]->n; k++) {
      heaps[h]->nodes[k]->queued = false;
      drop_douts(ctx, heaps[h]->nodes[k]);
      node_release(ctx, heaps[h]->nodes[k]);
    }
    free(heaps[h]->nodes);
  }
  for (int k = 0; k < run->n_tasks; k++) task_release(ctx, &run->tasks[k]);
  free(run->tasks);
  for (int i = 0; i < run->n_leaves; i++) tensor_release(ctx, run->leaves[i]);
  free(run->leaves);
  free(run);
}

// The gradient of an output: the caller's, or ones; on meta where the output is, or would be.
static Status first_gradient(Ctx *ctx, Tensor *out, Tensor *dout, Tensor **gradient) {
  TensorSpec spec;
  tensor_spec(out, &spec);
  spec.offset = 0;
  if (!dout && tensor_numel(out) != 1) {
    char shape[128];
    return fail_hint(fail(ST_ESHAPE, "backward: %s is not a single number",
                          format_tensor(shape, sizeof shape, out)),
                     "take x:sum() or x:mean(), or pass the gradient: x:backward(g)");
  }
  if (out->storage ? tensor_is_meta(out) : ctx->dry_run) {
    spec_row_major(&spec);
    return tensor_new(ctx, &ctx->meta, &spec, MEM_ACTIVATIONS, gradient);
  }
  if (dout) return tensor_detach(ctx, dout, gradient);
  Tensor *one;
  TRY(tensor_scalar(ctx, out->dtype, 1, &one));
  Status status = tensor_alias(ctx, one, &spec, gradient);
  tensor_release(ctx, one);
  return status;
}

// The gradient of a parameter that is itself an output (owned is taken over).
static Status seed_param(Ctx *ctx, Param *param, Tensor *owned) {
  GradUse *use = NULL;
  Status status = ST_OK;
  if (!tensor_is_meta(owned)) {
    status = param_place(ctx, param);
    if (status == ST_OK) status = param_grad_buffer(ctx, param, ctx->place.unit, &use);
  }
  if (use) return give_param(ctx, use, owned);
  tensor_release(ctx, owned);
  return status;
}

// Gives an output its gradient.
static Status seed(Ctx *ctx, Backward *run, Tensor *out, Tensor *dout) {
  if (!out->requires_grad)
    return fail_hint(
        fail(ST_ESTATE, "backward: this value depends on nothing that wants a gradient"),
        "parameters want one; for other tensors say x:requires_grad_()");
  Tensor *gradient;
  TRY(first_gradient(ctx, out, dout, &gradient));
  gradient->depends_data = true;
  if (out->node) {
    TRY(accumulate(ctx, &out->node->dout[out->out_index], gradient));
    return schedule(run, out->node);
  }
  if (out->param) return seed_param(ctx, out->param, gradient);
  return give_leaf(ctx, run, out, gradient);
}

static Status run_no_grad(Ctx *ctx, Backward *run, bool walk_params) {
  bool grad = ctx->grad_enabled;
  ctx->grad_enabled = false;
  Status status = walk(ctx, run, &run->data_nodes);
  if (status == ST_OK && walk_params) status = walk(ctx, run, &run->param_nodes);
  ctx->grad_enabled = grad;
  return status;
}

Status backward(Ctx *ctx, Tensor **outs, Tensor **douts, int n, BackwardKind kind, Backward **w) {
  Backward *run = calloc(1, sizeof *run);
  if (!run) return fail(ST_ENOMEM, "out of memory for a backward");
  run->kind = kind;
  half_enter(ctx, run);
  Status status = ST_OK;
  for (int i = 0; i < n && status == ST_OK; i++)
    status = seed(ctx, run, outs[i], douts ? douts[i] : NULL);
  if (status == ST_OK) status = run_no_grad(ctx, run, kind == BACKWARD_B);
  status = own_leaves(ctx, run, status);
  if (status == ST_OK && kind == BACKWARD_I)
    *w = run;
  else
    backward_delete(ctx, run);
  return status;
}

Status backward_idle(Ctx *ctx, bool *did) {
  *did = false;
  Backward *run = ctx->halves;
  while (run && run->next_task == run->n_tasks && run->param_nodes.n == 0) run = run->next;
  if (!run || run->next_task == run->n_tasks || ctx->keeps_order) return ST_OK;
  if (run->tasks[run->next_task].node->op->flags & OP_TOGETHER) return ST_OK;
  *did = true;
  const UnitWatch *watch = ctx->watch;
  ctx->watch = NULL;
  Status status = run_task(ctx, run);
  ctx->watch = watch;
  return status;
}

Status backward_w(Ctx *ctx, Backward *run) {
  bool grad = ctx->grad_enabled;
  ctx->grad_enabled = false;
  Status status = ST_OK;
  half_leave(ctx, run);
  while (run->next_task < run->n_tasks && status == ST_OK) {
    const Node *node = run->tasks[run->next_task].node;
    status = run_task(ctx, run);
    if (run->next_task < run->n_tasks)
      tell(ctx, run, node->unit, run->tasks[run->next_task].node->unit);
  }
  if (status == ST_OK) status = walk(ctx, run, &run->param_nodes);
  status = own_leaves(ctx, run, status);
  ctx->grad_enabled = grad;
  return status;
}

Status backward_extend(GradCall *call, Tensor **outs, Tensor **douts, int n) {
  for (int i = 0; i < n; i++)
    if (douts[i] && outs[i]->requires_grad) TRY(seed(call->ctx, call->run, outs[i], douts[i]));
  return ST_OK;
}
