// tape - the graph of a forward pass, and the two halves of its backward.
//
// A Node is one op call: its inputs' producers (edges), what it saved, and where in the script and
// the model it was made. Tensors carry two bits: D (depends on microbatch data) and P (depends on a
// parameter). I, the dgrad, walks the nodes whose output has D; W, the wgrad, does the rest:
//
//    I:  pop nodes by descending sequence; give gradients to inputs with D, and to P-only inputs
//    that no
//        GEMM-like op consumes (norm gains, biases); keep (node, dout) of the others in the W queue
//    W:  run the queue in its order, then nodes without D by descending sequence
//    B:  as I, but a W-queue entry runs at once; then the nodes without D
//
// Invariants:
//  1. Contributions to one tensor come in the same order in B as in I then W: D-nodes in the order
//  in
//     which I pops them, then P-only nodes by sequence. So I;W and B give the same bits.
//  2. All D-node contributions to one P-only tensor are made in the same half (Tensor.deferred).
//  3. A parameter is saved as (parameter, version), never as an address.
//  4. What only W needs is saved in arena W, all else in arena I; I-saved tensors go when I has
//  popped
//     their node.
#ifndef RILLE_CORE_TAPE_H
#define RILLE_CORE_TAPE_H

#include "core/op.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum BackwardKind { BACKWARD_B, BACKWARD_I } BackwardKind;

typedef struct Backward Backward; // a backward under way, or the W half that an I left

// Records a finished call on the tape (op_apply does; not needed elsewhere).
Status tape_record(OpCall *call, const OpNeeds *needs, Tensor **out);

// A node of the user's own: `grad` computes din from dout, `drop` frees `user` with the node.
// Inputs and outputs are available to it by what `needs` of `op` says.
Status tape_record_custom(Ctx *ctx, const Op *op, Tensor **in, int n_in, const OpArgs *args,
                          Tensor **out, int n_out, void *user, void (*drop)(Ctx *ctx, void *user));

// Backward from outs with gradients douts (NULL entry: ones, for one-element tensors).
// Once it (of I;W: W) has ended well, a leaf's gradient shares its storage with nothing: not with
// another leaf's, not with douts.
// BACKWARD_I: *w gets what W needs (give it to backward_w); BACKWARD_B: w may be NULL.
// Errors: ESTATE (graph freed; a saved tensor or parameter changed since forward, naming both
// lines).
Status backward(Ctx *ctx, Tensor **outs, Tensor **douts, int n, BackwardKind kind, Backward **w);
Status backward_w(Ctx *ctx, Backward *run);
void backward_delete(Ctx *ctx, Backward *run);

// Runs one weight gradient of the oldest W half that waits (also of the I that is under way), if
// there is one: what a rank can do while its I waits for others. Halves are taken in the order of
// their I, and inv. 1 holds within each, so that no sum is taken in another order: what has nodes
// without D ends the row, and so does what calls other ranks. *did: whether there was one.
Status backward_idle(Ctx *ctx, bool *did);

// Within a custom grad (recomputation): continues the running backward into `outs`.
Status backward_extend(GradCall *call, Tensor **outs, Tensor **douts, int n);

Node *node_retain(Node *node);
void node_release(Ctx *ctx, Node *node);
// The script line and module path a tensor's producer was recorded at.
Where node_where(const Node *node);
const char *node_module(const Node *node);
const Op *node_op(const Node *node);

#ifdef __cplusplus
}
#endif
#endif
