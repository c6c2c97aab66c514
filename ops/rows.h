// rows - declares the functions that the rows of ops.def bind: each family's files include it.
#ifndef RILLE_OPS_ROWS_H
#define RILLE_OPS_ROWS_H

#include "core/op.h"

#define OP(name, flags, n_out, n_saved, inputs, args, needs, defer, help) \
  Status shape_##name(OpCall *call);                                      \
  Status grad_##name(GradCall *call);                                     \
  void cpu_##name(const KernelCall *call);
#define OP_V(name, flags, inputs, args, help) \
  Status shape_##name(OpCall *call);          \
  Status grad_##name(GradCall *call);
#define OP_NG(name, flags, n_out, n_saved, inputs, args, help) \
  Status shape_##name(OpCall *call);                           \
  void cpu_##name(const KernelCall *call);
#include "ops/ops.def"
#undef OP
#undef OP_V
#undef OP_NG

#endif
