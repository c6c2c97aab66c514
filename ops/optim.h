// optim - optimizers and norms over WeightSets, fused: one pass over the flat arrays.
#ifndef RILLE_OPS_OPTIM_H
#define RILLE_OPS_OPTIM_H

#include "core/weights.h"

#ifdef __cplusplus
extern "C" {
#endif

// AdamW, decoupled decay (arXiv:1711.05101). step counts from 1. grad_scale multiplies the gradient
// first (clipping, C/N of the loss contract).
typedef struct AdamwOptions {
  double lr, beta1, beta2, eps, decay, grad_scale;
  int64_t step;
} AdamwOptions;

// SGD as PyTorch defines it: m = momentum m + (1 - dampening) g, m = g at the first step.
typedef struct SgdOptions {
  double lr, momentum, dampening, decay, grad_scale;
  bool nesterov, is_first;
} SgdOptions;

// STEP on a whole set: finishes its gradients, updates, makes a new version. A bf16 set keeps an
// f32 copy of its weights as state (index 2), so that small updates are not lost. Frozen parameters
// keep their values.
Status optim_adamw(Ctx *ctx, WeightSet *set, const AdamwOptions *options);
Status optim_sgd(Ctx *ctx, WeightSet *set, const SgdOptions *options);

// Makes the arrays that STEP needs, if they are not there yet: state[0 .. n_state), and the copy of
// a bf16 set. With several sets all of them come before the first STEP: memory that one of them
// lacks is missed before any weight has changed.
Status optim_prepare(Ctx *ctx, WeightSet *set, int n_state);

// The sum of squares (or, for `infinity`, the largest magnitude) of each parameter's finished
// gradient, in f64: out[set->n_params]; 0 for collected parameters. NaN and infinity show in it. Of
// a part of a parameter only the runs that are counted are in it, so that the sum over the parts is
// the norm of the whole.
Status optim_grad_norms(Ctx *ctx, WeightSet *set, bool infinity, double *out);

// The order-free fingerprint of a parameter's values: the sum, modulo 2^64, over its elements of a
// mix of its name, the element's global index and its bits. Equal for every layout: of a part it is
// the sum over the runs that are counted. `values`: those of another tensor, contiguous, of the
// parameter's dtype and shape (of its part); NULL: its own.
Status optim_fingerprint(Ctx *ctx, const Param *param, const Tensor *values, uint64_t *out);

#ifdef __cplusplus
}
#endif
#endif
