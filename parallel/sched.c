// sched - schedules as data: memory, kinds of action, and how a schedule is put together.
#include "parallel/sched_inner.h"

#include <string.h>

// ---- memory ----------------------------------------------------------------------------------

enum { ALIGNMENT = 16 };

void *sched_alloc(SchedArena *arena, size_t count, size_t size) {
  if (size != 0 && count > (SIZE_MAX - 2 * ALIGNMENT) / size) goto none;
  size_t bytes = count * size;
  size_t skip = (size_t)(-(uintptr_t)arena->at & (ALIGNMENT - 1));
  if (!arena->at || arena->left < skip || arena->left - skip < bytes) {
    size_t block = bytes + ALIGNMENT;
    char *fresh = arena->more ? arena->more(arena, &block) : NULL;
    if (!fresh) goto none;
    arena->at = fresh;
    arena->left = block;
    skip = (size_t)(-(uintptr_t)fresh & (ALIGNMENT - 1));
  }
  char *result = arena->at + skip;
  arena->at += skip + bytes;
  arena->left -= skip + bytes;
  memset(result, 0, bytes);
  return result;
none:
  sched_fail(arena, ST_ENOMEM, "out of memory for a schedule (%lld x %lld bytes more were needed)",
             (long long)count, (long long)size);
  return NULL;
}

// ---- kinds -----------------------------------------------------------------------------------

static const struct {
  const char *text;
  SchedResource resource;
  int properties;
} kinds[ACTION_KINDS] = {
#define X(name, text, resource, properties) {text, resource, properties},
    ACTION_LIST(X)
#undef X
};

const char *action_text(ActionKind kind) { return kinds[kind].text; }
int action_properties(ActionKind kind) { return kinds[kind].properties; }
SchedResource action_resource(ActionKind kind) { return kinds[kind].resource; }

// ---- schedules -------------------------------------------------------------------------------

int sched_copy_of(const Sched *sched, int mb) {
  return sched->copies == 2 && mb >= (sched->mbs + 1) / 2;
}
bool sched_is_first(const Sched *sched, int stage) { return stage % sched->stages == 0; }
bool sched_is_last(const Sched *sched, int stage) {
  return stage % sched->stages == sched->stages - 1;
}

static int place(SchedPlacement placement, int stage, int ranks, const int *holder) {
  int chunk = stage / ranks, position = stage % ranks;
  switch (placement) {
  case PLACE_LOOP: return position;
  case PLACE_V:
  case PLACE_WAVE: return chunk % 2 == 0 ? position : ranks - 1 - position;
  case PLACE_GIVEN: return holder[stage];
  }
  return -1;
}

static Status check_sizes(SchedArena *arena, int ranks, int chunks, int mbs) {
  enum { RANKS_MAX = 1 << 14, STAGES_MAX = 1 << 20, CELLS_MAX = 1 << 29 };
  if (ranks < 1 || ranks > RANKS_MAX)
    return sched_fail(arena, ST_EVALUE, "%d ranks: a schedule has 1 to %d", ranks, (int)RANKS_MAX);
  if (chunks < 1 || (int64_t)ranks * chunks > STAGES_MAX)
    return sched_fail(arena, ST_EVALUE, "%d stages a rank on %d ranks: 1 to %d are possible",
                      chunks, ranks, STAGES_MAX / ranks);
  if (mbs < 1 || (int64_t)ranks * chunks * mbs > CELLS_MAX)
    return sched_fail(arena, ST_EVALUE, "%d microbatches on %d stages: 1 to %d are possible", mbs,
                      ranks * chunks, CELLS_MAX / (ranks * chunks));
  return ST_OK;
}

// Fills holder[] and checks that every rank got as many stages as the others.
static Status place_stages(SchedArena *arena, Sched *sched, const int *given) {
  int *held = sched_alloc(arena, (size_t)sched->ranks, sizeof *held);
  if (!held) return ST_ENOMEM;
  for (int stage = 0; stage < sched->stages; stage++) {
    int rank = place(sched->placement, stage, sched->ranks, given);
    if (rank < 0 || rank >= sched->ranks)
      return sched_fail(arena, ST_EVALUE, "stage %d is placed on rank %d: ranks are 0 to %d", stage,
                        rank, sched->ranks - 1);
    sched->holder[stage] = rank;
    held[rank]++;
  }
  for (int rank = 0; rank < sched->ranks; rank++) {
    if (held[rank] != sched->chunks)
      return sched_fail(arena, ST_EVALUE,
                        "rank %d holds %d stages: with %d stages on %d ranks each must hold %d",
                        rank, held[rank], sched->stages, sched->ranks, sched->chunks);
  }
  return ST_OK;
}

Status sched_new(SchedArena *arena, Sched **out, const char *name, int ranks, int chunks, int mbs,
                 SchedPlacement placement, const int *holder) {
  TRY(check_sizes(arena, ranks, chunks, mbs));
  Sched *sched = sched_alloc(arena, 1, sizeof *sched);
  size_t length = (size_t)sched_length(name);
  char *own_name = sched_alloc(arena, length + 1, 1);
  if (!sched || !own_name) return ST_ENOMEM;
  memcpy(own_name, name, length);
  *sched = (Sched){.name = own_name,
                   .ranks = ranks,
                   .chunks = chunks,
                   .mbs = mbs,
                   .copies = 1,
                   .stages = ranks * chunks,
                   .placement = placement,
                   .warning = "",
                   .arena = arena};
  sched->holder = sched_alloc(arena, (size_t)sched->stages, sizeof *sched->holder);
  sched->row = sched_alloc(arena, (size_t)ranks, sizeof *sched->row);
  sched->bound = sched_alloc(arena, (size_t)ranks, sizeof *sched->bound);
  if (!sched->holder || !sched->row || !sched->bound) return ST_ENOMEM;
  for (int rank = 0; rank < ranks; rank++) sched->bound[rank] = -1;
  TRY(place_stages(arena, sched, holder));
  *out = sched;
  return ST_OK;
}

Status sched_reserve(Sched *sched, int rank, int64_t count) {
  SchedRow *row = &sched->row[rank];
  if (count <= row->room) return ST_OK;
  if (count > INT32_MAX)
    return sched_fail(sched->arena, ST_EVALUE, "rank %d: more than %d actions", rank, INT32_MAX);
  Action *grown = sched_alloc(sched->arena, (size_t)count, sizeof *grown);
  if (!grown) return ST_ENOMEM;
  if (row->count > 0) memcpy(grown, row->action, (size_t)row->count * sizeof *grown);
  row->action = grown;
  row->room = (int)count;
  return ST_OK;
}

Status sched_push(Sched *sched, int rank, Action action) {
  SchedRow *row = &sched->row[rank];
  if (row->count == row->room) TRY(sched_reserve(sched, rank, 2 * (int64_t)row->room + 16));
  row->action[row->count++] = action;
  row->epilogue = row->count;
  if (action_resource(action.kind) != USES_COMPUTE && action.kind != ACTION_OVERLAP_F_B)
    sched->lowered = true;
  return ST_OK;
}

Status sched_declare(Sched *sched, int rank, int64_t chunks) {
  if (rank < 0 || rank >= sched->ranks)
    return sched_fail(sched->arena, ST_EVALUE, "rank %d: ranks are 0 to %d", rank,
                      sched->ranks - 1);
  if (chunks < 0)
    return sched_fail(sched->arena, ST_EVALUE, "rank %d: %lld live activations are no bound", rank,
                      (long long)chunks);
  sched->bound[rank] = chunks;
  return ST_OK;
}

Status sched_add_edge(Sched *sched, int from, int to, bool has_grad) {
  enum { EDGES_MAX = 250 };
  int last = sched->copies * sched->stages - 1;
  if (from < 0 || to > last || from >= to)
    return sched_fail(sched->arena, ST_EVALUE,
                      "edge from stage %d to %d: it must lead forward, between 0 and %d", from, to,
                      last);
  bool is_known = to == from + 1;
  for (int i = 0; i < sched->edges; i++)
    is_known = is_known || (sched->edge[i].from == from && sched->edge[i].to == to);
  if (is_known || sched->edges == EDGES_MAX)
    return sched_fail(sched->arena, ST_EVALUE,
                      is_known ? "edge from stage %d to %d: there is one already"
                               : "edge from stage %d to %d: at most 250 may skip stages",
                      from, to);
  SchedEdge *grown = sched_alloc(sched->arena, (size_t)sched->edges + 1, sizeof *grown);
  if (!grown) return ST_ENOMEM;
  if (sched->edges > 0) memcpy(grown, sched->edge, (size_t)sched->edges * sizeof *grown);
  grown[sched->edges++] = (SchedEdge){from, to, has_grad};
  sched->edge = grown;
  return ST_OK;
}

Status sched_add_tied(Sched *sched, const int *stages, int count) {
  for (int i = 0; i < count; i++) {
    if (stages[i] < 0 || stages[i] >= sched->copies * sched->stages)
      return sched_fail(sched->arena, ST_EVALUE, "tied weight on stage %d: stages are 0 to %d",
                        stages[i], sched->copies * sched->stages - 1);
    for (int k = 0; k < i; k++)
      if (stages[k] == stages[i])
        return sched_fail(sched->arena, ST_EVALUE, "tied weight: stage %d is named twice",
                          stages[i]);
  }
  SchedTied *grown = sched_alloc(sched->arena, (size_t)sched->tieds + (size_t)count, sizeof *grown);
  if (!grown) return ST_ENOMEM;
  if (sched->tieds > 0) memcpy(grown, sched->tied, (size_t)sched->tieds * sizeof *grown);
  for (int i = 0; i < count; i++)
    grown[sched->tieds++] = (SchedTied){sched->tied_groups, stages[i]};
  sched->tied = grown;
  sched->tied_groups++;
  return ST_OK;
}

// ---- where each action stands ----------------------------------------------------------------

// The slot of an index that a kind fills.
static int *slot_of(const SchedIndex *index, ActionKind kind, int64_t cell) {
  int properties = action_properties(kind);
  if (properties & KEEPS) return &index->f[cell];
  if (properties & GIVES_GRAD) return &index->b[cell];
  return &index->w[cell];
}

Status sched_index(SchedArena *arena, SchedIndex *out, const Sched *sched, SchedPlace *at,
                   SchedPlace *other, int *broken) {
  size_t cells = (size_t)sched->copies * (size_t)sched->stages * (size_t)sched->mbs;
  SchedIndex index = {sched_alloc(arena, cells, sizeof(int)),
                      sched_alloc(arena, cells, sizeof(int)),
                      sched_alloc(arena, cells, sizeof(int))};
  if (!index.f || !index.b || !index.w) return ST_ENOMEM;
  memset(index.f, -1, cells * sizeof(int));
  memset(index.b, -1, cells * sizeof(int));
  memset(index.w, -1, cells * sizeof(int));
  *broken = 0;
  for (int rank = 0; rank < sched->ranks && !*broken; rank++) {
    const SchedRow *row = &sched->row[rank];
    for (int i = 0; i < row->count; i++) {
      Action action = row->action[i];
      if (action_resource(action.kind) != USES_COMPUTE) continue;
      *at = (SchedPlace){rank, i};
      *other = (SchedPlace){-1, -1};
      bool is_here = action.stage >= 0 && action.stage < sched->copies * sched->stages &&
                     action.mb >= 0 && action.mb < sched->mbs &&
                     sched->holder[action.stage] == rank &&
                     sched_copy_of(sched, action.mb) == action.stage / sched->stages;
      if (!is_here) {
        *broken = 7;
        break;
      }
      int64_t cell = sched_cell(sched, action.stage, action.mb);
      int *slot = slot_of(&index, action.kind, cell);
      bool is_double = *slot >= 0 || (action.kind == ACTION_B && index.w[cell] >= 0);
      if (is_double) {
        *other = (SchedPlace){rank, *slot >= 0 ? *slot : index.w[cell]};
        *broken = 1;
        break;
      }
      *slot = i;
      if (action.kind == ACTION_B) index.w[cell] = i;
    }
  }
  *out = index;
  return ST_OK;
}
