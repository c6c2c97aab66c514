// sched_common - what the tests of pipeline schedules share.
#ifndef RILLE_TESTS_SCHED_COMMON_H
#define RILLE_TESTS_SCHED_COMMON_H

#include "parallel/sched.h"
#include "tests/tests.h"

// Makes a known schedule; chunks 0: the default.
static inline Sched *make(SchedArena *arena, const char *name, int ranks, int chunks, int mbs,
                          int group) {
  Sched *sched = NULL;
  SchedCase sizes = {.ranks = ranks, .chunks = chunks, .mbs = mbs, .group = group};
  const SchedType *type = sched_find(name);
  ck_assert_msg(type != NULL, "%s", name);
  Status status = sched_generate(arena, &sched, type, &sizes);
  ck_assert_msg(status == ST_OK, "%s p=%d v=%d m=%d: %s", name, ranks, chunks, mbs, arena->message);
  return sched;
}

static inline SchedSim *simulate(SchedArena *arena, const Sched *sched, const SchedCosts *costs) {
  SchedSim *sim = NULL;
  Status status = sched_simulate(arena, &sim, sched, costs);
  ck_assert_msg(status == ST_OK, "%s: %s", sched->name, arena->message);
  return sim;
}

static inline SchedReport *check(SchedArena *arena, const Sched *sched) {
  SchedReport *report = NULL;
  ck_assert_int_eq(sched_check(arena, &report, sched), ST_OK);
  return report;
}

static inline Sched *lower(SchedArena *arena, const Sched *sched, const SchedCosts *costs) {
  Sched *lowered = NULL;
  Status status = sched_lower(arena, &lowered, sched, costs);
  ck_assert_msg(status == ST_OK, "%s: %s", sched->name, arena->message);
  return lowered;
}

// Calls visit for every type, at each number of chunks it allows up to `chunks_max`, for all p up
// to ranks_max and m up to 2p+3, each with an arena of its own.
typedef void (*SchedVisit)(SchedArena *arena, const SchedType *type, int ranks, int chunks,
                           int mbs);
static inline void each_case(SchedVisit visit, int ranks_max, int chunks_max) {
  int count;
  const SchedType *type = sched_types(&count);
  for (int i = 0; i < count; i++, type++) {
    int most = type->chunks_max ? type->chunks_max : chunks_max;
    for (int chunks = type->chunks_min; chunks <= most; chunks += type->chunks_step) {
      for (int ranks = 1; ranks <= ranks_max; ranks++) {
        for (int mbs = 1; mbs <= 2 * ranks + 3; mbs++) {
          SchedArena arena;
          sched_heap_open(&arena);
          visit(&arena, type, ranks, chunks, mbs);
          sched_heap_close(&arena);
        }
      }
    }
  }
}

#endif
