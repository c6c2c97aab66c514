// sched_table - all known schedules side by side: what each costs as messages take longer, and what
// it keeps.
#include "parallel/sched_inner.h"

enum { HOPS = 4 };
static const double hops[HOPS] = {0, 0.1, 0.2, 0.4}; // of F

// A row's figures.
typedef struct Costs {
  double percent[HOPS]; // bubble over ideal of one step
  double span;          // between steps, without latency
  double peak;          // most live activations of a rank, in whole-rank units
} Costs;

static Status find_costs(SchedArena *arena, const SchedType *type, const SchedCase *c, Costs *out) {
  Sched *sched;
  SchedSim *sim;
  SchedCosts costs = sched_costs(c->F, c->I, c->W);
  SchedCase sizes = {.ranks = c->ranks, .mbs = c->mbs}; // each with its usual stages and groups
  TRY(sched_generate(arena, &sched, type, &sizes));
  costs.overlap = c->overlap;
  for (int i = 0; i < HOPS; i++) {
    costs.hop = hops[i] * c->F;
    TRY(sched_simulate(arena, &sim, sched, &costs));
    double ideal = sim->makespan - sim->makespan_bubble;
    out->percent[i] = ideal > 0 ? 100 * sim->makespan_bubble / ideal : 0;
    if (i > 0) continue;
    out->span = ideal > 0 ? 100 * sim->span_bubble / ideal : 0;
    out->peak = 0;
    for (int rank = 0; rank < sched->ranks; rank++)
      if ((double)sim->peak[rank] > out->peak) out->peak = (double)sim->peak[rank];
    out->peak /= sched->chunks;
  }
  return ST_OK;
}

// A number with one decimal.
static void print_cell(const SchedOut *out, double value, const char *unit, int width) {
  SchedName text;
  long long tenths = (long long)(value * 10 + 0.5);
  sched_format(text.text, sizeof text.text, "%lld.%d%s", tenths / 10, (int)(tenths % 10), unit);
  sched_print(out, "%*s", width, text.text);
}

Status sched_print_table(SchedArena *arena, const SchedOut *out, const SchedCase *c) {
  enum { WIDTH = 9 };
  int count;
  const SchedType *type = sched_types(&count);
  sched_print(out, "%d ranks, %d microbatches; F=%g I=%g W=%g", c->ranks, c->mbs, c->F, c->I, c->W);
  if (c->overlap >= 0) sched_print(out, ", pairs of dualpipev %g", c->overlap);
  sched_print(out, "\n\n%-12s %9s   %s\n%-12s %9s", "", "stages",
              "bubble over ideal, where a message takes", "schedule", "a rank");
  for (int i = 0; i < HOPS; i++) {
    SchedName text;
    sched_format(text.text, sizeof text.text, hops[i] > 0 ? "%g F" : "%g", hops[i]);
    sched_print(out, "%*s", (int)WIDTH, text.text);
  }
  sched_print(out, "  %14s  %s\n", "between steps", "activations");
  for (int i = 0; i < count; i++, type++) {
    Costs costs;
    TRY(find_costs(arena, type, c, &costs));
    sched_print(out, "%-12s %9d", type->name, type->chunks);
    for (int k = 0; k < HOPS; k++) print_cell(out, costs.percent[k], "%", WIDTH);
    print_cell(out, costs.span, "%", 16);
    print_cell(out, costs.peak, "", 13);
    sched_print(out, "\n");
  }
  return ST_OK;
}
