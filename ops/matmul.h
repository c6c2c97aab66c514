// matmul - what the shape rules of matrix products ask of their kernels.
#ifndef RILLE_OPS_MATMUL_H
#define RILLE_OPS_MATMUL_H

#include "ops/kernels/gemm.h"
#include "ops/ops.h"

// Bytes of scratch that a call's CPU kernel needs: bf16 results are computed in f32.
int64_t matmul_workspace(const OpCall *call);
int64_t linear_workspace(const OpCall *call);

// The row whose result on (dy, z) is dz, for y = act(z); not for act 0.
OpId linear_act_backward(int64_t act);

#endif
