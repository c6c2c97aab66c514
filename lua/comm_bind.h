// comm_bind - groups of ranks: what other bindings take from them.
#ifndef RILLE_LUA_COMM_BIND_H
#define RILLE_LUA_COMM_BIND_H

#include "lua/binding.h"
#include "parallel/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

// The group at a stack index, borrowed from its userdata; NULL if there is none, a Lua error if it
// has been freed.
Comm *comm_at(lua_State *L, Rille *r, int index);
// The same; a Lua error if there is none.
Comm *comm_check_box(lua_State *L, Rille *r, int index);

#ifdef __cplusplus
}
#endif
#endif
