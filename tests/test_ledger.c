// test_ledger - the bubble ledger on made-up steps: what was injected is what it names.
//
// The steps come from a small machine of its own: ranks run lowered lists in order, every action
// and every message of every link takes the time it is given.
#include "parallel/ledger.h"

#include "core/rng.h"
#include "tests/sched_common.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 4, MBS = 12 };

static const struct {
  const char *name;
  int chunks;
} known[] = {{"gpipe", 1},  {"1f1b", 1},      {"eager-1f1b", 1}, {"interleaved", 2}, {"bfs", 2},
             {"zb-h1", 1},  {"zb-h2", 1},     {"zbv", 2},        {"v-half", 2},      {"v-min", 2},
             {"1f1b-v", 2}, {"dualpipev", 2}, {"hanayo", 4}};
enum { KNOWN = sizeof known / sizeof *known };

// ---- the machine -----------------------------------------------------------------------------

typedef struct Machine {
  double slow[RANKS];           // factor of all actions of a rank
  double delay[RANKS][RANKS];   // of each message
  double overhead[RANKS];       // idle before each compute action, inputs there or not
  int late_rank, late_index;    // this action takes late_by longer; rank -1: none
  double late_by, noise, start; // noise: times vary up to this share; start: of the clock
} Machine;

typedef struct Step {
  const Sched *sched;
  int64_t first[RANKS + 1];
  SchedSpan *span;
  LedgerMessage *message; // of compute actions
  double *sent, *arrived; // of RECVs
} Step;

static double time_of(const Machine *machine, const Sched *sched, int rank, int index) {
  Action action = sched->row[rank].action[index];
  double time = action.kind == ACTION_F   ? 1
                : action.kind == ACTION_I ? 1.25
                : action.kind == ACTION_W ? 0.75
                : action.kind == ACTION_B ? 2
                                          : 0;
  time *= machine->slow[rank] / sched->chunks;
  if (rank == machine->late_rank && index == machine->late_index) time += machine->late_by;
  return time *
         (1 + machine->noise * rng_uniform(rng_key(3, "noise"), (int64_t)rank * 100000 + index));
}

// The RECV of a SEND.
static bool find_recv(const Sched *sched, Action send, int *rank, int *index) {
  *rank = sched->holder[send.peer];
  for (*index = 0; *index < sched->row[*rank].count; ++*index) {
    Action a = sched->row[*rank].action[*index];
    bool is_pair = (send.kind == ACTION_SEND_F) == (a.kind == ACTION_RECV_F);
    if ((action_properties(a.kind) & RECEIVES) && is_pair && a.stage == send.peer &&
        a.peer == send.stage && a.mb == send.mb)
      return true;
  }
  return false;
}

// When the inputs of a compute action are there, the last one noted; infinity: not yet.
static double inputs_at(const Step *step, const bool *has_arrived, int rank, Action action,
                        LedgerMessage *last) {
  bool wants_f = action.kind == ACTION_F;
  bool wants_b = action.kind == ACTION_I || action.kind == ACTION_B;
  double latest = 0;
  for (int i = 0; i < step->sched->row[rank].count; i++) {
    Action a = step->sched->row[rank].action[i];
    bool is_input = (wants_f && a.kind == ACTION_RECV_F) || (wants_b && a.kind == ACTION_RECV_B);
    if (!is_input || a.stage != action.stage || a.mb != action.mb) continue;
    int64_t at = step->first[rank] + i;
    if (!has_arrived[at]) return HUGE_VAL;
    if (step->arrived[at] < latest) continue;
    latest = step->arrived[at];
    *last = (LedgerMessage){a.peer, step->sent[at], latest};
  }
  return latest;
}

static Step run(SchedArena *arena, const Sched *sched, const Machine *machine) {
  Step step = {.sched = sched};
  for (int r = 0; r < RANKS; r++) step.first[r + 1] = step.first[r] + sched->row[r].count;
  size_t n = (size_t)step.first[RANKS];
  step.span = sched_alloc(arena, n, sizeof *step.span);
  step.message = sched_alloc(arena, n, sizeof *step.message);
  step.sent = sched_alloc(arena, n, sizeof *step.sent);
  step.arrived = sched_alloc(arena, n, sizeof *step.arrived);
  bool *has_arrived = sched_alloc(arena, n, sizeof *has_arrived);
  int at[RANKS] = {0};
  double clock[RANKS];
  for (int r = 0; r < RANKS; r++) clock[r] = machine->start;
  for (bool moves = true; moves;) {
    moves = false;
    for (int r = 0; r < RANKS; r++) {
      for (; at[r] < sched->row[r].count; at[r]++, moves = true) {
        Action action = sched->row[r].action[at[r]];
        double start = clock[r];
        LedgerMessage last = {.from = -1};
        if (action_resource(action.kind) == USES_COMPUTE) {
          double since = inputs_at(&step, has_arrived, r, action, &last);
          if (since < start) last.from = -1; // it was there
          start = fmax(start, since) + machine->overhead[r];
        }
        if (isinf(start)) break;
        step.message[step.first[r] + at[r]] = last;
        if (action_properties(action.kind) & SENDS) {
          int to, index;
          ck_assert(find_recv(sched, action, &to, &index));
          step.sent[step.first[to] + index] = start;
          step.arrived[step.first[to] + index] = start + machine->delay[r][to];
          has_arrived[step.first[to] + index] = true;
        }
        double end = start + time_of(machine, sched, r, at[r]);
        step.span[step.first[r] + at[r]] = (SchedSpan){start, end, start - clock[r]};
        clock[r] = end;
      }
    }
  }
  for (int r = 0; r < RANKS; r++) ck_assert_int_eq(at[r], sched->row[r].count);
  return step;
}

static Machine quiet(void) { return (Machine){.slow = {1, 1, 1, 1}, .late_rank = -1}; }

// ---- what must hold of any ledger ------------------------------------------------------------

static double cause(const Ledger *ledger, LedgerCause c) {
  double sum = 0;
  for (int r = 0; r < ledger->ranks; r++) sum += ledger->cause[r * LEDGER_CAUSES + c];
  return sum;
}

static double late(const Ledger *ledger, int culprit) {
  double sum = 0;
  for (int r = 0; r < ledger->ranks; r++) sum += ledger->late[r * ledger->ranks + culprit];
  return sum;
}

static const Ledger *ledger_of(SchedArena *arena, const Step *step) {
  Ledger *ledger = NULL;
  Status status = ledger_make(arena, &ledger, step->sched, step->first, step->span, step->message);
  ck_assert_msg(status == ST_OK, "%s", arena->message);
  double begin = HUGE_VAL, end = -HUGE_VAL, lates = 0, links = 0;
  for (int64_t i = 0; i < step->first[RANKS]; i++) {
    if (step->span[i].end <= step->span[i].start) continue;
    begin = fmin(begin, step->span[i].start);
    end = fmax(end, step->span[i].end);
  }
  for (int r = 0; r < RANKS; r++) {
    double busy = 0, sum = 0;
    for (int64_t i = step->first[r]; i < step->first[r + 1]; i++)
      busy += step->span[i].end - step->span[i].start;
    for (int c = 0; c < LEDGER_CAUSES; c++) {
      double time = ledger->cause[r * LEDGER_CAUSES + c];
      ck_assert_msg(time >= -1e-12, "rank %d, %s: %g", r, ledger_cause((LedgerCause)c), time);
      sum += time;
    }
    ck_assert_double_eq_tol(ledger->busy[r], busy, 1e-9);
    ck_assert_double_eq_tol(ledger->idle[r], end - begin - busy, 1e-9);
    ck_assert_double_eq_tol(sum, ledger->idle[r], 1e-9);
    lates += late(ledger, r);
    for (int to = 0; to < RANKS; to++) links += ledger->link[r * RANKS + to];
  }
  ck_assert_double_eq_tol(lates, cause(ledger, LEDGER_LATE), 1e-9);
  ck_assert_double_eq_tol(links, cause(ledger, LEDGER_LINK), 1e-9);
  return ledger;
}

// ---- injected --------------------------------------------------------------------------------

typedef void (*Visit)(SchedArena *arena, const char *name, const Sched *sched);

static void each_known(Visit visit) {
  for (int i = 0; i < KNOWN; i++) {
    SchedArena arena;
    sched_heap_open(&arena);
    SchedCosts costs = sched_costs(1, 1.25, 0.75);
    Sched *sched = make(&arena, known[i].name, RANKS, known[i].chunks, MBS, 0);
    visit(&arena, known[i].name, lower(&arena, sched, &costs));
    sched_heap_close(&arena);
  }
}

static void undisturbed(SchedArena *arena, const char *name, const Sched *sched) {
  Machine machine = quiet();
  machine.start = 1000;
  Step step = run(arena, sched, &machine);
  const Ledger *ledger = ledger_of(arena, &step);
  for (int c = LEDGER_LATE; c < LEDGER_CAUSES; c++)
    ck_assert_msg(cause(ledger, (LedgerCause)c) < 1e-9, "%s: %s", name,
                  ledger_cause((LedgerCause)c));
  ck_assert_double_gt(cause(ledger, LEDGER_WARM_UP), 1);
  ck_assert_double_gt(cause(ledger, LEDGER_COOL_DOWN), 1);
  ck_assert_int_eq(ledger->latest, -1);
  // 1f1b: rank r waits r(F) for its first input, and (p-1-r)(F+B) and rB are the rest of the fill
  // and the drain: (p-1)(F+B) in all, none of it between.
  if (strcmp(name, "1f1b") != 0) return;
  ck_assert_double_lt(cause(ledger, LEDGER_ORDER), 1e-9);
  for (int r = 0; r < RANKS; r++) ck_assert_double_eq_tol(ledger->idle[r], 9, 1e-9);
}

START_TEST(without_disturbance_all_idle_time_is_the_schedule_s_own) { each_known(undisturbed); }
END_TEST

static void slow_rank(SchedArena *arena, const char *name, const Sched *sched) {
  for (int slow = 0; slow < RANKS; slow++) {
    Machine machine = quiet();
    machine.slow[slow] = 1.3;
    Step step = run(arena, sched, &machine);
    const Ledger *ledger = ledger_of(arena, &step);
    ck_assert_msg(ledger->latest == slow, "%s: rank %d was slow, rank %d is named", name, slow,
                  ledger->latest);
    for (int r = 0; r < RANKS; r++) {
      if (r == slow) continue;
      ck_assert_msg(late(ledger, r) < 0.02 * late(ledger, slow),
                    "%s: rank %d was slow (%g), rank "
                    "%d is blamed for %g",
                    name, slow, late(ledger, slow), r, late(ledger, r));
    }
    ck_assert_double_lt(cause(ledger, LEDGER_LINK) + cause(ledger, LEDGER_OWN), 1e-9);
  }
}

START_TEST(a_slow_rank_is_named_and_no_other) { each_known(slow_rank); }
END_TEST

static void slow_link(SchedArena *arena, const char *name, const Sched *sched) {
  for (int from = 0; from < RANKS; from++) {
    for (int to = from - 1; to <= from + 1; to += 2) {
      if (to < 0 || to >= RANKS) continue;
      Machine machine = quiet();
      machine.delay[from][to] = 0.4;
      Step step = run(arena, sched, &machine);
      const Ledger *ledger = ledger_of(arena, &step);
      double link = cause(ledger, LEDGER_LINK), all = link + cause(ledger, LEDGER_LATE);
      ck_assert_double_gt(link, 0);
      ck_assert_double_eq_tol(ledger->link[from * RANKS + to], link, 1e-9);
      ck_assert_msg(link > 0.98 * all, "%s: the link %d to %d was slow: %g by links, %g by ranks",
                    name, from, to, link, all - link);
    }
  }
}

START_TEST(a_slow_link_is_named_and_no_rank) { each_known(slow_link); }
END_TEST

static void one_delay(SchedArena *arena, const char *name, const Sched *sched) {
  for (int late_rank = 0; late_rank < RANKS; late_rank++) {
    Machine machine = quiet();
    const SchedRow *row = &sched->row[late_rank];
    machine.late_rank = late_rank;
    machine.late_by = 10;
    machine.late_index = row->count / 3;
    while (action_resource(row->action[machine.late_index].kind) != USES_COMPUTE ||
           row->action[machine.late_index].kind == ACTION_W)
      machine.late_index++;
    Step step = run(arena, sched, &machine);
    const Ledger *ledger = ledger_of(arena, &step);
    ck_assert_msg(ledger->latest == late_rank, "%s: rank %d was late, rank %d is named", name,
                  late_rank, ledger->latest);
    ck_assert_double_gt(ledger->lateness, 10); // the bubble takes some of it up
    ck_assert_double_gt(ledger->lateness, 0.98 * cause(ledger, LEDGER_LATE));
  }
}

START_TEST(one_late_action_is_charged_to_its_rank) { each_known(one_delay); }
END_TEST

static void slow_to_begin(SchedArena *arena, const char *name, const Sched *sched) {
  Machine machine = quiet();
  machine.overhead[2] = 0.2;
  Step step = run(arena, sched, &machine);
  const Ledger *ledger = ledger_of(arena, &step);
  int n = 0;
  for (int i = 0; i < sched->row[2].count; i++)
    n += action_resource(sched->row[2].action[i].kind) == USES_COMPUTE;
  ck_assert_msg(fabs(ledger->cause[2 * LEDGER_CAUSES + LEDGER_OWN] - 0.2 * n) < 1e-9,
                "%s: %g of %g", name, ledger->cause[2 * LEDGER_CAUSES + LEDGER_OWN], 0.2 * n);
  ck_assert_int_eq(ledger->latest, 2);
  ck_assert_double_lt(cause(ledger, LEDGER_LINK), 1e-9);
}

START_TEST(a_rank_that_begins_late_has_its_own_cause_and_is_late_for_others) {
  each_known(slow_to_begin);
}
END_TEST

static void all_at_once(SchedArena *arena, const char *name, const Sched *sched) {
  (void)name;
  for (int k = 1; k <= 6; k++) {
    Machine machine = quiet();
    machine.slow[k % RANKS] = 1 + 0.1 * k;
    machine.noise = 0.3 * (k % 3);
    machine.overhead[k % 3] = 0.05 * k;
    for (int a = 0; a < RANKS; a++)
      for (int b = 0; b < RANKS; b++) machine.delay[a][b] = 0.03 * ((a + 2 * b + k) % 5);
    Step step = run(arena, sched, &machine);
    ledger_of(arena, &step); // the sums
  }
}

START_TEST(the_sums_hold_under_any_disturbance) { each_known(all_at_once); }
END_TEST

START_TEST(reductions_that_wait_are_barriers) {
  SchedArena arena;
  static const int tied[] = {0, 3};
  sched_heap_open(&arena);
  Sched *sched = make(&arena, "1f1b", RANKS, 1, MBS, 0);
  ck_assert_int_eq(sched_add_tied(sched, tied, 2), ST_OK);
  const Sched *lowered = lower(&arena, sched, NULL);
  SchedCosts costs = sched_costs(1, 1, 1);
  costs.reduce_tied = 0.5;
  SchedSim *sim = simulate(&arena, lowered, &costs);
  Ledger *ledger;
  ck_assert_int_eq(ledger_make(&arena, &ledger, lowered, sim->first, sim->span, NULL), ST_OK);
  // Rank 3 has its last backward three backwards before rank 0, and meets it there.
  ck_assert_double_eq_tol(ledger->cause[3 * LEDGER_CAUSES + LEDGER_BARRIER], 6, 1e-9);
  ck_assert_double_lt(cause(ledger, LEDGER_LATE) + cause(ledger, LEDGER_LINK), 1e-9);
  // The same where the waiting is inside of the span, as for whoever calls a collective.
  for (int r = 0; r < RANKS; r++) {
    SchedSpan *row = sim->span + sim->first[r];
    for (int i = 1; i < lowered->row[r].count; i++)
      if (lowered->row[r].action[i].kind == ACTION_REDUCE_TIED) row[i].start = row[i - 1].end;
  }
  Ledger *inside;
  ck_assert_int_eq(ledger_make(&arena, &inside, lowered, sim->first, sim->span, NULL), ST_OK);
  for (int i = 0; i < RANKS * LEDGER_CAUSES; i++)
    ck_assert_double_eq_tol(inside->cause[i], ledger->cause[i], 1e-9);
  for (int r = 0; r < RANKS; r++) ck_assert_double_eq_tol(inside->busy[r], ledger->busy[r], 1e-9);
  sched_heap_close(&arena);
}
END_TEST

START_TEST(latency_of_all_links_is_no_rank_s_fault) {
  SchedArena arena;
  sched_heap_open(&arena);
  const Sched *sched = lower(&arena, make(&arena, "1f1b", RANKS, 1, MBS, 0), NULL);
  Machine machine = quiet();
  for (int a = 0; a < RANKS; a++)
    for (int b = 0; b < RANKS; b++) machine.delay[a][b] = 0.25;
  Step step = run(&arena, sched, &machine);
  const Ledger *ledger = ledger_of(&arena, &step);
  ck_assert_double_gt(cause(ledger, LEDGER_LINK), 1);
  ck_assert_double_lt(cause(ledger, LEDGER_LATE), 1e-9);
  sched_heap_close(&arena);
}
END_TEST

// ---- over steps, words, errors ---------------------------------------------------------------

START_TEST(a_rank_that_stays_slow_is_told_from_one_that_was) {
  SchedArena arena;
  sched_heap_open(&arena);
  const Sched *sched = lower(&arena, make(&arena, "zb-h1", RANKS, 1, MBS, 0), NULL);
  LedgerWatch watch = {0};
  for (int k = 0; k < 12; k++) {
    Machine machine = quiet();
    bool is_slow = k != 2 && k < 10;
    machine.slow[is_slow ? 1 : 3] = k == 11 ? 1.0001 : 1.2;
    Step step = run(&arena, sched, &machine);
    int slow = ledger_watch(&watch, ledger_of(&arena, &step), 4, 0.02);
    ck_assert_int_eq(slow, k >= 6 && k < 10 ? 1 : -1);
  }
  Machine machine = quiet();
  Step step = run(&arena, sched, &machine);
  ck_assert_int_eq(ledger_watch(&watch, ledger_of(&arena, &step), 1, 0), -1);
  ck_assert_int_eq(watch.steps, 0);
  sched_heap_close(&arena);
}
END_TEST

START_TEST(the_words_name_causes_and_the_latest) {
  SchedArena arena;
  sched_heap_open(&arena);
  const Sched *sched = lower(&arena, make(&arena, "1f1b", RANKS, 1, MBS, 0), NULL);
  Machine machine = quiet();
  machine.slow[2] = 1.5;
  Step step = run(&arena, sched, &machine);
  SchedText text = {.arena = &arena};
  SchedOut out = sched_text_out(&text);
  ledger_print(&out, ledger_of(&arena, &step));
  ck_assert_msg(strstr(text.text, "late_peer") && strstr(text.text, "rank 3") &&
                    strstr(text.text, "the latest is rank 2: "),
                "%s", text.text);
  sched_heap_close(&arena);
}
END_TEST

START_TEST(a_short_block_of_memory_is_an_error) {
  enum { ROOM = 1 << 20 };
  SchedArena arena;
  sched_heap_open(&arena);
  const Sched *sched = lower(&arena, make(&arena, "zbv", RANKS, 2, MBS, 0), NULL);
  Machine machine = quiet();
  Step step = run(&arena, sched, &machine);
  bool was_enough = false;
  for (size_t bytes = 0; bytes < ROOM; bytes += 1 + bytes / 32) {
    char *block = malloc(bytes + 1);
    SchedArena fixed = {.at = block, .left = bytes};
    Ledger *ledger;
    Status status = ledger_make(&fixed, &ledger, sched, step.first, step.span, step.message);
    free(block);
    ck_assert_int_eq(status, was_enough || status == ST_OK ? ST_OK : ST_ENOMEM);
    was_enough = status == ST_OK;
  }
  ck_assert(was_enough);
  sched_heap_close(&arena);
}
END_TEST

START_TEST(what_is_no_step_is_refused) {
  SchedArena arena;
  Ledger *ledger = NULL;
  sched_heap_open(&arena);
  const Sched *sched = make(&arena, "1f1b", RANKS, 1, MBS, 0);
  Machine machine = quiet();
  const Sched *lowered = lower(&arena, sched, NULL);
  Step step = run(&arena, lowered, &machine);
  ck_assert_int_eq(ledger_make(&arena, &ledger, sched, step.first, step.span, NULL), ST_EVALUE);
  step.span[3].end = step.span[3].start - 1;
  ck_assert_int_eq(ledger_make(&arena, &ledger, lowered, step.first, step.span, NULL), ST_EVALUE);
  ck_assert_msg(strstr(arena.message, "rank 0, action 3") != NULL, "%s", arena.message);
  ck_assert_ptr_null(ledger);
  sched_heap_close(&arena);
}
END_TEST

Suite *ledger_suite(void);
Suite *ledger_suite(void) {
  Suite *suite = suite_create("ledger");
  TCase *tcase = tcase_create("ledger");
  tcase_set_timeout(tcase, 60);
  tcase_add_test(tcase, without_disturbance_all_idle_time_is_the_schedule_s_own);
  tcase_add_test(tcase, a_slow_rank_is_named_and_no_other);
  tcase_add_test(tcase, a_slow_link_is_named_and_no_rank);
  tcase_add_test(tcase, one_late_action_is_charged_to_its_rank);
  tcase_add_test(tcase, a_rank_that_begins_late_has_its_own_cause_and_is_late_for_others);
  tcase_add_test(tcase, the_sums_hold_under_any_disturbance);
  tcase_add_test(tcase, reductions_that_wait_are_barriers);
  tcase_add_test(tcase, latency_of_all_links_is_no_rank_s_fault);
  tcase_add_test(tcase, a_rank_that_stays_slow_is_told_from_one_that_was);
  tcase_add_test(tcase, the_words_name_causes_and_the_latest);
  tcase_add_test(tcase, a_short_block_of_memory_is_an_error);
  tcase_add_test(tcase, what_is_no_step_is_refused);
  suite_add_tcase(suite, tcase);
  return suite;
}
