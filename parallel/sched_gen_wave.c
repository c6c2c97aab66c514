// sched_gen_wave - generators over wave placement: hanayo (arXiv:2308.15762).
//
//     chunk 0   0 -> 1 -> 2 -> 3      a microbatch runs down and up the ranks w times; at a turn
//     chunk 1   7 <- 6 <- 5 <- 4      two neighbouring stages are on one rank: no message
//     chunk 2   8 -> 9 -> ...
#include "parallel/sched_gen.h"

// How far each stage got: the next microbatch of F and of B.
typedef struct Waves {
  Sched *sched;
  int *f, *b;  // [stages]
  int *live;   // [ranks] chunks
  int *chosen; // [ranks] of this tick: 2 * stage + (1: B, 0: F), or -1
} Waves;

static int stage_of(int ranks, int rank, int chunk) {
  return chunk * ranks + (chunk % 2 == 0 ? rank : ranks - 1 - rank);
}

static bool b_is_ready(const Waves *waves, int stage) {
  bool is_last = stage == waves->sched->stages - 1;
  int mb = waves->b[stage];
  return mb < waves->f[stage] && (is_last || mb < waves->b[stage + 1]);
}

static bool f_is_ready(const Waves *waves, int stage) {
  int mb = waves->f[stage];
  return mb < waves->sched->mbs && (stage == 0 || mb < waves->f[stage - 1]);
}

// The ready B of the highest stage; else the ready F of the highest stage that leaves a place for
// every deeper chunk, which excludes deadlock.
static int choose(const Waves *waves, int rank) {
  int p = waves->sched->ranks, v = waves->sched->chunks;
  for (int chunk = v - 1; chunk >= 0; chunk--) {
    int stage = stage_of(p, rank, chunk);
    if (b_is_ready(waves, stage)) return 2 * stage + 1;
  }
  for (int chunk = v - 1; chunk >= 0; chunk--) {
    int stage = stage_of(p, rank, chunk);
    if (f_is_ready(waves, stage) && waves->live[rank] < v * p - (v - 1 - chunk)) return 2 * stage;
  }
  return -1;
}

// Slots in which F and B take one tick each; a rank decides from the state at the tick's start.
Status sched_gen_hanayo(Sched *sched) {
  int p = sched->ranks;
  int64_t left = 2 * (int64_t)sched->stages * sched->mbs;
  Waves waves = {sched, sched_alloc(sched->arena, (size_t)sched->stages, sizeof(int)),
                 sched_alloc(sched->arena, (size_t)sched->stages, sizeof(int)),
                 sched_alloc(sched->arena, (size_t)p, sizeof(int)),
                 sched_alloc(sched->arena, (size_t)p, sizeof(int))};
  if (!waves.f || !waves.b || !waves.live || !waves.chosen) return ST_ENOMEM;
  while (left > 0) {
    for (int rank = 0; rank < p; rank++) waves.chosen[rank] = choose(&waves, rank);
    for (int rank = 0; rank < p; rank++) {
      if (waves.chosen[rank] < 0) continue;
      int stage = waves.chosen[rank] / 2, is_b = waves.chosen[rank] % 2;
      int mb = is_b ? waves.b[stage]++ : waves.f[stage]++;
      waves.live[rank] += is_b ? -1 : 1;
      sched_put(sched, rank, is_b ? ACTION_B : ACTION_F, stage, mb);
      left--;
    }
  }
  return ST_OK;
}
