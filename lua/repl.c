// repl - the prompt.
#include "lua/runner.h"

#include <stdio.h>

int repl_run(lua_State *L) {
  char line[4096];
  while (fgets(line, sizeof line, stdin)) {
    if (luaL_loadstring(L, line) != LUA_OK || runner_call(L, 0, 0) != LUA_OK) runner_report(L);
  }
  return 0;
}
