// kernels_isa - declares the kernels of the level that is being compiled, with their suffixed
// names.
#ifndef RILLE_OPS_KERNELS_KERNELS_ISA_H
#define RILLE_OPS_KERNELS_KERNELS_ISA_H

#include "ops/kernels/isa.h"
#include "ops/kernels/kernels.h"

#define X(type, name, parameters) type KERNEL(name) parameters;
CPU_KERNEL_LIST(X, f32, float)
CPU_KERNEL_LIST(X, f64, double)
CPU_OTHER_LIST(X)
#undef X
extern const CpuKernels KERNEL(cpu_kernels);

#endif
