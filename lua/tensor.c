// tensor - what a tensor can do in Lua beside the rows of the op table: its shape and values, its
// gradient, conversions, in-place filling, and the metamethods that are no arithmetic.
#include "lua/binding.h"

#include "core/rng.h"
#include "core/tape.h"
#include "core/weights.h"

#include <math.h>
#include <string.h>

static Tensor *self(lua_State *L, Rille *r) {
  Tensor *t = tensor_at(L, r, 1);
  if (!t)
    raise_value(L, r,
                "the first argument must be a tensor, got %s\nmethods are called with a "
                "colon: x:name()",
                luaL_typename(L, 1));
  return t;
}

static int tensor_gc(lua_State *L) {
  Rille *r = lua_touserdata(L, lua_upvalueindex(1));
  Tensor **slot = lua_touserdata(L, 1);
  tensor_release(r->ctx, *slot);
  *slot = NULL;
  return 0;
}

static int tensor_len(lua_State *L) {
  Rille *r = binding_of(L);
  Tensor *t = self(L, r);
  if (t->ndim == 0) raise_value(L, r, "a 0-d tensor has no length\nx:item() is its value");
  lua_pushinteger(L, t->shape[0]);
  return 1;
}

static int no_comparison(lua_State *L) {
  Rille *r = binding_of(L);
  return raise_value(L, r, "tensors are not compared with %s\nuse %s, which gives a tensor of bool",
                     lua_tostring(L, lua_upvalueindex(2)), lua_tostring(L, lua_upvalueindex(3)));
}

// ---- shape and kind

static int tensor_shape(lua_State *L) {
  Rille *r = binding_of(L);
  Tensor *t = self(L, r);
  for (int d = 0; d < t->ndim; d++) lua_pushinteger(L, t->shape[d]);
  return t->ndim;
}

static int tensor_size(lua_State *L) {
  Rille *r = binding_of(L);
  Tensor *t = self(L, r);
  int64_t d = integer_check(L, r, 2, "size: dim");
  int64_t at = d < 0 ? d + t->ndim : d;
  if (at < 0 || at >= t->ndim) {
    Status status = fail(ST_ERANGE, "size: there is no dimension %lld, valid are %d to %d",
                         (long long)d, -t->ndim, t->ndim - 1);
    raise_status(L, r, fail_hint(status, "dimensions count from 0"), &t, 1);
  }
  lua_pushinteger(L, t->shape[at]);
  return 1;
}

static int tensor_stride(lua_State *L) {
  Rille *r = binding_of(L);
  Tensor *t = self(L, r);
  for (int d = 0; d < t->ndim; d++) lua_pushinteger(L, t->stride[d]);
  return t->ndim;
}

static int tensor_ndim(lua_State *L) {
  lua_pushinteger(L, self(L, binding_of(L))->ndim);
  return 1;
}

static int tensor_count(lua_State *L) {
  lua_pushinteger(L, tensor_numel(self(L, binding_of(L))));
  return 1;
}

static int tensor_dtype(lua_State *L) {
  lua_pushstring(L, dtype_name(self(L, binding_of(L))->dtype));
  return 1;
}

static int tensor_device(lua_State *L) {
  Tensor *t = self(L, binding_of(L));
  lua_pushstring(L, t->storage ? t->storage->device->name : "cpu");
  return 1;
}

static int tensor_is_contiguous(lua_State *L) {
  lua_pushboolean(L, tensor_contiguous(self(L, binding_of(L))));
  return 1;
}

static int tensor_name(lua_State *L) {
  Tensor *t = self(L, binding_of(L));
  if (!t->param) return 0;
  lua_pushstring(L, t->param->name);
  return 1;
}

static void place(lua_State *L, Rille *r, Tensor *t) {
  if (!t->storage) check_status(L, r, param_place(r->ctx, t->param));
}

static int tensor_item_value(lua_State *L) {
  Rille *r = binding_of(L);
  Tensor *t = self(L, r);
  double unused;
  place(L, r, t);
  Status status = tensor_item(t, &unused);
  if (status != ST_OK) return raise_status(L, r, status, &t, 1);
  push_element(L, t, t->offset);
  return 1;
}

// ---- copies and conversions

static int tensor_detached(lua_State *L) {
  Rille *r = binding_of(L);
  Tensor *t = self(L, r), *out;
  place(L, r, t);
  return push_result(L, r, tensor_detach(r->ctx, t, &out), &out);
}

static int tensor_clone(lua_State *L) {
  Rille *r = binding_of(L);
  Tensor *t = self(L, r);
  op_push(L, r, "contiguous", &t, 1, NULL);
  return 1;
}

static int tensor_keep(lua_State *L) {
  Rille *r = binding_of(L);
  Status status = tensor_strengthen(self(L, r));
  if (status != ST_OK) return raise_status(L, r, status, NULL, 0);
  lua_settop(L, 1);
  return 1;
}

// x:to("f32"), x:to("meta"), x:to("cpu")
static int tensor_to(lua_State *L) {
  Rille *r = binding_of(L);
  Tensor *t = self(L, r);
  const char *what = string_check(L, r, 2, "to: what it becomes");
  bool meta = strcmp(what, "meta") == 0;
  if (meta || strcmp(what, "cpu") == 0) {
    if (meta == tensor_is_meta(t)) return lua_settop(L, 1), 1;
    if (!meta)
      raise_value(L, r, "to: a tensor on the meta device has no values to bring to the CPU");
    TensorSpec spec;
    Tensor *out;
    tensor_spec(t, &spec);
    Status status = tensor_new(r->ctx, &r->ctx->meta, &spec, MEM_ACTIVATIONS, &out);
    if (status == ST_OK) {
      out->requires_grad = t->requires_grad;
      out->depends_data = t->depends_data;
      out->depends_param = t->depends_param;
    }
    return push_result(L, r, status, &out);
  }
  DType dtype;
  if (dtype_from_name(&dtype, what) != ST_OK)
    raise_value(L, r,
                "to: \"%s\" is neither a dtype nor a device\ndtypes are f32 f64 bf16 i64 i32 "
                "u8 bool, devices cpu and meta",
                what);
  if (dtype == t->dtype) return lua_settop(L, 1), 1;
  OpArgs args = {.n_list = -1};
  args.v[0].i = dtype;
  op_push(L, r, "cast", &t, 1, &args);
  return 1;
}

// ---- gradients

static int tensor_requires_grad_(lua_State *L) {
  Rille *r = binding_of(L);
  Tensor *t = self(L, r);
  bool wanted = lua_isnone(L, 2) || lua_toboolean(L, 2);
  if (t->node)
    raise_value(L, r,
                "requires_grad_: only leaves can be told; this one was computed by %s\nuse "
                "x:detach() first",
                node_op(t->node)->name);
  if (wanted && t->dtype > DT_BF16)
    raise_value(L, r,
                "requires_grad_: only floating point tensors have gradients, this one is %s\n"
                "convert it with x:to(\"f32\")",
                dtype_name(t->dtype));
  t->requires_grad = wanted;
  if (t->param) t->param->frozen = !wanted;
  lua_settop(L, 1);
  return 1;
}

static int tensor_requires_grad(lua_State *L) {
  lua_pushboolean(L, self(L, binding_of(L))->requires_grad);
  return 1;
}

static int tensor_grad(lua_State *L) {
  Rille *r = binding_of(L);
  Tensor *t = self(L, r), *grad = t->grad, *out;
  if (t->param) check_status(L, r, param_grad(r->ctx, t->param, &grad));
  if (!grad) return lua_pushnil(L), 1;
  check_status(L, r, tensor_detach(r->ctx, grad, &out));
  push_owned(L, r, out);
  return 1;
}

static int tensor_zero_grad(lua_State *L) {
  Rille *r = binding_of(L);
  Tensor *t = self(L, r);
  for (int k = 0; t->param && k < t->param->n_uses; k++) t->param->uses[k].written = false;
  if (t->param) t->param->is_summed = false;
  tensor_release(r->ctx, t->grad);
  t->grad = NULL;
  lua_settop(L, 1);
  return 1;
}

static int tensor_backward(lua_State *L) {
  Rille *r = binding_of(L);
  Tensor *t = self(L, r), *g = NULL;
  if (!lua_isnoneornil(L, 2)) {
    g = tensor_check(L, r, 2, "backward: the gradient");
    if (g->ndim != t->ndim || !same_shape(t->ndim, g->shape, t->shape)) {
      Tensor *both[] = {t, g};
      Status status = fail(ST_ESHAPE, "backward: the gradient has another shape than the tensor");
      raise_status(L, r, status, both, 2);
    }
  }
  Status status = backward(r->ctx, &t, &g, 1, BACKWARD_B, NULL);
  if (status != ST_OK) return raise_status(L, r, status, &t, 1);
  return 0;
}

// ---- in place

// Raises if writing to t would lose a gradient or the bytes are gone.
static void check_writable(lua_State *L, Rille *r, Tensor *t, const char *fn) {
  Status status = tensor_alive(t);
  if (status == ST_OK && r->ctx->grad_enabled && t->requires_grad) {
    status = fail(ST_ESTATE, "%s: in-place on %s would lose a gradient", fn,
                  t->node ? "a recorded tensor" : "a leaf that wants one");
    fail_hint(status, "wrap it in rille.no_grad(function() ... end)");
  }
  if (status != ST_OK) raise_status(L, r, status, &t, 1);
}

static int recipe(lua_State *L, Rille *r, Tensor *t, RecipeKind kind, double a, double b) {
  Recipe begin = {.kind = kind, .a = a, .b = b};
  check_status(L, r, param_recipe(r->ctx, t->param, &begin));
  lua_settop(L, 1);
  return 1;
}

// Fills with the number at a stack index; 0: with zeros.
static int fill(lua_State *L, int index, const char *fn) {
  Rille *r = binding_of(L);
  Tensor *t = self(L, r);
  double value = index ? lua_tonumber(L, index) : 0;
  if (t->param && !t->param->set)
    return recipe(L, r, t, value == 0 ? RECIPE_ZEROS : RECIPE_CONSTANT, value, 0);
  check_writable(L, r, t, fn);
  check_status(L, r, index ? assign_value(L, r, index, t) : tensor_assign_number(r->ctx, t, 0));
  lua_settop(L, 1);
  return 1;
}

static int tensor_fill_(lua_State *L) {
  number_check(L, binding_of(L), 2, "fill_: the value");
  return fill(L, 2, "fill_");
}
static int tensor_zero_(lua_State *L) { return fill(L, 0, "zero_"); }

static int tensor_copy_(lua_State *L) {
  Rille *r = binding_of(L);
  Tensor *t = self(L, r);
  if (lua_type(L, 2) == LUA_TNUMBER) return fill(L, 2, "copy_");
  Tensor *from = tensor_check(L, r, 2, "copy_: the source");
  if (t->param && !t->param->set) {
    if (from->ndim != t->ndim || !same_shape(t->ndim, from->shape, t->shape)) {
      Tensor *both[] = {t, from};
      raise_status(L, r, fail(ST_ESHAPE, "copy_: a parameter takes its own shape"), both, 2);
    }
    Recipe begin = {.kind = RECIPE_DATA};
    place(L, r, from);
    op_push(L, r, "contiguous", &from, 1, NULL); // a copy: the source may change
    check_status(L, r, tensor_detach(r->ctx, tensor_at(L, r, -1), &begin.data));
    check_status(L, r, param_recipe(r->ctx, t->param, &begin));
    lua_settop(L, 1);
    return 1;
  }
  check_writable(L, r, t, "copy_");
  place(L, r, from);
  Status status = tensor_assign(r->ctx, t, from);
  Tensor *both[] = {t, from};
  if (status != ST_OK) return raise_status(L, r, status, both, 2);
  lua_settop(L, 1);
  return 1;
}

// The key of a draw that belongs to no parameter: saved with rille.random_state.
static int draw_(lua_State *L, RecipeKind kind, const char *fn) {
  Rille *r = binding_of(L);
  Tensor *t = self(L, r);
  bool normal = kind == RECIPE_NORMAL;
  double a = 0, b = 1;
  if (!lua_isnoneornil(L, 2))
    a = number_check(L, r, 2, normal ? "normal_: the mean" : "uniform_: the lower end");
  if (!lua_isnoneornil(L, 3))
    b = number_check(L, r, 3, normal ? "normal_: the deviation" : "uniform_: the upper end");
  if (t->param) {
    if (t->param->set) check_writable(L, r, t, fn);
    return recipe(L, r, t, kind, a, b);
  }
  check_writable(L, r, t, fn);
  lua_getfield(L, LUA_REGISTRYINDEX, "rille.table");
  lua_getfield(L, -1, normal ? "randn" : "rand");
  lua_createtable(L, t->ndim, 1);
  for (int d = 0; d < t->ndim; d++) lua_pushinteger(L, t->shape[d]), lua_rawseti(L, -2, d + 1);
  lua_pushstring(L, t->dtype == DT_F64 ? "f64" : "f32"), lua_setfield(L, -2, "dtype");
  if (tensor_is_meta(t)) return lua_settop(L, 1), 1;
  lua_call(L, 1, 1);
  Tensor *drawn = tensor_at(L, r, -1);
  double scale = normal ? b : b - a;
  int64_t n = tensor_numel(drawn);
  if (drawn->dtype == DT_F64)
    for (int64_t i = 0; i < n; i++)
      ((double *)tensor_data(drawn))[i] = a + scale * ((double *)tensor_data(drawn))[i];
  else
    for (int64_t i = 0; i < n; i++)
      ((float *)tensor_data(drawn))[i] =
          (float)(a + scale * (double)((float *)tensor_data(drawn))[i]);
  check_status(L, r, tensor_assign(r->ctx, t, drawn));
  lua_settop(L, 1);
  return 1;
}

static int tensor_normal_(lua_State *L) { return draw_(L, RECIPE_NORMAL, "normal_"); }
static int tensor_uniform_(lua_State *L) { return draw_(L, RECIPE_UNIFORM, "uniform_"); }

// ---- parameters

static int tensor_is_param(lua_State *L) {
  lua_pushboolean(L, self(L, binding_of(L))->param != NULL);
  return 1;
}

static Param *param_of(lua_State *L, Rille *r, const char *fn) {
  Tensor *t = self(L, r);
  if (!t->param) raise_value(L, r, "%s: this tensor is no parameter of a model", fn);
  return t->param;
}

static int tensor_rename(lua_State *L) {
  Rille *r = binding_of(L);
  check_status(
      L, r,
      param_rename(r->ctx, param_of(L, r, "rename"), string_check(L, r, 2, "rename: the name")));
  lua_settop(L, 1);
  return 1;
}

static int tensor_is_placed(lua_State *L) {
  Rille *r = binding_of(L);
  lua_pushboolean(L, param_of(L, r, "is_placed")->set != NULL);
  return 1;
}

static int tensor_freeze(lua_State *L) {
  Rille *r = binding_of(L);
  Param *param = param_of(L, r, "freeze");
  param->frozen = lua_isnone(L, 2) || lua_toboolean(L, 2);
  param->tensor->requires_grad = !param->frozen;
  lua_settop(L, 1);
  return 1;
}

static const luaL_Reg methods_list[] = {
    {"shape", tensor_shape},
    {"size", tensor_size},
    {"stride", tensor_stride},
    {"ndim", tensor_ndim},
    {"numel", tensor_count},
    {"dtype", tensor_dtype},
    {"device", tensor_device},
    {"is_contiguous", tensor_is_contiguous},
    {"name", tensor_name},
    {"item", tensor_item_value},
    {"tolist", tensor_tolist},
    {"detach", tensor_detached},
    {"clone", tensor_clone},
    {"keep", tensor_keep},
    {"to", tensor_to},
    {"requires_grad_", tensor_requires_grad_},
    {"requires_grad", tensor_requires_grad},
    {"grad", tensor_grad},
    {"zero_grad", tensor_zero_grad},
    {"backward", tensor_backward},
    {"fill_", tensor_fill_},
    {"zero_", tensor_zero_},
    {"copy_", tensor_copy_},
    {"normal_", tensor_normal_},
    {"uniform_", tensor_uniform_},
    {"is_param", tensor_is_param},
    {"rename", tensor_rename},
    {"is_placed", tensor_is_placed},
    {"freeze", tensor_freeze},
    {NULL, NULL},
};

static const luaL_Reg metamethods_list[] = {
    {"__gc", tensor_gc}, {"__len", tensor_len}, {"__tostring", tensor_tostring}, {NULL, NULL}};

static int is_tensor(lua_State *L) {
  lua_pushboolean(L, tensor_at(L, binding_of(L), 1) != NULL);
  return 1;
}

void tensor_bind(lua_State *L, Rille *r, int rille, int methods) {
  static const char *const comparisons[][3] = {
      {"__eq", "==", "a:eq(b)"}, {"__lt", "<", "a:lt(b)"}, {"__le", "<=", "a:le(b)"}};
  lua_pushvalue(L, methods);
  binding_register(L, r, methods_list);
  lua_pop(L, 1);
  lua_rawgeti(L, LUA_REGISTRYINDEX, r->tensor_meta_ref);
  binding_register(L, r, metamethods_list);
  for (int k = 0; k < 3; k++) {
    lua_pushlightuserdata(L, r);
    lua_pushstring(L, comparisons[k][1]);
    lua_pushstring(L, comparisons[k][2]);
    lua_pushcclosure(L, no_comparison, 3);
    lua_setfield(L, -2, comparisons[k][0]);
  }
  lua_pushstring(L, "tensor"), lua_setfield(L, -2, "__name");
  lua_pop(L, 1);
  binding_push(L, r, is_tensor);
  lua_setfield(L, rille, "is_tensor");
}
