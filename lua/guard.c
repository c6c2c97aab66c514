// guard - clean-up of C functions that call back into Lua, run by Lua's to-be-closed variables: no
// pcall, so an error keeps its stack for the traceback.
#include "lua/binding.h"

#include <string.h>

static const char GUARD[] = "rille.guard";

void *guard_push(lua_State *L, Rille *r, size_t bytes, void (*close)(Rille *r, Guard *guard)) {
  (void)r;
  Guard *guard = box_push(L, GUARD, bytes);
  guard->close = close;
  return guard;
}

void *guard_open(lua_State *L, Rille *r, size_t bytes, void (*close)(Rille *r, Guard *guard)) {
  void *guard = guard_push(L, r, bytes, close);
  lua_insert(L, 1);
  lua_toclose(L, 1);
  return guard;
}

static int guard_close(lua_State *L) {
  Rille *r = binding_of(L);
  Guard *guard = box_check(L, r, 1, GUARD);
  void (*close)(Rille *, Guard *) = guard->close;
  guard->close = NULL;
  if (close) close(r, guard);
  return 0;
}

static const luaL_Reg metamethods[] = {{"__close", guard_close}, {NULL, NULL}};

void guard_bind(lua_State *L, Rille *r) { box_bind(L, r, GUARD, NULL, metamethods); }
