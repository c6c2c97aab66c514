// index - x[0], x["0:2, :, -1"], x[{ {0, 3}, {}, -1 }] and what they assign.
#include "lua/binding.h"

static int tensor_index(lua_State *L) {
  if (lua_type(L, 2) == LUA_TSTRING) {
    lua_pushvalue(L, 2);
    lua_rawget(L, lua_upvalueindex(2));
    return 1;
  }
  return 0;
}

void index_bind(lua_State *L, Rille *r, int methods) {
  lua_rawgeti(L, LUA_REGISTRYINDEX, r->tensor_meta_ref);
  lua_pushlightuserdata(L, r);
  lua_pushvalue(L, methods);
  lua_pushcclosure(L, tensor_index, 2);
  lua_setfield(L, -2, "__index");
  lua_pop(L, 1);
}
