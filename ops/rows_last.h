// rows_last - what the shape rules of norms ask of their kernels.
#ifndef RILLE_OPS_ROWS_LAST_H
#define RILLE_OPS_ROWS_LAST_H

#include "core/op.h"

// Bytes of scratch of a norm_bwd call on the CPU.
int64_t norm_bwd_workspace(const OpCall *call);

#endif
