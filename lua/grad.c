// grad - grad mode and backward from Lua.
#include "lua/binding.h"

#include "core/tape.h"

#include <string.h>

typedef struct GradGuard {
  Guard guard;
  bool before;
} GradGuard;

static void restore_grad(Rille *r, Guard *guard) {
  r->ctx->grad_enabled = ((GradGuard *)(void *)guard)->before;
}

// f(fn, ...) runs fn in the mode; f() sets it until the result is closed.
static int set_grad(lua_State *L, bool enabled) {
  Rille *r = binding_of(L);
  GradGuard *guard;
  if (lua_isnone(L, 1)) {
    guard = guard_push(L, r, sizeof *guard, restore_grad);
    guard->before = r->ctx->grad_enabled;
    r->ctx->grad_enabled = enabled;
    return 1;
  }
  callable_check(L, r, 1, enabled ? "enable_grad: the argument" : "no_grad: the argument");
  guard = guard_open(L, r, sizeof *guard, restore_grad);
  guard->before = r->ctx->grad_enabled;
  r->ctx->grad_enabled = enabled;
  lua_call(L, lua_gettop(L) - 2, LUA_MULTRET);
  return lua_gettop(L) - 1;
}

static int no_grad(lua_State *L) { return set_grad(L, false); }
static int enable_grad(lua_State *L) { return set_grad(L, true); }

static int is_grad_enabled(lua_State *L) {
  lua_pushboolean(L, binding_of(L)->ctx->grad_enabled);
  return 1;
}

// ---- backward with its halves

static const char WGRAD[] = "rille.wgrad";

typedef struct Wgrad {
  Backward *run;
} Wgrad;

static int wgrad_run(lua_State *L) {
  Rille *r = binding_of(L);
  Wgrad *w = box_check(L, r, 1, WGRAD);
  if (!w->run) raise_value(L, r, "run: this W half has run already");
  Status status = backward_w(r->ctx, w->run);
  backward_delete(r->ctx, w->run);
  w->run = NULL;
  if (status != ST_OK) return raise_status(L, r, status, NULL, 0);
  return 0;
}

static int wgrad_gc(lua_State *L) {
  Rille *r = lua_touserdata(L, lua_upvalueindex(1));
  Wgrad *w = lua_touserdata(L, 1);
  backward_delete(r->ctx, w->run);
  w->run = NULL;
  return 0;
}

// The tensors of a table, entries that are nil or false as NULL.
static int tensor_list(lua_State *L, Rille *r, int index, int n, Tensor **out) {
  for (int i = 0; i < n; i++) {
    lua_rawgeti(L, index, i + 1);
    out[i] = lua_toboolean(L, -1) ? tensor_check(L, r, -1, "backward: an entry") : NULL;
    lua_pop(L, 1);
  }
  return n;
}

// core.backward(outs, douts, "B" | "I"): I gives the W half, to be run with w:run().
static int core_backward(lua_State *L) {
  Rille *r = binding_of(L);
  Tensor *outs[OP_MAX_VARIADIC], *douts[OP_MAX_VARIADIC];
  table_check(L, r, 1, "backward: the outputs");
  int n = (int)lua_rawlen(L, 1);
  if (n > OP_MAX_VARIADIC) raise_value(L, r, "backward: at most %d outputs", OP_MAX_VARIADIC);
  tensor_list(L, r, 1, n, outs);
  memset(douts, 0, sizeof douts);
  if (lua_istable(L, 2)) tensor_list(L, r, 2, n, douts);
  const char *half = lua_isnoneornil(L, 3) ? "B" : string_check(L, r, 3, "backward: half");
  if (strcmp(half, "I") != 0) {
    check_status(L, r, backward(r->ctx, outs, douts, n, BACKWARD_B, NULL));
    return 0;
  }
  Wgrad *w = box_push(L, WGRAD, sizeof *w);
  check_status(L, r, backward(r->ctx, outs, douts, n, BACKWARD_I, &w->run));
  return 1;
}

static const luaL_Reg functions[] = {{"no_grad", no_grad},
                                     {"enable_grad", enable_grad},
                                     {"is_grad_enabled", is_grad_enabled},
                                     {NULL, NULL}};
static const luaL_Reg core_functions[] = {{"backward", core_backward}, {NULL, NULL}};
static const luaL_Reg wgrad_methods[] = {{"run", wgrad_run}, {NULL, NULL}};
static const luaL_Reg wgrad_metamethods[] = {{"__gc", wgrad_gc}, {NULL, NULL}};

void grad_bind(lua_State *L, Rille *r, int rille) {
  box_bind(L, r, WGRAD, wgrad_methods, wgrad_metamethods);
  lua_pushvalue(L, rille);
  binding_register(L, r, functions);
  lua_getfield(L, -1, "core");
  binding_register(L, r, core_functions);
  lua_pop(L, 2);
}
