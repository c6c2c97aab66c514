// dense_cpu - kernels' way between tensors of any layout and row-major scratch.
#ifndef RILLE_OPS_DENSE_CPU_H
#define RILLE_OPS_DENSE_CPU_H

#include "core/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

// The elements of t as `dtype`, row-major over its dimensions in the order given (NULL: its own).
void dense_read(const Tensor *t, const int *order, DType dtype, void *to);

// Row-major elements of `dtype` into t, of any layout and dtype; adds to it if asked to.
void dense_write(Tensor *t, DType dtype, const void *from, bool accumulate);

// The elements of `from` into `to`, of the same shape, any layouts and dtypes; adds if asked to.
void dense_copy(const Tensor *from, Tensor *to, bool accumulate);

// Bytes of n elements in scratch, so that what follows is aligned.
static inline int64_t dense_bytes(int64_t n, DType dtype) {
  return (n * (int64_t)dtype_size(dtype) + 63) / 64 * 64;
}

#ifdef __cplusplus
}
#endif
#endif
