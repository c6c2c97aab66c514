// custom - rille.op: an op of the user's own, with its backward in Lua.
//
//    local swish = rille.op{name = "swish",
//      forward = function(c, x) c:save(x); return x * x:sigmoid() end,
//      backward = function(c, dy) local x = c:saved() ... return dx end}
//
// forward gets a fresh context c and the arguments, and runs without grad. backward gets c and one
// gradient for each tensor that forward returned, and returns one for each tensor that forward
// took, in order; nil means none. c may hold other values too: c.k = 3.
#include "lua/binding.h"

#include "core/tape.h"
#include "core/weights.h"

#include <stdlib.h>
#include <string.h>

static const char CONTEXT[] = "rille.op_context";
static const char SAVED[] = "rille.op_saved"; // its address is the key of c's list of saved tensors

typedef struct Kept {
  Tensor *tensor, *base; // base: the parameter that it is a view of
  uint64_t version;
  bool in_arena;
} Kept;

typedef struct Custom {
  Rille *r;
  Op op; // the row that the node has: name and backward
  char name[40];
  int call_ref; // {c, backward} in the registry
  int n_in, n_out, n_saved;
  Kept *saved;
  TensorSpec out[OP_MAX_OUT];
} Custom;

static void custom_drop(Ctx *ctx, void *user) {
  Custom *custom = user;
  for (int k = 0; k < custom->n_saved; k++) {
    Kept *kept = &custom->saved[k];
    if (kept->in_arena) {
      arena_drop(kept->tensor);
      if (!kept->tensor->weak) tensor_weaken(kept->tensor); // Lua may still know the handle
    }
    tensor_release(ctx, kept->tensor);
    tensor_release(ctx, kept->base);
  }
  luaL_unref(custom->r->L, LUA_REGISTRYINDEX, custom->call_ref);
  free(custom->saved);
  free(custom);
}

// ---- the context

// c:save(tensor...): kept for backward.
static int context_save(lua_State *L) {
  Rille *r = binding_of(L);
  int top = lua_gettop(L);
  table_check(L, r, 1, "save: the context (called as c:save(x))");
  if (lua_rawgetp(L, 1, SAVED) != LUA_TTABLE) {
    lua_pop(L, 1);
    lua_newtable(L);
    lua_pushvalue(L, -1);
    lua_rawsetp(L, 1, SAVED);
  }
  for (int i = 2; i <= top; i++) {
    Tensor *t = tensor_check(L, r, i, "save: an argument"), *alias;
    if (t->param) {
      lua_pushvalue(L, i);
    } else {
      check_status(L, r, tensor_detach(r->ctx, t, &alias));
      push_owned(L, r, alias);
    }
    lua_rawseti(L, -2, (lua_Integer)lua_rawlen(L, -2) + 1);
  }
  return 0;
}

static int context_saved(lua_State *L) {
  table_check(L, binding_of(L), 1, "saved: the context (called as c:saved())");
  if (lua_rawgetp(L, 1, SAVED) != LUA_TTABLE) return 0;
  int list = lua_gettop(L), n = (int)lua_rawlen(L, list);
  luaL_checkstack(L, n, "saved tensors");
  for (int i = 1; i <= n; i++) lua_rawgeti(L, list, i);
  return n;
}

// ---- backward

typedef struct Call {
  GradCall *grad;
  Custom *custom;
} Call;

static void push_dout(lua_State *L, const Call *call, int i) {
  Rille *r = call->custom->r;
  Tensor *dout = call->grad->dout[i], *alias;
  if (dout)
    check_status(L, r, tensor_detach(r->ctx, dout, &alias));
  else
    check_status(L, r,
                 tensor_zeros(r->ctx, &r->ctx->cpu, call->custom->out[i].dtype,
                              call->custom->out[i].ndim, call->custom->out[i].shape,
                              MEM_ACTIVATIONS, &alias));
  push_owned(L, r, alias);
}

static void take_din(lua_State *L, const Call *call, int j, int index) {
  Rille *r = call->custom->r;
  const TensorSpec *want = &call->grad->in_spec[j];
  if (lua_isnoneornil(L, index)) return;
  Tensor *t = tensor_at(L, r, index), *alias;
  const char *name = call->custom->name;
  if (!t)
    raise_value(L, r, "%s: backward must return tensors or nil, gradient %d is a %s", name, j,
                luaL_typename(L, index));
  if (t->ndim != want->ndim || !same_shape(t->ndim, t->shape, want->shape)) {
    char shape[128];
    Status status = fail(ST_ESHAPE, "%s: the gradient of input %d must have its shape %s", name, j,
                         format_shape(shape, sizeof shape, want->ndim, want->shape));
    raise_status(L, r, status, &t, 1);
  }
  if (t->dtype != want->dtype) {
    OpArgs args = {.n_list = -1};
    args.v[0].i = want->dtype;
    t = op_push(L, r, "cast", &t, 1, &args);
  }
  check_status(L, r, tensor_detach(r->ctx, t, &alias));
  check_status(L, r, grad_give(call->grad, j, alias));
}

static int backward_call(lua_State *L) {
  Call *call = lua_touserdata(L, 1);
  Custom *custom = call->custom;
  luaL_checkstack(L, custom->n_in + custom->n_out + 8, "too many tensors");
  lua_rawgeti(L, LUA_REGISTRYINDEX, custom->call_ref);
  lua_rawgeti(L, 2, 2);
  lua_rawgeti(L, 2, 1);
  for (int i = 0; i < custom->n_out; i++) push_dout(L, call, i);
  lua_call(L, 1 + custom->n_out, custom->n_in);
  for (int j = 0; j < custom->n_in; j++)
    if (grad_wants(call->grad, j)) take_din(L, call, j, 3 + j);
  return 0;
}

static Status unchanged(const Custom *custom) {
  for (int k = 0; k < custom->n_saved; k++) {
    const Tensor *t = custom->saved[k].tensor;
    if (tensor_version(t, custom->saved[k].base) == custom->saved[k].version) continue;
    char words[128];
    Where where = t->param ? t->param->set->stepped : t->storage->written;
    return fail(ST_ESTATE, "%s: the saved tensor %s was changed at %s:%d", custom->name,
                format_tensor(words, sizeof words, t), where.source ? where.source : "?",
                where.line);
  }
  return ST_OK;
}

static Status custom_grad(GradCall *grad) {
  Custom *custom = grad->user;
  lua_State *L = custom->r->L;
  Call call = {grad, custom};
  TRY(unchanged(custom));
  if (!lua_checkstack(L, 8)) return fail(ST_ENOMEM, "out of memory for a backward");
  lua_pushcfunction(L, backward_call);
  lua_pushlightuserdata(L, &call);
  int failed = lua_pcall(L, 1, 0, 0);
  custom->r->L = L;
  if (!failed) return ST_OK;
  Status status = fail_script(L, custom->r);
  return status;
}

// ---- forward

typedef struct ForwardGuard {
  Guard guard;
  bool grad;
} ForwardGuard;

static void restore(Rille *r, Guard *guard) {
  r->ctx->grad_enabled = ((ForwardGuard *)(void *)guard)->grad;
}

static Custom *custom_new(lua_State *L, Rille *r, int context, int spec) {
  Custom *custom = calloc(1, sizeof *custom);
  if (!custom) raise_value(L, r, "out of memory for an op");
  custom->r = r;
  lua_getfield(L, spec, "name");
  strncpy(custom->name, lua_tostring(L, -1), sizeof custom->name - 1);
  lua_pop(L, 1);
  custom->op = (Op){.id = -1,
                    .name = custom->name,
                    .inputs = "xs*",
                    .args = "",
                    .needs = "",
                    .defer = "",
                    .flags = OP_VARIADIC,
                    .grad = custom_grad,
                    .help = ""};
  lua_createtable(L, 2, 0);
  lua_pushvalue(L, context), lua_rawseti(L, -2, 1);
  lua_getfield(L, spec, "backward"), lua_rawseti(L, -2, 2);
  custom->call_ref = luaL_ref(L, LUA_REGISTRYINDEX);
  return custom;
}

// Takes what c:save was given. The list keeps the handles too.
static bool take_saved(lua_State *L, Rille *r, Custom *custom, int context) {
  if (lua_rawgetp(L, context, SAVED) != LUA_TTABLE) return true;
  int n = (int)lua_rawlen(L, -1);
  custom->saved = calloc((size_t)n, sizeof *custom->saved);
  if (!custom->saved) return false;
  for (int i = 0; i < n; i++) {
    lua_rawgeti(L, -1, i + 1);
    Tensor *t = tensor_at(L, r, -1);
    lua_pop(L, 1);
    Kept *kept = &custom->saved[custom->n_saved++];
    kept->tensor = tensor_retain(t);
    if (!t->param && tensor_base(t)) kept->base = tensor_retain(tensor_base(t));
    kept->version = tensor_version(t, kept->base);
    kept->in_arena = !t->param && r->ctx->arena_i;
    if (kept->in_arena) arena_save(r->ctx->arena_i, t);
  }
  lua_pop(L, 1);
  return true;
}

// Outputs that are inputs, or known to the graph, become handles of their own.
static int take_outputs(lua_State *L, Rille *r, int first, int top, Tensor **in, int n_in,
                        Tensor **out) {
  int n = 0;
  for (int i = first; i <= top; i++) {
    Tensor *t = tensor_at(L, r, i), *alias;
    if (!t || t->dtype > DT_BF16) continue;
    if (n == OP_MAX_OUT)
      raise_value(L, r, "rille.op: at most %d tensors can be returned", OP_MAX_OUT);
    bool fresh = !t->requires_grad && !t->param;
    for (int j = 0; j < n_in; j++) fresh = fresh && in[j] != t;
    for (int k = 0; k < n; k++) fresh = fresh && out[k] != t;
    if (!fresh) {
      check_status(L, r, tensor_detach(r->ctx, t, &alias));
      push_tensor(L, r, alias);
      lua_replace(L, i);
      t = alias;
    }
    for (int j = 0; j < n_in; j++) {
      t->depends_data |= in[j]->depends_data;
      t->depends_param |= in[j]->depends_param;
    }
    out[n++] = t;
  }
  return n;
}

// The callable that rille.op gives; its second upvalue is the table it was made from.
static int custom_call(lua_State *L) {
  Rille *r = binding_of(L);
  Ctx *ctx = r->ctx;
  int n_args = lua_gettop(L), n_in = 0;
  Tensor *in[OP_MAX_VARIADIC], *out[OP_MAX_OUT];
  bool wanted = false;
  for (int i = 1; i <= n_args; i++) {
    Tensor *t = tensor_at(L, r, i);
    if (!t) continue;
    if (n_in == OP_MAX_VARIADIC) raise_value(L, r, "rille.op: at most %d tensors", OP_MAX_VARIADIC);
    in[n_in++] = t;
    wanted |= t->requires_grad;
  }
  r->n_calls++;
  if (r->region) checkpoint_saw(L, r, in, n_in);
  ForwardGuard *guard = guard_open(L, r, sizeof *guard, restore);
  guard->grad = ctx->grad_enabled;
  bool records = wanted && ctx->grad_enabled;
  int context = n_args + 2, spec = context + 1;
  lua_newtable(L);
  luaL_setmetatable(L, CONTEXT);
  lua_pushvalue(L, lua_upvalueindex(2));
  ctx->grad_enabled = false;
  lua_getfield(L, spec, "forward");
  lua_pushvalue(L, context);
  for (int i = 1; i <= n_args; i++) lua_pushvalue(L, i + 1);
  lua_call(L, n_args + 1, LUA_MULTRET);
  r->L = L;
  ctx->grad_enabled = guard->grad;
  int top = lua_gettop(L);
  if (!records) return top - spec;
  int n_out = take_outputs(L, r, spec + 1, top, in, n_in, out);
  if (n_out == 0) return top - spec;
  Custom *custom = custom_new(L, r, context, spec);
  custom->n_in = n_in;
  custom->n_out = n_out;
  for (int i = 0; i < n_out; i++) tensor_spec(out[i], &custom->out[i]);
  Status status =
      take_saved(L, r, custom, context)
          ? tape_record_custom(ctx, &custom->op, in, n_in, NULL, out, n_out, custom, custom_drop)
          : fail(ST_ENOMEM, "out of memory for saved tensors");
  if (status != ST_OK) {
    custom_drop(ctx, custom);
    raise_status(L, r, status, in, n_in);
  }
  lua_settop(L, top);
  return top - spec;
}

// op{name =, forward =, backward =}
static int custom_op(lua_State *L) {
  static const char *const names[] = {"name", "forward", "backward"};
  Rille *r = binding_of(L);
  table_check(L, r, 1, "rille.op: the argument");
  lua_settop(L, 1);
  lua_pushnil(L);
  while (lua_next(L, 1)) {
    const char *key = lua_type(L, -2) == LUA_TSTRING ? lua_tostring(L, -2) : "?";
    const char *near = nearest_name(key, names, 3);
    if (strcmp(key, "name") != 0 && strcmp(key, "forward") != 0 && strcmp(key, "backward") != 0)
      raise_value(L, r, "rille.op: there is no option \"%s\"\n%s%s%s", key,
                  near ? "did you mean \"" : "options are name, forward, backward",
                  near ? near : "", near ? "\"?" : "");
    lua_pop(L, 1);
  }
  if (lua_getfield(L, 1, "name") != LUA_TSTRING)
    raise_value(L, r, "rille.op: name must be a string");
  if (lua_getfield(L, 1, "forward") != LUA_TFUNCTION ||
      lua_getfield(L, 1, "backward") != LUA_TFUNCTION)
    raise_value(L, r,
                "rille.op: forward and backward must be functions\nas in rille.op{name = "
                "\"double\", forward = function(c, x) return x * 2 end, backward = "
                "function(c, dy) return dy * 2 end}");
  lua_pushlightuserdata(L, r);
  lua_pushvalue(L, 1);
  lua_pushcclosure(L, custom_call, 2);
  return 1;
}

static const luaL_Reg context_methods[] = {
    {"save", context_save}, {"saved", context_saved}, {NULL, NULL}};

void custom_bind(lua_State *L, Rille *r, int rille) {
  box_bind(L, r, CONTEXT, context_methods, NULL);
  binding_push(L, r, custom_op);
  lua_setfield(L, rille, "op");
}
