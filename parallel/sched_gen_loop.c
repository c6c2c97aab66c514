// sched_gen_loop - generators over loop placement: stage s on rank s mod p.
//
// All but interleaved and bfs have one stage a rank. With p = 4, m = 5, time to the right:
//
//     1f1b     F0 F1 F2 F3 -- -- B0 F4 B1 B2 ...     zb-h1    the same with I for B, and each W
//        F0 F1 F2 .. .. B0 F3 ..                              where the bubble would be
#include "parallel/sched_gen.h"

static int least(int a, int b) { return a < b ? a : b; }

// All forwards, then all backwards (GPipe, arXiv:1811.06965).
Status sched_gen_gpipe(Sched *sched) {
  for (int rank = 0; rank < sched->ranks; rank++) {
    for (int mb = 0; mb < sched->mbs; mb++) sched_put(sched, rank, ACTION_F, rank, mb);
    for (int mb = 0; mb < sched->mbs; mb++) sched_put(sched, rank, ACTION_B, rank, mb);
  }
  return ST_OK;
}

// `warmup` forwards, then one forward, one backward by turns, then the backwards left.
static void one_f_one_b(Sched *sched, int rank, int warmup) {
  int m = sched->mbs, w = least(m, warmup);
  for (int mb = 0; mb < w; mb++) sched_put(sched, rank, ACTION_F, rank, mb);
  for (int k = 0; k < m; k++) {
    if (k < m - w) sched_put(sched, rank, ACTION_F, rank, w + k);
    sched_put(sched, rank, ACTION_B, rank, k);
  }
}

// PipeDream-Flush (arXiv:2006.09503), Megatron's 1F1B (arXiv:2104.04473 2.2).
Status sched_gen_1f1b(Sched *sched) {
  for (int rank = 0; rank < sched->ranks; rank++) one_f_one_b(sched, rank, sched->ranks - 1 - rank);
  return ST_OK;
}

// 1F1B with twice the warm-up: a message may be under way while the rank computes.
Status sched_gen_eager(Sched *sched) {
  for (int rank = 0; rank < sched->ranks; rank++)
    one_f_one_b(sched, rank, 2 * (sched->ranks - 1 - rank));
  return ST_OK;
}

// ---- interleaved -----------------------------------------------------------------------------

int sched_group_size(int ranks, int mbs, int group) {
  if (group > 0) return group;
  int groups = mbs / ranks > 1 ? mbs / ranks : 1;
  return (mbs + groups - 1) / groups;
}

// A (microbatch, chunk) as interleaved visits them: groups of microbatches, in each group chunk
// after chunk. Balanced groups (group 0) differ by at most one in size, larger first.
typedef struct Visit {
  int mb, chunk;
} Visit;

static void visit_groups(const Sched *sched, Visit *table) {
  int m = sched->mbs, n = 0, group = sched->group;
  int groups = m / sched->ranks > 1 ? m / sched->ranks : 1;
  int base = m / groups, larger = m % groups;
  for (int begin = 0, g = 0, size; begin < m; begin += size, g++) {
    size = group > 0 ? least(group, m - begin) : base + (g < larger);
    for (int chunk = 0; chunk < sched->chunks; chunk++)
      for (int mb = begin; mb < begin + size; mb++) table[n++] = (Visit){mb, chunk};
  }
}

// Megatron's interleaved 1F1B (arXiv:2104.04473 2.2), with a free group size.
Status sched_gen_interleaved(Sched *sched) {
  int p = sched->ranks, v = sched->chunks, total = sched->mbs * v;
  int N = sched_group_size(p, sched->mbs, sched->group);
  Visit *table = sched_alloc(sched->arena, (size_t)total, sizeof *table);
  if (!table) return ST_ENOMEM;
  visit_groups(sched, table);
  bool is_good = sched->mbs % N == 0 || sched->mbs % N >= p;
  if (sched->group > 0 && v >= 2 && !(is_good && N >= least(p, sched->mbs)))
    sched->warning = "this group size costs more than the default: good ones are at least the "
                     "number of ranks, and divide the microbatches or leave a rest of at least "
                     "the number of ranks";
  for (int rank = 0; rank < p; rank++) {
    int64_t warmup = 2 * (int64_t)(p - 1 - rank) + (int64_t)(v - 1) * N;
    int w = warmup < total ? (int)warmup : total;
    for (int k = 0; k < w; k++)
      sched_put(sched, rank, ACTION_F, table[k].chunk * p + rank, table[k].mb);
    for (int k = 0; k < total; k++) {
      if (k < total - w)
        sched_put(sched, rank, ACTION_F, table[w + k].chunk * p + rank, table[w + k].mb);
      sched_put(sched, rank, ACTION_B, (v - 1 - table[k].chunk) * p + rank, table[k].mb);
    }
  }
  return ST_OK;
}

// Looped breadth first (arXiv:2211.05953): chunk after chunk, all microbatches of each.
Status sched_gen_bfs(Sched *sched) {
  int p = sched->ranks;
  for (int rank = 0; rank < p; rank++) {
    for (int chunk = 0; chunk < sched->chunks; chunk++)
      for (int mb = 0; mb < sched->mbs; mb++)
        sched_put(sched, rank, ACTION_F, chunk * p + rank, mb);
    for (int chunk = sched->chunks - 1; chunk >= 0; chunk--)
      for (int mb = 0; mb < sched->mbs; mb++)
        sched_put(sched, rank, ACTION_B, chunk * p + rank, mb);
  }
  return ST_OK;
}

// ---- zero bubble -----------------------------------------------------------------------------

// Zero bubble (arXiv:2401.10241): backward is split, and W follows `lag` microbatches behind I.
static void split_one_f_one_b(Sched *sched, int rank, int warmup, int lag) {
  int m = sched->mbs, w = least(m, warmup), next = 0;
  for (int mb = 0; mb < w; mb++) sched_put(sched, rank, ACTION_F, rank, mb);
  for (int k = 0; k < m; k++) {
    if (k < m - w) sched_put(sched, rank, ACTION_F, rank, w + k);
    sched_put(sched, rank, ACTION_I, rank, k);
    if (k >= lag) sched_put(sched, rank, ACTION_W, rank, next++);
  }
  while (next < m) sched_put(sched, rank, ACTION_W, rank, next++);
}

// The memory of 1F1B's first rank, on every rank.
Status sched_gen_zb_h1(Sched *sched) {
  for (int rank = 0; rank < sched->ranks; rank++)
    split_one_f_one_b(sched, rank, sched->ranks - 1 - rank, rank);
  return ST_OK;
}

// Twice that memory, and no bubble between steps where F = I = W.
Status sched_gen_zb_h2(Sched *sched) {
  for (int rank = 0; rank < sched->ranks; rank++)
    split_one_f_one_b(sched, rank, 2 * (sched->ranks - 1 - rank), 2 * rank);
  return ST_OK;
}
