// sched_sim - what a schedule costs: times, bubbles, live activations, the critical path.
#include "parallel/sched_inner.h"

#include <string.h>

SchedCosts sched_costs(double F, double I, double W) {
  return (SchedCosts){.F = F, .I = I, .W = W, .overlap = -1};
}

// ---- memory ----------------------------------------------------------------------------------

// Counts live activations of a rank along its list: a count rises before an action, falls after.
static void count_live(const Sched *sched, const SchedCosts *costs, int rank, SchedSim *sim) {
  const SchedRow *row = &sched->row[rank];
  int64_t live = 0;
  double bytes = 0;
  for (int i = 0; i < row->count; i++) {
    Action action = row->action[i];
    int does = action_properties(action.kind);
    SchedBytes kept = {0};
    if (costs->bytes && action_resource(action.kind) == USES_COMPUTE)
      kept = costs->bytes[action.stage];
    if (does & KEEPS) live++, bytes += kept.for_i + kept.for_w;
    if (action.kind == ACTION_I) bytes += kept.grads;
    if (live > sim->peak[rank]) sim->peak[rank] = live;
    if (bytes > sim->peak_bytes[rank]) sim->peak_bytes[rank] = bytes;
    if (does & GIVES_GRAD) bytes -= kept.for_i;
    if (does & FREES) live--, bytes -= kept.for_w;
    if (action.kind == ACTION_W) bytes -= kept.grads;
  }
}

// ---- figures ---------------------------------------------------------------------------------

static void sum_up(const Sched *sched, const SchedCosts *costs, SchedSim *sim) {
  double busiest = 0;
  for (int rank = 0; rank < sched->ranks; rank++) {
    const SchedRow *row = &sched->row[rank];
    const SchedSpan *span = sim->span + sim->first[rank];
    double until = -1;
    for (int i = 0; i < row->count; i++) {
      if (span[i].end > sim->makespan) sim->makespan = span[i].end;
      if (action_resource(row->action[i].kind) != USES_COMPUTE) continue;
      if (until < 0) sim->begin[rank] = span[i].start;
      if (span[i].start >= until) sim->busy[rank] += span[i].end - span[i].start;
      until = sim->end[rank] = span[i].end;
    }
    double idle = sim->end[rank] - sim->begin[rank] - sim->busy[rank];
    if (sim->busy[rank] > busiest) busiest = sim->busy[rank];
    if (idle > sim->span_bubble) sim->span_bubble = idle;
    count_live(sched, costs, rank, sim);
  }
  sim->makespan_bubble = sim->makespan - busiest;
}

// With room for the spans of all actions; all zero.
static Status new_sim(SchedArena *arena, SchedSim **out, const Sched *sched) {
  size_t ranks = (size_t)sched->ranks;
  SchedSim *sim = sched_alloc(arena, 1, sizeof *sim);
  if (!sim) return ST_ENOMEM;
  sim->first = sched_alloc(arena, ranks + 1, sizeof *sim->first);
  sim->busy = sched_alloc(arena, ranks, sizeof *sim->busy);
  sim->begin = sched_alloc(arena, ranks, sizeof *sim->begin);
  sim->end = sched_alloc(arena, ranks, sizeof *sim->end);
  sim->peak = sched_alloc(arena, ranks, sizeof *sim->peak);
  sim->peak_bytes = sched_alloc(arena, ranks, sizeof *sim->peak_bytes);
  if (!sim->first || !sim->busy || !sim->begin || !sim->end || !sim->peak || !sim->peak_bytes)
    return ST_ENOMEM;
  for (size_t rank = 0; rank < ranks; rank++)
    sim->first[rank + 1] = sim->first[rank] + sched->row[rank].count;
  sim->span = sched_alloc(arena, (size_t)sim->first[ranks], sizeof *sim->span);
  if (!sim->span) return ST_ENOMEM;
  *out = sim;
  return ST_OK;
}

Status sched_simulate(SchedArena *arena, SchedSim **out, const Sched *sched,
                      const SchedCosts *costs) {
  SchedPlace at, other;
  int broken;
  SchedSim *sim;
  SchedRun run = {.sched = sched, .costs = costs};
  TRY(sched_index(arena, &run.index, sched, &at, &other, &broken));
  if (broken)
    return sched_fail(arena, ST_EVALUE, "schedule %s breaks invariant %d on rank %d, action %d",
                      sched->name, broken, at.rank, at.index);
  TRY(new_sim(arena, &sim, sched));
  run.first = sim->first;
  run.span = sim->span;
  TRY(sched_run(arena, &run));
  for (int rank = 0; rank < sched->ranks; rank++) {
    if (run.at[rank] < sched->row[rank].count)
      return sched_fail(arena, ST_EVALUE, "schedule %s: rank %d waits for ever at action %d",
                        sched->name, rank, run.at[rank]);
  }
  sum_up(sched, costs, sim);
  *out = sim;
  return ST_OK;
}

// ---- measured --------------------------------------------------------------------------------

Status sched_measured(SchedArena *arena, SchedSim **out, const Sched *sched, const SchedSpan *span,
                      double scale) {
  SchedSim *sim;
  SchedCosts nothing = {0};
  double begin = 0;
  bool is_first = true;
  TRY(new_sim(arena, &sim, sched));
  int64_t count = sim->first[sched->ranks];
  for (int64_t i = 0; i < count; i++) {
    if (!(span[i].end >= span[i].start))
      return sched_fail(arena, ST_EVALUE, "span %lld is from %g to %g", (long long)i, span[i].start,
                        span[i].end);
    if (span[i].end <= span[i].start || (!is_first && span[i].start >= begin)) continue;
    begin = span[i].start;
    is_first = false;
  }
  for (int rank = 0; rank < sched->ranks; rank++) {
    double clock = 0; // where an action that took no time is put
    for (int64_t i = sim->first[rank]; i < sim->first[rank + 1]; i++) {
      bool ran = span[i].end > span[i].start;
      sim->span[i] = (SchedSpan){clock, clock, 0};
      if (ran)
        sim->span[i] = (SchedSpan){(span[i].start - begin) * scale, (span[i].end - begin) * scale,
                                   span[i].waited * scale};
      clock = sim->span[i].end;
    }
  }
  sum_up(sched, &nothing, sim);
  *out = sim;
  return ST_OK;
}

// Mean times of a stage, by kind.
typedef struct MeanTimes {
  double time[ACTION_KINDS];
  int count[ACTION_KINDS];
} MeanTimes;

static double mean_price(const void *user, Action action) {
  const MeanTimes *mean = (const MeanTimes *)user + action.stage;
  return mean->time[action.kind];
}

Status sched_mean_costs(SchedArena *arena, SchedCosts *out, const Sched *sched,
                        const SchedSim *measured) {
  size_t stages = (size_t)sched->copies * (size_t)sched->stages;
  MeanTimes *mean = sched_alloc(arena, stages, sizeof *mean), all = {0};
  if (!mean) return ST_ENOMEM;
  for (int rank = 0; rank < sched->ranks; rank++) {
    for (int i = 0; i < sched->row[rank].count; i++) {
      Action action = sched->row[rank].action[i];
      SchedSpan span = measured->span[measured->first[rank] + i];
      if (action.stage < 0 || (size_t)action.stage >= stages) continue;
      mean[action.stage].time[action.kind] += span.end - span.start;
      mean[action.stage].count[action.kind]++;
      all.time[action.kind] += span.end - span.start;
      all.count[action.kind]++;
    }
  }
  for (int kind = 0; kind < ACTION_KINDS; kind++) {
    if (all.count[kind] > 0) all.time[kind] /= all.count[kind];
    for (size_t stage = 0; stage < stages; stage++)
      if (mean[stage].count[kind] > 0) mean[stage].time[kind] /= mean[stage].count[kind];
  }
  *out = sched_costs(0, 0, 0);
  out->price = mean_price;
  out->user = mean;
  out->reduce_grad = all.time[ACTION_REDUCE_GRAD];
  out->reduce_tied = all.time[ACTION_REDUCE_TIED];
  out->step = all.time[ACTION_STEP];
  return ST_OK;
}

// ---- critical path ---------------------------------------------------------------------------

// What a walk along the critical path needs.
typedef struct Walk {
  const Sched *sched;
  const SchedSim *sim;
  SchedIndex index;
} Walk;

static double end_of(const Walk *walk, SchedPlace place) {
  return place.index < 0 ? -1 : walk->sim->span[walk->sim->first[place.rank] + place.index].end;
}

// The latest of the inputs that a compute action gets from other ranks; index -1: none.
static SchedPlace latest_input(const Walk *walk, int rank, Action action) {
  const Sched *sched = walk->sched;
  SchedPlace latest = {rank, -1};
  int needs = action_properties(action.kind);
  if (!(needs & (NEEDS_OUTPUT | NEEDS_GRAD))) return latest;
  bool is_grad = needs & NEEDS_GRAD;
  SchedEdgeWalk edge = {.sched = sched, .stage = action.stage, .is_into = !is_grad};
  while (sched_next_edge(&edge)) {
    if ((is_grad && !edge.has_grad) || sched->holder[edge.other] == rank) continue;
    int64_t cell = sched_cell(sched, edge.other, action.mb);
    SchedPlace place = {sched->holder[edge.other],
                        is_grad ? walk->index.b[cell] : walk->index.f[cell]};
    if (end_of(walk, place) > end_of(walk, latest)) latest = place;
  }
  return latest;
}

// The latest action before a REDUCE_TIED on any rank that holds the group.
static SchedPlace latest_holder(const Walk *walk, int group) {
  const Sched *sched = walk->sched;
  SchedPlace latest = {0, -1};
  for (int i = 0; i < sched->tieds; i++) {
    if (sched->tied[i].group != group) continue;
    int rank = sched->holder[sched->tied[i].stage];
    for (int k = 0; k < sched->row[rank].count; k++) {
      Action action = sched->row[rank].action[k];
      if (action.kind == ACTION_REDUCE_TIED && action.mb == group && k > 0 &&
          end_of(walk, (SchedPlace){rank, k - 1}) > end_of(walk, latest))
        latest = (SchedPlace){rank, k - 1};
    }
  }
  return latest;
}

// The action that the one at `place` waited for on another rank; index -1: it did not wait.
static SchedPlace waited_for(const Walk *walk, SchedPlace place) {
  const SchedRow *row = &walk->sched->row[place.rank];
  const SchedSpan *span = walk->sim->span + walk->sim->first[place.rank];
  Action action = row->action[place.index];
  SchedPlace none = {place.rank, -1};
  int marker = place.index; // of the pair that the action belongs to, at most two before it
  while (marker > 0 && place.index - marker < 2 && row->action[marker].kind != ACTION_OVERLAP_F_B)
    marker--;
  bool is_paired = marker < place.index && row->action[marker].kind == ACTION_OVERLAP_F_B &&
                   span[marker].waited > 0 && span[marker].start == span[place.index].start;
  if (span[place.index].waited <= 0 && !is_paired) return none;
  if (action.kind == ACTION_REDUCE_TIED) return latest_holder(walk, action.mb);
  SchedPlace latest = latest_input(walk, place.rank, action);
  for (int i = marker + 1; is_paired && i <= marker + 2 && i < row->count; i++) {
    SchedPlace other = latest_input(walk, place.rank, row->action[i]);
    if (end_of(walk, other) > end_of(walk, latest)) latest = other;
  }
  return latest;
}

// The action before it on its rank that took time; index -1: none.
static SchedPlace before(const Walk *walk, SchedPlace place) {
  const SchedSpan *span = walk->sim->span + walk->sim->first[place.rank];
  double start = span[place.index].start;
  for (int i = place.index - 1; i >= 0; i--)
    if (span[i].end > span[i].start && span[i].end <= start) return (SchedPlace){place.rank, i};
  return (SchedPlace){place.rank, -1};
}

static SchedPlace last_of_all(const Walk *walk) {
  SchedPlace last = {0, -1};
  for (int rank = 0; rank < walk->sched->ranks; rank++)
    for (int i = 0; i < walk->sched->row[rank].count; i++)
      if (end_of(walk, (SchedPlace){rank, i}) > end_of(walk, last)) last = (SchedPlace){rank, i};
  return last;
}

Status sched_critical_path(SchedArena *arena, SchedLink **out, int *count, const Sched *sched,
                           const SchedSim *sim) {
  SchedPlace at, other;
  int broken, length = 0;
  Walk walk = {.sched = sched, .sim = sim};
  TRY(sched_index(arena, &walk.index, sched, &at, &other, &broken));
  SchedLink *link = sched_alloc(arena, (size_t)sim->first[sched->ranks], sizeof *link);
  if (!link) return ST_ENOMEM;
  for (SchedPlace place = last_of_all(&walk); place.index >= 0; length++) {
    SchedPlace cause = waited_for(&walk, place);
    link[length] = (SchedLink){place.rank, place.index, cause.index >= 0};
    place = cause.index >= 0 ? cause : before(&walk, place);
  }
  for (int i = 0; i < length / 2; i++) {
    SchedLink first = link[i];
    link[i] = link[length - 1 - i];
    link[length - 1 - i] = first;
  }
  *out = link;
  *count = length;
  return ST_OK;
}
