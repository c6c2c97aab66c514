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

// Where the spans of a rank come from: exec:spans(), or a list of {start, end, waited, from, sent,
// arrived} for each action, of which the last three may be missing.
typedef struct Row {
  int rank, count;
  const char *packed; // NULL: the table on top
} Row;

static Row push_row(lua_State *L, Rille *r, int index, const Sched *sched, int rank) {
  Row row = {.rank = rank, .count = sched->row[rank].count};
  size_t bytes = (size_t)row.count * SPAN_FIELDS * sizeof(double), length;
  int type = lua_rawgeti(L, index, rank + 1);
  if (type == LUA_TSTRING) row.packed = lua_tolstring(L, -1, &length);
  if (type == LUA_TSTRING ? length != bytes
                          : type != LUA_TTABLE || (int)lua_rawlen(L, -1) != row.count)
    raise_value(L, r, "spans[%d] must have one entry for each of the %d actions of rank %d",
                rank + 1, row.count, rank);
  return row;
}

static double number_in(lua_State *L, Rille *r, const Row *row, int i, int k, double fallback) {
  int type = lua_rawgeti(L, -1, k + 1);
  if (type != LUA_TNUMBER && (type != LUA_TNIL || k < 2))
    raise_value(L, r, "spans[%d][%d] must be {start, end, ...}", row->rank + 1, i + 1);
  double value = type == LUA_TNUMBER ? lua_tonumber(L, -1) : fallback;
  lua_pop(L, 1);
  return value;
}

static void read_entry(lua_State *L, Rille *r, const Row *row, int i, double entry[SPAN_FIELDS]) {
  static const double nothing[SPAN_FIELDS] = {[3] = -1};
  if (row->packed) {
    memcpy(entry, row->packed + (size_t)i * SPAN_FIELDS * sizeof *entry,
           SPAN_FIELDS * sizeof *entry);
    return;
  }
  if (lua_rawgeti(L, -1, i + 1) != LUA_TTABLE)
    raise_value(L, r, "spans[%d][%d] must be {start, end, ...}", row->rank + 1, i + 1);
  for (int k = 0; k < SPAN_FIELDS; k++) entry[k] = number_in(L, r, row, i, k, nothing[k]);
  lua_pop(L, 1);
}

// What is to be added to a rank's clock.
static double clock_of(lua_State *L, Rille *r, int index, int rank) {
  if (lua_isnoneornil(L, index)) return 0;
  luaL_checktype(L, index, LUA_TTABLE);
  if (lua_rawgeti(L, index, rank + 1) != LUA_TNUMBER)
    raise_value(L, r, "clocks[%d] must be a number", rank + 1);
  double clock = lua_tonumber(L, -1);
  lua_pop(L, 1);
  return clock;
}

void sched_spans_check(lua_State *L, Rille *r, int index, int clocks, const Sched *sched,
                       SchedArena *arena, SchedMeasured *out) {
  luaL_checktype(L, index, LUA_TTABLE);
  out->first = room(L, r, arena, sched->ranks + 1, sizeof *out->first);
  for (int rank = 0; rank < sched->ranks; rank++)
    out->first[rank + 1] = out->first[rank] + sched->row[rank].count;
  out->span = room(L, r, arena, out->first[sched->ranks], sizeof *out->span);
  out->message = room(L, r, arena, out->first[sched->ranks], sizeof *out->message);
  out->has_messages = false;
  for (int rank = 0; rank < sched->ranks; rank++) {
    double entry[SPAN_FIELDS], clock = clock_of(L, r, clocks, rank);
    Row row = push_row(L, r, index, sched, rank);
    for (int i = 0; i < row.count; i++) {
      int64_t at = out->first[rank] + i;
      read_entry(L, r, &row, i, entry);
      out->span[at] = (SchedSpan){entry[0] + clock, entry[1] + clock, entry[2]};
      int from = entry[3] >= 0 && entry[3] < sched->stages ? (int)entry[3] : -1;
      double sender = from < 0 ? 0 : clock_of(L, r, clocks, sched->holder[from]);
      out->message[at] = (LedgerMessage){from, entry[4] + sender, entry[5] + clock};
      out->has_messages = out->has_messages || entry[3] >= 0;
    }
    lua_pop(L, 1);
  }
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

// sched:ledger(spans, clocks) -> {start, finish, busy, idle, causes, late, link, latest, lateness,
// words}: seconds by rank (from 1); causes[rank + 1] by name; late[a][b]: rank a - 1 was idle
// because b - 1 was late; latest: the rank to blame for most of it, counted from 0. spans[rank +
// 1]: what exec:spans() gave there, or a list of {start, end, waited, from, sent, arrived};
// clocks[rank + 1]: seconds to be added to them.
int sched_ledger(lua_State *L) {
  Rille *r = binding_of(L);
  const Sched *sched = sched_check_box(L, r, 1)->lowered;
  lua_settop(L, 3);
  SchedArena *arena = sched_scratch_push(L);
  SchedMeasured m;
  sched_spans_check(L, r, 2, 3, sched, arena, &m);
  Ledger *ledger;
  Status status =
      ledger_make(arena, &ledger, sched, m.first, m.span, m.has_messages ? m.message : NULL);
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
