// assign - writing into tensors of any strides: x[0] = 1, x["0:2"] = y, x:copy_(y).
#include "lua/binding.h"

#include "core/weights.h"

#include <string.h>

// Walks target and source together; the source's strides are 0 where it is broadcast.
typedef struct Walk {
  int ndim;
  size_t item; // bytes of an element
  int64_t shape[MAX_DIMS], to[MAX_DIMS], from[MAX_DIMS];
} Walk;

// The innermost dimension: n elements of `item` bytes, strides in elements.
static void copy_line(char *to, int64_t down, const char *from, int64_t along, int64_t n,
                      size_t item) {
  if (down == 1 && along == 1) {
    memcpy(to, from, (size_t)n * item);
    return;
  }
#define LINE(type)                \
  for (int64_t i = 0; i < n; i++) \
  ((type *)(void *)to)[i * down] = ((const type *)(const void *)from)[i * along]
  switch (item) {
  case 1: LINE(uint8_t); break;
  case 2: LINE(uint16_t); break;
  case 4: LINE(uint32_t); break;
  default: LINE(uint64_t); break;
  }
#undef LINE
}

static void copy_run(const Walk *w, int d, char *to, const char *from) {
  if (d == w->ndim - 1) {
    copy_line(to, w->to[d], from, w->from[d], w->shape[d], w->item);
    return;
  }
  int64_t down = w->to[d] * (int64_t)w->item, along = w->from[d] * (int64_t)w->item;
  for (int64_t i = 0; i < w->shape[d]; i++) copy_run(w, d + 1, to + i * down, from + i * along);
}

static Status walk_new(const Tensor *target, const Tensor *source, Walk *out) {
  *out = (Walk){.ndim = target->ndim, .item = dtype_size(target->dtype)};
  int skip = source->ndim - target->ndim; // leading dimensions of size 1 are dropped
  bool fits = true;
  for (int d = 0; d < skip; d++) fits = fits && source->shape[d] == 1;
  for (int d = 0; d < target->ndim; d++) {
    int at = d + skip;
    out->shape[d] = target->shape[d];
    out->to[d] = target->stride[d];
    if (at < 0 || source->shape[at] == 1) continue;
    fits = fits && source->shape[at] == target->shape[d];
    out->from[d] = source->stride[at];
  }
  if (fits) return ST_OK;
  char a[128], b[128];
  return fail(ST_ESHAPE, "assignment: %s does not fit into %s", format_tensor(b, sizeof b, source),
              format_tensor(a, sizeof a, target));
}

Status tensor_assign(Ctx *ctx, Tensor *target, Tensor *source) {
  Walk walk;
  TRY(tensor_alive(target));
  TRY(tensor_alive(source));
  TRY(walk_new(target, source, &walk));
  if (tensor_is_meta(target)) return ST_OK;
  if (tensor_is_meta(source))
    return fail(ST_EDEVICE, "assignment: a tensor on the meta device has no values");
  bool grad = ctx->grad_enabled;
  ctx->grad_enabled = false;
  Tensor *made = NULL;
  Status status = ST_OK;
  OpArgs args = {.n_list = -1};
  args.v[0].i = target->dtype;
  if (source->dtype != target->dtype)
    status = op_apply(ctx, ctx->core_ops->cast, &source, 1, &args, &made);
  else if (source->storage == target->storage) // they may overlap
    status = op_apply(ctx, ctx->core_ops->contiguous, &source, 1, NULL, &made);
  ctx->grad_enabled = grad;
  if (status == ST_OK && made) status = walk_new(target, made, &walk);
  if (status == ST_OK && walk.ndim == 0)
    memcpy(tensor_data(target), tensor_data(made ? made : source), walk.item);
  else if (status == ST_OK)
    copy_run(&walk, 0, tensor_data(target), tensor_data(made ? made : source));
  if (status == ST_OK) tensor_written(ctx, target);
  tensor_release(ctx, made);
  return status;
}

Status assign_value(lua_State *L, Rille *r, int index, Tensor *target) {
  if (target->dtype != DT_I64 || !lua_isinteger(L, index)) {
    double value = lua_isboolean(L, index) ? lua_toboolean(L, index) : lua_tonumber(L, index);
    return tensor_assign_number(r->ctx, target, value);
  }
  Tensor *number;
  int64_t exact = lua_tointeger(L, index);
  TRY(tensor_from_data(r->ctx, DT_I64, 0, NULL, &exact, &number));
  Status status = tensor_assign(r->ctx, target, number);
  tensor_release(r->ctx, number);
  return status;
}

Status tensor_assign_number(Ctx *ctx, Tensor *target, double value) {
  Tensor *number;
  TRY(tensor_scalar(ctx, target->dtype, value, &number));
  Status status = tensor_assign(ctx, target, number);
  tensor_release(ctx, number);
  return status;
}
