// gemm - the blocked product: packed panels, one register tile.
//
//     for a strip of n (NC)            B strip packed [n/NR][kc][NR]     per thread, in scratch
//       for a block of k (kc)
//         for a block of m (MC)        A block packed [m/MR][kc][MR]
//           for each NR columns, for each MR rows: tile MR x NR in registers over kc
//
// A tile at an edge runs the same instructions: missing columns are packed as zero, missing rows
// take the tile function for that many rows.
#include "ops/kernels/gemm.h"
#include "ops/kernels/isa.h"
#include "ops/kernels/kernels_isa.h"
#include "ops/kernels/threads.h"
#include "ops/kernels/tile.h"
#include "ops/kernels/vmath.h"

enum { KC = 384, MC = MR * 12, SCRATCH_A = 1 << 20 };

// The size of k's blocks: equal parts of at most KC, in multiples of 8; a function of k alone.
static int64_t k_block(int64_t k) {
  int64_t parts = (k + KC - 1) / KC;
  return parts <= 1 ? k : ((k + parts - 1) / parts + 7) / 8 * 8;
}

#define BODY "ops/kernels/gemm.inc"
#include "ops/kernels/each_real.inc"
