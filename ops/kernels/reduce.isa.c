// reduce - sums, extrema and their kin over the middle of [outer, red, inner].
//
// inner = 1: a row is reduced in blocks of ROW_BLOCK elements, each in four vectors of lanes and a
// fixed tree; block sums are added in order in f64. inner > 1: lanes run along inner; red is summed
// in blocks of COLUMN_BLOCK rows, in a fixed order. Both orders are functions of red alone.
#include "ops/kernels/kernels_isa.h"
#include "ops/kernels/threads.h"
#include "ops/kernels/vmath.h"

enum { ROW_BLOCK = 4096, COLUMN_BLOCK = 64, ROWS_AT_ONCE = 8, STRIP = 1024, REDUCE_WORK = 32768 };

#define BODY "ops/kernels/reduce.inc"
#include "ops/kernels/each_real.inc"
