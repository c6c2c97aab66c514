// sched_gen_pattern - generators with controllable memory over V placement (arXiv:2405.15362):
// v-half, v-min, 1f1b-v.
//
// A building block, the ops of one microbatch at given ticks on each rank, repeats every 6 ticks;
// how long a block keeps an activation decides the memory. Then the repeated blocks are squeezed:
//
//   1  place F, I (or B); W takes the first later tick whose residue mod 6 is free on the rank
//   2  every op in (tick, rank) order moves to the earliest free tick after its dependencies, an F
//      only as far as the live activations stay below the cap
//   3  behind the last F of a rank, I goes before W (split backward only)
//   4  the list is the ops in the order of their ticks
#include "parallel/sched_gen.h"

#include <string.h>

enum { PERIOD = 6 };

// What an op is; B stands in the place of I and takes two ticks.
typedef enum Op { OP_F, OP_I, OP_W, OPS } Op;

// Ticks of the ops of microbatch 0 on one rank, by chunk: 0 is a, stage r; 1 is b, stage 2p-1-r.
typedef struct Block {
  int tick[OPS][2];
} Block;

// All ranks' ticks. A cell of the grid holds 0 (free), TAIL (second tick of a B) or 1 + the op.
typedef struct Grid {
  Sched *sched;
  int ranks, mbs, ticks;
  bool splits;
  int b_ticks;  // of I or B
  Block *block; // [ranks]
  int64_t cap;  // most live activations of a rank, in chunks
  int *cell;    // [ranks][ticks]
  int *live;    // [ranks][ticks] activations live during the tick
  int *at;      // [OPS][2p stages][mbs] ticks
} Grid;

enum { TAIL = -1 };

static int code_of(const Grid *g, Op op, int chunk, int mb) {
  return 1 + (op * 2 + chunk) * g->mbs + mb;
}
static Op op_of(const Grid *g, int code) { return (Op)((code - 1) / g->mbs / 2); }
static int chunk_of(const Grid *g, int code) { return (code - 1) / g->mbs % 2; }
static int mb_of(const Grid *g, int code) { return (code - 1) % g->mbs; }
static int stage_of(const Grid *g, int rank, int chunk) {
  return chunk == 0 ? rank : 2 * g->ranks - 1 - rank;
}
static int *tick_of(const Grid *g, Op op, int stage, int mb) {
  return &g->at[((int64_t)op * 2 * g->ranks + stage) * g->mbs + mb];
}
static int ticks_of(const Grid *g, Op op) { return op == OP_I ? g->b_ticks : 1; }

// The first tick in which the activation of a microbatch is no longer live.
static Op last_op(const Grid *g) { return g->splits ? OP_W : OP_I; }

// ---- step 1: blocks --------------------------------------------------------------------------

// v-min: as few live activations as there can be.
static void block_v_min(Block *block, int p, int i) {
  int d = p % 3 == 0 ? 2 : 0;
  block->tick[OP_F][0] = i;
  block->tick[OP_F][1] = 2 * p - i - 1;
  block->tick[OP_I][1] = 2 * p + d + i;
  block->tick[OP_I][0] = 4 * p + d - i - 1;
}

// v-half: half the activations of 1F1B.
static void block_v_half(Block *block, int p, int i) {
  int d = p % 2 == 0 ? 3 : 0;
  block->tick[OP_F][0] = 2 * i;
  block->tick[OP_F][1] = 3 * p - i - 2;
  block->tick[OP_I][1] = 3 * p + d + 2 * i - 1;
  block->tick[OP_I][0] = 6 * p + d - i - 2;
}

// 1f1b-v: whole backwards of two ticks, two thirds of the activations of 1F1B. Each rank's tick
// follows from its neighbour's, b up from rank 0, then a down from rank p-1.
static void blocks_1f1b_v(Block *block, int p) {
  block[0].tick[OP_I][1] = 2 * p + (p % 3 == 0 ? 3 : 0);
  for (int i = 0; i < p; i++) {
    block[i].tick[OP_F][0] = i;
    block[i].tick[OP_F][1] = 2 * p - 1 - i;
    if (i + 1 < p)
      block[i + 1].tick[OP_I][1] = block[i].tick[OP_I][1] + 2 + (i % 3 == (p + 1) % 3 ? 3 : 0);
  }
  block[p - 1].tick[OP_I][0] = block[p - 1].tick[OP_I][1] + 2;
  for (int i = p - 2; i >= 0; i--)
    block[i].tick[OP_I][0] = block[i + 1].tick[OP_I][0] + 2 + (i % 3 == p % 3 ? 3 : 0);
}

// Puts both W of a block into free residues, the one with the earlier I first.
static void place_w(Block *block) {
  bool is_taken[PERIOD] = {false};
  for (int op = OP_F; op <= OP_I; op++)
    for (int chunk = 0; chunk < 2; chunk++) is_taken[block->tick[op][chunk] % PERIOD] = true;
  int first = block->tick[OP_I][0] < block->tick[OP_I][1] ? 0 : 1;
  for (int k = 0; k < 2; k++) {
    int chunk = k == 0 ? first : 1 - first;
    int tick = block->tick[OP_I][chunk] + 1;
    while (is_taken[tick % PERIOD]) tick++;
    block->tick[OP_W][chunk] = tick;
    is_taken[tick % PERIOD] = true;
  }
}

// Live chunks of a rank at a tick of the endlessly repeated block: one for each repetition that the
// tick falls into, which are the ticks of its residue between F and the end.
static int64_t most_live(const Grid *g, const Block *block) {
  int64_t most = 0;
  for (int residue = 0; residue < PERIOD; residue++) {
    int64_t live = 0;
    for (int chunk = 0; chunk < 2; chunk++) {
      int end = block->tick[last_op(g)][chunk] + ticks_of(g, last_op(g));
      for (int t = block->tick[OP_F][chunk]; t < end; t++) live += t % PERIOD == residue;
    }
    if (live > most) most = live;
  }
  return most;
}

// ---- the grid --------------------------------------------------------------------------------

static void add_live(const Grid *g, int rank, int begin, int end, int count) {
  int *live = g->live + (int64_t)rank * g->ticks;
  for (int t = begin; t < end; t++) live[t] += count;
}

// Takes an op out of the grid, or puts it in, at its tick.
static void mark(const Grid *g, int rank, int code, int tick, bool is_there) {
  int *cell = g->cell + (int64_t)rank * g->ticks + tick;
  cell[0] = is_there ? code : 0;
  if (ticks_of(g, op_of(g, code)) == 2) cell[1] = is_there ? TAIL : 0;
}

// Repeats the blocks for all microbatches.
static Status lay_out(Grid *g) {
  SchedArena *arena = g->sched->arena;
  int last = 0; // tick of a block
  for (int rank = 0; rank < g->ranks; rank++)
    for (int op = OP_F; op <= (int)last_op(g); op++)
      for (int chunk = 0; chunk < 2; chunk++)
        if (g->block[rank].tick[op][chunk] > last) last = g->block[rank].tick[op][chunk];
  // Step 3 may put the W of all microbatches behind everything else.
  g->ticks = PERIOD * g->mbs + last + 2 + 2 * g->mbs;
  g->cell = sched_alloc(arena, (size_t)g->ranks * (size_t)g->ticks, sizeof *g->cell);
  g->live = sched_alloc(arena, (size_t)g->ranks * (size_t)g->ticks, sizeof *g->live);
  g->at = sched_alloc(arena, (size_t)OPS * 2 * (size_t)g->ranks * (size_t)g->mbs, sizeof *g->at);
  if (!g->cell || !g->live || !g->at) return ST_ENOMEM;
  for (int rank = 0; rank < g->ranks; rank++) {
    for (int chunk = 0; chunk < 2; chunk++) {
      for (int mb = 0; mb < g->mbs; mb++) {
        for (int op = OP_F; op <= (int)last_op(g); op++) {
          int tick = g->block[rank].tick[op][chunk] + PERIOD * mb;
          *tick_of(g, (Op)op, stage_of(g, rank, chunk), mb) = tick;
          mark(g, rank, code_of(g, (Op)op, chunk, mb), tick, true);
        }
        int begin = g->block[rank].tick[OP_F][chunk] + PERIOD * mb;
        int end = g->block[rank].tick[last_op(g)][chunk] + PERIOD * mb;
        add_live(g, rank, begin, end + ticks_of(g, last_op(g)), 1);
      }
    }
  }
  return ST_OK;
}

// The first tick at which an op's dependencies are done.
static int done_before(const Grid *g, Op op, int stage, int mb) {
  int ready = 0, last = 2 * g->ranks - 1;
  if (op == OP_F) return stage > 0 ? *tick_of(g, OP_F, stage - 1, mb) + 1 : 0;
  if (op == OP_W) return *tick_of(g, OP_I, stage, mb) + 1;
  ready = *tick_of(g, OP_F, stage, mb) + 1;
  if (stage < last) {
    int next = *tick_of(g, OP_I, stage + 1, mb) + g->b_ticks;
    if (next > ready) ready = next;
  }
  return ready;
}

// The first tick from `from` on that has room for an op on a rank.
static int first_free(const Grid *g, int rank, Op op, int from) {
  const int *cell = g->cell + (int64_t)rank * g->ticks;
  while (cell[from] != 0 || (ticks_of(g, op) == 2 && cell[from + 1] != 0)) from++;
  return from;
}

// ---- steps 2 and 3 ---------------------------------------------------------------------------

// Moves an op to another tick and keeps the count of live activations.
static void move(const Grid *g, int rank, int code, int from, int to) {
  Op op = op_of(g, code);
  mark(g, rank, code, to, true);
  *tick_of(g, op, stage_of(g, rank, chunk_of(g, code)), mb_of(g, code)) = to;
  if (op == OP_F) add_live(g, rank, to, from, 1);
  if (op == last_op(g)) {
    int length = ticks_of(g, op);
    if (to < from)
      add_live(g, rank, to + length, from + length, -1);
    else
      add_live(g, rank, from + length, to + length, 1);
  }
}

static void squeeze(const Grid *g) {
  for (int tick = 0; tick < g->ticks; tick++) {
    for (int rank = 0; rank < g->ranks; rank++) {
      int code = g->cell[(int64_t)rank * g->ticks + tick];
      if (code <= 0) continue;
      Op op = op_of(g, code);
      int from = done_before(g, op, stage_of(g, rank, chunk_of(g, code)), mb_of(g, code));
      if (op == OP_F) {
        const int *live = g->live + (int64_t)rank * g->ticks;
        int lowest = tick;
        while (lowest > from && live[lowest - 1] < g->cap) lowest--;
        from = lowest;
      }
      mark(g, rank, code, tick, false);
      move(g, rank, code, tick, first_free(g, rank, op, from));
    }
  }
}

// The tick of a rank's last F.
static int last_f(const Grid *g, int rank) {
  const int *cell = g->cell + (int64_t)rank * g->ticks;
  int tick = g->ticks - 1;
  while (cell[tick] <= 0 || op_of(g, cell[tick]) != OP_F) tick--;
  return tick;
}

// Behind the last F of each rank: first I, then W in the order of their I.
static Status put_off_w(const Grid *g) {
  int *L = sched_alloc(g->sched->arena, (size_t)g->ranks, sizeof *L);
  if (!L) return ST_ENOMEM;
  for (int rank = 0; rank < g->ranks; rank++) {
    L[rank] = last_f(g, rank);
    for (int tick = L[rank] + 1; tick < g->ticks; tick++) {
      int code = g->cell[(int64_t)rank * g->ticks + tick];
      if (code > 0 && op_of(g, code) == OP_W) mark(g, rank, code, tick, false);
    }
  }
  for (int tick = 0; tick < g->ticks; tick++) {
    for (int rank = 0; rank < g->ranks; rank++) {
      int code = g->cell[(int64_t)rank * g->ticks + tick];
      if (tick <= L[rank] || code <= 0) continue;
      int from = done_before(g, OP_I, stage_of(g, rank, chunk_of(g, code)), mb_of(g, code));
      mark(g, rank, code, tick, false);
      move(g, rank, code, tick, first_free(g, rank, OP_I, from > L[rank] ? from : L[rank] + 1));
    }
  }
  for (int rank = 0; rank < g->ranks; rank++) {
    for (int tick = 0; tick < g->ticks; tick++) {
      int code = g->cell[(int64_t)rank * g->ticks + tick];
      if (code <= 0 || op_of(g, code) != OP_I) continue;
      int chunk = chunk_of(g, code), mb = mb_of(g, code);
      int old = *tick_of(g, OP_W, stage_of(g, rank, chunk), mb);
      if (old <= L[rank]) continue;
      int from = (tick > L[rank] ? tick : L[rank]) + 1;
      move(g, rank, code_of(g, OP_W, chunk, mb), old, first_free(g, rank, OP_W, from));
    }
  }
  return ST_OK;
}

// ---- the whole -------------------------------------------------------------------------------

// Steps 1 to 4, from blocks with F and I (or B) in place.
static Status build(Grid *g) {
  for (int rank = 0; rank < g->ranks; rank++) {
    if (g->splits) place_w(&g->block[rank]);
    int64_t live = most_live(g, &g->block[rank]);
    if (live > g->cap) g->cap = live;
  }
  TRY(lay_out(g));
  squeeze(g);
  if (g->splits) TRY(put_off_w(g));
  static const ActionKind kinds[2][OPS] = {{ACTION_F, ACTION_B, ACTION_B},
                                           {ACTION_F, ACTION_I, ACTION_W}};
  for (int rank = 0; rank < g->ranks; rank++) {
    for (int tick = 0; tick < g->ticks; tick++) {
      int code = g->cell[(int64_t)rank * g->ticks + tick];
      if (code <= 0) continue;
      sched_put(g->sched, rank, kinds[g->splits][op_of(g, code)],
                stage_of(g, rank, chunk_of(g, code)), mb_of(g, code));
    }
  }
  return ST_OK;
}

static Status start(Grid *g, Sched *sched, bool splits) {
  *g = (Grid){.sched = sched, .ranks = sched->ranks, .mbs = sched->mbs, .splits = splits};
  g->b_ticks = splits ? 1 : 2;
  g->block = sched_alloc(sched->arena, (size_t)g->ranks, sizeof *g->block);
  return g->block ? ST_OK : ST_ENOMEM;
}

Status sched_gen_v_half(Sched *sched) {
  Grid grid;
  TRY(start(&grid, sched, true));
  for (int i = 0; i < grid.ranks; i++) block_v_half(&grid.block[i], grid.ranks, i);
  return build(&grid);
}

Status sched_gen_v_min(Sched *sched) {
  Grid grid;
  TRY(start(&grid, sched, true));
  for (int i = 0; i < grid.ranks; i++) block_v_min(&grid.block[i], grid.ranks, i);
  return build(&grid);
}

Status sched_gen_1f1b_v(Sched *sched) {
  Grid grid;
  TRY(start(&grid, sched, false));
  blocks_1f1b_v(grid.block, grid.ranks);
  return build(&grid);
}
