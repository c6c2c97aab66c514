// sched_run - the engine: all ranks run their lists, in order, as far as their inputs allow.
//
// Sends are asynchronous and no resource is shared between ranks but the channel of one sender, so
// the start of an action is a maximum of ends before it, and the order in which ranks take turns
// does not change any time. A rank that cannot go on leaves the queue; whoever delivers something
// to it puts it back. So a run is linear in the number of actions.
//
// In a schedule that is not lowered yet, the end of an action delivers to the stages that wait for
// it; in a lowered one that holds within a rank, and between ranks the SEND delivers.
#include "parallel/sched_inner.h"

#include <string.h>

// ---- edges -----------------------------------------------------------------------------------

bool sched_next_edge(SchedEdgeWalk *walk) {
  const Sched *sched = walk->sched;
  if (walk->next == 0) {
    walk->next = 1;
    walk->has_grad = true;
    walk->other = walk->stage + (walk->is_into ? -1 : 1);
    if (walk->is_into ? !sched_is_first(sched, walk->stage) : !sched_is_last(sched, walk->stage))
      return true;
  }
  for (int i = walk->next - 1; i < sched->edges; i++) {
    SchedEdge edge = sched->edge[i];
    if ((walk->is_into ? edge.to : edge.from) != walk->stage) continue;
    walk->other = walk->is_into ? edge.from : edge.to;
    walk->has_grad = edge.has_grad;
    walk->next = i + 2;
    return true;
  }
  return false;
}

int64_t sched_messages(const Sched *sched) {
  return 2 * ((int64_t)sched->copies * sched->stages + sched->edges) * sched->mbs;
}

int64_t sched_message(const Sched *sched, Action action) {
  bool is_grad = action.kind == ACTION_SEND_B || action.kind == ACTION_RECV_B;
  bool is_upstream = action.kind == ACTION_SEND_F || action.kind == ACTION_RECV_B;
  int from = is_upstream ? action.stage : action.peer;
  int to = is_upstream ? action.peer : action.stage;
  int last = sched->copies * sched->stages - 1;
  if (from < 0 || to > last || action.mb < 0 || action.mb >= sched->mbs) return -1;
  int64_t edge = -1;
  if (to == from + 1 && !sched_is_last(sched, from)) edge = from;
  for (int i = 0; i < sched->edges; i++) {
    SchedEdge e = sched->edge[i];
    if (e.from == from && e.to == to && (e.has_grad || !is_grad)) edge = last + 1 + i;
  }
  return edge < 0 ? -1 : (2 * edge + is_grad) * sched->mbs + action.mb;
}

// ---- time ------------------------------------------------------------------------------------

static double factor(const SchedRun *run, Action action) {
  const SchedCosts *costs = run->costs;
  double x = 1.0 / run->sched->chunks;
  if (costs->stage_factor) x *= costs->stage_factor[action.stage];
  if (costs->mb_factor) x *= costs->mb_factor[action.mb];
  return x;
}

static double price(const SchedRun *run, Action action) {
  const SchedCosts *costs = run->costs;
  if (!costs) return 0;
  double whole = action.kind == ACTION_F   ? costs->F
                 : action.kind == ACTION_I ? costs->I
                 : action.kind == ACTION_W ? costs->W
                                           : costs->I + costs->W;
  double time = costs->price ? costs->price(costs->user, action) : whole * factor(run, action);
  return time > costs->at_least ? time : costs->at_least;
}

// When a message that leaves rank `from` at a time arrives at rank `to`.
static double arrival(SchedRun *run, int from, int to, double leaves) {
  const SchedCosts *costs = run->costs;
  if (!costs || from == to) return leaves;
  if (run->link_free) {
    double *is_free = &run->link_free[(int64_t)from * run->sched->ranks + to];
    if (leaves < *is_free) leaves = *is_free;
    leaves += costs->message_bytes / costs->bytes_per_second;
    *is_free = leaves;
  }
  return leaves + costs->hop;
}

// ---- taking turns ----------------------------------------------------------------------------

static void enqueue(SchedRun *run, int rank) {
  if (run->queued[rank]) return;
  run->queued[rank] = 1;
  int ranks = run->sched->ranks, tail = run->queue_head + run->queue_length++;
  run->queue[tail < ranks ? tail : tail - ranks] = rank;
}

static void deliver(SchedRun *run, int stage, int mb, bool is_grad, double when) {
  int64_t cell = sched_cell(run->sched, stage, mb);
  uint8_t *got = is_grad ? run->got_grad : run->got_output;
  double *at = is_grad ? run->grad_at : run->output_at;
  if (got[cell] < UINT8_MAX) got[cell]++;
  if (when > at[cell]) at[cell] = when;
  enqueue(run, run->sched->holder[stage]);
}

static bool has_run(const SchedRun *run, int rank, int index) {
  return index >= 0 && index < run->at[rank];
}

// Whether a compute action has all inputs, and since when.
static bool is_ready(const SchedRun *run, int rank, Action action, double *since) {
  int64_t cell = sched_cell(run->sched, action.stage, action.mb);
  int needs = action_properties(action.kind);
  *since = 0;
  if (needs & NEEDS_OUTPUT) {
    if (run->got_output[cell] < run->need_output[action.stage]) return false;
    *since = run->output_at[cell];
  }
  if (needs & NEEDS_GRAD) {
    if (run->got_grad[cell] < run->need_grad[action.stage]) return false;
    *since = run->grad_at[cell];
  }
  if ((needs & NEEDS_F) && !has_run(run, rank, run->index.f[cell])) return false;
  return !(needs & NEEDS_I) || has_run(run, rank, run->index.b[cell]);
}

// What the end of a compute action sets free.
static void release(SchedRun *run, int rank, Action action, double end) {
  const Sched *sched = run->sched;
  int gives = action_properties(action.kind) & (GIVES_OUTPUT | GIVES_GRAD);
  if (!gives) return;
  SchedEdgeWalk walk = {.sched = sched, .stage = action.stage, .is_into = gives == GIVES_GRAD};
  while (sched_next_edge(&walk)) {
    int other = sched->holder[walk.other];
    if (gives == GIVES_GRAD && !walk.has_grad) continue;
    if (other != rank && sched->lowered) continue;
    deliver(run, walk.other, action.mb, gives == GIVES_GRAD, arrival(run, rank, other, end));
  }
}

static void record(SchedRun *run, int rank, double start, double end) {
  if (run->span) {
    double waited = start - run->clock[rank];
    run->span[run->first[rank] + run->at[rank]] = (SchedSpan){start, end, waited > 0 ? waited : 0};
  }
  run->clock[rank] = end;
  run->at[rank]++;
}

// The two compute actions behind a marker.
static bool find_pair(const SchedRow *row, int marker, Action pair[2]) {
  int found = 0;
  for (int i = marker + 1; i < row->count && found < 2; i++) {
    if (action_resource(row->action[i].kind) == USES_COMPUTE)
      pair[found++] = row->action[i];
    else if (action_resource(row->action[i].kind) != USES_LINK)
      break;
  }
  return found == 2;
}

static bool step_marker(SchedRun *run, int rank) {
  Action pair[2];
  double since[2], start = run->clock[rank];
  bool is_priced = run->costs && run->costs->overlap >= 0;
  if (!is_priced || !find_pair(&run->sched->row[rank], run->at[rank], pair)) {
    record(run, rank, start, start);
    return true;
  }
  for (int i = 0; i < 2; i++) {
    if (!is_ready(run, rank, pair[i], &since[i])) return false;
    if (since[i] > start) start = since[i];
  }
  double scale = run->costs->price ? 1.0 / run->sched->chunks
                                   : 0.5 * (factor(run, pair[0]) + factor(run, pair[1]));
  double time = run->costs->overlap * scale;
  run->pair_start[rank] = start;
  run->pair_end[rank] = start + (time > run->costs->at_least ? time : run->costs->at_least);
  run->pair_left[rank] = 2;
  record(run, rank, start, start);
  return true;
}

static bool step_compute(SchedRun *run, int rank, Action action) {
  double since;
  if (run->pair_left[rank] > 0) {
    run->pair_left[rank]--;
    double start = run->pair_start[rank], end = run->pair_end[rank];
    run->clock[rank] = start;
    record(run, rank, start, end);
    release(run, rank, action, end);
    return true;
  }
  if (!is_ready(run, rank, action, &since)) return false;
  double start = since > run->clock[rank] ? since : run->clock[rank];
  double end = start + price(run, action);
  record(run, rank, start, end);
  release(run, rank, action, end);
  return true;
}

static bool step_link(SchedRun *run, int rank, Action action) {
  const Sched *sched = run->sched;
  int64_t message = sched_message(sched, action);
  int peer = message < 0 ? -1 : sched->holder[action.peer];
  double now = run->clock[rank];
  if (message >= 0 && (action_properties(action.kind) & RECEIVES)) {
    if (run->is_rendezvous) {
      run->posted[message] = 1;
      enqueue(run, peer);
    }
  } else if (message >= 0) {
    if (run->is_rendezvous && !run->posted[message]) return false;
    deliver(run, action.peer, action.mb, action.kind == ACTION_SEND_B,
            arrival(run, rank, peer, now));
  }
  record(run, rank, now, now);
  return true;
}

// Ranks that hold a group meet; all go on at the end of it.
static bool step_tied(SchedRun *run, int rank, Action action) {
  int group = action.mb;
  double cost = run->costs ? run->costs->reduce_tied : 0;
  if (group < 0 || group >= run->sched->tied_groups) {
    record(run, rank, run->clock[rank], run->clock[rank] + cost);
    return true;
  }
  if (!run->tied_arrived[rank]) {
    run->tied_arrived[rank] = 1;
    run->tied_here[group]++;
    if (run->clock[rank] > run->tied_at[group]) run->tied_at[group] = run->clock[rank];
    if (run->tied_here[group] == run->tied_need[group])
      for (int i = 0; i < run->sched->tieds; i++)
        if (run->sched->tied[i].group == group)
          enqueue(run, run->sched->holder[run->sched->tied[i].stage]);
  }
  if (run->tied_here[group] < run->tied_need[group]) return false;
  run->tied_arrived[rank] = 0;
  record(run, rank, run->tied_at[group], run->tied_at[group] + cost);
  return true;
}

// Runs the next action of a rank; false if it has to wait.
static bool step(SchedRun *run, int rank) {
  Action action = run->sched->row[rank].action[run->at[rank]];
  double now = run->clock[rank], cost = 0;
  switch (action_resource(action.kind)) {
  case USES_COMPUTE: return step_compute(run, rank, action);
  case USES_LINK: return step_link(run, rank, action);
  case USES_GROUP:
    if (action.kind == ACTION_REDUCE_TIED) return step_tied(run, rank, action);
    if (run->costs) cost = run->costs->reduce_grad;
    break;
  case USES_NOTHING:
    if (action.kind == ACTION_OVERLAP_F_B) return step_marker(run, rank);
    if (run->costs) cost = run->costs->step;
    break;
  }
  record(run, rank, now, now + cost);
  return true;
}

// ---- a whole run -----------------------------------------------------------------------------

#define NEW(field, count) \
  if (!(run->field = sched_alloc(arena, (size_t)(count), sizeof *run->field))) return ST_ENOMEM

static Status prepare(SchedArena *arena, SchedRun *run) {
  const Sched *sched = run->sched;
  int ranks = sched->ranks, stages = sched->copies * sched->stages;
  int64_t cells = (int64_t)stages * sched->mbs;
  NEW(at, ranks);
  NEW(clock, ranks);
  NEW(pair_start, ranks);
  NEW(pair_end, ranks);
  NEW(pair_left, ranks);
  NEW(need_output, stages);
  NEW(need_grad, stages);
  NEW(got_output, cells);
  NEW(got_grad, cells);
  NEW(output_at, cells);
  NEW(grad_at, cells);
  NEW(tied_here, sched->tied_groups + 1);
  NEW(tied_need, sched->tied_groups + 1);
  NEW(tied_at, sched->tied_groups + 1);
  NEW(tied_arrived, ranks);
  NEW(queue, ranks);
  NEW(queued, ranks);
  if (run->is_rendezvous) NEW(posted, sched_messages(sched));
  if (run->costs && run->costs->bytes_per_second > 0) NEW(link_free, (int64_t)ranks * ranks);
  for (int stage = 0; stage < stages; stage++) {
    SchedEdgeWalk into = {.sched = sched, .stage = stage, .is_into = true};
    while (sched_next_edge(&into)) run->need_output[stage]++;
    SchedEdgeWalk out = {.sched = sched, .stage = stage};
    while (sched_next_edge(&out)) run->need_grad[stage] += out.has_grad;
  }
  for (int i = 0; i < sched->tieds; i++) {
    bool is_first = true; // of this group on its rank
    for (int k = 0; k < i; k++)
      if (sched->tied[k].group == sched->tied[i].group &&
          sched->holder[sched->tied[k].stage] == sched->holder[sched->tied[i].stage])
        is_first = false;
    run->tied_need[sched->tied[i].group] += is_first;
  }
  return ST_OK;
}
#undef NEW

Status sched_run(SchedArena *arena, SchedRun *run) {
  const Sched *sched = run->sched;
  TRY(prepare(arena, run));
  for (int rank = 0; rank < sched->ranks; rank++) enqueue(run, rank);
  while (run->queue_length > 0) {
    int rank = run->queue[run->queue_head];
    if (++run->queue_head == sched->ranks) run->queue_head = 0;
    run->queue_length--;
    run->queued[rank] = 0;
    while (run->at[rank] < sched->row[rank].count && step(run, rank)) {
    }
  }
  return ST_OK;
}

bool sched_run_is_done(const SchedRun *run) {
  for (int rank = 0; rank < run->sched->ranks; rank++)
    if (run->at[rank] < run->sched->row[rank].count) return false;
  return true;
}

// ---- who waits for whom ----------------------------------------------------------------------

// The place of the SEND or RECV (or, for a group, the REDUCE_TIED) in a row; index -1: not there.
static SchedPlace find_link(const SchedRun *run, int rank, Action wanted) {
  const SchedRow *row = &run->sched->row[rank];
  for (int i = run->at[rank]; i < row->count; i++) {
    Action action = row->action[i];
    bool is_same = action.kind == wanted.kind && action.mb == wanted.mb;
    if (is_same && wanted.kind == ACTION_REDUCE_TIED) return (SchedPlace){rank, i};
    if (is_same && action.stage == wanted.stage && action.peer == wanted.peer)
      return (SchedPlace){rank, i};
  }
  return (SchedPlace){rank, -1};
}

// The first input of a compute action that is not there.
static SchedPlace missing_input(const SchedRun *run, int rank, Action action) {
  const Sched *sched = run->sched;
  int needs = action_properties(action.kind);
  int64_t cell = sched_cell(sched, action.stage, action.mb);
  if ((needs & NEEDS_F) && !has_run(run, rank, run->index.f[cell]))
    return (SchedPlace){rank, run->index.f[cell]};
  if ((needs & NEEDS_I) && !has_run(run, rank, run->index.b[cell]))
    return (SchedPlace){rank, run->index.b[cell]};
  bool is_grad = needs & NEEDS_GRAD;
  SchedEdgeWalk walk = {.sched = sched, .stage = action.stage, .is_into = !is_grad};
  while (sched_next_edge(&walk)) {
    if (is_grad && !walk.has_grad) continue;
    int other = sched->holder[walk.other];
    int64_t source = sched_cell(sched, walk.other, action.mb);
    int index = is_grad ? run->index.b[source] : run->index.f[source];
    if (other != rank && sched->lowered) {
      Action send = {is_grad ? ACTION_SEND_B : ACTION_SEND_F, walk.other, action.mb, action.stage};
      SchedPlace place = find_link(run, other, send);
      if (place.index >= 0) return place;
    }
    if (!has_run(run, other, index)) return (SchedPlace){other, index};
  }
  return (SchedPlace){-1, -1};
}

SchedPlace sched_run_waits_for(const SchedRun *run, int rank) {
  const Sched *sched = run->sched;
  Action action = sched->row[rank].action[run->at[rank]], pair[2];
  double since;
  if (action.kind == ACTION_OVERLAP_F_B && find_pair(&sched->row[rank], run->at[rank], pair))
    return missing_input(run, rank, pair[is_ready(run, rank, pair[0], &since)]);
  if (action_resource(action.kind) == USES_COMPUTE) return missing_input(run, rank, action);
  if (action_properties(action.kind) & SENDS) {
    Action recv = {action.kind == ACTION_SEND_F ? ACTION_RECV_F : ACTION_RECV_B, action.peer,
                   action.mb, action.stage};
    return find_link(run, sched->holder[action.peer], recv);
  }
  for (int i = 0; i < sched->tieds; i++) {
    int other = sched->holder[sched->tied[i].stage];
    bool is_missing = sched->tied[i].group == action.mb && other != rank;
    if (is_missing && run->at[other] < sched->row[other].count) {
      Action head = sched->row[other].action[run->at[other]];
      if (head.kind != ACTION_REDUCE_TIED || head.mb != action.mb)
        return find_link(run, other, action);
    }
  }
  return (SchedPlace){-1, -1};
}
