// sched_gen - the table of known schedules: names, sizes, generators, published formulas.
//
// Formulas are those of the documentation, in whole-rank times; each is tested over a grid of p, m
// and costs against what the simulator finds. A formula that is exact under conditions returns
// false outside of them.
#include "parallel/sched_gen.h"

// ---- peaks, in chunks ------------------------------------------------------------------------

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t peak_all(const SchedCase *c, int rank) {
  (void)rank;
  return (int64_t)c->mbs * c->chunks;
}
static int64_t peak_1f1b(const SchedCase *c, int rank) { return least(c->mbs, c->ranks - rank); }
static int64_t peak_eager(const SchedCase *c, int rank) {
  return least(c->mbs, 2 * (c->ranks - rank) - 1);
}
static int64_t peak_interleaved(const SchedCase *c, int rank) {
  int64_t N = sched_group_size(c->ranks, c->mbs, c->group);
  return least((int64_t)c->mbs * c->chunks, (c->chunks - 1) * N + 2 * (c->ranks - 1 - rank) + 1);
}
static int64_t peak_zb_h1(const SchedCase *c, int rank) {
  (void)rank;
  return least(c->mbs, c->ranks);
}
static int64_t peak_zb_h2(const SchedCase *c, int rank) {
  (void)rank;
  return least(c->mbs, 2 * c->ranks - 1);
}
// V placement: whole-rank units times two, never above all microbatches.
static int64_t peak_zbv(const SchedCase *c, int rank) {
  (void)rank;
  return 2 * least(c->mbs, c->ranks);
}
static int64_t peak_v_half(const SchedCase *c, int rank) {
  (void)rank;
  return 2 * least(c->mbs, (c->ranks + 2) / 2);
}
static int64_t peak_v_min(const SchedCase *c, int rank) {
  (void)rank;
  return 2 * least(c->mbs, (c->ranks + 4) / 3);
}
static int64_t peak_1f1b_v(const SchedCase *c, int rank) {
  (void)rank;
  return 2 * least(c->mbs, 2 * c->ranks / 3 + 1);
}
static int64_t peak_dualpipev(const SchedCase *c, int rank) {
  (void)rank;
  return least(2 * (int64_t)c->mbs, 2 * c->ranks + 1);
}
static int64_t peak_hanayo(const SchedCase *c, int rank) {
  (void)rank;
  return (int64_t)c->chunks * least(c->mbs, c->ranks);
}

// ---- bubbles ---------------------------------------------------------------------------------

static double larger(double a, double b) { return a > b ? a : b; }
static double backward(const SchedCase *c) { return c->I + c->W; }

static bool bubble_gpipe(const SchedCase *c, double *bubble) {
  *bubble = (c->ranks - 1) * (c->F + backward(c));
  return true;
}

// One chunk's share of it, and more where a group is smaller than the ranks.
static bool bubble_bfs(const SchedCase *c, double *bubble) {
  double chunk = (c->F + backward(c)) / c->chunks;
  *bubble = (c->ranks - 1) * chunk;
  if (c->mbs < c->ranks) *bubble += (double)(c->ranks - c->mbs) * (c->chunks - 1) * chunk;
  return true;
}

static bool bubble_interleaved(const SchedCase *c, double *bubble) {
  int N = sched_group_size(c->ranks, c->mbs, c->group);
  bool is_good = c->mbs <= N || (N >= c->ranks && (c->mbs % N == 0 || c->mbs % N >= c->ranks));
  if (c->group > 0 && c->chunks > 1 && !is_good) return false;
  return bubble_bfs(c, bubble);
}

static bool span_zb_h1(const SchedCase *c, double *bubble) {
  *bubble = (c->ranks - 1) * (c->F + c->I - c->W);
  if (c->mbs < c->ranks) *bubble += (c->ranks - c->mbs) * c->W;
  return c->W <= c->F;
}
static bool makespan_zb_h1(const SchedCase *c, double *bubble) {
  *bubble = (c->ranks - 1) * larger(c->F, c->F + c->I - c->W);
  return c->W <= c->F && c->mbs >= c->ranks;
}

static bool span_zb_h2(const SchedCase *c, double *bubble) {
  *bubble = (c->ranks - 1) * larger(0, c->F + c->I - 2 * c->W);
  if (c->mbs >= 2 * c->ranks - 1) return c->W <= c->F;
  *bubble += (2 * c->ranks - 1 - c->mbs) * c->W;
  return c->W <= c->F && c->F + c->I >= 2 * c->W;
}
static bool makespan_zb_h2(const SchedCase *c, double *bubble) {
  *bubble = (c->ranks - 1) * larger(c->F, c->F + c->I - 2 * c->W);
  return c->W <= c->F && c->mbs >= 2 * c->ranks - 1;
}

static bool are_equal(const SchedCase *c) {
  return !(c->F < c->I || c->F > c->I) && !(c->F < c->W || c->F > c->W);
}

static bool span_zbv(const SchedCase *c, double *bubble) {
  *bubble = (double)most(0, 2 * c->ranks - 1 - c->mbs) * c->F;
  return are_equal(c);
}
static bool makespan_zbv(const SchedCase *c, double *bubble) {
  *bubble = larger((double)most(0, 2 * c->ranks - 1 - c->mbs), 0.5 * (c->ranks - 1)) * c->F;
  return are_equal(c);
}

// No closed form: listed by p, for m >= 2p.
enum { LISTED = 9 };
static bool listed(const SchedCase *c, const double bubbles[LISTED], double *bubble) {
  if (c->ranks >= LISTED || bubbles[c->ranks] < 0 || !are_equal(c) || c->mbs < 2 * c->ranks)
    return false;
  *bubble = bubbles[c->ranks] * c->F;
  return true;
}
static bool makespan_v_half(const SchedCase *c, double *bubble) {
  static const double by_ranks[LISTED] = {-1, 0, .5, 2.5, 2.5, 5.5, 5.5, -1, 8.5};
  return listed(c, by_ranks, bubble);
}
// With two ranks the whole bubble is rank 1's late start, which the next step hides.
static bool span_v_half(const SchedCase *c, double *bubble) {
  bool is_known = makespan_v_half(c, bubble);
  if (c->ranks == 2) *bubble = 0;
  return is_known;
}
static bool bubble_v_min(const SchedCase *c, double *bubble) {
  static const double by_ranks[LISTED] = {-1, 0, 1, 2.5, 5.5, 7, 8.5, -1, 13};
  return listed(c, by_ranks, bubble);
}
static bool bubble_1f1b_v(const SchedCase *c, double *bubble) {
  static const double by_ranks[LISTED] = {-1, 0, 2, 4, 7.5, 9, 11, -1, 16.5};
  return listed(c, by_ranks, bubble);
}

static bool bubble_dualpipev(const SchedCase *c, double *bubble) {
  double B = backward(c);
  double off = c->overlap - (c->F + B);
  *bubble = 0.5 * (c->ranks - 1) * (c->overlap + B - 3 * c->W);
  return c->overlap >= 0 && !(c->F < c->I || c->F > c->I) && c->W <= c->F &&
         !(off < 0 || off > 0) && c->mbs >= 2 * c->ranks - 1;
}

static bool bubble_hanayo(const SchedCase *c, double *bubble) {
  *bubble = (c->ranks - 1) * backward(c) / (0.5 * c->chunks);
  return c->mbs == c->ranks && c->F <= backward(c);
}

// ---- the table -------------------------------------------------------------------------------

static const SchedType types[] = {
    {"gpipe", "GPipe", "all forwards, then all backwards", PLACE_LOOP, 1, 1, 1, 1, false, true,
     sched_gen_gpipe, peak_all, bubble_gpipe, bubble_gpipe},
    {"1f1b", "1F1B", "one forward, one backward: gpipe's bubble, memory of p microbatches",
     PLACE_LOOP, 1, 1, 1, 1, false, true, sched_gen_1f1b, peak_1f1b, bubble_gpipe, bubble_gpipe},
    {"eager-1f1b", "", "1f1b with twice the warm-up: hides link latency, costs memory", PLACE_LOOP,
     1, 1, 1, 1, false, true, sched_gen_eager, peak_eager, bubble_gpipe, bubble_gpipe},
    {"interleaved", "Interleaved1F1B", "1f1b over v stages a rank: a v-th of the bubble",
     PLACE_LOOP, 2, 1, 0, 1, false, true, sched_gen_interleaved, peak_interleaved,
     bubble_interleaved, bubble_interleaved},
    {"bfs", "LoopedBFS", "gpipe over v stages a rank: a v-th of the bubble, memory of all",
     PLACE_LOOP, 2, 1, 0, 1, false, true, sched_gen_bfs, peak_all, bubble_bfs, bubble_bfs},
    {"zb-h1", "ZB1P", "backward split in two: less bubble in 1f1b's memory", PLACE_LOOP, 1, 1, 1, 1,
     true, true, sched_gen_zb_h1, peak_zb_h1, span_zb_h1, makespan_zb_h1},
    {"zb-h2", "ZB2P", "no bubble between steps, in twice the memory", PLACE_LOOP, 1, 1, 1, 1, true,
     true, sched_gen_zb_h2, peak_zb_h2, span_zb_h2, makespan_zb_h2},
    {"zbv", "ZBVZeroBubble", "no bubble between steps in 1f1b's memory, where F = I = W", PLACE_V,
     2, 2, 2, 1, true, false, sched_gen_zbv, peak_zbv, span_zbv, makespan_zbv},
    {"v-half", "", "half the memory of 1f1b", PLACE_V, 2, 2, 2, 1, true, false, sched_gen_v_half,
     peak_v_half, span_v_half, makespan_v_half},
    {"v-min", "", "a third of the memory of 1f1b", PLACE_V, 2, 2, 2, 1, true, false,
     sched_gen_v_min, peak_v_min, bubble_v_min, bubble_v_min},
    {"1f1b-v", "", "two thirds of the memory of 1f1b, backward in one", PLACE_V, 2, 2, 2, 1, false,
     false, sched_gen_1f1b_v, peak_1f1b_v, bubble_1f1b_v, bubble_1f1b_v},
    {"dualpipev", "DualPipeV", "forward of one chunk and backward of the other at once", PLACE_V, 2,
     2, 2, 1, true, false, sched_gen_dualpipev, peak_dualpipev, bubble_dualpipev, bubble_dualpipev},
    {"hanayo", "", "waves over the ranks, v = 2 stages a rank for each", PLACE_WAVE, 2, 2, 0, 2,
     false, false, sched_gen_hanayo, peak_hanayo, bubble_hanayo, bubble_hanayo},
};
enum { TYPES = sizeof types / sizeof *types };

// Further names that other systems use.
static const struct { const char *alias, *name; } aliases[] = {{"InterleavedZeroBubble", "zb-h1"}};
enum { ALIASES = sizeof aliases / sizeof *aliases };

const SchedType *sched_types(int *count) {
  *count = TYPES;
  return types;
}

static char lower(char c) { return (char)(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c); }

static bool is_same_word(const char *a, const char *b) {
  while (*a && lower(*a) == lower(*b)) a++, b++;
  return *a == 0 && *b == 0;
}

const SchedType *sched_find(const char *name) {
  for (int i = 0; i < ALIASES; i++)
    if (is_same_word(name, aliases[i].alias)) name = aliases[i].name;
  for (int i = 0; i < TYPES; i++)
    if (is_same_word(name, types[i].name) || (*name && is_same_word(name, types[i].alias)))
      return &types[i];
  return NULL;
}

int sched_distance(const char *a, const char *b) {
  enum { LONGEST = 40 };
  int row[LONGEST + 1], m = 0;
  while (m < LONGEST && b[m]) m++;
  for (int j = 0; j <= m; j++) row[j] = j;
  for (int i = 1; a[i - 1] && i <= LONGEST; i++) {
    int diagonal = row[0];
    row[0] = i;
    for (int j = 1; j <= m; j++) {
      int swap = diagonal + (lower(a[i - 1]) != lower(b[j - 1]));
      diagonal = row[j];
      int insert = 1 + (row[j] < row[j - 1] ? row[j] : row[j - 1]);
      row[j] = swap < insert ? swap : insert;
    }
  }
  return row[m];
}

int sched_near(const char *word) {
  int length = 0;
  while (length < 7 && word[length]) length++;
  return length <= 3 ? 1 : length <= 6 ? 2 : 3;
}

const char *sched_nearest(const char *name) {
  const char *nearest = NULL;
  int distance = sched_near(name) + 1;
  for (int i = 0; i < 2 * TYPES + ALIASES; i++) {
    const char *known = i < TYPES       ? types[i].name
                        : i < 2 * TYPES ? types[i - TYPES].alias
                                        : aliases[i - 2 * TYPES].alias;
    if (!*known || sched_distance(name, known) >= distance) continue;
    nearest = known;
    distance = sched_distance(name, known);
  }
  return nearest;
}

// ---- generate --------------------------------------------------------------------------------

static Status check_chunks(SchedArena *arena, const SchedType *type, int chunks) {
  bool is_known = chunks >= type->chunks_min &&
                  (type->chunks_max == 0 || chunks <= type->chunks_max) &&
                  (chunks - type->chunks_min) % type->chunks_step == 0;
  if (is_known) return ST_OK;
  if (type->chunks_max == type->chunks_min)
    return sched_fail(arena, ST_EVALUE, "%s has exactly %d stage%s a rank, not %d", type->name,
                      type->chunks_min, type->chunks_min == 1 ? "" : "s", chunks);
  return sched_fail(arena, ST_EVALUE, "%s has %d, %d, %d, ... stages a rank, not %d", type->name,
                    type->chunks_min, type->chunks_min + type->chunks_step,
                    type->chunks_min + 2 * type->chunks_step, chunks);
}

Status sched_generate(SchedArena *arena, Sched **out, const SchedType *type, const SchedCase *c) {
  SchedCase own = *c;
  if (own.chunks == 0) own.chunks = type->chunks;
  TRY(check_chunks(arena, type, own.chunks));
  if (own.group < 0 || (own.group > 0 && type->generate != sched_gen_interleaved))
    return sched_fail(arena, ST_EVALUE,
                      own.group < 0 ? "group of %d microbatches: it must be 1 or more"
                                    : "group of %d microbatches: only interleaved has groups",
                      own.group);
  Sched *sched;
  TRY(sched_new(arena, &sched, type->name, own.ranks, own.chunks, own.mbs, type->placement, NULL));
  sched->type = type;
  sched->group = own.group;
  // F and B; or F, I and W; or F, B and the marker of a pair.
  int64_t room = (int64_t)own.mbs * own.chunks * (type->splits ? 3 : 2);
  for (int rank = 0; rank < own.ranks; rank++) {
    TRY(sched_reserve(sched, rank, room));
    TRY(sched_declare(sched, rank, type->peak(&own, rank)));
  }
  TRY(type->generate(sched));
  for (int rank = 0; rank < own.ranks; rank++) sched->row[rank].epilogue = sched->row[rank].count;
  *out = sched;
  return ST_OK;
}
