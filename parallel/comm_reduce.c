// comm_reduce - sums and maxima over the ranks of a group, the same bits everywhere.
//
// The data is cut into segments, a segment into one slice a rank. Part A: everyone sends slice j to
// rank j, which adds what it got in rank order. Part C: it sends the result to everyone.
//
//     A0 A1 | sum 0, C0 | A2 | sum 1, C1 | A3 | ...      what a rank starts, in this order
//
// Every rank starts the parts in the same order, and messages between two ranks do not overtake
// each other, so they pair; the next segment is under way while one is summed. Small data goes
// whole to everyone, and everyone sums: no part C.
//
// A reduce_scatter is part A alone: slice j is the j'th of the blocks that lie one after the other,
// and a segment is a piece of every block. An all_gather is part C alone, in one segment.
//
// Collectives of one group run one after the other, in the order of their start.
#include "parallel/comm_impl.h"

#include "core/bf16.h"
#include "core/memory.h"
#include "core/spans.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SEGMENT = 1 << 20, SMALL = 8 << 10, BLOCK = 256, SLOTS = 2 };

// ---- sums ------------------------------------------------------------------------------------

// A maximum that keeps NaN.
static double max_f64(double a, double b) { return a > b || isnan(a) ? a : b; }
static float max_f32(float a, float b) { return a > b || isnan(a) ? a : b; }

// out[count] = rows[0][count] + rows[1][count] + ..., blockwise, so that out may be a row.
#define FOLD(name, type, accumulator, load, store, plus, max)                            \
  static void fold_##name(void *out, const void *const *rows, int n_rows, int64_t count, \
                          CommReduce how) {                                              \
    for (int64_t at = 0; at < count; at += BLOCK) {                                      \
      int64_t n = count - at < BLOCK ? count - at : BLOCK;                               \
      accumulator acc[BLOCK];                                                            \
      const type *first = (const type *)rows[0] + at;                                    \
      for (int64_t i = 0; i < n; i++) acc[i] = load(first[i]);                           \
      for (int r = 1; r < n_rows; r++) {                                                 \
        const type *row = (const type *)rows[r] + at;                                    \
        if (how == REDUCE_SUM)                                                           \
          for (int64_t i = 0; i < n; i++) acc[i] = plus(acc[i], load(row[i]));           \
        else                                                                             \
          for (int64_t i = 0; i < n; i++) acc[i] = max(acc[i], load(row[i]));            \
      }                                                                                  \
      type *to = (type *)out + at;                                                       \
      for (int64_t i = 0; i < n; i++) to[i] = store(acc[i]);                             \
    }                                                                                    \
  }

#define AS_IS(x) (x)
#define PLUS(a, b) ((a) + (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
// Integers wrap; bool is 0 or 1, and its sum an "or".
#define WRAP_I64(a, b) ((int64_t)((uint64_t)(a) + (uint64_t)(b)))
#define WRAP_I32(a, b) ((int32_t)((uint32_t)(a) + (uint32_t)(b)))
#define WRAP_U8(a, b) ((uint8_t)((a) + (b)))
#define OR(a, b) ((uint8_t)((a) | (b)))
FOLD(F32, float, float, AS_IS, AS_IS, PLUS, max_f32)
FOLD(F64, double, double, AS_IS, AS_IS, PLUS, max_f64)
FOLD(BF16, uint16_t, float, bf16_widen, bf16_narrow, PLUS, max_f32)
FOLD(I64, int64_t, int64_t, AS_IS, AS_IS, WRAP_I64, MAX)
FOLD(I32, int32_t, int32_t, AS_IS, AS_IS, WRAP_I32, MAX)
FOLD(U8, uint8_t, uint8_t, AS_IS, AS_IS, WRAP_U8, MAX)
FOLD(BOOL, uint8_t, uint8_t, AS_IS, AS_IS, OR, MAX)

static void fold(void *out, const void *const *rows, int n_rows, int64_t count, DType dtype,
                 CommReduce how) {
  switch (dtype) {
#define X(NAME, name, bytes, safetensors) \
  case DT_##NAME: fold_##NAME(out, rows, n_rows, count, how); break;
    DTYPE_LIST(X)
#undef X
  }
}

// ---- a sum under way -------------------------------------------------------------------------

// The messages of a part.
typedef struct Part {
  CommRequest **requests; // [2 (size-1)]
  int *peers;
  int n;
} Part;

typedef enum Kind { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER } Kind;

struct CommCollective {
  Comm *comm;
  Pool *pool; // NULL: malloc
  Kind kind;
  const char *from;       // what part A sends
  char *data;             // where sums go, and what part C sends and receives
  int64_t count, segment; // elements; but for ALL_REDUCE those of a block
  DType dtype;
  CommReduce how;
  bool is_small;
  int64_t n_segments, next_a, next_c; // the parts to be started next
  Part a[SLOTS], c[SLOTS];
  char *work[SLOTS]; // what others sent, [size-1] rows
  size_t work_bytes, struct_bytes;
  const void **rows; // [size]
  Status status;     // what went wrong while it moved on
  KeptStatus kept;
  bool is_done;
  double done_at;
  CommCollective *next;
};

static int64_t slice_at(const CommCollective *c, int64_t count, int rank) {
  return count * rank / c->comm->size;
}

static int64_t segment_count(const CommCollective *c, int64_t k) {
  int64_t left = c->count - k * c->segment;
  return left < c->segment ? left : c->segment;
}

// Elements of a rank's slice of segment k, and where it begins among all.
static int64_t slice(const CommCollective *c, int64_t k, int rank, int64_t *at) {
  int64_t n = segment_count(c, k);
  if (c->kind != ALL_REDUCE) {
    *at = rank * c->count + k * c->segment;
    return n;
  }
  if (c->is_small) {
    *at = 0;
    return n;
  }
  int64_t first = slice_at(c, n, rank);
  *at = k * c->segment + first;
  return slice_at(c, n, rank + 1) - first;
}

static char *row_of(const CommCollective *c, int64_t k, int peer) {
  int64_t rows = segment_count(c, k), at;
  rows = slice(c, k, c->comm->rank, &at);
  int place = peer < c->comm->rank ? peer : peer - 1;
  return c->work[k % SLOTS] + (size_t)(rows * place) * dtype_size(c->dtype);
}

static Status start_recv(CommCollective *c, Part *part, int peer, void *data, size_t bytes) {
  if (bytes == 0) return ST_OK;
  part->peers[part->n] = peer;
  return comm_recv(c->comm, peer, CHANNEL_GROUP, data, bytes, NULL, &part->requests[part->n++]);
}

static Status start_send(CommCollective *c, Part *part, int peer, const void *data, size_t bytes) {
  if (bytes == 0) return ST_OK;
  part->peers[part->n] = peer;
  return comm_send(c->comm, peer, CHANNEL_GROUP, data, bytes, NULL, &part->requests[part->n++]);
}

static Status start_a(CommCollective *c, int64_t k) {
  Part *part = &c->a[k % SLOTS];
  size_t size = dtype_size(c->dtype);
  int rank = c->comm->rank, n = c->comm->size;
  int64_t at, mine = slice(c, k, rank, &at);
  part->n = 0;
  if (c->kind == ALL_GATHER) return ST_OK;
  for (int step = 1; step < n; step++) {
    int peer = (rank + n - step) % n;
    TRY(start_recv(c, part, peer, row_of(c, k, peer), (size_t)mine * size));
  }
  for (int step = 1; step < n; step++) {
    int peer = (rank + step) % n;
    int64_t theirs = slice(c, k, peer, &at);
    TRY(start_send(c, part, peer, c->from + (size_t)at * size, (size_t)theirs * size));
  }
  return ST_OK;
}

static void sum_segment(CommCollective *c, int64_t k) {
  if (c->kind == ALL_GATHER) return;
  size_t size = dtype_size(c->dtype);
  int64_t at, mine = slice(c, k, c->comm->rank, &at);
  for (int i = 0; i < c->comm->size; i++)
    c->rows[i] = i == c->comm->rank ? c->from + (size_t)at * size : row_of(c, k, i);
  if (c->kind == REDUCE_SCATTER) at = k * c->segment; // in the one block of the result
  fold(c->data + (size_t)at * size, c->rows, c->comm->size, mine, c->dtype, c->how);
}

static Status start_c(CommCollective *c, int64_t k) {
  Part *part = &c->c[k % SLOTS];
  part->n = 0;
  if (c->is_small || c->kind == REDUCE_SCATTER) return ST_OK;
  size_t size = dtype_size(c->dtype);
  int rank = c->comm->rank, n = c->comm->size;
  int64_t at, mine = slice(c, k, rank, &at);
  const char *own = c->data + (size_t)at * size;
  for (int step = 1; step < n; step++) {
    int peer = (rank + n - step) % n;
    int64_t theirs = slice(c, k, peer, &at);
    TRY(start_recv(c, part, peer, c->data + (size_t)at * size, (size_t)theirs * size));
  }
  for (int step = 1; step < n; step++)
    TRY(start_send(c, part, (rank + step) % n, own, (size_t)mine * size));
  return ST_OK;
}

// Whether the messages of a part are done.
static Status part_test(CommCollective *c, Part *part, bool *done) {
  while (part->n > 0) {
    CommRequest *last = part->requests[part->n - 1];
    Status status = comm_test(c->comm, last, done);
    if (status != ST_OK || *done) part->n--;
    if (status != ST_OK || !*done) return status;
  }
  *done = true;
  return ST_OK;
}

// The rank whose message is missing; -1: none is.
static int waits_for(const CommCollective *c) {
  const Part *parts[] = {&c->a[c->next_c % SLOTS], &c->c[0], &c->c[1]};
  for (int i = 0; i < 3; i++)
    if (parts[i]->n > 0) return parts[i]->peers[parts[i]->n - 1];
  return -1;
}

// Goes as far as it can, but sums one segment at most: a poll must be short.
static Status step(CommCollective *c) {
  for (bool has_summed = false; c->next_c < c->n_segments; has_summed = true) {
    while (c->next_a < c->n_segments && c->next_a <= c->next_c + 1) TRY(start_a(c, c->next_a++));
    bool is_here, is_free;
    TRY(part_test(c, &c->a[c->next_c % SLOTS], &is_here));
    TRY(part_test(c, &c->c[c->next_c % SLOTS], &is_free));
    if (!is_here || !is_free || has_summed) return ST_OK;
    sum_segment(c, c->next_c);
    TRY(start_c(c, c->next_c++));
  }
  c->is_done = true;
  for (int slot = 0; slot < SLOTS; slot++) {
    bool done;
    TRY(part_test(c, &c->c[slot], &done));
    c->is_done = c->is_done && done;
  }
  return ST_OK;
}

// It is under way no longer.
static void end_busy(CommCollective *c) {
  c->done_at = clock_now();
  if (--c->comm->n_under_way == 0) c->comm->stats.busy += c->done_at - c->comm->busy_since;
}

static void advance(CommCollective *c) {
  if (c->is_done || c->status != ST_OK) return;
  c->status = step(c);
  if (c->status != ST_OK) {
    status_keep(&c->kept);
    c->is_done = true;
  }
  if (c->is_done) end_busy(c);
}

void comm_collectives_advance(void) {
  for (CommCollective *c = comm_process()->collectives; c; c = c->next) {
    bool is_first = true; // of its group; the list is short
    for (CommCollective *b = comm_process()->collectives; b != c; b = b->next)
      is_first = is_first && (b->comm != c->comm || b->is_done);
    if (is_first) advance(c);
  }
}

// ---- start and end ---------------------------------------------------------------------------

static void *block_new(Pool *pool, size_t bytes) {
  void *block = NULL;
  if (!pool) return malloc(bytes ? bytes : 1);
  return pool_alloc(pool, bytes, MEM_COMMUNICATION, &block) == ST_OK ? block : NULL;
}

static void block_free(Pool *pool, void *block, size_t bytes) {
  if (pool)
    pool_free(pool, block, bytes, MEM_COMMUNICATION);
  else
    free(block);
}

static void collective_delete(CommCollective *c) {
  CommCollective **at = &comm_process()->collectives;
  while (*at && *at != c) at = &(*at)->next;
  if (*at) *at = c->next;
  for (int slot = 0; slot < SLOTS; slot++) block_free(c->pool, c->work[slot], c->work_bytes);
  block_free(c->pool, c, c->struct_bytes);
}

// The struct and its lists are one block.
static CommCollective *collective_new(Comm *comm, Pool *pool) {
  size_t peers = (size_t)(comm->size - 1), size = (size_t)comm->size;
  size_t lists = 2 * SLOTS * 2 * peers;
  size_t requests_at = sizeof(CommCollective) + size * sizeof(void *);
  size_t numbers_at = requests_at + lists * sizeof(CommRequest *);
  size_t bytes = numbers_at + lists * sizeof(int);
  CommCollective *c = block_new(pool, bytes);
  if (!c) return NULL;
  memset(c, 0, bytes);
  c->struct_bytes = bytes;
  c->comm = comm;
  c->pool = pool;
  c->rows = (const void **)(c + 1);
  CommRequest **requests = (CommRequest **)(void *)((char *)c + requests_at);
  int *numbers = (int *)(void *)((char *)c + numbers_at);
  for (int slot = 0; slot < SLOTS; slot++) {
    c->a[slot] = (Part){requests, numbers, 0};
    c->c[slot] = (Part){requests + 2 * peers, numbers + 2 * peers, 0};
    requests += 4 * peers;
    numbers += 4 * peers;
  }
  return c;
}

static Status give_room(CommCollective *c) {
  size_t size = dtype_size(c->dtype), peers = (size_t)(c->comm->size - 1);
  int64_t n = c->count < c->segment ? c->count : c->segment, most = n;
  if (c->kind == ALL_GATHER) return ST_OK;
  if (c->kind == ALL_REDUCE && !c->is_small) most = n / c->comm->size + 1;
  c->work_bytes = (size_t)most * size * peers;
  for (int slot = 0; slot < SLOTS && slot < c->n_segments; slot++) {
    c->work[slot] = block_new(c->pool, c->work_bytes);
    if (!c->work[slot]) return fail(ST_ENOMEM, "out of memory for a sum over ranks");
  }
  return ST_OK;
}

// Starts what has been filled in, with segments of `segment` elements; it is the caller's.
static Status launch(CommCollective *c, int64_t segment) {
  c->segment = segment > 0 ? segment : 1;
  c->n_segments = c->comm->size == 1 ? 0 : (c->count + c->segment - 1) / c->segment;
  Status status = give_room(c);
  if (status != ST_OK) {
    collective_delete(c);
    return status;
  }
  if (c->comm->n_under_way++ == 0) c->comm->busy_since = clock_now();
  CommCollective **at = &comm_process()->collectives;
  while (*at) at = &(*at)->next;
  *at = c;
  comm_collectives_advance();
  return ST_OK;
}

static Status no_room(void) { return fail(ST_ENOMEM, "out of memory for a sum over ranks"); }

Status comm_all_reduce_start(Comm *comm, Pool *pool, void *data, int64_t count, DType dtype,
                             CommReduce how, CommCollective **out) {
  CommCollective *c = collective_new(comm, pool);
  if (!c) return no_room();
  c->kind = ALL_REDUCE;
  c->from = c->data = data;
  c->count = count;
  c->dtype = dtype;
  c->how = how;
  c->is_small = (size_t)count * dtype_size(dtype) <= SMALL;
  TRY(launch(c, c->is_small ? count : SEGMENT / (int64_t)dtype_size(dtype)));
  *out = c;
  return ST_OK;
}

Status comm_reduce_scatter_start(Comm *comm, Pool *pool, const void *in, void *out, int64_t count,
                                 DType dtype, CommCollective **under_way) {
  CommCollective *c = collective_new(comm, pool);
  if (!c) return no_room();
  c->kind = REDUCE_SCATTER;
  c->from = in;
  c->data = out;
  c->count = count;
  c->dtype = dtype;
  c->how = REDUCE_SUM;
  if (comm->size == 1 && count) memmove(out, in, (size_t)count * dtype_size(dtype));
  TRY(launch(c, SEGMENT / (int64_t)dtype_size(dtype) / comm->size));
  *under_way = c;
  return ST_OK;
}

Status comm_all_gather_start(Comm *comm, Pool *pool, const void *in, void *out, size_t bytes,
                             CommCollective **under_way) {
  CommCollective *c = collective_new(comm, pool);
  if (!c) return no_room();
  c->kind = ALL_GATHER;
  c->data = out;
  c->count = (int64_t)bytes;
  c->dtype = DT_U8;
  if (bytes) memmove(c->data + (size_t)comm->rank * bytes, in, bytes);
  TRY(launch(c, c->count));
  *under_way = c;
  return ST_OK;
}

static Status finish(CommCollective *c) {
  Status status = c->status;
  if (status != ST_OK) status_again(status, &c->kept);
  collective_delete(c);
  return status;
}

Status comm_collective_test(CommCollective *c, bool *done) {
  if (!c->is_done) comm_progress();
  *done = c->is_done;
  return *done ? finish(c) : ST_OK;
}

static Status wait_until_done(CommCollective *c, const char *what) {
  double since = clock_now();
  comm_collectives_advance();
  while (!c->is_done) TRY(comm_waiting(c->comm, waits_for(c), what, since));
  if (c->done_at > since) c->comm->stats.waited += c->done_at - since;
  comm_beat();
  return ST_OK;
}

Status comm_collective_wait(CommCollective *c, const char *what) {
  Status status = wait_until_done(c, what);
  if (status == ST_OK) return finish(c);
  if (!c->is_done) end_busy(c);
  collective_delete(c);
  return status;
}

Status comm_collectives_settle(void) {
  for (CommCollective *c = comm_process()->collectives; c; c = c->next)
    TRY(wait_until_done(c, "the last words of a run"));
  return ST_OK;
}

void comm_collectives_forget(const Comm *comm) {
  for (CommCollective **at = &comm_process()->collectives; *at;) {
    CommCollective *c = *at;
    if (c->comm != comm) {
      at = &c->next;
      continue;
    }
    *at = c->next;
    if (!c->is_done) {
      c->status = fail(ST_ECOMM, "its group of ranks is gone");
      status_keep(&c->kept);
    }
    c->is_done = true;
  }
}

Status comm_collectives_drain(Comm *comm) {
  for (CommCollective *c = comm_process()->collectives; c; c = c->next)
    if (c->comm == comm) TRY(wait_until_done(c, "a sum over ranks"));
  return ST_OK;
}

Status comm_all_reduce(Comm *comm, void *data, int64_t count, DType dtype, CommReduce how) {
  CommCollective *c;
  TRY(comm_all_reduce_start(comm, NULL, data, count, dtype, how, &c));
  return comm_collective_wait(c, "a sum over ranks");
}

Status comm_reduce_scatter(Comm *comm, const void *in, void *out, int64_t count, DType dtype) {
  CommCollective *c;
  TRY(comm_reduce_scatter_start(comm, NULL, in, out, count, dtype, &c));
  return comm_collective_wait(c, "a sum over ranks");
}
