// error - a failure as scripts see it, in four parts:
//
//    train.lua:12: matmul: inner sizes differ: a is f32[2, 3], b is f32[4, 5]
//        in h.3.mlp
//        hint: transpose one of them
//
// what and the script's line; operands, where the words do not name them; the module; the hint.
#include "lua/binding.h"

#include <assert.h>
#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char LIBRARY[] = "=rille/"; // how sources of the embedded library begin

bool is_library(const char *source) { return strncmp(source, LIBRARY, sizeof LIBRARY - 1) == 0; }

Where script_line(void *rille) {
  Rille *r = rille;
  lua_State *L = r->L;
  lua_Debug ar;
  for (int level = 0; lua_getstack(L, level, &ar); level++) {
    lua_getinfo(L, "S", &ar);
    if (ar.what[0] == 'C' || is_library(ar.source)) continue;
    lua_getinfo(L, "l", &ar);
    if (!r->last_source || strcmp(ar.short_src, r->last_source) != 0)
      r->last_source = ctx_intern(r->ctx, ar.short_src);
    return (Where){r->last_source, ar.currentline};
  }
  return (Where){NULL, 0};
}

// "x f32[2, 3], w f32[4]", unless `message` shows every operand already.
static void add_operands(luaL_Buffer *out, const char *message, Tensor **in, int n_in) {
  char words[128];
  bool missing = false;
  for (int j = 0; j < n_in; j++)
    if (in[j] && !strstr(message, format_tensor(words, sizeof words, in[j]))) missing = true;
  if (!missing) return;
  const char *between = "\n    with ";
  for (int j = 0; j < n_in; j++) {
    if (!in[j]) continue;
    luaL_addstring(out, between);
    luaL_addstring(out, format_tensor(words, sizeof words, in[j]));
    between = ", ";
  }
}

// Pushes the recorded failure in its four parts.
static void push_message(lua_State *L, Rille *r, Tensor **in, int n_in) {
  Where where = script_line(r);
  luaL_Buffer out;
  luaL_buffinit(L, &out);
  if (where.source) {
    char line[128];
    snprintf(line, sizeof line, "%s:%d: ", where.source, where.line);
    luaL_addstring(&out, line);
  }
  luaL_addstring(&out, status_message());
  if (in) add_operands(&out, status_message(), in, n_in);
  if (r->ctx->module[0]) {
    luaL_addstring(&out, "\n    in ");
    luaL_addstring(&out, r->ctx->module);
  }
  if (status_hint()[0]) {
    luaL_addstring(&out, "\n    hint: ");
    luaL_addstring(&out, status_hint());
  }
  luaL_pushresult(&out);
}

int raise_status(lua_State *L, Rille *r, Status status, Tensor **in, int n_in) {
  assert(status != ST_OK);
  if (status == ST_ESCRIPT && r->script_error_ref != LUA_NOREF) {
    lua_rawgeti(L, LUA_REGISTRYINDEX, r->script_error_ref);
    luaL_unref(L, LUA_REGISTRYINDEX, r->script_error_ref);
    r->script_error_ref = LUA_NOREF;
    lua_error(L);
  }
  push_message(L, r, in, n_in);
  lua_error(L);
  abort(); // lua_error does not return, but its header does not say so
}

int raise_usage(lua_State *L, Rille *r, Status status) {
  assert(status != ST_OK);
  (void)status;
  push_message(L, r, NULL, 0);
  lua_getfield(L, LUA_REGISTRYINDEX, "rille.table");
  lua_getfield(L, -1, "core");
  lua_pushvalue(L, -3);
  lua_setfield(L, -2, "usage_words"); // the program looks whether this is what ended the script
  lua_pop(L, 2);
  lua_error(L);
  abort();
}

bool is_usage(lua_State *L, int words) {
  words = lua_absindex(L, words);
  lua_getfield(L, LUA_REGISTRYINDEX, "rille.table");
  lua_getfield(L, -1, "core");
  lua_getfield(L, -1, "usage_words");
  bool is = lua_isstring(L, words) && lua_rawequal(L, words, -1);
  lua_pop(L, 3);
  return is;
}

int raise_value(lua_State *L, Rille *r, const char *format, ...) {
  char words[1024];
  va_list args;
  va_start(args, format);
  vsnprintf(words, sizeof words, format, args);
  va_end(args);
  char *hint = strchr(words, '\n'); // the words after a line break are the hint
  if (hint) *hint++ = 0;
  Status status = fail(ST_EVALUE, "%s", words);
  if (hint) fail_hint(status, "%s", hint);
  raise_status(L, r, status, NULL, 0);
}

Status fail_script(lua_State *L, Rille *r) {
  const char *words = lua_tostring(L, -1);
  Status status = fail(ST_ESCRIPT, "%s", words ? words : "an error that is no string");
  luaL_unref(L, LUA_REGISTRYINDEX, r->script_error_ref);
  r->script_error_ref = luaL_ref(L, LUA_REGISTRYINDEX);
  return status;
}

// Edit distance (Levenshtein) of two short words, with adjacent letters swapped counting once.
static int distance(const char *a, const char *b) {
  enum { ROOM = 32 };
  int n = (int)strlen(a), m = (int)strlen(b);
  if (n >= ROOM || m >= ROOM) return ROOM;
  int rows[3][ROOM + 1];
  for (int j = 0; j <= m; j++) rows[0][j] = j;
  for (int i = 1; i <= n; i++) {
    int *row = rows[i % 3], *up = rows[(i + 2) % 3], *up2 = rows[(i + 1) % 3];
    row[0] = i;
    for (int j = 1; j <= m; j++) {
      int best = up[j - 1] + (a[i - 1] != b[j - 1]);
      if (up[j] + 1 < best) best = up[j] + 1;
      if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] && up2[j - 2] + 1 < best)
        best = up2[j - 2] + 1;
      row[j] = best;
    }
  }
  return rows[n % 3][m];
}

const char *nearest_name(const char *word, const char *const *names, int n) {
  const char *best = NULL;
  if (word[0] && !word[1]) { // any other letter would be near
    for (int i = 0; i < n; i++)
      if (tolower(word[0]) == tolower(names[i][0]) && !names[i][1]) best = names[i];
    return best;
  }
  int length = (int)strlen(word), limit = length <= 3 ? 1 : length <= 6 ? 2 : 3;
  for (int i = 0; i < n; i++) {
    int d = distance(word, names[i]);
    if (d <= limit) {
      limit = d - 1;
      best = names[i];
    }
  }
  return best;
}
