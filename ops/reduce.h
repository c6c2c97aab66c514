// reduce - what the shape rules of reductions ask of their kernels.
#ifndef RILLE_OPS_REDUCE_H
#define RILLE_OPS_REDUCE_H

#include "core/op.h"

// Bytes of scratch that a reduction's CPU kernel needs. The list argument is normalised.
int64_t reduce_workspace(const OpCall *call);
int64_t cumsum_workspace(const OpCall *call);

#endif
