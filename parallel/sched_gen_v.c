// sched_gen_v - generators over V placement with a program in phases: zbv, dualpipev.
//
//     rank 0   stage 0 and 2p-1          a microbatch goes down the ranks and up again, and its
//     rank 1   stage 1 and 2p-2          gradient the same way back: the last rank hands over to
//      ...      ...                      itself, the loss is on rank 0
//     rank p-1 stage p-1 and p
#include "parallel/sched_gen.h"

// The two chunks of a rank, and how far each got: the next microbatch of F, backward and W.
typedef struct Vee {
  Sched *sched;
  int rank;
  int stage[2];
  int f[2], b[2], w[2];
} Vee;

static Vee vee(Sched *sched, int rank) {
  return (Vee){.sched = sched, .rank = rank, .stage = {rank, 2 * sched->ranks - 1 - rank}};
}

static void put_f(Vee *v, int chunk) {
  sched_put(v->sched, v->rank, ACTION_F, v->stage[chunk], v->f[chunk]++);
}
static void put_i(Vee *v, int chunk) {
  sched_put(v->sched, v->rank, ACTION_I, v->stage[chunk], v->b[chunk]++);
}
static void put_w(Vee *v, int chunk) {
  sched_put(v->sched, v->rank, ACTION_W, v->stage[chunk], v->w[chunk]++);
}

// ---- zbv -------------------------------------------------------------------------------------

// ZB-V (arXiv:2401.10241 6). Chunk 0 is a, stage r; chunk 1 is b, stage 2p-1-r.
Status sched_gen_zbv(Sched *sched) {
  int p = sched->ranks, n = sched->mbs > 2 * p - 1 ? sched->mbs : 2 * p - 1;
  for (int rank = 0; rank < p; rank++) {
    Vee v = vee(sched, rank);
    for (int k = 0; k < 2 * (p - rank) - 1; k++) put_f(&v, 0);
    for (int k = 0; k < rank; k++) put_f(&v, 1), put_f(&v, 0);
    for (int k = 0; k < p - rank; k++) put_f(&v, 1), put_i(&v, 1), put_w(&v, 1);
    while (v.f[1] < v.f[0] || v.f[0] < n) {
      if (v.f[0] < n) put_f(&v, 0);
      put_i(&v, 0), put_w(&v, 0);
      put_f(&v, 1);
      put_i(&v, 1), put_w(&v, 1);
    }
    for (int k = 0; k < rank; k++) put_i(&v, 0), put_i(&v, 1);
    for (int k = 0; k < p - rank; k++) put_i(&v, 0), put_w(&v, 0);
    while (v.w[1] < n) put_w(&v, 1);
    while (v.w[0] < n) put_w(&v, 0);
  }
  return ST_OK;
}

// ---- dualpipev -------------------------------------------------------------------------------

// W of I-only backwards, oldest first.
typedef struct Pending {
  Action *action;
  int first, count;
} Pending;

// A backward of a chunk: B, or I with its W put off.
static void put_b(Vee *v, int chunk, bool is_split, Pending *pending) {
  int mb = v->b[chunk]++, stage = v->stage[chunk];
  sched_put(v->sched, v->rank, is_split ? ACTION_I : ACTION_B, stage, mb);
  if (is_split) pending->action[pending->count++] = (Action){ACTION_W, stage, mb, -1};
}

static void put_oldest(Vee *v, Pending *pending) {
  if (pending->first == pending->count) return;
  Action w = pending->action[pending->first++];
  sched_put(v->sched, v->rank, w.kind, w.stage, w.mb);
}

// F of one chunk and B of the other, at once. Half of it is a single action.
static void put_pair(Vee *v, int f_chunk, int b_chunk) {
  int m = v->sched->mbs;
  if (v->f[f_chunk] < m && v->b[b_chunk] < m)
    sched_put(v->sched, v->rank, ACTION_OVERLAP_F_B, v->stage[f_chunk], v->f[f_chunk]);
  put_f(v, f_chunk);
  sched_put(v->sched, v->rank, ACTION_B, v->stage[b_chunk], v->b[b_chunk]++);
}

static void dualpipev_rank(Vee *v, int n, Pending *pending) {
  int p = v->sched->ranks, r = v->rank;
  for (int k = 0; k < 2 * (p - r - 1); k++) put_f(v, 0);
  for (int k = 0; k < r + 1; k++) put_f(v, 0), put_f(v, 1);
  for (int k = 0; k < p - r - 1; k++) {
    put_b(v, 1, true, pending);
    put_oldest(v, pending);
    put_f(v, 1);
  }
  for (int k = 0; k < n - 2 * p + r + 1; k++) {
    if (k == 0 && r == p - 1)
      put_f(v, 0), put_b(v, 1, false, pending);
    else
      put_pair(v, 0, 1);
    put_pair(v, 1, 0);
  }
  for (int k = 0; k < p - r - 1; k++) {
    put_b(v, 1, false, pending);
    put_pair(v, 1, 0);
  }
  for (int k = 0; k < r + 1; k++) {
    int split_from = (r + 1) / 2;
    put_b(v, 1, k > split_from || (k == split_from && r % 2 == 1), pending);
    put_b(v, 0, k >= split_from, pending);
  }
  for (int k = 0; k < p - r - 1; k++) {
    put_oldest(v, pending);
    put_b(v, 0, true, pending);
  }
  for (int k = 0; k < r + 1; k++) put_oldest(v, pending);
}

// DualPipeV (DeepSeek's, a DualPipe cut in half): pairs of F and B of two chunks run at once.
Status sched_gen_dualpipev(Sched *sched) {
  int p = sched->ranks, n = sched->mbs > 2 * p - 1 ? sched->mbs : 2 * p - 1;
  Pending pending = {.action = sched_alloc(sched->arena, 2 * (size_t)n, sizeof(Action))};
  if (!pending.action) return ST_ENOMEM;
  for (int rank = 0; rank < p; rank++) {
    Vee v = vee(sched, rank);
    pending.first = pending.count = 0;
    dualpipev_rank(&v, n, &pending);
  }
  return ST_OK;
}
