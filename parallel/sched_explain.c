// sched_explain - the critical path of a simulated schedule in words.
#include "parallel/sched_inner.h"

// A stretch of the path on one rank.
typedef struct Stretch {
  int first, last; // links
  int kinds[ACTION_KINDS];
} Stretch;

static Action action_at(const Sched *sched, const SchedLink *link) {
  return sched->row[link->rank].action[link->index];
}

static SchedSpan span_at(const SchedSim *sim, const SchedLink *link) {
  return sim->span[sim->first[link->rank] + link->index];
}

static Stretch stretch_from(const Sched *sched, const SchedLink *path, int count, int first) {
  Stretch stretch = {.first = first, .last = first};
  while (stretch.last + 1 < count && path[stretch.last + 1].rank == path[first].rank)
    stretch.last++;
  for (int i = first; i <= stretch.last; i++) stretch.kinds[action_at(sched, &path[i]).kind]++;
  return stretch;
}

static void print_stretch(const SchedOut *out, const Sched *sched, const SchedSim *sim,
                          const SchedLink *path, const Stretch *stretch) {
  const SchedLink *first = &path[stretch->first], *last = &path[stretch->last];
  SchedSpan begin = span_at(sim, first), end = span_at(sim, last);
  sched_print(out, "  %g to %g  rank %d: %s", begin.start, end.end, first->rank,
              sched_name(action_at(sched, first)).text);
  if (stretch->last > stretch->first) {
    sched_print(out, " to %s without a pause (", sched_name(action_at(sched, last)).text);
    const char *comma = "";
    for (int kind = 0; kind < ACTION_KINDS; kind++) {
      if (stretch->kinds[kind] == 0) continue;
      sched_print(out, "%s%d %s", comma, stretch->kinds[kind], action_text((ActionKind)kind));
      comma = ", ";
    }
    sched_print(out, ")");
  }
  if (stretch->first > 0) {
    const SchedLink *cause = &path[stretch->first - 1];
    double hop = begin.start - span_at(sim, cause).end;
    sched_print(out, ", after %s of rank %d", sched_name(action_at(sched, cause)).text,
                cause->rank);
    if (hop > 0) sched_print(out, " and %g under way", hop);
  }
  sched_print(out, "\n");
}

void sched_print_path(const SchedOut *out, const Sched *sched, const SchedSim *sim,
                      const SchedLink *path, int count) {
  int busiest = 0, hops = 0, shown = 0;
  double computing = 0, under_way = 0;
  for (int rank = 0; rank < sched->ranks; rank++)
    if (sim->busy[rank] > sim->busy[busiest]) busiest = rank;
  for (int i = 0; i < count; i++) {
    SchedSpan span = span_at(sim, &path[i]);
    if (i > 0 && path[i].by_message)
      hops++, under_way += span.start - span_at(sim, &path[i - 1]).end;
    computing += span.end - span.start;
  }
  sched_print(
      out,
      "The step takes %g: %g of computing and %g of messages under way, one after the other, "
      "over %d changes of rank.\n",
      sim->makespan, computing, under_way, hops);
  sched_print(out, "The busiest rank, %d, computes for %g; the other %g is the bubble. ", busiest,
              sim->busy[busiest], sim->makespan_bubble);
  sched_print(out, "What decides the length:\n");
  for (int i = 0; i < count;) {
    Stretch stretch = stretch_from(sched, path, count, i);
    enum { SHOWN_MAX = 40 };
    if (shown++ < SHOWN_MAX)
      print_stretch(out, sched, sim, path, &stretch);
    else if (shown == SHOWN_MAX + 1)
      sched_print(out, "  ... and so on\n");
    i = stretch.last + 1;
  }
  double warm = 0, cool = 0;
  for (int rank = 0; rank < sched->ranks; rank++) {
    if (sim->begin[rank] > warm) warm = sim->begin[rank];
    if (sim->makespan - sim->end[rank] > cool) cool = sim->makespan - sim->end[rank];
  }
  sched_print(out,
              "The last rank to begin waits %g for its first input; the first to end is done %g "
              "before the step is.\n",
              warm, cool);
}
