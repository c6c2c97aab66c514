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

Piece param_piece(const Param *param, int64_t i) {
  const Tensor *t = param->tensor;
  const Shard *shard = t->shard;
  if (!shard) return (Piece){tensor_numel(t) - i, i, true};
  int64_t inner = 1;
  for (int d = shard->dim + 1; d < t->ndim; d++) inner *= t->shape[d];
  int64_t row = t->shape[shard->dim] * inner, outer = i / row, at = i % row, begin = 0;
  for (int k = 0; k < shard->n_runs; k++) {
    const ShardRun *run = &shard->runs[k];
    int64_t end = begin + run->n * inner;
    if (at < end)
      return (Piece){end - at, (outer * shard->full + run->at) * inner + at - begin,
                     run->is_counted};
    begin = end;
  }
  return (Piece){row - at, -1, false};
}

// to = what a parameter holds of `whole`, both row-major and of its dtype.
static void copy_part(const Param *param, char *to, const char *whole) {
  int64_t numel = tensor_numel(param->tensor), n;
  size_t size = dtype_size(param->tensor->dtype);
  for (int64_t i = 0; i < numel; i += n) {
    Piece piece = param_piece(param, i);
    n = piece.n;
    if (piece.at >= 0)
      memcpy(to + (size_t)i * size, whole + (size_t)piece.at * size, (size_t)n * size);
    else
      memset(to + (size_t)i * size, 0, (size_t)n * size);
  }
}

// A parameter from its recipe's tensor: of its own shape, or of the whole's.
static Status fill_data(Ctx *ctx, Param *param) {
  Tensor *t = param->tensor, *data = param->recipe.data, *whole;
  if (!t->shard || data->shape[t->shard->dim] != t->shard->full)
    return op_cast_into(ctx, t, data, false);
  TensorSpec spec;
  tensor_spec(data, &spec);
  spec.dtype = t->dtype;
  spec_row_major(&spec);
  TRY(tensor_new(ctx, &ctx->cpu, &spec, MEM_PARAMETERS, &whole));
  Status status = op_cast_into(ctx, whole, data, false);
  if (status == ST_OK) copy_part(param, tensor_data(t), tensor_data(whole));
  tensor_release(ctx, whole);
  return status;
}

// The initial values of a placed parameter, each at its index in the whole (inv. 2); padding is 0.
static Status fill(Ctx *ctx, Param *param) {
  const Tensor *t = param->tensor;
  if (param->recipe.kind == RECIPE_DATA) return fill_data(ctx, param);
  uint64_t key = rng_key(ctx->seed, param->name);
  char *to = tensor_data(t);
  int64_t numel = tensor_numel(t), n;
  size_t size = dtype_size(t->dtype);
  for (int64_t i = 0; i < numel; i += n) {
    Piece piece = param_piece(param, i);
    n = piece.n;
    if (piece.at >= 0)
      fill_run(&param->recipe, key, t->dtype, to + (size_t)i * size, n, piece.at);
    else
      memset(to + (size_t)i * size, 0, (size_t)n * size);
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
    Status status = op_cast_into(ctx, target, param->tensor, false);
    tensor_release(ctx, target);
    TRY(status);
    leave_set(ctx, param);
  }
  bind(ctx, param, set, offset);
  set->params[i] = param;
  return placed ? ST_OK : fill(ctx, param);
}

// `numel` elements, up to a full line.
static int64_t aligned(DType dtype, int64_t numel) {
  int64_t align = ALIGN_BYTES / (int64_t)dtype_size(dtype);
  return (numel + align - 1) / align * align;
}

// A set of zeros with room for n parameters that are not in it yet.
static Status set_new(Ctx *ctx, DType dtype, int64_t numel, int n, WeightSet **out) {
  WeightSet *set = calloc(1, sizeof *set);
  if (set) set->params = calloc((size_t)n, sizeof *set->params);
  if (!set || !set->params) {
    free(set);
    return fail(ST_ENOMEM, "out of memory for a set of %d parameters", n);
  }
  set->refs = 1;
  set->dtype = dtype;
  set->grad_dtype = dtype == DT_F64 ? DT_F64 : DT_F32;
  set->n_params = n;
  set->numel = numel;
  Status status = tensor_zeros(ctx, &ctx->cpu, dtype, 1, &set->numel, MEM_PARAMETERS, &set->flat);
  if (status != ST_OK) {
    weightset_release(ctx, set);
    return status;
  }
  set->flat->storage->set = set;
  *out = set;
  return ST_OK;
}

Status weightset_new(Ctx *ctx, Param **params, int n, int group, int stage, int dp,
                     WeightSet **out) {
  assert(n > 0 && dp > 0);
  DType dtype = params[0]->tensor->dtype;
  int64_t unit = aligned(dtype, 1) * dp, numel = 0, at = 0;
  WeightSet *set;
  for (int i = 0; i < n; i++) {
    assert(params[i]->tensor->dtype == dtype);
    numel += aligned(dtype, tensor_numel(params[i]->tensor));
  }
  TRY(set_new(ctx, dtype, (numel + unit - 1) / unit * unit, n, &set));
  set->group = group;
  set->stage = stage;
  Status status = ST_OK;
  for (int i = 0; i < n && status == ST_OK; i++) {
    status = enter_set(ctx, params[i], set, i, at);
    at += aligned(dtype, tensor_numel(params[i]->tensor));
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

// Runs lie within the whole, apart from each other, and fit into `local`.
static Status check_runs(const Param *param, const Shard *shard, int64_t local) {
  int64_t sum = 0;
  if (shard->n_runs < 0 || shard->n_runs > MAX_SHARD_RUNS)
    return fail(ST_EVALUE, "parameter %s: a part has at most %d runs, not %d", param->name,
                MAX_SHARD_RUNS, shard->n_runs);
  for (int k = 0; k < shard->n_runs; k++) {
    ShardRun run = shard->runs[k];
    if (run.at < 0 || run.n < 0 || run.at > shard->full || run.n > shard->full - run.at)
      return fail(ST_EVALUE, "parameter %s: a run of %lld from %lld on does not lie within %lld",
                  param->name, (long long)run.n, (long long)run.at, (long long)shard->full);
    for (int j = 0; j < k; j++)
      if (run.at < shard->runs[j].at + shard->runs[j].n && shard->runs[j].at < run.at + run.n)
        return fail(ST_EVALUE, "parameter %s: two runs of a part overlap", param->name);
    sum += run.n;
  }
  if (sum > local)
    return fail(ST_EVALUE, "parameter %s: runs of %lld in all do not fit into a part of %lld",
                param->name, (long long)sum, (long long)local);
  return ST_OK;
}

// May it be cut like this? NULL: may it be whole again?
static Status check_shard(const Param *param, const Shard *shard, int64_t local) {
  const Tensor *t = param->tensor;
  int dim = shard ? shard->dim : t->shard->dim;
  if (dim < 0 || dim >= t->ndim)
    return fail(ST_ERANGE, "parameter %s has %d dimensions, none of them is %d", param->name,
                t->ndim, dim);
  if (shard && t->shard && (param->set || dim != t->shard->dim))
    return fail_hint(fail(ST_ESTATE, "parameter %s is cut already%s", param->name,
                          param->set ? " and has values" : " along another dimension"),
                     "make it whole first: its value is lost");
  int64_t full = t->shard ? t->shard->full : t->shape[dim];
  if (shard && shard->full != full)
    return fail(ST_ESHAPE, "parameter %s: dimension %d of the whole is %lld long, not %lld",
                param->name, dim, (long long)full, (long long)shard->full);
  const Tensor *data = param->recipe.data;
  if (data && (data->ndim != t->ndim || data->shape[dim] != full))
    return fail(ST_ESTATE, "parameter %s begins with values given for the part that it is now",
                param->name);
  return shard ? check_runs(param, shard, local) : ST_OK;
}

Status param_shard(Ctx *ctx, Param *param, const Shard *shard, int64_t local) {
  Tensor *t = param->tensor;
  Shard *own = NULL;
  WeightSet *set = NULL;
  if (!shard && !t->shard) return ST_OK;
  TRY(check_shard(param, shard, local));
  TensorSpec spec;
  tensor_spec(t, &spec);
  spec.shape[shard ? shard->dim : t->shard->dim] = shard ? local : t->shard->full;
  spec_row_major(&spec);
  if (shard) TRY(struct_alloc(ctx, sizeof *own, &own));
  if (shard && param->set) {
    Status status = set_new(ctx, t->dtype, aligned(t->dtype, spec_numel(&spec)), 1, &set);
    if (status != ST_OK) {
      struct_free(ctx, own, sizeof *own);
      return status;
    }
  }
  if (!shard) param_unplace(ctx, param);
  if (own) *own = *shard;
  if (t->shard) struct_free(ctx, t->shard, sizeof *t->shard);
  t->shard = own;
  memcpy(t->shape, spec.shape, sizeof spec.shape);
  memcpy(t->stride, spec.stride, sizeof spec.stride);
  if (set) {
    copy_part(param, tensor_data(set->flat), tensor_data(t));
    leave_set(ctx, param);
    bind(ctx, param, set, 0);
    set->params[0] = param;
    weightset_release(ctx, set); // the parameter holds it now
  }
  return ST_OK;
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
      Status status = op_cast_into(ctx, grad, first->grad, false);
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
    TRY(op_cast_into(ctx, first->grad, use->grad, first->written));
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
