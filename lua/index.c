// index - x[0], x["0:2, :, -1"], x[{ {0, 3}, {}, -1 }], x[ids], x[mask], and what they assign.
//
// Everything counts from 0, ranges are half-open, negative numbers count from the end. An entry for
// a dimension is an integer (the dimension vanishes), a range, or an integer tensor. Reading makes
// views by the ops select and slice (index_select for tensors), so gradients flow; writing makes
// the same views without grad and copies into them.
#include "lua/binding.h"

#include "ops/ops.h"

#include <ctype.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

// A view under way: the tensor on the stack's top, and the dimension that the next entry is for.
typedef struct Cursor {
  lua_State *L;
  Rille *r;
  Tensor *t;
  int dim;   // of t
  int entry; // the same, counted in the tensor that was indexed: for messages
} Cursor;

static int too_many(Cursor *c) {
  return raise_value(c->L, c->r, "index: more entries than dimensions");
}

static void step(Cursor *c, const char *op, const OpArgs *args) {
  Tensor *in = c->t;
  c->t = op_push(c->L, c->r, op, &in, 1, args);
  lua_replace(c->L, -2);
}

static void take_integer(Cursor *c, int64_t i) {
  if (c->dim >= c->t->ndim) too_many(c);
  int64_t size = c->t->shape[c->dim];
  if (i < -size || i >= size) {
    Status status =
        size == 0 ? fail(ST_ERANGE, "index %lld: dimension %d is empty", (long long)i, c->entry)
                  : fail(ST_ERANGE,
                         "index %lld is out of range for dimension %d, valid are %lld to "
                         "%lld",
                         (long long)i, c->entry, (long long)-size, (long long)size - 1);
    fail_hint(status, "counting starts at 0, negative indices count from the end");
    raise_status(c->L, c->r, status, &c->t, 1);
  }
  OpArgs args = {.n_list = -1};
  args.v[0].i = c->dim;
  args.v[1].i = i < 0 ? i + size : i;
  step(c, "select", &args);
  c->entry++;
}

enum { ABSENT_SIZE = 3, MOST_PARTS = 4096 };
static const int64_t ABSENT = INT64_MIN;

// part[3] = start, stop, step; ABSENT where not given. Ends beyond the dimension are cut.
static void take_range(Cursor *c, const int64_t part[ABSENT_SIZE]) {
  if (c->dim >= c->t->ndim) too_many(c);
  int64_t size = c->t->shape[c->dim], stride = part[2] == ABSENT ? 1 : part[2];
  if (stride <= 0)
    raise_value(c->L, c->r, "index: a step must be positive, got %lld\nx:flip(%d) reverses",
                (long long)stride, c->dim);
  int64_t start = part[0] == ABSENT ? 0 : part[0], stop = part[1] == ABSENT ? size : part[1];
  if (start < 0) start += size;
  if (stop < 0) stop += size;
  start = start < 0 ? 0 : start > size ? size : start;
  stop = stop < start ? start : stop > size ? size : stop;
  if (start != 0 || stop != size || stride != 1) {
    OpArgs args = {.n_list = -1};
    args.v[0].i = c->dim;
    args.v[1].i = start;
    args.v[2].i = stop;
    args.v[3].i = stride;
    step(c, "slice", &args);
  }
  c->dim++;
  c->entry++;
}

// ---- strings

static bool looks_like_index(const char *words) {
  if (!*words) return false;
  bool any = false;
  for (const char *p = words; *p; p++) {
    if (!strchr("0123456789:,.- ", *p)) return false;
    any |= *p == ':' || *p == ',' || *p == '.' || isdigit((unsigned char)*p);
  }
  return any;
}

static int bad_string(Cursor *c, const char *words) {
  return raise_value(c->L, c->r,
                     "index: \"%s\" is not understood\nexamples: \"0:2, :, -1\", \"::2\", "
                     "\"..., 0\"",
                     words);
}

// One entry of a string: "3", "1:", ":-1", "::2"; returns where it ends.
static const char *string_entry(Cursor *c, const char *words, const char *at) {
  int64_t part[ABSENT_SIZE] = {ABSENT, ABSENT, ABSENT};
  int k = 0;
  bool any = false;
  for (;;) {
    while (*at == ' ') at++;
    if (*at == '-' || isdigit((unsigned char)*at)) {
      char *end;
      if (part[k] != ABSENT) bad_string(c, words);
      part[k] = strtoll(at, &end, 10);
      if (end == at) bad_string(c, words);
      at = end;
      any = true;
    } else if (*at == ':') {
      if (++k == ABSENT_SIZE) bad_string(c, words);
      at++;
      any = true;
    } else {
      break;
    }
  }
  if (!any) bad_string(c, words);
  if (k == 0)
    take_integer(c, part[0]);
  else
    take_range(c, part);
  return at;
}

static int count_entries(const char *words) {
  int n = 1;
  for (; *words; words++) n += *words == ',';
  return n;
}

static void take_string(Cursor *c, const char *words) {
  const char *at = words;
  int left = count_entries(words);
  for (;; left--) {
    while (*at == ' ') at++;
    if (strncmp(at, "...", 3) == 0) {
      int skip = c->t->ndim - c->dim - (left - 1);
      if (skip < 0) too_many(c);
      c->dim += skip;
      c->entry += skip;
      at += 3;
    } else {
      at = string_entry(c, words, at);
    }
    while (*at == ' ') at++;
    if (!*at) return;
    if (*at++ != ',') bad_string(c, words);
  }
}

// ---- tensors

static void reshape(Cursor *c, int ndim, const int64_t *shape) {
  OpArgs args = {.n_list = ndim};
  memcpy(args.list, shape, (size_t)ndim * sizeof *shape);
  step(c, "reshape", &args);
}

// The entries of c's dimension that `ids` names; an n-d tensor gives n dimensions.
static void take_ids(Cursor *c, Tensor *ids) {
  if (c->dim >= c->t->ndim) too_many(c);
  int64_t shape[MAX_DIMS], size = c->t->shape[c->dim];
  int n = 0, ndim = c->t->ndim - 1 + ids->ndim, dim = c->dim;
  if (ndim > MAX_DIMS) raise_value(c->L, c->r, "index: more than %d dimensions", MAX_DIMS);
  for (int d = 0; d < dim; d++) shape[n++] = c->t->shape[d];
  for (int d = 0; d < ids->ndim; d++) shape[n++] = ids->shape[d];
  for (int d = dim + 1; d < c->t->ndim; d++) shape[n++] = c->t->shape[d];
  lua_State *L = c->L;
  int64_t count = tensor_numel(ids), *values;
  Tensor *flat;
  check_status(L, c->r, tensor_alive(ids));
  if (tensor_is_meta(ids)) {
    TensorSpec spec = {.dtype = DT_I64, .ndim = 1, .shape = {count}};
    check_status(L, c->r, tensor_new(c->r->ctx, &c->r->ctx->meta, &spec, MEM_ACTIVATIONS, &flat));
    push_tensor(L, c->r, flat);
  } else {
    values = lua_newuserdatauv(L, (size_t)(count ? count : 1) * sizeof *values, 0);
    for (int64_t i = 0; i < count; i++) {
      double value = 0;
      check_status(L, c->r, tensor_read(ids, i, &value));
      values[i] = (int64_t)value + (value < 0 ? size : 0);
    }
    check_status(L, c->r, tensor_from_data(c->r->ctx, DT_I64, 1, &count, values, &flat));
    push_tensor(L, c->r, flat);
    lua_replace(L, -2);
  }
  OpArgs args = {.n_list = -1};
  args.v[0].i = dim;
  Tensor *in[] = {c->t, flat};
  c->t = op_push(L, c->r, "index_select", in, 2, &args);
  lua_replace(L, -3);
  lua_pop(L, 1);
  if (ids->ndim != 1) reshape(c, ndim, shape);
  c->dim = dim + ids->ndim;
  c->entry++;
}

static void check_mask(Cursor *c, const Tensor *mask) {
  bool fits = mask->ndim <= c->t->ndim;
  for (int d = 0; fits && d < mask->ndim; d++) fits = mask->shape[d] == c->t->shape[d];
  if (fits) return;
  Tensor *both[] = {c->t, NULL};
  char words[128];
  Status status = fail(ST_ESHAPE, "index: the mask %s does not fit the first dimensions",
                       format_tensor(words, sizeof words, mask));
  raise_status(c->L, c->r, status, both, 1);
}

// The entries where mask is true, in order; the mask covers the first dimensions.
static void take_mask(Cursor *c, Tensor *mask) {
  check_mask(c, mask);
  lua_State *L = c->L;
  int64_t n = tensor_numel(mask), found = 0, shape[MAX_DIMS] = {n};
  int64_t *places = lua_newuserdatauv(L, (size_t)(n ? n : 1) * sizeof *places, 0);
  for (int64_t i = 0; i < n; i++) {
    double value = 0;
    check_status(L, c->r, tensor_read(mask, i, &value));
    if (value != 0) places[found++] = i;
  }
  Tensor *ids;
  check_status(L, c->r, tensor_from_data(c->r->ctx, DT_I64, 1, &found, places, &ids));
  push_tensor(L, c->r, ids);
  lua_replace(L, -2);
  lua_insert(L, -2); // below the tensor that c is at
  int ndim = 1;
  for (int d = mask->ndim; d < c->t->ndim; d++) shape[ndim++] = c->t->shape[d];
  reshape(c, ndim, shape);
  take_ids(c, ids);
  lua_remove(L, -2);
}

// ---- split

// The sizes of the parts: from a list, or parts of `each` elements with a smaller last one.
static int64_t *split_sizes(lua_State *L, Rille *r, Tensor *t, int64_t size, int *n) {
  bool is_list = lua_istable(L, 2);
  int64_t each = is_list ? 0 : integer_check(L, r, 2, "split: the size of a part"), sum = 0;
  if (!is_list && each < 1) raise_value(L, r, "split: the size of a part must be at least 1");
  int64_t count = is_list ? (int64_t)lua_rawlen(L, 2) : (size + each - 1) / each;
  if (count > MOST_PARTS) raise_value(L, r, "split: more than %d parts", MOST_PARTS);
  *n = (int)count;
  int64_t *sizes = lua_newuserdatauv(L, (size_t)(count + 1) * sizeof *sizes, 0);
  for (int i = 0; i < *n; i++) {
    sizes[i] = each < size - sum ? each : size - sum;
    if (is_list) {
      lua_rawgeti(L, 2, i + 1);
      sizes[i] = integer_check(L, r, -1, "split: a size");
      lua_pop(L, 1);
      if (sizes[i] < 0 || sizes[i] > size)
        raise_value(L, r, "split: a size must be from 0 to %lld, got %lld", (long long)size,
                    (long long)sizes[i]);
    }
    sum += sizes[i];
  }
  if (sum == size) return sizes;
  Status status = fail(ST_ESHAPE, "split: the sizes make %lld, the dimension has %lld",
                       (long long)sum, (long long)size);
  raise_status(L, r, status, &t, 1);
}

// x:split(size, dim = 0) or x:split({sizes...}, dim = 0): views of the parts, in order.
static int tensor_split(lua_State *L) {
  Rille *r = binding_of(L);
  Tensor *t = tensor_check(L, r, 1, "split: x");
  int64_t dim = lua_isnoneornil(L, 3) ? 0 : integer_check(L, r, 3, "split: dim");
  int64_t at = dim < 0 ? dim + t->ndim : dim;
  if (at < 0 || at >= t->ndim) {
    Status status = fail(ST_ERANGE, "split: there is no dimension %lld, valid are %d to %d",
                         (long long)dim, -t->ndim, t->ndim - 1);
    raise_status(L, r, fail_hint(status, "dimensions count from 0"), &t, 1);
  }
  lua_settop(L, 3);
  int n;
  const int64_t *sizes = split_sizes(L, r, t, t->shape[at], &n);
  luaL_checkstack(L, n + 8, "parts");
  int64_t start = 0;
  for (int i = 0; i < n; i++) {
    OpArgs args = {.n_list = -1};
    args.v[0].i = at;
    args.v[1].i = start;
    args.v[2].i = start += sizes[i];
    args.v[3].i = 1;
    op_push(L, r, "slice", &t, 1, &args);
  }
  return n;
}

// ---- keys

static void take_entry(Cursor *c, int index) {
  lua_State *L = c->L;
  int is_integer;
  switch (lua_type(L, index)) {
  case LUA_TNUMBER: {
    int64_t i = lua_tointegerx(L, index, &is_integer);
    if (!is_integer) raise_value(L, c->r, "index: %f is no integer", lua_tonumber(L, index));
    take_integer(c, i);
    return;
  }
  case LUA_TSTRING: take_string(c, lua_tostring(L, index)); return;
  case LUA_TTABLE: {
    int64_t part[ABSENT_SIZE];
    if (lua_rawlen(L, index) > ABSENT_SIZE)
      raise_value(L, c->r, "index: a range is {start, stop, step}");
    for (int k = 0; k < ABSENT_SIZE; k++) {
      part[k] = lua_rawgeti(L, index, k + 1) == LUA_TNIL
                    ? ABSENT
                    : integer_check(L, c->r, -1, "index: a range's entry");
      lua_pop(L, 1);
    }
    take_range(c, part);
    return;
  }
  default: break;
  }
  Tensor *t = tensor_at(L, c->r, index);
  if (!t || t->dtype <= DT_BF16)
    raise_value(L, c->r,
                "index: an integer, a range, a string, a table of these, or a tensor of "
                "integers or bool is wanted, got %s",
                t ? dtype_name(t->dtype) : luaL_typename(L, index));
  if (t->dtype == DT_BOOL)
    take_mask(c, t);
  else
    take_ids(c, t);
}

// Pushes the view that the key at stack index 2 names of the tensor at 1.
static void push_view(Cursor *c) {
  lua_State *L = c->L;
  lua_pushvalue(L, 1);
  if (!lua_istable(L, 2)) {
    take_entry(c, 2);
    return;
  }
  int n = (int)lua_rawlen(L, 2);
  for (int k = 1; k <= n; k++) {
    lua_rawgeti(L, 2, k);
    lua_insert(L, -2); // the entry below the view, so that it lives
    int at = lua_gettop(L) - 1;
    if (lua_type(L, at) == LUA_TSTRING && count_entries(lua_tostring(L, at)) > 1)
      raise_value(L, c->r, "index: a string within a table is for one dimension");
    take_entry(c, at);
    lua_remove(L, -2);
  }
}

static int unknown_method(lua_State *L, Rille *r) {
  enum { MOST = 512 };
  const char *names[MOST];
  int n = 0;
  lua_pushnil(L);
  while (lua_next(L, lua_upvalueindex(2))) {
    lua_pop(L, 1);
    if (n < MOST && lua_type(L, -1) == LUA_TSTRING) names[n++] = lua_tostring(L, -1);
  }
  const char *word = lua_tostring(L, 2), *near = nearest_name(word, names, n);
  if (near)
    return raise_value(L, r, "tensors have no method \"%s\"\ndid you mean \"%s\"?", word, near);
  return raise_value(L, r,
                     "\"%s\" is neither a method of tensors nor an index\nrille.help() lists the "
                     "methods; an index is like x[0], x[{{0, 2}, -1}], x[\"0:2, :, -1\"]",
                     word);
}

static int tensor_index(lua_State *L) {
  if (lua_type(L, 2) == LUA_TSTRING) {
    lua_pushvalue(L, 2);
    if (lua_rawget(L, lua_upvalueindex(2)) != LUA_TNIL) return 1;
    lua_pop(L, 1);
    if (!looks_like_index(lua_tostring(L, 2))) return unknown_method(L, binding_of(L));
  }
  Rille *r = binding_of(L);
  Cursor c = {L, r, tensor_at(L, r, 1), 0, 0};
  push_view(&c);
  return 1;
}

// ---- assignment

static void assign(lua_State *L, Rille *r, Tensor *target, int value) {
  Status status;
  Tensor *source = tensor_at(L, r, value);
  if (source && !source->storage) {
    status = fail(ST_ESTATE, "assignment: parameter without storage");
  } else if (source) {
    Tensor *both[] = {target, source};
    status = tensor_assign(r->ctx, target, source);
    if (status != ST_OK) raise_status(L, r, status, both, 2);
    return;
  } else if (lua_type(L, value) == LUA_TNUMBER || lua_type(L, value) == LUA_TBOOLEAN) {
    status = assign_value(L, r, value, target);
  } else {
    raise_value(L, r, "assignment: a tensor or a number is wanted, got %s",
                luaL_typename(L, value));
    return;
  }
  check_status(L, r, status);
}

// x[mask] = v: where mask is true, v, which broadcasts to x.
static void assign_masked(Cursor *c, Tensor *mask) {
  lua_State *L = c->L;
  Rille *r = c->r;
  check_mask(c, mask);
  Tensor *target = c->t, *value = tensor_at(L, r, 3);
  if (!value) value = push_scalar(L, r, 3, target);
  OpArgs args = {.n_list = target->ndim};
  for (int d = 0; d < target->ndim; d++) args.list[d] = d < mask->ndim ? mask->shape[d] : 1;
  mask = op_push(L, r, "reshape", &mask, 1, &args);
  args = (OpArgs){.n_list = -1};
  args.v[0].i = target->dtype;
  if (value->dtype != target->dtype) value = op_push(L, r, "cast", &value, 1, &args);
  Tensor *in[] = {mask, value, target};
  Tensor *merged = op_push(L, r, "where", in, 3, NULL);
  check_status(L, r, tensor_assign(r->ctx, target, merged));
}

// x[ids] = v: one entry of dimension 0 after the other; v broadcasts to what x[ids] is.
static void assign_ids(Cursor *c, Tensor *ids) {
  lua_State *L = c->L;
  Rille *r = c->r;
  Tensor *value = tensor_at(L, r, 3);
  if (ids->ndim != 1) raise_value(L, r, "assignment: an index tensor with one dimension is wanted");
  bool rows = value && value->ndim == c->t->ndim && value->shape[0] != 1;
  if (rows && value->shape[0] != ids->shape[0]) {
    Tensor *both[] = {ids, value};
    raise_status(L, r, fail(ST_ESHAPE, "assignment: as many entries as indices are wanted"), both,
                 2);
  }
  for (int64_t i = 0; i < ids->shape[0]; i++) {
    double at = 0;
    check_status(L, r, tensor_read(ids, i, &at));
    lua_pushvalue(L, 1);
    Cursor row = {L, r, c->t, 0, 0};
    take_integer(&row, (int64_t)at);
    lua_pushvalue(L, 3);
    Cursor source = {L, r, value, 0, 0};
    if (rows) take_integer(&source, i);
    assign(L, r, row.t, lua_gettop(L));
    lua_pop(L, 2);
  }
}

typedef struct AssignGuard {
  Guard guard;
  bool grad;
} AssignGuard;

// Writes t[key] = value with t at 1, key at 2, value at 3; grad mode is off.
static int assign_protected(lua_State *L) {
  Rille *r = binding_of(L);
  Cursor c = {L, r, tensor_at(L, r, 1), 0, 0};
  Tensor *key = tensor_at(L, r, 2);
  if (key && key->dtype == DT_BOOL) {
    assign_masked(&c, key);
  } else if (key && key->dtype > DT_BF16) {
    assign_ids(&c, key);
  } else {
    push_view(&c);
    assign(L, r, c.t, 3);
  }
  return 0;
}

static void restore(Rille *r, Guard *guard) {
  r->ctx->grad_enabled = ((AssignGuard *)(void *)guard)->grad;
}

static int tensor_newindex(lua_State *L) {
  Rille *r = binding_of(L);
  Tensor *t = tensor_at(L, r, 1), *value = tensor_at(L, r, 3);
  if (lua_type(L, 2) == LUA_TSTRING && !looks_like_index(lua_tostring(L, 2)))
    raise_value(L, r,
                "a tensor has no field \"%s\" to assign\nan index is like x[0] = 1, "
                "x[\"0:2, :\"] = y",
                lua_tostring(L, 2));
  if (r->ctx->grad_enabled && (t->requires_grad || (value && value->requires_grad))) {
    Status status =
        fail(ST_ESTATE, "assignment: writing %s would lose a gradient",
             t->requires_grad ? "into a tensor that wants one" : "a value with a graph");
    fail_hint(status, "wrap it in rille.no_grad(function() ... end), or use where or cat");
    raise_status(L, r, status, &t, 1);
  }
  AssignGuard *guard = guard_open(L, r, sizeof *guard, restore);
  guard->grad = r->ctx->grad_enabled;
  r->ctx->grad_enabled = false;
  lua_pushvalue(L, lua_upvalueindex(2));
  lua_insert(L, 2);
  lua_call(L, 3, 0);
  return 0;
}

void index_bind(lua_State *L, Rille *r, int methods) {
  lua_rawgeti(L, LUA_REGISTRYINDEX, r->tensor_meta_ref);
  lua_pushlightuserdata(L, r);
  lua_pushvalue(L, methods);
  lua_pushcclosure(L, tensor_index, 2);
  lua_setfield(L, -2, "__index");
  lua_pushlightuserdata(L, r);
  binding_push(L, r, assign_protected);
  lua_pushcclosure(L, tensor_newindex, 2);
  lua_setfield(L, -2, "__newindex");
  lua_pop(L, 1);
  binding_push(L, r, tensor_split);
  lua_setfield(L, methods, "split");
}
