// sched_check - judges a schedule by the numbered invariants of sched.h.
//
// They are tested in an order in which each may rely on those before: 7 and 1 while the actions are
// indexed, then what is missing (1), 2, 5, 3 and 6 along the lists, 4 by running them with sends
// that wait for their receiver, and 8, which breaks nothing but bitwise equality.
#include "parallel/sched_inner.h"

#include <string.h>

typedef struct Check {
  SchedArena *arena;
  const Sched *sched;
  SchedReport *report;
  SchedIndex index;
} Check;

static const SchedPlace NOWHERE = {-1, -1};

static SchedName name_at(const Check *check, SchedPlace place) {
  return sched_name(check->sched->row[place.rank].action[place.index]);
}

// Records that an invariant is broken.
static void broken(Check *check, int invariant, SchedPlace at, SchedPlace other, const char *format,
                   ...) PRINTF_LIKE(5, 6);
static void broken(Check *check, int invariant, SchedPlace at, SchedPlace other, const char *format,
                   ...) {
  SchedReport *report = check->report;
  report->broken = invariant;
  report->at = at;
  report->other = other;
  va_list args;
  va_start(args, format);
  sched_vformat(report->message, sizeof report->message, format, &args);
  va_end(args);
}

// ---- 1, 2, 7: each (stage, mb) ---------------------------------------------------------------

static void check_doubles(Check *check, int invariant, SchedPlace at, SchedPlace other) {
  const Sched *sched = check->sched;
  Action action = sched->row[at.rank].action[at.index];
  SchedName name = name_at(check, at);
  int stages = sched->copies * sched->stages;
  if (invariant == 1 && action.kind == sched->row[other.rank].action[other.index].kind)
    broken(check, 1, at, other, "%s runs twice on rank %d", name.text, at.rank);
  else if (invariant == 1)
    broken(check, 1, at, other, "%s on rank %d does what %s did already", name.text, at.rank,
           name_at(check, other).text);
  else if (action.stage < 0 || action.stage >= stages)
    broken(check, 7, at, NOWHERE, "%s names a stage that is not there: the last is %d", name.text,
           stages - 1);
  else if (action.mb < 0 || action.mb >= sched->mbs)
    broken(check, 7, at, NOWHERE, "%s names a microbatch that is not there: the last is %d",
           name.text, sched->mbs - 1);
  else if (sched->holder[action.stage] != at.rank)
    broken(check, 7, at, NOWHERE, "%s runs on rank %d, but rank %d holds stage %d", name.text,
           at.rank, sched->holder[action.stage], action.stage);
  else
    broken(check, 7, at, NOWHERE, "%s runs on copy %d of the stage, its microbatch on the other",
           name.text, action.stage / sched->stages);
}

// One cell: nothing missing, F before I or B before W.
static void check_cell(Check *check, int stage, int mb) {
  const Sched *sched = check->sched;
  int64_t cell = sched_cell(sched, stage, mb);
  int rank = sched->holder[stage];
  int f = check->index.f[cell], b = check->index.b[cell], w = check->index.w[cell];
  SchedPlace end = {rank, -1};
  const Action *row = sched->row[rank].action;
  if (f < 0 || b < 0 || w < 0) {
    ActionKind kind = f < 0 ? ACTION_F : b >= 0 ? ACTION_W : w >= 0 ? ACTION_I : ACTION_B;
    broken(check, 1, end, NOWHERE, "%s is missing on rank %d",
           sched_name((Action){kind, stage, mb, -1}).text, rank);
    return;
  }
  int first = b < f ? b : w < b ? w : -1, second = b < f ? f : b;
  if (first < 0) return;
  broken(check, 2, (SchedPlace){rank, first}, (SchedPlace){rank, second},
         "%s stands before %s, which it needs", sched_name(row[first]).text,
         sched_name(row[second]).text);
}

static void check_cells(Check *check) {
  const Sched *sched = check->sched;
  for (int stage = 0; stage < sched->copies * sched->stages; stage++)
    for (int mb = 0; mb < sched->mbs && !check->report->broken; mb++)
      if (sched_copy_of(sched, mb) == stage / sched->stages) check_cell(check, stage, mb);
}

// A bracket stands before an F and a B.
static void check_pairs(Check *check) {
  for (int rank = 0; rank < check->sched->ranks && !check->report->broken; rank++) {
    const SchedRow *row = &check->sched->row[rank];
    for (int i = 0; i < row->count; i++) {
      if (row->action[i].kind != ACTION_OVERLAP_F_B) continue;
      if (i + 2 < row->count && row->action[i + 1].kind == ACTION_F &&
          row->action[i + 2].kind == ACTION_B)
        continue;
      broken(check, 1, (SchedPlace){rank, i}, NOWHERE,
             "an OVERLAP_F_B on rank %d does not stand before an F and a B", rank);
      return;
    }
  }
}

// ---- 5: memory -------------------------------------------------------------------------------

static void check_live(Check *check) {
  const Sched *sched = check->sched;
  for (int rank = 0; rank < sched->ranks; rank++) {
    int64_t live = 0, bound = sched->bound[rank];
    for (int i = 0; i < sched->row[rank].count; i++) {
      int does = action_properties(sched->row[rank].action[i].kind);
      if (does & KEEPS) live++;
      if (live > check->report->peak[rank]) check->report->peak[rank] = live;
      if (bound >= 0 && live > bound && !check->report->broken) {
        SchedPlace at = {rank, i};
        broken(check, 5, at, NOWHERE,
               "%s is live activation %lld of rank %d, which declares %lld%s",
               name_at(check, at).text, (long long)live, rank, (long long)bound,
               sched->chunks > 1 ? " (one a microbatch and stage)" : "");
      }
      if (does & FREES) live--;
    }
  }
}

// ---- 3: messages -----------------------------------------------------------------------------

// The messages of all channels, sorted by channel: those of channel (from, to) are
// place[first[from * ranks + to]] and on, in the order of the list.
typedef struct Channels {
  int64_t *first; // [ranks*ranks + 1]
  int *place;     // index in the row of the rank that has them
} Channels;

static int64_t channel_of(const Sched *sched, int rank, Action action) {
  int peer = sched->holder[action.peer];
  bool is_send = action_properties(action.kind) & SENDS;
  return is_send ? (int64_t)rank * sched->ranks + peer : (int64_t)peer * sched->ranks + rank;
}

// Sorts the SENDs, or the RECVs, of all ranks by channel.
static Status sort_channels(const Check *check, int property, Channels *out) {
  const Sched *sched = check->sched;
  int64_t channels = (int64_t)sched->ranks * sched->ranks;
  Channels c = {sched_alloc(check->arena, (size_t)channels + 2, sizeof(int64_t)), NULL};
  if (!c.first) return ST_ENOMEM;
  for (int pass = 0; pass < 2; pass++) {
    for (int rank = 0; rank < sched->ranks; rank++) {
      for (int i = 0; i < sched->row[rank].count; i++) {
        Action action = sched->row[rank].action[i];
        if (!(action_properties(action.kind) & property)) continue;
        int64_t channel = channel_of(sched, rank, action);
        if (pass == 0)
          c.first[channel + 2]++;
        else
          c.place[c.first[channel + 1]++] = i;
      }
    }
    if (pass == 1) break;
    for (int64_t i = 0; i < channels; i++) c.first[i + 2] += c.first[i + 1];
    c.place = sched_alloc(check->arena, (size_t)c.first[channels + 1] + 1, sizeof *c.place);
    if (!c.place) return ST_ENOMEM;
  }
  *out = c;
  return ST_OK;
}

// Each SEND and RECV names an edge between two ranks, once, on the right side of its compute.
// seen[2 * message + is_send] is set for each.
static void check_messages(Check *check, uint8_t *seen) {
  const Sched *sched = check->sched;
  for (int rank = 0; rank < sched->ranks; rank++) {
    for (int i = 0; i < sched->row[rank].count; i++) {
      Action action = sched->row[rank].action[i];
      if (action_resource(action.kind) != USES_LINK) continue;
      SchedPlace at = {rank, i};
      int64_t message = sched_message(sched, action);
      bool is_send = action_properties(action.kind) & SENDS;
      if (message < 0 || sched->holder[action.stage] != rank ||
          sched->holder[action.peer] == rank) {
        broken(check, 3, at, NOWHERE, "%s on rank %d is no message between two ranks",
               name_at(check, at).text, rank);
        return;
      }
      if (seen[2 * message + is_send]++) {
        broken(check, 3, at, NOWHERE, "%s stands twice on rank %d", name_at(check, at).text, rank);
        return;
      }
      bool is_f = action.kind == ACTION_SEND_F || action.kind == ACTION_RECV_F;
      int64_t cell = sched_cell(sched, action.stage, action.mb);
      SchedPlace work = {rank, is_f ? check->index.f[cell] : check->index.b[cell]};
      if (is_send ? work.index < i : work.index > i) continue;
      broken(check, 3, at, work,
             is_send ? "%s stands before %s, which makes what it sends"
                     : "%s stands behind %s, which needs it",
             name_at(check, at).text, name_at(check, work).text);
      return;
    }
  }
}

// All messages that the edges ask for are there.
static void check_complete(Check *check, const uint8_t *seen) {
  const Sched *sched = check->sched;
  for (int stage = 0; stage < sched->copies * sched->stages; stage++) {
    for (int is_grad = 0; is_grad < 2; is_grad++) {
      SchedEdgeWalk walk = {.sched = sched, .stage = stage, .is_into = !is_grad};
      while (sched_next_edge(&walk)) {
        if (sched->holder[walk.other] == sched->holder[stage] || (is_grad && !walk.has_grad))
          continue;
        for (int mb = 0; mb < sched->mbs; mb++) {
          Action recv = {is_grad ? ACTION_RECV_B : ACTION_RECV_F, stage, mb, walk.other};
          if (sched_copy_of(sched, mb) != stage / sched->stages ||
              seen[2 * sched_message(sched, recv)])
            continue;
          int64_t cell = sched_cell(sched, stage, mb);
          SchedPlace work = {sched->holder[stage],
                             is_grad ? check->index.b[cell] : check->index.f[cell]};
          broken(check, 3, work, NOWHERE, "%s, which %s needs, is missing on rank %d",
                 sched_name(recv).text, name_at(check, work).text, work.rank);
          return;
        }
      }
    }
  }
}

// The k-th SEND of a channel is the k-th RECV.
static Status check_channels(Check *check) {
  const Sched *sched = check->sched;
  uint8_t *seen = sched_alloc(check->arena, (size_t)sched_messages(sched), 2);
  if (!seen) return ST_ENOMEM;
  check_messages(check, seen);
  if (check->report->broken) return ST_OK;
  Channels sends, recvs;
  TRY(sort_channels(check, SENDS, &sends));
  TRY(sort_channels(check, RECEIVES, &recvs));
  for (int64_t c = 0; c < (int64_t)sched->ranks * sched->ranks; c++) {
    int from = (int)(c / sched->ranks), to = (int)(c % sched->ranks);
    int64_t n_sends = sends.first[c + 1] - sends.first[c];
    int64_t n_recvs = recvs.first[c + 1] - recvs.first[c];
    for (int64_t k = 0; k < n_sends || k < n_recvs; k++) {
      SchedPlace send = {from, k < n_sends ? sends.place[sends.first[c] + k] : -1};
      SchedPlace recv = {to, k < n_recvs ? recvs.place[recvs.first[c] + k] : -1};
      if (send.index >= 0 && recv.index >= 0 &&
          sched_message(sched, sched->row[from].action[send.index]) ==
              sched_message(sched, sched->row[to].action[recv.index]))
        continue;
      SchedName s = {"nothing"}, r = {"nothing"};
      if (send.index >= 0) s = name_at(check, send);
      if (recv.index >= 0) r = name_at(check, recv);
      broken(check, 3, send.index < 0 ? recv : send, send.index < 0 ? NOWHERE : recv,
             "the channel from rank %d to rank %d sends %s where %s is expected", from, to, s.text,
             r.text);
      return ST_OK;
    }
  }
  check_complete(check, seen);
  return ST_OK;
}

// ---- 6: reductions ---------------------------------------------------------------------------

// The last contribution to the gradients of a stage: its place in the holder's row.
static Status last_contributions(const Check *check, int **out) {
  const Sched *sched = check->sched;
  int *last =
      sched_alloc(check->arena, (size_t)sched->copies * (size_t)sched->stages, sizeof *last);
  if (!last) return ST_ENOMEM;
  for (int rank = 0; rank < sched->ranks; rank++)
    for (int i = 0; i < sched->row[rank].count; i++)
      if (action_properties(sched->row[rank].action[i].kind) & CONTRIBUTES)
        last[sched->row[rank].action[i].stage] = i;
  *out = last;
  return ST_OK;
}

// Whether a rank holds a stage of a tied group, and the last contribution there.
static bool holds(const Check *check, int rank, int group, const int *last, int *latest) {
  bool is_holder = false;
  *latest = -1;
  for (int i = 0; i < check->sched->tieds; i++) {
    SchedTied tied = check->sched->tied[i];
    if (tied.group != group || check->sched->holder[tied.stage] != rank) continue;
    is_holder = true;
    if (last[tied.stage] > *latest) *latest = last[tied.stage];
  }
  return is_holder;
}

// One reduction or step: of something held here, once, after what it needs.
static bool check_reduction(Check *check, SchedPlace at, const int *last, uint8_t *counts) {
  const Sched *sched = check->sched;
  Action action = sched->row[at.rank].action[at.index];
  SchedName name = name_at(check, at);
  int stages = sched->copies * sched->stages, latest = -1;
  bool is_tied = action.kind == ACTION_REDUCE_TIED, is_known;
  if (is_tied)
    is_known = action.mb >= 0 && action.mb < sched->tied_groups &&
               holds(check, at.rank, action.mb, last, &latest);
  else
    is_known = action.stage >= 0 && action.stage < stages && sched->holder[action.stage] == at.rank;
  if (!is_known) {
    broken(check, 6, at, NOWHERE, "%s is for something that rank %d does not hold", name.text,
           at.rank);
    return false;
  }
  if (!is_tied) latest = last[action.stage];
  uint8_t *count = is_tied ? &counts[2 * stages + (int64_t)action.mb * sched->ranks + at.rank]
                           : &counts[2 * action.stage + (action.kind == ACTION_STEP)];
  if ((*count)++) {
    broken(check, 6, at, NOWHERE, "%s stands twice on rank %d", name.text, at.rank);
    return false;
  }
  if (latest > at.index) {
    SchedPlace late = {at.rank, latest};
    broken(check, 6, at, late, "%s stands before %s, which contributes to it", name.text,
           name_at(check, late).text);
    return false;
  }
  if (action.kind == ACTION_STEP && !counts[2 * action.stage]) {
    broken(check, 6, at, NOWHERE, "%s stands before the reduction of its gradients", name.text);
    return false;
  }
  return true;
}

static Status check_reductions(Check *check) {
  const Sched *sched = check->sched;
  int stages = sched->copies * sched->stages, groups = sched->tied_groups;
  int *last;
  TRY(last_contributions(check, &last));
  // By stage a REDUCE_GRAD and a STEP, then by group and rank a REDUCE_TIED.
  size_t room = 2 * (size_t)stages + (size_t)groups * (size_t)sched->ranks;
  uint8_t *counts = sched_alloc(check->arena, room, 1);
  if (!counts) return ST_ENOMEM;
  for (int rank = 0; rank < sched->ranks; rank++) {
    for (int i = 0; i < sched->row[rank].count; i++) {
      ActionKind kind = sched->row[rank].action[i].kind;
      bool is_one = action_resource(kind) == USES_GROUP || kind == ACTION_STEP;
      if (is_one && !check_reduction(check, (SchedPlace){rank, i}, last, counts)) return ST_OK;
    }
  }
  for (int stage = 0; stage < stages; stage++) {
    if (counts[2 * stage]) continue;
    broken(check, 6, (SchedPlace){sched->holder[stage], -1}, NOWHERE, "%s is missing on rank %d",
           sched_name((Action){ACTION_REDUCE_GRAD, stage, -1, -1}).text, sched->holder[stage]);
    return ST_OK;
  }
  for (int group = 0, latest; group < groups; group++) {
    for (int rank = 0; rank < sched->ranks; rank++) {
      bool is_there = counts[2 * stages + (int64_t)group * sched->ranks + rank];
      if (is_there || !holds(check, rank, group, last, &latest)) continue;
      broken(check, 6, (SchedPlace){rank, -1}, NOWHERE,
             "the REDUCE_TIED of tied weight %d is missing on rank %d", group, rank);
      return ST_OK;
    }
  }
  return ST_OK;
}

// ---- 4: deadlock -----------------------------------------------------------------------------

// Follows who waits for whom from a blocked rank until a rank comes up twice.
static Status draw_cycle(Check *check, const SchedRun *run, int blocked) {
  int ranks = check->sched->ranks, length = 0;
  SchedPlace *chain = sched_alloc(check->arena, (size_t)ranks + 1, sizeof *chain);
  SchedPlace *wanted = sched_alloc(check->arena, (size_t)ranks + 1, sizeof *wanted);
  int *position = sched_alloc(check->arena, (size_t)ranks, sizeof *position);
  if (!chain || !wanted || !position) return ST_ENOMEM;
  int rank = blocked;
  while (position[rank] == 0) {
    position[rank] = ++length;
    chain[length - 1] = (SchedPlace){rank, run->at[rank]};
    SchedPlace cause = wanted[length - 1] = sched_run_waits_for(run, rank);
    if (cause.rank < 0 || cause.index < 0) break;
    rank = cause.rank;
  }
  int first = position[rank] - 1;
  check->report->cycle = chain + first;
  check->report->wanted = wanted + first;
  check->report->cycle_length = length - first;
  SchedPlace at = chain[first], cause = wanted[first];
  bool is_hopeless = cause.rank < 0 || cause.index < 0;
  broken(check, 4, at, is_hopeless ? NOWHERE : cause,
         "deadlock: rank %d stands at %s, which waits for %s", at.rank, name_at(check, at).text,
         is_hopeless ? "what no rank ever does" : name_at(check, cause).text);
  return ST_OK;
}

static Status check_deadlock(Check *check) {
  SchedRun run = {.sched = check->sched, .index = check->index, .is_rendezvous = true};
  TRY(sched_run(check->arena, &run));
  for (int rank = 0; rank < check->sched->ranks; rank++)
    if (run.at[rank] < check->sched->row[rank].count) return draw_cycle(check, &run, rank);
  return ST_OK;
}

// ---- 8: order of the sums --------------------------------------------------------------------

static Status check_ascending(Check *check) {
  const Sched *sched = check->sched;
  size_t stages = (size_t)sched->copies * (size_t)sched->stages;
  int *b = sched_alloc(check->arena, stages, sizeof *b); // one past the latest mb
  int *w = sched_alloc(check->arena, stages, sizeof *w);
  if (!b || !w) return ST_ENOMEM;
  for (int rank = 0; rank < sched->ranks; rank++) {
    for (int i = 0; i < sched->row[rank].count; i++) {
      Action action = sched->row[rank].action[i];
      int does = action_properties(action.kind);
      if (action_resource(action.kind) != USES_COMPUTE || (does & KEEPS)) continue;
      bool falls = ((does & GIVES_GRAD) && action.mb < b[action.stage]) ||
                   ((does & CONTRIBUTES) && action.mb < w[action.stage]);
      if (does & GIVES_GRAD) b[action.stage] = action.mb + 1;
      if (does & CONTRIBUTES) w[action.stage] = action.mb + 1;
      if (!falls || check->report->is_to_rounding) continue;
      check->report->is_to_rounding = true;
      check->report->at = (SchedPlace){rank, i};
    }
  }
  return ST_OK;
}

// ---- depths ----------------------------------------------------------------------------------

// RECVs that stand posted and not yet consumed, at most, on each channel into each rank.
static Status measure_depths(Check *check) {
  const Sched *sched = check->sched;
  int ranks = sched->ranks, *now = sched_alloc(check->arena, (size_t)ranks, sizeof *now);
  int *most = sched_alloc(check->arena, (size_t)ranks * (size_t)ranks, sizeof *most), used = 0;
  if (!now || !most) return ST_ENOMEM;
  for (int rank = 0; rank < ranks; rank++) {
    memset(now, 0, (size_t)ranks * sizeof *now);
    for (int i = 0; i < sched->row[rank].count; i++) {
      Action action = sched->row[rank].action[i];
      int does = action_properties(action.kind), needs = does & (NEEDS_OUTPUT | NEEDS_GRAD);
      if (does & RECEIVES) {
        int from = sched->holder[action.peer], *depth = &most[(int64_t)from * ranks + rank];
        now[from]++;
        used += *depth == 0;
        if (now[from] > *depth) *depth = now[from];
      }
      if (!needs) continue;
      SchedEdgeWalk walk = {
          .sched = sched, .stage = action.stage, .is_into = needs == NEEDS_OUTPUT};
      while (sched_next_edge(&walk))
        if (needs == NEEDS_OUTPUT || walk.has_grad) now[sched->holder[walk.other]]--;
    }
  }
  SchedDepth *depth = sched_alloc(check->arena, (size_t)used + 1, sizeof *depth);
  if (!depth) return ST_ENOMEM;
  check->report->depth = depth;
  for (int from = 0; from < ranks; from++)
    for (int to = 0; to < ranks; to++)
      if (most[(int64_t)from * ranks + to] > 0)
        depth[check->report->depths++] = (SchedDepth){from, to, most[(int64_t)from * ranks + to]};
  return ST_OK;
}

// ---- the whole -------------------------------------------------------------------------------

static Status judge(Check *check) {
  SchedReport *report = check->report;
  SchedPlace at = NOWHERE, other = NOWHERE;
  int invariant;
  TRY(sched_index(check->arena, &check->index, check->sched, &at, &other, &invariant));
  if (invariant) {
    check_doubles(check, invariant, at, other);
    return ST_OK;
  }
  check_cells(check);
  if (!report->broken) check_pairs(check);
  if (!report->broken) check_live(check);
  if (!report->broken && check->sched->lowered) {
    TRY(check_channels(check));
    if (!report->broken) TRY(check_reductions(check));
  }
  if (!report->broken) TRY(check_deadlock(check));
  if (!report->broken) TRY(check_ascending(check));
  return !report->broken && check->sched->lowered ? measure_depths(check) : ST_OK;
}

Status sched_check(SchedArena *arena, SchedReport **out, const Sched *sched) {
  SchedReport *report = sched_alloc(arena, 1, sizeof *report);
  if (!report) return ST_ENOMEM;
  report->at = report->other = NOWHERE;
  report->peak = sched_alloc(arena, (size_t)sched->ranks, sizeof *report->peak);
  if (!report->peak) return ST_ENOMEM;
  Check check = {.arena = arena, .sched = sched, .report = report};
  TRY(judge(&check));
  *out = report;
  return ST_OK;
}
