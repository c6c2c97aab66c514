// gemm_rille - BLAS=rille: products by the kernels of gemm.isa.c, chosen by CPUID.
#include "ops/kernels/kernels.h"

const char *gemm_library(void) { return "rille"; }
void gemm_f32(const Gemm *gemm) { cpu_kernels()->gemm_f32(gemm); }
void gemm_f64(const Gemm *gemm) { cpu_kernels()->gemm_f64(gemm); }
