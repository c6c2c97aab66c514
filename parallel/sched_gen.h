// sched_gen - what the families of generators share: rows to fill, and the rows' own functions.
//
// A generator gets an empty schedule of the right placement whose rows have room for all actions,
// so putting one cannot fail. Microbatches at or above m are dropped: some patterns are defined for
// more microbatches than there are.
#ifndef RILLE_PARALLEL_SCHED_GEN_H
#define RILLE_PARALLEL_SCHED_GEN_H

#include "parallel/sched_inner.h"

static inline void sched_put(Sched *sched, int rank, ActionKind kind, int stage, int mb) {
  SchedRow *row = &sched->row[rank];
  Action action = {kind, stage, mb, -1};
  if (mb < sched->mbs && row->count < row->room) row->action[row->count++] = action;
}

Status sched_gen_gpipe(Sched *sched);
Status sched_gen_1f1b(Sched *sched);
Status sched_gen_eager(Sched *sched);
Status sched_gen_interleaved(Sched *sched);
Status sched_gen_bfs(Sched *sched);
Status sched_gen_zb_h1(Sched *sched);
Status sched_gen_zb_h2(Sched *sched);
Status sched_gen_zbv(Sched *sched);
Status sched_gen_v_half(Sched *sched);
Status sched_gen_v_min(Sched *sched);
Status sched_gen_1f1b_v(Sched *sched);
Status sched_gen_dualpipev(Sched *sched);
Status sched_gen_hanayo(Sched *sched);

// The group size N that interleaved uses for its warm-up: what was asked for, or the largest of
// balanced groups.
int sched_group_size(int ranks, int mbs, int group);

#endif
