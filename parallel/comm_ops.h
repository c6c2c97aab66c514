// comm_ops - the differentiable collectives of tensor parallelism: rows as those of ops/ops.def,
// whose kernels communicate.
//
//     forward            backward            what it assumes
//     copy_to            all_reduce          x is the same on all ranks
//     reduce_from        identity            what is computed from y is the same on all ranks
//     all_gather         reduce_scatter
//     reduce_scatter     all_gather
//     gather_from        this rank's part    what is computed from y is the same on all ranks
//     scatter_to         all_gather          x is the same on all ranks
//     all_to_all         all_to_all back
//     broadcast          sum to the root     only the root's x counts
//
// column_linear is copy_to and linear in one, column_linear_time all_gather along time and linear,
// so that the sum of their backward runs while the gradient of w is computed.
//
// Without an assumption the gradients are those of the sum of the losses of all ranks; with it,
// those of the one loss that all ranks have. Sums are taken in rank order: the same bits on all
// ranks. On meta nothing is sent.
//
// In OpArgs a group is the id of its Comm. A group that was freed before backward is an ESTATE.
#ifndef RILLE_PARALLEL_COMM_OPS_H
#define RILLE_PARALLEL_COMM_OPS_H

#include "ops/ops.h"
#include "parallel/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

// They continue OpId, so that Ctx.op_needs serves both tables.
typedef enum CommOpId {
  COMM_OP_BEFORE = OP_COUNT - 1,
#define OP(name, flags, n_out, n_saved, inputs, args, needs, defer, help) COMM_OP_##name,
#define OP_V(name, flags, inputs, args, help) COMM_OP_##name,
#include "parallel/comm_ops.def"
#undef OP
#undef OP_V
  COMM_OP_END
} CommOpId;

// The row of a collective; the table's order is comm_ops.def's.
const Op *comm_op_row(CommOpId id);

// Binds the table to a context, after ops_init. Errors: ENOMEM.
Status comm_ops_init(Ctx *ctx);

// One collective on x with the group and up to two more arguments in the row's order. *out is
// owned by the caller. Errors: ESHAPE, EDTYPE, ERANGE, ESTATE, ECOMM.
Status comm_op_call(Ctx *ctx, CommOpId id, Tensor *x, const Comm *group, int64_t first,
                    int64_t second, Tensor **out);

#ifdef __cplusplus
}
#endif
#endif
