// comm_linear - column_linear: a linear whose rows of w are spread over the ranks of a group; and
// column_linear_time, whose x is cut along time.
//
//     forward      (time: x = all_gather(x))   y = act(x w' + bias)
//     backward     gather x again ----------.
//                  dx_all = dz w            |      the gather is under way meanwhile
//                  sum of dx_all ---------. x
//                                         | dw = dz' x, dbias
//                  dx <-------------------'        (time: this rank's part of the sum)
//
// The sum moves on in polls between kernels and between their blocks. Gathered x is not kept. In a
// backward of x alone (I) it is the weight gradients of the oldest W half that run meanwhile; but
// not column_linear_time's own, which gather: all ranks must do that in one order.
//
// All arithmetic is linear's, on the same values in the same order: the bits are those of
// linear(copy_to(x)) and of linear(all_gather(x)).
#include "ops/dense_cpu.h"
#include "ops/expr.h"
#include "ops/matmul.h"
#include "ops/rows.h"
#include "ops/shapes.h"
#include "parallel/comm_ops_impl.h"

#include <string.h>

enum { TIME = 1 }; // the dimension of x that a sequence is cut along

static bool is_cut(const Op *op) { return op->id == COMM_OP_column_linear_time; }

// The arguments of linear's row.
static OpArgs linear_args(int64_t act) {
  OpArgs args = {.n_list = -1};
  args.v[0].i = act;
  return args;
}

// Row-major x with the time of all ranks, over `memory`.
static Tensor gathered_like(const Tensor *x, int n, Storage *memory) {
  Tensor all = {.dtype = x->dtype, .ndim = x->ndim, .storage = memory};
  int64_t stride = 1;
  for (int d = x->ndim - 1; d >= 0; d--) {
    all.shape[d] = d == TIME ? n * x->shape[d] : x->shape[d];
    all.stride[d] = stride;
    stride *= all.shape[d];
  }
  return all;
}

Status shape_comm_column_linear(OpCall *call) {
  Comm *comm;
  TRY(comm_op_group(call->op, &call->args, &comm));
  const Tensor *x = call->in[0];
  OpArgs args = call->args;
  bool sequence = is_cut(call->op);
  if (sequence && x->ndim != 3)
    return fail_hint(shape_fail(call, "x must be [B, T/n, K]"),
                     "with sequence parallelism activations are cut along time, dimension 1");
  call->args.v[0].i = args.v[1].i;
  Status status = shape_linear(call);
  call->args = args;
  if (status != ST_OK || !sequence) return status;
  for (int i = 0; i < call->n_out + call->n_saved; i++)
    TRY(checked_mul(call->out[i].shape[TIME], comm->size, &call->out[i].shape[TIME]));
  call->flops *= comm->size;
  int64_t bytes = dense_bytes(comm->size * tensor_numel(x), x->dtype);
  call->workspace = linear_workspace(call) + bytes;
  if (!comm_op_in_blocks(x->shape, TIME)) call->workspace += bytes;
  return ST_OK;
}

Status shape_comm_column_linear_time(OpCall *call) { return shape_comm_column_linear(call); }

void cpu_comm_column_linear(const KernelCall *call) {
  OpArgs args = linear_args(call->args->v[1].i);
  KernelCall inner = *call;
  inner.args = &args;
  cpu_linear(&inner);
}

void cpu_comm_column_linear_time(const KernelCall *call) {
  OpArgs args = linear_args(call->args->v[1].i);
  KernelCall inner = *call;
  inner.args = &args;
  Comm *comm = comm_by_id(call->args->v[0].i);
  Tensor *x = call->in[0];
  Storage memory = {.data = call->workspace};
  Tensor all = gathered_like(x, comm->size, &memory);
  int64_t bytes = dense_bytes(tensor_numel(&all), all.dtype);
  bool packs = !comm_op_in_blocks(all.shape, TIME);
  char *after = (char *)call->workspace + bytes, *blocks = packs ? after : call->workspace;
  *call->status =
      comm_all_gather(comm, tensor_data(x), blocks, (size_t)tensor_numel(x) * dtype_size(x->dtype));
  if (*call->status != ST_OK) return;
  if (packs) comm_op_move_blocks(&all, TIME, comm->size, blocks, false);
  Tensor *in[] = {&all, call->in[1], call->n_in > 2 ? call->in[2] : NULL};
  inner.in = in;
  inner.workspace = packs ? after + bytes : after;
  cpu_linear(&inner);
}

// ---- backward --------------------------------------------------------------------------------

// What backward has under way, and what it owns.
typedef struct Flow {
  GradCall *call;
  Comm *comm;
  int n;          // the parts that a sequence is cut into; 1: none
  bool is_meta;   // nothing is sent
  TensorSpec all; // x, of all ranks
  TensorSpec in_spec[3];
  OpArgs args;
  Tensor *dz;
  Tensor *x, *x_blocks; // gathered
  CommCollective *gathering;
  GradSum sum;
} Flow;

static size_t bytes_of(const Tensor *t) { return (size_t)tensor_numel(t) * dtype_size(t->dtype); }

// A tensor of x's shape on all ranks, or a flat one for its blocks.
static Status room_for_all(const Flow *f, DType dtype, Tensor **out) {
  TensorSpec spec = f->all;
  spec.dtype = dtype;
  return tensor_new(f->call->ctx, f->dz->storage->device, &spec, MEM_WORKSPACE, out);
}

static bool has_blocks(const Flow *f) { return comm_op_in_blocks(f->all.shape, TIME); }

// Starts to gather x.
static Status start_gathering(Flow *f) {
  const Tensor *x = f->call->in[0];
  TRY(room_for_all(f, x->dtype, &f->x));
  if (f->is_meta) return ST_OK;
  if (!has_blocks(f)) TRY(room_for_all(f, x->dtype, &f->x_blocks));
  return comm_all_gather_start(f->comm, f->call->ctx->pool, tensor_data(x),
                               tensor_data(f->x_blocks ? f->x_blocks : f->x), bytes_of(x),
                               &f->gathering);
}

static Status finish_gathering(Flow *f) {
  if (!f->gathering) return ST_OK;
  CommCollective *gathering = f->gathering;
  f->gathering = NULL;
  TRY(comm_collective_wait(gathering, "the sequence of a linear"));
  if (f->x_blocks) comm_op_move_blocks(f->x, TIME, f->n, tensor_data(f->x_blocks), false);
  return ST_OK;
}

// Linear's gradients of the inputs in `need`, from dz.
static Status differentiate(Flow *f, uint64_t need, Tensor **din, uint64_t accumulate) {
  const GradCall *call = f->call;
  Tensor *in[3] = {f->x ? f->x : call->in[0], call->in[1], NULL};
  GradCall inner = *call;
  inner.op = op_row(OP_linear);
  inner.args = &f->args;
  inner.in = in;
  inner.in_spec = f->in_spec;
  inner.dout = &f->dz;
  inner.need = need;
  inner.din = din;
  inner.accumulate = accumulate;
  return grad_linear(&inner);
}

// dx of this rank's rows of w, and the start of its sum over the group.
static Status start_sum(Flow *f) {
  Tensor *din[3] = {NULL};
  TRY(differentiate(f, 1, din, 0));
  return grad_sum_start(f->call, f->comm, f->n > 1 ? TIME : -1, din[0], &f->sum);
}

static Status flow(Flow *f) {
  GradCall *call = f->call;
  bool wants_x = grad_wants(call, 0);
  if (f->n > 1 && grad_wants(call, 1)) TRY(start_gathering(f));
  if (wants_x) TRY(start_sum(f));
  TRY(finish_gathering(f));
  uint64_t rest = call->need & ~UINT64_C(1);
  if (rest) TRY(differentiate(f, rest, call->din, call->accumulate));
  if (!wants_x) return ST_OK;
  Tensor *dx;
  TRY(grad_sum_finish(call, &f->sum, &dx));
  return grad_give(call, 0, dx);
}

// Buffers must not go while a message is under way in them.
static void flow_end(Flow *f) {
  if (f->gathering) (void)comm_collective_wait(f->gathering, "the sequence of a linear");
  tensor_release(f->call->ctx, f->x);
  tensor_release(f->call->ctx, f->x_blocks);
  grad_sum_end(f->call->ctx, &f->sum);
}

Status grad_comm_column_linear(GradCall *call) {
  Flow f = {.call = call, .args = linear_args(0), .all = call->in_spec[0]};
  TRY(comm_op_group(call->op, call->args, &f.comm));
  f.n = is_cut(call->op) ? f.comm->size : 1;
  if (f.n > 1) f.all.shape[TIME] *= f.n;
  f.is_meta = tensor_is_meta(call->dout[0]);
  memcpy(f.in_spec, call->in_spec, (size_t)call->n_in * sizeof *f.in_spec);
  f.in_spec[0] = f.all;
  Expr e;
  expr_begin(&e, call->ctx);
  int64_t act = call->args->v[1].i;
  f.dz = act ? expr2(&e, linear_act_backward(act), call->dout[0], call->saved[0]) : call->dout[0];
  if (f.dz && !tensor_contiguous(f.dz)) f.dz = expr1(&e, OP_contiguous, f.dz);
  if (f.dz) {
    e.status = flow(&f);
    KeptStatus kept = {.message = ""};
    if (e.status != ST_OK) status_keep(&kept);
    flow_end(&f);
    if (e.status != ST_OK) e.status = status_again(e.status, &kept);
  }
  return expr_end(&e);
}

Status grad_comm_column_linear_time(GradCall *call) { return grad_comm_column_linear(call); }
