// ledger_bind - sched:ledger: the bubble ledger of a step from the spans of all ranks.
#include "lua/sched_bind.h"

#include "parallel/ledger.h"

#include <string.h>

static void *room(lua_State *L, Rille *r, SchedArena *arena, int64_t count, size_t size) {
  void *memory = sched_alloc(arena, (size_t)count, size);
  if (memory) return memory;
  (void)fail(ST_ENOMEM, "%s", arena->message);
  raise_status(L, r, ST_ENOMEM, NULL, 0);
}

// The list of row `rank` in the table at an index, with an entry for each action.
static void push_row(lua_State *L, Rille *r, int index, const Sched *sched, int rank,
                     const char *what) {
  int count = sched->row[rank].count;
  lua_rawgeti(L, index, rank + 1);
  if (!lua_istable(L, -1) || (int)lua_rawlen(L, -1) != count)
    raise_value(L, r, "%s[%d] must be a list with one entry for each of the %d actions of rank %d",
                what, rank + 1, count, rank);
}

// Number `k` of the list on top.
static double number_in(lua_State *L, Rille *r, int k, const char *what) {
  if (lua_rawgeti(L, -1, k) != LUA_TNUMBER) raise_value(L, r, "%s: a number is missing", what);
  double value = lua_tonumber(L, -1);
  lua_pop(L, 1);
  return value;
}

SchedSpan *sched_spans_check(lua_State *L, Rille *r, int index, const Sched *sched,
                             SchedArena *arena, int64_t **first) {
  luaL_checktype(L, index, LUA_TTABLE);
  *first = room(L, r, arena, sched->ranks + 1, sizeof **first);
  for (int rank = 0; rank < sched->ranks; rank++)
    (*first)[rank + 1] = (*first)[rank] + sched->row[rank].count;
  SchedSpan *span = room(L, r, arena, (*first)[sched->ranks], sizeof *span);
  for (int rank = 0; rank < sched->ranks; rank++) {
    push_row(L, r, index, sched, rank, "spans");
    for (int i = 0; i < sched->row[rank].count; i++) {
      if (lua_rawgeti(L, -1, i + 1) != LUA_TTABLE)
        raise_value(L, r, "spans[%d][%d] must be {start, end, waited}", rank + 1, i + 1);
      span[(*first)[rank] + i] =
          (SchedSpan){.start = number_in(L, r, 1, "a span"), .end = number_in(L, r, 2, "a span")};
      lua_pop(L, 1);
    }
    lua_pop(L, 1);
  }
  return span;
}

// messages[rank + 1][i] = {sent, arrived} of RECV actions, false of others.
static LedgerMessage *messages_check(lua_State *L, Rille *r, int index, const Sched *sched,
                                     SchedArena *arena, const int64_t *first) {
  if (lua_isnoneornil(L, index)) return NULL;
  luaL_checktype(L, index, LUA_TTABLE);
  LedgerMessage *message = room(L, r, arena, first[sched->ranks], sizeof *message);
  for (int rank = 0; rank < sched->ranks; rank++) {
    push_row(L, r, index, sched, rank, "messages");
    for (int i = 0; i < sched->row[rank].count; i++) {
      int does = action_properties(sched->row[rank].action[i].kind);
      int type = lua_rawgeti(L, -1, i + 1);
      if ((does & RECEIVES) && type != LUA_TTABLE)
        raise_value(L, r, "messages[%d][%d] must be {sent, arrived}", rank + 1, i + 1);
      if (does & RECEIVES)
        message[first[rank] + i] =
            (LedgerMessage){number_in(L, r, 1, "a message"), number_in(L, r, 2, "a message")};
      lua_pop(L, 1);
    }
    lua_pop(L, 1);
  }
  return message;
}

static void set_number(lua_State *L, const char *name, double value) {
  lua_pushnumber(L, value);
  lua_setfield(L, -2, name);
}

static void set_list(lua_State *L, const char *name, const double *value, int n) {
  lua_createtable(L, n, 0);
  for (int i = 0; i < n; i++) {
    lua_pushnumber(L, value[i]);
    lua_rawseti(L, -2, i + 1);
  }
  lua_setfield(L, -2, name);
}

// A matrix of ranks: a list of lists.
static void set_matrix(lua_State *L, const char *name, const double *value, int n) {
  lua_createtable(L, n, 0);
  for (int a = 0; a < n; a++) {
    lua_createtable(L, n, 0);
    for (int b = 0; b < n; b++) {
      lua_pushnumber(L, value[a * n + b]);
      lua_rawseti(L, -2, b + 1);
    }
    lua_rawseti(L, -2, a + 1);
  }
  lua_setfield(L, -2, name);
}

static void write_buffer(void *user, const char *bytes, size_t count) {
  luaL_addlstring(user, bytes, count);
}

static void push_ledger(lua_State *L, const Ledger *ledger) {
  lua_createtable(L, 0, 10);
  set_number(L, "start", ledger->begin);
  set_number(L, "finish", ledger->end);
  set_list(L, "busy", ledger->busy, ledger->ranks);
  set_list(L, "idle", ledger->idle, ledger->ranks);
  set_matrix(L, "late", ledger->late, ledger->ranks);
  set_matrix(L, "link", ledger->link, ledger->ranks);
  set_number(L, "lateness", ledger->lateness);
  if (ledger->latest >= 0) lua_pushinteger(L, ledger->latest), lua_setfield(L, -2, "latest");
  lua_createtable(L, ledger->ranks, 0);
  for (int rank = 0; rank < ledger->ranks; rank++) {
    lua_createtable(L, 0, LEDGER_CAUSES);
    for (int c = 0; c < LEDGER_CAUSES; c++)
      set_number(L, ledger_cause((LedgerCause)c), ledger->cause[rank * LEDGER_CAUSES + c]);
    lua_rawseti(L, -2, rank + 1);
  }
  lua_setfield(L, -2, "causes");
  luaL_Buffer text;
  luaL_buffinit(L, &text);
  ledger_print(&(SchedOut){write_buffer, &text}, ledger);
  luaL_pushresult(&text);
  lua_setfield(L, -2, "words");
}

// sched:ledger(spans, messages) -> {start, finish, busy, idle, causes, late, link, latest,
// lateness, words}: seconds by rank (from 1); causes[rank + 1] by name; late[a][b]: rank a - 1 was
// idle because b - 1 was late; latest: the rank to blame for most of it, counted from 0
int sched_ledger(lua_State *L) {
  Rille *r = binding_of(L);
  const Sched *sched = sched_check_box(L, r, 1)->lowered;
  lua_settop(L, 3);
  SchedArena *arena = sched_scratch_push(L);
  int64_t *first;
  const SchedSpan *span = sched_spans_check(L, r, 2, sched, arena, &first);
  const LedgerMessage *message = messages_check(L, r, 3, sched, arena, first);
  Ledger *ledger;
  Status status = ledger_make(arena, &ledger, sched, first, span, message);
  if (status != ST_OK) {
    (void)fail(status, "%s", arena->message);
    return raise_status(L, r, status, NULL, 0);
  }
  push_ledger(L, ledger);
  sched_heap_close(arena);
  return 1;
}

static double field(lua_State *L, int table, const char *name, double fallback) {
  double value = lua_getfield(L, table, name) == LUA_TNUMBER ? lua_tonumber(L, -1) : fallback;
  lua_pop(L, 1);
  return value;
}

// ledger_watch(state, ledger, steps, share) -> the rank that stays slow, or nil. state is a table
// that the caller keeps from step to step, {} at first.
static int watch(lua_State *L) {
  luaL_checktype(L, 1, LUA_TTABLE);
  luaL_checktype(L, 2, LUA_TTABLE);
  int steps = (int)luaL_checkinteger(L, 3);
  double share = luaL_checknumber(L, 4);
  lua_getfield(L, 2, "busy");
  int ranks = lua_istable(L, -1) ? (int)lua_rawlen(L, -1) : 1;
  Ledger ledger = {.ranks = ranks,
                   .begin = field(L, 2, "start", 0),
                   .end = field(L, 2, "finish", 0),
                   .latest = (int)field(L, 2, "latest", -1),
                   .lateness = field(L, 2, "lateness", 0)};
  LedgerWatch state = {.rank = (int)field(L, 1, "rank", -1),
                       .steps = (int)field(L, 1, "steps", 0),
                       .share = field(L, 1, "share", 0)};
  int slow = ledger_watch(&state, &ledger, steps, share);
  lua_pushinteger(L, state.rank), lua_setfield(L, 1, "rank");
  lua_pushinteger(L, state.steps), lua_setfield(L, 1, "steps");
  lua_pushnumber(L, state.share), lua_setfield(L, 1, "share");
  if (slow < 0) return 0;
  lua_pushinteger(L, slow);
  return 1;
}

void ledger_bind(lua_State *L, Rille *r, int rille) {
  lua_getfield(L, rille, "core");
  binding_push(L, r, watch);
  lua_setfield(L, -2, "ledger_watch");
  lua_pop(L, 1);
}
