// partition - units to stages: the exact split of a line into stages, and a bounded search where
// ranks hold several.
#include "parallel/partition.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Sums over units [0, u), so that a stage's figures are differences.
typedef struct Sums {
  double *cost, *kept, *state; // [units + 1], one block
} Sums;

// Costs that differ by less are the same.
static const double SAME = 1e-12;

static int rank_of(const PartitionCase *c, int stage) {
  return c->holder ? c->holder[stage] : stage % c->ranks;
}

static double cost_of(const Sums *sums, int from, int to) {
  return sums->cost[to] - sums->cost[from];
}

static double bytes_of(const PartitionCase *c, const Sums *sums, int stage, int from, int to) {
  double live = c->live ? c->live[stage] : 1;
  return sums->state[to] - sums->state[from] + live * (sums->kept[to] - sums->kept[from]);
}

static Status check_unit(int unit, const char *what, double value) {
  if (value >= 0 && isfinite(value)) return ST_OK;
  return fail(ST_EVALUE, "unit %d: its %s is %g", unit, what, value);
}

static Status sums_new(const PartitionCase *c, Sums *out) {
  size_t n = (size_t)c->units + 1;
  double *block = calloc(3 * n, sizeof *block);
  if (!block) return fail(ST_ENOMEM, "out of memory for a split of %d units", c->units);
  Sums sums = {block, block + n, block + 2 * n};
  for (int u = 0; u < c->units; u++) {
    double cost = c->cost ? c->cost[u] : 1, kept = c->kept ? c->kept[u] : 0;
    double state = c->state ? c->state[u] : 0;
    Status status = check_unit(u, "cost", cost);
    if (status == ST_OK) status = check_unit(u, "bytes a microbatch", kept);
    if (status == ST_OK) status = check_unit(u, "bytes of state", state);
    if (status != ST_OK) {
      free(block);
      return status;
    }
    sums.cost[u + 1] = sums.cost[u] + cost;
    sums.kept[u + 1] = sums.kept[u] + kept;
    sums.state[u + 1] = sums.state[u] + state;
  }
  *out = sums;
  return ST_OK;
}

static Status check_sizes(const PartitionCase *c) {
  assert(c->units >= 0 && c->stages >= 1 && c->ranks >= 1);
  if (c->stages <= c->units) return ST_OK;
  Status status = fail(ST_EVALUE, "%d stages for %d units: each stage needs a unit of the model",
                       c->stages, c->units);
  return fail_hint(status,
                   "fewer ranks (pp) or stages_per_rank, smaller units, or a split by a list, in "
                   "which stages may have 0 units");
}

// ---- measuring -------------------------------------------------------------------------------

static void measure(const PartitionCase *c, const Sums *sums, const int *first,
                    PartitionFigures *out) {
  *out = (PartitionFigures){.total = sums->cost[c->units]};
  for (int rank = 0; rank < c->ranks; rank++) {
    double cost = 0, bytes = 0;
    for (int s = 0; s < c->stages; s++) {
      if (rank_of(c, s) != rank) continue;
      double own = cost_of(sums, first[s], first[s + 1]);
      cost += own;
      bytes += bytes_of(c, sums, s, first[s], first[s + 1]);
      if (own > out->stage_cost) out->stage_cost = own;
    }
    if (cost > out->rank_cost) out->rank_cost = cost;
    if (bytes > out->bytes) out->bytes = bytes;
  }
}

void partition_measure(const PartitionCase *c, const int *first, PartitionFigures *figures) {
  Sums sums;
  *figures = (PartitionFigures){.total = (double)NAN};
  if (sums_new(c, &sums) != ST_OK) return;
  measure(c, &sums, first, figures);
  free(sums.cost);
}

// ---- without costs ---------------------------------------------------------------------------

Status partition_uniform(const PartitionCase *c, int *first) {
  TRY(check_sizes(c));
  for (int s = 0; s <= c->stages; s++) first[s] = (int)((int64_t)s * c->units / c->stages);
  return ST_OK;
}

// "{3, 0, 2}" of counts, cut where it gets long.
static void print_counts(char *text, size_t size, const int *count, int n) {
  size_t at = (size_t)snprintf(text, size, "{");
  for (int s = 0; s < n && at + 24 < size; s++)
    at += (size_t)snprintf(text + at, size - at, "%s%d", s ? ", " : "", count[s]);
  snprintf(text + at, size - at, at + 24 < size ? "}" : ", ...}");
}

Status partition_given(const PartitionCase *c, const int *count, int n, int *first) {
  char text[256];
  int64_t sum = 0;
  print_counts(text, sizeof text, count, n);
  if (n != c->stages)
    return fail(ST_EVALUE, "split = %s is for %d stages; there are %d (pp x stages_per_rank)", text,
                n, c->stages);
  for (int s = 0; s < n; s++) {
    if (count[s] < 0)
      return fail(ST_EVALUE, "split = %s: stage %d cannot have %d units", text, s, count[s]);
    sum += count[s];
  }
  if (sum != c->units)
    return fail(ST_EVALUE, "split = %s places %lld units; the model has %d", text, (long long)sum,
                c->units);
  first[0] = 0;
  for (int s = 0; s < n; s++) first[s + 1] = first[s] + count[s];
  return ST_OK;
}

// ---- one stage a rank: dynamic programming ---------------------------------------------------

// The best plan for units [0, u) over the stages so far.
typedef struct Plan {
  double value; // what is minimised: the largest cost, or the sum of squares
  int from;     // where the last stage begins; -1: there is no plan
} Plan;

// What a plan of one pass may do: stages up to `cap` and, if limited, within the bytes of a rank.
typedef struct Pass {
  const PartitionCase *c;
  const Sums *sums;
  bool is_limited, by_squares;
  double cap;
} Pass;

// The plans with stage s as their last, from those before it.
static void add_stage(const Pass *pass, int s, const Plan *before, Plan *plan) {
  for (int u = 0; u <= pass->c->units; u++) {
    plan[u] = (Plan){HUGE_VAL, -1};
    for (int from = u - 1; from >= s; from--) {
      double cost = cost_of(pass->sums, from, u), own = pass->by_squares ? cost * cost : cost;
      if (cost > pass->cap || own > plan[u].value) break; // it only grows
      if (pass->is_limited && bytes_of(pass->c, pass->sums, s, from, u) > pass->c->limit) break;
      if (before[from].from < 0) continue;
      double value = pass->by_squares ? before[from].value + own : fmax(before[from].value, own);
      if (value < plan[u].value) plan[u] = (Plan){value, from};
    }
  }
}

// plans: [stages + 1][units + 1]. false: there is no split.
static bool plan_stages(const Pass *pass, Plan *plans, int *first) {
  const PartitionCase *c = pass->c;
  size_t width = (size_t)c->units + 1;
  for (int u = 0; u <= c->units; u++) plans[u] = (Plan){0, u == 0 ? 0 : -1};
  for (int s = 0; s < c->stages; s++)
    add_stage(pass, s, plans + (size_t)s * width, plans + (size_t)(s + 1) * width);
  if (plans[(size_t)c->stages * width + (size_t)c->units].from < 0) return false;
  first[c->stages] = c->units;
  for (int s = c->stages; s > 0; s--)
    first[s - 1] = plans[(size_t)s * width + (size_t)first[s]].from;
  return true;
}

// ---- several stages a rank: search with bounds -----------------------------------------------

enum { NODES_MAX = 1 << 20 };

typedef struct Search {
  const PartitionCase *c;
  const Sums *sums;
  double rank_cap, stage_cap; // a split must stay below both
  double *load, *bytes;       // [ranks] so far
  int *left;                  // [ranks] stages still to come
  int *first, *best;          // [stages + 1]
  PartitionFigures found;     // of best
  bool is_found, by_stage;    // by_stage: the stage cap sinks with each find, else the rank cap
  int nodes;
} Search;

// What the ranks that still get stages can take is less than what is left.
static bool is_hopeless(const Search *search, int unit) {
  const PartitionCase *c = search->c;
  double room = 0, left = cost_of(search->sums, unit, c->units);
  for (int rank = 0; rank < c->ranks; rank++)
    if (search->left[rank] > 0)
      room += fmin(search->rank_cap - search->load[rank], search->stage_cap * search->left[rank]);
  return left > room * (1 + SAME);
}

static void keep(Search *search) {
  const PartitionCase *c = search->c;
  memcpy(search->best, search->first, ((size_t)c->stages + 1) * sizeof *search->best);
  measure(c, search->sums, search->best, &search->found);
  search->is_found = true;
  if (search->by_stage)
    search->stage_cap = search->found.stage_cost * (1 - SAME);
  else
    search->rank_cap = search->found.rank_cost * (1 - SAME);
}

static void place_stage(Search *search, int stage, int unit);

// Stage `stage` gets units [unit, to).
static void try_stage(Search *search, int stage, int unit, int to) {
  const PartitionCase *c = search->c;
  int rank = rank_of(c, stage);
  double cost = cost_of(search->sums, unit, to);
  double bytes = bytes_of(c, search->sums, stage, unit, to);
  if (search->load[rank] + cost > search->rank_cap || cost > search->stage_cap) return;
  if (c->limit > 0 && search->bytes[rank] + bytes > c->limit) return;
  double load = search->load[rank], held = search->bytes[rank];
  search->load[rank] += cost;
  search->bytes[rank] += bytes;
  search->left[rank]--;
  search->first[stage + 1] = to;
  place_stage(search, stage + 1, to);
  search->left[rank]++;
  search->load[rank] = load;
  search->bytes[rank] = held;
}

// Tries the sizes of a stage, those near an even share of what is left first.
static void place_stage(Search *search, int stage, int unit) {
  const PartitionCase *c = search->c;
  int stages_left = c->stages - stage, last = c->units - stages_left + 1;
  if (stages_left == 0) {
    keep(search);
    return;
  }
  if (search->nodes++ >= NODES_MAX || is_hopeless(search, unit)) return;
  if (stages_left == 1) {
    try_stage(search, stage, unit, c->units);
    return;
  }
  double share = cost_of(search->sums, unit, c->units) / stages_left;
  int up = unit + 1;
  while (up < last && cost_of(search->sums, unit, up) < share) up++;
  for (int down = up - 1; up <= last || down > unit;) {
    bool goes_up = down <= unit || (up <= last && cost_of(search->sums, unit, up) - share <=
                                                      share - cost_of(search->sums, unit, down));
    try_stage(search, stage, unit, goes_up ? up++ : down--);
  }
}

static void start(Search *search, double rank_cap, double stage_cap, bool by_stage) {
  const PartitionCase *c = search->c;
  memset(search->load, 0, (size_t)c->ranks * sizeof *search->load);
  memset(search->bytes, 0, (size_t)c->ranks * sizeof *search->bytes);
  memset(search->left, 0, (size_t)c->ranks * sizeof *search->left);
  for (int s = 0; s < c->stages; s++) search->left[rank_of(c, s)]++;
  search->rank_cap = rank_cap;
  search->stage_cap = stage_cap;
  search->by_stage = by_stage;
  search->nodes = 0;
  search->first[0] = 0;
  place_stage(search, 0, 0);
}

// Moves single boundaries as long as that helps.
static void climb(Search *search, int *first) {
  const PartitionCase *c = search->c;
  PartitionFigures now, next;
  measure(c, search->sums, first, &now);
  for (bool moved = true; moved;) {
    moved = false;
    for (int s = 1; s < c->stages; s++) {
      for (int by = -1; by <= 1; by += 2) {
        if (first[s] + by <= first[s - 1] || first[s] + by >= first[s + 1]) continue;
        first[s] += by;
        measure(c, search->sums, first, &next);
        bool is_gain = next.rank_cost < now.rank_cost * (1 - SAME) ||
                       (next.rank_cost <= now.rank_cost * (1 + SAME) &&
                        next.stage_cost < now.stage_cost * (1 - SAME));
        if (is_gain && (c->limit <= 0 || next.bytes <= c->limit))
          now = next, moved = true;
        else
          first[s] -= by;
      }
    }
  }
}

// The search itself, from a first split (or none, where that breaks the limit).
static void improve(Search *search, bool has_first) {
  const PartitionCase *c = search->c;
  bool is_complete = true;
  double rank_cap = HUGE_VAL;
  if (has_first) {
    climb(search, search->best);
    measure(c, search->sums, search->best, &search->found);
    search->is_found = c->limit <= 0 || search->found.bytes <= c->limit;
    if (search->is_found) rank_cap = search->found.rank_cost * (1 - SAME);
  }
  start(search, rank_cap, HUGE_VAL, false);
  is_complete = search->nodes < NODES_MAX;
  if (search->is_found) {
    start(search, search->found.rank_cost * (1 + SAME), search->found.stage_cost * (1 - SAME),
          true);
    is_complete = is_complete && search->nodes < NODES_MAX;
  }
  search->found.is_optimal = is_complete;
}

static bool has_one_stage_a_rank(const PartitionCase *c) {
  for (int a = 0; a < c->stages; a++)
    for (int b = 0; b < a; b++)
      if (rank_of(c, a) == rank_of(c, b)) return false;
  return true;
}

// ---- the best split --------------------------------------------------------------------------

static Status nothing_fits(const PartitionCase *c, bool is_sure) {
  Status status =
      fail(ST_EVALUE, "%s keeps every rank within %.4g GB (%d units, %d stages, %d ranks)",
           is_sure ? "no split" : "no split that was found", c->limit * 1e-9, c->units, c->stages,
           c->ranks);
  return fail_hint(status, "more ranks (pp), a smaller batch.micro, recompute, or a schedule that "
                           "keeps fewer activations");
}

static Status solve(const PartitionCase *c, const Sums *sums, int *first,
                    PartitionFigures *figures) {
  size_t width = (size_t)c->units + 1, ranks = (size_t)c->ranks, stages = (size_t)c->stages + 1;
  Status status = ST_OK;
  Plan *plans = calloc(stages * width, sizeof *plans);
  double *numbers = calloc(2 * ranks, sizeof *numbers);
  int *counts = calloc(ranks + 2 * stages, sizeof *counts);
  if (!plans || !numbers || !counts) {
    status = fail(ST_ENOMEM, "out of memory for a split of %d units", c->units);
    goto done;
  }
  int *best = counts + ranks;
  bool is_simple = has_one_stage_a_rank(c);
  Pass pass = {c, sums, is_simple && c->limit > 0, false, HUGE_VAL};
  bool is_found = plan_stages(&pass, plans, best);
  if (is_simple && is_found) { // now the most even of those with the smallest largest stage
    measure(c, sums, best, figures);
    pass.by_squares = true;
    pass.cap = figures->stage_cost;
    plan_stages(&pass, plans, best);
    measure(c, sums, best, figures);
    figures->is_optimal = true;
  }
  if (!is_simple) {
    Search search = {.c = c,
                     .sums = sums,
                     .load = numbers,
                     .bytes = numbers + ranks,
                     .left = counts,
                     .best = best,
                     .first = best + stages};
    improve(&search, is_found);
    is_found = search.is_found;
    *figures = search.found;
  }
  if (is_found)
    memcpy(first, best, stages * sizeof *first);
  else
    status = nothing_fits(c, is_simple || figures->is_optimal);
done:
  free(plans);
  free(numbers);
  free(counts);
  return status;
}

Status partition_balanced(const PartitionCase *c, int *first, PartitionFigures *figures) {
  Sums sums;
  PartitionFigures own = {0};
  TRY(check_sizes(c));
  TRY(sums_new(c, &sums));
  Status status;
  if (sums.cost[c->units] > 0 || c->limit > 0)
    status = solve(c, &sums, first, &own);
  else { // nothing to tell splits apart
    status = partition_uniform(c, first);
    measure(c, &sums, first, &own);
    own.is_optimal = true;
  }
  free(sums.cost);
  if (status == ST_OK && figures) *figures = own;
  return status;
}

// ---- live microbatches -----------------------------------------------------------------------

void partition_live(const Sched *sched, int *live) {
  int stages = sched->copies * sched->stages;
  for (int s = 0; s < stages; s++) {
    const SchedRow *row = &sched->row[sched->holder[s]];
    int now = 0;
    live[s] = 0;
    for (int i = 0; i < row->count; i++) {
      if (row->action[i].stage != s) continue;
      int does = action_properties(row->action[i].kind);
      if (does & KEEPS) now++;
      if (now > live[s]) live[s] = now;
      if (does & FREES) now--;
    }
  }
}
