// sched_bind - schedules as Lua objects: made from a name, from rows of action texts or from CSV,
// then checked and lowered (rille.schedule is made of these); the methods of the finished object.
//
// What is wrong with a schedule is no error of the function that found it: those functions give nil
// and the words, and lua/rille/schedule.lua raises them at the script's line.
#include "lua/sched_bind.h"

#include "parallel/partition.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const char SCHED[] = "rille.schedule", SCRATCH[] = "rille.schedule memory";

// ---- memory ----------------------------------------------------------------------------------

static int close_box(lua_State *L) {
  SchedBox *box = lua_touserdata(L, 1);
  sched_heap_close(&box->arena);
  box->sched = box->lowered = NULL;
  return 0;
}

static int close_scratch(lua_State *L) {
  sched_heap_close(lua_touserdata(L, 1));
  return 0;
}

SchedArena *sched_scratch_push(lua_State *L) {
  SchedArena *arena = box_push(L, SCRATCH, sizeof *arena);
  sched_heap_open(arena);
  return arena;
}

// A schedule under construction.
static SchedBox *box_open(lua_State *L, Rille *r, int index) {
  SchedBox *box = box_check(L, r, index, SCHED);
  if (box->lowered) raise_value(L, r, "this schedule is finished: it cannot be changed");
  return box;
}

const SchedBox *sched_check_box(lua_State *L, Rille *r, int index) {
  const SchedBox *box = box_check(L, r, index, SCHED);
  if (!box->lowered) raise_value(L, r, "this schedule is not finished");
  return box;
}

// nil and the words, for a schedule that is wrong; raises where memory is short.
static int refuse(lua_State *L, Rille *r, const SchedArena *arena, Status status) {
  if (status == ST_ENOMEM) {
    (void)fail(status, "%s", arena->message);
    return raise_status(L, r, status, NULL, 0);
  }
  lua_pushnil(L);
  lua_pushstring(L, arena->message);
  return 2;
}

static void enough(lua_State *L, Rille *r, SchedArena *arena, const void *memory) {
  if (!memory) refuse(L, r, arena, ST_ENOMEM);
}

// ---- fields of tables ------------------------------------------------------------------------

static int field_int(lua_State *L, Rille *r, int table, const char *name, int fallback) {
  int type = lua_getfield(L, table, name);
  int64_t value = type == LUA_TNIL ? fallback : integer_check(L, r, -1, name);
  lua_pop(L, 1);
  if (value < INT32_MIN || value > INT32_MAX)
    raise_value(L, r, "%s = %lld is out of range", name, (long long)value);
  return (int)value;
}

static double number_at(lua_State *L, Rille *r, int index, const char *what) {
  if (lua_type(L, index) != LUA_TNUMBER || !(lua_tonumber(L, index) >= 0) ||
      isinf(lua_tonumber(L, index)))
    raise_value(L, r, "%s: a number from 0 on is wanted, got %s", what,
                luaL_tolstring(L, index, NULL));
  return lua_tonumber(L, index);
}

static double field_number(lua_State *L, Rille *r, int table, const char *name, double fallback) {
  double value = fallback;
  if (lua_getfield(L, table, name) != LUA_TNIL) value = number_at(L, r, -1, name);
  lua_pop(L, 1);
  return value;
}

// Raises if the table has a string key that is none of the names.
static void check_keys(lua_State *L, Rille *r, int table, const char *what,
                       const char *const *names, int n) {
  luaL_checktype(L, table, LUA_TTABLE);
  lua_pushnil(L);
  while (lua_next(L, table)) {
    lua_pop(L, 1);
    if (lua_type(L, -1) != LUA_TSTRING) continue;
    const char *key = lua_tostring(L, -1), *near;
    bool is_known = false;
    for (int i = 0; i < n; i++) is_known = is_known || strcmp(key, names[i]) == 0;
    if (is_known) continue;
    near = nearest_name(key, names, n);
    raise_value(L, r,
                near ? "%s has no option \"%s\"; did you mean \"%s\"?" : "%s has no option \"%s\"",
                what, key, near);
  }
}

// ---- costs -----------------------------------------------------------------------------------

// Times of a stage's F, I, W and B.
typedef struct StageCosts {
  double F, I, W, B;
} StageCosts;

static double stage_price(const void *user, Action action) {
  const StageCosts *c = (const StageCosts *)user + action.stage;
  return action.kind == ACTION_F   ? c->F
         : action.kind == ACTION_I ? c->I
         : action.kind == ACTION_W ? c->W
                                   : c->B;
}

// The list of numbers in a field, exactly n of them; NULL: there is none.
static double *number_list(lua_State *L, Rille *r, int table, const char *name, int n,
                           SchedArena *arena) {
  double *list = NULL;
  if (lua_getfield(L, table, name) != LUA_TNIL) {
    if (!lua_istable(L, -1) || (int)lua_rawlen(L, -1) != n)
      raise_value(L, r, "%s: a list of %d numbers is wanted", name, n);
    list = sched_alloc(arena, (size_t)n, sizeof *list);
    enough(L, r, arena, list);
    for (int i = 0; i < n; i++) {
      lua_rawgeti(L, -1, i + 1);
      list[i] = number_at(L, r, -1, name);
      lua_pop(L, 1);
    }
  }
  lua_pop(L, 1);
  return list;
}

// The list of lists in a field: n of at least `least`, at most `most` numbers, the rest NAN.
static double *number_rows(lua_State *L, Rille *r, int table, const char *name, int n, int least,
                           int most, SchedArena *arena) {
  double *rows = NULL;
  if (lua_getfield(L, table, name) != LUA_TNIL) {
    if (!lua_istable(L, -1) || (int)lua_rawlen(L, -1) != n)
      raise_value(L, r, "%s: a list with one entry for each of the %d stages is wanted", name, n);
    rows = sched_alloc(arena, (size_t)n * (size_t)most, sizeof *rows);
    enough(L, r, arena, rows);
    for (int i = 0; i < n; i++) {
      lua_rawgeti(L, -1, i + 1);
      int length = lua_istable(L, -1) ? (int)lua_rawlen(L, -1) : 0;
      if (length < least || length > most)
        raise_value(L, r, "%s: entry %d must be a list of %d to %d numbers", name, i + 1, least,
                    most);
      for (int k = 0; k < most; k++) {
        rows[i * most + k] = (double)NAN;
        if (k >= length) continue;
        lua_rawgeti(L, -1, k + 1);
        rows[i * most + k] = number_at(L, r, -1, name);
        lua_pop(L, 1);
      }
      lua_pop(L, 1);
    }
  }
  lua_pop(L, 1);
  return rows;
}

static const char *const cost_names[] = {"F",
                                         "I",
                                         "W",
                                         "overlap",
                                         "hop",
                                         "message_bytes",
                                         "bytes_per_second",
                                         "reduce_grad",
                                         "reduce_tied",
                                         "step",
                                         "stage_factor",
                                         "mb_factor",
                                         "stage_costs",
                                         "bytes",
                                         "width",
                                         "unit_us"};

void sched_costs_check(lua_State *L, Rille *r, int index, const Sched *sched, SchedArena *arena,
                       SchedCosts *out) {
  *out = sched_costs(1, 1, 1);
  if (lua_isnoneornil(L, index)) return;
  index = lua_absindex(L, index);
  check_keys(L, r, index, "costs", cost_names, sizeof cost_names / sizeof *cost_names);
  int stages = sched->copies * sched->stages;
  out->F = field_number(L, r, index, "F", 1);
  out->I = field_number(L, r, index, "I", 1);
  out->W = field_number(L, r, index, "W", 1);
  out->overlap = field_number(L, r, index, "overlap", -1);
  out->hop = field_number(L, r, index, "hop", 0);
  out->message_bytes = field_number(L, r, index, "message_bytes", 0);
  out->bytes_per_second = field_number(L, r, index, "bytes_per_second", 0);
  out->reduce_grad = field_number(L, r, index, "reduce_grad", 0);
  out->reduce_tied = field_number(L, r, index, "reduce_tied", 0);
  out->step = field_number(L, r, index, "step", 0);
  out->stage_factor = number_list(L, r, index, "stage_factor", stages, arena);
  out->mb_factor = number_list(L, r, index, "mb_factor", sched->mbs, arena);
  const double *rows = number_rows(L, r, index, "stage_costs", stages, 3, 4, arena);
  if (rows) {
    StageCosts *by_stage = sched_alloc(arena, (size_t)stages, sizeof *by_stage);
    enough(L, r, arena, by_stage);
    for (int i = 0; i < stages; i++) {
      const double *c = rows + 4 * i;
      by_stage[i] = (StageCosts){c[0], c[1], c[2], isnan(c[3]) ? c[1] + c[2] : c[3]};
    }
    out->price = stage_price;
    out->user = by_stage;
  }
  const double *kept = number_rows(L, r, index, "bytes", stages, 3, 3, arena);
  if (kept) {
    SchedBytes *bytes = sched_alloc(arena, (size_t)stages, sizeof *bytes);
    enough(L, r, arena, bytes);
    for (int i = 0; i < stages; i++)
      bytes[i] = (SchedBytes){kept[3 * i], kept[3 * i + 1], kept[3 * i + 2]};
    out->bytes = bytes;
  }
}

// ---- making one ------------------------------------------------------------------------------

// The placement in field `placement`; a list of ranks becomes *holder.
static SchedPlacement placement_of(lua_State *L, Rille *r, SchedArena *arena, int stages,
                                   int **holder) {
  SchedPlacement placement = PLACE_LOOP;
  if (lua_getfield(L, 1, "placement") == LUA_TTABLE) {
    placement = PLACE_GIVEN;
    *holder = sched_alloc(arena, (size_t)stages, sizeof **holder);
    enough(L, r, arena, *holder);
    for (int i = 0; i < stages; i++) {
      lua_rawgeti(L, -1, i + 1);
      (*holder)[i] = (int)integer_check(L, r, -1, "placement");
      lua_pop(L, 1);
    }
  } else {
    const char *word = luaL_checkstring(L, -1);
    placement = strcmp(word, "v") == 0      ? PLACE_V
                : strcmp(word, "wave") == 0 ? PLACE_WAVE
                                            : PLACE_LOOP;
  }
  lua_pop(L, 1);
  return placement;
}

// sched_new{name =, and type = | csv = | placement =; ranks, chunks, mbs, group} -> a schedule
// under construction, or nil and words. Of a known type and of CSV it has its rows.
static int new_sched(lua_State *L) {
  Rille *r = binding_of(L);
  luaL_checktype(L, 1, LUA_TTABLE);
  lua_settop(L, 1);
  lua_getfield(L, 1, "name");
  const char *name = luaL_checkstring(L, 2);
  bool is_known = lua_getfield(L, 1, "type") != LUA_TNIL;
  bool is_csv = lua_getfield(L, 1, "csv") != LUA_TNIL;
  SchedCase sizes = {.ranks = field_int(L, r, 1, "ranks", 0),
                     .chunks = field_int(L, r, 1, "chunks", 0),
                     .mbs = field_int(L, r, 1, "mbs", 0),
                     .group = field_int(L, r, 1, "group", 0)};
  SchedBox *box = box_push(L, SCHED, sizeof *box);
  sched_heap_open(&box->arena);
  Status status;
  if (is_known) {
    const SchedType *type = sched_find(luaL_checkstring(L, 3));
    if (!type) return raise_value(L, r, "there is no schedule %s", lua_tostring(L, 3));
    status = sched_generate(&box->arena, &box->sched, type, &sizes);
  } else if (is_csv) {
    size_t length;
    const char *text = luaL_checklstring(L, 4, &length);
    status = sched_parse_csv(&box->arena, &box->sched, name, text, length);
  } else {
    int *holder = NULL;
    SchedPlacement placement = placement_of(L, r, &box->arena, sizes.ranks * sizes.chunks, &holder);
    status = sched_new(&box->arena, &box->sched, name, sizes.ranks, sizes.chunks, sizes.mbs,
                       placement, holder);
  }
  if (status != ST_OK) return refuse(L, r, &box->arena, status);
  lua_settop(L, 5);
  return 1;
}

// sched_push(box, rank, texts) -> true, or nil, words and which of the texts (from 1).
static int push_texts(lua_State *L) {
  Rille *r = binding_of(L);
  SchedBox *box = box_open(L, r, 1);
  int rank = (int)integer_check(L, r, 2, "rank");
  int n = (int)lua_rawlen(L, 3);
  for (int i = 1; i <= n; i++) {
    size_t length;
    lua_rawgeti(L, 3, i);
    const char *text = luaL_checklstring(L, -1, &length);
    Status status = sched_push_text(box->sched, rank, text, length);
    if (status != ST_OK) {
      int results = refuse(L, r, &box->arena, status);
      lua_pushinteger(L, i);
      return results + 1;
    }
    lua_pop(L, 1);
  }
  lua_pushboolean(L, 1);
  return 1;
}

// sched_declare(box, rank, chunks), sched_edge(box, from, to, has_grad), sched_tied(box, stages)
// -> true, or nil and words.
static int answer(lua_State *L, Rille *r, const SchedBox *box, Status status) {
  if (status != ST_OK) return refuse(L, r, &box->arena, status);
  lua_pushboolean(L, 1);
  return 1;
}

static int declare(lua_State *L) {
  Rille *r = binding_of(L);
  SchedBox *box = box_open(L, r, 1);
  int rank = (int)integer_check(L, r, 2, "rank");
  return answer(L, r, box, sched_declare(box->sched, rank, integer_check(L, r, 3, "memory")));
}

static int add_edge(lua_State *L) {
  Rille *r = binding_of(L);
  SchedBox *box = box_open(L, r, 1);
  int from = (int)integer_check(L, r, 2, "from"), to = (int)integer_check(L, r, 3, "to");
  return answer(L, r, box, sched_add_edge(box->sched, from, to, lua_toboolean(L, 4)));
}

static int add_tied(lua_State *L) {
  Rille *r = binding_of(L);
  SchedBox *box = box_open(L, r, 1);
  int n = (int)lua_rawlen(L, 2);
  int *stages = sched_alloc(&box->arena, (size_t)n, sizeof *stages);
  enough(L, r, &box->arena, stages);
  for (int i = 0; i < n; i++) {
    lua_rawgeti(L, 2, i + 1);
    stages[i] = (int)integer_check(L, r, -1, "tied");
    lua_pop(L, 1);
  }
  return answer(L, r, box, sched_add_tied(box->sched, stages, n));
}

static void write_buffer(void *user, const char *bytes, size_t count) {
  luaL_addlstring(user, bytes, count);
}

static int push_report(lua_State *L, const Sched *sched, const SchedReport *report, int width) {
  luaL_Buffer text;
  luaL_buffinit(L, &text);
  sched_print_report(&(SchedOut){write_buffer, &text}, sched, report, width);
  luaL_pushresult(&text);
  return 1;
}

// sched_finish(box, costs, width): checks, lowers, checks again -> true, or nil and the report.
static int finish(lua_State *L) {
  Rille *r = binding_of(L);
  SchedBox *box = box_open(L, r, 1);
  SchedArena *arena = &box->arena;
  SchedCosts costs;
  SchedReport *report;
  Sched *lowered = box->sched;
  sched_costs_check(L, r, 2, box->sched, arena, &costs);
  int width = (int)luaL_optinteger(L, 3, 100);
  Status status = sched_check(arena, &report, box->sched);
  bool is_sound = status == ST_OK && !report->broken;
  if (is_sound && !box->sched->lowered) status = sched_lower(arena, &lowered, box->sched, &costs);
  if (status == ST_OK && is_sound) status = sched_check(arena, &report, lowered);
  if (status != ST_OK) return refuse(L, r, arena, status);
  if (report->broken) {
    lua_pushnil(L);
    return 1 + push_report(L, lowered, report, width);
  }
  box->lowered = lowered;
  box->report = report;
  lua_pushboolean(L, 1);
  return 1;
}

// ---- what is known of a schedule -------------------------------------------------------------

static int get_ranks(lua_State *L) {
  lua_pushinteger(L, sched_check_box(L, binding_of(L), 1)->sched->ranks);
  return 1;
}
static int get_stages(lua_State *L) {
  lua_pushinteger(L, sched_check_box(L, binding_of(L), 1)->sched->stages);
  return 1;
}
static int get_chunks(lua_State *L) {
  lua_pushinteger(L, sched_check_box(L, binding_of(L), 1)->sched->chunks);
  return 1;
}
static int get_mbs(lua_State *L) {
  lua_pushinteger(L, sched_check_box(L, binding_of(L), 1)->sched->mbs);
  return 1;
}
static int get_name(lua_State *L) {
  lua_pushstring(L, sched_check_box(L, binding_of(L), 1)->sched->name);
  return 1;
}

static int index_check(lua_State *L, Rille *r, int arg, int n, const char *what) {
  int64_t value = integer_check(L, r, arg, what);
  if (value < 0 || value >= n)
    raise_value(L, r, "%s %lld: they count from 0 to %d", what, (long long)value, n - 1);
  return (int)value;
}

// sched:holder(stage) -> the rank that holds it
static int holder(lua_State *L) {
  Rille *r = binding_of(L);
  const Sched *sched = sched_check_box(L, r, 1)->sched;
  lua_pushinteger(L, sched->holder[index_check(L, r, 2, sched->copies * sched->stages, "stage")]);
  return 1;
}

// sched:live() -> how many microbatches of each stage are kept at once, at most
static int live(lua_State *L) {
  Rille *r = binding_of(L);
  const Sched *sched = sched_check_box(L, r, 1)->sched;
  int stages = sched->copies * sched->stages;
  int *count = lua_newuserdatauv(L, (size_t)stages * sizeof *count, 0);
  partition_live(sched, count);
  lua_createtable(L, stages, 0);
  for (int s = 0; s < stages; s++) {
    lua_pushinteger(L, count[s]);
    lua_rawseti(L, -2, s + 1);
  }
  return 1;
}

// Pushes {kind =, stage =, mb =, peer =}; what an action has not is not there.
static void push_action(lua_State *L, Action action) {
  lua_createtable(L, 0, 4);
  lua_pushstring(L, action.kind == ACTION_OVERLAP_F_B ? "OVERLAP_F_B" : action_text(action.kind));
  lua_setfield(L, -2, "kind");
  lua_pushinteger(L, action.stage), lua_setfield(L, -2, "stage");
  if (action.mb >= 0) lua_pushinteger(L, action.mb), lua_setfield(L, -2, "mb");
  if (action.peer >= 0) lua_pushinteger(L, action.peer), lua_setfield(L, -2, "peer");
}

// sched:row(rank) -> the lowered list of a rank
static int row(lua_State *L) {
  Rille *r = binding_of(L);
  const Sched *sched = sched_check_box(L, r, 1)->lowered;
  const SchedRow *row = &sched->row[index_check(L, r, 2, sched->ranks, "rank")];
  lua_createtable(L, row->count, 0);
  for (int i = 0; i < row->count; i++) {
    push_action(L, row->action[i]);
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

// sched:order(rank) -> the texts of the compute actions of a rank, as generated
static int order(lua_State *L) {
  Rille *r = binding_of(L);
  const Sched *sched = sched_check_box(L, r, 1)->sched;
  int rank = index_check(L, r, 2, sched->ranks, "rank"), n = 0;
  const SchedRow *row = &sched->row[rank];
  lua_createtable(L, row->count, 0);
  for (int i = 0; i < row->count;) {
    luaL_Buffer text;
    luaL_buffinit(L, &text);
    i += sched_print_cell(&(SchedOut){write_buffer, &text}, row, i);
    luaL_pushresult(&text);
    lua_rawseti(L, -2, ++n);
  }
  return 1;
}

// Sets a list of n numbers, in chunks, as a field of the table on top; those below 0 are left out.
static void set_counts(lua_State *L, const char *name, const int64_t *count, int n) {
  lua_createtable(L, n, 0);
  for (int i = 0; i < n; i++) {
    if (count[i] < 0)
      lua_pushboolean(L, 0);
    else
      lua_pushinteger(L, count[i]);
    lua_rawseti(L, -2, i + 1);
  }
  lua_setfield(L, -2, name);
}

// sched:report() -> {peaks, bound (false: not declared), depths, is_to_rounding, warning, words}
static int report(lua_State *L) {
  const SchedBox *box = sched_check_box(L, binding_of(L), 1);
  const SchedReport *report = box->report;
  lua_newtable(L);
  set_counts(L, "peaks", report->peak, box->sched->ranks);
  set_counts(L, "bound", box->sched->bound, box->sched->ranks);
  lua_createtable(L, report->depths, 0);
  for (int i = 0; i < report->depths; i++) {
    SchedDepth depth = report->depth[i];
    lua_createtable(L, 0, 3);
    lua_pushinteger(L, depth.from), lua_setfield(L, -2, "from");
    lua_pushinteger(L, depth.to), lua_setfield(L, -2, "to");
    lua_pushinteger(L, depth.depth), lua_setfield(L, -2, "depth");
    lua_rawseti(L, -2, i + 1);
  }
  lua_setfield(L, -2, "depths");
  lua_pushinteger(L, report->broken), lua_setfield(L, -2, "broken");
  lua_pushboolean(L, report->is_to_rounding), lua_setfield(L, -2, "is_to_rounding");
  if (*box->sched->warning) {
    lua_pushstring(L, box->sched->warning);
    lua_setfield(L, -2, "warning");
  }
  push_report(L, box->lowered, report, 0);
  lua_setfield(L, -2, "words");
  return 1;
}

// ---- simulation ------------------------------------------------------------------------------

// Costs from argument 2, and what they cost. The scratch memory is left on the stack.
static SchedSim *simulate_args(lua_State *L, Rille *r, const Sched *sched, SchedCosts *costs,
                               SchedArena **arena) {
  SchedSim *sim;
  lua_settop(L, 2);
  *arena = sched_scratch_push(L);
  sched_costs_check(L, r, 2, sched, *arena, costs);
  Status status = sched_simulate(*arena, &sim, sched, costs);
  if (status == ST_OK) return sim;
  (void)fail(status, "%s", (*arena)->message);
  raise_status(L, r, status, NULL, 0);
}

static void push_spans(lua_State *L, const SchedSim *sim, int ranks) {
  lua_createtable(L, ranks, 0);
  for (int rank = 0; rank < ranks; rank++) {
    int64_t first = sim->first[rank], count = sim->first[rank + 1] - first;
    lua_createtable(L, (int)count, 0);
    for (int64_t i = 0; i < count; i++) {
      SchedSpan span = sim->span[first + i];
      lua_createtable(L, 3, 0);
      lua_pushnumber(L, span.start), lua_rawseti(L, -2, 1);
      lua_pushnumber(L, span.end), lua_rawseti(L, -2, 2);
      lua_pushnumber(L, span.waited), lua_rawseti(L, -2, 3);
      lua_rawseti(L, -2, i + 1);
    }
    lua_rawseti(L, -2, rank + 1);
  }
}

static void set_numbers(lua_State *L, const char *name, const double *value, int n) {
  lua_createtable(L, n, 0);
  for (int i = 0; i < n; i++) {
    lua_pushnumber(L, value[i]);
    lua_rawseti(L, -2, i + 1);
  }
  lua_setfield(L, -2, name);
}

// sched:simulate(costs) -> {makespan, makespan_bubble, span_bubble, busy, peaks, peak_bytes,
// spans}; spans[rank + 1][i] = {start, end, waited} of row(rank)[i]
static int simulate(lua_State *L) {
  Rille *r = binding_of(L);
  const Sched *sched = sched_check_box(L, r, 1)->lowered;
  SchedCosts costs;
  SchedArena *arena;
  const SchedSim *sim = simulate_args(L, r, sched, &costs, &arena);
  lua_newtable(L);
  lua_pushnumber(L, sim->makespan), lua_setfield(L, -2, "makespan");
  lua_pushnumber(L, sim->makespan_bubble), lua_setfield(L, -2, "makespan_bubble");
  lua_pushnumber(L, sim->span_bubble), lua_setfield(L, -2, "span_bubble");
  set_numbers(L, "busy", sim->busy, sched->ranks);
  set_numbers(L, "peak_bytes", sim->peak_bytes, sched->ranks);
  set_counts(L, "peaks", sim->peak, sched->ranks);
  push_spans(L, sim, sched->ranks);
  lua_setfield(L, -2, "spans");
  sched_heap_close(arena);
  return 1;
}

// sched:bubbles(costs) -> makespan, makespan bubble, span bubble
static int bubbles(lua_State *L) {
  Rille *r = binding_of(L);
  const Sched *sched = sched_check_box(L, r, 1)->lowered;
  SchedCosts costs;
  SchedArena *arena;
  const SchedSim *sim = simulate_args(L, r, sched, &costs, &arena);
  lua_pushnumber(L, sim->makespan);
  lua_pushnumber(L, sim->makespan_bubble);
  lua_pushnumber(L, sim->span_bubble);
  sched_heap_close(arena);
  return 3;
}

// ---- text and drawings -----------------------------------------------------------------------

typedef enum Drawing { DRAW_CSV, DRAW_JSON, DRAW_SVG, DRAW_HTML, DRAW_TRACE, DRAW_TEXT } Drawing;

// Of compute actions, as `rille schedule` draws them; options: costs, and width or unit_us.
static int draw(lua_State *L, Drawing drawing) {
  Rille *r = binding_of(L);
  const SchedBox *box = sched_check_box(L, r, 1);
  const Sched *sched = box->sched;
  SchedCosts costs;
  SchedArena *arena;
  const SchedSim *sim = simulate_args(L, r, sched, &costs, &arena);
  SchedTerminal terminal = {.width = 100, .colour = SCHED_COLOUR_NONE};
  double unit_us = 1000;
  if (lua_istable(L, 2)) {
    terminal.width = field_int(L, r, 2, "width", 100);
    unit_us = field_number(L, r, 2, "unit_us", 1000);
  }
  luaL_Buffer text;
  luaL_buffinit(L, &text);
  SchedOut out = {write_buffer, &text};
  switch (drawing) {
  case DRAW_CSV: sched_print_csv(&out, sched); break;
  case DRAW_JSON: sched_print_json(&out, sched, sim, &costs, box->report); break;
  case DRAW_SVG: sched_draw_svg(&out, sched, sim, &costs); break;
  case DRAW_HTML: sched_draw_html(&out, sched, sim, &costs); break;
  case DRAW_TRACE: sched_draw_trace(&out, sched, sim, unit_us); break;
  case DRAW_TEXT: sched_draw_terminal(&out, sched, sim, &terminal); break;
  }
  luaL_pushresult(&text);
  sched_heap_close(arena);
  return 1;
}

// Both as they look on a terminal, on one scale.
static void push_timelines(lua_State *L, const Sched *sched, const SchedSim *predicted,
                           const SchedSim *measured) {
  const SchedTerminal terminal = {.width = 100};
  luaL_Buffer text;
  luaL_buffinit(L, &text);
  SchedOut out = {write_buffer, &text};
  const SchedTimeline both[] = {{"predicted, ms", predicted}, {"measured, ms", measured}};
  sched_draw_terminals(&out, sched, both, 2, &terminal);
  luaL_pushresult(&text);
}

// sched:compare(spans, clocks, hop) -> an SVG image of a measured step below what a simulation with
// its mean times predicts, and {predicted =, measured =} steps in seconds. spans and clocks as for
// sched:ledger; hop: seconds that a message takes in the prediction (0).
static int compare(lua_State *L) {
  Rille *r = binding_of(L);
  const Sched *sched = sched_check_box(L, r, 1)->lowered;
  lua_settop(L, 4);
  double hop = lua_isnil(L, 4) ? 0 : number_at(L, r, 4, "compare: hop");
  SchedArena *arena = sched_scratch_push(L);
  SchedMeasured m;
  SchedCosts costs = {0};
  SchedSim *measured, *predicted;
  sched_spans_check(L, r, 2, 3, sched, arena, &m);
  Status status = sched_measured(arena, &measured, sched, m.span, 1000);
  if (status == ST_OK) status = sched_mean_costs(arena, &costs, sched, measured);
  costs.hop = 1000 * hop;
  if (status == ST_OK) status = sched_simulate(arena, &predicted, sched, &costs);
  if (status != ST_OK) {
    (void)fail(status, "%s", arena->message);
    return raise_status(L, r, status, NULL, 0);
  }
  luaL_Buffer text;
  luaL_buffinit(L, &text);
  sched_draw_compare(&(SchedOut){write_buffer, &text}, sched, predicted, measured);
  luaL_pushresult(&text);
  lua_createtable(L, 0, 5);
  push_timelines(L, sched, predicted, measured);
  lua_setfield(L, -2, "text");
  lua_pushnumber(L, predicted->makespan / 1000), lua_setfield(L, -2, "predicted");
  lua_pushnumber(L, measured->makespan / 1000), lua_setfield(L, -2, "measured");
  lua_pushnumber(L, predicted->makespan_bubble / 1000), lua_setfield(L, -2, "predicted_bubble");
  lua_pushnumber(L, measured->makespan_bubble / 1000), lua_setfield(L, -2, "measured_bubble");
  sched_heap_close(arena);
  return 2;
}

static int draw_csv(lua_State *L) { return draw(L, DRAW_CSV); }
static int draw_json(lua_State *L) { return draw(L, DRAW_JSON); }
static int draw_svg(lua_State *L) { return draw(L, DRAW_SVG); }
static int draw_html(lua_State *L) { return draw(L, DRAW_HTML); }
static int draw_trace(lua_State *L) { return draw(L, DRAW_TRACE); }
static int draw_text(lua_State *L) { return draw(L, DRAW_TEXT); }

static int tostring(lua_State *L) {
  const SchedBox *box = box_check(L, binding_of(L), 1, SCHED);
  const Sched *sched = box->sched;
  lua_pushfstring(L, "schedule %s: %d ranks, %d stages, %d microbatches", sched->name, sched->ranks,
                  sched->stages, sched->mbs);
  return 1;
}

// ---- known schedules -------------------------------------------------------------------------

// sched_types() -> a list of {name, alias, help, placement, chunks, chunks_min, chunks_max (0:
// any), chunks_step}
static int list_types(lua_State *L) {
  int count;
  const SchedType *type = sched_types(&count);
  lua_createtable(L, count, 0);
  for (int i = 0; i < count; i++, type++) {
    lua_createtable(L, 0, 8);
    lua_pushstring(L, type->name), lua_setfield(L, -2, "name");
    lua_pushstring(L, type->alias), lua_setfield(L, -2, "alias");
    lua_pushstring(L, type->help), lua_setfield(L, -2, "help");
    lua_pushinteger(L, type->chunks), lua_setfield(L, -2, "chunks");
    lua_pushinteger(L, type->chunks_min), lua_setfield(L, -2, "chunks_min");
    lua_pushinteger(L, type->chunks_max), lua_setfield(L, -2, "chunks_max");
    lua_pushinteger(L, type->chunks_step), lua_setfield(L, -2, "chunks_step");
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

// sched_find(name or alias) -> the name; or nil and the nearest, nil if none is near
static int find_type(lua_State *L) {
  const char *name = luaL_checkstring(L, 1);
  const SchedType *type = sched_find(name);
  lua_pushstring(L, type ? type->name : NULL);
  if (type) return 1;
  lua_pushstring(L, sched_nearest(name));
  return 2;
}

// ---- the command line ------------------------------------------------------------------------

typedef struct ScriptLoad {
  const char *path;
  const SchedCase *sizes;
} ScriptLoad;

// Leaves the schedule on top.
static int load_script(lua_State *L) {
  const ScriptLoad *load = lua_touserdata(L, 1);
  lua_getglobal(L, "require");
  lua_pushliteral(L, "rille.schedule");
  lua_call(L, 1, 1);
  lua_getfield(L, -1, "unchecked");
  lua_pushstring(L, load->path);
  lua_createtable(L, 0, 4);
  lua_pushinteger(L, load->sizes->ranks), lua_setfield(L, -2, "pp");
  lua_pushinteger(L, load->sizes->mbs), lua_setfield(L, -2, "microbatches");
  if (load->sizes->chunks)
    lua_pushinteger(L, load->sizes->chunks), lua_setfield(L, -2, "stages_per_rank");
  if (load->sizes->group) lua_pushinteger(L, load->sizes->group), lua_setfield(L, -2, "group");
  lua_call(L, 2, 1);
  luaL_checkudata(L, -1, SCHED);
  lua_pushvalue(L, -1);
  lua_setfield(L, LUA_REGISTRYINDEX, "rille.schedule.loaded"); // keeps it alive
  return 1;
}

int sched_load_script(void *user, const char *path, const SchedCase *sizes, Sched **out,
                      FILE *err) {
  lua_State *L = user;
  ScriptLoad load = {path, sizes};
  lua_pushcfunction(L, load_script);
  lua_pushlightuserdata(L, &load);
  if (lua_pcall(L, 1, 1, 0) == LUA_OK) {
    *out = ((SchedBox *)lua_touserdata(L, -1))->sched;
    return 0;
  }
  const char *words = lua_tostring(L, -1);
  fprintf(err, "rille schedule: %s\n", words ? words : "an error that is no string");
  return is_usage(L, -1) ? 2 : 1;
}

// ---- tables ----------------------------------------------------------------------------------

static const luaL_Reg functions[] = {
    {"sched_new", new_sched},    {"sched_push", push_texts}, {"sched_declare", declare},
    {"sched_edge", add_edge},    {"sched_tied", add_tied},   {"sched_finish", finish},
    {"sched_types", list_types}, {"sched_find", find_type},  {NULL, NULL},
};

static const luaL_Reg methods[] = {
    {"name", get_name},     {"ranks", get_ranks}, {"stages", get_stages}, {"chunks", get_chunks},
    {"mbs", get_mbs},       {"holder", holder},   {"live", live},         {"row", row},
    {"order", order},       {"report", report},   {"compare", compare},   {"ledger", sched_ledger},
    {"simulate", simulate}, {"bubbles", bubbles}, {"csv", draw_csv},      {"json", draw_json},
    {"svg", draw_svg},      {"html", draw_html},  {"trace", draw_trace},  {"text", draw_text},
    {NULL, NULL},
};

static const luaL_Reg metamethods[] = {{"__gc", close_box}, {"__tostring", tostring}, {NULL, NULL}};
static const luaL_Reg scratch_metamethods[] = {{"__gc", close_scratch}, {NULL, NULL}};

void sched_bind(lua_State *L, Rille *r, int rille) {
  box_bind(L, r, SCHED, methods, metamethods);
  box_bind(L, r, SCRATCH, NULL, scratch_metamethods);
  lua_getfield(L, rille, "core");
  binding_register(L, r, functions);
  lua_pop(L, 1);
}
