// table - the kernels of one level.
#include "ops/kernels/kernels_isa.h"

#define NAME_OF_(isa) #isa
#define NAME_OF(isa) NAME_OF_(isa)

const CpuKernels KERNEL(cpu_kernels) = {.level = NAME_OF(ISA),
#define X(type, name, parameters) .name = KERNEL(name),
                                        CPU_KERNEL_LIST(X, f32, float)
                                            CPU_KERNEL_LIST(X, f64, double) CPU_OTHER_LIST(X)
#undef X
};
