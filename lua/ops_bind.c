// ops_bind - the rows of the op table as Lua functions and methods.
//
// A call's arguments are the inputs, then the row's arguments in order. The last value may be a
// table: its array part is positional, its hash part names arguments. A list argument takes a
// table, or numbers:
//
//    x:sum()   x:sum(0)   x:sum(0, 1)   x:sum({0, 1}, true)   x:sum{0, 1, keepdim = true}
//
// The collectives of comm_ops.def are functions of rille.core: core.all_gather(x, {group = g, dim =
// 1}).
#include "lua/binding.h"
#include "lua/comm_bind.h"
#include "ops/ops.h"
#include "parallel/comm_ops.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum ArgType { ARG_INT, ARG_FLOAT, ARG_BOOL, ARG_DTYPE, ARG_LIST, ARG_GROUP } ArgType;

typedef struct ArgBinding {
  char name[24];
  ArgType type;
  int place; // in OpArgs.v
  bool required;
} ArgBinding;

typedef struct OpBinding {
  const Op *op;
  int n_inputs, n_args;
  unsigned optional; // mask of inputs
  unsigned required; // mask of args
  bool number_after_list;
  ArgBinding args[OP_MAX_ARGS + 1];
  OpArgs defaults;
} OpBinding;

// A call under way.
typedef struct Call {
  lua_State *L;
  Rille *r;
  const OpBinding *b;
  Tensor *in[OP_MAX_VARIADIC];
  int n_in;
  OpArgs args;
  unsigned given;   // mask of args
  unsigned numbers; // mask of inputs
} Call;

static void parse_row(const Op *op, OpBinding *out) {
  static const char *const types[] = {"int", "float", "bool", "dtype", "list", "group"};
  ArgSpec specs[OP_MAX_ARGS + 1];
  out->op = op;
  for (const char *at = op->inputs; *at; out->n_inputs++) {
    size_t n = strcspn(at, " ");
    if (at[n - 1] == '?') out->optional |= 1u << out->n_inputs;
    at += n;
    while (*at == ' ') at++;
  }
  out->n_args = op_arg_specs(op, specs);
  bool after_list = false;
  for (int k = 0, place = 0; k < out->n_args; k++) {
    ArgBinding *arg = &out->args[k];
    memcpy(arg->name, specs[k].name, sizeof arg->name);
    arg->required = specs[k].required;
    if (arg->required) out->required |= 1u << k;
    int type = 0;
    while (strcmp(types[type], specs[k].type) != 0) type++;
    arg->type = (ArgType)type;
    if (arg->type == ARG_LIST)
      after_list = true;
    else
      arg->place = place++;
    if (after_list && (arg->type == ARG_INT || arg->type == ARG_FLOAT))
      out->number_after_list = true;
  }
  op_args_default(op, &out->defaults);
}

static int bad_arg(Call *c, int k, int index, const char *wanted) {
  return raise_value(c->L, c->r, "%s: %s must be %s, got %s", c->b->op->name, c->b->args[k].name,
                     wanted, luaL_typename(c->L, index));
}

static void list_add(Call *c, int k, int index) {
  int is_integer;
  lua_Integer value = lua_tointegerx(c->L, index, &is_integer);
  if (!is_integer) bad_arg(c, k, index, "a list of integers");
  if (c->args.n_list == OP_MAX_LIST)
    raise_value(c->L, c->r, "%s: %s has more than %d numbers", c->b->op->name, c->b->args[k].name,
                OP_MAX_LIST);
  c->args.list[c->args.n_list++] = value;
}

// The list argument from the array part of a table.
static void list_from_table(Call *c, int k, int index) {
  int n = (int)lua_rawlen(c->L, index);
  c->args.n_list = 0;
  for (int i = 1; i <= n; i++) {
    lua_rawgeti(c->L, index, i);
    list_add(c, k, -1);
    lua_pop(c->L, 1);
  }
}

// One argument from the value at an index.
static void set_arg(Call *c, int k, int index) {
  lua_State *L = c->L;
  const ArgBinding *arg = &c->b->args[k];
  ArgValue *value = &c->args.v[arg->place];
  int type = lua_type(L, index), is_integer;
  if (c->given >> k & 1) raise_value(L, c->r, "%s: %s is given twice", c->b->op->name, arg->name);
  if (type == LUA_TNIL) return;
  c->given |= 1u << k;
  switch (arg->type) {
  case ARG_INT:
    value->i = lua_tointegerx(L, index, &is_integer);
    if (!is_integer || type != LUA_TNUMBER) bad_arg(c, k, index, "an integer");
    break;
  case ARG_FLOAT:
    if (type != LUA_TNUMBER) bad_arg(c, k, index, "a number");
    value->f = lua_tonumber(L, index);
    break;
  case ARG_BOOL:
    if (type != LUA_TBOOLEAN) bad_arg(c, k, index, "true or false");
    value->i = lua_toboolean(L, index);
    break;
  case ARG_DTYPE: value->i = dtype_check(L, c->r, index); break;
  case ARG_GROUP: {
    const Comm *comm = comm_at(L, c->r, index);
    if (comm)
      value->i = comm->id;
    else
      bad_arg(c, k, index, "a group of ranks");
    break;
  }
  case ARG_LIST:
    if (type == LUA_TTABLE) {
      list_from_table(c, k, index);
    } else if (type == LUA_TNUMBER) {
      c->args.n_list = 0;
      list_add(c, k, index);
    } else {
      bad_arg(c, k, index, "a table of integers");
    }
    break;
  }
}

static void set_named(Call *c, const char *name, int index) {
  const char *names[OP_MAX_ARGS + 1];
  for (int k = 0; k < c->b->n_args; k++) {
    names[k] = c->b->args[k].name;
    if (strcmp(names[k], name) != 0) continue;
    set_arg(c, k, index);
    return;
  }
  const char *near = nearest_name(name, names, c->b->n_args);
  char hint[256] = "it has none";
  if (near) {
    snprintf(hint, sizeof hint, "did you mean \"%s\"?", near);
  } else if (c->b->n_args > 0) {
    int at = snprintf(hint, sizeof hint, "options are ");
    for (int k = 0; k < c->b->n_args; k++)
      at += snprintf(hint + at, sizeof hint - (size_t)at, "%s%s", k ? ", " : "", names[k]);
  }
  raise_value(c->L, c->r, "%s: there is no option \"%s\"\n%s", c->b->op->name, name, hint);
}

// The table at `index` gives arguments from k on (array part) and by name. Returns true if that
// was so, false if it is a plain list for argument k.
static bool options_table(Call *c, int k, int index) {
  lua_State *L = c->L;
  bool named = false;
  lua_pushnil(L);
  while (lua_next(L, index)) {
    if (lua_type(L, -2) == LUA_TSTRING) {
      named = true;
      set_named(c, lua_tostring(L, -2), lua_gettop(L));
    }
    lua_pop(L, 1);
  }
  int n = (int)lua_rawlen(L, index);
  bool list = k < c->b->n_args && c->b->args[k].type == ARG_LIST;
  if (list && n > 0) {
    bool nested = lua_rawgeti(L, index, 1) != LUA_TNUMBER;
    lua_pop(L, 1);
    if (!nested) {
      set_arg(c, k, index);
      return named;
    }
  }
  if (list && n == 0 && !named) { // {}: an empty list
    set_arg(c, k, index);
    return false;
  }
  for (int i = 1; i <= n; i++, k++) {
    if (k >= c->b->n_args)
      raise_value(L, c->r, "%s: too many arguments (%d)", c->b->op->name, c->n_in + k);
    lua_rawgeti(L, index, i);
    set_arg(c, k, lua_gettop(L));
    lua_pop(L, 1);
  }
  return true;
}

static void parse_args(Call *c, int index, int top) {
  lua_State *L = c->L;
  const OpBinding *b = c->b;
  int k = 0;
  for (; index <= top; index++, k++) {
    int type = lua_type(L, index);
    if (type == LUA_TTABLE) {
      if (!options_table(c, k, index)) continue;
      if (index < top)
        raise_value(L, c->r, "%s: nothing may follow the table of options", b->op->name);
      break;
    }
    if (k >= b->n_args) {
      if (type == LUA_TNIL) continue;
      raise_value(L, c->r, "%s: too many arguments\nit takes (%s%s%s)", b->op->name, b->op->inputs,
                  b->n_args ? ", " : "", b->op->args);
    }
    set_arg(c, k, index);
    if (b->args[k].type == ARG_LIST && type == LUA_TNUMBER && !b->number_after_list)
      while (index < top && lua_type(L, index + 1) == LUA_TNUMBER) list_add(c, k, ++index);
  }
  unsigned missing = b->required & ~c->given;
  if (missing)
    raise_value(L, c->r, "%s: %s is missing\nit takes (%s, %s)", b->op->name,
                b->args[__builtin_ctz(missing)].name, b->op->inputs, b->op->args);
}

// Numbers among the inputs become 0-d tensors, owned here until the call is done: Lua has no
// handle of them, so the collector has nothing to do.
static Status scalars_new(Call *c) {
  const Tensor *like = NULL;
  for (int j = 0; j < c->n_in; j++) // a floating point operand decides before an integer one
    if (c->in[j] && (!like || (like->dtype > DT_BF16 && c->in[j]->dtype <= DT_BF16)))
      like = c->in[j];
  for (int j = 0; j < c->n_in; j++)
    if (c->numbers >> j & 1) TRY(scalar_new(c->L, c->r, j + 1, like, &c->in[j]));
  return ST_OK;
}

static void scalars_release(Call *c) {
  for (int j = 0; j < c->n_in; j++)
    if (c->numbers >> j & 1) tensor_release(c->r->ctx, c->in[j]);
}

// Raises; the scalars, which the message names, are left to Lua.
static int raise_call(Call *c, Status status) {
  for (int j = 0; j < c->n_in; j++)
    if ((c->numbers >> j & 1) && c->in[j]) push_owned(c->L, c->r, c->in[j]);
  return raise_status(c->L, c->r, status, c->in, c->n_in);
}

static int bad_input(Call *c, int j) {
  const char *at = c->b->op->inputs;
  for (int k = 0; k < j; k++) at += strcspn(at, " ") + 1;
  return raise_value(c->L, c->r, "%s: %.*s must be a tensor or a number, got %s", c->b->op->name,
                     (int)strcspn(at, " ?*"), at, luaL_typename(c->L, j + 1));
}

// A table of tensors; returns the index after it.
static int variadic_inputs(Call *c) {
  lua_State *L = c->L;
  const char *name = c->b->op->name;
  if (tensor_at(L, c->r, 1)) { // x:cat(y, z, 0): tensors in a row
    int i = 1;
    for (; tensor_at(L, c->r, i); i++) {
      if (c->n_in == OP_MAX_VARIADIC)
        raise_value(L, c->r, "%s: at most %d tensors", name, OP_MAX_VARIADIC);
      c->in[c->n_in++] = tensor_at(L, c->r, i);
    }
    return i;
  }
  if (!lua_istable(L, 1))
    raise_value(L, c->r, "%s: a table of tensors is wanted, got %s", name, luaL_typename(L, 1));
  int n = (int)lua_rawlen(L, 1);
  if (n > OP_MAX_VARIADIC)
    raise_value(L, c->r, "%s: at most %d tensors, got %d", name, OP_MAX_VARIADIC, n);
  for (int i = 1; i <= n; i++) {
    lua_rawgeti(L, 1, i);
    c->in[c->n_in++] = tensor_at(L, c->r, -1);
    if (!c->in[i - 1])
      raise_value(L, c->r, "%s: entry %d must be a tensor, got %s", name, i, luaL_typename(L, -1));
    lua_pop(L, 1); // the table keeps it
  }
  lua_pushnil(L);
  while (lua_next(L, 1)) { // rille.cat{a, b, dim = 1}
    if (lua_type(L, -2) == LUA_TSTRING) set_named(c, lua_tostring(L, -2), lua_gettop(L));
    lua_pop(L, 1);
  }
  return 2;
}

// Reads the inputs; returns the index of the first argument after them.
static int parse_inputs(Call *c, int top) {
  const OpBinding *b = c->b;
  if (b->op->flags & OP_VARIADIC) return variadic_inputs(c);
  int index = 1;
  for (int j = 0; j < b->n_inputs; j++) {
    c->in[j] = NULL;
    c->n_in = j + 1;
    if (index <= top) {
      c->in[j] = tensor_at(c->L, c->r, index);
      if (c->in[j]) {
        index++;
        continue;
      }
      int type = lua_type(c->L, index);
      if (b->optional >> j & 1) {
        if (type == LUA_TNIL) index++;
        continue;
      }
      if (type == LUA_TNUMBER || type == LUA_TBOOLEAN) {
        c->numbers |= 1u << j;
        index++;
        continue;
      }
    }
    if (!(b->optional >> j & 1)) bad_input(c, j);
  }
  return index;
}

int op_call(lua_State *L, Rille *r, const OpBinding *b, bool in_place) {
  Call c;
  c.L = L;
  c.r = r;
  c.b = b;
  c.n_in = 0;
  c.given = c.numbers = 0;
  c.args.n_list = -1;
  int top = lua_gettop(L);
  if (b->n_args > 0) memcpy(c.args.v, b->defaults.v, sizeof c.args.v);
  int index = parse_inputs(&c, top);
  if (index <= top || b->required) parse_args(&c, index, top);
  r->n_calls++;
  if (r->region) checkpoint_saw(L, r, c.in, c.n_in);
  Tensor *out[OP_MAX_OUT];
  Status status = c.numbers ? scalars_new(&c) : ST_OK;
  if (status == ST_OK && r->region && b->op->flags & OP_KEPT)
    status = checkpoint_apply(r, b->op, c.in, c.n_in, &c.args, out);
  else if (status == ST_OK)
    status = in_place ? op_apply_inplace(r->ctx, b->op, c.in, c.n_in, &c.args)
                      : op_apply(r->ctx, b->op, c.in, c.n_in, &c.args, out);
  if (status != ST_OK) raise_call(&c, status);
  if (c.numbers) scalars_release(&c);
  if (in_place) {
    lua_settop(L, 1);
    return 1;
  }
  for (int i = 0; i < b->op->n_out; i++) push_tensor(L, r, out[i]);
  return b->op->n_out;
}

Tensor *op_push(lua_State *L, Rille *r, const char *name, Tensor **in, int n_in,
                const OpArgs *args) {
  const Op *op = op_find(name);
  assert(op && op->n_out == 1);
  Tensor *out;
  r->n_calls++;
  if (r->region) checkpoint_saw(L, r, in, n_in);
  Status status = op_apply(r->ctx, op, in, n_in, args, &out);
  if (status != ST_OK) raise_status(L, r, status, in, n_in);
  push_tensor(L, r, out);
  return out;
}

static int call_op(lua_State *L) {
  return op_call(L, binding_of(L), lua_touserdata(L, lua_upvalueindex(2)), false);
}

static int call_op_inplace(lua_State *L) {
  return op_call(L, binding_of(L), lua_touserdata(L, lua_upvalueindex(2)), true);
}

static void push_call(lua_State *L, Rille *r, OpBinding *binding, lua_CFunction fn) {
  lua_pushlightuserdata(L, r);
  lua_pushlightuserdata(L, binding);
  lua_pushcclosure(L, fn, 2);
}

// The rows [first, end) as tables.
static int list_rows(lua_State *L, int first, int end) {
  Rille *r = binding_of(L);
  lua_newtable(L);
  int n = 0;
  for (int i = first; i < end; i++) {
    const Op *op = r->ops[i].op;
    if (op->flags & OP_HIDDEN) continue;
    lua_createtable(L, 0, 6);
    lua_pushstring(L, op->name), lua_setfield(L, -2, "name");
    lua_pushstring(L, op->inputs), lua_setfield(L, -2, "inputs");
    lua_pushstring(L, op->args), lua_setfield(L, -2, "args");
    lua_pushstring(L, op->help), lua_setfield(L, -2, "help");
    lua_pushinteger(L, op->n_out), lua_setfield(L, -2, "outputs");
    lua_pushboolean(L, op->grad != NULL), lua_setfield(L, -2, "differentiable");
    lua_pushboolean(L, (op->flags & OP_ELEMENTWISE) != 0), lua_setfield(L, -2, "in_place");
    lua_rawseti(L, -2, ++n);
  }
  return 1;
}

// core.ops(): the rows, for help and for tests; core.comm_ops(): the collectives.
static int list_ops(lua_State *L) { return list_rows(L, 0, OP_COUNT); }
static int list_comm_ops(lua_State *L) { return list_rows(L, OP_COUNT, COMM_OP_END); }

// The arithmetic metamethods are rows too.
static const struct {
  const char *event, *op;
} metamethods[] = {{"__add", "add"}, {"__sub", "sub"}, {"__mul", "mul"},
                   {"__div", "div"}, {"__pow", "pow"}, {"__unm", "neg"}};

// Lua passes the operand of a unary minus twice.
static int call_unary(lua_State *L) {
  lua_settop(L, 1);
  return call_op(L);
}

void ops_bind(lua_State *L, Rille *r, int rille, int methods) {
  r->ops = lua_newuserdatauv(L, COMM_OP_END * sizeof *r->ops, 0);
  lua_setfield(L, LUA_REGISTRYINDEX, "rille.ops"); // lives as long as the state
  memset(r->ops, 0, COMM_OP_END * sizeof *r->ops);
  lua_rawgeti(L, LUA_REGISTRYINDEX, r->tensor_meta_ref);
  for (int i = 0; i < OP_COUNT; i++) {
    OpBinding *b = &r->ops[i];
    parse_row(op_row((OpId)i), b);
    for (size_t k = 0; k < sizeof metamethods / sizeof *metamethods; k++) {
      if (strcmp(metamethods[k].op, b->op->name) != 0) continue;
      push_call(L, r, b, b->n_inputs == 1 ? call_unary : call_op);
      lua_setfield(L, -2, metamethods[k].event);
    }
    if (b->op->flags & OP_HIDDEN) continue;
    push_call(L, r, b, call_op);
    lua_pushvalue(L, -1);
    lua_setfield(L, rille, b->op->name);
    lua_setfield(L, methods, b->op->name);
    if (!(b->op->flags & OP_ELEMENTWISE)) continue;
    char name[40];
    snprintf(name, sizeof name, "%s_", b->op->name);
    push_call(L, r, b, call_op_inplace);
    lua_setfield(L, methods, name);
  }
  lua_pop(L, 1);
  lua_getfield(L, rille, "core");
  binding_push(L, r, list_ops);
  lua_setfield(L, -2, "ops");
  binding_push(L, r, list_comm_ops);
  lua_setfield(L, -2, "comm_ops");
  for (int i = OP_COUNT; i < COMM_OP_END; i++) {
    parse_row(comm_op_row((CommOpId)i), &r->ops[i]);
    push_call(L, r, &r->ops[i], call_op);
    lua_setfield(L, -2, r->ops[i].op->name);
  }
  lua_pop(L, 1);
}
