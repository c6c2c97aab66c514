// binding - the state behind a lua_State, and luaopen_rille, which makes it.
#include "lua/binding.h"

#include "lua/library.h"
#include "ops/ops.h"
#include "parallel/comm.h"
#include "parallel/comm_ops.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void binding_push(lua_State *L, Rille *r, lua_CFunction fn) {
  lua_pushlightuserdata(L, r);
  lua_pushcclosure(L, fn, 1);
}

void binding_register(lua_State *L, Rille *r, const luaL_Reg *list) {
  for (; list->name; list++) {
    binding_push(L, r, list->func);
    lua_setfield(L, -2, list->name);
  }
}

void box_bind(lua_State *L, Rille *r, const char *name, const luaL_Reg *methods,
              const luaL_Reg *metamethods) {
  luaL_newmetatable(L, name);
  if (metamethods) binding_register(L, r, metamethods);
  if (methods) {
    lua_newtable(L);
    binding_register(L, r, methods);
    lua_setfield(L, -2, "__index");
  }
  lua_pop(L, 1);
}

void *box_push(lua_State *L, const char *name, size_t bytes) {
  void *box = lua_newuserdatauv(L, bytes, 1);
  memset(box, 0, bytes);
  luaL_setmetatable(L, name);
  return box;
}

void *box_check(lua_State *L, Rille *r, int index, const char *name) {
  void *box = luaL_testudata(L, index, name);
  if (!box)
    raise_value(L, r, "a %s is wanted, got %s", name + sizeof "rille." - 1,
                luaL_typename(L, index));
  return box;
}

// Before an allocation fails: what Lua no longer needs is freed.
static void on_pressure(void *rille) {
  Rille *r = rille;
  lua_gc(r->L, LUA_GCCOLLECT);
}

// The last finalizer of a closing state: tensors were made later, so they are gone by now.
static int rille_gc(lua_State *L) {
  Rille *r = lua_touserdata(L, 1);
  ctx_delete(r->ctx);
  r->ctx = NULL;
  free(r->modules);
  return 0;
}

// The searcher for the embedded library.
static int load_embedded(lua_State *L) {
  const char *name = luaL_checkstring(L, 1);
  for (const LuaSource *s = lua_library; s->module; s++) {
    if (strcmp(s->module, name) != 0) continue;
    char chunk[128];
    snprintf(chunk, sizeof chunk, "=rille/%s", strrchr(s->file, '/') + 1);
    if (luaL_loadbufferx(L, (const char *)s->text, s->size, chunk, "t") != LUA_OK)
      return lua_error(L);
    lua_pushstring(L, s->file);
    return 2;
  }
  lua_pushfstring(L, "no module '%s' in the library of rille", name);
  return 1;
}

// package.searchers gets load_embedded at place 2, before files.
static void add_searcher(lua_State *L) {
  lua_getglobal(L, "package");
  lua_getfield(L, -1, "searchers");
  for (int i = (int)lua_rawlen(L, -1); i >= 2; i--) {
    lua_rawgeti(L, -1, i);
    lua_rawseti(L, -2, i + 1);
  }
  lua_pushcfunction(L, load_embedded);
  lua_rawseti(L, -2, 2);
  lua_pop(L, 2);
}

// Bytes for this rank's tensors: ranks on the same node share its memory.
static size_t memory_share(void) {
  Launch launch;
  launch_read(&launch);
  return pool_machine_memory() / (size_t)launch.local_world;
}

static Rille *push_state(lua_State *L) {
  Rille *r = lua_newuserdatauv(L, sizeof *r, 0);
  memset(r, 0, sizeof *r);
  r->L = L;
  r->script_error_ref = LUA_NOREF;
  lua_pushboolean(L, 0);
  r->list_ref = luaL_ref(L, LUA_REGISTRYINDEX);
  Comm *world;
  if (comm_world(&world) != ST_OK) luaL_error(L, "rille: %s", status_message());
  r->rank = world->rank;
  r->world = world->size;
  if (ctx_new(memory_share(), &r->ctx) != ST_OK) luaL_error(L, "rille: %s", status_message());
  lua_createtable(L, 0, 1);
  lua_pushcfunction(L, rille_gc);
  lua_setfield(L, -2, "__gc");
  lua_setmetatable(L, -2);
  if (ops_init(r->ctx) != ST_OK || comm_ops_init(r->ctx) != ST_OK)
    luaL_error(L, "rille: %s", status_message());
  r->ctx->where = script_line;
  r->ctx->where_user = r;
  pool_on_pressure(r->ctx->pool, on_pressure, r);
  return r;
}

// Makes the state and the table of C functions: rille.core and the functions of tensors. The
// library's init.lua gets it and returns what `require "rille"` gives.
int luaopen_rille(lua_State *L) {
  if (lua_getfield(L, LUA_REGISTRYINDEX, "rille.table") == LUA_TTABLE) return 1;
  Rille *r = push_state(L);
  lua_setfield(L, LUA_REGISTRYINDEX, "rille.state");
  lua_newtable(L);
  int rille = lua_gettop(L);
  lua_pushvalue(L, rille), lua_setfield(L, LUA_REGISTRYINDEX, "rille.table");
  lua_newtable(L), lua_setfield(L, rille, "core");
  lua_newtable(L);
  int methods = lua_gettop(L);
  lua_newtable(L);
  r->tensor_meta = lua_topointer(L, -1);
  r->tensor_meta_ref = luaL_ref(L, LUA_REGISTRYINDEX);
  ops_bind(L, r, rille, methods);
  tensor_bind(L, r, rille, methods);
  make_bind(L, r, rille, methods);
  guard_bind(L, r);
  grad_bind(L, r, rille);
  checkpoint_bind(L, r, rille);
  custom_bind(L, r, rille);
  core_bind(L, r, rille, methods);
  weights_bind(L, r, rille);
  signals_bind(L, r, rille);
  files_bind(L, r, rille);
  data_bind(L, r, rille);
  sched_bind(L, r, rille);
  partition_bind(L, r, rille);
  ledger_bind(L, r, rille);
  index_bind(L, r, methods);
  comm_bind(L, r, rille);
  exec_bind(L, r, rille);
  lua_pushvalue(L, methods), lua_setfield(L, rille, "Tensor");
  lua_pushstring(L, RILLE_VERSION), lua_setfield(L, rille, "version");
  add_searcher(L);
  lua_pushcfunction(L, load_embedded);
  lua_pushstring(L, "rille");
  lua_call(L, 1, 1);
  if (lua_isstring(L, -1)) return lua_error(L);
  lua_pushvalue(L, rille);
  lua_call(L, 1, 1);
  return 1;
}
