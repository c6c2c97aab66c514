// rows - kernels that work on whole rows: softmax, norms, cross entropy.
#include "ops/kernels/kernels_isa.h"
#include "ops/kernels/threads.h"
#include "ops/kernels/vmath.h"

enum { ROW_WORK = 32768, NORM_PARTS = 64 };

// Rows a block, so that a block is worth handing to a thread.
static int64_t rows_a_block(int64_t columns) { return ROW_WORK / (columns + 1) + 1; }

// Rows whose share of dgamma, dbeta is summed into one partial: at most NORM_PARTS parts.
static int64_t rows_a_part(int64_t rows) {
  int64_t part = (rows + NORM_PARTS - 1) / NORM_PARTS;
  return part < 16 ? 16 : part;
}

#define BODY "ops/kernels/rows.inc"
#include "ops/kernels/each_real.inc"
