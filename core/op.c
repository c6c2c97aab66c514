// op - the road of a call from arguments to recorded outputs.
#include "core/op.h"

#include "core/poll.h"
#include "core/profile.h"
#include "core/spans.h"
#include "core/tape.h"
#include "core/weights.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// The bit of an input's name among the row's inputs ("x w bias?"); 0 if it is none.
static unsigned input_bit(const char *inputs, const char *name, size_t length) {
  int j = 0;
  for (const char *at = inputs; *at; j++) {
    size_t n = strcspn(at, " ");
    size_t bare = n;
    while (bare > 0 && (at[bare - 1] == '?' || at[bare - 1] == '*')) bare--;
    if (bare == length && strncmp(at, name, length) == 0) return 1u << j;
    at += n;
    while (*at == ' ') at++;
  }
  return 0;
}

// Adds what one word of a needs entry names to the masks of input j.
static void add_need(const Op *op, OpNeeds *out, int j, const char *word, size_t length) {
  unsigned bit = input_bit(op->inputs, word, length);
  if (bit)
    out->in[j] |= bit;
  else if (strncmp(word, "out", 3) == 0)
    out->out[j] |= 1u << (length > 3 ? word[3] - '0' : 0);
  else if (strncmp(word, "saved", 5) == 0)
    out->saved[j] |= length > 5 ? 1u << (word[5] - '0') : (1u << op->n_saved) - 1;
  else
    assert(false && "a row's needs name something it does not have");
}

void op_needs(const Op *op, OpNeeds *out) {
  memset(out, 0, sizeof *out);
  for (const char *at = op->defer; *at;) {
    size_t n = strcspn(at, " ");
    out->defer |= input_bit(op->inputs, at, n);
    at += n;
    while (*at == ' ') at++;
  }
  for (const char *at = op->needs; *at;) {
    size_t key = strcspn(at, ":");
    unsigned bit = input_bit(op->inputs, at, key);
    assert(bit && "a row's needs entry is for an input it does not have");
    int j = __builtin_ctz(bit);
    at += key + 1;
    while (*at && *at != ' ') {
      size_t n = strcspn(at, ", ");
      if (n > 0) add_need(op, out, j, at, n);
      at += n;
      if (*at == ',') at++;
    }
    while (*at == ' ') at++;
  }
}

// The name of input j ("w"), for messages.
static int input_name(const Op *op, int j, const char **name) {
  const char *at = op->inputs;
  for (int k = 0; k < j && *at; k++) {
    at += strcspn(at, " ");
    while (*at == ' ') at++;
  }
  *name = at;
  return (int)strcspn(at, " ?*");
}

// A rank that orders dtypes for promotion; floating point wins over integers, wider over narrower.
static int promotion_rank(DType dtype) {
  switch (dtype) {
  case DT_BOOL: return 0;
  case DT_U8: return 1;
  case DT_I32: return 2;
  case DT_I64: return 3;
  case DT_BF16: return 4;
  case DT_F32: return 5;
  case DT_F64: return 6;
  }
  return 0;
}

enum { MAX_LOCAL_IN = 8 };

// The inputs of a call, some replaced by casts or copies that the call owns.
typedef struct Inputs {
  Tensor **in;
  Tensor *local[MAX_LOCAL_IN], *made_local[MAX_LOCAL_IN];
  Tensor **made; // made[j] is owned; NULL where in[j] is the caller's
  int n;
} Inputs;

static void inputs_release(Ctx *ctx, Inputs *inputs) {
  if (inputs->made)
    for (int j = 0; j < inputs->n; j++) tensor_release(ctx, inputs->made[j]);
  if (inputs->n > MAX_LOCAL_IN) {
    free(inputs->in);
    free(inputs->made);
  }
}

static Status inputs_replace(Ctx *ctx, Inputs *inputs, int j, const Op *op, const OpArgs *args) {
  Tensor *made;
  TRY(op_apply(ctx, op, &inputs->in[j], 1, args, &made));
  tensor_release(ctx, inputs->made[j]);
  inputs->made[j] = inputs->in[j] = made;
  return ST_OK;
}

static Status inputs_begin(Inputs *inputs, Tensor **in, int n) {
  inputs->n = n;
  inputs->in = inputs->local;
  inputs->made = inputs->made_local;
  if (n > MAX_LOCAL_IN) {
    inputs->in = malloc((size_t)n * sizeof(Tensor *));
    inputs->made = malloc((size_t)n * sizeof(Tensor *));
    if (!inputs->in || !inputs->made) {
      free(inputs->in);
      free(inputs->made);
      return fail(ST_ENOMEM, "out of memory for %d inputs", n);
    }
  }
  for (int j = 0; j < n; j++) {
    inputs->in[j] = in[j];
    inputs->made[j] = NULL;
  }
  return ST_OK;
}

// Liveness, devices, placement of parameters. *device is where the call runs.
static Status check_inputs(Ctx *ctx, const Op *op, Tensor **in, int n, Device **device) {
  Device *found = NULL;
  for (int j = 0; j < n; j++) {
    if (in[j] && !in[j]->storage && ctx->dry_run) found = &ctx->meta;
    if (!in[j] || !in[j]->storage) continue;
    TRY(tensor_alive(in[j]));
    Device *d = in[j]->storage->device;
    if (!found || d->kind == DEV_META) found = d;
  }
  for (int j = 0; j < n; j++) {
    if (!in[j]) continue;
    if (!in[j]->storage && (!found || found->kind != DEV_META)) {
      TRY(param_place(ctx, in[j]->param));
      if (!found) found = in[j]->storage->device;
    }
    if ((op->flags & OP_FLOAT) && !dtype_is_float(in[j]->dtype)) {
      const char *name;
      int length = input_name(op, j, &name);
      return fail_hint(fail(ST_EDTYPE, "%s: %.*s must be floating point, it is %s", op->name,
                            length, name, dtype_name(in[j]->dtype)),
                       "convert it with x:to(\"f32\")");
    }
  }
  *device = found ? found : &ctx->cpu;
  return ST_OK;
}

static Status promote(Ctx *ctx, Inputs *inputs) {
  DType common = DT_BOOL;
  bool differ = false, any = false;
  for (int j = 0; j < inputs->n; j++) {
    if (!inputs->in[j]) continue;
    DType d = inputs->in[j]->dtype;
    if (any && d != common) differ = true;
    if (!any || promotion_rank(d) > promotion_rank(common)) common = d;
    any = true;
  }
  if (!differ) return ST_OK;
  OpArgs args = {.n_list = -1};
  args.v[0].i = common;
  for (int j = 0; j < inputs->n; j++)
    if (inputs->in[j] && inputs->in[j]->dtype != common)
      TRY(inputs_replace(ctx, inputs, j, ctx->core_ops->cast, &args));
  return ST_OK;
}

// A matrix that a GEMM can read in place: rows or columns are dense.
static bool matrix_like(const Tensor *t) {
  if (t->ndim < 2) return t->ndim == 0 || t->stride[0] == 1;
  int64_t rows = t->shape[t->ndim - 2], columns = t->shape[t->ndim - 1];
  int64_t down = t->stride[t->ndim - 2], along = t->stride[t->ndim - 1];
  return (along == 1 && (down >= columns || rows == 1)) ||
         (down == 1 && (along >= rows || columns == 1));
}

static bool dense_rows(const Tensor *t) {
  return t->ndim == 0 || t->stride[t->ndim - 1] == 1 || t->shape[t->ndim - 1] == 1;
}

static Status make_dense(Ctx *ctx, Inputs *inputs, bool (*dense)(const Tensor *)) {
  OpArgs args = {.n_list = -1};
  for (int j = 0; j < inputs->n; j++)
    if (inputs->in[j] && inputs->in[j]->storage && !dense(inputs->in[j]))
      TRY(inputs_replace(ctx, inputs, j, ctx->core_ops->contiguous, &args));
  return ST_OK;
}

static Status prepare(Ctx *ctx, const Op *op, Inputs *inputs, Device **device) {
  if (inputs->n > OP_MAX_VARIADIC)
    return fail_hint(
        fail(ST_EVALUE, "%s: %d inputs, %d are the most", op->name, inputs->n, OP_MAX_VARIADIC),
        "join them in groups, then the groups");
  TRY(check_inputs(ctx, op, inputs->in, inputs->n, device));
  if (op->flags & OP_PROMOTE) TRY(promote(ctx, inputs));
  if (op->flags & OP_CONTIGUOUS) TRY(make_dense(ctx, inputs, tensor_contiguous));
  if (op->flags & OP_DENSE_ROWS) TRY(make_dense(ctx, inputs, dense_rows));
  if (op->flags & OP_MATRIX) TRY(make_dense(ctx, inputs, matrix_like));
  return ST_OK;
}

static bool wants_gradient(const OpCall *call) {
  if (!call->ctx->grad_enabled || !call->op->grad) return false;
  for (int j = 0; j < call->n_in; j++)
    if (call->in[j] && call->in[j]->requires_grad) return true;
  return false;
}

static Status run_shape_rule(Ctx *ctx, const Op *op, Tensor **in, int n_in, const OpArgs *args,
                             OpCall *call) {
  call->ctx = ctx;
  call->op = op;
  call->n_in = n_in;
  call->in = in;
  if (args)
    op_args_copy(&call->args, args);
  else
    memset(&call->args, 0, sizeof call->args), call->args.n_list = -1;
  call->n_out = op->n_out;
  call->n_saved = op->n_saved;
  call->workspace = 0;
  call->flops = 0;
  call->index_in = -1;
  call->index_skip = INT64_MIN;
  call->known = NULL;
  call->records = wants_gradient(call);
  for (int i = 0; i < op->n_out + op->n_saved; i++) call->out[i].alias = false;
  TRY(op->shape(call));
  bool differentiable = false; // integers carry no gradient
  for (int i = 0; i < op->n_out; i++) differentiable |= dtype_is_float(call->out[i].dtype);
  call->records &= differentiable;
  return ST_OK;
}

Status op_infer(Ctx *ctx, const Op *op, Tensor **in, int n_in, const OpArgs *args, OpCall *out) {
  return run_shape_rule(ctx, op, in, n_in, args, out);
}

// Every value of the index input lies where the shape rule says.
static Status check_indices(const OpCall *call) {
  Tensor *t = call->in[call->index_in];
  if (tensor_is_meta(t) || !t->storage) return ST_OK;
  int64_t n = tensor_numel(t);
  for (int64_t i = 0; i < n; i++) {
    double value;
    if (t->dtype == DT_I64 && tensor_contiguous(t)) { // the common case, without division
      const int64_t *p = tensor_data(t);
      while (i < n && ((p[i] >= 0 && p[i] < call->index_limit) || p[i] == call->index_skip)) i++;
      if (i == n) return ST_OK;
      value = (double)p[i];
    } else {
      TRY(tensor_read(t, i, &value));
    }
    if ((value >= 0 && value < (double)call->index_limit) || value == (double)call->index_skip)
      continue;
    const char *name;
    int length = input_name(call->op, call->index_in, &name);
    return fail_hint(fail(ST_ERANGE, "%s: %.*s holds %.0f at position %lld, valid are 0 to %lld",
                          call->op->name, length, name, value, (long long)i,
                          (long long)call->index_limit - 1),
                     "indices, labels and token ids count from 0");
  }
  return ST_OK;
}

static Status make_outputs(OpCall *call, Device *device, Tensor **out) {
  Ctx *ctx = call->ctx;
  int n = call->n_out + call->n_saved;
  if (call->known) return tensor_detach(ctx, call->known, &out[0]);
  for (int i = 0; i < n; i++) {
    // An alias of a parameter that a dry run never placed is a tensor of its own.
    Status status = call->out[i].alias && call->in[0]->storage
                        ? tensor_alias(ctx, call->in[0], &call->out[i], &out[i])
                        : tensor_new(ctx, device, &call->out[i], MEM_ACTIVATIONS, &out[i]);
    if (status != ST_OK) {
      while (i-- > 0) tensor_release(ctx, out[i]);
      return status;
    }
  }
  return ST_OK;
}

// Products are told apart by M x K x N: rows of the result, what is summed over, columns.
static void note_time(const OpCall *call, double seconds) {
  char what[96];
  const TensorSpec *out = &call->out[0];
  const Tensor *w = call->n_in > 1 ? call->in[1] : NULL;
  int64_t numel = 1, N = out->ndim ? out->shape[out->ndim - 1] : 1;
  for (int d = 0; d < out->ndim; d++) numel *= out->shape[d];
  int64_t K = numel > 0 ? (int64_t)(call->flops / (2.0 * (double)numel)) : 0;
  bool is_product =
      K > 0 && w && w->ndim >= 2 && (w->shape[w->ndim - 1] == K || w->shape[w->ndim - 2] == K);
  if (is_product)
    snprintf(what, sizeof what, "%s %lldx%lldx%lld", call->op->name, (long long)(numel / N),
             (long long)K, (long long)N);
  else
    snprintf(what, sizeof what, "%s", call->op->name);
  op_profile_add(call->ctx->profile, what, seconds, call->flops);
}

static Status run_kernel(OpCall *call, Device *device, Tensor **out, void *workspace,
                         unsigned accumulate) {
  call->ctx->flops += call->flops;
  Kernel kernel = call->op->kernel[device->kind];
  if (!kernel || device->kind == DEV_META) return ST_OK;
  Status status = ST_OK;
  KernelCall k = {&call->args, call->n_in, call->n_out + call->n_saved, call->in, out, workspace,
                  accumulate,  &status};
  double start = call->ctx->profile ? clock_now() : 0;
  kernel(&k);
  if (call->ctx->profile) note_time(call, clock_now() - start);
  if (status == ST_OK) poll_run();
  return status;
}

// Outputs inherit the D and P bits; a P-only input of a GEMM-like op waits for W.
static void spread_bits(OpCall *call, const OpNeeds *needs, Tensor **out) {
  bool d = false, p = false;
  for (int j = 0; j < call->n_in; j++) {
    Tensor *t = call->in[j];
    if (!t) continue;
    d |= t->depends_data;
    p |= t->depends_param;
    if (t->depends_param && !t->depends_data && j < OP_MAX_IN && (needs->defer >> j & 1))
      t->deferred = true;
  }
  for (int i = 0; i < call->n_out; i++) {
    out[i]->depends_data = d;
    out[i]->depends_param = p;
  }
}

// From checked inputs to recorded outputs.
static Status execute(OpCall *call, Device *device, Tensor **out) {
  Ctx *ctx = call->ctx;
  if (call->index_in >= 0) TRY(check_indices(call));
  Tensor *all[OP_MAX_OUT];
  TRY(make_outputs(call, device, all));
  void *workspace = NULL;
  Status status = ST_OK;
  int n = call->n_out + call->n_saved;
  if (call->workspace > 0 && device->kind != DEV_META && !call->known)
    TRY_TO(failed,
           device->vtable->alloc(device, (size_t)call->workspace, MEM_WORKSPACE, &workspace));
  if (!call->out[0].alias && !call->known) status = run_kernel(call, device, all, workspace, 0);
  if (workspace) device->vtable->free(device, workspace, (size_t)call->workspace, MEM_WORKSPACE);
  if (status != ST_OK) goto failed;
  OpNeeds local, *needs = &local;
  if (call->op->id >= 0)
    needs = &ctx->op_needs[call->op->id];
  else
    op_needs(call->op, needs);
  spread_bits(call, needs, all);
  if (call->records) TRY_TO(failed, tape_record(call, needs, all));
  for (int i = call->n_out; i < n; i++) tensor_release(ctx, all[i]);
  memcpy(out, all, (size_t)call->n_out * sizeof *out);
  return ST_OK;
failed:
  for (int i = 0; i < n; i++) tensor_release(ctx, all[i]);
  return status;
}

static Status interrupted(Ctx *ctx) {
  if (!ctx->interrupted) return ST_OK;
  ctx->interrupted = 0;
  return fail(ST_ESTOPPED, "interrupted");
}

static Status apply(Ctx *ctx, const Op *op, Tensor **in, int n_in, const OpArgs *args,
                    const Tensor *known, Tensor **out) {
  TRY(interrupted(ctx));
  Inputs inputs;
  TRY(inputs_begin(&inputs, in, n_in));
  Device *device;
  OpCall call;
  Status status = prepare(ctx, op, &inputs, &device);
  if (status == ST_OK) status = run_shape_rule(ctx, op, inputs.in, n_in, args, &call);
  call.known = known;
  if (status == ST_OK) status = execute(&call, device, out);
  inputs_release(ctx, &inputs);
  return status;
}

Status op_apply(Ctx *ctx, const Op *op, Tensor **in, int n_in, const OpArgs *args, Tensor **out) {
  return apply(ctx, op, in, n_in, args, NULL, out);
}

Status op_apply_known(Ctx *ctx, const Op *op, Tensor **in, int n_in, const OpArgs *args,
                      const Tensor *known, Tensor **out) {
  assert((op->flags & OP_KEPT) && op->n_out == 1 && op->n_saved == 0);
  return apply(ctx, op, in, n_in, args, known, out);
}

static bool same_shape(const TensorSpec *spec, const Tensor *t) {
  if (spec->ndim != t->ndim) return false;
  for (int d = 0; d < t->ndim; d++)
    if (spec->shape[d] != t->shape[d]) return false;
  return true;
}

// Runs a prepared call into `out` for the public outputs.
static Status execute_into(OpCall *call, Device *device, Tensor **out, unsigned accumulate) {
  Ctx *ctx = call->ctx;
  if (call->index_in >= 0) TRY(check_indices(call));
  Tensor *all[OP_MAX_OUT] = {NULL};
  memcpy(all, out, (size_t)call->n_out * sizeof *out);
  void *workspace = NULL;
  Status status = ST_OK;
  for (int i = call->n_out; i < call->n_out + call->n_saved; i++)
    TRY_TO(done, tensor_new(ctx, device, &call->out[i], MEM_WORKSPACE, &all[i]));
  if (call->workspace > 0 && device->kind != DEV_META)
    TRY_TO(done, device->vtable->alloc(device, (size_t)call->workspace, MEM_WORKSPACE, &workspace));
  status = run_kernel(call, device, all, workspace, accumulate);
done:
  if (workspace) device->vtable->free(device, workspace, (size_t)call->workspace, MEM_WORKSPACE);
  for (int i = call->n_out; i < call->n_out + call->n_saved; i++) tensor_release(ctx, all[i]);
  return status;
}

Status op_apply_into(Ctx *ctx, const Op *op, Tensor **in, int n_in, const OpArgs *args,
                     Tensor **out, unsigned accumulate) {
  bool grad = ctx->grad_enabled;
  ctx->grad_enabled = false;
  Inputs inputs;
  Device *device;
  OpCall call;
  Status status = inputs_begin(&inputs, in, n_in);
  if (status == ST_OK) {
    status = prepare(ctx, op, &inputs, &device);
    if (status == ST_OK) status = run_shape_rule(ctx, op, inputs.in, n_in, args, &call);
    for (int i = 0; status == ST_OK && i < op->n_out; i++)
      assert(!out[i] || same_shape(&call.out[i], out[i]));
    if (status == ST_OK) status = execute_into(&call, device, out, accumulate);
    inputs_release(ctx, &inputs);
  }
  ctx->grad_enabled = grad;
  return status;
}

Status op_cast_into(Ctx *ctx, Tensor *to, Tensor *from, bool accumulate) {
  OpArgs args = {.n_list = -1};
  args.v[0].i = to->dtype;
  return op_apply_into(ctx, ctx->core_ops->cast, &from, 1, &args, &to, accumulate);
}

Status op_apply_inplace(Ctx *ctx, const Op *op, Tensor **in, int n_in, const OpArgs *args) {
  Tensor *target = in[0];
  char shape[128], other[128];
  for (int j = 0; ctx->grad_enabled && j < n_in; j++) {
    if (!in[j] || !in[j]->requires_grad) continue;
    return fail_hint(
        fail(ST_ESTATE, "%s_: in-place on %s would lose a gradient", op->name,
             in[0]->requires_grad && !in[0]->node ? "a leaf that wants one" : "a recorded tensor"),
        "write x = x:%s(...), or wrap it in rille.no_grad(function() ... end)", op->name);
  }
  if (target->dtype == DT_BOOL && (op->flags & OP_FLOAT))
    return fail(ST_EDTYPE, "%s_: not for bool tensors", op->name);
  Inputs inputs;
  TRY(inputs_begin(&inputs, in, n_in));
  Device *device;
  OpCall call;
  Status status = check_inputs(ctx, op, inputs.in, n_in, &device);
  OpArgs cast = {.n_list = -1};
  cast.v[0].i = target->dtype; // the target keeps its dtype
  for (int j = 1; status == ST_OK && j < n_in; j++)
    if (inputs.in[j] && inputs.in[j]->dtype != target->dtype)
      status = inputs_replace(ctx, &inputs, j, ctx->core_ops->cast, &cast);
  for (int j = 1; status == ST_OK && j < n_in; j++) // another view of what is being written
    if (inputs.in[j] && inputs.in[j] != target && inputs.in[j]->storage == target->storage)
      status = inputs_replace(ctx, &inputs, j, ctx->core_ops->contiguous, &cast);
  if (status == ST_OK) status = run_shape_rule(ctx, op, inputs.in, n_in, args, &call);
  if (status == ST_OK && (!same_shape(&call.out[0], target) || call.out[0].dtype != target->dtype))
    status = fail(ST_ESHAPE, "%s_: the result %s%s does not fit in place of %s", op->name,
                  dtype_name(call.out[0].dtype),
                  format_shape(shape, sizeof shape, call.out[0].ndim, call.out[0].shape),
                  format_tensor(other, sizeof other, target));
  if (status == ST_OK) {
    status = execute_into(&call, device, &target, 0);
    if (status == ST_OK) tensor_written(ctx, target);
  }
  inputs_release(ctx, &inputs);
  return status;
}

Status grad_give(GradCall *call, int j, Tensor *owned) {
  if (!owned) return ST_OK;
  Ctx *ctx = call->ctx;
  if (!call->din[j]) {
    call->din[j] = owned;
    return ST_OK;
  }
  Status status = op_cast_into(ctx, call->din[j], owned, call->accumulate >> j & 1);
  tensor_release(ctx, owned);
  return status;
}
