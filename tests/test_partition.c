// test_partition - units to stages, against every possible split of small cases.
#include "parallel/partition.h"

#include "core/rng.h"
#include "tests/allocs.h"
#include "tests/sched_common.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { UNITS_MAX = 11, STAGES_MAX = 6 };

// ---- every split -----------------------------------------------------------------------------

typedef struct Best {
  double rank_cost, stage_cost, squares; // of the best within the limit; HUGE_VAL: there is none
} Best;

static double between(const double *values, double fallback, int from, int to) {
  double sum = 0;
  for (int u = from; u < to; u++) sum += values ? values[u] : fallback;
  return sum;
}

// What a split costs, computed from the definitions alone.
static Best judge(const PartitionCase *c, const int *first) {
  Best b = {0, 0, 0};
  for (int rank = 0; rank < c->ranks; rank++) {
    double cost = 0, bytes = 0;
    for (int s = 0; s < c->stages; s++) {
      if ((c->holder ? c->holder[s] : s % c->ranks) != rank) continue;
      double own = between(c->cost, 1, first[s], first[s + 1]);
      cost += own;
      bytes += between(c->state, 0, first[s], first[s + 1]) +
               (c->live ? c->live[s] : 1) * between(c->kept, 0, first[s], first[s + 1]);
      b.stage_cost = fmax(b.stage_cost, own);
      b.squares += own * own;
    }
    b.rank_cost = fmax(b.rank_cost, cost);
    if (c->limit > 0 && bytes > c->limit) return (Best){HUGE_VAL, HUGE_VAL, HUGE_VAL};
  }
  return b;
}

static void visit_all(const PartitionCase *c, int *first, int stage, Best *best) {
  if (stage == c->stages) {
    Best b = judge(c, first);
    bool is_same_rank = fabs(b.rank_cost - best->rank_cost) <= 1e-9;
    bool is_same = is_same_rank && fabs(b.stage_cost - best->stage_cost) <= 1e-9;
    if (b.rank_cost < best->rank_cost - 1e-9 ||
        (is_same_rank && b.stage_cost < best->stage_cost - 1e-9) ||
        (is_same && b.squares < best->squares))
      *best = b;
    return;
  }
  int left = c->stages - stage - 1, last = left == 0 ? c->units : c->units - left;
  for (int to = left == 0 ? c->units : first[stage] + 1; to <= last; to++) {
    first[stage + 1] = to;
    visit_all(c, first, stage + 1, best);
  }
}

static Best best_of_all(const PartitionCase *c) {
  int first[STAGES_MAX + 1] = {0};
  Best best = {HUGE_VAL, HUGE_VAL, HUGE_VAL};
  visit_all(c, first, 0, &best);
  return best;
}

static void is_split(const PartitionCase *c, const int *first) {
  ck_assert_int_eq(first[0], 0);
  ck_assert_int_eq(first[c->stages], c->units);
  for (int s = 0; s < c->stages; s++) ck_assert_int_lt(first[s], first[s + 1]);
}

// ---- random cases ----------------------------------------------------------------------------

typedef struct Numbers {
  uint64_t key;
  int64_t next;
} Numbers;

static int draw(Numbers *numbers, int n) {
  return (int)(rng_uniform(numbers->key, numbers->next++) * n);
}

// Fills a case of `ranks` x `chunks` stages; holder: loop or V.
static PartitionCase make_case(Numbers *numbers, int ranks, int chunks, double *arrays, int *ints) {
  int stages = ranks * chunks;
  PartitionCase c = {
      .stages = stages, .ranks = ranks, .units = stages + draw(numbers, 12 - stages)};
  c.cost = arrays, c.kept = arrays + UNITS_MAX, c.state = arrays + 2 * UNITS_MAX;
  bool is_alike = draw(numbers, 3) == 0; // blocks alike, first and last not: as in a transformer
  for (int u = 0; u < c.units; u++) {
    bool is_block = is_alike && u > 0 && u + 1 < c.units;
    arrays[u] = is_block ? 1 : draw(numbers, 20) * 0.25;
    arrays[UNITS_MAX + u] = draw(numbers, 10);
    arrays[2 * UNITS_MAX + u] = draw(numbers, 10);
  }
  for (int s = 0; s < stages; s++) {
    ints[s] = chunks > 1 && s / ranks % 2 ? ranks - 1 - s % ranks : s % ranks;
    ints[STAGES_MAX + s] = 1 + draw(numbers, 4);
  }
  c.holder = ints;
  c.live = ints + STAGES_MAX;
  return c;
}

static void best_is_found(int ranks, int chunks, bool is_limited, int *fits) {
  Numbers numbers = {rng_key(7, "partition"), 1000LL * (10 * ranks + chunks) + is_limited};
  for (int k = 0; k < 60; k++) {
    double arrays[3 * UNITS_MAX];
    int ints[2 * STAGES_MAX], first[STAGES_MAX + 1] = {-1};
    PartitionCase c = make_case(&numbers, ranks, chunks, arrays, ints);
    PartitionFigures figures = {0};
    c.limit = is_limited ? 20 + draw(&numbers, 60) : 0;
    Best best = best_of_all(&c);
    Status status = partition_balanced(&c, first, &figures);
    if (isinf(best.rank_cost)) {
      ck_assert_int_eq(status, ST_EVALUE);
      ck_assert_msg(strncmp(status_message(), "no split keeps every rank within", 32) == 0, "%s",
                    status_message());
      ck_assert_int_eq(first[0], -1);
      continue;
    }
    ++*fits;
    ck_assert_msg(status == ST_OK, "%s", status_message());
    is_split(&c, first);
    Best found = judge(&c, first);
    ck_assert_msg(fabs(found.rank_cost - best.rank_cost) < 1e-9 &&
                      fabs(found.stage_cost - best.stage_cost) < 1e-9,
                  "p=%d v=%d case %d: %g and %g, best %g and %g", ranks, chunks, k, found.rank_cost,
                  found.stage_cost, best.rank_cost, best.stage_cost);
    if (chunks == 1) ck_assert_double_eq_tol(found.squares, best.squares, 1e-9);
    ck_assert(figures.is_optimal);
    ck_assert_double_eq_tol(figures.rank_cost, best.rank_cost, 1e-9);
    ck_assert_double_eq_tol(figures.stage_cost, best.stage_cost, 1e-9);
    ck_assert(c.limit <= 0 || figures.bytes <= c.limit);
  }
}

START_TEST(the_best_of_all_splits_is_found) {
  int fits = 0;
  for (int ranks = 1; ranks <= 6; ranks++) best_is_found(ranks, 1, false, &fits);
  for (int ranks = 1; ranks <= 3; ranks++) best_is_found(ranks, 2, false, &fits);
  for (int ranks = 1; ranks <= 2; ranks++) best_is_found(ranks, 3, false, &fits);
  ck_assert_int_eq(fits, 60 * 11);
}
END_TEST

START_TEST(the_best_within_a_memory_limit_is_found_or_none_is_said_to_fit) {
  int fits = 0, cases = 60 * 9;
  for (int ranks = 1; ranks <= 5; ranks++) best_is_found(ranks, 1, true, &fits);
  for (int ranks = 1; ranks <= 3; ranks++) best_is_found(ranks, 2, true, &fits);
  best_is_found(2, 3, true, &fits);
  ck_assert_int_gt(fits, cases / 4);
  ck_assert_int_lt(fits, cases);
}
END_TEST

// ---- single facts ----------------------------------------------------------------------------

START_TEST(uniform_stages_differ_by_at_most_one_unit) {
  int first[9];
  for (int units = 8; units < 40; units++) {
    PartitionCase c = {.units = units, .stages = 8, .ranks = 4};
    ck_assert_int_eq(partition_uniform(&c, first), ST_OK);
    is_split(&c, first);
    for (int s = 0; s < 8; s++) {
      ck_assert_int_ge(first[s + 1] - first[s], units / 8);
      ck_assert_int_le(first[s + 1] - first[s], (units + 7) / 8);
    }
  }
}
END_TEST

START_TEST(a_heavy_head_gets_its_stage_fewer_blocks) {
  // embedding .5, ten blocks of 1, head 3.5
  double cost[12] = {.5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 3.5};
  PartitionCase c = {.units = 12, .stages = 4, .ranks = 4, .cost = cost};
  int first[5];
  PartitionFigures figures;
  ck_assert_int_eq(partition_balanced(&c, first, &figures), ST_OK);
  ck_assert_int_eq(first[3], 11);
  ck_assert_double_eq_tol(figures.stage_cost, 4, 1e-12); // 10.5 over three stages: 3.5, 4, 3
  ck_assert_double_eq_tol(figures.total, 14, 1e-12);
}
END_TEST

START_TEST(a_rank_s_stages_count_together) {
  // V placement over two ranks: stages 0 and 3 on rank 0. A heavy last unit is paid for by a light
  // first stage.
  static const int holder[] = {0, 1, 1, 0};
  double cost[8] = {1, 1, 1, 1, 1, 1, 1, 3};
  PartitionCase c = {.units = 8, .stages = 4, .ranks = 2, .cost = cost, .holder = holder};
  int first[5];
  PartitionFigures figures;
  ck_assert_int_eq(partition_balanced(&c, first, &figures), ST_OK);
  ck_assert_double_eq_tol(figures.rank_cost, 5, 1e-12);
  ck_assert_double_eq_tol(figures.stage_cost, 3, 1e-12);
  ck_assert(figures.is_optimal);
}
END_TEST

START_TEST(large_models_are_split_at_once_and_near_the_bound) {
  enum { UNITS = 98, STAGES = 32 };
  double cost[UNITS];
  int holder[STAGES], first[STAGES + 1];
  for (int u = 0; u < UNITS; u++) cost[u] = u == 0 ? 0.6 : u == UNITS - 1 ? 2.7 : 1;
  for (int s = 0; s < STAGES; s++) holder[s] = s < 16 ? s : 31 - s;
  PartitionCase c = {.units = UNITS, .stages = STAGES, .ranks = 16, .cost = cost, .holder = holder};
  PartitionFigures figures;
  ck_assert_int_eq(partition_balanced(&c, first, &figures), ST_OK);
  is_split(&c, first);
  // 99.3 over 16 ranks is 6.2: seven whole blocks at most, if no rank is to get eight.
  ck_assert_double_le(figures.rank_cost, 7 + 1e-9);
}
END_TEST

START_TEST(a_given_list_may_have_empty_stages) {
  static const int count[] = {0, 3, 0, 5}, expected[] = {0, 0, 3, 3, 8};
  PartitionCase c = {.units = 8, .stages = 4, .ranks = 4};
  int first[5];
  ck_assert_int_eq(partition_given(&c, count, 4, first), ST_OK);
  for (int s = 0; s <= 4; s++) ck_assert_int_eq(first[s], expected[s]);
  PartitionFigures figures;
  partition_measure(&c, first, &figures);
  ck_assert_double_eq_tol(figures.stage_cost, 5, 1e-12);
}
END_TEST

static void refused(Status status, const char *words) {
  ck_assert_int_eq(status, ST_EVALUE);
  ck_assert_msg(strstr(status_message(), words) != NULL, "\"%s\" without \"%s\"", status_message(),
                words);
}

START_TEST(wrong_splits_are_refused_and_printed) {
  static const int count[] = {3, 3, 3}, below[] = {9, -1, 0};
  PartitionCase c = {.units = 8, .stages = 3, .ranks = 3};
  int first[13] = {-1};
  refused(partition_given(&c, count, 3, first),
          "split = {3, 3, 3} places 9 units; the model has 8");
  refused(partition_given(&c, count, 2, first), "split = {3, 3} is for 2 stages; there are 3");
  refused(partition_given(&c, below, 3, first), "stage 1 cannot have -1 units");
  c.stages = 12;
  refused(partition_uniform(&c, first), "12 stages for 8 units");
  refused(partition_balanced(&c, first, NULL), "12 stages for 8 units");
  double cost[8] = {1, (double)NAN};
  c = (PartitionCase){.units = 8, .stages = 3, .ranks = 3, .cost = cost};
  refused(partition_balanced(&c, first, NULL), "unit 1: its cost is");
  cost[1] = -1;
  refused(partition_balanced(&c, first, NULL), "unit 1: its cost is -1");
  ck_assert_int_eq(first[0], -1);
}
END_TEST

START_TEST(any_allocation_may_fail) {
  static const int holder[] = {0, 1, 1, 0};
  PartitionCase c = {.units = 8, .stages = 4, .ranks = 2, .holder = holder};
  int n = 0;
  for (bool is_over = false; !is_over; n++) {
    int first[5] = {-1};
    test_alloc_fail_at(n + 1);
    Status status = partition_balanced(&c, first, NULL);
    is_over = !test_alloc_has_failed();
    test_alloc_fail_at(0);
    ck_assert_int_eq(status, is_over ? ST_OK : ST_ENOMEM);
    ck_assert_int_eq(first[0], is_over ? 0 : -1);
  }
  ck_assert_int_eq(n, 5); // sums, plans, numbers, counts, and none
}
END_TEST

START_TEST(live_microbatches_of_a_stage_are_those_of_its_schedule) {
  SchedArena arena;
  int live[8];
  sched_heap_open(&arena);
  partition_live(make(&arena, "1f1b", 4, 1, 8, 0), live);
  for (int s = 0; s < 4; s++) ck_assert_int_eq(live[s], 4 - s);
  partition_live(make(&arena, "gpipe", 4, 1, 8, 0), live);
  for (int s = 0; s < 4; s++) ck_assert_int_eq(live[s], 8);
  const Sched *zbv = make(&arena, "zbv", 4, 2, 12, 0);
  partition_live(zbv, live);
  for (int s = 0; s < 4; s++) ck_assert_int_ge(live[s] + live[7 - s], zbv->bound[s]);
  sched_heap_close(&arena);
}
END_TEST

Suite *partition_suite(void);
Suite *partition_suite(void) {
  Suite *suite = suite_create("partition");
  TCase *tcase = tcase_create("partition");
  tcase_set_timeout(tcase, 60);
  tcase_add_test(tcase, the_best_of_all_splits_is_found);
  tcase_add_test(tcase, the_best_within_a_memory_limit_is_found_or_none_is_said_to_fit);
  tcase_add_test(tcase, uniform_stages_differ_by_at_most_one_unit);
  tcase_add_test(tcase, a_heavy_head_gets_its_stage_fewer_blocks);
  tcase_add_test(tcase, a_rank_s_stages_count_together);
  tcase_add_test(tcase, large_models_are_split_at_once_and_near_the_bound);
  tcase_add_test(tcase, a_given_list_may_have_empty_stages);
  tcase_add_test(tcase, wrong_splits_are_refused_and_printed);
  tcase_add_test(tcase, any_allocation_may_fail);
  tcase_add_test(tcase, live_microbatches_of_a_stage_are_those_of_its_schedule);
  suite_add_tcase(suite, tcase);
  return suite;
}
