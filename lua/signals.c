// signals - requests to stop, and Ctrl-C at the prompt.
//
// A handler gets nothing but a number, so what it writes to is static: the flag, and the context
// that is to be interrupted. Nothing else writes to them but the functions below. What signals did
// before belongs to the process and is static too.
#include "lua/binding.h"

#include "lua/signals.h"
#include "parallel/comm.h"

#include <signal.h>
#include <string.h>

static volatile sig_atomic_t stop_signal; // the number of the signal that asked, 0: none
static Rille *volatile interrupted;       // whose work Ctrl-C stops

// `rille -n` passes all it gets on as SIGUSR1, and says what it was.
static void on_stop(int number) {
  number = launch_meant(number);
  if (number == SIGINT) {
    signal(SIGINT, SIG_DFL);
    raise(SIGINT);
  }
  stop_signal = number;
}

// catch_signals(true or nothing) notes SIGTERM and SIGUSR1 from here on; catch_signals(false)
// brings back what they did before. Calls may nest. catch_signals(false, true): the process ends
// because of one, which another rank may have heard of first; one more changes nothing.
static int catch_signals(lua_State *L) {
  static struct sigaction before_term, before_usr1;
  static int depth;
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = on_stop;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  if (lua_isnone(L, 1) || lua_toboolean(L, 1)) {
    if (depth++ > 0) return 0;
    sigaction(SIGTERM, &action, &before_term);
    sigaction(SIGUSR1, &action, &before_usr1);
  } else if (depth > 0 && --depth == 0 && !lua_toboolean(L, 2)) {
    sigaction(SIGTERM, &before_term, NULL);
    sigaction(SIGUSR1, &before_usr1, NULL);
    int missed = stop_signal; // nobody answered it: it does what it did before
    stop_signal = 0;
    if (missed) raise(missed);
  }
  return 0;
}

// stop_requested(): "SIGTERM" or "SIGUSR1" where one has arrived since the last call, else nil: who
// asks has to act.
static int stop_requested(lua_State *L) {
  if (stop_signal == 0)
    lua_pushnil(L);
  else
    lua_pushstring(L, stop_signal == SIGTERM ? "SIGTERM" : "SIGUSR1");
  stop_signal = 0;
  return 1;
}

// ---- Ctrl-C

static void stop_here(lua_State *L, lua_Debug *ar) {
  (void)ar;
  lua_sethook(L, NULL, 0, 0);
  lua_getfield(L, LUA_REGISTRYINDEX, "rille.state");
  Rille *r = lua_touserdata(L, -1);
  lua_pop(L, 1);
  if (r) r->ctx->interrupted = 0;
  luaL_error(L, "interrupted");
}

// Lua code stops at the next instruction, C code at the next op.
static void on_interrupt(int number) {
  (void)number;
  Rille *r = interrupted;
  if (!r) return;
  r->ctx->interrupted = 1;
  lua_sethook(r->L, stop_here, LUA_MASKCALL | LUA_MASKRET | LUA_MASKCOUNT, 1);
}

void interrupts_begin(Rille *r) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = on_interrupt;
  sigemptyset(&action.sa_mask);
  interrupted = r;
  sigaction(SIGINT, &action, NULL);
}

void interrupts_end(Rille *r) {
  signal(SIGINT, SIG_DFL);
  interrupted = NULL;
  r->ctx->interrupted = 0;
  lua_sethook(r->L, NULL, 0, 0);
}

static const luaL_Reg functions[] = {
    {"catch_signals", catch_signals}, {"stop_requested", stop_requested}, {NULL, NULL}};

void signals_bind(lua_State *L, Rille *r, int rille) {
  lua_getfield(L, rille, "core");
  binding_register(L, r, functions);
  lua_pop(L, 1);
}
