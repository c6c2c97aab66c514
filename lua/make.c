// make - tensors from nothing: rille.tensor, zeros, ones, full, arange, linspace, eye, rand, randn,
// randint, and the *_like forms. Options: {dtype = "f32", device = "cpu", requires_grad = false}.
#include "lua/binding.h"

#include "core/hash.h"
#include "core/rng.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { RANDOM_BLOCK = 1 << 20 }; // values drawn between looks at Ctrl-C

// ---- from Lua values

// What the values of nested tables have in common.
typedef struct Nested {
  int ndim;
  int64_t shape[MAX_DIMS];
  bool any_float, any_integer, any_bool;
} Nested;

static int ragged(lua_State *L, Rille *r, int d, int64_t want, int64_t got) {
  return raise_value(L, r,
                     "tensor: a table at depth %d has %lld entries, the first one there has "
                     "%lld\nall rows need the same length",
                     d, (long long)got, (long long)want);
}

// Learns shape and kinds from the value on top, at depth d.
static void survey(lua_State *L, Rille *r, Nested *n, int d, bool first) {
  int type = lua_type(L, -1);
  if (type == LUA_TTABLE) {
    int64_t count = (int64_t)lua_rawlen(L, -1);
    if (first) {
      if (d == MAX_DIMS) raise_value(L, r, "tensor: more than %d dimensions", MAX_DIMS);
      n->shape[d] = count;
      n->ndim = d + 1;
    } else if (d >= n->ndim) {
      raise_value(L, r, "tensor: a table at depth %d stands where a number is expected", d);
    } else if (n->shape[d] != count) {
      ragged(L, r, d, n->shape[d], count);
    }
    luaL_checkstack(L, 2, "nested tables");
    for (int64_t i = 1; i <= count; i++) {
      lua_rawgeti(L, -1, i);
      survey(L, r, n, d + 1, first && i == 1);
      lua_pop(L, 1);
    }
    return;
  }
  if (d != n->ndim)
    raise_value(L, r, "tensor: a %s at depth %d stands where a table is expected",
                lua_typename(L, type), d);
  if (type == LUA_TBOOLEAN)
    n->any_bool = true;
  else if (type != LUA_TNUMBER)
    raise_value(L, r, "tensor: numbers and booleans only, found a %s", lua_typename(L, type));
  else if (lua_isinteger(L, -1))
    n->any_integer = true;
  else
    n->any_float = true;
}

static void store_values(lua_State *L, const Nested *n, DType dtype, int d, void *to, int64_t *at) {
  if (d < n->ndim) {
    for (int64_t i = 1; i <= n->shape[d]; i++) {
      lua_rawgeti(L, -1, i);
      store_values(L, n, dtype, d + 1, to, at);
      lua_pop(L, 1);
    }
    return;
  }
  if (dtype == DT_I64)
    ((int64_t *)to)[*at] = lua_isinteger(L, -1)   ? lua_tointeger(L, -1)
                           : lua_isboolean(L, -1) ? lua_toboolean(L, -1)
                                                  : real_to_int64(lua_tonumber(L, -1));
  else
    ((double *)to)[*at] = lua_isboolean(L, -1) ? lua_toboolean(L, -1) : lua_tonumber(L, -1);
  (*at)++;
}

// The tensor on top, made as `have`, becomes what the options ask for.
static void finish(lua_State *L, Rille *r, DType have, const MakeOptions *options) {
  if (have != options->dtype) {
    Tensor *t = tensor_at(L, r, -1);
    OpArgs args = {.n_list = -1};
    args.v[0].i = options->dtype;
    bool grad = r->ctx->grad_enabled;
    r->ctx->grad_enabled = false;
    op_push(L, r, "cast", &t, 1, &args);
    r->ctx->grad_enabled = grad;
    lua_remove(L, -2);
  }
  if (!options->requires_grad) return;
  if (options->dtype > DT_BF16)
    raise_value(L, r, "requires_grad: only floating point tensors have gradients");
  tensor_at(L, r, -1)->requires_grad = true;
}

static void push_new(lua_State *L, Rille *r, DType dtype, int ndim, const int64_t *shape,
                     Device *device) {
  TensorSpec spec = {.dtype = dtype, .ndim = ndim};
  if (ndim > 0) memcpy(spec.shape, shape, (size_t)ndim * sizeof *shape);
  Tensor *out;
  push_result(L, r, tensor_new(r->ctx, device, &spec, MEM_ACTIVATIONS, &out), &out);
}

static void tensor_of_string(lua_State *L, Rille *r, MakeOptions *options) {
  size_t n;
  const char *bytes = lua_tolstring(L, 1, &n);
  int64_t shape = (int64_t)n;
  if (!options->has_dtype) options->dtype = DT_U8;
  Tensor *out;
  push_result(L, r, tensor_from_data(r->ctx, DT_U8, 1, &shape, bytes, &out), &out);
  finish(L, r, DT_U8, options);
}

static int make_tensor(lua_State *L) {
  Rille *r = binding_of(L);
  MakeOptions options;
  make_options(L, r, 2, "tensor", &options);
  if (lua_type(L, 1) == LUA_TSTRING) {
    tensor_of_string(L, r, &options);
    return 1;
  }
  Tensor *given = tensor_at(L, r, 1);
  if (given) {
    if (!options.has_dtype) options.dtype = given->dtype;
    op_push(L, r, "contiguous", &given, 1, NULL);
    finish(L, r, given->dtype, &options);
    return 1;
  }
  Nested n = {0};
  lua_pushvalue(L, 1);
  survey(L, r, &n, 0, true);
  bool integers = n.any_integer && !n.any_float,
       bools = n.any_bool && !n.any_integer && !n.any_float;
  if (!options.has_dtype) options.dtype = bools ? DT_BOOL : integers ? DT_I64 : DT_F32;
  DType wide = integers || options.dtype == DT_I64 ? DT_I64 : DT_F64;
  if (options.device->kind == DEV_META) {
    push_new(L, r, options.dtype, n.ndim, n.shape, options.device);
    return 1;
  }
  push_new(L, r, wide, n.ndim, n.shape, options.device);
  void *to = tensor_data(tensor_at(L, r, -1));
  int64_t at = 0;
  lua_pushvalue(L, 1);
  store_values(L, &n, wide, 0, to, &at);
  lua_pop(L, 1);
  finish(L, r, wide, &options);
  return 1;
}

// ---- filled with one value

static int filled(lua_State *L, Rille *r, int ndim, const int64_t *shape, double value,
                  const MakeOptions *options) {
  push_new(L, r, options->dtype, ndim, shape, options->device);
  Tensor *t = tensor_at(L, r, -1);
  if (t->storage->data) {
    if (value == 0)
      memset(t->storage->data, 0, t->storage->bytes);
    else
      check_status(L, r, tensor_assign_number(r->ctx, t, value));
  }
  finish(L, r, options->dtype, options);
  return 1;
}

// The same with the number at a stack index, an integer exactly.
static int filled_with(lua_State *L, Rille *r, int ndim, const int64_t *shape, int index,
                       const MakeOptions *options) {
  filled(L, r, ndim, shape, 0, options);
  Tensor *t = tensor_at(L, r, -1);
  if (t->storage->data) check_status(L, r, assign_value(L, r, index, t));
  return 1;
}

static int shaped(lua_State *L, const char *fn, double value) {
  Rille *r = binding_of(L);
  int64_t shape[MAX_DIMS];
  int next, ndim = shape_check(L, r, 1, shape, &next);
  MakeOptions options;
  make_options(L, r, next, fn, &options);
  return filled(L, r, ndim, shape, value, &options);
}

static int make_zeros(lua_State *L) { return shaped(L, "zeros", 0); }
static int make_ones(lua_State *L) { return shaped(L, "ones", 1); }

static int make_full(lua_State *L) {
  Rille *r = binding_of(L);
  int64_t shape[MAX_DIMS];
  int next = 0, ndim = lua_istable(L, 1) ? shape_check(L, r, 1, shape, &next) : -1;
  if (ndim < 0 || lua_type(L, next) != LUA_TNUMBER)
    raise_value(L, r, "full: a shape and a value are wanted\nas in rille.full({2, 3}, 0.5)");
  MakeOptions options;
  make_options(L, r, next + 1, "full", &options);
  if (!options.has_dtype && lua_isinteger(L, next)) options.dtype = DT_I64;
  return filled_with(L, r, ndim, shape, next, &options);
}

static int make_empty(lua_State *L) {
  Rille *r = binding_of(L);
  int64_t shape[MAX_DIMS];
  int next, ndim = shape_check(L, r, 1, shape, &next);
  MakeOptions options;
  make_options(L, r, next, "empty", &options);
  push_new(L, r, options.dtype, ndim, shape, options.device);
  finish(L, r, options.dtype, &options);
  return 1;
}

static int make_eye(lua_State *L) {
  Rille *r = binding_of(L);
  int64_t n = integer_check(L, r, 1, "eye: n"), m = n;
  int next = 2;
  if (lua_type(L, 2) == LUA_TNUMBER) m = integer_check(L, r, next++, "eye: m");
  if (n < 0 || m < 0) raise_value(L, r, "eye: a size must not be negative");
  MakeOptions options;
  make_options(L, r, next, "eye", &options);
  int64_t shape[] = {n, m};
  filled(L, r, 2, shape, 0, &options);
  Tensor *t = tensor_at(L, r, -1), diagonal = *t; // a view on this stack, never released
  diagonal.ndim = 1;
  diagonal.shape[0] = n < m ? n : m;
  diagonal.stride[0] = m + 1;
  if (t->storage->data) check_status(L, r, tensor_assign_number(r->ctx, &diagonal, 1));
  return 1;
}

// ---- ranges

// A number both ways.
typedef struct Real {
  double f;
  int64_t i;
} Real;

// start + i step, i = 0 .. n-1; integers exactly.
static int ramp(lua_State *L, Rille *r, int64_t n, Real start, Real step, DType natural,
                MakeOptions *options) {
  if (!options->has_dtype) options->dtype = natural;
  if (options->device->kind == DEV_META) {
    push_new(L, r, options->dtype, 1, &n, options->device);
    return 1;
  }
  DType wide = natural == DT_I64 ? DT_I64 : DT_F64;
  push_new(L, r, wide, 1, &n, options->device);
  void *to = tensor_data(tensor_at(L, r, -1));
  for (int64_t i = 0; i < n; i++) {
    if (wide == DT_I64)
      ((int64_t *)to)[i] = start.i + i * step.i;
    else
      ((double *)to)[i] = start.f + (double)i * step.f;
  }
  finish(L, r, wide, options);
  return 1;
}

// arange(stop), arange(start, stop), arange(start, stop, step)
static int make_arange(lua_State *L) {
  Rille *r = binding_of(L);
  Real v[3] = {{0, 0}, {0, 0}, {1, 1}};
  int n = 0;
  bool integers = true;
  for (; n < 3 && lua_type(L, n + 1) == LUA_TNUMBER; n++) {
    v[n] = (Real){lua_tonumber(L, n + 1), lua_tointeger(L, n + 1)};
    integers = integers && lua_isinteger(L, n + 1);
  }
  if (n == 0) raise_value(L, r, "arange: a number is wanted, got %s", luaL_typename(L, 1));
  if (n == 1) v[1] = v[0], v[0] = (Real){0, 0};
  double span = (v[1].f - v[0].f) / v[2].f;
  if (v[2].f == 0 || !isfinite(span)) raise_value(L, r, "arange: a step of 0, or no end");
  if (span > 9e18) raise_value(L, r, "arange: %g elements are too many", span);
  MakeOptions options;
  make_options(L, r, n + 1, "arange", &options);
  int64_t count = span > 0 ? (int64_t)ceil(span) : 0;
  if (integers && span > 0) { // exactly, where doubles are not
    uint64_t from = (uint64_t)v[0].i, to = (uint64_t)v[1].i;
    uint64_t distance = v[2].i > 0 ? to - from : from - to;
    uint64_t step = v[2].i > 0 ? (uint64_t)v[2].i : 0 - (uint64_t)v[2].i;
    count = (int64_t)(distance / step + (distance % step != 0));
  }
  return ramp(L, r, count, v[0], v[2], integers ? DT_I64 : DT_F32, &options);
}

static int make_linspace(lua_State *L) {
  Rille *r = binding_of(L);
  double first = number_check(L, r, 1, "linspace: first"),
         last = number_check(L, r, 2, "linspace: last");
  int64_t n = integer_check(L, r, 3, "linspace: n");
  if (n < 0) raise_value(L, r, "linspace: n must not be negative");
  MakeOptions options;
  make_options(L, r, 4, "linspace", &options);
  Real start = {first, 0}, step = {n > 1 ? (last - first) / (double)(n - 1) : 0, 0};
  return ramp(L, r, n, start, step, DT_F32, &options);
}

// ---- random

// The stream of a draw: outside a step the saved counter; inside one the running module's ordinal,
// so that layout and batch split do not matter: dimension 0 counts samples if it fits.
static void draw_stream(lua_State *L, Rille *r, int ndim, const int64_t *shape, uint64_t *key,
                        int64_t *first) {
  Ctx *ctx = r->ctx;
  *first = 0;
  if (ctx->place.step < 0) {
    *key = hash_mix(rng_key(ctx->seed, "rille.draws"), ctx->draws++);
    return;
  }
  RandomCall call;
  check_status(L, r, ctx_random_call(ctx, &call));
  *key = hash_mix(call.key, (uint64_t)call.step);
  if (ndim == 0 || call.n_samples <= 0 || shape[0] % call.n_samples != 0) return;
  int64_t sample = shape[0] / call.n_samples;
  for (int d = 1; d < ndim; d++) sample *= shape[d];
  *first = call.first_sample * sample;
}

static int drawn(lua_State *L, Rille *r, int ndim, const int64_t *shape, bool normal,
                 const MakeOptions *options) {
  uint64_t key;
  int64_t first;
  if (options->dtype > DT_BF16)
    raise_value(L, r, "%s: a floating point dtype is wanted, not %s\nrille.randint draws integers",
                normal ? "randn" : "rand", dtype_name(options->dtype));
  draw_stream(L, r, ndim, shape, &key, &first);
  DType wide =
      options->dtype == DT_F64 || options->device->kind == DEV_META ? options->dtype : DT_F32;
  push_new(L, r, wide, ndim, shape, options->device);
  Tensor *t = tensor_at(L, r, -1);
  void *to = tensor_data(t);
  int64_t n = tensor_numel(t);
  for (int64_t at = 0; to && at < n; at += RANDOM_BLOCK) { // in blocks, so that Ctrl-C is heard
    int64_t m = n - at < RANDOM_BLOCK ? n - at : RANDOM_BLOCK;
    if (r->ctx->interrupted) {
      r->ctx->interrupted = 0;
      raise_status(L, r, fail(ST_ESTOPPED, "interrupted"), NULL, 0);
    }
    if (wide == DT_F64)
      (normal ? rng_fill_normal_f64 : rng_fill_uniform_f64)((double *)to + at, m, key, first + at,
                                                            0, 1);
    else
      (normal ? rng_fill_normal_f32 : rng_fill_uniform_f32)((float *)to + at, m, key, first + at, 0,
                                                            1);
  }
  finish(L, r, wide, options);
  return 1;
}

static int make_random(lua_State *L, bool normal, const char *fn) {
  Rille *r = binding_of(L);
  int64_t shape[MAX_DIMS];
  int next, ndim = shape_check(L, r, 1, shape, &next);
  MakeOptions options;
  make_options(L, r, next, fn, &options);
  return drawn(L, r, ndim, shape, normal, &options);
}

static int make_randn(lua_State *L) { return make_random(L, true, "randn"); }
static int make_rand(lua_State *L) { return make_random(L, false, "rand"); }

// randint(lo, hi, shape...): lo .. hi-1
static int make_randint(lua_State *L) {
  Rille *r = binding_of(L);
  int64_t lo = integer_check(L, r, 1, "randint: lo"), hi = integer_check(L, r, 2, "randint: hi");
  if (hi <= lo) raise_value(L, r, "randint: hi must be above lo (values are lo to hi - 1)");
  int64_t shape[MAX_DIMS];
  int next, ndim = shape_check(L, r, 3, shape, &next);
  MakeOptions options;
  make_options(L, r, next, "randint", &options);
  if (!options.has_dtype) options.dtype = DT_I64;
  uint64_t key;
  int64_t first;
  draw_stream(L, r, ndim, shape, &key, &first);
  DType wide = options.device->kind == DEV_META ? options.dtype : DT_I64;
  push_new(L, r, wide, ndim, shape, options.device);
  Tensor *t = tensor_at(L, r, -1);
  int64_t *to = tensor_data(t);
  for (int64_t i = 0, n = tensor_numel(t); to && i < n; i++)
    to[i] = lo + (int64_t)(rng_u64(key, first + i) % (uint64_t)(hi - lo));
  finish(L, r, wide, &options);
  return 1;
}

// ---- like another tensor

static int like(lua_State *L, const char *fn, double value, bool random) {
  Rille *r = binding_of(L);
  bool has_value = strcmp(fn, "full_like") == 0;
  Tensor *t = tensor_check(L, r, 1, fn);
  if (has_value) number_check(L, r, 2, "full_like: the value");
  MakeOptions options;
  make_options(L, r, has_value ? 3 : 2, fn, &options);
  if (!options.has_dtype) options.dtype = t->dtype;
  if (tensor_is_meta(t)) options.device = &r->ctx->meta;
  if (has_value) return filled_with(L, r, t->ndim, t->shape, 2, &options);
  if (random) return drawn(L, r, t->ndim, t->shape, value != 0, &options);
  return filled(L, r, t->ndim, t->shape, value, &options);
}

static int make_zeros_like(lua_State *L) { return like(L, "zeros_like", 0, false); }
static int make_ones_like(lua_State *L) { return like(L, "ones_like", 1, false); }
static int make_full_like(lua_State *L) { return like(L, "full_like", 0, false); }
static int make_rand_like(lua_State *L) { return like(L, "rand_like", 0, true); }
static int make_randn_like(lua_State *L) { return like(L, "randn_like", 1, true); }

// ---- the state of random draws

static int manual_seed(lua_State *L) {
  Rille *r = binding_of(L);
  r->ctx->seed = (uint64_t)integer_check(L, r, 1, "manual_seed: the seed");
  r->ctx->draws = 0;
  r->ctx->ordinals.n = 0;
  return 0;
}

// random_state() gives {seed =, draws =}; random_state(state) brings it back.
static int random_state(lua_State *L) {
  Rille *r = binding_of(L);
  if (!lua_isnoneornil(L, 1)) {
    table_check(L, r, 1, "random_state: the state");
    lua_getfield(L, 1, "seed");
    lua_getfield(L, 1, "draws");
    int64_t seed = integer_check(L, r, -2, "random_state: seed");
    r->ctx->draws = (uint64_t)integer_check(L, r, -1, "random_state: draws");
    r->ctx->seed = (uint64_t)seed;
    return 0;
  }
  lua_createtable(L, 0, 2);
  lua_pushinteger(L, (lua_Integer)r->ctx->seed), lua_setfield(L, -2, "seed");
  lua_pushinteger(L, (lua_Integer)r->ctx->draws), lua_setfield(L, -2, "draws");
  return 1;
}

static const luaL_Reg makers[] = {
    {"tensor", make_tensor},
    {"zeros", make_zeros},
    {"ones", make_ones},
    {"full", make_full},
    {"empty", make_empty},
    {"eye", make_eye},
    {"arange", make_arange},
    {"linspace", make_linspace},
    {"randn", make_randn},
    {"rand", make_rand},
    {"randint", make_randint},
    {"zeros_like", make_zeros_like},
    {"ones_like", make_ones_like},
    {"full_like", make_full_like},
    {"rand_like", make_rand_like},
    {"randn_like", make_randn_like},
    {"manual_seed", manual_seed},
    {"random_state", random_state},
    {NULL, NULL},
};

void make_bind(lua_State *L, Rille *r, int rille, int methods) {
  (void)methods;
  lua_pushvalue(L, rille);
  binding_register(L, r, makers);
  lua_pop(L, 1);
}
