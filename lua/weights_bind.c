// weights_bind - weight sets and the optimizers' step over them: rille.core.weightset.
#include "lua/binding.h"

#include "core/weights.h"
#include "ops/optim.h"

#include <stdlib.h>
#include <string.h>

static const char SET[] = "rille.weightset";

typedef struct SetBox {
  WeightSet *set;
} SetBox;

static WeightSet *set_of(lua_State *L, Rille *r) {
  return ((SetBox *)box_check(L, r, 1, SET))->set;
}

// weightset(params, group, stage, dp)
static int weightset(lua_State *L) {
  Rille *r = binding_of(L);
  table_check(L, r, 1, "weightset: the parameters");
  int n = (int)lua_rawlen(L, 1);
  int place[] = {0, 0, 1}; // group, stage, dp
  for (int i = 0; i < 3; i++)
    if (!lua_isnoneornil(L, 2 + i))
      place[i] = (int)integer_check(L, r, 2 + i, "weightset: a place");
  int group = place[0], stage = place[1], dp = place[2];
  if (n == 0) raise_value(L, r, "weightset: no parameters were given");
  if (dp < 1) raise_value(L, r, "weightset: dp must be at least 1");
  Param **params = lua_newuserdatauv(L, (size_t)n * sizeof *params, 0);
  for (int i = 0; i < n; i++) {
    lua_rawgeti(L, 1, i + 1);
    Tensor *t = tensor_check(L, r, -1, "weightset: an entry");
    if (!t->param) raise_value(L, r, "weightset: entry %d is no parameter", i + 1);
    if (t->dtype != (i ? params[0]->tensor->dtype : t->dtype))
      raise_value(L, r, "weightset: %s is %s, %s is %s\na set has one dtype", params[0]->name,
                  dtype_name(params[0]->tensor->dtype), t->param->name, dtype_name(t->dtype));
    params[i] = t->param;
    lua_pop(L, 1);
  }
  SetBox *box = box_push(L, SET, sizeof *box);
  check_status(L, r, weightset_new(r->ctx, params, n, group, stage, dp, &box->set));
  return 1;
}

static int set_gc(lua_State *L) {
  Rille *r = lua_touserdata(L, lua_upvalueindex(1));
  SetBox *box = lua_touserdata(L, 1);
  weightset_release(r->ctx, box->set);
  box->set = NULL;
  return 0;
}

static int set_zero_grads(lua_State *L) {
  weightset_zero_grads(set_of(L, binding_of(L)));
  return 0;
}

static int set_finish_grads(lua_State *L) {
  Rille *r = binding_of(L);
  check_status(L, r, weightset_finish_grads(r->ctx, set_of(L, r)));
  return 0;
}

// finish_part(first, n): parameters from first (counted from 1) on -> their part of the gradient.
static int set_finish_part(lua_State *L) {
  Rille *r = binding_of(L);
  WeightSet *set = set_of(L, r);
  int64_t first = integer_check(L, r, 2, "finish_part: first");
  int64_t n = integer_check(L, r, 3, "finish_part: n");
  if (first < 1 || n < 1 || first - 1 + n > set->n_params)
    raise_value(L, r, "finish_part: the set has %d parameters", set->n_params);
  Tensor *out;
  check_status(L, r, weightset_finish_part(r->ctx, set, (int)first - 1, (int)n, &out));
  push_owned(L, r, out);
  return 1;
}

// A flat array as a tensor over the same bytes.
static int push_flat(lua_State *L, Rille *r, Tensor *flat) {
  Tensor *out;
  if (!flat) return lua_pushnil(L), 1;
  check_status(L, r, tensor_detach(r->ctx, flat, &out));
  push_owned(L, r, out);
  return 1;
}

static int set_flat(lua_State *L) {
  Rille *r = binding_of(L);
  return push_flat(L, r, set_of(L, r)->flat);
}

static int set_grad(lua_State *L) {
  Rille *r = binding_of(L);
  return push_flat(L, r, set_of(L, r)->grad);
}

static int set_state(lua_State *L) {
  Rille *r = binding_of(L);
  WeightSet *set = set_of(L, r);
  int64_t index = integer_check(L, r, 2, "state: the index");
  if (index < 0 || index >= MAX_OPT_STATE)
    raise_value(L, r, "state: indices are 0 to %d", MAX_OPT_STATE - 1);
  Tensor *state;
  check_status(L, r, weightset_state(r->ctx, set, (int)index, &state));
  return push_flat(L, r, state);
}

// The state of one parameter, as a tensor of its shape; nil if the optimizer has made none yet.
static int set_state_of(lua_State *L) {
  Rille *r = binding_of(L);
  WeightSet *set = set_of(L, r);
  const Tensor *t = tensor_check(L, r, 2, "state_of: the parameter");
  int64_t index = integer_check(L, r, 3, "state_of: the index");
  if (!t->param || t->param->set != set) raise_value(L, r, "state_of: no parameter of this set");
  if (index < 0 || index >= MAX_OPT_STATE)
    raise_value(L, r, "state_of: indices are 0 to %d", MAX_OPT_STATE - 1);
  Tensor *state = set->state[index], *out;
  if (!state) return lua_pushnil(L), 1;
  TensorSpec spec;
  tensor_spec(t, &spec);
  spec.dtype = state->dtype;
  spec.offset = t->param->offset;
  check_status(L, r, tensor_alias(r->ctx, state, &spec, &out));
  push_owned(L, r, out);
  return 1;
}

static int set_params(lua_State *L) {
  Rille *r = binding_of(L);
  const WeightSet *set = set_of(L, r);
  lua_createtable(L, set->n_params, 0);
  for (int i = 0, n = 0; i < set->n_params; i++) {
    if (!set->params[i]) continue;
    push_owned(L, r, tensor_retain(set->params[i]->tensor));
    lua_rawseti(L, -2, ++n);
  }
  return 1;
}

static int set_numel(lua_State *L) {
  lua_pushinteger(L, set_of(L, binding_of(L))->numel);
  return 1;
}

static int set_version(lua_State *L) {
  lua_pushinteger(L, set_of(L, binding_of(L))->version);
  return 1;
}

static int set_group(lua_State *L) {
  lua_pushinteger(L, set_of(L, binding_of(L))->group);
  return 1;
}

static int set_dtype(lua_State *L) {
  lua_pushstring(L, dtype_name(set_of(L, binding_of(L))->dtype));
  return 1;
}

static int set_stepped(lua_State *L) {
  Rille *r = binding_of(L);
  weightset_stepped(r->ctx, set_of(L, r));
  return 0;
}

// ---- optimizers

static double option(lua_State *L, Rille *r, const char *key, double fallback, const char *fn) {
  double value = fallback;
  if (lua_getfield(L, 2, key) != LUA_TNIL) {
    if (lua_type(L, -1) == LUA_TBOOLEAN)
      value = lua_toboolean(L, -1);
    else if (lua_type(L, -1) == LUA_TNUMBER)
      value = lua_tonumber(L, -1);
    else
      raise_value(L, r, "%s: %s must be a number, got %s", fn, key, luaL_typename(L, -1));
  }
  lua_pop(L, 1);
  return value;
}

// Every key of the table at 2 is one of names[n].
static void known_options(lua_State *L, Rille *r, const char *fn, const char *const *names, int n) {
  table_check(L, r, 2, fn);
  lua_pushnil(L);
  while (lua_next(L, 2)) {
    const char *key = lua_type(L, -2) == LUA_TSTRING ? lua_tostring(L, -2) : "?";
    bool known = false;
    for (int i = 0; i < n; i++) known |= strcmp(names[i], key) == 0;
    if (!known) {
      const char *near = nearest_name(key, names, n);
      raise_value(L, r, "%s: there is no option \"%s\"%s%s%s", fn, key,
                  near ? "\ndid you mean \"" : "", near ? near : "", near ? "\"?" : "");
    }
    lua_pop(L, 1);
  }
}

// set:prepare(n): the arrays of an update with n of state.
static int set_prepare(lua_State *L) {
  Rille *r = binding_of(L);
  WeightSet *set = set_of(L, r);
  int64_t n = integer_check(L, r, 2, "prepare: the number of arrays");
  if (n < 0 || n > MAX_OPT_STATE) raise_value(L, r, "prepare: 0 to %d arrays", MAX_OPT_STATE);
  check_status(L, r, optim_prepare(r->ctx, set, (int)n));
  return 0;
}

static int set_adamw(lua_State *L) {
  static const char *const names[] = {"lr", "beta1", "beta2", "eps", "decay", "grad_scale", "step"};
  Rille *r = binding_of(L);
  WeightSet *set = set_of(L, r);
  known_options(L, r, "adamw", names, 7);
  AdamwOptions o = {.lr = option(L, r, "lr", 1e-3, "adamw"),
                    .beta1 = option(L, r, "beta1", 0.9, "adamw"),
                    .beta2 = option(L, r, "beta2", 0.999, "adamw"),
                    .eps = option(L, r, "eps", 1e-8, "adamw"),
                    .decay = option(L, r, "decay", 0, "adamw"),
                    .grad_scale = option(L, r, "grad_scale", 1, "adamw"),
                    .step = (int64_t)option(L, r, "step", 1, "adamw")};
  check_status(L, r, optim_adamw(r->ctx, set, &o));
  return 0;
}

static int set_sgd(lua_State *L) {
  static const char *const names[] = {"lr",         "momentum", "dampening", "decay",
                                      "grad_scale", "nesterov", "is_first"};
  Rille *r = binding_of(L);
  WeightSet *set = set_of(L, r);
  known_options(L, r, "sgd", names, 7);
  SgdOptions o = {.lr = option(L, r, "lr", 1e-3, "sgd"),
                  .momentum = option(L, r, "momentum", 0, "sgd"),
                  .dampening = option(L, r, "dampening", 0, "sgd"),
                  .decay = option(L, r, "decay", 0, "sgd"),
                  .grad_scale = option(L, r, "grad_scale", 1, "sgd"),
                  .nesterov = option(L, r, "nesterov", 0, "sgd") != 0,
                  .is_first = option(L, r, "is_first", 0, "sgd") != 0};
  check_status(L, r, optim_sgd(r->ctx, set, &o));
  return 0;
}

// grad_norms(infinity): sums of squares (or largest magnitudes) by parameter, in the set's order.
static int set_grad_norms(lua_State *L) {
  Rille *r = binding_of(L);
  WeightSet *set = set_of(L, r);
  bool infinity = lua_toboolean(L, 2);
  double *norms = lua_newuserdatauv(L, (size_t)set->n_params * sizeof *norms, 0);
  check_status(L, r, optim_grad_norms(r->ctx, set, infinity, norms));
  lua_createtable(L, set->n_params, 0);
  for (int i = 0; i < set->n_params; i++) {
    lua_pushnumber(L, norms[i]);
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

// fingerprint(parameter, values): 64 bits that depend on its name and values, not on the layout;
// values: those of another tensor of its shape and type.
static int fingerprint(lua_State *L) {
  Rille *r = binding_of(L);
  const Tensor *t = tensor_check(L, r, 1, "fingerprint: the argument");
  if (!t->param) raise_value(L, r, "fingerprint: a parameter is wanted");
  uint64_t value;
  const Tensor *values =
      lua_isnoneornil(L, 2) ? NULL : tensor_check(L, r, 2, "fingerprint: values");
  if (values && (values->dtype != t->dtype || tensor_numel(values) != tensor_numel(t)))
    raise_value(L, r, "fingerprint: values of the parameter's dtype and shape are wanted");
  check_status(L, r, param_place(r->ctx, t->param));
  check_status(L, r, optim_fingerprint(r->ctx, t->param, values, &value));
  lua_pushinteger(L, (lua_Integer)value);
  return 1;
}

// ---- parts of parameters

static Param *param_check(lua_State *L, Rille *r, const char *fn) {
  const Tensor *t = tensor_check(L, r, 1, fn);
  if (!t->param) raise_value(L, r, "%s: a parameter is wanted", fn);
  return t->param;
}

// The integer in field `key` of the table on top.
static int64_t shard_field(lua_State *L, Rille *r, const char *key, const char *what) {
  lua_getfield(L, -1, key);
  int64_t value = integer_check(L, r, -1, what);
  lua_pop(L, 1);
  return value;
}

// The run {at, n, is_counted = true} on top.
static ShardRun run_check(lua_State *L, Rille *r) {
  table_check(L, r, -1, "shard: a run");
  lua_rawgeti(L, -1, 1);
  lua_rawgeti(L, -2, 2);
  lua_rawgeti(L, -3, 3);
  ShardRun run = {.at = integer_check(L, r, -3, "shard: where a run begins"),
                  .n = integer_check(L, r, -2, "shard: the length of a run"),
                  .is_counted = lua_isnil(L, -1) || lua_toboolean(L, -1)};
  lua_pop(L, 3);
  return run;
}

// shard(parameter, {dim =, full =, size = of the part, runs = {{at, n, is_counted = true}, ...}});
// shard(parameter): it is whole again, without a value.
static int shard(lua_State *L) {
  Rille *r = binding_of(L);
  Param *param = param_check(L, r, "shard");
  Shard shard = {0};
  lua_settop(L, 2);
  if (lua_isnil(L, 2)) {
    check_status(L, r, param_shard(r->ctx, param, NULL, 0));
    return 0;
  }
  table_check(L, r, 2, "shard: the part");
  int64_t dim = shard_field(L, r, "dim", "shard: dim");
  shard.dim = dim < 0 || dim >= MAX_DIMS ? MAX_DIMS : (int)dim;
  shard.full = shard_field(L, r, "full", "shard: full");
  int64_t size = shard_field(L, r, "size", "shard: size");
  lua_getfield(L, 2, "runs");
  table_check(L, r, -1, "shard: runs");
  lua_Unsigned n = lua_rawlen(L, -1);
  if (n > MAX_SHARD_RUNS) raise_value(L, r, "shard: a part has at most %d runs", MAX_SHARD_RUNS);
  for (shard.n_runs = 0; shard.n_runs < (int)n; shard.n_runs++) {
    lua_rawgeti(L, -1, shard.n_runs + 1);
    shard.runs[shard.n_runs] = run_check(L, r);
    lua_pop(L, 1);
  }
  check_status(L, r, param_shard(r->ctx, param, &shard, size));
  return 0;
}

static void set_integer(lua_State *L, const char *key, int64_t value) {
  lua_pushinteger(L, value);
  lua_setfield(L, -2, key);
}

// shard_of(parameter) -> what shard() was given; nil if it is whole.
static int shard_of(lua_State *L) {
  Rille *r = binding_of(L);
  const Tensor *t = param_check(L, r, "shard_of")->tensor;
  if (!t->shard) return lua_pushnil(L), 1;
  lua_newtable(L);
  set_integer(L, "dim", t->shard->dim);
  set_integer(L, "full", t->shard->full);
  set_integer(L, "size", t->shape[t->shard->dim]);
  lua_createtable(L, t->shard->n_runs, 0);
  for (int k = 0; k < t->shard->n_runs; k++) {
    const ShardRun *run = &t->shard->runs[k];
    lua_createtable(L, 3, 0);
    lua_pushinteger(L, run->at), lua_rawseti(L, -2, 1);
    lua_pushinteger(L, run->n), lua_rawseti(L, -2, 2);
    lua_pushboolean(L, run->is_counted), lua_rawseti(L, -2, 3);
    lua_rawseti(L, -2, k + 1);
  }
  lua_setfield(L, -2, "runs");
  return 1;
}

// full_shape(parameter) -> the dimensions of the whole.
static int full_shape(lua_State *L) {
  Rille *r = binding_of(L);
  const Tensor *t = param_check(L, r, "full_shape")->tensor;
  lua_createtable(L, t->ndim, 0);
  for (int d = 0; d < t->ndim; d++) {
    lua_pushinteger(L, t->shard && t->shard->dim == d ? t->shard->full : t->shape[d]);
    lua_rawseti(L, -2, d + 1);
  }
  return 1;
}

// unit_grad(parameter, unit): the gradient buffer of a unit's uses; nil if nothing is in it yet.
static int unit_grad(lua_State *L) {
  Rille *r = binding_of(L);
  const Tensor *t = tensor_check(L, r, 1, "unit_grad: the parameter");
  int64_t unit = integer_check(L, r, 2, "unit_grad: the unit");
  for (int k = 0; t->param && k < t->param->n_uses; k++) {
    const GradUse *use = &t->param->uses[k];
    if (use->unit == unit && use->written) return push_flat(L, r, use->grad);
  }
  return lua_pushnil(L), 1;
}

static const luaL_Reg methods[] = {
    {"zero_grads", set_zero_grads},
    {"finish_grads", set_finish_grads},
    {"finish_part", set_finish_part},
    {"flat", set_flat},
    {"grad", set_grad},
    {"state", set_state},
    {"state_of", set_state_of},
    {"params", set_params},
    {"numel", set_numel},
    {"version", set_version},
    {"group", set_group},
    {"dtype", set_dtype},
    {"stepped", set_stepped},
    {"prepare", set_prepare},
    {"adamw", set_adamw},
    {"sgd", set_sgd},
    {"grad_norms", set_grad_norms},
    {NULL, NULL},
};
static const luaL_Reg metamethods[] = {{"__gc", set_gc}, {NULL, NULL}};
static const luaL_Reg functions[] = {
    {"weightset", weightset},
    {"fingerprint", fingerprint},
    {"unit_grad", unit_grad},
    {"shard", shard},
    {"shard_of", shard_of},
    {"full_shape", full_shape},
    {NULL, NULL},
};

void weights_bind(lua_State *L, Rille *r, int rille) {
  box_bind(L, r, SET, methods, metamethods);
  lua_getfield(L, rille, "core");
  binding_register(L, r, functions);
  lua_pop(L, 1);
}
