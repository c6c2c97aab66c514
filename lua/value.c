// value - tensors, dtypes, shapes and options, from Lua and to Lua.
#include "lua/binding.h"

#include <stdio.h>
#include <string.h>

// ---- garbage: Lua's collector does not see tensor bytes, so their allocation drives its steps

enum {
  GC_SLICES = 32,      // steps that make up a cycle
  GC_FLOOR = 16 << 20, // bytes of garbage that are always allowed
};

// A cycle should end before garbage reaches half of what is alive (or GC_FLOOR): each slice of
// that debt pays for its share of the heap's marking and sweeping.
static void collect(lua_State *L, Rille *r, size_t debt) {
  size_t allowed = pool_total(r->ctx->pool).current / 2;
  if (allowed < GC_FLOOR) allowed = GC_FLOOR;
  if (debt < allowed / GC_SLICES) return;
  pool_debt(r->ctx->pool, 1);
  lua_gc(L, LUA_GCSTEP, 1 + 4 * lua_gc(L, LUA_GCCOUNT) / GC_SLICES);
}

void push_owned(lua_State *L, Rille *r, Tensor *owned) {
  Tensor **slot = lua_newuserdatauv(L, sizeof *slot, 0);
  *slot = owned;
  lua_rawgeti(L, LUA_REGISTRYINDEX, r->tensor_meta_ref);
  lua_setmetatable(L, -2);
  size_t debt = pool_debt(r->ctx->pool, 0);
  if (debt > GC_FLOOR / GC_SLICES) collect(L, r, debt);
}

void push_tensor(lua_State *L, Rille *r, Tensor *owned) {
  Status status = r->ctx->scope ? scope_adopt(r->ctx, owned) : ST_OK;
  push_owned(L, r, owned);
  if (status != ST_OK) raise_status(L, r, status, NULL, 0);
}

int push_result(lua_State *L, Rille *r, Status status, Tensor **result) {
  if (status != ST_OK) return raise_status(L, r, status, NULL, 0);
  push_tensor(L, r, *result);
  return 1;
}

Tensor *tensor_check(lua_State *L, Rille *r, int index, const char *what) {
  Tensor *t = tensor_at(L, r, index);
  if (!t) raise_value(L, r, "%s must be a tensor, got %s", what, luaL_typename(L, index));
  return t;
}

int64_t integer_check(lua_State *L, Rille *r, int index, const char *what) {
  int is_integer;
  lua_Integer value = lua_tointegerx(L, index, &is_integer);
  if (!is_integer || lua_type(L, index) != LUA_TNUMBER) {
    if (lua_type(L, index) == LUA_TNUMBER)
      raise_value(L, r, "%s must be an integer, got %f", what, lua_tonumber(L, index));
    raise_value(L, r, "%s must be an integer, got %s", what, luaL_typename(L, index));
  }
  return value;
}

const char *string_check(lua_State *L, Rille *r, int index, const char *what) {
  if (lua_type(L, index) != LUA_TSTRING)
    raise_value(L, r, "%s must be a string, got %s", what, luaL_typename(L, index));
  return lua_tostring(L, index);
}

double number_check(lua_State *L, Rille *r, int index, const char *what) {
  if (lua_type(L, index) != LUA_TNUMBER)
    raise_value(L, r, "%s must be a number, got %s", what, luaL_typename(L, index));
  return lua_tonumber(L, index);
}

void table_check(lua_State *L, Rille *r, int index, const char *what) {
  if (!lua_istable(L, index))
    raise_value(L, r, "%s must be a table, got %s", what, luaL_typename(L, index));
}

// A function, or what has a metamethod __call (a module).
void callable_check(lua_State *L, Rille *r, int index, const char *what) {
  if (lua_isfunction(L, index)) return;
  if (luaL_getmetafield(L, index, "__call") == LUA_TNIL)
    raise_value(L, r, "%s must be a function, got %s", what, luaL_typename(L, index));
  lua_pop(L, 1);
}

DType dtype_check(lua_State *L, Rille *r, int index) {
  if (lua_type(L, index) != LUA_TSTRING)
    raise_value(L, r, "a dtype must be a string such as \"f32\", got %s", luaL_typename(L, index));
  DType dtype;
  check_status(L, r, dtype_from_name(&dtype, lua_tostring(L, index)));
  return dtype;
}

static Device *device_check(lua_State *L, Rille *r, int index) {
  const char *name = lua_type(L, index) == LUA_TSTRING ? lua_tostring(L, index) : "";
  if (strcmp(name, "cpu") == 0) return &r->ctx->cpu;
  if (strcmp(name, "meta") == 0) return &r->ctx->meta;
  raise_value(L, r, "there is no device \"%s\"\ndevices are \"cpu\" and \"meta\"", name);
  return NULL;
}

static void add_size(lua_State *L, Rille *r, int index, int64_t *shape, int *n) {
  if (*n == MAX_DIMS) raise_value(L, r, "a tensor has at most %d dimensions", MAX_DIMS);
  int64_t size = integer_check(L, r, index, "a size");
  if (size < 0) raise_value(L, r, "a size must not be negative, got %lld", (long long)size);
  shape[(*n)++] = size;
}

int shape_check(lua_State *L, Rille *r, int index, int64_t *shape, int *next) {
  int n = 0;
  if (lua_istable(L, index)) {
    int count = (int)lua_rawlen(L, index);
    for (int i = 1; i <= count; i++) {
      lua_rawgeti(L, index, i);
      add_size(L, r, -1, shape, &n);
      lua_pop(L, 1);
    }
    *next = lua_rawlen(L, index) == 0 && lua_next(L, (lua_pushnil(L), index))
                ? (lua_pop(L, 2), index) // only options: no sizes, a 0-d tensor
                : index + 1;
    return n;
  }
  while (lua_type(L, index) == LUA_TNUMBER) add_size(L, r, index++, shape, &n);
  *next = index;
  return n;
}

static void make_option(lua_State *L, Rille *r, const char *fn, const char *key, MakeOptions *out) {
  static const char *const names[] = {"dtype", "device", "requires_grad"};
  if (strcmp(key, "dtype") == 0) {
    out->dtype = dtype_check(L, r, -1);
    out->has_dtype = true;
  } else if (strcmp(key, "device") == 0) {
    out->device = device_check(L, r, -1);
  } else if (strcmp(key, "requires_grad") == 0) {
    out->requires_grad = lua_toboolean(L, -1);
  } else {
    const char *near = nearest_name(key, names, 3);
    raise_value(L, r, "%s: there is no option \"%s\"\n%s%s%s", fn, key,
                near ? "did you mean \"" : "options are dtype, device, requires_grad",
                near ? near : "", near ? "\"?" : "");
  }
}

void make_options(lua_State *L, Rille *r, int index, const char *fn, MakeOptions *out) {
  *out = (MakeOptions){.dtype = DT_F32, .device = &r->ctx->cpu};
  if (lua_isnoneornil(L, index)) return;
  if (!lua_istable(L, index))
    raise_value(L, r, "%s: options must be a table such as {dtype = \"f32\"}, got %s", fn,
                luaL_typename(L, index));
  lua_pushnil(L);
  while (lua_next(L, index)) {
    if (lua_type(L, -2) == LUA_TSTRING) make_option(L, r, fn, lua_tostring(L, -2), out);
    lua_pop(L, 1);
  }
}

// The dtype of a number beside a tensor: the tensor's, but 0.5 beside integers is f32.
static DType number_dtype(lua_State *L, int index, const Tensor *like) {
  if (!like) return DT_F32;
  switch (like->dtype) {
  case DT_F32:
  case DT_F64:
  case DT_BF16: return like->dtype;
  case DT_I64:
  case DT_I32:
  case DT_U8: return lua_isinteger(L, index) ? like->dtype : DT_F32;
  case DT_BOOL:
    return lua_isboolean(L, index) ? DT_BOOL : lua_isinteger(L, index) ? DT_I64 : DT_F32;
  }
  return DT_F32;
}

Status scalar_new(lua_State *L, Rille *r, int index, const Tensor *like, Tensor **out) {
  DType dtype = number_dtype(L, index, like);
  if (dtype == DT_I64 && lua_isinteger(L, index)) {
    int64_t exact = lua_tointeger(L, index);
    return tensor_from_data(r->ctx, DT_I64, 0, NULL, &exact, out);
  }
  double value = lua_isboolean(L, index) ? lua_toboolean(L, index) : lua_tonumber(L, index);
  return tensor_scalar(r->ctx, dtype, value, out);
}

Tensor *push_scalar(lua_State *L, Rille *r, int index, const Tensor *like) {
  Tensor *out;
  check_status(L, r, scalar_new(L, r, index, like, &out));
  push_tensor(L, r, out);
  return out;
}

static void collect_from(lua_State *L, Rille *r, int index, int depth, Tensor ***list, int *n,
                         int *room) {
  enum { DEEPEST = 4 };
  Tensor *t = tensor_at(L, r, index);
  if (t) {
    if (*n == *room) {
      int larger = *room ? 2 * *room : 16;
      Tensor **grown = lua_newuserdatauv(L, (size_t)larger * sizeof *grown, 0);
      if (*n) memcpy(grown, *list, (size_t)*n * sizeof *grown);
      lua_rawseti(L, LUA_REGISTRYINDEX, r->list_ref); // what the previous one held is collected
      *list = grown;
      *room = larger;
    }
    (*list)[(*n)++] = t;
    return;
  }
  if (!lua_istable(L, index) || depth == DEEPEST) return;
  luaL_checkstack(L, 4, "nested results");
  lua_pushnil(L);
  while (lua_next(L, index)) {
    collect_from(L, r, lua_gettop(L), depth + 1, list, n, room);
    lua_pop(L, 1);
  }
}

Tensor **collect_tensors(lua_State *L, Rille *r, int from, int to, int *n) {
  Tensor **list = NULL;
  int room = 0;
  *n = 0;
  for (int index = from; index <= to; index++) collect_from(L, r, index, 0, &list, n, &room);
  return list;
}
