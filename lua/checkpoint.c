// checkpoint - recomputation (gradient checkpointing) of any function of tensors.
//
//    first forward:   no grad, in a scope of its own; what it reads from outside is kept
//    backward:        the function runs again with grad, and the walk goes on into its graph
//
// The node that stands for the region has one input, a number that nobody reads: it only wakes up
// checkpoint_grad. The second forward reads the same handles as the first, so its graph hangs on
// the graph outside, and gradients flow on by themselves.
//
// Invariants:
//  1. The second forward sees the same place, module, random ordinals and draws as the first.
//  2. Its nodes get the sequence numbers that they would have had, from a range that the first
//     forward reserved: so all contributions come in the order that a run without recomputation
//     has.
//  3. What was read from outside (arguments, captured tensors, parameters) has not changed since.
//  4. What ops with OP_KEPT gave (sums over ranks) is kept, and given again without running them.
#include "lua/binding.h"

#include "core/tape.h"
#include "core/weights.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NODES_A_CALL = 128, NODES_SPARE = 8192, CALLS_A_REGION = 100 };

// A tensor read from outside: an alias that owns its storage, or the parameter itself.
typedef struct Seen {
  Tensor *tensor, *base; // base: the parameter that it is a view of
  uint64_t version;
} Seen;

typedef struct Checkpoint {
  Rille *r;
  int call_ref; // {fn, arguments...} in the registry
  int n_args, n_outs;
  bool replays; // the second forward runs
  Seen *seen;
  int n_seen, room;
  Tensor **kept; // inv. 4, in the order of their calls
  int n_kept, kept_room, next_kept;
  struct Checkpoint *outer; // the region in which this one runs now
  Scope *scope;             // of the forward that runs
  StepPlace place;
  Ordinals ordinals;
  uint64_t draws, sequence;
  const char *module;
  int outs[OP_MAX_OUT]; // positions among the results
  TensorSpec specs[OP_MAX_OUT];
} Checkpoint;

static void forget_seen(Checkpoint *cp) {
  for (int i = 0; i < cp->n_seen; i++) {
    Tensor *t = cp->seen[i].tensor;
    if (!t->param) arena_drop(t);
    tensor_release(cp->r->ctx, t);
    tensor_release(cp->r->ctx, cp->seen[i].base);
  }
  free(cp->seen);
  cp->seen = NULL;
  cp->n_seen = cp->room = 0;
  for (int i = 0; i < cp->n_kept; i++) {
    arena_drop(cp->kept[i]);
    tensor_release(cp->r->ctx, cp->kept[i]);
  }
  free(cp->kept);
  cp->kept = NULL;
  cp->n_kept = cp->kept_room = 0;
  luaL_unref(cp->r->L, LUA_REGISTRYINDEX, cp->call_ref);
  cp->call_ref = LUA_NOREF;
}

static void checkpoint_drop(Ctx *ctx, void *user) {
  Checkpoint *cp = user;
  forget_seen(cp);
  ordinals_free(ctx, &cp->ordinals);
  free(cp);
}

// Was it made by the region itself?
static bool made_inside(const Checkpoint *cp, const Ctx *ctx, const Tensor *t) {
  for (const Scope *scope = ctx->scope; scope; scope = scope->outer) {
    for (int i = scope->n - 1; i >= 0; i--)
      if (scope->storages[i] == t->storage) return true;
    if (scope == cp->scope) return false;
  }
  return false;
}

static bool known(const Checkpoint *cp, const Tensor *t) {
  for (int i = 0; i < cp->n_seen; i++)
    if (t->param ? cp->seen[i].tensor == t : cp->seen[i].tensor->storage == t->storage) return true;
  return false;
}

static Status note(Checkpoint *cp, Tensor *t) {
  Ctx *ctx = cp->r->ctx;
  if (known(cp, t)) return ST_OK;
  if (cp->n_seen == cp->room) {
    int room = cp->room ? 2 * cp->room : 16;
    Seen *grown = realloc(cp->seen, (size_t)room * sizeof *grown);
    if (!grown) return fail(ST_ENOMEM, "out of memory for a checkpoint's inputs");
    cp->seen = grown;
    cp->room = room;
  }
  Seen *seen = &cp->seen[cp->n_seen];
  seen->base = NULL;
  if (t->param) {
    TRY(param_place(ctx, t->param));
    seen->tensor = tensor_retain(t);
  } else {
    TRY(tensor_detach(ctx, t, &seen->tensor));
    arena_save(ctx->arena_i, seen->tensor);
    if (tensor_base(t)) seen->base = tensor_retain(tensor_base(t));
  }
  seen->version = tensor_version(t, seen->base);
  cp->n_seen++;
  return ST_OK;
}

void checkpoint_saw(lua_State *L, Rille *r, Tensor **in, int n_in) {
  Checkpoint *cp = r->region;
  for (int j = 0; j < n_in; j++) {
    Tensor *t = in[j];
    if (!t || (!t->storage && !t->param)) continue;
    if (t->storage && tensor_is_meta(t)) continue;
    if (!t->param && made_inside(cp, r->ctx, t)) continue;
    if (!cp->replays) {
      check_status(L, r, note(cp, t));
    } else if (t->requires_grad && !known(cp, t)) {
      Status status =
          fail(ST_ESTATE, "checkpoint: the second forward reads a tensor that the first "
                          "one did not read");
      fail_hint(status, "a variable that the function captures was assigned in between: pass it as "
                        "an argument, rille.checkpoint(fn, x)");
      raise_status(L, r, status, &t, 1);
    }
  }
}

// ---- what is kept

static Status keep(Checkpoint *cp, const Tensor *t) {
  if (cp->n_kept == cp->kept_room) {
    int room = cp->kept_room ? 2 * cp->kept_room : 4;
    Tensor **grown = realloc(cp->kept, (size_t)room * sizeof *grown);
    if (!grown) return fail(ST_ENOMEM, "out of memory for a checkpoint's sums");
    cp->kept = grown;
    cp->kept_room = room;
  }
  TRY(tensor_detach(cp->r->ctx, t, &cp->kept[cp->n_kept]));
  arena_save(cp->r->ctx->arena_i, cp->kept[cp->n_kept++]);
  return ST_OK;
}

// The next one that the innermost region which runs again has kept; all that run again count it.
static Tensor *next_kept(Rille *r) {
  Tensor *found = NULL;
  for (Checkpoint *cp = r->region; cp; cp = cp->outer) {
    if (!cp->replays) continue;
    Tensor *t = cp->next_kept < cp->n_kept ? cp->kept[cp->next_kept] : NULL;
    cp->next_kept++;
    if (!found) found = t;
  }
  return found;
}

Status checkpoint_apply(Rille *r, const Op *op, Tensor **in, int n_in, const OpArgs *args,
                        Tensor **out) {
  const Tensor *known = next_kept(r);
  if (known)
    TRY(op_apply_known(r->ctx, op, in, n_in, args, known, out));
  else
    TRY(op_apply(r->ctx, op, in, n_in, args, out));
  for (Checkpoint *cp = r->region; cp; cp = cp->outer) {
    Status status = cp->replays || tensor_is_meta(out[0]) ? ST_OK : keep(cp, out[0]);
    if (status == ST_OK) continue;
    tensor_release(r->ctx, out[0]);
    return status;
  }
  return ST_OK;
}

// ---- the second forward

// What changes while it runs, to be brought back.
typedef struct Replay {
  Checkpoint *cp;
  Scope scope;
  Tensor *outs[OP_MAX_OUT]; // borrowed from the Lua stack
} Replay;

// Result i of the second forward is what the first one gave.
static void check_replayed(lua_State *L, const Checkpoint *cp, int i, Tensor *t) {
  const TensorSpec *first = &cp->specs[i];
  if (t && t->dtype == first->dtype && t->ndim == first->ndim &&
      same_shape(t->ndim, t->shape, first->shape))
    return;
  char shape[128], words[128];
  format_shape(shape, sizeof shape, first->ndim, first->shape);
  if (t)
    format_tensor(words, sizeof words, t);
  else
    snprintf(words, sizeof words, "a %s", luaL_typename(L, 3 + cp->outs[i]));
  raise_value(L, cp->r,
              "checkpoint: result %d of the second forward is %s, the first forward gave %s%s\nthe "
              "function must compute the same both times: what it depends on besides its arguments "
              "has changed",
              cp->outs[i] + 1, words, dtype_name(first->dtype), shape);
}

// Runs under pcall: pushes function and arguments, calls, leaves the results on the stack.
static int replay_call(lua_State *L) {
  Replay *replay = lua_touserdata(L, 1);
  Checkpoint *cp = replay->cp;
  luaL_checkstack(L, cp->n_args + 8, "too many arguments");
  lua_rawgeti(L, LUA_REGISTRYINDEX, cp->call_ref);
  for (int i = 0; i <= cp->n_args; i++) lua_rawgeti(L, 2, i + 1);
  lua_call(L, cp->n_args, LUA_MULTRET);
  for (int i = 0; i < cp->n_outs; i++) {
    Tensor *t = tensor_at(L, cp->r, 3 + cp->outs[i]);
    check_replayed(L, cp, i, t);
    replay->outs[i] = t;
  }
  return lua_gettop(L) - 2;
}

static Status unchanged(const Checkpoint *cp) {
  for (int i = 0; i < cp->n_seen; i++) {
    const Tensor *t = cp->seen[i].tensor;
    if (tensor_version(t, cp->seen[i].base) == cp->seen[i].version) continue;
    char words[128];
    Where where = t->param ? t->param->set->stepped : t->storage->written;
    return fail_hint(fail(ST_ESTATE,
                          "checkpoint: %s%s%s was changed since the first forward, at "
                          "%s:%d",
                          t->param ? t->param->name : "", t->param ? " " : "",
                          format_tensor(words, sizeof words, t), where.source ? where.source : "?",
                          where.line),
                     "run backward before changing it, or change a copy (x:clone())");
  }
  return ST_OK;
}

static Status replay_run(GradCall *call, Replay *replay) {
  Checkpoint *cp = replay->cp;
  Rille *r = cp->r;
  lua_State *L = r->L;
  if (!lua_checkstack(L, 16)) return fail(ST_ENOMEM, "out of memory for a recomputation");
  int top = lua_gettop(L);
  lua_pushcfunction(L, replay_call);
  lua_pushlightuserdata(L, replay);
  Status status = ST_OK;
  if (lua_pcall(L, 1, LUA_MULTRET, 0) != LUA_OK) {
    status = fail_script(L, r);
  } else {
    call->ctx->grad_enabled = false;
    status = backward_extend(call, replay->outs, call->dout, cp->n_outs);
  }
  r->L = L;
  lua_settop(L, top);
  return status;
}

static Status checkpoint_grad(GradCall *call) {
  Checkpoint *cp = call->user;
  Ctx *ctx = call->ctx;
  TRY(unchanged(cp));
  Replay replay = {.cp = cp};
  Ctx before = *ctx;
  struct Checkpoint *region = cp->r->region;
  ctx->grad_enabled = ctx->recomputing = true; // inv. 1, 2
  ctx->place = cp->place;
  ctx->module = cp->module;
  ctx->draws = cp->draws;
  ctx->sequence = cp->sequence;
  ctx->ordinals = cp->ordinals;
  cp->ordinals = (Ordinals){0};
  cp->replays = true;
  cp->next_kept = 0;
  cp->scope = &replay.scope;
  cp->outer = region;
  cp->r->region = cp;
  scope_open(ctx, &replay.scope);
  Status status = replay_run(call, &replay);
  Status closed = scope_close(ctx, &replay.scope, NULL, 0);
  if (status == ST_OK) status = closed;
  ordinals_free(ctx, &ctx->ordinals);
  cp->r->region = region;
  ctx->grad_enabled = before.grad_enabled;
  ctx->recomputing = before.recomputing;
  ctx->place = before.place;
  ctx->module = before.module;
  ctx->draws = before.draws;
  ctx->sequence = before.sequence;
  ctx->ordinals = before.ordinals;
  forget_seen(cp);
  return status;
}

static const Op checkpoint_op = {.id = -1,
                                 .name = "checkpoint",
                                 .inputs = "x",
                                 .args = "",
                                 .needs = "",
                                 .defer = "",
                                 .grad = checkpoint_grad,
                                 .help = ""};

// ---- the first forward

typedef struct RegionGuard {
  Guard guard;
  Scope scope;
  bool grad;
  Checkpoint *cp; // NULL once the tape owns it
  struct Checkpoint *region;
} RegionGuard;

static void close_region(Rille *r, Guard *guard) {
  RegionGuard *g = (RegionGuard *)(void *)guard;
  r->ctx->grad_enabled = g->grad;
  r->region = g->region;
  scope_close(r->ctx, &g->scope, NULL, 0);
  if (g->cp) checkpoint_drop(r->ctx, g->cp);
}

static int close_unrecorded(lua_State *L, Rille *r, RegionGuard *g, Status status) {
  Checkpoint *cp = g->cp;
  g->cp = NULL;
  checkpoint_drop(r->ctx, cp);
  return raise_status(L, r, status, NULL, 0);
}

// {fn, arguments...} from the stack (2 .. top) into the registry.
static void keep_call(lua_State *L, Checkpoint *cp) {
  int top = lua_gettop(L);
  cp->n_args = top - 2;
  lua_createtable(L, top - 1, 0);
  for (int i = 2; i <= top; i++) {
    lua_pushvalue(L, i);
    lua_rawseti(L, -2, i - 1);
  }
  cp->call_ref = luaL_ref(L, LUA_REGISTRYINDEX);
}

// The results that carry gradients: fresh handles of their own, since they get this node.
static void choose_outputs(lua_State *L, Rille *r, Checkpoint *cp, int top, Tensor **outs) {
  for (int i = 2; i <= top; i++) {
    Tensor *t = tensor_at(L, r, i);
    if (!t || t->dtype > DT_BF16) continue;
    if (cp->n_outs == OP_MAX_OUT)
      raise_value(L, r, "checkpoint: at most %d tensors can be returned", OP_MAX_OUT);
    bool fresh = !t->requires_grad && !t->param && !known(cp, t);
    for (int k = 0; k < cp->n_outs; k++) fresh = fresh && outs[k] != t;
    if (!fresh) {
      Tensor *alias;
      check_status(L, r, tensor_detach(r->ctx, t, &alias));
      push_tensor(L, r, alias);
      lua_replace(L, i);
      t = alias;
    }
    cp->outs[cp->n_outs] = i - 2;
    tensor_spec(t, &cp->specs[cp->n_outs]);
    outs[cp->n_outs++] = t;
  }
}

static Status record(Rille *r, Checkpoint *cp, Tensor **outs) {
  Ctx *ctx = r->ctx;
  Tensor *trigger;
  TRY(tensor_scalar(ctx, DT_F32, 0, &trigger));
  trigger->requires_grad = true;
  for (int i = 0; i < cp->n_outs; i++) trigger->depends_data |= outs[i]->depends_data;
  Status status = tape_record_custom(ctx, &checkpoint_op, &trigger, 1, NULL, outs, cp->n_outs, cp,
                                     checkpoint_drop);
  tensor_release(ctx, trigger);
  return status;
}

static void begin(lua_State *L, Rille *r, RegionGuard *g) {
  Ctx *ctx = r->ctx;
  Checkpoint *cp = calloc(1, sizeof *cp);
  if (!cp) raise_value(L, r, "out of memory for a checkpoint");
  cp->r = r;
  cp->call_ref = LUA_NOREF;
  cp->scope = &g->scope;
  cp->place = ctx->place;
  cp->module = ctx->module;
  cp->draws = ctx->draws;
  cp->sequence = ctx->sequence;
  g->cp = cp;
  g->grad = ctx->grad_enabled;
  g->region = cp->outer = r->region;
  g->guard.close = close_region;
  scope_open(ctx, &g->scope);
  check_status(L, r, ordinals_copy(ctx, &ctx->ordinals, &cp->ordinals));
  keep_call(L, cp);
  for (int i = 3; i <= cp->n_args + 2; i++) {
    Tensor *t = tensor_at(L, r, i);
    if (t && t->storage && !tensor_is_meta(t)) check_status(L, r, note(cp, t));
  }
  ctx->grad_enabled = false;
  r->region = cp;
}

// checkpoint(fn, ...): fn(...), whose graph is made again when backward needs it.
static int checkpoint(lua_State *L) {
  Rille *r = binding_of(L);
  Ctx *ctx = r->ctx;
  callable_check(L, r, 1, "checkpoint: the first argument");
  r->n_calls += CALLS_A_REGION;
  if (!ctx->grad_enabled) {
    lua_call(L, lua_gettop(L) - 1, LUA_MULTRET);
    return lua_gettop(L);
  }
  RegionGuard *g = guard_open(L, r, sizeof *g, NULL);
  begin(L, r, g);
  Checkpoint *cp = g->cp;
  uint64_t calls = r->n_calls;
  lua_call(L, cp->n_args, LUA_MULTRET);
  r->L = L;
  int top = lua_gettop(L), n;
  Tensor *outs[OP_MAX_OUT];
  choose_outputs(L, r, cp, top, outs);
  Tensor **kept = collect_tensors(L, r, 2, top, &n);
  int direct = 0;
  for (int i = 2; i <= top; i++) direct += tensor_at(L, r, i) != NULL;
  if (n != direct)
    raise_value(L, r, "checkpoint: tensors must be returned directly, not in tables");
  ctx->grad_enabled = g->grad;
  r->region = g->region;
  g->guard.close = NULL;
  ctx->sequence = cp->sequence + NODES_A_CALL * (r->n_calls - calls) + NODES_SPARE; // inv. 2
  Status status = scope_close(ctx, &g->scope, kept, n);
  if (status == ST_OK && cp->n_outs > 0) status = record(r, cp, outs);
  if (status != ST_OK || cp->n_outs == 0) {
    if (status != ST_OK) return close_unrecorded(L, r, g, status);
    checkpoint_drop(ctx, cp);
  }
  g->cp = NULL;
  return top - 1;
}

void checkpoint_bind(lua_State *L, Rille *r, int rille) {
  binding_push(L, r, checkpoint);
  lua_setfield(L, rille, "checkpoint");
}
