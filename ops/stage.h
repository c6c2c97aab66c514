// stage - bf16 operands for CPU kernels that compute in f32: widened into the call's workspace
// before, narrowed from it after. Other dtypes are used where they lie.
#ifndef RILLE_OPS_STAGE_H
#define RILLE_OPS_STAGE_H

#include "core/op.h"

enum { STAGE_MAX_OUT = 4 };

typedef struct Stage {
  char *at; // free part of the workspace
  int n;
  struct {
    Tensor *tensor;
    float *wide;
  } out[STAGE_MAX_OUT];
} Stage;

// Bytes of workspace that staging all inputs and outputs of a call needs; 0 unless bf16 occurs.
int64_t stage_bytes(const OpCall *call);

Stage stage_begin(const KernelCall *call);
// The values of a contiguous tensor, as f32 for bf16. NULL gives NULL.
const void *stage_in(Stage *stage, const Tensor *t);
// Where to write a contiguous result; accumulate: what lies there is read as well. NULL gives NULL.
void *stage_out(Stage *stage, Tensor *t, bool accumulate);
void stage_end(Stage *stage);

// Is this computed in f64 (the alternative is f32)?
static inline bool is_f64(const Tensor *t) { return t->dtype == DT_F64; }

// bf16 computes, and keeps its statistics, in f32.
static inline DType wide_dtype(DType dtype) { return dtype == DT_BF16 ? DT_F32 : dtype; }

#endif
