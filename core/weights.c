// weights - placement, initial values, gradient buffers. Invariants are in the header.
#include "core/weights.h"

#include "core/bf16.h"
#include "core/op.h"
#include "core/rng.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGN_BYTES = 64, FILL_CHUNK = 1024 };

Status param_new(Ctx *ctx, const char *name, DType dtype, int ndim, const int64_t *shape,
                 Tensor **out) {
  char *copy = strdup(name);
  Param *param;
  Tensor *tensor;
  if (!copy) return fail(ST_ENOMEM, "out of memory for parameter %s", name);
  Status status = struct_alloc(ctx, sizeof *param, &param);
  if (status != ST_OK) goto no_param;
  TRY_TO(no_tensor, struct_alloc(ctx, sizeof *tensor, &tensor));
  memset(param, 0, sizeof *param);
  memset(tensor, 0, sizeof *tensor);
  TensorSpec spec = {.dtype = dtype, .ndim = ndim};
  if (ndim) memcpy(spec.shape, shape, (size_t)ndim * sizeof *shape);
  spec_row_major(&spec);
  tensor->refs = 1;
  tensor->dtype = dtype;
  tensor->ndim = ndim;
  memcpy(tensor->shape, spec.shape, sizeof spec.shape);
  memcpy(tensor->stride, spec.stride, sizeof spec.stride);
  tensor->requires_grad = tensor->depends_param = true;
  tensor->param = param;
  param->tensor = tensor;
  param->name = copy;
  *out = tensor;
  return ST_OK;
no_tensor:
  struct_free(ctx, param, sizeof *param);
no_param:
  free(copy);
  return status;
}

// Takes the parameter out of its set.
static void leave_set(Ctx *ctx, Param *param) {
  WeightSet *set = param->set;
  if (!set) return;
  for (int k = 0; k < param->n_uses; k++) tensor_release(ctx, param->uses[k].grad);
  param->n_uses = 0;
  param->is_summed = false;
  for (int i = 0; i < set->n_params; i++)
    if (set->params[i] == param) set->params[i] = NULL;
  param->set = NULL;
  weightset_release(ctx, set);
}

void param_delete(Ctx *ctx, Param *param) {
  leave_set(ctx, param);
  tensor_release(ctx, param->recipe.data);
  free(param->uses);
  free(param->name);
  struct_free(ctx, param, sizeof *param);
}

uint64_t param_version(const Param *param) {
  return (uint64_t)param->version + param->set->version + param->set->flat->storage->version;
}

Tensor *tensor_base(const Tensor *t) {
  if (t->param) return t->param->tensor;
  const WeightSet *set = t->storage ? t->storage->set : NULL;
  if (!set || tensor_numel(t) == 0) return NULL;
  int64_t last = t->offset; // strides are not negative
  for (int d = 0; d < t->ndim; d++) last += (t->shape[d] - 1) * t->stride[d];
  for (int i = 0; i < set->n_params; i++) {
    const Param *param = set->params[i];
    if (param && param->offset <= t->offset && last < param->offset + tensor_numel(param->tensor))
      return param->tensor;
  }
  return NULL;
}

uint64_t tensor_version(const Tensor *t, const Tensor *base) {
  if (t->param) return t->storage ? param_version(t->param) : 0;
  return t->storage->version + (base ? (uint64_t)base->param->version : 0);
}

Status param_rename(Ctx *ctx, Param *param, const char *name) {
  (void)ctx;
  char *copy = strdup(name);
  if (!copy) return fail(ST_ENOMEM, "out of memory for parameter %s", name);
  free(param->name);
  param->name = copy;
  return ST_OK;
}

static void put(void *to, DType dtype, int64_t at, double value) {
  if (dtype == DT_F64) {
    ((double *)to)[at] = value;
    return;
  }
  float f = (float)value;
  if (dtype == DT_F32) {
    ((float *)to)[at] = f;
    return;
  }
  ((uint16_t *)to)[at] = bf16_narrow(f);
}

// Elements first .. first+n-1 (global, row-major) of a recipe, to to[0..n).
static void fill_run(const Recipe *recipe, uint64_t key, DType dtype, void *to, int64_t n,
                     int64_t first) {
  if (recipe->kind == RECIPE_NORMAL && dtype == DT_F32) {
    rng_fill_normal_f32(to, n, key, first, recipe->a, recipe->b);
    return;
  }
  if (recipe->kind == RECIPE_UNIFORM && dtype == DT_F32) {
    rng_fill_uniform_f32(to, n, key, first, recipe->a, recipe->b);
    return;
  }
  double chunk[FILL_CHUNK];
  for (int64_t done = 0; done < n; done += FILL_CHUNK) {
    int64_t m = n - done < FILL_CHUNK ? n - done : FILL_CHUNK;
    if (recipe->kind == RECIPE_NORMAL)
      rng_fill_normal_f64(chunk, m, key, first + done, recipe->a, recipe->b);
    else if (recipe->kind == RECIPE_UNIFORM)
      rng_fill_uniform_f64(chunk, m, key, first + done, recipe->a, recipe->b);
    else
      for (int64_t i = 0; i < m; i++) chunk[i] = recipe->kind == RECIPE_CONSTANT ? recipe->a : 0;
    for (int64_t i = 0; i < m; i++) put(to, dtype, done + i, chunk[i]);
  }
}

// The initial values of a placed parameter: rows of its shard, each at its global index (inv. 2).
static Status fill(Ctx *ctx, Param *param) {
  Tensor *t = param->tensor;
  const Recipe *recipe = &param->recipe;
  if (recipe->kind == RECIPE_DATA) {
    OpArgs args = {.n_list = -1};
    args.v[0].i = t->dtype;
    Tensor *data = recipe->data;
    return op_apply_into(ctx, ctx->core_ops->cast, &data, 1, &args, &t, 0);
  }
  uint64_t key = rng_key(ctx->seed, param->name);
  char *to = tensor_data(t);
  int64_t numel = tensor_numel(t), row = t->ndim ? t->shape[t->ndim - 1] : 1;
  if (!t->shard || row == 0) {
    fill_run(recipe, key, t->dtype, to, numel, 0);
    return ST_OK;
  }
  for (int64_t r = 0; r < numel / row; r++) {
    int64_t rest = r, index = 0, scale = t->shard->full[t->ndim - 1];
    for (int d = t->ndim - 2; d >= 0; d--) {
      index += (t->shard->offset[d] + rest % t->shape[d]) * scale;
      scale *= t->shard->full[d];
      rest /= t->shape[d];
    }
    fill_run(recipe, key, t->dtype, to + (size_t)(r * row) * dtype_size(t->dtype), row,
             index + t->shard->offset[t->ndim - 1]);
  }
  return ST_OK;
}

Status param_recipe(Ctx *ctx, Param *param, const Recipe *recipe) {
  tensor_release(ctx, param->recipe.data);
  param->recipe = *recipe;
  if (!param->set) return ST_OK;
  TRY(fill(ctx, param));
  tensor_written(ctx, param->tensor);
  return ST_OK;
}

WeightSet *weightset_retain(WeightSet *set) {
  set->refs++;
  return set;
}

void weightset_release(Ctx *ctx, WeightSet *set) {
  if (!set || --set->refs > 0) return;
  if (set->flat) set->flat->storage->set = NULL; // views may outlive it
  tensor_release(ctx, set->flat);
  tensor_release(ctx, set->grad);
  for (int k = 0; k < MAX_OPT_STATE; k++) tensor_release(ctx, set->state[k]);
  free(set->params);
  free(set);
}

// Points the canonical tensor at its place in `set`, dropping the old one.
static void bind(Ctx *ctx, Param *param, WeightSet *set, int64_t offset) {
  Tensor *t = param->tensor;
  if (t->storage) {
    storage_disown(t->storage);
    storage_forget(ctx, t->storage);
  }
  t->storage = set->flat->storage;
  t->storage->refs++;
  t->storage->owners++;
  t->offset = offset;
  param->set = weightset_retain(set);
  param->offset = offset;
}

// Moves a parameter into slot i of a new set: keeps its value, or fills it for the first time.
static Status enter_set(Ctx *ctx, Param *param, WeightSet *set, int i, int64_t offset) {
  TensorSpec spec;
  tensor_spec(param->tensor, &spec);
  spec.offset = offset;
  bool placed = param->set != NULL;
  if (placed) {
    Tensor *target;
    TRY(tensor_alias(ctx, set->flat, &spec, &target));
    OpArgs args = {.n_list = -1};
    args.v[0].i = param->tensor->dtype;
    Status status = op_apply_into(ctx, ctx->core_ops->cast, &param->tensor, 1, &args, &target, 0);
    tensor_release(ctx, target);
    TRY(status);
    leave_set(ctx, param);
  }
  bind(ctx, param, set, offset);
  set->params[i] = param;
  return placed ? ST_OK : fill(ctx, param);
}

Status weightset_new(Ctx *ctx, Param **params, int n, int group, int stage, int dp,
                     WeightSet **out) {
  assert(n > 0 && dp > 0);
  DType dtype = params[0]->tensor->dtype;
  int64_t align = ALIGN_BYTES / (int64_t)dtype_size(dtype), numel = 0;
  WeightSet *set = calloc(1, sizeof *set);
  if (set) set->params = calloc((size_t)n, sizeof *set->params);
  if (!set || !set->params) {
    free(set);
    return fail(ST_ENOMEM, "out of memory for a set of %d parameters", n);
  }
  set->refs = 1;
  set->dtype = dtype;
  set->grad_dtype = dtype == DT_F64 ? DT_F64 : DT_F32;
  set->group = group;
  set->stage = stage;
  set->n_params = n;
  for (int i = 0; i < n; i++) {
    assert(params[i]->tensor->dtype == dtype);
    numel += (tensor_numel(params[i]->tensor) + align - 1) / align * align;
  }
  set->numel = (numel + align * dp - 1) / (align * dp) * (align * dp);
  Status status = tensor_zeros(ctx, &ctx->cpu, dtype, 1, &set->numel, MEM_PARAMETERS, &set->flat);
  if (status == ST_OK) set->flat->storage->set = set;
  int64_t at = 0;
  for (int i = 0; i < n && status == ST_OK; i++) {
    status = enter_set(ctx, params[i], set, i, at);
    at += (tensor_numel(params[i]->tensor) + align - 1) / align * align;
  }
  if (status == ST_OK)
    *out = set;
  else
    weightset_release(ctx, set);
  return status;
}

Status param_place(Ctx *ctx, Param *param) {
  if (param->set) return ST_OK;
  if (param->elsewhere)
    return fail_hint(fail(ST_ESTATE, "parameter %s is not on this rank: it belongs to %s",
                          param->name, param->elsewhere),
                     "a module that uses a parameter of another one names it: `tied = \"%s\"`, or "
                     "shared_parameters(); a whole model is called by trainer:predict(x)",
                     param->name);
  WeightSet *set;
  TRY(weightset_new(ctx, &param, 1, 0, 0, 1, &set));
  weightset_release(ctx, set); // the parameter holds it now
  return ST_OK;
}

void param_unplace(Ctx *ctx, Param *param) {
  Tensor *t = param->tensor;
  if (!param->set) return;
  leave_set(ctx, param);
  storage_disown(t->storage);
  storage_forget(ctx, t->storage);
  t->storage = NULL;
  t->offset = 0;
}

static Status flat_grad(Ctx *ctx, WeightSet *set) {
  if (set->grad) return ST_OK;
  return tensor_zeros(ctx, &ctx->cpu, set->grad_dtype, 1, &set->numel, MEM_GRADIENTS, &set->grad);
}

// A gradient buffer: in the set's flat gradient, or of its own.
static Status new_grad(Ctx *ctx, Param *param, bool in_flat, Tensor **out) {
  TensorSpec spec;
  tensor_spec(param->tensor, &spec);
  spec.dtype = param->set->grad_dtype;
  if (!in_flat) return tensor_new(ctx, &ctx->cpu, &spec, MEM_GRADIENTS, out);
  TRY(flat_grad(ctx, param->set));
  return tensor_alias(ctx, param->set->grad, &spec, out);
}

static Status copy_grad(Ctx *ctx, Tensor *to, Tensor *from, unsigned accumulate) {
  OpArgs args = {.n_list = -1};
  args.v[0].i = to->dtype;
  return op_apply_into(ctx, ctx->core_ops->cast, &from, 1, &args, &to, accumulate);
}

Status param_grad_buffer(Ctx *ctx, Param *param, int unit, GradUse **out) {
  int at = 0;
  param->is_summed = false;
  while (at < param->n_uses && param->uses[at].unit < unit) at++;
  if (at < param->n_uses && param->uses[at].unit == unit) {
    *out = &param->uses[at];
    return ST_OK;
  }
  if (param->n_uses == param->uses_room) {
    int room = param->uses_room ? 2 * param->uses_room : 2;
    GradUse *grown = realloc(param->uses, (size_t)room * sizeof *grown);
    if (!grown) return fail(ST_ENOMEM, "out of memory for the gradients of %s", param->name);
    param->uses = grown;
    param->uses_room = room;
  }
  Tensor *grad;
  TRY(new_grad(ctx, param, param->n_uses == 0, &grad));
  if (at == 0 && param->n_uses > 0) { // the lowest unit owns the flat buffer
    GradUse *first = &param->uses[0];
    if (first->written) {
      Status status = copy_grad(ctx, grad, first->grad, 0);
      if (status != ST_OK) {
        tensor_release(ctx, grad);
        return status;
      }
    }
    Tensor *flat = first->grad;
    first->grad = grad;
    grad = flat;
  }
  memmove(&param->uses[at + 1], &param->uses[at],
          (size_t)(param->n_uses - at) * sizeof *param->uses);
  param->uses[at] = (GradUse){unit, grad, false};
  param->n_uses++;
  *out = &param->uses[at];
  return ST_OK;
}

// Sums the uses in unit order into the first; zero if none was written (inv. 3).
static Status finish_param(Ctx *ctx, Param *param) {
  if (param->is_summed) return ST_OK;
  if (param->n_uses == 0) { // its place may hold what replicas summed in an earlier step
    const WeightSet *set = param->set;
    size_t size = dtype_size(set->grad_dtype), n = (size_t)tensor_numel(param->tensor);
    if (set->grad && n > 0)
      memset((char *)tensor_data(set->grad) + (size_t)param->offset * size, 0, n * size);
    param->is_summed = true;
    return ST_OK;
  }
  GradUse *first = &param->uses[0];
  for (int k = 1; k < param->n_uses; k++) {
    GradUse *use = &param->uses[k];
    if (!use->written) continue;
    TRY(copy_grad(ctx, first->grad, use->grad, first->written));
    first->written = true;
    use->written = false;
  }
  if (!first->written && tensor_numel(first->grad) > 0)
    memset(tensor_data(first->grad), 0,
           (size_t)tensor_numel(first->grad) * dtype_size(first->grad->dtype));
  param->is_summed = true;
  return ST_OK;
}

Status param_grad(Ctx *ctx, Param *param, Tensor **out) {
  *out = NULL;
  bool any = false;
  for (int k = 0; k < param->n_uses; k++) any |= param->uses[k].written;
  if (!any) return ST_OK;
  TRY(finish_param(ctx, param));
  *out = param->uses[0].grad;
  return ST_OK;
}

Status weightset_finish_grads(Ctx *ctx, WeightSet *set) {
  TRY(flat_grad(ctx, set));
  for (int i = 0; i < set->n_params; i++)
    if (set->params[i]) TRY(finish_param(ctx, set->params[i]));
  return ST_OK;
}

Status weightset_finish_part(Ctx *ctx, WeightSet *set, int first, int n, Tensor **out) {
  assert(first >= 0 && n > 0 && first + n <= set->n_params);
  TRY(flat_grad(ctx, set));
  for (int i = first; i < first + n; i++)
    if (set->params[i]) TRY(finish_param(ctx, set->params[i]));
  int64_t begin = set->params[first] ? set->params[first]->offset : 0, end = set->numel;
  if (first + n < set->n_params && set->params[first + n]) end = set->params[first + n]->offset;
  TensorSpec spec = {.dtype = set->grad_dtype, .ndim = 1, .shape = {end - begin}, .stride = {1}};
  spec.offset = begin;
  return tensor_alias(ctx, set->grad, &spec, out);
}

void weightset_zero_grads(WeightSet *set) {
  for (int i = 0; i < set->n_params; i++) {
    Param *param = set->params[i];
    for (int k = 0; param && k < param->n_uses; k++) param->uses[k].written = false;
    if (param) param->is_summed = false;
  }
}

Status weightset_state(Ctx *ctx, WeightSet *set, int index, Tensor **out) {
  assert(index >= 0 && index < MAX_OPT_STATE);
  if (!set->state[index])
    TRY(tensor_zeros(ctx, &ctx->cpu, set->grad_dtype, 1, &set->numel, MEM_OPTIMIZER,
                     &set->state[index]));
  *out = set->state[index];
  return ST_OK;
}

void weightset_stepped(Ctx *ctx, WeightSet *set) {
  set->version++;
  set->stepped = ctx_where(ctx);
  set->flat->storage->version++; // what a graph keeps of a view of a parameter has changed too
  set->flat->storage->written = set->stepped;
}
