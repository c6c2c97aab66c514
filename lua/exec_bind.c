// exec_bind - the executor over stages written in Lua: rille.core.exec{sched =, comm =, ...}.
//
// Callbacks, each entered through one pcall; stages, ports and values as exec.h says:
//   forward(stage, mb, ins) -> outs
//       ins, outs: a list of ports, each a list of tensors with their number in n
//   backward(stage, mb, half, douts, note) -> ins, note
//       ins: the leaves that forward was given; their gradients go to the stages before
//   wgrad(stage, mb), reduce_grad(stage), reduce_tied(group, stage), step(stage)
//
// `units`, a list by stage, names the last unit of each, for messages.
#include "lua/binding.h"

#include "core/spans.h"
#include "lua/comm_bind.h"
#include "lua/sched_bind.h"
#include "parallel/exec.h"

#include <string.h>

static const char EXEC[] = "rille.exec";

typedef struct ExecBox {
  Exec *exec;
  Rille *r;
  lua_State *L;     // that run() was called in
  int callbacks;    // stack index of the table that exec{} was given, while it runs
  const char *name; // of the callback that runs
  const Sched *sched;
  int rank;
} ExecBox;

// ---- what crosses between C and Lua

// One callback under way: its arguments are pushed and its results read inside the pcall.
typedef struct Callback {
  ExecBox *box;
  StageCall *call; // forward and backward
  int stage, mb;   // the others; for reduce_tied mb is the group
} Callback;

// Pushes a port's tensors as a list {n =, ...}; missing ones are false. Values of a forward are
// leaves of the stage's graph.
static void push_port(lua_State *L, Rille *r, const Port *port, bool is_forward) {
  const Parcel *parcel = port->parcel;
  int n = parcel ? parcel->n : 0;
  lua_createtable(L, n, 2);
  for (int i = 0; i < n; i++) {
    Tensor *value = parcel->value[i];
    if (!value && is_forward) { // a stage may give nil
      lua_pushnil(L);
    } else if (!value) {
      lua_pushboolean(L, 0);
    } else {
      if (is_forward) {
        value->depends_data = true;
        value->requires_grad = parcel->wants_grad[i] && r->ctx->grad_enabled;
      }
      push_owned(L, r, tensor_retain(value));
    }
    lua_rawseti(L, -2, i + 1);
  }
  lua_pushinteger(L, n), lua_setfield(L, -2, "n");
  lua_pushinteger(L, port->stage), lua_setfield(L, -2, "stage");
}

static void push_ports(lua_State *L, Rille *r, const Port *port, int n, bool is_forward) {
  lua_createtable(L, n, 0);
  for (int k = 0; k < n; k++) {
    push_port(L, r, &port[k], is_forward);
    lua_rawseti(L, -2, k + 1);
  }
}

// The list at the top is what goes out of a port. The parcel owns the bytes from here on; the
// script's handle and the graph keep what backward saved.
static void read_port(lua_State *L, Rille *r, Port *port, const char *unit) {
  Parcel *parcel = port->parcel;
  lua_getfield(L, -1, "n");
  int n = (int)luaL_optinteger(L, -1, (lua_Integer)lua_rawlen(L, -2));
  lua_pop(L, 1);
  if (n > PARCEL_MAX)
    raise_value(L, r,
                "%s gave %d tensors to stage %d (values that it reads by name count too), at most "
                "%d are possible",
                unit, n, port->stage, PARCEL_MAX);
  for (int i = 0; i < n; i++) {
    lua_rawgeti(L, -1, i + 1);
    Tensor *t = tensor_at(L, r, -1);
    parcel->n = i + 1;
    if (lua_isnil(L, -1)) {
      lua_pop(L, 1);
      continue;
    }
    if (!t)
      raise_value(L, r, "%s gave a %s to stage %d: only tensors and nil go from stage to stage",
                  unit, luaL_typename(L, -1), port->stage);
    check_status(L, r, tensor_detach(r->ctx, t, &parcel->value[i]));
    parcel->wants_grad[i] = t->requires_grad && r->ctx->grad_enabled;
    lua_pop(L, 1);
  }
}

// Handles of what went out become weak: the parcel, and what backward saved, keep the bytes.
static void weaken_port(lua_State *L, Rille *r, int n) {
  for (int i = 0; i < n; i++) {
    lua_rawgeti(L, -1, i + 1);
    Tensor *t = tensor_at(L, r, -1);
    if (t && !t->weak && !t->param && t->storage) tensor_weaken(t);
    lua_pop(L, 1);
  }
}

static void read_ports(lua_State *L, Rille *r, int index, Port *port, int n, const char *unit) {
  for (int pass = 0; pass < 2; pass++) {
    for (int k = 0; k < n; k++) {
      if (lua_rawgeti(L, index, k + 1) != LUA_TTABLE)
        raise_value(L, r, "%s gave nothing for edge %d", unit, k);
      if (pass == 0)
        read_port(L, r, &port[k], unit);
      else
        weaken_port(L, r, port[k].parcel->n);
      lua_pop(L, 1);
    }
  }
}

// The gradients of the leaves in the list at the top.
static void read_grads(lua_State *L, Rille *r, Port *port) {
  if (!port->parcel) return;
  lua_getfield(L, -1, "n");
  int n = (int)luaL_optinteger(L, -1, (lua_Integer)lua_rawlen(L, -2));
  lua_pop(L, 1);
  for (int i = 0; i < n && i < PARCEL_MAX; i++) {
    lua_rawgeti(L, -1, i + 1);
    Tensor *t = tensor_at(L, r, -1);
    lua_pop(L, 1);
    port->parcel->n = i + 1;
    if (!t || !t->grad) continue;
    port->parcel->value[i] = t->grad;
    t->grad = NULL;
  }
}

// ---- the callbacks

static int get_callback(lua_State *L, const ExecBox *box, int callbacks) {
  return lua_getfield(L, callbacks, box->name);
}

// Pushes the name of what ends a stage, "unit h.3" or "stage 2"; the stack keeps the words.
static const char *push_unit(lua_State *L, int stage) {
  if (lua_getfield(L, 2, "units") == LUA_TTABLE && lua_rawgeti(L, -1, stage + 1) == LUA_TSTRING)
    return lua_pushfstring(L, "unit %s", lua_tostring(L, -1));
  return lua_pushfstring(L, "stage %d", stage);
}

// Under pcall: [1] Callback, [2] the table of callbacks.
static int stage_callback(lua_State *L) {
  const Callback *callback = lua_touserdata(L, 1);
  StageCall *call = callback->call;
  Rille *r = callback->box->r;
  bool is_forward = call->kind == ACTION_F;
  get_callback(L, callback->box, 2);
  lua_pushinteger(L, call->stage);
  lua_pushinteger(L, call->mb);
  if (is_forward) {
    push_ports(L, r, call->in, call->n_in, true);
    lua_call(L, 3, 1);
    luaL_checktype(L, -1, LUA_TTABLE);
    int outs = lua_gettop(L);
    const char *unit = push_unit(L, call->stage);
    read_ports(L, r, outs, call->out, call->n_out, unit);
    return 0;
  }
  lua_pushstring(L, action_text(call->kind));
  push_ports(L, r, call->out, call->n_out, false);
  lua_pushnumber(L, call->n_out > 0 && call->out[0].parcel ? call->out[0].parcel->note : 0);
  lua_call(L, 5, 2);
  int given = lua_gettop(L) - 1;
  double note = lua_tonumber(L, given + 1);
  for (int k = 0; k < call->n_in; k++) {
    if (lua_rawgeti(L, given, k + 1) != LUA_TTABLE)
      raise_value(L, r, "a stage gave no gradients for edge %d", k);
    read_grads(L, r, &call->in[k]);
    if (call->in[k].parcel) call->in[k].parcel->note = note;
    lua_pop(L, 1);
  }
  return 0;
}

static int plain_callback(lua_State *L) {
  const Callback *callback = lua_touserdata(L, 1);
  if (get_callback(L, callback->box, 2) == LUA_TNIL) return 0;
  bool is_tied = strcmp(callback->box->name, "reduce_tied") == 0;
  lua_pushinteger(L, is_tied ? callback->mb : callback->stage);
  lua_pushinteger(L, is_tied ? callback->stage : callback->mb);
  lua_call(L, 2, 0);
  return 0;
}

static Status enter(ExecBox *box, const char *name, lua_CFunction body, Callback *callback) {
  lua_State *L = box->L;
  if (!lua_checkstack(L, 8)) return fail(ST_ENOMEM, "out of memory for a callback");
  box->name = name;
  lua_pushcfunction(L, body);
  lua_pushlightuserdata(L, callback);
  lua_pushvalue(L, box->callbacks);
  int failed = lua_pcall(L, 2, 0, 0);
  box->r->L = L;
  return failed ? fail_script(L, box->r) : ST_OK;
}

static Status on_stage(void *user, StageCall *call) {
  ExecBox *box = user;
  Callback callback = {.box = box, .call = call};
  return enter(box, call->kind == ACTION_F ? "forward" : "backward", stage_callback, &callback);
}

static Status on_plain(ExecBox *box, const char *name, int stage, int mb) {
  Callback callback = {.box = box, .stage = stage, .mb = mb};
  return enter(box, name, plain_callback, &callback);
}

static Status on_wgrad(void *user, int stage, int mb) { return on_plain(user, "wgrad", stage, mb); }
static Status on_reduce_grad(void *user, int stage) {
  return on_plain(user, "reduce_grad", stage, -1);
}
static Status on_reduce_tied(void *user, int group, int stage) {
  return on_plain(user, "reduce_tied", stage, group);
}
static Status on_step(void *user, int stage) { return on_plain(user, "step", stage, -1); }

// ---- the object

static void *field(lua_State *L, const char *name) {
  lua_getfield(L, 1, name);
  return lua_touserdata(L, -1);
}

// exec{sched =, comm =, units = {...}, forward =, backward =, wgrad =, ...}
static int exec_make(lua_State *L) {
  Rille *r = binding_of(L);
  luaL_checktype(L, 1, LUA_TTABLE);
  field(L, "sched");
  const SchedBox *sched = sched_check_box(L, r, -1);
  field(L, "comm");
  Comm *comm = comm_check_box(L, r, -1);
  ExecBox *box = box_push(L, EXEC, sizeof *box);
  lua_pushvalue(L, 1); // callbacks, schedule and group live as long as the executor
  lua_setiuservalue(L, -2, 1);
  box->r = r;
  box->sched = sched->lowered;
  box->rank = comm->rank;
  ExecOptions options = {
      .ctx = r->ctx,
      .comm = comm,
      .sched = sched->lowered,
      .report = sched->report,
      .ops = {on_stage, on_stage, on_wgrad, on_reduce_grad, on_reduce_tied, on_step},
      .user = box};
  check_status(L, r, exec_new(&options, &box->exec));
  return 1;
}

static int exec_gc(lua_State *L) {
  ExecBox *box = lua_touserdata(L, 1);
  exec_free(box->exec);
  box->exec = NULL;
  return 0;
}

static int run(lua_State *L, Rille *r, ExecBox *box, bool is_forward, int mbs) {
  box->L = L;
  lua_getiuservalue(L, 1, 1);
  box->callbacks = lua_gettop(L);
  Status status = is_forward ? exec_forward(box->exec, mbs) : exec_run(box->exec);
  if (status != ST_OK) return raise_status(L, r, status, NULL, 0);
  return 0;
}

static int exec_bind_run(lua_State *L) {
  Rille *r = binding_of(L);
  return run(L, r, box_check(L, r, 1, EXEC), false, 0);
}

// forward(mbs): forward passes alone.
static int exec_bind_forward(lua_State *L) {
  Rille *r = binding_of(L);
  return run(L, r, box_check(L, r, 1, EXEC), true,
             (int)integer_check(L, r, 2, "forward: microbatches"));
}

// spans(): of the latest run, as one string of doubles {start, end, waited, from, sent, arrived}
// for each action of this rank's row: what string.unpack reads and what goes to other ranks as it
// is.
static int exec_bind_spans(lua_State *L) {
  Rille *r = binding_of(L);
  const ExecBox *box = box_check(L, r, 1, EXEC);
  const ExecSpan *span = exec_spans(box->exec);
  int n = box->sched->row[box->rank].count;
  luaL_Buffer out;
  luaL_buffinit(L, &out);
  for (int i = 0; i < n; i++) {
    double row[SPAN_FIELDS] = {span[i].start, span[i].end,  span[i].waited,
                               span[i].from,  span[i].sent, span[i].arrived};
    luaL_addlstring(&out, (const char *)row, sizeof row);
  }
  luaL_pushresult(&out);
  return 1;
}

static const luaL_Reg methods[] = {{"run", exec_bind_run},
                                   {"forward", exec_bind_forward},
                                   {"spans", exec_bind_spans},
                                   {NULL, NULL}};
static const luaL_Reg metamethods[] = {{"__gc", exec_gc}, {NULL, NULL}};
static const luaL_Reg functions[] = {{"exec", exec_make}, {NULL, NULL}};

void exec_bind(lua_State *L, Rille *r, int rille) {
  box_bind(L, r, EXEC, methods, metamethods);
  lua_getfield(L, rille, "core");
  binding_register(L, r, functions);
  lua_pop(L, 1);
}
