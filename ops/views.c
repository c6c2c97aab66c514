// views - ops whose result is the input's storage seen with other shapes, strides and offset.
//
// A gradient goes back the same way: the op is applied to the place where the input's gradient is
// collected, and dy is added to what it shows.
#include "ops/expr.h"
#include "ops/movement.h"
#include "ops/rows.h"
#include "ops/shapes.h"

#include <string.h>

static void alias_input(OpCall *call) { tensor_spec(call->in[0], &call->out[0]); }

// The list argument as a shape of numel elements; one -1 is worked out.
static Status list_shape(OpCall *call, TensorSpec *out) {
  const OpArgs *args = &call->args;
  int64_t numel = tensor_numel(call->in[0]), known = 1;
  int free_dim = -1;
  if (args->n_list < 0 || args->n_list > MAX_DIMS)
    return fail(ST_EVALUE, "%s: a shape has 0 to %d sizes", call->op->name, MAX_DIMS);
  out->ndim = args->n_list;
  for (int d = 0; d < out->ndim; d++) {
    out->shape[d] = args->list[d];
    if (args->list[d] == -1 && free_dim < 0) {
      free_dim = d;
    } else {
      if (args->list[d] < 0)
        return fail(ST_EVALUE, "%s: size %lld of dimension %d is negative", call->op->name,
                    (long long)args->list[d], d);
      TRY(checked_mul(args->list[d], known, &known));
    }
  }
  if (free_dim >= 0) {
    if (known == 0 || numel % known != 0) known = 0;
    out->shape[free_dim] = known ? numel / known : 0;
    known = known ? numel : -1;
  }
  if (known == numel) return ST_OK;
  char shape[128];
  format_shape(shape, sizeof shape, args->n_list, args->list);
  return shape_fail(call, "%lld elements do not fit %s", (long long)numel, shape);
}

bool view_strides(const Tensor *x, TensorSpec *out) {
  int64_t size[MAX_DIMS], stride[MAX_DIMS];
  int n = 0, d = 0;
  spec_row_major(out);
  out->alias = true;
  out->offset = x->offset;
  if (tensor_numel(x) == 0) return true;
  for (int k = 0; k < x->ndim; k++)
    if (x->shape[k] != 1) size[n] = x->shape[k], stride[n++] = x->stride[k];
  for (int i = 0; i < n; i++) { // a group of x's dimensions is a group of the view's
    while (out->shape[d] == 1) d++;
    int first = d;
    int64_t have = size[i], want = out->shape[d];
    while (have != want) {
      if (have < want) {
        if (stride[i] != stride[i + 1] * size[i + 1]) return false;
        have *= size[++i];
      } else {
        want *= out->shape[++d];
      }
    }
    int64_t step = stride[i];
    for (int k = d++; k >= first; k--) {
      out->stride[k] = step;
      step *= out->shape[k];
    }
  }
  return true;
}

Status shape_view(OpCall *call) {
  TensorSpec *out = &call->out[0];
  out->dtype = call->in[0]->dtype;
  TRY(list_shape(call, out));
  if (view_strides(call->in[0], out)) return ST_OK;
  return fail_hint(shape_fail(call, "the strides do not allow it without a copy"),
                   "x:reshape(...) copies where it must");
}

// A view where the strides allow it; else the kernel copies.
static void view_or_copy(OpCall *call) {
  TensorSpec *out = &call->out[0];
  if (!view_strides(call->in[0], out)) out->alias = false;
}

Status shape_reshape(OpCall *call) {
  call->out[0].dtype = call->in[0]->dtype;
  TRY(list_shape(call, &call->out[0]));
  view_or_copy(call);
  return ST_OK;
}

Status shape_flatten(OpCall *call) {
  const Tensor *x = call->in[0];
  TensorSpec *out = &call->out[0];
  int first = 0, last = 0;
  shape_like(out, x);
  if (x->ndim > 0) {
    TRY(shape_dim(call, call->args.v[0].i, x->ndim, &first));
    TRY(shape_dim(call, call->args.v[1].i, x->ndim, &last));
  }
  if (first > last) return fail(ST_EVALUE, "flatten: dimension %d comes after %d", first, last);
  int64_t merged = shape_product(x->shape, first, x->ndim ? last + 1 : 0);
  out->ndim = first;
  out->shape[out->ndim++] = merged;
  for (int d = last + 1; d < x->ndim; d++) out->shape[out->ndim++] = x->shape[d];
  view_or_copy(call);
  return ST_OK;
}

Status shape_permute(OpCall *call) {
  const Tensor *x = call->in[0];
  unsigned seen = 0;
  TRY(shape_dims(call, x->ndim, &seen));
  if (call->args.n_list != x->ndim)
    return fail(ST_EVALUE, "permute: %d dimensions are given, x has %d",
                call->args.n_list < 0 ? 0 : call->args.n_list, x->ndim);
  alias_input(call);
  for (int d = 0; d < x->ndim; d++) {
    int from = 0;
    TRY(shape_dim(call, call->args.list[d], x->ndim, &from));
    call->out[0].shape[d] = x->shape[from];
    call->out[0].stride[d] = x->stride[from];
  }
  return ST_OK;
}

static void swap_dims(OpCall *call, int a, int b) {
  const Tensor *x = call->in[0];
  alias_input(call);
  call->out[0].shape[a] = x->shape[b], call->out[0].stride[a] = x->stride[b];
  call->out[0].shape[b] = x->shape[a], call->out[0].stride[b] = x->stride[a];
}

Status shape_transpose(OpCall *call) {
  int a = 0, b = 0;
  TRY(shape_dim(call, call->args.v[0].i, call->in[0]->ndim, &a));
  TRY(shape_dim(call, call->args.v[1].i, call->in[0]->ndim, &b));
  swap_dims(call, a, b);
  return ST_OK;
}

Status shape_t(OpCall *call) {
  int ndim = call->in[0]->ndim;
  if (ndim < 2)
    alias_input(call);
  else
    swap_dims(call, ndim - 2, ndim - 1);
  return ST_OK;
}

Status shape_slice(OpCall *call) {
  const Tensor *x = call->in[0];
  int64_t start = call->args.v[1].i, stop = call->args.v[2].i, step = call->args.v[3].i;
  int d = 0;
  TRY(shape_dim(call, call->args.v[0].i, x->ndim, &d));
  if (step < 1)
    return fail_hint(fail(ST_EVALUE, "slice: step is %lld, it must be at least 1", (long long)step),
                     "x:flip(dims) turns a dimension round");
  int64_t size = x->shape[d];
  start = start < 0 ? start + size : start;
  stop = stop < 0 ? stop + size : stop;
  start = start < 0 ? 0 : start > size ? size : start;
  stop = stop < start ? start : stop > size ? size : stop;
  alias_input(call);
  TensorSpec *out = &call->out[0];
  out->offset += start * x->stride[d];
  out->shape[d] = stop > start ? (stop - start - 1) / step + 1 : 0;
  out->stride[d] = x->stride[d] * (out->shape[d] > 1 ? step : 1);
  return ST_OK;
}

Status shape_select(OpCall *call) {
  const Tensor *x = call->in[0];
  int64_t index = call->args.v[1].i;
  int d = 0;
  TRY(shape_dim(call, call->args.v[0].i, x->ndim, &d));
  int64_t at = index < 0 ? index + x->shape[d] : index;
  if (at < 0 || at >= x->shape[d])
    return fail_hint(fail(ST_ERANGE, "select: index %lld, dimension %d has size %lld",
                          (long long)index, d, (long long)x->shape[d]),
                     "indices count from 0, negative ones from the end");
  alias_input(call);
  TensorSpec *out = &call->out[0];
  out->offset += at * x->stride[d];
  out->ndim--;
  for (int k = d; k < out->ndim; k++) {
    out->shape[k] = x->shape[k + 1];
    out->stride[k] = x->stride[k + 1];
  }
  return ST_OK;
}

Status shape_expand(OpCall *call) {
  const Tensor *x = call->in[0];
  const OpArgs *args = &call->args;
  TensorSpec *out = &call->out[0];
  if (args->n_list < x->ndim || args->n_list > MAX_DIMS)
    return shape_fail(call, "a shape of %d to %d sizes is wanted", x->ndim, MAX_DIMS);
  tensor_spec(x, out);
  out->ndim = args->n_list;
  int64_t numel = 1;
  for (int d = 0; d < out->ndim; d++) {
    int own = d - (out->ndim - x->ndim);
    int64_t size = own < 0 ? 1 : x->shape[own], wanted = args->list[d];
    if (wanted == -1 && own >= 0) wanted = size;
    char shape[128];
    if (wanted < 0 || (size != 1 && size != wanted))
      return shape_fail(call, "it does not expand to %s",
                        format_shape(shape, sizeof shape, args->n_list, args->list));
    out->shape[d] = wanted;
    out->stride[d] = own < 0 || (size == 1 && wanted != 1) ? 0 : x->stride[own];
    TRY(checked_mul(wanted, numel, &numel));
  }
  return ST_OK;
}

Status shape_squeeze(OpCall *call) {
  const Tensor *x = call->in[0];
  TensorSpec *out = &call->out[0];
  unsigned dims = 0;
  TRY(shape_dims(call, x->ndim, &dims));
  alias_input(call);
  out->ndim = 0;
  for (int d = 0; d < x->ndim; d++) {
    if (x->shape[d] == 1 && (dims >> d & 1)) continue;
    out->shape[out->ndim] = x->shape[d];
    out->stride[out->ndim++] = x->stride[d];
  }
  return ST_OK;
}

Status shape_unsqueeze(OpCall *call) {
  const Tensor *x = call->in[0];
  TensorSpec *out = &call->out[0];
  int at = 0;
  if (x->ndim == MAX_DIMS) return shape_fail(call, "%d dimensions are the most", MAX_DIMS);
  TRY(shape_dim(call, call->args.v[0].i, x->ndim + 1, &at));
  alias_input(call);
  for (int d = x->ndim; d > at; d--) {
    out->shape[d] = x->shape[d - 1];
    out->stride[d] = x->stride[d - 1];
  }
  out->shape[at] = 1;
  out->stride[at] = at < x->ndim ? x->shape[at] * x->stride[at] : 1;
  out->ndim++;
  return ST_OK;
}

Status shape_diagonal(OpCall *call) {
  const Tensor *x = call->in[0];
  TensorSpec *out = &call->out[0];
  int64_t offset = call->args.v[0].i;
  int a = 0, b = 0;
  TRY(shape_dim(call, call->args.v[1].i, x->ndim, &a));
  TRY(shape_dim(call, call->args.v[2].i, x->ndim, &b));
  if (a == b) return fail(ST_EVALUE, "diagonal: dimension %d is given twice", a);
  alias_input(call);
  int64_t down = offset < 0 ? -offset : 0, right = offset > 0 ? offset : 0;
  int64_t rows = x->shape[a] - down, columns = x->shape[b] - right;
  int64_t n = rows < columns ? rows : columns;
  if (n < 0) n = 0;
  if (n > 0) out->offset += down * x->stride[a] + right * x->stride[b];
  out->ndim = 0;
  for (int d = 0; d < x->ndim; d++) {
    if (d == a || d == b) continue;
    out->shape[out->ndim] = x->shape[d];
    out->stride[out->ndim++] = x->stride[d];
  }
  out->shape[out->ndim] = n;
  out->stride[out->ndim++] = x->stride[a] + x->stride[b];
  return ST_OK;
}

Status shape_flip(OpCall *call) {
  const Tensor *x = call->in[0];
  TensorSpec *out = &call->out[0];
  unsigned dims = 0;
  TRY(shape_dims(call, x->ndim, &dims));
  alias_input(call);
  for (int d = 0; d < x->ndim; d++) {
    if (!(dims >> d & 1) || x->shape[d] == 0) continue;
    out->offset += (x->shape[d] - 1) * x->stride[d];
    out->stride[d] = -x->stride[d];
  }
  return ST_OK;
}

// ---- gradients
// Adds dy (or writes it) to what the op shows of `whole`.
static Status add_to_view(GradCall *call, Tensor *whole, Tensor *dy, bool adds) {
  Tensor *part;
  TRY(op_apply(call->ctx, call->op, &whole, 1, call->args, &part));
  Status status = op_cast_into(call->ctx, part, dy, adds);
  tensor_release(call->ctx, part);
  return status;
}

Status grad_through_view(GradCall *call, Tensor *dy) {
  Ctx *ctx = call->ctx;
  const TensorSpec *x = &call->in_spec[0];
  Tensor *whole = call->din[0], *fresh = NULL;
  bool adds = whole && (call->accumulate & 1);
  Device *device = dy->storage->device;
  if (!whole) {
    TRY(tensor_zeros(ctx, device, x->dtype, x->ndim, x->shape, MEM_ACTIVATIONS, &fresh));
    whole = fresh;
  } else if (!adds) {
    size_t bytes = (size_t)tensor_numel(whole) * dtype_size(whole->dtype);
    TRY(device->vtable->zero(device, tensor_data(whole), bytes, NULL));
  }
  Status status = add_to_view(call, whole, dy, adds);
  if (status == ST_OK && fresh)
    call->din[0] = fresh;
  else
    tensor_release(ctx, fresh);
  return status;
}

// dy in the input's shape.
static Status grad_same_order(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  const TensorSpec *x = &call->in_spec[0];
  expr_give(&e, call, 0, expr_view(&e, call->dout[0], x->ndim, x->shape));
  return expr_end(&e);
}
Status grad_view(GradCall *call) { return grad_same_order(call); }
Status grad_reshape(GradCall *call) { return grad_same_order(call); }
Status grad_flatten(GradCall *call) { return grad_same_order(call); }
Status grad_squeeze(GradCall *call) { return grad_same_order(call); }
Status grad_unsqueeze(GradCall *call) { return grad_same_order(call); }

Status grad_permute(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  OpArgs back = *call->args;
  for (int d = 0; d < back.n_list; d++) {
    int64_t from = call->args->list[d];
    back.list[from < 0 ? from + back.n_list : from] = d;
  }
  expr_give(&e, call, 0, expr_n(&e, OP_permute, &back, &call->dout[0], 1));
  return expr_end(&e);
}

// The op undoes itself.
static Status grad_involution(GradCall *call, OpId id) {
  Expr e;
  expr_begin(&e, call->ctx);
  expr_give(&e, call, 0, expr_n(&e, id, call->args, &call->dout[0], 1));
  return expr_end(&e);
}
Status grad_transpose(GradCall *call) { return grad_involution(call, OP_transpose); }
Status grad_t(GradCall *call) { return grad_involution(call, OP_t); }
Status grad_flip(GradCall *call) { return grad_involution(call, OP_flip); }

Status grad_slice(GradCall *call) { return grad_through_view(call, call->dout[0]); }
Status grad_select(GradCall *call) { return grad_through_view(call, call->dout[0]); }
Status grad_diagonal(GradCall *call) { return grad_through_view(call, call->dout[0]); }

Status grad_expand(GradCall *call) {
  Expr e;
  expr_begin(&e, call->ctx);
  expr_give(&e, call, 0, expr_sum_to(&e, call->dout[0], &call->in_spec[0]));
  return expr_end(&e);
}

// ---- from C
Status ops_split(Ctx *ctx, Tensor *x, int64_t size, int64_t dim, int room, Tensor **out, int *n) {
  OpCall names = {.ctx = ctx, .op = op_row(OP_slice), .n_in = 1, .in = &x};
  int d = 0;
  TRY(shape_dim(&names, dim, x->ndim, &d));
  if (size < 1) return fail(ST_EVALUE, "split: size is %lld", (long long)size);
  int64_t parts = (x->shape[d] + size - 1) / size;
  if (parts > room)
    return fail(ST_EVALUE, "split: %lld parts of size %lld, %d are the most", (long long)parts,
                (long long)size, room);
  OpArgs args = {.n_list = -1};
  args.v[0].i = d;
  args.v[3].i = 1;
  for (*n = 0; *n < (int)parts; ++*n) {
    args.v[1].i = *n * size;
    args.v[2].i = args.v[1].i + size;
    Status status = ops_call(ctx, OP_slice, &args, &x, 1, &out[*n]);
    if (status == ST_OK) continue;
    while (*n > 0) tensor_release(ctx, out[--*n]);
    return status;
  }
  return ST_OK;
}
