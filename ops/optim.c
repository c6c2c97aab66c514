// optim - see the header. The update itself is an op on flat arrays (rows adamw, sgd), so that a
// device brings its kernel the same way as for any op.
#include "ops/optim.h"

#include "core/hash.h"
#include "ops/expr.h"
#include "ops/kernels/threads.h"
#include "ops/rows.h"
#include "ops/shapes.h"

#include <assert.h>
#include <math.h>
#include <string.h>

enum { MASTER = 2 }; // state index of the f32 copy of bf16 weights

// ---- rows
static void flat_outputs(OpCall *call) {
  for (int i = 0; i < call->n_out; i++) {
    tensor_spec(call->in[0], &call->out[i]);
    spec_row_major(&call->out[i]);
  }
}

Status shape_adamw(OpCall *call) {
  flat_outputs(call);
  return ST_OK;
}

Status shape_sgd(OpCall *call) {
  flat_outputs(call);
  return ST_OK;
}

static Status shape_norm(OpCall *call) {
  DType dtype = call->in[0]->dtype;
  if (dtype != DT_F32 && dtype != DT_F64) return shape_fail(call, "x must be f32 or f64");
  call->out[0].dtype = DT_F64;
  call->out[0].ndim = 0;
  return ST_OK;
}
Status shape_sum_squares(OpCall *call) { return shape_norm(call); }
Status shape_max_abs(OpCall *call) { return shape_norm(call); }

// ---- STEP
// The weights that the update writes: the flat array, or the f32 copy of a bf16 one.
static Status writable_weights(Ctx *ctx, WeightSet *set, Tensor **out) {
  *out = set->flat;
  if (set->dtype != DT_BF16) return ST_OK;
  bool is_new = set->state[MASTER] == NULL;
  TRY(weightset_state(ctx, set, MASTER, out));
  if (!is_new) return ST_OK;
  Status status = op_cast_into(ctx, *out, set->flat, false);
  if (status == ST_OK) return ST_OK;
  tensor_release(ctx, set->state[MASTER]);
  set->state[MASTER] = NULL;
  return status;
}

Status optim_prepare(Ctx *ctx, WeightSet *set, int n_state) {
  Tensor *made;
  for (int i = 0; i < n_state; i++) TRY(weightset_state(ctx, set, i, &made));
  return writable_weights(ctx, set, &made);
}

static Status finish_step(Ctx *ctx, WeightSet *set, Tensor *weights) {
  if (weights != set->flat) TRY(op_cast_into(ctx, set->flat, weights, false));
  weightset_stepped(ctx, set);
  return ST_OK;
}

// Elements [begin, end) of a flat array, as a view; NULL of NULL.
static Status slice(Ctx *ctx, Tensor *flat, int64_t begin, int64_t end, Tensor **out) {
  if (!flat) {
    *out = NULL;
    return ST_OK;
  }
  TensorSpec spec = {.dtype = flat->dtype, .ndim = 1, .shape = {end - begin}};
  spec_row_major(&spec);
  spec.offset = flat->offset + begin;
  return tensor_alias(ctx, flat, &spec, out);
}

// Runs the update on elements [begin, end): out[0] weights, out[1..] state.
static Status update_range(Ctx *ctx, WeightSet *set, const Op *op, const OpArgs *args,
                           Tensor **arrays, int n, int64_t begin, int64_t end) {
  Tensor *grad = NULL, *parts[OP_MAX_OUT] = {NULL};
  Status status = slice(ctx, set->grad, begin, end, &grad);
  for (int i = 0; i < n && status == ST_OK; i++)
    status = slice(ctx, arrays[i], begin, end, &parts[i]);
  if (status == ST_OK) status = op_apply_into(ctx, op, &grad, 1, args, parts, 0);
  tensor_release(ctx, grad);
  for (int i = 0; i < n; i++) tensor_release(ctx, parts[i]);
  return status;
}

// The update on every run of parameters that are not frozen.
static Status update(Ctx *ctx, WeightSet *set, const Op *op, const OpArgs *args, Tensor **arrays,
                     int n) {
  TRY(weightset_finish_grads(ctx, set));
  int64_t begin = 0;
  for (int i = 0; i < set->n_params; i++) {
    const Param *param = set->params[i];
    if (!param || !param->frozen) continue;
    if (param->offset > begin)
      TRY(update_range(ctx, set, op, args, arrays, n, begin, param->offset));
    begin = param->offset + tensor_numel(param->tensor);
  }
  if (begin < set->numel) TRY(update_range(ctx, set, op, args, arrays, n, begin, set->numel));
  return finish_step(ctx, set, arrays[0]);
}

Status optim_adamw(Ctx *ctx, WeightSet *set, const AdamwOptions *options) {
  Tensor *arrays[3];
  TRY(writable_weights(ctx, set, &arrays[0]));
  TRY(weightset_state(ctx, set, 0, &arrays[1]));
  TRY(weightset_state(ctx, set, 1, &arrays[2]));
  OpArgs args = {.n_list = -1};
  const double f[] = {options->lr,  options->beta1, options->beta2,
                      options->eps, options->decay, options->grad_scale};
  for (int i = 0; i < 6; i++) args.v[i].f = f[i];
  args.v[6].i = options->step;
  return update(ctx, set, op_row(OP_adamw), &args, arrays, 3);
}

Status optim_sgd(Ctx *ctx, WeightSet *set, const SgdOptions *options) {
  Tensor *arrays[2] = {NULL, NULL};
  TRY(writable_weights(ctx, set, &arrays[0]));
  if (options->momentum != 0) TRY(weightset_state(ctx, set, 0, &arrays[1]));
  OpArgs args = {.n_list = -1};
  const double f[] = {options->lr, options->momentum, options->dampening, options->decay,
                      options->grad_scale};
  for (int i = 0; i < 5; i++) args.v[i].f = f[i];
  args.v[5].i = options->nesterov;
  args.v[6].i = options->is_first;
  return update(ctx, set, op_row(OP_sgd), &args, arrays, 2);
}

// ---- norms
// Adds the norm of elements [begin, end) of the gradient to *out; infinity: the larger of the two.
static Status add_norm(Ctx *ctx, WeightSet *set, bool infinity, int64_t begin, int64_t end,
                       double *out) {
  Expr e;
  expr_begin(&e, ctx);
  Tensor *part = NULL;
  double value = 0;
  e.status = slice(ctx, set->grad, begin, end, &part);
  Tensor *norm = infinity ? expr1(&e, OP_max_abs, part) : expr1(&e, OP_sum_squares, part);
  if (norm) e.status = tensor_item(norm, &value);
  tensor_release(ctx, part);
  TRY(expr_end(&e));
  if (!infinity)
    *out += value;
  else if (value != value || value > *out)
    *out = value;
  return ST_OK;
}

// What counts of a parameter's gradient, in pieces as long as they can be.
static Status param_norm(Ctx *ctx, WeightSet *set, const Param *param, bool infinity, double *out) {
  int64_t numel = tensor_numel(param->tensor);
  for (int64_t begin = 0, end; begin < numel; begin = end) {
    Piece piece = param_piece(param, begin), next = piece;
    for (end = begin; next.is_counted == piece.is_counted;) {
      end += next.n;
      if (end == numel) break;
      next = param_piece(param, end);
    }
    if (piece.is_counted)
      TRY(add_norm(ctx, set, infinity, param->offset + begin, param->offset + end, out));
  }
  return ST_OK;
}

Status optim_grad_norms(Ctx *ctx, WeightSet *set, bool infinity, double *out) {
  TRY(weightset_finish_grads(ctx, set));
  for (int i = 0; i < set->n_params; i++) {
    const Param *param = set->params[i];
    out[i] = 0;
    if (param && !param->frozen) TRY(param_norm(ctx, set, param, infinity, &out[i]));
  }
  return ST_OK;
}

// ---- fingerprint
enum { PRINT_BLOCK = 65536 };

typedef struct Print {
  const Param *param;
  const Tensor *values;
  uint64_t key;
  uint64_t *sums; // one a block
} Print;

static uint64_t element_bits(const Tensor *t, int64_t at) {
  uint64_t bits = 0;
  size_t width = dtype_size(t->dtype);
  memcpy(&bits, (const char *)tensor_data(t) + (size_t)at * width, width);
  return bits;
}

static void print_blocks(void *context, int64_t begin, int64_t end) {
  const Print *print = context;
  int64_t numel = tensor_numel(print->param->tensor);
  for (int64_t b = begin; b < end; b++) {
    int64_t stop = (b + 1) * PRINT_BLOCK < numel ? (b + 1) * PRINT_BLOCK : numel;
    uint64_t sum = 0;
    for (int64_t i = b * PRINT_BLOCK, n; i < stop; i += n) {
      Piece piece = param_piece(print->param, i);
      n = piece.n < stop - i ? piece.n : stop - i;
      for (int64_t k = 0; k < n && piece.is_counted; k++)
        sum += hash_mix(print->key + (uint64_t)(piece.at + k), element_bits(print->values, i + k));
    }
    print->sums[b] = sum;
  }
}

Status optim_fingerprint(Ctx *ctx, const Param *param, const Tensor *values, uint64_t *out) {
  const Tensor *t = param->tensor;
  int64_t blocks = (tensor_numel(t) + PRINT_BLOCK - 1) / PRINT_BLOCK;
  Print print = {.param = param, .values = values ? values : t, .key = hash_string(param->name, 0)};
  *out = 0;
  if (blocks == 0) return ST_OK;
  size_t bytes = (size_t)blocks * sizeof(uint64_t);
  TRY(struct_alloc(ctx, bytes, &print.sums));
  parallel_for(blocks, 1, print_blocks, &print);
  for (int64_t b = 0; b < blocks; b++) *out += print.sums[b];
  struct_free(ctx, print.sums, bytes);
  return ST_OK;
}
