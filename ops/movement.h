// movement - ops that move elements: what C callers use beside the rows, and what shape rules and
// kernels of this family share.
#ifndef RILLE_OPS_MOVEMENT_H
#define RILLE_OPS_MOVEMENT_H

#include "core/op.h"

#ifdef __cplusplus
extern "C" {
#endif

// Cuts x along dim into views of `size` (the last may be shorter), each recorded as a slice.
// out[0..*n) are owned by the caller; room >= the number of parts, else EVALUE. size >= 1.
Status ops_split(Ctx *ctx, Tensor *x, int64_t size, int64_t dim, int room, Tensor **out, int *n);

// Gives input 0 the gradient `dy` through a view of it: the op's own, applied to the place of the
// gradient. What the view does not show is zero, or left alone where the tape adds.
Status grad_through_view(GradCall *call, Tensor *dy);

// The strides of a view of x with shape out->shape; false if none exists.
bool view_strides(const Tensor *x, TensorSpec *out);

// t's part [start, start + size) of dimension d, as a struct of its own over the same storage.
static inline Tensor part_of(const Tensor *t, int d, int64_t start, int64_t size) {
  Tensor part = *t;
  part.offset += start * t->stride[d];
  part.shape[d] = size;
  return part;
}

// Bytes of scratch that the CPU kernels of these rows need.
int64_t gather_workspace(const OpCall *call);
int64_t scatter_workspace(const OpCall *call, int64_t result_numel);
int64_t sort_workspace(int64_t line);

#ifdef __cplusplus
}
#endif
#endif
