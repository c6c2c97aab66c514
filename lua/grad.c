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

// A function of the script that is told of finished units.
typedef struct Told {
  Rille *r;
  lua_State *L;
  int fn; // stack index
  Status status;
} Told;

static void tell_script(void *user, int unit) {
  Told *told = user;
  lua_State *L = told->L;
  if (told->status != ST_OK || !lua_checkstack(L, 4)) return;
  lua_pushvalue(L, told->fn);
  lua_pushinteger(L, unit);
  if (lua_pcall(L, 1, 0, 0) != LUA_OK) told->status = fail_script(L, told->r);
  told->r->L = L;
}

// wgrad:run([fn]): fn(unit) is told when units above it are finished.
static int wgrad_run(lua_State *L) {
  Rille *r = binding_of(L);
  Wgrad *w = box_check(L, r, 1, WGRAD);
  if (!w->run) raise_value(L, r, "run: this W half has run already");
  Told told = {r, L, 2, ST_OK};
  UnitWatch watch = {tell_script, &told};
  if (lua_isfunction(L, 2)) r->ctx->watch = &watch;
  Status status = backward_w(r->ctx, w->run);
  r->ctx->watch = NULL;
  if (status == ST_OK) status = told.status;
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

// core.backward(outs, douts, "B" | "I", fn): I gives the W half, to be run with w:run(); B tells
// fn, if there is one, of finished units.
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
    Told told = {r, L, 4, ST_OK};
    UnitWatch watch = {tell_script, &told};
    if (lua_isfunction(L, 4)) r->ctx->watch = &watch;
    Status status = backward(r->ctx, outs, douts, n, BACKWARD_B, NULL);
    r->ctx->watch = NULL;
    check_status(L, r, status == ST_OK ? told.status : status);
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
