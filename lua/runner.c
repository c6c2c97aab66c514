// runner - scripts: search paths, strict globals, error messages with the script's frames.
#include "lua/runner.h"

#include "core/status.h"
#include "parallel/comm.h"

#include <lualib.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_GLOBALS = 128, MAX_FRAMES = 12, MAX_LEVELS = 200 }; // levels: a search is quadratic

// A cycle begins when the heap has grown by half (Lua's own: doubled) and goes twice as fast: the
// tensors of small ops then stay in the cache, and x + y takes four fifths of the time.
enum { GC_PAUSE = 150, GC_STEPMUL = 200 };

Rille *runner_rille(lua_State *L) {
  lua_getfield(L, LUA_REGISTRYINDEX, "rille.state");
  Rille *r = lua_touserdata(L, -1);
  lua_pop(L, 1);
  return r;
}

// models/ and scripts/ lie beside an installed program, or at the root of the build tree.
static void add_paths(lua_State *L, const char *program) {
  char folder[1024], path[1024];
  ssize_t n = readlink("/proc/self/exe", folder, sizeof folder - 1);
  snprintf(path, sizeof path, "%s", program);
  if (n > 0) {
    folder[n] = 0;
    snprintf(path, sizeof path, "%s", folder);
  }
  char *slash = strrchr(path, '/');
  if (!slash) return;
  *slash = 0;
  lua_getglobal(L, "package");
  lua_getfield(L, -1, "path");
  lua_pushfstring(L, "%s;%s/../share/rille/?.lua;%s/../../?.lua", lua_tostring(L, -1), path, path);
  lua_setfield(L, -3, "path");
  lua_pop(L, 2);
}

// print under a launcher: of the first rank alone, a line at once, since a launcher that reads a
// part of it puts other ranks' lines between.
static int print_line(lua_State *L) {
  luaL_Buffer line;
  int n = lua_gettop(L);
  if (runner_rille(L)->rank > 0) return 0;
  luaL_buffinit(L, &line);
  for (int i = 1; i <= n; i++) {
    if (i > 1) luaL_addchar(&line, '\t');
    luaL_tolstring(L, i, NULL);
    luaL_addvalue(&line);
  }
  luaL_addchar(&line, '\n');
  luaL_pushresult(&line);
  size_t length;
  const char *text = lua_tolstring(L, -1, &length);
  fwrite(text, 1, length, stdout);
  fflush(stdout);
  return 0;
}

lua_State *runner_new(const char *program) {
  lua_State *L = luaL_newstate();
  if (!L) return NULL;
  luaL_openlibs(L);
  lua_gc(L, LUA_GCINC, GC_PAUSE, GC_STEPMUL, 0);
  add_paths(L, program);
  luaL_requiref(L, "rille", luaopen_rille, 0);
  lua_pop(L, 1);
  if (runner_rille(L)->world > 1) {
    lua_pushcfunction(L, print_line);
    lua_setglobal(L, "print");
  }
  return L;
}

// ---- strict globals

const char *runner_nearest_global(lua_State *L, const char *word) {
  const char *names[MAX_GLOBALS];
  int n = 0;
  lua_pushglobaltable(L);
  lua_pushnil(L);
  while (lua_next(L, -2)) {
    lua_pop(L, 1);
    if (lua_type(L, -1) == LUA_TSTRING && n < MAX_GLOBALS) names[n++] = lua_tostring(L, -1);
  }
  lua_pop(L, 1);
  return nearest_name(word, names, n);
}

static int undeclared(lua_State *L, bool written) {
  Rille *r = binding_of(L);
  const char *name = lua_type(L, 2) == LUA_TSTRING ? lua_tostring(L, 2) : luaL_typename(L, 2);
  const char *near = runner_nearest_global(L, name);
  Status status = fail(ST_EVALUE, "there is no global \"%s\"", name);
  if (near)
    fail_hint(status, "did you mean \"%s\"? A new variable needs `local`", near);
  else if (written)
    fail_hint(status, "write `local %s` (or rawset(_G, \"%s\", ...) for a real global)", name,
              name);
  else
    fail_hint(status, "a variable needs `local` before its first use, a module needs require");
  return raise_status(L, r, status, NULL, 0);
}

static int read_undeclared(lua_State *L) { return undeclared(L, false); }
static int write_undeclared(lua_State *L) { return undeclared(L, true); }

void runner_strict(lua_State *L) {
  Rille *r = runner_rille(L);
  lua_pushglobaltable(L);
  lua_createtable(L, 0, 2);
  binding_push(L, r, read_undeclared), lua_setfield(L, -2, "__index");
  binding_push(L, r, write_undeclared), lua_setfield(L, -2, "__newindex");
  lua_setmetatable(L, -2);
  lua_pop(L, 1);
}

// ---- errors

// Pushes the frames of scripts below the message on top, if there is more than the line that the
// message names.
static void add_frames(lua_State *L, lua_State *of, int level) {
  lua_Debug ar;
  luaL_Buffer out;
  int n = 0, total = 0;
  bool in_library = strncmp(lua_tostring(L, -1), "rille/", 6) == 0; // a line that says little
  for (int k = level; k < MAX_LEVELS && lua_getstack(of, k, &ar); k++) {
    lua_getinfo(of, "S", &ar);
    if (ar.what[0] != 'C' && !is_library(ar.source)) total++;
  }
  luaL_buffinit(L, &out);
  for (int k = level; total > (in_library ? 0 : 1) && k < MAX_LEVELS && lua_getstack(of, k, &ar);
       k++) {
    lua_getinfo(of, "Sln", &ar);
    if (ar.what[0] == 'C' || is_library(ar.source)) continue;
    char line[256];
    if (n++ == MAX_FRAMES) {
      snprintf(line, sizeof line, "\n      ... %d more", total - MAX_FRAMES);
      luaL_addstring(&out, line);
      break;
    }
    snprintf(line, sizeof line, "\n    %s %s:%d%s%s", n == 1 ? "at" : "  ", ar.short_src,
             ar.currentline, ar.name ? " in " : "", ar.name ? ar.name : "");
    luaL_addstring(&out, line);
  }
  luaL_pushresult(&out);
}

// With what code the program ends: what an error that is a table says ({code = 3}), or 2 where an
// option was refused and nobody caught it.
static void note_code(lua_State *L) {
  if (lua_istable(L, 1)) {
    lua_pushliteral(L, "code");
    lua_rawget(L, 1);
  } else {
    if (is_usage(L, 1))
      lua_pushinteger(L, EXIT_USAGE);
    else
      lua_pushnil(L);
  }
  lua_setfield(L, LUA_REGISTRYINDEX, "rille.exit_code");
}

// The line of the script that raised, in front of what was raised without one.
static void push_place(lua_State *L) {
  Where where = script_line(runner_rille(L));
  if (where.source)
    lua_pushfstring(L, "%s:%d: ", where.source, where.line);
  else
    lua_pushliteral(L, "");
}

// Words for an error that is no string: what its __tostring says; or its fields, or its type.
static void describe_error(lua_State *L) {
  if (luaL_callmeta(L, 1, "__tostring")) return;
  push_place(L);
  lua_pushfstring(L, "error(...) was called with a %s instead of a message", luaL_typename(L, 1));
  if (lua_istable(L, 1)) {
    lua_pushcfunction(L, runner_describe_table);
    lua_pushvalue(L, 1);
    lua_pushfstring(L, ": %s", lua_pcall(L, 1, 1, 0) == LUA_OK ? lua_tostring(L, -1) : "{...}");
    lua_remove(L, -2);
    lua_concat(L, 2);
  } else if (!lua_isnil(L, 1)) {
    lua_pushfstring(L, ": %s", luaL_tolstring(L, 1, NULL));
    lua_remove(L, -2);
    lua_concat(L, 2);
  }
  lua_concat(L, 2);
}

static int with_frames(lua_State *L) {
  Rille *r = runner_rille(L);
  r->L = L;
  note_code(L);
  if (lua_type(L, 1) == LUA_TSTRING)
    lua_pushvalue(L, 1);
  else
    describe_error(L);
  add_frames(L, L, 1);
  lua_concat(L, 2);
  return 1;
}

int runner_call(lua_State *L, int n_args, int n_results) {
  int at = lua_gettop(L) - n_args;
  lua_pushcfunction(L, with_frames);
  lua_insert(L, at);
  int status = lua_pcall(L, n_args, n_results, at);
  lua_remove(L, at);
  Rille *r = runner_rille(L);
  r->L = L;
  if (status != LUA_OK) r->ctx->module = "";
  return status;
}

int runner_report(lua_State *L) {
  lua_getfield(L, LUA_REGISTRYINDEX, "rille.exit_code");
  lua_Integer code = lua_isinteger(L, -1) ? lua_tointeger(L, -1) : EXIT_ERROR;
  lua_pop(L, 1);
  bool says_failure = code >= 1 && code <= 255; // no error ends with 0, nor with what wraps to it
  return runner_report_as(L, says_failure ? (int)code : EXIT_ERROR);
}

int runner_report_as(lua_State *L, int code) {
  const char *words = lua_tostring(L, -1);
  fflush(stdout);
  if (!words) words = "an error without words";
  comm_fatal_words(words, code); // returns in a world of one
  fprintf(stderr, "rille: %s\n", words);
  lua_pop(L, 1);
  return code;
}
