// random - dropout as a function of where in the model and the step it is.
#ifndef RILLE_OPS_RANDOM_H
#define RILLE_OPS_RANDOM_H

#include "core/op.h"

#ifdef __cplusplus
extern "C" {
#endif

// Which part of a sample a tensor holds that is cut along one dimension: element i of it is element
// (i / inner) whole + offset + i % inner of the sample. inner: elements of that dimension and those
// after it, whole: the same of the uncut tensor, offset: where the part begins among them. inner 0:
// all of it.
typedef struct SamplePart {
  int64_t inner, whole, offset;
} SamplePart;

// Dropout under the context's next random call: the mask depends on seed, module, ordinal of the
// call in the module, step, global sample and element, not on microbatch, rank or schedule. part:
// NULL if x holds whole samples. Errors: EVALUE for p outside [0, 1); ESHAPE if x does not divide
// into samples, or a sample not into parts.
Status ops_dropout(Ctx *ctx, Tensor *x, double p, const SamplePart *part, Tensor **out);

#ifdef __cplusplus
}
#endif
#endif
