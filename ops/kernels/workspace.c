// workspace - sizes of the workspace that kernels ask of their callers.
#include "ops/kernels/kernels.h"

// Two rows of columns for each part; rows.isa.c makes at most 64 parts of at least 16 rows.
size_t norm_workspace(int64_t rows, int64_t columns, size_t element) {
  int64_t parts = rows < 64 * 16 ? (rows + 15) / 16 : 64;
  return (size_t)parts * 2 * (size_t)columns * element;
}

// One value for each query row: sum over D of out * dout.
size_t attention_workspace(const Attention *a, size_t element) {
  return (size_t)a->B * (size_t)a->H * (size_t)a->T * element;
}
