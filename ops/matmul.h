// matmul - what the shape rules of matrix products ask of their kernels.
#ifndef RILLE_OPS_MATMUL_H
#define RILLE_OPS_MATMUL_H

#include "core/op.h"
#include "ops/kernels/gemm.h"

// Bytes of scratch that a call's CPU kernel needs: bf16 results are computed in f32.
int64_t matmul_workspace(const OpCall *call);
int64_t linear_workspace(const OpCall *call);

#endif
