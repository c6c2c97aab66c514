// gemm - the blocked product: copied panels, one register tile.
//
//     for a strip of columns, for a block of k (kc)     B's strip copied to [n/NR][kc][NR]: level 2
//       for a panel of up to MR rows                    A's panel copied: level 1
//         for each NR columns                           tile MR x NR in registers over kc
//
// Each thread does so with cells of C of its own, in its scratch. While tiles are computed, the
// lines of A and B that will be copied next are asked for, a few in each tile: memory is read at
// the pace of the multiply-adds, and pages are looked up ahead of their use.
//
// A tile at an edge runs the same instructions: missing columns are copied as zero, missing rows
// take the tile function for that many rows.
//
// At the level amx f32 products of more than a few k are summed otherwise: gemm_amx.inc.
#include "ops/kernels/gemm.h"
#include "ops/kernels/isa.h"
#include "ops/kernels/kernels_isa.h"
#include "ops/kernels/threads.h"
#include "ops/kernels/tile.h"
#include "ops/kernels/vmath.h"

// A panel of A (8 KiB of f32 at 16 lanes) stays in the first level of cache, beside the panel of B
// (16 KiB) that streams through it: with 512 k instead of 128 they drove each other out, and
// products were 2% slower. PACKED_B bytes of B stay in the second level, beside as much that is
// fetched ahead.
enum {
  KC = 128,
  PACKED_B = 900 << 10,
  SCRATCH_A = 1 << 20,
  FETCHES = KC, // a tile asks for a line at each k
  A_ROW = KC + 16,
  GROUP = 8
};

static int64_t at_most(int64_t limit, int64_t n) { return n < limit ? n : limit; }

static int64_t ceil_to(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// The size of parts that cut n about evenly: multiples of step, at most `limit` (but one step).
static int64_t even_part(int64_t n, int64_t limit, int64_t step) {
  limit = limit / step * step < step ? step : limit / step * step;
  int64_t parts = (n + limit - 1) / limit;
  return ceil_to((n + parts - 1) / parts, step);
}

// Lines of memory to be fetched ahead: `rows` rows of `lines` lines, `jump` bytes from row to row,
// `pace` lines at a time.
typedef struct Fetch {
  const char *at;
  int64_t rows, lines, jump, line, pace;
} Fetch;

static Fetch fetch_rows(const char *at, int64_t rows, int64_t bytes, int64_t jump) {
  const int64_t before = jump % 64 == 0 ? (intptr_t)at % 64 : 63; // in its line, at most
  return (Fetch){at, rows, (before + bytes + 63) / 64, jump, 0, 0};
}

// Spreads what is to be fetched over n takes.
static void fetch_over(Fetch *f, int64_t n) { f->pace = (f->rows * f->lines + n - 1) / n; }

// Adds the next lines to the list, which holds n; returns how many it holds then.
static int64_t fetch_take(Fetch *f, const char **list, int64_t n) {
  for (int64_t left = at_most(f->pace, FETCHES - n); left > 0 && f->rows > 0;) {
    int64_t run = at_most(left, f->lines - f->line);
    const char *at = f->at + f->line * 64;
    for (int64_t i = 0; i < run; i++) list[n + i] = at + i * 64;
    n += run, left -= run, f->line += run;
    if (f->line == f->lines) f->line = 0, f->rows--, f->at += f->jump;
  }
  return n;
}

// The size of k's blocks: equal parts of at most KC, in multiples of 8; a function of k alone.
static int64_t k_block(int64_t k) {
  int64_t parts = (k + KC - 1) / KC;
  return parts <= 1 ? k : ((k + parts - 1) / parts + 7) / 8 * 8;
}

#if defined __AMX_TILE__ && defined __AMX_BF16__
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif
// k from which on f32 products go to AMX; below, most of a step would be zeros. The small ones that
// are not packed have less, and no more than a block.
enum { AMX_LEAST = 32, SMALL_F32 = HAS_AMX ? AMX_LEAST : KC + 1 };

#define BODY "ops/kernels/gemm.inc"
#include "ops/kernels/each_real.inc"
