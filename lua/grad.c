// grad - grad mode, recomputation, ops of the user's own.
#include "lua/binding.h"
void checkpoint_saw(lua_State *L, Rille *r, Tensor **in, int n_in);
void checkpoint_saw(lua_State *L, Rille *r, Tensor **in, int n_in) {
  (void)L;
  (void)r;
  (void)in;
  (void)n_in;
}
