// comm_sum - the sum of a gradient over a group, under way while a backward goes on with other
// work.
//
//     all ---> blocks of each rank's part, one after the other (dim >= 0, unless it lies so)
//      |          |
//      v          v
//     all_reduce  reduce_scatter ---> this rank's part
#include "core/tape.h"
#include "parallel/comm_ops_impl.h"

Status grad_sum_start(GradCall *call, Comm *comm, int dim, Tensor *all, GradSum *s) {
  Ctx *ctx = call->ctx;
  *s = (GradSum){.all = all};
  bool is_meta = tensor_is_meta(all);
  if (dim < 0) {
    s->out = tensor_retain(all);
    if (is_meta) return ST_OK;
    return comm_all_reduce_start(comm, ctx->pool, tensor_data(all), tensor_numel(all), all->dtype,
                                 REDUCE_SUM, &s->sum);
  }
  TensorSpec spec;
  tensor_spec(all, &spec);
  spec_row_major(&spec);
  spec.offset = 0;
  Device *device = all->storage->device;
  if (!is_meta && !comm_op_in_blocks(all->shape, dim))
    TRY(tensor_new(ctx, device, &spec, MEM_WORKSPACE, &s->blocks));
  spec.shape[dim] /= comm->size;
  spec_row_major(&spec);
  TRY(tensor_new(ctx, device, &spec, MEM_ACTIVATIONS, &s->out));
  if (is_meta) return ST_OK;
  if (s->blocks) {
    comm_op_move_blocks(all, dim, comm->size, tensor_data(s->blocks), true);
    tensor_release(ctx, s->all);
    s->all = NULL;
  }
  return comm_reduce_scatter_start(comm, ctx->pool, tensor_data(s->blocks ? s->blocks : s->all),
                                   tensor_data(s->out), tensor_numel(s->out), s->out->dtype,
                                   &s->sum);
}

// Weight gradients that wait run meanwhile, one by one, until there are none or the sum is there.
static Status work_meanwhile(GradCall *call, GradSum *s) {
  for (bool did = true; s->sum;) {
    TRY(backward_idle(call->ctx, &did));
    if (!did) return ST_OK;
    bool done;
    CommCollective *sum = s->sum;
    s->sum = NULL; // done or failed, it is gone
    TRY(comm_collective_test(sum, &done));
    if (!done) s->sum = sum;
  }
  return ST_OK;
}

Status grad_sum_finish(GradCall *call, GradSum *s, Tensor **out) {
  TRY(work_meanwhile(call, s));
  CommCollective *sum = s->sum;
  s->sum = NULL;
  if (sum) TRY(comm_collective_wait(sum, "the sum of a layer's input gradients"));
  *out = s->out;
  s->out = NULL;
  return ST_OK;
}

void grad_sum_end(Ctx *ctx, GradSum *s) {
  if (s->sum) (void)comm_collective_wait(s->sum, "the sum of a layer's input gradients");
  tensor_release(ctx, s->all);
  tensor_release(ctx, s->blocks);
  tensor_release(ctx, s->out);
  *s = (GradSum){0};
}
