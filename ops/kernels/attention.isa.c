// attention - softmax(scale q k' + mask) v, tile by tile, forward and backward.
//
// Forward, a task is (sample, head, SUPER queries): for each block of BK keys, the rows of K are
// copied once, ROW apart, then for each NR queries (lanes of vectors)
//
//     s[key][query] = k q'      softmax runs down the keys: no sums across lanes
//     o[query][D]  += p v
//
// Backward, a task is (sample, key head): for each block of BK keys, for each query head of the
// group, for each BQ queries: s and dp, dv += p' do, dk += ds' q, dq += ds k. Left operands of the
// tiles are rows where they are, ROW apart. With few tasks for the threads, dq and (dk, dv) are
// made in two passes whose sums run in the same order, with the same bits.
//
// Blocks start at multiples of BK keys, so the order of a sum is a function of the key's index.
// What is skipped (tiles and ends of sums that are masked out) would have added exact zeros.
#include "ops/kernels/kernels_isa.h"
#include "ops/kernels/threads.h"
#include "ops/kernels/tile.h"
#include "ops/kernels/vmath.h"

// ROW: from one row in scratch to the next, of D elements or of BK scores; not a power of 2, so
// that the rows of a tile do not fall on the same lines of the cache.
enum { SUPER = 256, BK = 128, BQ = 64, MAX_D = 256, ROW = MAX_D + 16 };

// The keys [begin, end) that queries [q0, q1) may see.
typedef struct Keys {
  int64_t begin, end;
} Keys;

static Keys keys_of(const Attention *a, int64_t q0, int64_t q1) {
  int64_t shift = a->S - a->T;
  Keys keys = {0, a->S};
  if (a->causal && q1 + shift < keys.end) keys.end = q1 + shift;
  if (a->window > 0) {
    if (q0 + shift - a->window + 1 > 0) keys.begin = q0 + shift - a->window + 1;
    if (!a->causal && q1 - 1 + shift + a->window < keys.end) keys.end = q1 - 1 + shift + a->window;
  }
  if (keys.end < 0) keys.end = 0;
  if (keys.begin > keys.end) keys.begin = keys.end;
  return keys;
}

// True if every query of [q0, q1) sees every key of [k0, k1).
static bool sees_all(const Attention *a, int64_t q0, int64_t q1, int64_t k0, int64_t k1) {
  int64_t shift = a->S - a->T;
  if (a->causal && k1 - 1 > q0 + shift) return false;
  if (a->window > 0 && k0 <= q1 - 1 + shift - a->window) return false;
  return !(a->window > 0 && !a->causal && k1 - 1 >= q0 + shift + a->window);
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t more_than_0(int64_t a) { return a < 0 ? 0 : a; }

// The context of a task. After this one, a thread probably takes the task n_threads further on.
typedef struct Job {
  Attention attention;
  int64_t n_threads;
} Job;

// What will be read or written later: rows that lie far apart, which the processor does not
// foresee. Their lines are asked for a few at a time, while tiles are computed.
typedef struct Ahead {
  struct {
    const char *at;
    int64_t rows, step; // bytes from row to row
  } part[7];
  int n, next;     // parts; the one that is asked for now
  int64_t n_lines; // of a row, at most D
} Ahead;

static void ahead_add(Ahead *ahead, const void *at, int64_t rows, int64_t step) {
  ahead->part[ahead->n].at = at;
  ahead->part[ahead->n].rows = rows;
  ahead->part[ahead->n++].step = step;
}

// The lines of the next rows, at most `most` lines, to the list; returns their number.
static int64_t ahead_take(Ahead *ahead, const char **list, int64_t most) {
  int64_t n = 0;
  while (ahead->next < ahead->n && n + ahead->n_lines <= most) {
    if (ahead->part[ahead->next].rows-- <= 0) {
      ahead->next++;
      continue;
    }
    const char *at = ahead->part[ahead->next].at;
    ahead->part[ahead->next].at += ahead->part[ahead->next].step;
    for (int64_t line = 0; line < ahead->n_lines; line++) list[n++] = at + line * 64;
  }
  return n;
}

#define BODY "ops/kernels/attention.inc"
#include "ops/kernels/each_real.inc"
