// data_bind - rille.core: token files, the order of samples, random numbers by index, and what the
// library asks of files and terminals.
#include "lua/binding.h"

#include "core/order.h"
#include "core/rng.h"
#include "core/tokens.h"

#include <errno.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

static const char TOKENS[] = "rille.token file";

typedef struct TokenBox {
  TokenFile *file; // NULL once closed
} TokenBox;

// ---- token files

static TokenFile *tokens_self(lua_State *L, Rille *r) {
  const TokenBox *box = box_check(L, r, 1, TOKENS);
  if (!box->file) raise_value(L, r, "the token file is closed");
  return box->file;
}

// tokens_open(path, format = "auto")
static int open_tokens(lua_State *L) {
  Rille *r = binding_of(L);
  const char *path = string_check(L, r, 1, "tokens_open: path");
  TokenFormat format;
  const char *name = lua_isnoneornil(L, 2) ? "auto" : string_check(L, r, 2, "tokens_open: format");
  check_status(L, r, token_format_from_name(&format, name));
  TokenBox *box = box_push(L, TOKENS, sizeof *box);
  check_status(L, r, tokens_open(&box->file, path, format));
  return 1;
}

static int close_tokens(lua_State *L) {
  TokenBox *box = box_check(L, binding_of(L), 1, TOKENS);
  tokens_close(box->file);
  box->file = NULL;
  return 0;
}

static int count_tokens(lua_State *L) {
  lua_pushinteger(L, tokens_count(tokens_self(L, binding_of(L))));
  return 1;
}

// file:check(vocab) raises if an id is not in [0, vocab).
static int check_tokens(lua_State *L) {
  Rille *r = binding_of(L);
  check_status(L, r, tokens_check(tokens_self(L, r), integer_check(L, r, 2, "check: vocab")));
  return 0;
}

// file:rows(firsts, T) -> i64[n, T]: row i holds the T ids from firsts[i] on.
static int token_rows(lua_State *L) {
  Rille *r = binding_of(L);
  const TokenFile *file = tokens_self(L, r);
  table_check(L, r, 2, "rows: firsts");
  int64_t n = (int64_t)lua_rawlen(L, 2), T = integer_check(L, r, 3, "rows: T");
  if (T < 1) return raise_value(L, r, "rows: T must be at least 1, got %lld", (long long)T);
  TensorSpec spec = {.dtype = DT_I64, .ndim = 2, .shape = {n, T}};
  Tensor *out;
  push_result(L, r, tensor_new(r->ctx, &r->ctx->cpu, &spec, MEM_ACTIVATIONS, &out), &out);
  int64_t *ids = tensor_data(out);
  for (int64_t i = 0; i < n; i++) {
    lua_rawgeti(L, 2, i + 1);
    int64_t first = integer_check(L, r, -1, "rows: a first id");
    check_status(L, r, tokens_get(file, first, T, ids + i * T));
    lua_pop(L, 1);
  }
  return 1;
}

// tokens_from_text(text path, token path) -> number of ids
static int text_to_tokens(lua_State *L) {
  Rille *r = binding_of(L);
  int64_t n = 0;
  check_status(L, r,
               tokens_from_text(&n, string_check(L, r, 1, "tokens_from_text: text"),
                                string_check(L, r, 2, "tokens_from_text: tokens")));
  lua_pushinteger(L, n);
  return 1;
}

// ---- order and randomness, pure functions

static int n_windows(lua_State *L) {
  Rille *r = binding_of(L);
  int64_t n = integer_check(L, r, 1, "order_n_windows: the number of ids");
  int64_t T = integer_check(L, r, 2, "order_n_windows: T");
  if (n < 0 || T < 1) return raise_value(L, r, "order_n_windows: n >= 0 and T >= 1 are wanted");
  lua_pushinteger(L, order_n_windows(n, T));
  return 1;
}

// order_window(seed, sample, n_windows)
static int window(lua_State *L) {
  Rille *r = binding_of(L);
  int64_t seed = integer_check(L, r, 1, "order_window: the seed");
  int64_t sample = integer_check(L, r, 2, "order_window: the sample");
  int64_t n = integer_check(L, r, 3, "order_window: the number of windows");
  if (sample < 0 || n < 1)
    return raise_value(L, r, "order_window: sample >= 0 and n_windows >= 1 are wanted");
  lua_pushinteger(L, order_window((uint64_t)seed, sample, n));
  return 1;
}

// random_uniform(seed, stream, index) in [0, 1)
static int random_uniform(lua_State *L) {
  Rille *r = binding_of(L);
  uint64_t key = rng_key((uint64_t)integer_check(L, r, 1, "random_uniform: the seed"),
                         string_check(L, r, 2, "random_uniform: the stream"));
  lua_pushnumber(L, rng_uniform(key, integer_check(L, r, 3, "random_uniform: the index")));
  return 1;
}

// ---- files and terminals

static int raise_io(lua_State *L, Rille *r, const char *path, const char *what) {
  Status status = fail(ST_EIO, "%s: %s failed: %s", path, what, strerror(errno));
  return raise_status(L, r, status, NULL, 0);
}

// stat(path) -> {size = bytes, modified = nanoseconds since 1970, is_directory =}, or nil if there
// is no such file
static int file_stat(lua_State *L) {
  Rille *r = binding_of(L);
  const char *path = string_check(L, r, 1, "stat: path");
  struct stat st;
  if (stat(path, &st) != 0) {
    if (errno == ENOENT || errno == ENOTDIR) return 0;
    return raise_io(L, r, path, "looking at it");
  }
  lua_createtable(L, 0, 3);
  lua_pushboolean(L, S_ISDIR(st.st_mode)), lua_setfield(L, -2, "is_directory");
  lua_pushinteger(L, st.st_size), lua_setfield(L, -2, "size");
  lua_pushinteger(L, (lua_Integer)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec);
  lua_setfield(L, -2, "modified");
  return 1;
}

// truncate(path, size): the file keeps its first `size` bytes.
static int file_truncate(lua_State *L) {
  Rille *r = binding_of(L);
  const char *path = string_check(L, r, 1, "truncate: path");
  if (truncate(path, integer_check(L, r, 2, "truncate: the size")) != 0)
    return raise_io(L, r, path, "cutting it back");
  return 0;
}

// columns(fd) -> width of the terminal there, or nil if it is none. An unknown width counts as 80.
static int terminal_columns(lua_State *L) {
  Rille *r = binding_of(L);
  int fd = (int)integer_check(L, r, 1, "columns: the file descriptor");
  if (!isatty(fd)) return 0;
  struct winsize size = {0};
  bool known = ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  lua_pushinteger(L, known ? size.ws_col : 80);
  return 1;
}

// nearest(word, list of names) -> the name that `word` may be a misspelling of, or nil
static int nearest(lua_State *L) {
  Rille *r = binding_of(L);
  const char *word = string_check(L, r, 1, "nearest: the word"), *best = NULL;
  table_check(L, r, 2, "nearest: the list");
  int n = (int)lua_rawlen(L, 2);
  const char **names = lua_newuserdatauv(L, (size_t)(n + 1) * sizeof *names, 0);
  for (int i = 0; i < n; i++) {
    lua_rawgeti(L, 2, i + 1);
    names[i] = string_check(L, r, -1, "nearest: a name"); // the list keeps it
    lua_pop(L, 1);
  }
  best = nearest_name(word, names, n);
  lua_pushstring(L, best); // NULL: nil
  return 1;
}

static const luaL_Reg functions[] = {
    {"tokens_open", open_tokens},
    {"tokens_from_text", text_to_tokens},
    {"order_n_windows", n_windows},
    {"order_window", window},
    {"random_uniform", random_uniform},
    {"stat", file_stat},
    {"truncate", file_truncate},
    {"columns", terminal_columns},
    {"nearest", nearest},
    {NULL, NULL},
};

static const luaL_Reg token_methods[] = {
    {"count", count_tokens},
    {"check", check_tokens},
    {"rows", token_rows},
    {"close", close_tokens},
    {NULL, NULL},
};

static const luaL_Reg token_metamethods[] = {
    {"__gc", close_tokens},
    {NULL, NULL},
};

void data_bind(lua_State *L, Rille *r, int rille) {
  box_bind(L, r, TOKENS, token_methods, token_metamethods);
  lua_getfield(L, rille, "core");
  binding_register(L, r, functions);
  lua_pop(L, 1);
}
