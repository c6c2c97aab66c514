// sched_lower - adds messages, reductions and steps to the compute actions of a schedule.
//
// The list is simulated; then all events are put into one global order, by time:
//
//     the end of an action that sends    SEND to the sender's list, RECV to the receiver's, at once
//     the end of a stage's last W or B   REDUCE_GRAD; of a tied group's, REDUCE_TIED to all holders
//     the start of an action             the action itself
//
// with ends before starts of the same time. Every list is a projection of that order, so whoever
// reaches its part of a message finds the other side no further than its own part: rendezvous sends
// cannot deadlock, grouped or not (inv. 4). Within a channel both ends see the same order (inv. 3).
#include "parallel/sched_inner.h"

#include <string.h>

// A rank's events of one sort, in time order: a stream of starts or of ends.
typedef struct Stream {
  int rank, next; // next action of the rank's list
  bool is_start;
  double time; // of the next event
} Stream;

typedef struct Lower {
  const Sched *in;
  Sched *out;
  SchedSim *sim;
  Stream *heap; // [count], least first
  int count;
  int *left;      // [stages] contributions still to come
  int *tied_left; // [groups] stages whose contributions are still to come
} Lower;

// ---- a heap of streams -----------------------------------------------------------------------

// Ends before starts; then by rank, so that the order is total.
static bool is_before(const Stream *a, const Stream *b) {
  if (a->time < b->time || a->time > b->time) return a->time < b->time;
  if (a->is_start != b->is_start) return b->is_start;
  return a->rank < b->rank;
}

static void sift_down(Stream *heap, int count, int i) {
  Stream moving = heap[i];
  for (int child; (child = 2 * i + 1) < count; i = child) {
    if (child + 1 < count && is_before(&heap[child + 1], &heap[child])) child++;
    if (!is_before(&heap[child], &moving)) break;
    heap[i] = heap[child];
  }
  heap[i] = moving;
}

// Moves a stream to its next event; false at its end.
static bool find_event(const Lower *lower, Stream *stream) {
  const SchedRow *row = &lower->in->row[stream->rank];
  const SchedSpan *span = lower->sim->span + lower->sim->first[stream->rank];
  while (stream->next < row->count &&
         action_resource(row->action[stream->next].kind) != USES_COMPUTE)
    stream->next++;
  if (stream->next == row->count) return false;
  stream->time = stream->is_start ? span[stream->next].start : span[stream->next].end;
  return true;
}

// ---- events ----------------------------------------------------------------------------------

// SEND and RECV along each edge between ranks that the end of an action sets free.
static Status add_messages(Lower *lower, int rank, Action action) {
  int gives = action_properties(action.kind) & (GIVES_OUTPUT | GIVES_GRAD);
  bool is_grad = gives == GIVES_GRAD;
  if (!gives) return ST_OK;
  SchedEdgeWalk walk = {.sched = lower->in, .stage = action.stage, .is_into = is_grad};
  while (sched_next_edge(&walk)) {
    int other = lower->in->holder[walk.other];
    if (other == rank || (is_grad && !walk.has_grad)) continue;
    Action send = {is_grad ? ACTION_SEND_B : ACTION_SEND_F, action.stage, action.mb, walk.other};
    Action recv = {is_grad ? ACTION_RECV_B : ACTION_RECV_F, walk.other, action.mb, action.stage};
    TRY(sched_push(lower->out, rank, send));
    TRY(sched_push(lower->out, other, recv));
  }
  return ST_OK;
}

// REDUCE_TIED once on each rank that holds the group, under its first stage there.
static Status add_tied(Lower *lower, int group) {
  const Sched *in = lower->in;
  for (int i = 0; i < in->tieds; i++) {
    if (in->tied[i].group != group) continue;
    int rank = in->holder[in->tied[i].stage];
    bool is_first = true;
    for (int k = 0; k < i; k++)
      if (in->tied[k].group == group && in->holder[in->tied[k].stage] == rank) is_first = false;
    if (is_first)
      TRY(sched_push(lower->out, rank, (Action){ACTION_REDUCE_TIED, in->tied[i].stage, group, -1}));
  }
  return ST_OK;
}

static Status add_reductions(Lower *lower, int rank, Action action) {
  if (!(action_properties(action.kind) & CONTRIBUTES) || --lower->left[action.stage] > 0)
    return ST_OK;
  TRY(sched_push(lower->out, rank, (Action){ACTION_REDUCE_GRAD, action.stage, -1, -1}));
  for (int i = 0; i < lower->in->tieds; i++)
    if (lower->in->tied[i].stage == action.stage &&
        --lower->tied_left[lower->in->tied[i].group] == 0)
      TRY(add_tied(lower, lower->in->tied[i].group));
  return ST_OK;
}

// The bracket of a pair is kept where it was priced: then nothing comes between its two actions.
static Status add_action(Lower *lower, int rank, int index, bool keeps_pairs) {
  const Action *action = lower->in->row[rank].action;
  if (keeps_pairs && index > 0 && action[index - 1].kind == ACTION_OVERLAP_F_B)
    TRY(sched_push(lower->out, rank, action[index - 1]));
  return sched_push(lower->out, rank, action[index]);
}

// ---- the whole -------------------------------------------------------------------------------

static Status prepare(SchedArena *arena, Lower *lower) {
  const Sched *in = lower->in;
  Sched *out;
  TRY(sched_new(arena, &out, in->name, in->ranks, in->chunks, in->mbs, PLACE_GIVEN, in->holder));
  out->type = in->type;
  out->placement = in->placement;
  out->copies = in->copies;
  out->group = in->group;
  out->warning = in->warning;
  out->edge = in->edge;
  out->edges = in->edges;
  out->tied = in->tied;
  out->tieds = in->tieds;
  out->tied_groups = in->tied_groups;
  memcpy(out->bound, in->bound, (size_t)in->ranks * sizeof *in->bound);
  int stages = in->copies * in->stages;
  lower->heap = sched_alloc(arena, 2 * (size_t)in->ranks, sizeof *lower->heap);
  lower->left = sched_alloc(arena, (size_t)stages, sizeof *lower->left);
  lower->tied_left = sched_alloc(arena, (size_t)in->tied_groups + 1, sizeof *lower->tied_left);
  if (!lower->heap || !lower->left || !lower->tied_left) return ST_ENOMEM;
  for (int rank = 0; rank < in->ranks; rank++) {
    TRY(sched_reserve(out, rank, 2 * (int64_t)in->row[rank].count + 3 * in->chunks + in->tieds));
    for (int i = 0; i < in->row[rank].count; i++) {
      Action action = in->row[rank].action[i];
      if (action_properties(action.kind) & CONTRIBUTES) lower->left[action.stage]++;
    }
    for (int is_start = 0; is_start < 2; is_start++) {
      Stream stream = {.rank = rank, .is_start = is_start};
      if (find_event(lower, &stream)) lower->heap[lower->count++] = stream;
    }
  }
  for (int i = 0; i < in->tieds; i++) lower->tied_left[in->tied[i].group]++;
  for (int i = lower->count / 2 - 1; i >= 0; i--) sift_down(lower->heap, lower->count, i);
  lower->out = out;
  return ST_OK;
}

// Simulates so that every compute action takes time: else an end would not come after its start in
// the global order.
static Status simulate(SchedArena *arena, Lower *lower, SchedCosts costs) {
  TRY(sched_simulate(arena, &lower->sim, lower->in, &costs));
  bool is_instant = false;
  for (int rank = 0; rank < lower->in->ranks; rank++) {
    const SchedSpan *span = lower->sim->span + lower->sim->first[rank];
    for (int i = 0; i < lower->in->row[rank].count; i++)
      if (action_resource(lower->in->row[rank].action[i].kind) == USES_COMPUTE)
        is_instant = is_instant || span[i].end <= span[i].start;
  }
  if (!is_instant) return ST_OK;
  costs.at_least = lower->sim->makespan > 0 ? lower->sim->makespan * 1e-9 : 1;
  return sched_simulate(arena, &lower->sim, lower->in, &costs);
}

Status sched_lower(SchedArena *arena, Sched **out, const Sched *sched, const SchedCosts *costs) {
  if (sched->lowered)
    return sched_fail(arena, ST_EVALUE, "schedule %s has its messages already", sched->name);
  SchedCosts own = costs ? *costs : sched_costs(1, 1, 1);
  Lower lower = {.in = sched};
  TRY(simulate(arena, &lower, own));
  TRY(prepare(arena, &lower));
  while (lower.count > 0) {
    Stream *stream = &lower.heap[0];
    int rank = stream->rank, index = stream->next;
    Action action = sched->row[rank].action[index];
    if (stream->is_start)
      TRY(add_action(&lower, rank, index, own.overlap >= 0));
    else {
      TRY(add_messages(&lower, rank, action));
      TRY(add_reductions(&lower, rank, action));
    }
    stream->next++;
    if (!find_event(&lower, stream)) *stream = lower.heap[--lower.count];
    sift_down(lower.heap, lower.count, 0);
  }
  for (int stage = 0; stage < sched->copies * sched->stages; stage++)
    TRY(sched_push(lower.out, sched->holder[stage], (Action){ACTION_STEP, stage, -1, -1}));
  *out = lower.out;
  return ST_OK;
}
