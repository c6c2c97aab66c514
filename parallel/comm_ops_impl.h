// comm_ops_impl - what the rows of comm_ops.def bind, and what their files share.
#ifndef RILLE_PARALLEL_COMM_OPS_IMPL_H
#define RILLE_PARALLEL_COMM_OPS_IMPL_H

#include "parallel/comm_ops.h"

#define OP(name, flags, n_out, n_saved, inputs, args, needs, defer, help) \
  Status shape_comm_##name(OpCall *call);                                 \
  Status grad_comm_##name(GradCall *call);                                \
  void cpu_comm_##name(const KernelCall *call);
#define OP_V(name, flags, inputs, args, help) \
  Status shape_comm_##name(OpCall *call);     \
  Status grad_comm_##name(GradCall *call);
#include "parallel/comm_ops.def"
#undef OP
#undef OP_V

// The group among a call's arguments. Errors: ESTATE, if it has been freed.
Status comm_op_group(const Op *op, const OpArgs *args, Comm **out);

// ESHAPE unless dimension dim of input 0 divides among the ranks.
Status comm_op_divides(const OpCall *call, const Comm *comm, int dim);

// Whether the parts along d of what has this shape and is row-major lie one after the other.
bool comm_op_in_blocks(const int64_t *shape, int d);

// The n parts of t along d into row-major blocks, one after the other, or out of them.
void comm_op_move_blocks(Tensor *t, int d, int n, char *blocks, bool into_blocks);

// The sum of a gradient over a group, under way. All of it is the sum's until grad_sum_end.
typedef struct GradSum {
  Tensor *all, *blocks, *out; // out: the sum, or this rank's part of it
  CommCollective *sum;        // NULL: done, or on meta
} GradSum;
// Starts it. all: row-major, nobody else's, taken over; dim < 0: every rank gets the whole sum,
// else its part along dim. After an error grad_sum_end is still owed.
Status grad_sum_start(GradCall *call, Comm *comm, int dim, Tensor *all, GradSum *s);
// Waits for it; weight gradients that wait for their turn run meanwhile. *out is the caller's.
Status grad_sum_finish(GradCall *call, GradSum *s, Tensor **out);
void grad_sum_end(Ctx *ctx, GradSum *s);

#endif
