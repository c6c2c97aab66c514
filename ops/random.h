// random - dropout as a function of where in the model and the step it is.
#ifndef RILLE_OPS_RANDOM_H
#define RILLE_OPS_RANDOM_H

#include "core/op.h"

#ifdef __cplusplus
extern "C" {
#endif

// Dropout under the context's next random call: the mask depends on seed, module, ordinal of the
// call in the module, step, global sample and element, not on microbatch, rank or schedule. Errors:
// EVALUE for p outside [0, 1); ESHAPE if x does not divide into samples.
Status ops_dropout(Ctx *ctx, Tensor *x, double p, Tensor **out);

#ifdef __cplusplus
}
#endif
#endif
