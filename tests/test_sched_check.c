// test_sched_check - the checker: each invariant with lists that break it; lowering with edges that
// skip stages and with tied weights.
#include "tests/sched_common.h"

#include <stdlib.h>
#include <string.h>

static SchedArena arena;
static void open_arena(void) { sched_heap_open(&arena); }
static void close_arena(void) { sched_heap_close(&arena); }

// A schedule from rows of text, cells separated by blanks.
static Sched *from_rows(int ranks, int chunks, int mbs, SchedPlacement placement,
                        const char *const *rows) {
  Sched *sched;
  ck_assert_int_eq(sched_new(&arena, &sched, "mine", ranks, chunks, mbs, placement, NULL), ST_OK);
  for (int rank = 0; rank < ranks; rank++) {
    for (const char *at = rows[rank]; *at; at += strspn(at, " ")) {
      size_t length = strcspn(at, " ");
      Status status = sched_push_text(sched, rank, at, length);
      ck_assert_msg(status == ST_OK, "%s", arena.message);
      at += length;
    }
  }
  return sched;
}

// The schedule breaks an invariant at a place (index -1: the end of the row).
static void breaks(const Sched *sched, int invariant, int rank, int index, const char *words) {
  SchedReport *report = check(&arena, sched);
  ck_assert_msg(report->broken == invariant, "broken %d, not %d: %s", report->broken, invariant,
                report->message);
  ck_assert_msg(report->at.rank == rank && report->at.index == index, "at %d.%d: %s",
                report->at.rank, report->at.index, report->message);
  ck_assert_msg(strstr(report->message, words) != NULL, "\"%s\" without \"%s\"", report->message,
                words);
}

static void breaks_rows(const char *row0, const char *row1, int invariant, int rank, int index,
                        const char *words) {
  const char *rows[] = {row0, row1};
  breaks(from_rows(2, 1, 2, PLACE_LOOP, rows), invariant, rank, index, words);
}

#define GOOD0 "0F0 0F1 0B0 0B1"
#define GOOD1 "1F0 1B0 1F1 1I1 1W1"

START_TEST(a_valid_list_of_one_s_own_passes) {
  const char *rows[] = {GOOD0, GOOD1};
  SchedReport *report = check(&arena, from_rows(2, 1, 2, PLACE_LOOP, rows));
  ck_assert_int_eq(report->broken, 0);
  ck_assert(!report->is_to_rounding);
  ck_assert_int_eq(report->peak[0], 2);
}
END_TEST

START_TEST(invariant_1_every_stage_and_mb_has_one_f_and_one_b_or_i_and_w) {
  breaks_rows("0F0 0F1 0B0", GOOD1, 1, 0, -1, "0B1 is missing on rank 0");
  breaks_rows("0F0 0B0 0B1", GOOD1, 1, 0, -1, "0F1 is missing on rank 0");
  breaks_rows(GOOD0, "1F0 1B0 1F1 1I1", 1, 1, -1, "1W1 is missing on rank 1");
  breaks_rows(GOOD0, "1F0 1B0 1F1 1W1", 1, 1, -1, "1I1 is missing on rank 1");
  breaks_rows("0F0 0F1 0F0 0B0 0B1", GOOD1, 1, 0, 2, "0F0 runs twice on rank 0");
  breaks_rows("0F0 0F1 0B0 0B1 0W1", GOOD1, 1, 0, 4, "0W1 on rank 0 does what 0B1 did");
  breaks_rows("0F0 0F1 0I0 0B0 0B1", GOOD1, 1, 0, 3, "0B0 on rank 0 does what 0I0 did");
  breaks_rows(GOOD0, "1F0 1B0 1F1 1W1 1B1", 1, 1, 4, "1B1 on rank 1 does what 1W1 did");
}
END_TEST

START_TEST(invariant_1_a_bracket_stands_before_an_f_and_a_b) {
  const char *rows[] = {GOOD0, GOOD1};
  Sched *sched = from_rows(2, 1, 2, PLACE_LOOP, rows);
  ck_assert_int_eq(sched_push(sched, 1, (Action){ACTION_OVERLAP_F_B, 1, 0, -1}), ST_OK);
  breaks(sched, 1, 1, 5, "does not stand before an F and a B");
}
END_TEST

START_TEST(invariant_2_f_before_i_or_b_before_w) {
  breaks_rows("0F0 0B1 0F1 0B0", GOOD1, 2, 0, 1, "0B1 stands before 0F1");
  breaks_rows(GOOD0, "1F0 1B0 1F1 1W1 1I1", 2, 1, 3, "1W1 stands before 1I1");
  breaks_rows(GOOD0, "1F0 1B0 1I1 1F1 1W1", 2, 1, 2, "1I1 stands before 1F1");
}
END_TEST

START_TEST(invariant_4_a_cycle_between_ranks_is_found) {
  breaks_rows("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0", 4, 0, 1, "deadlock");
  SchedReport *report =
      check(&arena,
            from_rows(2, 1, 2, PLACE_LOOP, (const char *[]){"0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"}));
  ck_assert_int_eq(report->cycle_length, 2);
  for (int i = 0; i < 2; i++) { // each waits for something that the other has behind its place
    SchedPlace next = report->cycle[1 - i], wanted = report->wanted[i];
    ck_assert_int_eq(wanted.rank, next.rank);
    ck_assert_int_gt(wanted.index, next.index);
  }
}
END_TEST

START_TEST(invariant_4_a_turn_in_the_wrong_order_waits_for_itself) {
  const char *rows[] = {"0F0 1B0 0B0 1F0"};
  breaks(from_rows(1, 2, 1, PLACE_V, rows), 2, 0, 1, "1B0 stands before 1F0");
  const char *turned[] = {"1F0 0F0 1B0 0B0"};
  Sched *sched = from_rows(1, 2, 1, PLACE_V, turned);
  breaks(sched, 4, 0, 0, "rank 0 stands at 1F0, which waits for 0F0");
  ck_assert_int_eq(check(&arena, sched)->cycle_length, 1);
}
END_TEST

START_TEST(invariant_5_no_more_live_activations_than_declared) {
  const char *rows[] = {GOOD0, GOOD1};
  Sched *sched = from_rows(2, 1, 2, PLACE_LOOP, rows);
  ck_assert_int_eq(sched_declare(sched, 0, 2), ST_OK);
  ck_assert_int_eq(check(&arena, sched)->broken, 0);
  ck_assert_int_eq(sched_declare(sched, 0, 1), ST_OK);
  breaks(sched, 5, 0, 1, "0F1 is live activation 2 of rank 0, which declares 1");
}
END_TEST

START_TEST(invariant_7_each_action_runs_where_its_stage_is_held) {
  breaks_rows("0F0 0F1 1F0 0B0 0B1", GOOD1, 7, 0, 2, "rank 1 holds stage 1");
  breaks_rows("0F0 0F1 2F0 0B0 0B1", GOOD1, 7, 0, 2, "a stage that is not there: the last is 1");
  breaks_rows("0F0 0F1 0F2 0B0 0B1", GOOD1, 7, 0, 2, "a microbatch that is not there");
}
END_TEST

START_TEST(invariant_8_is_a_warning) {
  const char *rows[] = {"0F0 0F1 0B0 0B1", "1F0 1F1 1I0 1I1 1W1 1W0"};
  SchedReport *report = check(&arena, from_rows(2, 1, 2, PLACE_LOOP, rows));
  ck_assert_int_eq(report->broken, 0);
  ck_assert(report->is_to_rounding);
  ck_assert(report->at.rank == 1 && report->at.index == 5);
  const char *backwards[] = {"0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"};
  report = check(&arena, from_rows(2, 1, 2, PLACE_LOOP, backwards));
  ck_assert(report->broken == 0 && report->is_to_rounding);
}
END_TEST

// ---- lowered lists ---------------------------------------------------------------------------

static Sched *lowered(const char *name, int ranks, int chunks, int mbs) {
  return lower(&arena, make(&arena, name, ranks, chunks, mbs, 0), NULL);
}

static int find(const Sched *sched, int rank, const char *text) {
  for (int i = 0; i < sched->row[rank].count; i++) {
    SchedText name = {.arena = &arena};
    SchedOut out = sched_text_out(&name);
    sched_print_action(&out, sched->row[rank].action[i]);
    if (strcmp(name.text, text) == 0) return i;
  }
  ck_abort_msg("%s is not on rank %d", text, rank);
  return -1;
}

static void erase(Sched *sched, int rank, int index) {
  SchedRow *row = &sched->row[rank];
  row->count--;
  memmove(row->action + index, row->action + index + 1,
          (size_t)(row->count - index) * sizeof *row->action);
}

// Moves an action to another place of its row.
static void put_at(Sched *sched, int rank, int from, int to) {
  Action action = sched->row[rank].action[from];
  erase(sched, rank, from);
  SchedRow *row = &sched->row[rank];
  memmove(row->action + to + 1, row->action + to, (size_t)(row->count - to) * sizeof *row->action);
  row->action[to] = action;
  row->count++;
}

START_TEST(lowering_puts_each_send_behind_its_compute_and_each_recv_before_its_use) {
  Sched *sched = lowered("1f1b", 2, 1, 2);
  // F1 of rank 0 ends at 2, B0 of rank 1 at 4, F1 of rank 1 at 5, B0 of rank 0 at 6.
  static const char *const rows[] = {
      "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0STEP",
      "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1STEP"};
  for (int rank = 0; rank < 2; rank++) {
    SchedText text = {.arena = &arena};
    SchedOut out = sched_text_out(&text);
    for (int i = 0; i < sched->row[rank].count; i++) {
      if (i > 0) sched_print(&out, " ");
      sched_print_action(&out, sched->row[rank].action[i]);
    }
    ck_assert_str_eq(text.text, rows[rank]);
  }
}
END_TEST

START_TEST(invariant_3_sends_and_receives_match_in_channel_order) {
  Sched *sched = lowered("1f1b", 2, 1, 2);
  erase(sched, 0, find(sched, 0, "0SEND_F1"));
  breaks(sched, 3, 1, find(sched, 1, "1RECV_F1"), "sends nothing where 1RECV_F1 is expected");

  sched = lowered("1f1b", 2, 1, 2);
  erase(sched, 0, find(sched, 0, "0SEND_F1"));
  erase(sched, 1, find(sched, 1, "1RECV_F1"));
  breaks(sched, 3, 1, find(sched, 1, "1F1"), "1RECV_F1, which 1F1 needs, is missing on rank 1");

  sched = lowered("gpipe", 2, 1, 2);
  put_at(sched, 0, find(sched, 0, "0SEND_F0"), find(sched, 0, "0SEND_F1"));
  breaks(sched, 3, 0, find(sched, 0, "0SEND_F1"), "sends 0SEND_F1 where 1RECV_F0 is expected");

  sched = lowered("gpipe", 2, 1, 2);
  put_at(sched, 0, find(sched, 0, "0SEND_F0"), 0);
  breaks(sched, 3, 0, 0, "0SEND_F0 stands before 0F0");

  sched = lowered("gpipe", 2, 1, 2);
  put_at(sched, 1, find(sched, 1, "1RECV_F0"), find(sched, 1, "1F1"));
  breaks(sched, 3, 1, find(sched, 1, "1RECV_F0"), "1RECV_F0 stands behind 1F0");

  sched = lowered("gpipe", 2, 1, 2);
  ck_assert_int_eq(sched_push_text(sched, 0, "0SEND_F0", 8), ST_OK);
  breaks(sched, 3, 0, sched->row[0].count - 1, "0SEND_F0 stands twice on rank 0");

  sched = lowered("gpipe", 2, 1, 2);
  ck_assert_int_eq(sched_push_text(sched, 0, "0SEND_B0", 8), ST_OK);
  breaks(sched, 3, 0, sched->row[0].count - 1, "0SEND_B0 on rank 0 is no message");
  sched = lowered("zbv", 2, 2, 3); // a turn is a hand-over
  ck_assert_int_eq(sched_push_text(sched, 1, "1SEND_F0", 8), ST_OK);
  breaks(sched, 3, 1, sched->row[1].count - 1, "is no message between two ranks");
}
END_TEST

START_TEST(invariant_4_a_send_behind_what_needs_its_answer_is_a_deadlock) {
  Sched *sched = lowered("gpipe", 2, 1, 1);
  put_at(sched, 0, find(sched, 0, "0SEND_F0"), find(sched, 0, "0B0"));
  breaks(sched, 4, 0, find(sched, 0, "0B0"), "stands at 0B0, which waits for 1SEND_B0");
  ck_assert_int_eq(check(&arena, sched)->cycle_length, 2);
}
END_TEST

START_TEST(invariant_6_each_reduction_once_after_all_contributions) {
  Sched *sched = lowered("1f1b", 2, 1, 2);
  erase(sched, 1, find(sched, 1, "1REDUCE_GRAD"));
  erase(sched, 1, find(sched, 1, "1STEP"));
  breaks(sched, 6, 1, -1, "1REDUCE_GRAD is missing on rank 1");

  sched = lowered("1f1b", 2, 1, 2);
  ck_assert_int_eq(sched_push_text(sched, 1, "1REDUCE_GRAD", 12), ST_OK);
  breaks(sched, 6, 1, sched->row[1].count - 1, "1REDUCE_GRAD stands twice");

  sched = lowered("1f1b", 2, 1, 2);
  put_at(sched, 0, find(sched, 0, "0REDUCE_GRAD"), find(sched, 0, "0B1"));
  breaks(sched, 6, 0, find(sched, 0, "0REDUCE_GRAD"), "stands before 0B1, which contributes");

  sched = lowered("1f1b", 2, 1, 2);
  sched->row[0].action[find(sched, 0, "0REDUCE_GRAD")].stage = 1;
  breaks(sched, 6, 0, find(sched, 0, "1REDUCE_GRAD"), "rank 0 does not hold");

  sched = lowered("1f1b", 2, 1, 2);
  put_at(sched, 0, find(sched, 0, "0STEP"), find(sched, 0, "0REDUCE_GRAD"));
  breaks(sched, 6, 0, find(sched, 0, "0STEP"), "before the reduction of its gradients");
}
END_TEST

START_TEST(invariant_6_a_tied_weight_is_reduced_once_on_each_of_its_ranks) {
  static const int holders[] = {0, 3};
  for (int drop = 0; drop < 3; drop++) {
    Sched *sched = make(&arena, "1f1b", 4, 1, 5, 0);
    ck_assert_int_eq(sched_add_tied(sched, holders, 2), ST_OK);
    sched = lower(&arena, sched, NULL);
    SchedReport *report = check(&arena, sched);
    ck_assert_msg(report->broken == 0, "%s", report->message);
    ck_assert_int_gt(find(sched, 3, "3REDUCE_TIED0"), find(sched, 3, "3B4"));
    if (drop == 0) {
      erase(sched, 3, find(sched, 3, "3REDUCE_TIED0"));
      breaks(sched, 6, 3, -1, "tied weight 0 is missing on rank 3");
    } else if (drop == 1) {
      put_at(sched, 0, find(sched, 0, "0REDUCE_TIED0"), find(sched, 0, "0B4"));
      breaks(sched, 6, 0, find(sched, 0, "0REDUCE_TIED0"), "before 0B4");
    } else {
      ck_assert_int_eq(sched_push_text(sched, 1, "1REDUCE_TIED0", 13), ST_OK);
      breaks(sched, 6, 1, sched->row[1].count - 1, "rank 1 does not hold");
    }
  }
}
END_TEST

START_TEST(several_tied_groups_over_any_stages_are_lowered_without_deadlock) {
  static const int first[] = {0, 7}, second[] = {7, 2, 5}, third[] = {3, 4};
  static const char *const names[] = {"zbv", "interleaved", "v-min", "hanayo", "dualpipev"};
  for (int i = 0; i < 5; i++) {
    Sched *sched = make(&arena, names[i], 4, 2, 9, 0);
    ck_assert_int_eq(sched_add_tied(sched, first, 2), ST_OK);
    ck_assert_int_eq(sched_add_tied(sched, second, 3), ST_OK);
    ck_assert_int_eq(sched_add_tied(sched, third, 2), ST_OK);
    Sched *low = lower(&arena, sched, NULL);
    SchedReport *report = check(&arena, low);
    ck_assert_msg(report->broken == 0, "%s: %s", names[i], report->message);
    int count = 0; // one on each rank that holds a group
    for (int rank = 0; rank < 4; rank++)
      for (int k = 0; k < low->row[rank].count; k++)
        count += low->row[rank].action[k].kind == ACTION_REDUCE_TIED;
    int expected = 0;
    for (int group = 0; group < 3; group++) {
      for (int rank = 0; rank < 4; rank++) {
        bool holds = false;
        for (int k = 0; k < sched->tieds; k++)
          holds = holds ||
                  (sched->tied[k].group == group && sched->holder[sched->tied[k].stage] == rank);
        expected += holds;
      }
    }
    ck_assert_int_eq(count, expected);
  }
  static const int twice[] = {1, 1}, beyond[] = {0, 8};
  Sched *sched = make(&arena, "zbv", 4, 2, 9, 0);
  ck_assert_int_eq(sched_add_tied(sched, twice, 2), ST_EVALUE);
  ck_assert_int_eq(sched_add_tied(sched, beyond, 2), ST_EVALUE);
}
END_TEST

START_TEST(crossed_tied_reductions_are_a_deadlock) {
  static const int pair[] = {0, 1};
  Sched *sched = make(&arena, "gpipe", 2, 1, 2, 0);
  ck_assert_int_eq(sched_add_tied(sched, pair, 2), ST_OK);
  ck_assert_int_eq(sched_add_tied(sched, pair, 2), ST_OK);
  sched = lower(&arena, sched, NULL);
  ck_assert_int_eq(check(&arena, sched)->broken, 0);
  put_at(sched, 1, find(sched, 1, "1REDUCE_TIED1"), find(sched, 1, "1REDUCE_TIED0"));
  breaks(sched, 4, 0, find(sched, 0, "0REDUCE_TIED0"), "deadlock");
}
END_TEST

START_TEST(edges_that_skip_stages_are_sent_from_producer_to_consumer) {
  static const char *const names[] = {"1f1b", "zb-h2", "gpipe"};
  for (int i = 0; i < 3; i++) {
    Sched *sched = make(&arena, names[i], 4, 1, 6, 0);
    ck_assert_int_eq(sched_add_edge(sched, 0, 2, true), ST_OK);
    ck_assert_int_eq(sched_add_edge(sched, 0, 3, false), ST_OK);
    ck_assert_int_eq(sched_add_edge(sched, 0, 1, true), ST_EVALUE);
    ck_assert_int_eq(sched_add_edge(sched, 2, 1, true), ST_EVALUE);
    ck_assert_int_eq(sched_add_edge(sched, 0, 2, true), ST_EVALUE);
    ck_assert_int_eq(sched_add_edge(sched, 0, 4, true), ST_EVALUE);
    Sched *low = lower(&arena, sched, NULL);
    SchedReport *report = check(&arena, low);
    ck_assert_msg(report->broken == 0, "%s: %s", names[i], report->message);
    ck_assert_int_lt(find(low, 0, "0F5"), find(low, 0, "0SEND_F5:2"));
    ck_assert_int_lt(find(low, 2, "2RECV_F5:0"), find(low, 2, "2F5"));
    ck_assert_int_lt(find(low, 0, "0RECV_B5:2"), find(low, 0, names[i][0] == 'z' ? "0I5" : "0B5"));
    erase(low, 3, find(low, 3, "3RECV_F5:0"));
    erase(low, 0, find(low, 0, "0SEND_F5:3"));
    breaks(low, 3, 3, find(low, 3, "3F5"), "3RECV_F5:0, which 3F5 needs, is missing");
  }
  Sched *sched = make(&arena, "zbv", 4, 2, 9, 0); // 1 and 6 are both on rank 1: no message
  ck_assert_int_eq(sched_add_edge(sched, 1, 6, true), ST_OK);
  Sched *low = lower(&arena, sched, NULL);
  ck_assert_int_eq(check(&arena, low)->broken, 0);
  for (int i = 0; i < low->row[1].count; i++)
    ck_assert(action_resource(low->row[1].action[i].kind) != USES_LINK ||
              abs(low->row[1].action[i].stage - low->row[1].action[i].peer) == 1);
}
END_TEST

// SEND behind its compute, RECV right before its use, list by list.
static Sched *lower_naively(const Sched *in) {
  Sched *out;
  ck_assert_int_eq(
      sched_new(&arena, &out, in->name, in->ranks, in->chunks, in->mbs, PLACE_GIVEN, in->holder),
      ST_OK);
  for (int rank = 0; rank < in->ranks; rank++) {
    for (int i = 0; i < in->row[rank].count; i++) {
      Action a = in->row[rank].action[i];
      if (a.kind == ACTION_OVERLAP_F_B) continue;
      int does = action_properties(a.kind), last = in->stages - 1;
      int before = does & NEEDS_OUTPUT ? a.stage - 1 : does & NEEDS_GRAD ? a.stage + 1 : -1;
      int after = does & GIVES_OUTPUT ? a.stage + 1 : does & GIVES_GRAD ? a.stage - 1 : -1;
      if (before >= 0 && before <= last && in->holder[before] != rank)
        ck_assert_int_eq(sched_push(out, rank,
                                    (Action){does & NEEDS_OUTPUT ? ACTION_RECV_F : ACTION_RECV_B,
                                             a.stage, a.mb, before}),
                         ST_OK);
      ck_assert_int_eq(sched_push(out, rank, a), ST_OK);
      if (after >= 0 && after <= last && in->holder[after] != rank)
        ck_assert_int_eq(sched_push(out, rank,
                                    (Action){does & GIVES_OUTPUT ? ACTION_SEND_F : ACTION_SEND_B,
                                             a.stage, a.mb, after}),
                         ST_OK);
    }
  }
  for (int stage = 0; stage < in->stages; stage++)
    ck_assert_int_eq(
        sched_push(out, in->holder[stage], (Action){ACTION_REDUCE_GRAD, stage, -1, -1}), ST_OK);
  return out;
}

START_TEST(invariant_4_naive_lowering_deadlocks_under_rendezvous_sends) {
  static const char *const names[] = {"1f1b", "interleaved", "zb-h1", "zbv", "v-half", "dualpipev"};
  for (int i = 0; i < 6; i++) {
    Sched *sched = make(&arena, names[i], 4, 0, 12, 0);
    SchedReport *report = check(&arena, lower_naively(sched));
    ck_assert_msg(report->broken == 4 || report->broken == 3, "%s: %s", names[i], report->message);
    ck_assert_int_eq(check(&arena, lower(&arena, sched, NULL))->broken, 0);
    if (report->broken == 4) ck_assert_int_ge(report->cycle_length, 2);
  }
  breaks(lower_naively(make(&arena, "1f1b", 2, 1, 4, 0)), 4, 0, 3, "deadlock: rank 0 stands at");
}
END_TEST

START_TEST(a_simulation_of_a_broken_list_is_refused) {
  SchedCosts costs = sched_costs(1, 1, 1);
  SchedSim *sim = NULL;
  Sched *out = NULL;
  const char *crossed[] = {"0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"};
  const char *doubled[] = {"0F0 0F0 0B0 0B1", GOOD1};
  const char *missing[] = {"0F0 0B0", GOOD1};
  Sched *sched = from_rows(2, 1, 2, PLACE_LOOP, crossed);
  ck_assert_int_eq(sched_simulate(&arena, &sim, sched, &costs), ST_EVALUE);
  ck_assert_int_eq(sched_lower(&arena, &out, sched, &costs), ST_EVALUE);
  ck_assert_int_eq(sched_simulate(&arena, &sim, from_rows(2, 1, 2, PLACE_LOOP, doubled), &costs),
                   ST_EVALUE);
  ck_assert_int_eq(sched_simulate(&arena, &sim, from_rows(2, 1, 2, PLACE_LOOP, missing), &costs),
                   ST_EVALUE);
  ck_assert(sim == NULL && out == NULL);
  ck_assert_int_eq(sched_lower(&arena, &out, lowered("gpipe", 2, 1, 2), &costs), ST_EVALUE);
}
END_TEST

START_TEST(instant_actions_are_lowered_in_the_right_order) {
  static const char *const names[] = {"1f1b", "zbv", "interleaved"};
  static const double times[][3] = {{0, 1, 0}, {0, 0, 0}, {1, 0, 1}};
  for (int i = 0; i < 9; i++) {
    const double *time = times[i / 3];
    SchedCosts costs = sched_costs(time[0], time[1], time[2]);
    Sched *sched = make(&arena, names[i % 3], 4, 0, 9, 0);
    SchedReport *report = check(&arena, lower(&arena, sched, &costs));
    ck_assert_msg(report->broken == 0, "%s: %s", names[i % 3], report->message);
  }
}
END_TEST

START_TEST(placements_of_one_s_own_are_checked) {
  static const int uneven[] = {0, 0, 0, 1}, beyond[] = {0, 1, 2, 0}, good[] = {1, 0, 0, 1};
  Sched *sched;
  ck_assert_int_eq(sched_new(&arena, &sched, "x", 2, 2, 3, PLACE_GIVEN, uneven), ST_EVALUE);
  ck_assert_ptr_nonnull(strstr(arena.message, "rank 0 holds 3 stages"));
  ck_assert_int_eq(sched_new(&arena, &sched, "x", 2, 2, 3, PLACE_GIVEN, beyond), ST_EVALUE);
  ck_assert_int_eq(sched_new(&arena, &sched, "x", 2, 2, 3, PLACE_GIVEN, good), ST_OK);
}
END_TEST

// ---- what the user sees ----------------------------------------------------------------------

static const char *report_text(const Sched *sched, int width) {
  SchedText text = {.arena = &arena};
  SchedOut out = sched_text_out(&text);
  sched_print_report(&out, sched, check(&arena, sched), width);
  return text.text;
}

START_TEST(the_table_has_an_arrow_at_the_offending_action) {
  const char *rows[] = {"0F0 0F1 0B1 0F2 0B0 0B2", "1F0 1B0 1F1 1B1 1B2 1F2"};
  const char *text = report_text(from_rows(2, 1, 3, PLACE_LOOP, rows), 100);
  ck_assert_str_eq(text, "mine breaks invariant 2: F comes before I or B, and that before W\n"
                         "1B2 stands before 1F2, which it needs\n"
                         "\n"
                         "rank 0    0F0 0F1 0B1 0F2 0B0 0B2 \n"
                         "rank 1    1F0 1B0 1F1 1B1 1B2 1F2 \n"
                         "                          ^ here\n");
}
END_TEST

START_TEST(the_cycle_is_drawn_and_lines_fit_the_width) {
  const char *rows[] = {"0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"};
  const char *text = report_text(from_rows(2, 1, 2, PLACE_LOOP, rows), 100);
  ck_assert_ptr_nonnull(strstr(text, "\n          ") /* the arrow's line */);
  ck_assert_ptr_nonnull(strstr(text, ".-> rank 0 stands at 0B0 (action 1) and waits for 1B0"));
  ck_assert_ptr_nonnull(strstr(text, "`-- rank 1 stands at 1F1 (action 0) and waits for 0F1"));
  Sched *sched = make(&arena, "interleaved", 6, 3, 40, 4);
  text = report_text(sched, 80);
  for (const char *line = strstr(text, "rank 0 "); line && *line != '\n';
       line = strchr(line, '\n') + 1)
    ck_assert_int_le(strcspn(line, "\n"), 84);
}
END_TEST

Suite *sched_check_suite(void);
Suite *sched_check_suite(void) {
  Suite *suite = suite_create("sched_check");
  TCase *tcase = tcase_create("invariants");
  tcase_add_checked_fixture(tcase, open_arena, close_arena);
  tcase_add_test(tcase, a_valid_list_of_one_s_own_passes);
  tcase_add_test(tcase, invariant_1_every_stage_and_mb_has_one_f_and_one_b_or_i_and_w);
  tcase_add_test(tcase, invariant_1_a_bracket_stands_before_an_f_and_a_b);
  tcase_add_test(tcase, invariant_2_f_before_i_or_b_before_w);
  tcase_add_test(tcase, invariant_3_sends_and_receives_match_in_channel_order);
  tcase_add_test(tcase, invariant_4_a_cycle_between_ranks_is_found);
  tcase_add_test(tcase, invariant_4_a_turn_in_the_wrong_order_waits_for_itself);
  tcase_add_test(tcase, invariant_4_naive_lowering_deadlocks_under_rendezvous_sends);
  tcase_add_test(tcase, invariant_4_a_send_behind_what_needs_its_answer_is_a_deadlock);
  tcase_add_test(tcase, invariant_5_no_more_live_activations_than_declared);
  tcase_add_test(tcase, invariant_6_each_reduction_once_after_all_contributions);
  tcase_add_test(tcase, invariant_6_a_tied_weight_is_reduced_once_on_each_of_its_ranks);
  tcase_add_test(tcase, invariant_7_each_action_runs_where_its_stage_is_held);
  tcase_add_test(tcase, invariant_8_is_a_warning);
  suite_add_tcase(suite, tcase);
  tcase = tcase_create("lowering");
  tcase_add_checked_fixture(tcase, open_arena, close_arena);
  tcase_add_test(tcase, lowering_puts_each_send_behind_its_compute_and_each_recv_before_its_use);
  tcase_add_test(tcase, several_tied_groups_over_any_stages_are_lowered_without_deadlock);
  tcase_add_test(tcase, crossed_tied_reductions_are_a_deadlock);
  tcase_add_test(tcase, edges_that_skip_stages_are_sent_from_producer_to_consumer);
  tcase_add_test(tcase, a_simulation_of_a_broken_list_is_refused);
  tcase_add_test(tcase, instant_actions_are_lowered_in_the_right_order);
  tcase_add_test(tcase, placements_of_one_s_own_are_checked);
  suite_add_tcase(suite, tcase);
  tcase = tcase_create("report");
  tcase_add_checked_fixture(tcase, open_arena, close_arena);
  tcase_add_test(tcase, the_table_has_an_arrow_at_the_offending_action);
  tcase_add_test(tcase, the_cycle_is_drawn_and_lines_fit_the_width);
  suite_add_tcase(suite, tcase);
  return suite;
}
