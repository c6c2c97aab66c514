// repl - the prompt: libedit with a history that lasts, or plain lines from a pipe.
//
// A line is first tried as an expression, whose values are printed. It goes on in the next line
// only if the chunk is incomplete; an empty line or Ctrl-C gives such a chunk up, so that a typo
// traps nobody. Ctrl-C stops what runs and leaves the session alive. Nothing but the user's
// variables keeps a result alive: the history holds text.
#include "lua/runner.h"

#include "lua/signals.h"

#include <errno.h>
#include <histedit.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HISTORY_LINES = 2000, SHOWN_ENTRIES = 20 };

typedef struct Repl {
  lua_State *L;
  EditLine *edit; // NULL: lines come from a pipe
  History *history;
  char history_path[1024]; // "" : not saved
  bool continues;          // the line read next goes on
  char *line;              // of a pipe
  size_t room;
  int errors;
} Repl;

// ---- history

static bool make_folders(char *path) {
  for (char *p = path + 1; *p; p++) {
    if (*p != '/') continue;
    *p = 0;
    int failed = mkdir(path, 0700) != 0 && errno != EEXIST;
    *p = '/';
    if (failed) return false;
  }
  return true;
}

static void find_history(Repl *repl) {
  const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
  char *path = repl->history_path;
  size_t size = sizeof repl->history_path;
  if (state && *state)
    snprintf(path, size, "%s/rille/history", state);
  else if (home && *home)
    snprintf(path, size, "%s/.local/state/rille/history", home);
  if (*path && !make_folders(path)) *path = 0;
}

static void remember(Repl *repl, const char *chunk) {
  HistEvent event;
  if (!repl->edit) return;
  history(repl->history, &event, H_ENTER, chunk);
  if (*repl->history_path) history(repl->history, &event, H_SAVE, repl->history_path);
}

// ---- reading

static char *prompt(EditLine *edit) {
  static char first[] = "> ", more[] = "... ";
  Repl *repl = NULL;
  el_get(edit, EL_CLIENTDATA, &repl);
  return repl->continues ? more : first;
}

static void do_nothing(int number) { (void)number; }

// At the prompt Ctrl-C only ends the reading of the line.
static void catch_at_prompt(void) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = do_nothing;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, NULL);
}

typedef enum Got { GOT_LINE, GOT_INTERRUPT, GOT_END } Got;

static Got read_line(Repl *repl, const char **line) {
  if (!repl->edit) {
    *line = repl->line;
    if (getline(&repl->line, &repl->room, stdin) < 0) return GOT_END;
    *line = repl->line;
    return GOT_LINE;
  }
  int n = 0;
  catch_at_prompt();
  errno = 0;
  *line = el_gets(repl->edit, &n);
  if (*line && n > 0) return GOT_LINE;
  if (n < 0 && errno == EINTR) {
    el_set(repl->edit, EL_UNBUFFERED, 0); // the half-typed line is dropped
    fputs("^C\n", stdout);
    return GOT_INTERRUPT;
  }
  return GOT_END;
}

// ---- chunks

// A chunk of the prompt: `local x = 1` would be gone with its line, so the first word `local` is
// left out.
static const char *without_local(const char *chunk) {
  const char *at = chunk + strspn(chunk, " \t");
  if (strncmp(at, "local ", 6) != 0) return chunk;
  at += 6;
  at += strspn(at, " \t");
  if (strncmp(at, "function ", 9) == 0) return at;
  const char *names =
      at + strspn(at, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789, ");
  return *names == '=' ? at : chunk;
}

// Does the error on top say that the chunk just ends too early?
static bool is_incomplete(lua_State *L) {
  static const char eof[] = "<eof>";
  size_t n;
  const char *words = lua_tolstring(L, -1, &n);
  return words && n >= sizeof eof - 1 && strcmp(words + n - (sizeof eof - 1), eof) == 0;
}

typedef enum Loaded { LOADED, INCOMPLETE, BROKEN } Loaded;

// Pushes the chunk as a function, or its error.
static Loaded load_chunk(lua_State *L, const char *chunk) {
  lua_pushfstring(L, "return %s", chunk);
  size_t n;
  const char *expression = lua_tolstring(L, -1, &n);
  int status = luaL_loadbuffer(L, expression, n, "=prompt");
  lua_remove(L, -2);
  if (status == LUA_OK) return LOADED;
  lua_pop(L, 1);
  chunk = without_local(chunk);
  if (luaL_loadbuffer(L, chunk, strlen(chunk), "=prompt") == LUA_OK) return LOADED;
  return is_incomplete(L) ? INCOMPLETE : BROKEN;
}

static const char help_text[] =
    "An expression prints its values; anything else is Lua. nn, randn, zeros, tensor, ... are "
    "here.\n"
    "  rille.help()             the ops, a line each\n"
    "  rille.help(\"softmax\")    one of them\n"
    "  x = randn(2, 3)          a tensor; x:shape(), x:sum(), x[0], x[\"0:2, -1\"]\n"
    "  f = nn.Linear{3, 4}      a layer; f(x)\n"
    "An empty line or Ctrl-C gives up an unfinished chunk, Ctrl-C stops what runs.\n"
    "exit, quit or Ctrl-D leave.\n";

// ---- printing

int runner_describe_table(lua_State *L) {
  int n = 0;
  lua_Integer next = 1;
  lua_newtable(L); // pieces
  int pieces = lua_gettop(L);
  lua_pushnil(L);
  while (lua_next(L, 1)) {
    if (n == SHOWN_ENTRIES) {
      lua_pop(L, 2);
      lua_pushliteral(L, "...");
      lua_rawseti(L, pieces, ++n);
      break;
    }
    const char *value = luaL_tolstring(L, -1, NULL);
    const char *quote = lua_type(L, -2) == LUA_TSTRING ? "\"" : "";
    if (lua_isinteger(L, -3) && lua_tointeger(L, -3) == next) {
      lua_pushfstring(L, "%s%s%s", quote, value, quote);
      next++;
    } else {
      lua_pushvalue(L, -3);
      const char *key = luaL_tolstring(L, -1, NULL);
      if (lua_type(L, -2) == LUA_TSTRING)
        lua_pushfstring(L, "%s = %s%s%s", key, quote, value, quote);
      else
        lua_pushfstring(L, "[%s] = %s%s%s", key, quote, value, quote);
      lua_replace(L, -3);
      lua_pop(L, 1);
    }
    lua_rawseti(L, pieces, ++n);
    lua_pop(L, 2); // the value and its text
  }
  luaL_Buffer out;
  luaL_buffinit(L, &out);
  luaL_addchar(&out, '{');
  for (int i = 1; i <= n; i++) {
    if (i > 1) luaL_addstring(&out, ", ");
    lua_rawgeti(L, pieces, i);
    luaL_addvalue(&out);
  }
  luaL_addchar(&out, '}');
  luaL_pushresult(&out);
  return 1;
}

// Prints its arguments, one a line if one of them needs several.
static int print_values(lua_State *L) {
  int n = lua_gettop(L);
  bool lines = false;
  luaL_checkstack(L, n + 4, "too many values");
  for (int i = 1; i <= n; i++) {
    bool plain = lua_istable(L, i) && luaL_getmetafield(L, i, "__tostring") == LUA_TNIL;
    lua_settop(L, n + i - 1);
    if (plain) {
      lua_pushcfunction(L, runner_describe_table);
      lua_pushvalue(L, i);
      lua_call(L, 1, 1);
    } else {
      luaL_tolstring(L, i, NULL);
    }
    lines |= strchr(lua_tostring(L, -1), '\n') != NULL;
  }
  for (int i = 1; i <= n; i++) {
    if (i > 1) fputs(lines ? "\n" : "\t", stdout);
    size_t size;
    const char *words = lua_tolstring(L, n + i, &size);
    fwrite(words, 1, size, stdout);
  }
  fputc('\n', stdout);
  fflush(stdout);
  return 0;
}

// What people type to leave, or to be helped: a word alone that is no variable of theirs. True if
// the line was such a word; *leaves says whether the session ends.
static bool serve_word(Repl *repl, const char *chunk, bool *leaves) {
  static const struct {
    const char *word;
    bool leaves;
  } words[] = {{"exit", true}, {"quit", true}, {"help", false}};
  lua_State *L = repl->L;
  size_t start = strspn(chunk, " \t"), n = strcspn(chunk + start, " \t\r\n;()");
  const char *rest = chunk + start + n;
  if (rest[strspn(rest, " \t\r\n;()")] != 0) return false;
  for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
    if (strlen(words[i].word) != n || strncmp(chunk + start, words[i].word, n) != 0) continue;
    lua_pushglobaltable(L);
    lua_pushstring(L, words[i].word);
    bool is_theirs = lua_rawget(L, -2) != LUA_TNIL;
    lua_pop(L, 2);
    if (is_theirs) return false;
    *leaves = words[i].leaves;
    if (!*leaves) fputs(help_text, stdout);
    return true;
  }
  return false;
}

static void run_chunk(Repl *repl) {
  lua_State *L = repl->L;
  Rille *r = runner_rille(L);
  int at = lua_gettop(L);
  interrupts_begin(r);
  int status = runner_call(L, 0, LUA_MULTRET);
  int n = lua_gettop(L) - at + 1;
  if (status == LUA_OK && n > 0) {
    lua_pushcfunction(L, print_values);
    lua_insert(L, at);
    status = runner_call(L, n, 0);
  }
  interrupts_end(r);
  if (status != LUA_OK) {
    repl->errors++;
    runner_report(L);
  }
  lua_settop(L, at - 1);
}

// ---- the loop

// Reads one chunk and runs it. False at the end of the input.
static bool serve(Repl *repl) {
  lua_State *L = repl->L;
  const char *line;
  lua_settop(L, 0);
  lua_pushliteral(L, "");
  repl->continues = false;
  for (;;) {
    Got got = read_line(repl, &line);
    if (got == GOT_INTERRUPT) return true;
    bool empty = got == GOT_END || line[strspn(line, " \t\r\n")] == 0;
    if (got == GOT_END && !repl->continues) return false;
    if (empty && !repl->continues) return true;
    lua_pushstring(L, empty ? "" : line);
    lua_concat(L, 2);
    const char *chunk = lua_tostring(L, 1);
    bool leaves;
    if (!repl->continues && serve_word(repl, chunk, &leaves)) {
      remember(repl, chunk);
      return !leaves;
    }
    Loaded loaded = load_chunk(L, chunk);
    if (loaded == INCOMPLETE && !empty) {
      lua_settop(L, 1);
      repl->continues = true;
      continue;
    }
    if (!empty || repl->continues) remember(repl, chunk);
    if (loaded == LOADED) {
      lua_remove(L, 1);
      run_chunk(repl);
    } else {
      repl->errors++;
      runner_report(L);
    }
    return got != GOT_END;
  }
}

// What is no variable of the user's is looked up in rille: nn, randn, zeros, tensor, ...
static int prelude_index(lua_State *L) {
  Rille *r = binding_of(L);
  lua_pushvalue(L, lua_upvalueindex(2)); // core.find
  lua_pushvalue(L, 2);
  lua_call(L, 1, 1);
  if (!lua_isnil(L, -1)) return 1;
  const char *name = luaL_tolstring(L, 2, NULL), *near = runner_nearest_global(L, name);
  return raise_value(L, r, "there is no variable \"%s\"\n%s%s%s", name,
                     near ? "did you mean \"" : "rille.help() lists the functions",
                     near ? near : "", near ? "\"?" : "");
}

static void set_prelude(lua_State *L) {
  lua_getglobal(L, "require");
  lua_pushliteral(L, "rille");
  lua_call(L, 1, 1);
  lua_pushglobaltable(L);
  lua_pushvalue(L, -2);
  lua_pushliteral(L, "rille");
  lua_insert(L, -2);
  lua_rawset(L, -3);
  lua_createtable(L, 0, 1);
  lua_pushlightuserdata(L, runner_rille(L));
  lua_getfield(L, -4, "core");
  lua_getfield(L, -1, "find");
  lua_remove(L, -2);
  lua_pushcclosure(L, prelude_index, 2);
  lua_setfield(L, -2, "__index");
  lua_setmetatable(L, -2);
  lua_pop(L, 2);
}

static void open_terminal(Repl *repl) {
  HistEvent event;
  repl->edit = el_init("rille", stdin, stdout, stderr);
  if (!repl->edit) return;
  repl->history = history_init();
  history(repl->history, &event, H_SETSIZE, HISTORY_LINES);
  history(repl->history, &event, H_SETUNIQUE, 1);
  find_history(repl);
  if (*repl->history_path) history(repl->history, &event, H_LOAD, repl->history_path);
  el_set(repl->edit, EL_CLIENTDATA, repl);
  el_set(repl->edit, EL_PROMPT, prompt);
  el_set(repl->edit, EL_EDITOR, "emacs");
  el_set(repl->edit, EL_HIST, history, repl->history);
  el_set(repl->edit, EL_SIGNAL, 0);
  el_source(repl->edit, NULL);
  printf("rille %s, %s. help says how, Ctrl-D leaves.\n", RILLE_VERSION, LUA_RELEASE);
}

int repl_run(lua_State *L) {
  Repl repl = {.L = L};
  set_prelude(L);
  if (isatty(STDIN_FILENO)) open_terminal(&repl);
  while (serve(&repl)) continue;
  int code = repl.edit ? 0 : repl.errors ? EXIT_ERROR : 0;
  if (repl.edit) {
    fputc('\n', stdout);
    history_end(repl.history);
    el_end(repl.edit);
  }
  free(repl.line);
  return code;
}
