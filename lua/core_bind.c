// core_bind - rille.core: what the Lua library builds training on. Places in the step, scopes,
// modules, accounting, spans, and parameters.
#include "lua/binding.h"

#include "core/hash.h"
#include "core/profile.h"
#include "core/spans.h"
#include "core/weights.h"
#include "lua/comm_bind.h"
#include "ops/ops.h"
#include "ops/random.h"
#include "parallel/tied.h"

#include <stdlib.h>
#include <string.h>

// ---- the place in a step

static int begin_step(lua_State *L) {
  Rille *r = binding_of(L);
  r->ctx->place = (StepPlace){.step = integer_check(L, r, 1, "begin_step: the step")};
  return 0;
}

static int end_step(lua_State *L) {
  Rille *r = binding_of(L);
  r->ctx->place = (StepPlace){.step = -1};
  return 0;
}

// begin_microbatch(index, first_sample, n_samples): random calls count from 0 again.
static int begin_microbatch(lua_State *L) {
  Rille *r = binding_of(L);
  Ctx *ctx = r->ctx;
  int64_t index = integer_check(L, r, 1, "begin_microbatch: index");
  int64_t first = integer_check(L, r, 2, "begin_microbatch: first_sample");
  int64_t n = integer_check(L, r, 3, "begin_microbatch: n_samples");
  ctx->place.microbatch = (int)index;
  ctx->place.first_sample = first;
  ctx->place.n_samples = n;
  ctx->place.unit = 0;
  ctx->ordinals.n = 0;
  ctx->arena_i = &r->arena_i;
  ctx->arena_w = &r->arena_w;
  return 0;
}

static int end_microbatch(lua_State *L) {
  Ctx *ctx = binding_of(L)->ctx;
  ctx->arena_i = ctx->arena_w = NULL;
  ctx->place.unit = 0;
  ctx->place.n_samples = 0;
  return 0;
}

// set_unit(unit): random calls count from 0 again, since units may run on different ranks.
static int set_unit(lua_State *L) {
  Rille *r = binding_of(L);
  r->ctx->place.unit = (int)integer_check(L, r, 1, "set_unit: the unit");
  r->ctx->ordinals.n = 0;
  return 0;
}

static int place(lua_State *L) {
  const StepPlace *p = &binding_of(L)->ctx->place;
  lua_createtable(L, 0, 5);
  lua_pushinteger(L, p->step), lua_setfield(L, -2, "step");
  lua_pushinteger(L, p->microbatch), lua_setfield(L, -2, "microbatch");
  lua_pushinteger(L, p->unit), lua_setfield(L, -2, "unit");
  lua_pushinteger(L, p->first_sample), lua_setfield(L, -2, "first_sample");
  lua_pushinteger(L, p->n_samples), lua_setfield(L, -2, "n_samples");
  return 1;
}

// data(x): x depends on the microbatch's data.
static int mark_data(lua_State *L) {
  Rille *r = binding_of(L);
  tensor_check(L, r, 1, "data: the argument")->depends_data = true;
  lua_settop(L, 1);
  return 1;
}

// release(t): a handle that owns its bytes gives them up; what backward saved of them lives on.
// Other handles, parameters, and what is no tensor are left alone.
static int release(lua_State *L) {
  Rille *r = binding_of(L);
  Tensor *t = lua_gettop(L) > 0 ? tensor_at(L, r, 1) : NULL;
  if (t && !t->weak && !t->param && t->storage) tensor_weaken(t);
  return 0;
}

// hash(text) -> 64 bits.
static int hash(lua_State *L) {
  size_t n;
  const char *text = luaL_checklstring(L, 1, &n);
  lua_pushinteger(L, (lua_Integer)hash_bytes(text, n, 0));
  return 1;
}

static int seed(lua_State *L) {
  lua_pushinteger(L, (lua_Integer)binding_of(L)->ctx->seed);
  return 1;
}

// elsewhere(parameter, words): from here on touching its values says where it is instead; nil: it
// is here.
static int elsewhere(lua_State *L) {
  Rille *r = binding_of(L);
  const Tensor *t = tensor_check(L, r, 1, "elsewhere: the parameter");
  if (!t->param) raise_value(L, r, "elsewhere: a parameter is wanted");
  t->param->elsewhere = lua_isnoneornil(L, 2) ? NULL : ctx_intern(r->ctx, luaL_checkstring(L, 2));
  return 0;
}

// is_placed(parameter): whether it has values here; unplace(parameter) takes them away.
static int is_placed(lua_State *L) {
  const Tensor *t = tensor_check(L, binding_of(L), 1, "is_placed: the parameter");
  lua_pushboolean(L, t->param && t->param->set);
  return 1;
}

static int unplace(lua_State *L) {
  Rille *r = binding_of(L);
  const Tensor *t = tensor_check(L, r, 1, "unplace: the parameter");
  if (t->param) param_unplace(r->ctx, t->param);
  return 0;
}

// tied_exchange(comm, parameter, units, ranks): every holder of a parameter gets the gradient
// buffers of all units that use it; ranks[i] of the group runs units[i].
static int exchange(lua_State *L) {
  enum { MAX_USES = 256 };
  Rille *r = binding_of(L);
  Comm *comm = comm_check_box(L, r, 1);
  const Tensor *t = tensor_check(L, r, 2, "tied_exchange: the parameter");
  TiedUse uses[MAX_USES];
  int n = (int)lua_rawlen(L, 3);
  if (!t->param || n > MAX_USES) raise_value(L, r, "tied_exchange: not such a parameter");
  for (int i = 0; i < n; i++) {
    lua_rawgeti(L, 3, i + 1), lua_rawgeti(L, 4, i + 1);
    uses[i] = (TiedUse){(int)lua_tointeger(L, -2), (int)lua_tointeger(L, -1)};
    lua_pop(L, 2);
  }
  check_status(L, r, tied_exchange(r->ctx, comm, t->param, uses, n));
  return 0;
}

// keep_order(on): no weight gradient runs before its W is called, also where a rank waits.
static int keep_order(lua_State *L) {
  binding_of(L)->ctx->keeps_order = lua_toboolean(L, 1);
  return 0;
}

static int recomputing(lua_State *L) {
  lua_pushboolean(L, binding_of(L)->ctx->recomputing);
  return 1;
}

// ---- scopes

typedef struct ScopeGuard {
  Guard guard;
  Scope scope;
} ScopeGuard;

static void close_scope(Rille *r, Guard *guard) {
  scope_close(r->ctx, &((ScopeGuard *)(void *)guard)->scope, NULL, 0);
}

// scope(fn, ...): what fn makes and neither returns nor saves for backward is released at its end.
static int run_scope(lua_State *L) {
  Rille *r = binding_of(L);
  ScopeGuard *guard = guard_open(L, r, sizeof *guard, close_scope);
  scope_open(r->ctx, &guard->scope);
  lua_call(L, lua_gettop(L) - 2, LUA_MULTRET);
  int n, top = lua_gettop(L);
  Tensor **kept = collect_tensors(L, r, 2, top, &n);
  guard->guard.close = NULL;
  check_status(L, r, scope_close(r->ctx, &guard->scope, kept, n));
  return top - 1;
}

// ---- modules

static void enter(lua_State *L, Rille *r, const char *path) {
  if (r->n_modules == r->modules_room) {
    int room = r->modules_room ? 2 * r->modules_room : 32;
    const char **grown = realloc(r->modules, (size_t)room * sizeof *grown);
    if (!grown) raise_value(L, r, "out of memory for module paths");
    r->modules = grown;
    r->modules_room = room;
  }
  r->modules[r->n_modules++] = r->ctx->module;
  r->ctx->module = ctx_intern(r->ctx, path);
}

static void leave(Rille *r) {
  if (r->n_modules > 0) r->ctx->module = r->modules[--r->n_modules];
}

static int module_enter(lua_State *L) {
  Rille *r = binding_of(L);
  enter(L, r, string_check(L, r, 1, "module_enter: path"));
  return 0;
}

static int module_leave(lua_State *L) {
  leave(binding_of(L));
  return 0;
}

static int close_module(lua_State *L) {
  leave(binding_of(L));
  return 0;
}

// module_call(path, fn, ...): fn runs as the module `path`, which errors and random calls name.
static int module_call(lua_State *L) {
  Rille *r = binding_of(L);
  enter(L, r, string_check(L, r, 1, "module_call: path"));
  lua_pushvalue(L, lua_upvalueindex(2)); // one guard for all: the stack of paths is in r
  lua_replace(L, 1);
  lua_toclose(L, 1);
  lua_call(L, lua_gettop(L) - 2, LUA_MULTRET);
  return lua_gettop(L) - 1;
}

static int module_path(lua_State *L) {
  lua_pushstring(L, binding_of(L)->ctx->module);
  return 1;
}

static void bind_module_call(lua_State *L, Rille *r) {
  lua_pushlightuserdata(L, r);
  lua_newuserdatauv(L, 1, 0);
  lua_createtable(L, 0, 1);
  binding_push(L, r, close_module);
  lua_setfield(L, -2, "__close");
  lua_setmetatable(L, -2);
  lua_pushcclosure(L, module_call, 2);
  lua_setfield(L, -2, "module_call");
}

// ---- accounting

static void set_number(lua_State *L, const char *key, size_t value) {
  lua_pushinteger(L, (lua_Integer)value);
  lua_setfield(L, -2, key);
}

static void push_use(lua_State *L, MemUse use) {
  lua_createtable(L, 0, 2);
  set_number(L, "current", use.current);
  set_number(L, "peak", use.peak);
}

// memory(): bytes by kind {current =, peak =}, total, and the limit.
static int memory(lua_State *L) {
  const Pool *pool = binding_of(L)->ctx->pool;
  lua_createtable(L, 0, MEM_KINDS + 2);
  for (int k = 0; k < MEM_KINDS; k++) {
    push_use(L, pool_use(pool, (MemKind)k));
    lua_setfield(L, -2, mem_kind_label((MemKind)k));
  }
  push_use(L, pool_total(pool));
  lua_setfield(L, -2, "total");
  set_number(L, "limit", pool_limit(pool));
  return 1;
}

static int reset_peaks(lua_State *L) {
  Rille *r = binding_of(L);
  pool_reset_peaks(r->ctx->pool);
  r->arena_i.peak = r->arena_i.bytes;
  r->arena_w.peak = r->arena_w.bytes;
  return 0;
}

static int arena_bytes(lua_State *L) {
  const Rille *r = binding_of(L);
  lua_createtable(L, 0, 4);
  set_number(L, "I", r->arena_i.bytes);
  set_number(L, "W", r->arena_w.bytes);
  set_number(L, "I_peak", r->arena_i.peak);
  set_number(L, "W_peak", r->arena_w.peak);
  return 1;
}

static int flops(lua_State *L) {
  Ctx *ctx = binding_of(L)->ctx;
  lua_pushnumber(L, ctx->flops);
  if (lua_toboolean(L, 1)) ctx->flops = 0;
  return 1;
}

static int now(lua_State *L) {
  lua_pushnumber(L, clock_now());
  return 1;
}

static int fail_at(lua_State *L) {
  Rille *r = binding_of(L);
  pool_fail_at(r->ctx->pool, integer_check(L, r, 1, "fail_at: n"));
  return 0;
}

static int trim(lua_State *L) {
  pool_trim(binding_of(L)->ctx->pool);
  return 0;
}

// profile(true) notes from here on where the time of ops goes; profile(false) stops and gives a
// list of {what =, calls =, seconds =, flops =}.
static int profile(lua_State *L) {
  Rille *r = binding_of(L);
  OpProfile *ended = r->ctx->profile;
  if (lua_toboolean(L, 1)) {
    if (!ended) check_status(L, r, op_profile_new(&r->ctx->profile));
    return 0;
  }
  lua_newtable(L); // an error here leaves the profile with the context
  for (int i = 0; ended && i < ended->n; i++) {
    const OpTime *row = &ended->rows[i];
    lua_createtable(L, 0, 4);
    lua_pushstring(L, row->what), lua_setfield(L, -2, "what");
    lua_pushinteger(L, row->calls), lua_setfield(L, -2, "calls");
    lua_pushnumber(L, row->seconds), lua_setfield(L, -2, "seconds");
    lua_pushnumber(L, row->flops), lua_setfield(L, -2, "flops");
    lua_rawseti(L, -2, i + 1);
  }
  op_profile_delete(ended);
  r->ctx->profile = NULL;
  return 1;
}

// ---- spans

// spans(true) records from here on; spans(false) stops and forgets.
static int spans(lua_State *L) {
  Rille *r = binding_of(L);
  bool on = lua_toboolean(L, 1);
  if (on && !r->ctx->spans) check_status(L, r, span_log_new(r->rank, &r->ctx->spans));
  if (!on) {
    span_log_delete(r->ctx->spans);
    r->ctx->spans = NULL;
  }
  return 0;
}

// span(what, start, end, waited)
static int span(lua_State *L) {
  Rille *r = binding_of(L);
  check_status(L, r,
               span_add(r->ctx->spans, string_check(L, r, 1, "span: what"),
                        number_check(L, r, 2, "span: start"), number_check(L, r, 3, "span: end"),
                        lua_isnoneornil(L, 4) ? 0 : number_check(L, r, 4, "span: waited")));
  return 0;
}

static int spans_list(lua_State *L) {
  const SpanLog *log = binding_of(L)->ctx->spans;
  lua_newtable(L);
  for (int64_t i = 0; log && i < log->n; i++) {
    const Span *s = &log->spans[i];
    lua_createtable(L, 0, 5);
    lua_pushstring(L, s->what), lua_setfield(L, -2, "what");
    lua_pushinteger(L, s->rank), lua_setfield(L, -2, "rank");
    lua_pushnumber(L, s->start), lua_setfield(L, -2, "start");
    lua_pushnumber(L, s->end), lua_setfield(L, -2, "end");
    lua_pushnumber(L, s->waited), lua_setfield(L, -2, "waited");
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

static int write_trace(lua_State *L) {
  Rille *r = binding_of(L);
  if (!r->ctx->spans)
    raise_value(L, r, "write_trace: no spans are recorded\nsay spans(true) first");
  check_status(L, r,
               span_log_write_trace(r->ctx->spans, string_check(L, r, 1, "write_trace: path")));
  return 0;
}

// ---- parameters, randomness

// param(name, shape, {dtype =}): declared; storage comes at first touch or with a weight set.
static int param(lua_State *L) {
  Rille *r = binding_of(L);
  const char *name = string_check(L, r, 1, "param: name");
  int64_t shape[MAX_DIMS];
  int next, ndim = shape_check(L, r, 2, shape, &next);
  MakeOptions options;
  make_options(L, r, next, "param", &options);
  if (options.dtype > DT_BF16)
    raise_value(L, r, "param: a parameter is f32, f64 or bf16, not %s", dtype_name(options.dtype));
  Tensor *out;
  check_status(L, r, param_new(r->ctx, name, options.dtype, ndim, shape, &out));
  push_owned(L, r, out);
  return 1;
}

// The part {dim =, at =, full =} at 3: x is entries at .. of dimension dim, which is full long.
static SamplePart part_check(lua_State *L, Rille *r, const Tensor *x) {
  static const char *const keys[] = {"dim", "at", "full"};
  int64_t v[3];
  table_check(L, r, 3, "dropout: the part");
  for (int i = 0; i < 3; i++) {
    lua_getfield(L, 3, keys[i]);
    v[i] = integer_check(L, r, -1, "dropout: dim, at and full of the part");
    lua_pop(L, 1);
  }
  int64_t dim = v[0] < 0 ? v[0] + x->ndim : v[0], after = 1;
  if (dim < 0 || dim >= x->ndim)
    raise_value(L, r, "dropout: x has %d dimensions, none of them is %d", x->ndim, (int)v[0]);
  if (v[1] < 0 || v[1] > v[2] - x->shape[dim])
    raise_value(L, r, "dropout: %lld from %lld on is no part of %lld", (long long)x->shape[dim],
                (long long)v[1], (long long)v[2]);
  for (int d = (int)dim + 1; d < x->ndim; d++) after *= x->shape[d];
  return (SamplePart){x->shape[dim] * after, v[2] * after, v[1] * after};
}

// dropout(x, p, part): the mask depends on seed, module, ordinal of the call, step, sample and
// element; part: x is cut along a dimension, and gets its part of the mask.
static int dropout(lua_State *L) {
  Rille *r = binding_of(L);
  Tensor *t = tensor_check(L, r, 1, "dropout: x"), *out;
  SamplePart part = {0};
  if (!lua_isnoneornil(L, 3)) part = part_check(L, r, t);
  r->n_calls++;
  if (r->region) checkpoint_saw(L, r, &t, 1);
  Status status = ops_dropout(r->ctx, t, number_check(L, r, 2, "dropout: p"), &part, &out);
  if (status != ST_OK) return raise_status(L, r, status, &t, 1);
  push_tensor(L, r, out);
  return 1;
}

// core.kernels(): "amx, products by rille".
static int kernels(lua_State *L) {
  OpsCpu cpu = ops_cpu();
  lua_pushfstring(L, "%s, products by %s", cpu.level, cpu.blas);
  return 1;
}

static const luaL_Reg core_functions[] = {
    {"begin_step", begin_step},
    {"end_step", end_step},
    {"set_unit", set_unit},
    {"begin_microbatch", begin_microbatch},
    {"place", place},
    {"end_microbatch", end_microbatch},
    {"data", mark_data},
    {"release", release},
    {"keep_order", keep_order},
    {"recomputing", recomputing},
    {"scope", run_scope},
    {"module_enter", module_enter},
    {"module_path", module_path},
    {"module_leave", module_leave},
    {"memory", memory},
    {"reset_peaks", reset_peaks},
    {"flops", flops},
    {"arena_bytes", arena_bytes},
    {"clock", now},
    {"fail_at", fail_at},
    {"trim", trim},
    {"profile", profile},
    {"spans", spans},
    {"span", span},
    {"spans_list", spans_list},
    {"write_trace", write_trace},
    {"param", param},
    {"hash", hash},
    {"kernels", kernels},
    {"seed", seed},
    {"tied_exchange", exchange},
    {"elsewhere", elsewhere},
    {"is_placed", is_placed},
    {"unplace", unplace},
    {NULL, NULL},
};

void core_bind(lua_State *L, Rille *r, int rille, int methods) {
  lua_getfield(L, rille, "core");
  binding_register(L, r, core_functions);
  bind_module_call(L, r);
  lua_pushstring(L, RILLE_VERSION), lua_setfield(L, -2, "version");
  lua_pushinteger(L, r->rank), lua_setfield(L, -2, "rank");
  lua_pushinteger(L, r->world), lua_setfield(L, -2, "world");
  lua_pop(L, 1);
  binding_push(L, r, dropout);
  lua_pushvalue(L, -1);
  lua_setfield(L, rille, "dropout");
  lua_setfield(L, methods, "dropout");
}
