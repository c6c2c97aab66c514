// runner - what the program `rille` does around a script: loading, strict globals, messages.
#ifndef RILLE_LUA_RUNNER_H
#define RILLE_LUA_RUNNER_H

#include "lua/binding.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { EXIT_ERROR = 1, EXIT_USAGE = 2, EXIT_NONFINITE = 3, EXIT_STOPPED = 75 };

// A Lua state with the standard library, rille and its search paths. NULL: out of memory.
lua_State *runner_new(const char *program);

// The state of the binding, once rille has been required.
Rille *runner_rille(lua_State *L);

// From here on, reading or writing a global that does not exist is an error.
void runner_strict(lua_State *L);

// The global whose name is nearest to `word`, or NULL.
const char *runner_nearest_global(lua_State *L, const char *word);

// Calls the function below its n_args arguments; results stay. On failure the message, with the
// script's frames, is on top. Returns a Lua status.
int runner_call(lua_State *L, int n_args, int n_results);

// Writes the message on top to stderr and pops it. Returns the exit code: 1, or what an error that
// is a table says in its field `code`. With several ranks: reports the cause and ends the job.
int runner_report(lua_State *L);
int runner_report_as(lua_State *L, int code);

// A table as "{1, 2, x = 3}", short: a C function of one argument.
int runner_describe_table(lua_State *L);

// `rille info` with its options. Returns the exit code.
int info_main(lua_State *L, int argc, char **argv);

// The prompt. Returns the exit code. Lines come from a terminal, or plainly from a pipe.
int repl_run(lua_State *L);

#ifdef __cplusplus
}
#endif
#endif
