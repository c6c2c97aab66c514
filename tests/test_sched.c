// test_sched - generators, simulator and formulas of pipeline schedules.
//
// Every row of the schedules' summary and of the latency table is reproduced over a grid of p, m
// and costs. The second simulator below shares nothing with the first but the list: it recomputes
// all start times until nothing changes.
#include "parallel/sched.h"
#include "tests/tests.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS_MAX = 8 };

static SchedArena arena;
static void open_arena(void) { sched_heap_open(&arena); }
static void close_arena(void) { sched_heap_close(&arena); }

static Sched *make(const char *name, int ranks, int chunks, int mbs, int group) {
  Sched *sched = NULL;
  SchedCase sizes = {.ranks = ranks, .chunks = chunks, .mbs = mbs, .group = group};
  const SchedType *type = sched_find(name);
  ck_assert_msg(type != NULL, "%s", name);
  Status status = sched_generate(&arena, &sched, type, &sizes);
  ck_assert_msg(status == ST_OK, "%s p=%d v=%d m=%d: %s", name, ranks, chunks, mbs, arena.message);
  return sched;
}

static SchedSim *simulate(const Sched *sched, const SchedCosts *costs) {
  SchedSim *sim = NULL;
  Status status = sched_simulate(&arena, &sim, sched, costs);
  ck_assert_msg(status == ST_OK, "%s: %s", sched->name, arena.message);
  return sim;
}

static SchedReport *check(const Sched *sched) {
  SchedReport *report = NULL;
  ck_assert_int_eq(sched_check(&arena, &report, sched), ST_OK);
  return report;
}

static Sched *lower(const Sched *sched, const SchedCosts *costs) {
  Sched *lowered = NULL;
  Status status = sched_lower(&arena, &lowered, sched, costs);
  ck_assert_msg(status == ST_OK, "%s: %s", sched->name, arena.message);
  return lowered;
}

static const double cost_sets[][3] = {{1, 1, 1},     {1, 1.5, 0.5}, {1, 2, 1},   {2, 2, 1},
                                      {1, 0.7, 0.9}, {3, 1, 2},     {1, 1, 1.5}, {0.25, 1, 0}};
enum { COST_SETS = sizeof cost_sets / sizeof *cost_sets };

// ---- every schedule: valid, and its formulas -------------------------------------------------

// Calls visit for every type, at each number of chunks it allows up to 6, over p and m.
typedef void (*Visit)(const SchedType *type, int ranks, int chunks, int mbs);
static void each_case(Visit visit, int ranks_max) {
  int count;
  const SchedType *type = sched_types(&count);
  for (int i = 0; i < count; i++, type++) {
    for (int chunks = type->chunks_min;
         chunks <= (type->chunks_max ? type->chunks_max : 4 * type->chunks_step);
         chunks += type->chunks_step) {
      for (int ranks = 1; ranks <= ranks_max; ranks++) {
        for (int mbs = 1; mbs <= 2 * ranks + 3; mbs++) {
          open_arena();
          visit(type, ranks, chunks, mbs);
          close_arena();
        }
      }
    }
  }
}

static void is_valid(const SchedType *type, int ranks, int chunks, int mbs) {
  Sched *sched = make(type->name, ranks, chunks, mbs, 0);
  SchedReport *report = check(sched);
  ck_assert_msg(report->broken == 0 && !report->is_to_rounding, "%s p=%d v=%d m=%d: %s", type->name,
                ranks, chunks, mbs, report->message);
  Sched *lowered = lower(sched, NULL);
  report = check(lowered);
  ck_assert_msg(report->broken == 0 && !report->is_to_rounding, "%s p=%d v=%d m=%d lowered: %s",
                type->name, ranks, chunks, mbs, report->message);
}

START_TEST(every_schedule_is_valid_before_and_after_lowering) { each_case(is_valid, 6); }
END_TEST

static void peaks_hold(const SchedType *type, int ranks, int chunks, int mbs) {
  Sched *sched = make(type->name, ranks, chunks, mbs, 0);
  SchedCosts costs = sched_costs(1, 1, 1);
  SchedSim *sim = simulate(sched, &costs);
  SchedCase c = {.ranks = ranks, .chunks = chunks, .mbs = mbs};
  for (int rank = 0; rank < ranks; rank++) {
    int64_t peak = type->peak(&c, rank);
    ck_assert_int_eq(sched->bound[rank], peak);
    ck_assert_int_le(peak, (int64_t)mbs * chunks);
    ck_assert_msg(type->peak_is_exact ? sim->peak[rank] == peak : sim->peak[rank] <= peak,
                  "%s p=%d v=%d m=%d rank %d: %lld live, %lld by formula", type->name, ranks,
                  chunks, mbs, rank, (long long)sim->peak[rank], (long long)peak);
  }
}

START_TEST(live_activations_equal_the_formula) { each_case(peaks_hold, RANKS_MAX); }
END_TEST

static int n_formulas;

static void bubbles_hold(const SchedType *type, int ranks, int chunks, int mbs) {
  Sched *sched = make(type->name, ranks, chunks, mbs, 0);
  for (int i = 0; i < COST_SETS; i++) {
    const double *cost = cost_sets[i];
    SchedCosts costs = sched_costs(cost[0], cost[1], cost[2]);
    SchedCase c = {.ranks = ranks,
                   .chunks = chunks,
                   .mbs = mbs,
                   .F = cost[0],
                   .I = cost[1],
                   .W = cost[2],
                   .overlap = -1};
    if (strcmp(type->name, "dualpipev") == 0)
      c.overlap = costs.overlap = cost[0] + cost[1] + cost[2];
    SchedSim *sim = simulate(sched, &costs);
    double expected;
    if (type->span(&c, &expected)) {
      n_formulas++;
      ck_assert_msg(fabs(sim->span_bubble - expected) < 1e-9 * (1 + expected),
                    "%s p=%d v=%d m=%d F=%g I=%g W=%g: span bubble %g, by formula %g", type->name,
                    ranks, chunks, mbs, cost[0], cost[1], cost[2], sim->span_bubble, expected);
    }
    if (type->makespan(&c, &expected)) {
      n_formulas++;
      ck_assert_msg(fabs(sim->makespan_bubble - expected) < 1e-9 * (1 + expected),
                    "%s p=%d v=%d m=%d F=%g I=%g W=%g: makespan bubble %g, by formula %g",
                    type->name, ranks, chunks, mbs, cost[0], cost[1], cost[2], sim->makespan_bubble,
                    expected);
    }
  }
}

START_TEST(bubbles_equal_the_formulas) {
  n_formulas = 0;
  each_case(bubbles_hold, RANKS_MAX);
  ck_assert_int_gt(n_formulas, 10000);
}
END_TEST

Suite *sched_suite(void);
Suite *sched_suite(void) {
  Suite *suite = suite_create("sched");
  TCase *tcase = tcase_create("generators");
  tcase_set_timeout(tcase, 100);
  tcase_add_test(tcase, every_schedule_is_valid_before_and_after_lowering);
  tcase_add_test(tcase, live_activations_equal_the_formula);
  tcase_add_test(tcase, bubbles_equal_the_formulas);
  suite_add_tcase(suite, tcase);
  return suite;
}
