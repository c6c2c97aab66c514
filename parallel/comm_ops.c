// comm_ops - shape rules, kernels and gradients of the collectives.
//
// Messages are blocks, one a rank, in rank order. Cut along dimension d, a tensor lies in blocks
// already if it is row-major and all its sizes before d are 1; else its parts are packed into, or
// come out of, the workspace. Either way an element is copied once.
#include "parallel/comm_ops.h"

#include "ops/dense_cpu.h"
#include "ops/movement.h"
#include "ops/shapes.h"
#include "parallel/comm_ops_impl.h"

#include <assert.h>
#include <stdlib.h>

static const Op table[] = {
#define OP(name, flags, n_out, n_saved, inputs, args, needs, defer, help) \
  {COMM_OP_##name,                                                        \
   #name,                                                                 \
   inputs,                                                                \
   args,                                                                  \
   needs,                                                                 \
   defer,                                                                 \
   (flags),                                                               \
   n_out,                                                                 \
   n_saved,                                                               \
   shape_comm_##name,                                                     \
   grad_comm_##name,                                                      \
   {cpu_comm_##name, NULL},                                               \
   help},
#define OP_V(name, flags, inputs, args, help) \
  {                                           \
      COMM_OP_##name,                         \
      #name,                                  \
      inputs,                                 \
      args,                                   \
      "",                                     \
      "",                                     \
      (flags) | OP_VIEW,                      \
      1,                                      \
      0,                                      \
      shape_comm_##name,                      \
      grad_comm_##name,                       \
      {NULL, NULL},                           \
      help},
#include "parallel/comm_ops.def"
#undef OP
#undef OP_V
};

const Op *comm_op_row(CommOpId id) {
  assert(id > COMM_OP_BEFORE && id < COMM_OP_END);
  return &table[id - OP_COUNT];
}

Status comm_ops_init(Ctx *ctx) {
  OpNeeds *needs = realloc(ctx->op_needs, COMM_OP_END * sizeof *needs);
  if (!needs) return fail(ST_ENOMEM, "out of memory for the table of collectives");
  for (int id = OP_COUNT; id < COMM_OP_END; id++) op_needs(&table[id - OP_COUNT], &needs[id]);
  ctx->op_needs = needs;
  return ST_OK;
}

Status comm_op_call(Ctx *ctx, CommOpId id, Tensor *x, const Comm *group, int64_t first,
                    int64_t second, Tensor **out) {
  OpArgs args = {.n_list = -1};
  args.v[0].i = group->id;
  args.v[1].i = first;
  args.v[2].i = second;
  return op_apply(ctx, comm_op_row(id), &x, 1, &args, out);
}

Status comm_op_group(const Op *op, const OpArgs *args, Comm **out) {
  *out = comm_by_id(args->v[0].i);
  if (*out) return ST_OK;
  return fail_hint(fail(ST_ESTATE, "%s: its group of ranks has been freed", op->name),
                   "keep the mesh, or the group, until backward is over");
}

// ---- shapes ----------------------------------------------------------------------------------

// The group of a call, and a dimension of x among its arguments, counted from the end if negative.
static Status begin(OpCall *call, int place, Comm **comm, int *dim) {
  TRY(comm_op_group(call->op, &call->args, comm));
  shape_like(&call->out[0], call->in[0]);
  TRY(shape_dim(call, call->args.v[place].i, call->in[0]->ndim, dim));
  call->args.v[place].i = *dim;
  return ST_OK;
}

Status comm_op_divides(const OpCall *call, const Comm *comm, int dim) {
  int64_t size = call->in[0]->shape[dim];
  if (size % comm->size == 0) return ST_OK;
  return fail_hint(shape_fail(call,
                              "dimension %d has %lld elements, which do not divide among the "
                              "%d ranks of the group",
                              dim, (long long)size, comm->size),
                   "a multiple of %d is needed: another size, or fewer ranks in the group",
                   comm->size);
}

bool comm_op_in_blocks(const int64_t *shape, int d) {
  for (int k = 0; k < d; k++)
    if (shape[k] != 1) return false;
  return true;
}

static bool x_in_blocks(const Tensor *x, int d) {
  return comm_op_in_blocks(x->shape, d) && tensor_contiguous(x);
}

static int64_t bytes_of(const Tensor *t) { return dense_bytes(tensor_numel(t), t->dtype); }

static int64_t bytes_of_spec(const TensorSpec *spec) {
  return dense_bytes(spec_numel(spec), spec->dtype);
}

Status shape_comm_copy_to(OpCall *call) {
  Comm *comm;
  TRY(comm_op_group(call->op, &call->args, &comm));
  tensor_spec(call->in[0], &call->out[0]);
  call->out[0].alias = true;
  return ST_OK;
}

Status shape_comm_reduce_from(OpCall *call) {
  Comm *comm;
  TRY(comm_op_group(call->op, &call->args, &comm));
  shape_like(&call->out[0], call->in[0]);
  return ST_OK;
}

Status shape_comm_all_gather(OpCall *call) {
  Comm *comm;
  int dim = 0;
  TRY(begin(call, 1, &comm, &dim));
  TensorSpec *out = &call->out[0];
  TRY(checked_mul(out->shape[dim], comm->size, &out->shape[dim]));
  if (!comm_op_in_blocks(out->shape, dim)) call->workspace = bytes_of_spec(out);
  return ST_OK;
}

Status shape_comm_gather_from(OpCall *call) { return shape_comm_all_gather(call); }

Status shape_comm_reduce_scatter(OpCall *call) {
  Comm *comm;
  int dim = 0;
  TRY(begin(call, 1, &comm, &dim));
  TRY(comm_op_divides(call, comm, dim));
  call->out[0].shape[dim] /= comm->size;
  if (!x_in_blocks(call->in[0], dim)) call->workspace = bytes_of(call->in[0]);
  return ST_OK;
}

Status shape_comm_scatter_to(OpCall *call) {
  Comm *comm;
  int dim = 0;
  TRY(begin(call, 1, &comm, &dim));
  TRY(comm_op_divides(call, comm, dim));
  call->out[0].shape[dim] /= comm->size;
  return ST_OK;
}

Status shape_comm_all_to_all(OpCall *call) {
  Comm *comm;
  int split = 0, cat = 0;
  TRY(begin(call, 1, &comm, &split));
  TRY(begin(call, 2, &comm, &cat));
  TRY(comm_op_divides(call, comm, split));
  TensorSpec *out = &call->out[0];
  out->shape[split] /= comm->size;
  TRY(checked_mul(out->shape[cat], comm->size, &out->shape[cat]));
  if (!x_in_blocks(call->in[0], split)) call->workspace += bytes_of(call->in[0]);
  if (!comm_op_in_blocks(out->shape, cat)) call->workspace += bytes_of_spec(out);
  return ST_OK;
}

Status shape_comm_broadcast(OpCall *call) {
  Comm *comm;
  TRY(comm_op_group(call->op, &call->args, &comm));
  shape_like(&call->out[0], call->in[0]);
  int64_t root = call->args.v[1].i;
  if (root >= 0 && root < comm->size) return ST_OK;
  return fail_hint(fail(ST_ERANGE, "broadcast: there is no rank %lld in a group of %d",
                        (long long)root, comm->size),
                   "the root counts from 0, within the group");
}

// ---- kernels ---------------------------------------------------------------------------------

// Row-major memory with the shape of a part, as a struct of its own.
static Tensor block_like(const Tensor *part, Storage *memory, char *data) {
  memory->data = data;
  Tensor block = {.dtype = part->dtype, .ndim = part->ndim, .storage = memory};
  int64_t stride = 1;
  for (int d = part->ndim - 1; d >= 0; d--) {
    block.shape[d] = part->shape[d];
    block.stride[d] = stride;
    stride *= part->shape[d];
  }
  return block;
}

void comm_op_move_blocks(Tensor *t, int d, int n, char *blocks, bool into_blocks) {
  int64_t size = t->shape[d] / n;
  for (int j = 0; j < n; j++) {
    Storage memory = {0};
    Tensor part = part_of(t, d, j * size, size);
    Tensor block = block_like(&part, &memory, blocks);
    if (into_blocks)
      dense_copy(&part, &block, false);
    else
      dense_copy(&block, &part, false);
    blocks += (size_t)tensor_numel(&part) * dtype_size(t->dtype);
  }
}

// The group of a kernel's call; the shape rule has found it.
static Comm *group_of(const KernelCall *call) {
  assert(!call->accumulate);
  return comm_by_id(call->args->v[0].i);
}

static size_t bytes_in(const Tensor *t) { return (size_t)tensor_numel(t) * dtype_size(t->dtype); }

void cpu_comm_reduce_from(const KernelCall *call) {
  Tensor *out = call->out[0];
  dense_copy(call->in[0], out, false);
  *call->status =
      comm_all_reduce(group_of(call), tensor_data(out), tensor_numel(out), out->dtype, REDUCE_SUM);
}

void cpu_comm_all_gather(const KernelCall *call) {
  Comm *comm = group_of(call);
  const Tensor *x = call->in[0];
  Tensor *out = call->out[0];
  int d = (int)call->args->v[1].i;
  bool packs = !comm_op_in_blocks(out->shape, d);
  char *blocks = packs ? call->workspace : tensor_data(out);
  size_t bytes = bytes_in(x);
  Storage memory = {0};
  Tensor mine = block_like(x, &memory, blocks + (size_t)comm->rank * bytes);
  dense_copy(x, &mine, false);
  *call->status = comm_all_gather(comm, memory.data, blocks, bytes);
  if (packs && *call->status == ST_OK) comm_op_move_blocks(out, d, comm->size, blocks, false);
}

void cpu_comm_gather_from(const KernelCall *call) { cpu_comm_all_gather(call); }

// x in blocks: itself, or packed into `work`.
static const char *blocks_of(Tensor *x, int d, int n, char *work) {
  if (x_in_blocks(x, d)) return tensor_data(x);
  comm_op_move_blocks(x, d, n, work, true);
  return work;
}

void cpu_comm_reduce_scatter(const KernelCall *call) {
  Comm *comm = group_of(call);
  Tensor *out = call->out[0];
  int d = (int)call->args->v[1].i;
  const char *blocks = blocks_of(call->in[0], d, comm->size, call->workspace);
  *call->status =
      comm_reduce_scatter(comm, blocks, tensor_data(out), tensor_numel(out), out->dtype);
}

void cpu_comm_scatter_to(const KernelCall *call) {
  Comm *comm = group_of(call);
  int d = (int)call->args->v[1].i;
  int64_t size = call->out[0]->shape[d];
  Tensor part = part_of(call->in[0], d, comm->rank * size, size);
  dense_copy(&part, call->out[0], false);
}

void cpu_comm_all_to_all(const KernelCall *call) {
  Comm *comm = group_of(call);
  Tensor *x = call->in[0], *out = call->out[0];
  int split = (int)call->args->v[1].i, cat = (int)call->args->v[2].i;
  bool unpacks = !comm_op_in_blocks(out->shape, cat);
  char *work = call->workspace;
  char *to = unpacks ? work : tensor_data(out);
  if (unpacks) work += bytes_of(out);
  const char *from = blocks_of(x, split, comm->size, work);
  *call->status = comm_all_to_all(comm, from, to, bytes_in(x) / (size_t)comm->size);
  if (unpacks && *call->status == ST_OK) comm_op_move_blocks(out, cat, comm->size, to, false);
}

void cpu_comm_broadcast(const KernelCall *call) {
  Comm *comm = group_of(call);
  Tensor *out = call->out[0];
  int root = (int)call->args->v[1].i;
  if (comm->rank == root) dense_copy(call->in[0], out, false);
  *call->status = comm_broadcast(comm, root, tensor_data(out), bytes_in(out));
}

// ---- gradients -------------------------------------------------------------------------------

// Gives x the result of another row on dy, with the same group.
static Status give_row(GradCall *call, CommOpId id, int64_t first, int64_t second) {
  Comm *comm;
  Tensor *dx;
  if (!grad_wants(call, 0)) return ST_OK;
  TRY(comm_op_group(call->op, call->args, &comm));
  TRY(comm_op_call(call->ctx, id, call->dout[0], comm, first, second, &dx));
  return grad_give(call, 0, dx);
}

static int64_t arg(const GradCall *call, int place) { return call->args->v[place].i; }

// Gives x the sum of dy over the group (dim < 0), or this rank's part of it.
static Status give_sum(GradCall *call, int64_t dim) {
  Comm *comm;
  Tensor *dy, *dx;
  GradSum sum;
  if (!grad_wants(call, 0)) return ST_OK;
  TRY(comm_op_group(call->op, call->args, &comm));
  if (comm->size == 1) return grad_give(call, 0, tensor_retain(call->dout[0]));
  TRY(op_apply(call->ctx, call->ctx->core_ops->contiguous, call->dout, 1, NULL, &dy));
  Status status = grad_sum_start(call, comm, (int)dim, dy, &sum);
  if (status == ST_OK) status = grad_sum_finish(call, &sum, &dx);
  KeptStatus kept = {.message = ""};
  if (status != ST_OK) status_keep(&kept);
  grad_sum_end(call->ctx, &sum);
  return status == ST_OK ? grad_give(call, 0, dx) : status_again(status, &kept);
}

Status grad_comm_copy_to(GradCall *call) { return give_sum(call, -1); }

Status grad_comm_reduce_from(GradCall *call) {
  return grad_wants(call, 0) ? grad_give(call, 0, tensor_retain(call->dout[0])) : ST_OK;
}

Status grad_comm_all_gather(GradCall *call) { return give_sum(call, arg(call, 1)); }

Status grad_comm_reduce_scatter(GradCall *call) {
  return give_row(call, COMM_OP_all_gather, arg(call, 1), 0);
}

Status grad_comm_gather_from(GradCall *call) {
  return give_row(call, COMM_OP_scatter_to, arg(call, 1), 0);
}

Status grad_comm_scatter_to(GradCall *call) {
  return give_row(call, COMM_OP_gather_from, arg(call, 1), 0);
}

Status grad_comm_all_to_all(GradCall *call) {
  return give_row(call, COMM_OP_all_to_all, arg(call, 2), arg(call, 1));
}

// The other ranks' x plays no part: zeros.
Status grad_comm_broadcast(GradCall *call) {
  Comm *comm;
  Tensor *sum, *zeros;
  if (!grad_wants(call, 0)) return ST_OK;
  TRY(comm_op_group(call->op, call->args, &comm));
  TRY(comm_op_call(call->ctx, COMM_OP_reduce_from, call->dout[0], comm, 0, 0, &sum));
  if (comm->rank == arg(call, 1)) return grad_give(call, 0, sum);
  Status status = tensor_zeros(call->ctx, sum->storage->device, sum->dtype, sum->ndim, sum->shape,
                               MEM_ACTIVATIONS, &zeros);
  tensor_release(call->ctx, sum);
  TRY(status);
  return grad_give(call, 0, zeros);
}
