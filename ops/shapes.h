// shapes - what shape rules share: broadcasting, dimensions counted from the end, error texts.
#ifndef RILLE_OPS_SHAPES_H
#define RILLE_OPS_SHAPES_H

#include "core/op.h"

#ifdef __cplusplus
extern "C" {
#endif

// Broadcasts n shapes (NULL inputs are passed over) into out->shape; out->dtype is untouched.
// Errors: ESHAPE naming the op and both shapes.
Status shape_broadcast(const OpCall *call, Tensor **in, int n, TensorSpec *out);

// Negative dimensions count from the end. Errors: ERANGE naming the op and the valid range.
Status shape_dim(const OpCall *call, int64_t dim, int ndim, int *out);

// The list argument as a set of dimensions; absent: all. *out is a bit mask. Errors: ERANGE, EVALUE
// (twice).
Status shape_dims(const OpCall *call, int ndim, unsigned *out);

// out[i] looks like `t`, row-major.
void shape_like(TensorSpec *out, const Tensor *t);

// ESHAPE "name: <words>, a is f32[2, 3], b is f32[4]": every present input with its shape.
Status shape_fail(const OpCall *call, const char *words, ...) PRINTF_LIKE(2, 3);

// EDTYPE unless input j is of an integer type.
Status shape_integer(const OpCall *call, int j);

// The number of elements of shape[first..last).
int64_t shape_product(const int64_t *shape, int first, int last);

#ifdef __cplusplus
}
#endif
#endif
