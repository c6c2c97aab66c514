// partition_bind - rille.core.partition: units to stages. lua/rille/split.lua is what users see.
#include "lua/binding.h"

#include "parallel/partition.h"

#include <string.h>

// Zeroed memory that Lua owns, left on the stack.
static void *own(lua_State *L, size_t count, size_t size) {
  void *memory = lua_newuserdatauv(L, count * size + 1, 0);
  return memset(memory, 0, count * size + 1);
}

static int size_field(lua_State *L, Rille *r, const char *name) {
  lua_getfield(L, 1, name);
  int64_t value = integer_check(L, r, -1, name);
  lua_pop(L, 1);
  if (value < 0 || value > 1 << 20)
    raise_value(L, r, "partition: %s = %lld is out of range", name, (long long)value);
  return (int)value;
}

// The list of n values in a field; NULL: there is none. What Lua owns is left on the stack.
static void *list_field(lua_State *L, Rille *r, const char *name, int n, bool is_real) {
  if (lua_getfield(L, 1, name) == LUA_TNIL) return NULL;
  int list = lua_gettop(L);
  if (!lua_istable(L, list) || (int)lua_rawlen(L, list) != n)
    raise_value(L, r, "partition: %s must be a list of %d numbers", name, n);
  void *values = own(L, (size_t)n, is_real ? sizeof(double) : sizeof(int));
  for (int i = 0; i < n; i++) {
    lua_rawgeti(L, list, i + 1);
    if (is_real && lua_type(L, -1) != LUA_TNUMBER)
      raise_value(L, r, "partition: %s[%d] is no number", name, i + 1);
    if (is_real)
      ((double *)values)[i] = lua_tonumber(L, -1);
    else
      ((int *)values)[i] = (int)integer_check(L, r, -1, name);
    lua_pop(L, 1);
  }
  return values;
}

static void push_ints(lua_State *L, const int *values, int n) {
  lua_createtable(L, n, 0);
  for (int i = 0; i < n; i++) {
    lua_pushinteger(L, values[i]);
    lua_rawseti(L, -2, i + 1);
  }
}

static void set_number(lua_State *L, const char *name, double value) {
  lua_pushnumber(L, value);
  lua_setfield(L, -2, name);
}

// partition{kind = "uniform" | "balanced" | "given", units, stages, ranks; holder, live: lists by
// stage; cost, kept, state: lists by unit; limit; counts} -> first (stages + 1 numbers from 0 on),
// {rank_cost, stage_cost, total, bytes, is_optimal}
static int partition(lua_State *L) {
  Rille *r = binding_of(L);
  luaL_checktype(L, 1, LUA_TTABLE);
  luaL_checkstack(L, 24, "too many lists");
  lua_getfield(L, 1, "kind");
  const char *kind = luaL_checkstring(L, -1);
  PartitionCase c = {.units = size_field(L, r, "units"),
                     .stages = size_field(L, r, "stages"),
                     .ranks = size_field(L, r, "ranks")};
  if (c.stages < 1 || c.ranks < 1) return raise_value(L, r, "partition: no stages or no ranks");
  c.holder = list_field(L, r, "holder", c.stages, false);
  for (int s = 0; c.holder && s < c.stages; s++)
    if (c.holder[s] < 0 || c.holder[s] >= c.ranks)
      return raise_value(L, r, "partition: stage %d is on rank %d of %d", s, c.holder[s], c.ranks);
  c.live = list_field(L, r, "live", c.stages, false);
  c.cost = list_field(L, r, "cost", c.units, true);
  c.kept = list_field(L, r, "kept", c.units, true);
  c.state = list_field(L, r, "state", c.units, true);
  lua_getfield(L, 1, "limit");
  c.limit = lua_tonumber(L, -1);
  int *first = own(L, (size_t)c.stages + 1, sizeof *first);
  PartitionFigures figures;
  Status status;
  if (strcmp(kind, "uniform") == 0)
    status = partition_uniform(&c, first);
  else if (strcmp(kind, "given") == 0) {
    int n = lua_getfield(L, 1, "counts") == LUA_TTABLE ? (int)lua_rawlen(L, -1) : 0;
    const int *count = list_field(L, r, "counts", n, false);
    status = partition_given(&c, count, n, first);
  } else
    status = partition_balanced(&c, first, &figures);
  if (status == ST_EVALUE) raise_usage(L, r, status);
  check_status(L, r, status);
  push_ints(L, first, c.stages + 1);
  bool is_optimal = strcmp(kind, "balanced") != 0 || figures.is_optimal;
  partition_measure(&c, first, &figures);
  lua_createtable(L, 0, 5);
  set_number(L, "rank_cost", figures.rank_cost);
  set_number(L, "stage_cost", figures.stage_cost);
  set_number(L, "total", figures.total);
  set_number(L, "bytes", figures.bytes);
  lua_pushboolean(L, is_optimal), lua_setfield(L, -2, "is_optimal");
  return 2;
}

void partition_bind(lua_State *L, Rille *r, int rille) {
  lua_getfield(L, rille, "core");
  binding_push(L, r, partition);
  lua_setfield(L, -2, "partition");
  lua_pop(L, 1);
}
