// test_sched - generators, simulator and formulas of pipeline schedules.
//
// Every row of the schedules' summary and of the latency table is reproduced over a grid of p, m
// and costs. The second simulator below shares nothing with the first but the lists: it recomputes
// all times until none changes.
#include "tests/sched_common.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS_MAX = 8, CHUNKS_MAX = 5 };

static SchedArena arena;
static void open_arena(void) { sched_heap_open(&arena); }
static void close_arena(void) { sched_heap_close(&arena); }

static const double cost_sets[][3] = {{1, 1, 1},     {1, 1.5, 0.5}, {1, 2, 1},   {2, 2, 1},
                                      {1, 0.7, 0.9}, {3, 1, 2},     {1, 1, 1.5}, {0.25, 1, 0}};
enum { COST_SETS = sizeof cost_sets / sizeof *cost_sets };

// ---- every schedule: valid, its peaks, its formulas ------------------------------------------

static void is_valid(SchedArena *a, const SchedType *type, int ranks, int chunks, int mbs) {
  Sched *sched = make(a, type->name, ranks, chunks, mbs, 0);
  SchedReport *report = check(a, sched);
  ck_assert_msg(report->broken == 0 && !report->is_to_rounding, "%s p=%d v=%d m=%d: %s", type->name,
                ranks, chunks, mbs, report->message);
  for (int hop = 0; hop < 2; hop++) {
    SchedCosts costs = sched_costs(1, 1.25, 0.5);
    costs.hop = 0.75 * hop;
    if (hop && strcmp(type->name, "dualpipev") == 0) costs.overlap = 2;
    report = check(a, lower(a, sched, &costs));
    ck_assert_msg(report->broken == 0 && !report->is_to_rounding, "%s p=%d v=%d m=%d lowered: %s",
                  type->name, ranks, chunks, mbs, report->message);
  }
}

START_TEST(every_schedule_is_valid_before_and_after_lowering) {
  each_case(is_valid, 6, CHUNKS_MAX);
}
END_TEST

static void peaks_hold(SchedArena *a, const SchedType *type, int ranks, int chunks, int mbs) {
  Sched *sched = make(a, type->name, ranks, chunks, mbs, 0);
  SchedCosts costs = sched_costs(1, 1, 1);
  SchedSim *sim = simulate(a, sched, &costs);
  SchedCase c = {.ranks = ranks, .chunks = chunks, .mbs = mbs};
  int64_t most = 0;
  for (int rank = 0; rank < ranks; rank++) {
    int64_t peak = type->peak(&c, rank);
    ck_assert_int_eq(sched->bound[rank], peak);
    ck_assert_int_le(peak, (int64_t)mbs * chunks);
    ck_assert_msg(type->peak_is_exact ? sim->peak[rank] == peak : sim->peak[rank] <= peak,
                  "%s p=%d v=%d m=%d rank %d: %lld live, %lld by formula", type->name, ranks,
                  chunks, mbs, rank, (long long)sim->peak[rank], (long long)peak);
    if (sim->peak[rank] > most) most = sim->peak[rank];
  }
  // With enough microbatches the bound is reached on some rank, but for hanayo.
  bool is_reached = most == type->peak(&c, 0) || mbs < 2 * ranks + 1;
  ck_assert_msg(is_reached || strcmp(type->name, "hanayo") == 0, "%s p=%d v=%d m=%d: most %lld",
                type->name, ranks, chunks, mbs, (long long)most);
}

START_TEST(live_activations_equal_the_formula) { each_case(peaks_hold, RANKS_MAX, CHUNKS_MAX); }
END_TEST

static int n_formulas;

static void equals_formula(const SchedType *type, const SchedCase *c, const char *what,
                           double found, bool (*formula)(const SchedCase *, double *)) {
  double expected;
  if (!formula(c, &expected)) return;
  n_formulas++;
  ck_assert_msg(fabs(found - expected) < 1e-9 * (1 + expected),
                "%s p=%d v=%d m=%d F=%g I=%g W=%g: %s bubble %g, by formula %g", type->name,
                c->ranks, c->chunks, c->mbs, c->F, c->I, c->W, what, found, expected);
}

static void bubbles_hold(SchedArena *a, const SchedType *type, int ranks, int chunks, int mbs) {
  Sched *sched = make(a, type->name, ranks, chunks, mbs, 0);
  for (int i = 0; i < COST_SETS; i++) {
    const double *cost = cost_sets[i];
    SchedCosts costs = sched_costs(cost[0], cost[1], cost[2]);
    if (strcmp(type->name, "dualpipev") == 0) costs.overlap = cost[0] + cost[1] + cost[2];
    SchedCase c = {.ranks = ranks, .chunks = chunks, .mbs = mbs, .overlap = costs.overlap};
    c.F = cost[0], c.I = cost[1], c.W = cost[2];
    SchedSim *sim = simulate(a, sched, &costs);
    equals_formula(type, &c, "span", sim->span_bubble, type->span);
    equals_formula(type, &c, "makespan", sim->makespan_bubble, type->makespan);
  }
}

START_TEST(bubbles_equal_the_formulas) {
  n_formulas = 0;
  each_case(bubbles_hold, RANKS_MAX, CHUNKS_MAX);
  ck_assert_int_gt(n_formulas, 20000);
}
END_TEST

// Leading forwards of a rank, and how many dgrads come before its first wgrad.
static int leading_forwards(const SchedRow *row) {
  int n = 0;
  while (n < row->count && row->action[n].kind == ACTION_F) n++;
  return n;
}
static int lag_of_w(const SchedRow *row) {
  int n = 0;
  for (int i = 0; i < row->count && row->action[i].kind != ACTION_W; i++)
    n += row->action[i].kind == ACTION_I;
  return n - 1;
}

static int smaller(int a, int b) { return a < b ? a : b; }

// The warm-up column of the documentation; a steady phase, if there is one, begins with one F more.
static void warms_up(SchedArena *a, const SchedType *type, int p, int v, int m) {
  const Sched *sched = make(a, type->name, p, v, m, 0);
  int groups = m / p > 1 ? m / p : 1, N = (m + groups - 1) / groups; // balanced: the largest size
  for (int r = 0; r < p; r++) {
    const char *name = type->name;
    int w = -1, lag = -1, total = m * v;
    if (strcmp(name, "gpipe") == 0 || strcmp(name, "bfs") == 0) w = total;
    if (strcmp(name, "1f1b") == 0) w = p - 1 - r;
    if (strcmp(name, "eager-1f1b") == 0) w = 2 * (p - 1 - r);
    if (strcmp(name, "interleaved") == 0) w = 2 * (p - 1 - r) + (v - 1) * N;
    if (strcmp(name, "zb-h1") == 0) w = p - 1 - r, lag = r;
    if (strcmp(name, "zb-h2") == 0) w = 2 * (p - 1 - r), lag = 2 * r;
    if (w < 0) continue;
    ck_assert_msg(leading_forwards(&sched->row[r]) == smaller(total, w + 1),
                  "%s p=%d v=%d m=%d rank %d: %d", name, p, v, m, r,
                  leading_forwards(&sched->row[r]));
    if (lag >= 0) ck_assert_int_eq(lag_of_w(&sched->row[r]), smaller(lag, m - 1));
  }
}

START_TEST(warm_ups_and_lags_are_as_documented) { each_case(warms_up, RANKS_MAX, 4); }
END_TEST

START_TEST(a_group_of_n_keeps_what_the_formula_says) {
  for (int p = 2; p <= 6; p++) {
    for (int v = 1; v <= 3; v++) {
      for (int m = p; m <= 4 * p; m++) {
        for (int N = p; N <= m; N++) {
          if (m % N != 0 && m % N < p) continue;
          SchedArena a;
          sched_heap_open(&a);
          SchedCosts costs = sched_costs(1, 1, 1);
          const Sched *sched = make(&a, "interleaved", p, v, m, N);
          const SchedSim *sim = simulate(&a, sched, &costs);
          for (int r = 0; r < p; r++)
            ck_assert_int_eq(sim->peak[r], smaller(m * v, (v - 1) * N + 2 * (p - 1 - r) + 1));
          ck_assert_double_eq_tol(sim->makespan_bubble, (p - 1) * 3.0 / v, 1e-9);
          sched_heap_close(&a);
        }
      }
    }
  }
}
END_TEST

static double makespan_bubble(const char *name, int ranks, int chunks, int mbs) {
  SchedCosts costs = sched_costs(1, 1, 1);
  return simulate(&arena, make(&arena, name, ranks, chunks, mbs, 0), &costs)->makespan_bubble;
}

START_TEST(controllable_memory_has_the_listed_bubbles) {
  static const int ranks[] = {2, 3, 4, 5, 6, 8};
  static const double v_half[] = {.5, 2.5, 2.5, 5.5, 5.5, 8.5};
  static const double v_min[] = {1, 2.5, 5.5, 7, 8.5, 13};
  static const double f1b1_v[] = {2, 4, 7.5, 9, 11, 16.5};
  for (int i = 0; i < 6; i++) {
    for (int mbs = 2 * ranks[i]; mbs <= 40; mbs += 8) {
      open_arena();
      ck_assert_double_eq_tol(makespan_bubble("v-half", ranks[i], 0, mbs), v_half[i], 1e-9);
      ck_assert_double_eq_tol(makespan_bubble("v-min", ranks[i], 0, mbs), v_min[i], 1e-9);
      ck_assert_double_eq_tol(makespan_bubble("1f1b-v", ranks[i], 0, mbs), f1b1_v[i], 1e-9);
      close_arena();
    }
  }
}
END_TEST

START_TEST(hanayo_grows_with_m_and_loses_to_1f1b) {
  ck_assert_double_eq_tol(makespan_bubble("hanayo", 4, 2, 4), 6, 1e-9);
  ck_assert_double_gt(makespan_bubble("hanayo", 4, 2, 16), makespan_bubble("hanayo", 4, 2, 8));
  ck_assert_double_gt(makespan_bubble("hanayo", 4, 2, 32), makespan_bubble("1f1b", 4, 1, 32));
}
END_TEST

START_TEST(dualpipev_without_overlap_has_half_the_bubble_and_the_same_peak) {
  Sched *sched = make(&arena, "dualpipev", 8, 2, 32, 0);
  SchedCosts costs = sched_costs(1, 1, 1);
  SchedSim *apart = simulate(&arena, sched, &costs);
  costs.overlap = 3;
  SchedSim *paired = simulate(&arena, sched, &costs);
  ck_assert_double_eq_tol(paired->makespan_bubble, 7, 1e-9);
  ck_assert_double_eq_tol(apart->makespan_bubble, 3.5, 1e-9);
  for (int rank = 0; rank < 8; rank++) ck_assert_int_eq(apart->peak[rank], paired->peak[rank]);
}
END_TEST

START_TEST(a_merge_that_holds_the_gradient_back_breaks_zbv) {
  Sched *sched = make(&arena, "zbv", 8, 2, 32, 0), *merged;
  ck_assert_int_eq(sched_new(&arena, &merged, "merged", 8, 2, 32, PLACE_V, NULL), ST_OK);
  for (int rank = 0; rank < 8; rank++) {
    const Action *a = sched->row[rank].action;
    for (int i = 0; i < sched->row[rank].count; i++) {
      bool is_pair = i + 1 < sched->row[rank].count && a[i].kind == ACTION_I &&
                     a[i + 1].kind == ACTION_W && a[i].stage == a[i + 1].stage &&
                     a[i].mb == a[i + 1].mb;
      Action action = a[i];
      if (is_pair) action.kind = ACTION_B, i++;
      ck_assert_int_eq(sched_push(merged, rank, action), ST_OK);
    }
  }
  SchedCosts costs = sched_costs(1, 1, 1);
  ck_assert_double_eq_tol(simulate(&arena, sched, &costs)->makespan_bubble, 3.5, 1e-9);
  ck_assert_double_eq_tol(simulate(&arena, merged, &costs)->makespan_bubble, 10.5, 1e-9);
}
END_TEST

// ---- the latency table -----------------------------------------------------------------------

START_TEST(the_latency_table_is_reproduced) {
  static const char *const names[] = {"1f1b",  "eager-1f1b", "gpipe", "interleaved",
                                      "zb-h1", "zb-h2",      "zbv",   "dualpipev"};
  static const double hops[] = {0, .1, .2, .4};
  static const double percent[4][8] = {{21.9, 21.9, 21.9, 10.9, 7.3, 7.3, 3.6, 7.3},
                                       {29.0, 23.3, 23.3, 14.1, 10.2, 8.0, 7.1, 15.3},
                                       {36.0, 24.8, 24.8, 17.2, 13.1, 8.8, 10.5, 23.9},
                                       {50.2, 27.7, 27.7, 23.4, 19.0, 10.2, 17.7, 40.9}};
  for (int i = 0; i < 8; i++) {
    bool is_interleaved = strcmp(names[i], "interleaved") == 0;
    Sched *sched = make(&arena, names[i], 8, 0, 32, is_interleaved ? 8 : 0);
    for (int k = 0; k < 4; k++) {
      SchedCosts costs = sched_costs(1, 1, 1);
      costs.hop = hops[k];
      if (strcmp(names[i], "dualpipev") == 0) costs.overlap = 3;
      SchedSim *sim = simulate(&arena, sched, &costs);
      double overhead = 100 * sim->makespan_bubble / (sim->makespan - sim->makespan_bubble);
      ck_assert_msg(fabs(overhead - percent[k][i]) <= 0.0501, "%s at hop %g: %.2f%%, not %.1f%%",
                    names[i], hops[k], overhead, percent[k][i]);
    }
  }
}
END_TEST

// ---- groups of interleaved -------------------------------------------------------------------

static double group_bubble(int ranks, int chunks, int mbs, int group, bool *is_deadlock) {
  SchedArena a;
  sched_heap_open(&a);
  Sched *sched = make(&a, "interleaved", ranks, chunks, mbs, group);
  SchedReport *report = check(&a, sched);
  ck_assert_msg(report->broken == 0 || report->broken == 4, "%s", report->message);
  *is_deadlock = report->broken == 4;
  SchedCosts costs = sched_costs(1, 1, 1);
  double bubble = *is_deadlock ? -1 : simulate(&a, sched, &costs)->makespan_bubble;
  bool is_worse = *is_deadlock || bubble > 3.0 * (ranks - 1) / chunks + 1e-9;
  ck_assert_msg(!is_worse || mbs < ranks || *sched->warning, "p=%d v=%d m=%d N=%d: no warning",
                ranks, chunks, mbs, group);
  sched_heap_close(&a);
  return bubble;
}

START_TEST(a_group_is_good_if_it_divides_m_or_leaves_a_rest_of_p) {
  bool is_deadlock, is_seen[2] = {false, false};
  for (int ranks = 2; ranks <= 6; ranks++) {
    for (int chunks = 2; chunks <= 4; chunks++) {
      for (int mbs = ranks; mbs <= 26; mbs++) {
        for (int group = ranks; group <= mbs; group++) {
          bool is_good = mbs % group == 0 || mbs % group >= ranks;
          double bubble = group_bubble(ranks, chunks, mbs, group, &is_deadlock);
          double expected = 3.0 * (ranks - 1) / chunks;
          ck_assert_msg(is_good ? fabs(bubble - expected) < 1e-9
                                : is_deadlock || bubble > expected + 1e-9,
                        "p=%d v=%d m=%d N=%d: bubble %g", ranks, chunks, mbs, group, bubble);
          bool may_deadlock = chunks == 2 ? ranks >= 5 : ranks >= 4;
          ck_assert_msg(!is_deadlock || may_deadlock, "p=%d v=%d m=%d N=%d", ranks, chunks, mbs,
                        group);
          if (is_deadlock && ranks == (chunks == 2 ? 5 : 4)) is_seen[chunks > 2] = true;
        }
      }
    }
  }
  ck_assert(is_seen[0] && is_seen[1]);
}
END_TEST

START_TEST(the_default_groups_are_balanced_and_m_below_p_is_one_group) {
  Sched *sched = make(&arena, "interleaved", 4, 2, 11, 0); // groups of 6 and 5
  const Action *action = sched->row[3].action;             // w = 2(p-1-r) + (v-1)N = 6
  for (int i = 0; i < 6; i++) ck_assert(action[i].stage == 3 && action[i].mb == i);
  ck_assert(action[6].stage == 7 && action[6].mb == 0 && action[6].kind == ACTION_F);
  ck_assert_double_eq_tol(makespan_bubble("interleaved", 6, 3, 4), 5.0 + 2 * 2, 1e-9);
  ck_assert_double_eq_tol(makespan_bubble("bfs", 6, 3, 4), 5.0 + 2 * 2, 1e-9);
}
END_TEST

// ---- a second simulator ----------------------------------------------------------------------

// Times by recomputation until nothing changes, for compute-only lists of one copy.
typedef struct Second {
  const Sched *sched;
  const SchedCosts *costs;
  double *start[RANKS_MAX], *end[RANKS_MAX];
} Second;

static void find(const Second *second, int stage, int mb, const char *kinds, int *rank, int *at) {
  *rank = second->sched->holder[stage];
  const SchedRow *row = &second->sched->row[*rank];
  for (*at = 0; *at < row->count; (*at)++) {
    Action a = row->action[*at];
    if (a.stage == stage && a.mb == mb && a.kind != ACTION_OVERLAP_F_B &&
        strchr(kinds, action_text(a.kind)[0]))
      return;
  }
  ck_abort_msg("%d%s%d is nowhere", stage, kinds, mb);
}

// The end of an action elsewhere, with its way here.
static double arrives(const Second *second, int to, int stage, int mb, const char *kinds) {
  int rank, at;
  find(second, stage, mb, kinds, &rank, &at);
  return second->end[rank][at] + (rank == to ? 0 : second->costs->hop);
}

static double inputs_at(const Second *second, int rank, Action a) {
  int last = second->sched->stages - 1;
  double ready = 0, own;
  if (a.kind == ACTION_F && a.stage > 0) ready = arrives(second, rank, a.stage - 1, a.mb, "F");
  if (a.kind == ACTION_I || a.kind == ACTION_B) {
    ready = arrives(second, rank, a.stage, a.mb, "F");
    if (a.stage < last && (own = arrives(second, rank, a.stage + 1, a.mb, "IB")) > ready)
      ready = own;
  }
  if (a.kind == ACTION_W) ready = arrives(second, rank, a.stage, a.mb, "I");
  return ready;
}

static bool recompute(Second *second) {
  const SchedCosts *costs = second->costs;
  double whole[] = {costs->F, costs->I, costs->W, costs->I + costs->W};
  bool has_changed = false;
  for (int rank = 0; rank < second->sched->ranks; rank++) {
    double clock = 0;
    const SchedRow *row = &second->sched->row[rank];
    ck_assert(second->start[rank] && second->end[rank]);
    for (int i = 0; i < row->count; i++) {
      bool is_pair = row->action[i].kind == ACTION_OVERLAP_F_B;
      if (is_pair && costs->overlap < 0) continue;
      double start = clock, time;
      int first = is_pair ? i + 1 : i, last = is_pair ? i + 2 : i;
      for (int k = first; k <= last; k++)
        start = fmax(start, inputs_at(second, rank, row->action[k]));
      time = (is_pair ? costs->overlap : whole[row->action[i].kind]) / second->sched->chunks;
      for (int k = first; k <= last; k++) {
        has_changed = has_changed || second->end[rank][k] < start + time;
        second->start[rank][k] = start;
        second->end[rank][k] = start + time;
      }
      clock = start + time;
      i = last;
    }
  }
  return has_changed;
}

static void simulators_agree(SchedArena *a, const SchedType *type, int ranks, int chunks, int mbs) {
  if (mbs % 3 != 0) return; // enough, and the second one is slow
  Sched *sched = make(a, type->name, ranks, chunks, mbs, 0);
  for (int set = 0; set < 3; set++) {
    SchedCosts costs = sched_costs(1, 1 + 0.3 * set, 1 - 0.4 * set);
    costs.hop = 0.35 * set;
    if (set != 1) costs.overlap = 2.5;
    SchedSim *sim = simulate(a, sched, &costs);
    SchedSim *lowered = simulate(a, lower(a, sched, &costs), &costs);
    Second second = {.sched = sched, .costs = &costs};
    for (int rank = 0; rank < ranks; rank++) {
      second.start[rank] = sched_alloc(a, (size_t)sched->row[rank].count, sizeof(double));
      second.end[rank] = sched_alloc(a, (size_t)sched->row[rank].count, sizeof(double));
    }
    while (recompute(&second)) {
    }
    double makespan = 0;
    for (int rank = 0; rank < ranks; rank++) {
      for (int i = 0; i < sched->row[rank].count; i++) {
        if (action_resource(sched->row[rank].action[i].kind) != USES_COMPUTE) continue;
        SchedSpan span = sim->span[sim->first[rank] + i];
        ck_assert_msg(fabs(span.start - second.start[rank][i]) < 1e-9 &&
                          fabs(span.end - second.end[rank][i]) < 1e-9,
                      "%s p=%d v=%d m=%d rank %d action %d: %g to %g, and %g to %g", type->name,
                      ranks, chunks, mbs, rank, i, span.start, span.end, second.start[rank][i],
                      second.end[rank][i]);
        makespan = fmax(makespan, second.end[rank][i]);
      }
    }
    ck_assert_double_eq_tol(sim->makespan, makespan, 1e-9);
    ck_assert_double_eq_tol(lowered->makespan, makespan, 1e-9);
    ck_assert_double_eq_tol(lowered->span_bubble, sim->span_bubble, 1e-9);
  }
}

START_TEST(an_independent_simulator_agrees) { each_case(simulators_agree, 5, 4); }
END_TEST

// ---- what else the simulator knows -----------------------------------------------------------

START_TEST(costs_by_stage_and_microbatch_decide_where_time_goes) {
  static const double stages[] = {1, 3, 1, 1}, mbs[] = {1, 1, 1, 0.5};
  Sched *sched = make(&arena, "gpipe", 4, 1, 4, 0);
  SchedCosts costs = sched_costs(1, 1, 1);
  costs.stage_factor = stages;
  SchedSim *sim = simulate(&arena, sched, &costs);
  ck_assert_double_eq_tol(sim->busy[1], 3 * 12, 1e-12);
  ck_assert_double_eq_tol(sim->makespan_bubble, 3 * 3, 1e-12); // the other stages, once each way
  costs.mb_factor = mbs;
  sim = simulate(&arena, sched, &costs);
  ck_assert_double_eq_tol(sim->busy[1], 3 * 10.5, 1e-12);
}
END_TEST

static double by_kind(const void *user, Action action) {
  const double *times = user;
  return times[action.kind] + 0.001 * action.mb;
}

START_TEST(a_price_function_decides_alone) {
  const double times[ACTION_KINDS] = {1, 0, 0, 5};
  Sched *sched = make(&arena, "1f1b", 2, 1, 3, 0);
  SchedCosts costs = sched_costs(9, 9, 9);
  costs.price = by_kind;
  costs.user = times;
  ck_assert_double_eq_tol(simulate(&arena, sched, &costs)->busy[0], 18.006, 1e-12);
}
END_TEST

START_TEST(a_channel_of_finite_bandwidth_sends_one_message_at_a_time) {
  Sched *sched = make(&arena, "gpipe", 2, 1, 3, 0);
  SchedCosts costs = sched_costs(1, 0.5, 0.5);
  costs.hop = 0.25;
  costs.message_bytes = 20;
  costs.bytes_per_second = 10; // 2 units of time each
  SchedSim *sim = simulate(&arena, sched, &costs);
  const SchedSpan *span = sim->span + sim->first[1];
  for (int mb = 0; mb < 3; mb++)
    ck_assert_double_eq_tol(span[mb].start, 1 + 2 * (mb + 1) + 0.25, 1e-12);
  ck_assert_double_eq_tol(span[1].waited, 1, 1e-12);
}
END_TEST

START_TEST(a_pair_waits_for_both_its_inputs) {
  Sched *sched;
  ck_assert_int_eq(sched_new(&arena, &sched, "pair", 2, 1, 2, PLACE_LOOP, NULL), ST_OK);
  static const char *const rows[2][5] = {{"0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"},
                                         {"1F0", "1B0", "1F1", "1B1"}};
  for (int rank = 0; rank < 2; rank++)
    for (int i = 0; rows[rank][i]; i++)
      ck_assert_int_eq(sched_push_text(sched, rank, rows[rank][i], strlen(rows[rank][i])), ST_OK);
  SchedCosts costs = sched_costs(1, 1, 1);
  costs.overlap = 2.5;
  SchedSim *sim = simulate(&arena, sched, &costs);
  const SchedSpan *span = sim->span; // of the marker, F1 and B0: behind 1B0, which ends at 4
  for (int i = 1; i < 4; i++) ck_assert_double_eq_tol(span[i].start, 4, 1e-12);
  ck_assert_double_eq_tol(span[1].waited, 3, 1e-12);
  ck_assert_double_eq_tol(span[3].end, 6.5, 1e-12);
  ck_assert_double_eq_tol(sim->busy[0], 1 + 2.5 + 2, 1e-12);
  costs.overlap = -1; // F1 at once, then B0
  span = simulate(&arena, sched, &costs)->span;
  ck_assert_double_eq_tol(span[2].start, 1, 1e-12);
  ck_assert_double_eq_tol(span[3].start, 4, 1e-12);
}
END_TEST

START_TEST(in_a_lowered_list_a_message_leaves_with_its_send) {
  SchedCosts costs = sched_costs(1, 1, 1);
  Sched *sched = lower(&arena, make(&arena, "gpipe", 2, 1, 2, 0), &costs);
  Action *a = sched->row[0].action; // 0F0 0SEND_F0 0F1 0SEND_F1 ...
  ck_assert(a[1].kind == ACTION_SEND_F && a[2].kind == ACTION_F);
  Action send = a[1];
  a[1] = a[2], a[2] = send;
  SchedSim *sim = simulate(&arena, sched, &costs);
  const SchedSpan *span = sim->span + sim->first[1]; // 1RECV_F0 1RECV_F1 1F0: F0 is held back
  for (int i = 0; i < sched->row[1].count; i++)
    if (sched->row[1].action[i].kind == ACTION_F && sched->row[1].action[i].mb == 0)
      ck_assert_double_eq_tol(span[i].start, 2, 1e-12);
}
END_TEST

START_TEST(hanayo_leaves_a_place_for_every_deeper_chunk) {
  for (int ranks = 1; ranks <= 6; ranks++) {
    for (int waves = 1; waves <= 4; waves++) {
      SchedArena a;
      sched_heap_open(&a);
      Sched *sched = make(&a, "hanayo", ranks, 2 * waves, 6 * ranks + 5, 0);
      for (int rank = 0; rank < ranks; rank++) {
        int live = 0;
        for (int i = 0; i < sched->row[rank].count; i++) {
          Action action = sched->row[rank].action[i];
          int chunk = action.stage / ranks;
          if (action.kind == ACTION_F)
            ck_assert_int_lt(live, 2 * waves * ranks - (2 * waves - 1 - chunk));
          live += action.kind == ACTION_F ? 1 : -1;
        }
      }
      ck_assert_int_eq(check(&a, sched)->broken, 0);
      sched_heap_close(&a);
    }
  }
}
END_TEST

START_TEST(live_bytes_follow_the_formula) {
  Sched *sched = make(&arena, "zb-h1", 3, 1, 6, 0);
  SchedCosts costs = sched_costs(1, 1, 1);
  static const SchedBytes bytes[] = {{100, 10, 1}, {1, 1, 1}, {200, 20, 2}};
  costs.bytes = bytes;
  SchedSim *sim = simulate(&arena, sched, &costs);
  // rank 0: F0 F1 F2 | I0: three live, and the kept gradient of one
  ck_assert_double_eq_tol(sim->peak_bytes[0], 3 * 110 + 1, 1e-12);
  // rank 2 keeps W of two microbatches: F0 I0 F1 I1 F2 | I2
  ck_assert_double_eq_tol(sim->peak_bytes[2], 220 + 2 * 22 + 2, 1e-12);
}
END_TEST

START_TEST(a_measured_step_has_the_figures_of_the_same_step_simulated) {
  static const double stages[] = {1, 1.5, 0.5, 2, 1, 1};
  SchedCosts costs = sched_costs(1, 1, 1), mean;
  Sched *sched = lower(&arena, make(&arena, "zbv", 3, 2, 7, 0), NULL);
  costs.stage_factor = stages;
  costs.reduce_grad = 0.25, costs.step = 0.125;
  SchedSim *sim = simulate(&arena, sched, &costs), *measured;
  int64_t count = sim->first[3];
  SchedSpan *span = sched_alloc(&arena, (size_t)count, sizeof *span);
  for (int64_t i = 0; i < count; i++) // on another clock; what took no time was not measured
    if (sim->span[i].end > sim->span[i].start)
      span[i] = (SchedSpan){sim->span[i].start + 77, sim->span[i].end + 77, sim->span[i].waited};
  ck_assert_int_eq(sched_measured(&arena, &measured, sched, span, 10), ST_OK);
  ck_assert_double_eq_tol(measured->makespan, 10 * sim->makespan, 1e-9);
  ck_assert_double_eq_tol(measured->makespan_bubble, 10 * sim->makespan_bubble, 1e-9);
  ck_assert_double_eq_tol(measured->span_bubble, 10 * sim->span_bubble, 1e-9);
  for (int rank = 0; rank < 3; rank++) {
    ck_assert_double_eq_tol(measured->busy[rank], 10 * sim->busy[rank], 1e-9);
    ck_assert_int_eq(measured->peak[rank], sim->peak[rank]);
  }
  // A simulation with its mean times is the step again.
  ck_assert_int_eq(sched_mean_costs(&arena, &mean, sched, measured), ST_OK);
  SchedSim *again = simulate(&arena, sched, &mean);
  for (int64_t i = 0; i < count; i++)
    if (span[i].end > span[i].start)
      ck_assert_double_eq_tol(again->span[i].start, measured->span[i].start, 1e-9);
  span[0].end = -1;
  ck_assert_int_eq(sched_measured(&arena, &measured, sched, span, 1), ST_EVALUE);
}
END_TEST

static void path_is_tight(SchedArena *a, const SchedType *type, int ranks, int chunks, int mbs) {
  Sched *sched = make(a, type->name, ranks, chunks, mbs, 0);
  SchedCosts costs = sched_costs(1, 1.5, 0.75);
  costs.hop = 0.125;
  if (mbs % 2) costs.overlap = 3;
  SchedSim *sim = simulate(a, sched, &costs);
  SchedLink *path;
  int count;
  ck_assert_int_eq(sched_critical_path(a, &path, &count, sched, sim), ST_OK);
  double end = 0;
  for (int i = 0; i < count; i++) {
    SchedSpan span = sim->span[sim->first[path[i].rank] + path[i].index];
    double gap = path[i].by_message ? costs.hop : 0;
    ck_assert_msg(fabs(span.start - end - gap) < 1e-9, "%s p=%d m=%d link %d: %g after %g",
                  type->name, ranks, mbs, i, span.start, end);
    end = span.end;
  }
  ck_assert_double_eq_tol(end, sim->makespan, 1e-9);
}

START_TEST(the_critical_path_accounts_for_the_whole_makespan) { each_case(path_is_tight, 5, 4); }
END_TEST

START_TEST(receives_posted_ahead_are_as_many_as_documented) {
  static const struct {
    const char *name;
    int chunks, group, least, most; // of the deepest channel
  } cases[] = {{"1f1b", 1, 0, 1, 3},        {"eager-1f1b", 1, 0, 1, 3},    {"gpipe", 1, 0, 1, 3},
               {"interleaved", 2, 8, 1, 3}, {"zb-h1", 1, 0, 1, 3},         {"zb-h2", 1, 0, 1, 3},
               {"zbv", 2, 0, 1, 3},         {"v-half", 2, 0, 1, 3},        {"v-min", 2, 0, 1, 3},
               {"1f1b-v", 2, 0, 1, 3},      {"dualpipev", 2, 0, 1, 3},     {"hanayo", 4, 0, 1, 3},
               {"bfs", 2, 0, 25, 25},       {"interleaved", 2, 32, 27, 27}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    Sched *sched = make(&arena, cases[i].name, 8, cases[i].chunks, 32, cases[i].group);
    SchedReport *report = check(&arena, lower(&arena, sched, NULL));
    int most = 0;
    for (int k = 0; k < report->depths; k++)
      if (report->depth[k].depth > most) most = report->depth[k].depth;
    ck_assert_msg(most >= cases[i].least && most <= cases[i].most, "%s: %d", cases[i].name, most);
  }
}
END_TEST

// ---- names and sizes -------------------------------------------------------------------------

START_TEST(names_and_aliases_are_found_in_any_case) {
  ck_assert_str_eq(sched_find("GPipe")->name, "gpipe");
  ck_assert_str_eq(sched_find("1F1B")->name, "1f1b");
  ck_assert_str_eq(sched_find("Interleaved1F1B")->name, "interleaved");
  ck_assert_str_eq(sched_find("LoopedBFS")->name, "bfs");
  ck_assert_str_eq(sched_find("interleavedzerobubble")->name, "zb-h1");
  ck_assert_str_eq(sched_find("ZB1P")->name, "zb-h1");
  ck_assert_str_eq(sched_find("ZBVZeroBubble")->name, "zbv");
  ck_assert_str_eq(sched_find("DualPipeV")->name, "dualpipev");
  ck_assert_ptr_null(sched_find(""));
  ck_assert_ptr_null(sched_find("1f1"));
  ck_assert_str_eq(sched_nearest("1f1"), "1f1b");
  ck_assert_str_eq(sched_nearest("interleavd"), "interleaved");
  ck_assert_ptr_null(sched_nearest("foo"));
  ck_assert_ptr_null(sched_nearest("/etc/passwd"));
}
END_TEST

static void refuses(const char *name, SchedCase sizes, const char *words) {
  Sched *sched = NULL;
  ck_assert_int_eq(sched_generate(&arena, &sched, sched_find(name), &sizes), ST_EVALUE);
  ck_assert_msg(strstr(arena.message, words) != NULL, "\"%s\" without \"%s\"", arena.message,
                words);
  ck_assert_ptr_null(sched);
}

START_TEST(sizes_that_a_schedule_does_not_allow_are_refused_with_the_valid_ones) {
  refuses("1f1b", (SchedCase){.ranks = 4, .chunks = 2, .mbs = 4}, "exactly 1 stage a rank, not 2");
  refuses("zbv", (SchedCase){.ranks = 4, .chunks = 1, .mbs = 4}, "exactly 2 stages a rank, not 1");
  refuses("hanayo", (SchedCase){.ranks = 4, .chunks = 3, .mbs = 4}, "2, 4, 6, ... stages");
  refuses("1f1b", (SchedCase){.ranks = 0, .mbs = 4}, "0 ranks");
  refuses("1f1b", (SchedCase){.ranks = 4, .mbs = 0}, "0 microbatches");
  refuses("1f1b", (SchedCase){.ranks = 4, .mbs = 1 << 30}, "microbatches");
  refuses("1f1b", (SchedCase){.ranks = 4, .mbs = 4, .group = 2}, "only interleaved has groups");
  refuses("interleaved", (SchedCase){.ranks = 4, .mbs = 4, .group = -2}, "must be 1 or more");
}
END_TEST

// ---- memory ----------------------------------------------------------------------------------

// All steps in a fixed block of memory; the status of the first that fails.
static Status all_steps(char *block, size_t bytes, const char *name) {
  SchedArena fixed = {.at = block, .left = bytes};
  SchedCase sizes = {.ranks = 3, .mbs = 5};
  SchedCosts costs = sched_costs(1, 1, 1);
  Sched *sched, *lowered;
  SchedSim *sim;
  SchedReport *report;
  SchedLink *path;
  int count;
  TRY(sched_generate(&fixed, &sched, sched_find(name), &sizes));
  TRY(sched_lower(&fixed, &lowered, sched, &costs));
  TRY(sched_check(&fixed, &report, lowered));
  TRY(sched_simulate(&fixed, &sim, lowered, &costs));
  TRY(sched_critical_path(&fixed, &path, &count, lowered, sim));
  ck_assert_int_eq(report->broken, 0);
  return ST_OK;
}

START_TEST(a_caller_s_block_is_enough_and_a_short_one_is_an_error) {
  enum { ROOM = 1 << 20 };
  static const char *const names[] = {"1f1b", "interleaved", "v-half", "dualpipev", "hanayo"};
  for (int i = 0; i < 5; i++) {
    bool was_enough = false;
    for (size_t bytes = 0; bytes < ROOM; bytes += 1 + bytes / 64) {
      char *block = malloc(bytes + 1); // exactly as large as said: sanitizers see a step beyond
      Status status = all_steps(block, bytes, names[i]);
      free(block);
      ck_assert_int_eq(status, was_enough || status == ST_OK ? ST_OK : ST_ENOMEM);
      was_enough = status == ST_OK;
    }
    ck_assert(was_enough);
  }
}
END_TEST

Suite *sched_suite(void);
Suite *sched_suite(void) {
  Suite *suite = suite_create("sched");
  TCase *grid = tcase_create("grid");
  tcase_set_timeout(grid, 100);
  tcase_add_test(grid, every_schedule_is_valid_before_and_after_lowering);
  tcase_add_test(grid, live_activations_equal_the_formula);
  tcase_add_test(grid, bubbles_equal_the_formulas);
  tcase_add_test(grid, warm_ups_and_lags_are_as_documented);
  tcase_add_test(grid, a_group_of_n_keeps_what_the_formula_says);
  tcase_add_test(grid, an_independent_simulator_agrees);
  tcase_add_test(grid, the_critical_path_accounts_for_the_whole_makespan);
  tcase_add_test(grid, controllable_memory_has_the_listed_bubbles);
  tcase_add_test(grid, a_group_is_good_if_it_divides_m_or_leaves_a_rest_of_p);
  suite_add_tcase(suite, grid);
  TCase *tcase = tcase_create("single");
  tcase_add_checked_fixture(tcase, open_arena, close_arena);
  tcase_add_test(tcase, hanayo_grows_with_m_and_loses_to_1f1b);
  tcase_add_test(tcase, dualpipev_without_overlap_has_half_the_bubble_and_the_same_peak);
  tcase_add_test(tcase, a_merge_that_holds_the_gradient_back_breaks_zbv);
  tcase_add_test(tcase, the_latency_table_is_reproduced);
  tcase_add_test(tcase, the_default_groups_are_balanced_and_m_below_p_is_one_group);
  tcase_add_test(tcase, costs_by_stage_and_microbatch_decide_where_time_goes);
  tcase_add_test(tcase, a_price_function_decides_alone);
  tcase_add_test(tcase, a_channel_of_finite_bandwidth_sends_one_message_at_a_time);
  tcase_add_test(tcase, a_pair_waits_for_both_its_inputs);
  tcase_add_test(tcase, in_a_lowered_list_a_message_leaves_with_its_send);
  tcase_add_test(tcase, hanayo_leaves_a_place_for_every_deeper_chunk);
  tcase_add_test(tcase, live_bytes_follow_the_formula);
  tcase_add_test(tcase, a_measured_step_has_the_figures_of_the_same_step_simulated);
  tcase_add_test(tcase, receives_posted_ahead_are_as_many_as_documented);
  tcase_add_test(tcase, names_and_aliases_are_found_in_any_case);
  tcase_add_test(tcase, sizes_that_a_schedule_does_not_allow_are_refused_with_the_valid_ones);
  tcase_add_test(tcase, a_caller_s_block_is_enough_and_a_short_one_is_an_error);
  suite_add_tcase(suite, tcase);
  return suite;
}
