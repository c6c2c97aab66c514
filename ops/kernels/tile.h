// tile - rows of the register tile: as many as leave registers for a row of b and one of a.
#ifndef RILLE_OPS_KERNELS_TILE_H
#define RILLE_OPS_KERNELS_TILE_H

#include "core/bf16.h"
#include "ops/kernels/isa.h"

#if VECTOR_BYTES == 64
#define MR 14
#define ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13)
#define HEIGHTS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14)
#elif VECTOR_BYTES == 32
#define MR 6
#define ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5)
#define HEIGHTS(X) X(1) X(2) X(3) X(4) X(5) X(6)
#else
#define MR 4
#define ROWS(X) X(0) X(1) X(2) X(3)
#define HEIGHTS(X) X(1) X(2) X(3) X(4)
#endif

// The height of panels that cut n >= 1 rows evenly: as few as with MR rows, of about one height.
INLINE int64_t even_height(int64_t n) {
  int64_t parts = (n + MR - 1) / MR;
  return (n + parts - 1) / parts;
}

#endif
