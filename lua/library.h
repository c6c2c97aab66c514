// library - the Lua files of lua/rille/, embedded into the program by scripts/embed.
#ifndef RILLE_LUA_LIBRARY_H
#define RILLE_LUA_LIBRARY_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct LuaSource {
  const char *module;        // "rille.nn"
  const char *file;          // "lua/rille/nn.lua", for messages
  const unsigned char *text; // size bytes, then a 0
  size_t size;
} LuaSource;

// All modules; ends with module == NULL.
extern const LuaSource lua_library[];

#ifdef __cplusplus
}
#endif
#endif
