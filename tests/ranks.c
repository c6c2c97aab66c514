// ranks - collectives, messages, groups and meshes on several ranks: each rank computes what it
// must get from a formula. Started by tests/comm_test.sh; prints "ok ..." lines on rank 0.
// Usage: ranks [all | clock SECONDS | link MS | slow FACTOR | sleep | node |
// wrong-size BYTES]
#include "core/bf16.h"
#include "core/poll.h"
#include "core/spans.h"
#include "parallel/comm.h"
#include "parallel/mesh.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

static Comm *world;
static int n_failed;    // checks on this rank since the last claim
static bool has_failed; // a claim

static void check_at(int line, const char *words, bool is_true) {
  if (is_true) return;
  n_failed++;
  if (n_failed < 10) fprintf(stderr, "rank %d: ranks.c:%d: %s\n", world->rank, line, words);
}
#define CHECK(x) check_at(__LINE__, #x, x)

static void must(Status status) {
  if (status == ST_OK) return;
  fprintf(stderr, "rank %d: %s\n", world ? world->rank : -1, status_message());
  comm_fatal(world, 1);
  exit(1);
}

// Rank 0 says whether the claim held on all ranks.
static void claim(const char *words) {
  int64_t failed = n_failed;
  must(comm_all_reduce(world, &failed, 1, DT_I64, REDUCE_SUM));
  if (world->rank == 0) printf("%s %s\n", failed ? "not ok" : "ok", words);
  fflush(stdout);
  n_failed = 0;
  if (!failed) return;
  has_failed = true;
  comm_leaving(1);
}

static void *room(size_t bytes) {
  void *block = malloc(bytes + 64);
  if (!block) exit(1);
  memset(block, 0xa5, bytes + 64);
  return block;
}

// ---- values: of no pattern, different for each rank, in which f32 sums round -------------------

static double value(int rank, int64_t i) {
  uint64_t x = (uint64_t)i * 2654435761u + (uint64_t)(rank + 1) * 40503u * 65537u;
  x ^= x >> 13, x *= 0x9e3779b97f4a7c15u, x ^= x >> 29;
  return ((double)(x % 2000003u) - 1000001.0) * 1e-3;
}

static void put(void *data, DType dtype, int64_t i, double x) {
  switch (dtype) {
  case DT_F32: ((float *)data)[i] = (float)x; break;
  case DT_F64: ((double *)data)[i] = x; break;
  case DT_BF16: ((uint16_t *)data)[i] = bf16_narrow((float)x); break;
  case DT_I64: ((int64_t *)data)[i] = (int64_t)x; break;
  case DT_I32: ((int32_t *)data)[i] = (int32_t)x; break;
  case DT_U8: ((uint8_t *)data)[i] = (uint8_t)(int64_t)x; break;
  case DT_BOOL: ((uint8_t *)data)[i] = x > 900; break;
  }
}

static void fill(void *data, DType dtype, int64_t count, int rank) {
  for (int64_t i = 0; i < count; i++) put(data, dtype, i, value(rank, i));
}

// The sum (or maximum) of element i over the group, in rank order, as bits of the dtype.
static void expected(const Comm *comm, void *out, DType dtype, int64_t from, int64_t count,
                     CommReduce how) {
  for (int64_t i = 0; i < count; i++) {
    double wide = 0;
    float narrow = 0;
    for (int r = 0; r < comm->size; r++) {
      double x = value(comm->member[r], from + i);
      if (dtype == DT_I64 || dtype == DT_I32) x = trunc(x);
      if (dtype == DT_U8) x = (uint8_t)(int64_t)x;
      if (dtype == DT_BOOL) x = x > 900;
      float f = dtype == DT_BF16 ? bf16_widen(bf16_narrow((float)x)) : (float)x;
      wide = r == 0 ? x : how == REDUCE_SUM ? wide + x : fmax(wide, x);
      narrow = r == 0 ? f : how == REDUCE_SUM ? narrow + f : fmaxf(narrow, f);
    }
    if (dtype == DT_U8) wide = (uint8_t)(int64_t)wide;
    if (dtype == DT_BOOL) wide = wide > 0 ? 1000 : 0;
    put(out, dtype, i, dtype == DT_F32 || dtype == DT_BF16 ? (double)narrow : wide);
  }
}

static const int64_t counts[] = {0, 1, 3, 8, 1001, 65537, 300001};
enum { COUNTS = sizeof counts / sizeof *counts };

// ---- collectives -------------------------------------------------------------------------------

static void try_all_reduce(Comm *comm, int64_t count, DType dtype, CommReduce how) {
  size_t bytes = (size_t)count * dtype_size(dtype);
  char *data = room(bytes), *want = room(bytes);
  fill(data, dtype, count, world->rank);
  expected(comm, want, dtype, 0, count, how);
  must(comm_all_reduce(comm, data, count, dtype, how));
  CHECK(memcmp(data, want, bytes) == 0);
  CHECK(data[bytes] == (char)0xa5);
  free(data);
  free(want);
}

static void try_reduce_scatter(Comm *comm, int64_t count, DType dtype) {
  size_t bytes = (size_t)count * dtype_size(dtype);
  char *in = room(bytes * (size_t)comm->size), *out = room(bytes), *want = room(bytes);
  fill(in, dtype, count * comm->size, world->rank);
  expected(comm, want, dtype, count * comm->rank, count, REDUCE_SUM);
  must(comm_reduce_scatter(comm, in, out, count, dtype));
  CHECK(memcmp(out, want, bytes) == 0);
  CHECK(out[bytes] == (char)0xa5);
  free(in);
  free(out);
  free(want);
}

static void try_gathers(Comm *comm, int64_t count) {
  size_t n = (size_t)comm->size, bytes = (size_t)count * sizeof(float);
  char *in = room(bytes * n), *out = room(bytes * n), *want = room(bytes * n);
  int64_t *bytes_of = room(n * sizeof *bytes_of);
  fill(in, DT_F32, count, world->rank);
  for (int r = 0; r < comm->size; r++)
    fill(want + (size_t)r * bytes, DT_F32, count, comm->member[r]);
  must(comm_all_gather(comm, in, out, bytes));
  CHECK(memcmp(out, want, bytes * n) == 0);

  size_t at = 0; // rank r brings a share that shrinks with r; some bring nothing
  for (int r = 0; r < comm->size; r++) bytes_of[r] = r % 3 == 2 ? 0 : 4 * (count / (r + 1));
  must(comm_all_gather_v(comm, in, out, bytes_of));
  for (int r = 0; r < comm->size; r++) {
    CHECK(memcmp(out + at, want + (size_t)r * bytes, (size_t)bytes_of[r]) == 0);
    at += (size_t)bytes_of[r];
  }

  for (int root = 0; root < comm->size; root++) {
    fill(out, DT_F32, count, world->rank);
    must(comm_broadcast(comm, root, out, bytes));
    CHECK(memcmp(out, want + (size_t)root * bytes, bytes) == 0);
  }

  for (int to = 0; to < comm->size; to++) // block `to` of this rank: values of rank 100 * me + to
    fill(in + (size_t)to * bytes, DT_F32, count, 100 * comm->rank + to);
  for (int r = 0; r < comm->size; r++)
    fill(want + (size_t)r * bytes, DT_F32, count, 100 * r + comm->rank);
  must(comm_all_to_all(comm, in, out, bytes));
  CHECK(memcmp(out, want, bytes * n) == 0);
  CHECK(out[bytes * n] == (char)0xa5);
  free(in);
  free(out);
  free(want);
  free(bytes_of);
}

static void try_group(Comm *comm) {
  for (int i = 0; i < COUNTS; i++) {
    static const DType dtypes[] = {DT_F32, DT_F64, DT_BF16, DT_I64, DT_I32, DT_U8, DT_BOOL};
    for (int k = 0; k < 7; k++) {
      if (counts[i] > 70000 && k > 2) continue;
      try_all_reduce(comm, counts[i], dtypes[k], REDUCE_SUM);
      try_all_reduce(comm, counts[i], dtypes[k], REDUCE_MAX);
    }
    if (counts[i] > 70000) continue;
    for (int k = 0; k < 3; k++) try_reduce_scatter(comm, counts[i], dtypes[k]);
    try_gathers(comm, counts[i]);
    must(comm_barrier(comm));
  }
}

static void try_nan(Comm *comm) {
  float x[2] = {comm->rank == comm->size - 1 ? NAN : 1.0f, 2.0f};
  must(comm_all_reduce(comm, x, 2, DT_F32, REDUCE_MAX));
  CHECK(isnan(x[0]) && x[1] == 2.0f);
}

// Several sums under way at once, moved on by polls alone, then waited for out of order.
static void try_overlap(Comm *comm) {
  enum { N = 5 };
  CommCollective *sums[N];
  char *data[N], *want[N];
  for (int i = 0; i < N; i++) {
    int64_t count = counts[i + 2];
    size_t bytes = (size_t)count * 4;
    data[i] = room(bytes);
    want[i] = room(bytes);
    fill(data[i], DT_F32, count, world->rank);
    expected(comm, want[i], DT_F32, 0, count, REDUCE_SUM);
    must(comm_all_reduce_start(comm, NULL, data[i], count, DT_F32, REDUCE_SUM, &sums[i]));
  }
  double since = clock_now();
  bool done = false;
  while (!done && clock_now() - since < 20) {
    poll_run();
    must(comm_collective_test(sums[N - 1], &done));
  }
  CHECK(done); // the last of the group, so all are
  int64_t one = 1;
  must(comm_all_reduce(comm, &one, 1, DT_I64, REDUCE_SUM)); // takes its turn behind them
  CHECK(one == comm->size);
  for (int i = N - 2; i >= 0; i--) must(comm_collective_wait(sums[i], "a test"));
  for (int i = 0; i < N; i++) {
    CHECK(memcmp(data[i], want[i], (size_t)counts[i + 2] * 4) == 0);
    free(data[i]);
    free(want[i]);
  }
}

// A reduce_scatter and a gathering under way behind each other, moved on by polls.
static void try_overlap_scatter(Comm *comm, int64_t count, DType dtype) {
  size_t bytes = (size_t)count * dtype_size(dtype), n = (size_t)comm->size;
  char *in = room(bytes * n), *out = room(bytes), *want = room(bytes);
  char *all = room(bytes * n), *want_all = room(bytes * n), *before = room(bytes * n);
  CommCollective *sum, *gathering;
  fill(in, dtype, count * comm->size, world->rank);
  memcpy(before, in, bytes * n);
  expected(comm, want, dtype, count * comm->rank, count, REDUCE_SUM);
  for (int r = 0; r < comm->size; r++)
    fill(want_all + (size_t)r * bytes, dtype, count, comm->member[r]);
  must(comm_reduce_scatter_start(comm, NULL, in, out, count, dtype, &sum));
  must(comm_all_gather_start(comm, NULL, in, all, bytes, &gathering)); // this rank's first block
  double since = clock_now();
  bool done = false;
  while (!done && clock_now() - since < 20) {
    poll_run();
    must(comm_collective_test(gathering, &done));
  }
  CHECK(done);
  must(comm_collective_wait(sum, "a test"));
  CHECK(memcmp(out, want, bytes) == 0 && out[bytes] == (char)0xa5);
  CHECK(memcmp(all, want_all, bytes * n) == 0 && all[bytes * n] == (char)0xa5);
  CHECK(memcmp(in, before, bytes * n) == 0);
  free(in);
  free(out);
  free(want);
  free(all);
  free(want_all);
  free(before);
}

// ---- groups ------------------------------------------------------------------------------------

static void try_splits(void) {
  Comm *half, *reversed, *alone, *none, *pair = NULL;
  must(comm_split(world, world->rank % 2, -world->rank, &half));
  CHECK(half->size == (world->size + 1 - world->rank % 2) / 2);
  for (int i = 1; i < half->size; i++) CHECK(half->member[i] < half->member[i - 1]);
  // Odd ranks make more groups than even ones, and in another order.
  if (world->rank % 2) {
    must(comm_split(half, half->rank / 2, 0, &pair));
    must(comm_split(half, 0, half->rank, &reversed));
    comm_free(reversed);
  }
  must(comm_split(world, 0, world->size - world->rank, &reversed));
  CHECK(reversed->rank == world->size - 1 - world->rank);
  must(comm_split(world, world->rank, 0, &alone));
  CHECK(alone->size == 1 && alone->rank == 0 && alone->member[0] == world->rank);
  must(comm_split(world, world->rank == 0 ? 3 : -1, 0, &none));
  CHECK((none != NULL) == (world->rank == 0));
  comm_free(none);
  try_group(half);
  if (pair) try_all_reduce(pair, 1001, DT_F32, REDUCE_SUM);
  try_group(alone);
  try_all_reduce(reversed, 65537, DT_F32, REDUCE_SUM);
  // Groups in use at the same time do not mix.
  int64_t a = 1, b = 10;
  CommCollective *first, *second;
  Comm *x = world->rank % 2 ? half : reversed, *y = world->rank % 2 ? reversed : half;
  must(comm_all_reduce_start(x, NULL, &a, 1, DT_I64, REDUCE_SUM, &first));
  must(comm_all_reduce_start(y, NULL, &b, 1, DT_I64, REDUCE_SUM, &second));
  must(comm_collective_wait(second, "a test"));
  must(comm_collective_wait(first, "a test"));
  int64_t odd = world->size / 2, even = world->size - odd;
  int64_t in_all = world->rank % 2 ? b : a, in_half = world->rank % 2 ? a : b;
  CHECK(in_all == even * 1 + odd * 10);
  CHECK(in_half == (world->rank % 2 ? odd * 1 : even * 10));
  comm_free(pair);
  comm_free(half);
  comm_free(reversed);
  comm_free(alone);
}

static void try_many_groups(void) {
  for (int i = 0; i < 500; i++) {
    Comm *group;
    must(comm_split(world, (world->rank + i) % 2, 0, &group));
    comm_free(group);
  }
}

// ---- messages ----------------------------------------------------------------------------------

static void on_poll(void *user) { ++*(int *)user; }

// Every rank has 300 messages under way to and from every other, on two channels.
static void try_flood(void) {
  enum { N = 300 };
  int n = world->size, polled = 0;
  CommRequest **requests = room(sizeof *requests * (size_t)(2 * N * n));
  char **in = room(sizeof *in * (size_t)(N * n)), **out = room(sizeof *out * (size_t)N);
  int under_way = 0;
  world->on_poll = on_poll;
  world->poll_user = &polled;
  for (int i = 0; i < N; i++) {
    out[i] = room((size_t)(i * 37 % 9001));
    fill(out[i], DT_U8, i * 37 % 9001, 7 * world->rank + i);
  }
  for (int peer = 0; peer < n; peer++)
    for (int i = 0; i < N && peer != world->rank; i++) {
      size_t bytes = (size_t)(i * 37 % 9001);
      int channel = i % 3 ? CHANNEL_PAYLOAD : CHANNEL_HEADER;
      in[peer * N + i] = room(bytes);
      must(comm_send(world, peer, channel, out[i], bytes, NULL, &requests[under_way++]));
      must(comm_recv(world, peer, channel, in[peer * N + i], bytes, NULL, &requests[under_way++]));
    }
  for (int i = under_way - 1; i >= 0; i--) must(comm_wait(world, requests[i]));
  CHECK(under_way == 0 || polled > 0);
  world->on_poll = NULL;
  for (int peer = 0; peer < n; peer++)
    for (int i = 0; i < N && peer != world->rank; i++) {
      char *want = room(9001);
      fill(want, DT_U8, i * 37 % 9001, 7 * peer + i);
      CHECK(memcmp(want, in[peer * N + i], (size_t)(i * 37 % 9001)) == 0);
      free(want);
      free(in[peer * N + i]);
    }
  for (int i = 0; i < N; i++) free(out[i]);
  free(requests);
  free(in);
  free(out);
}

// Both send first: no transport may need the receive to stand. 5 MiB pass any eager limit.
static void try_head_on(void) {
  size_t bytes = 5 << 20;
  int peer = world->rank ^ 1;
  if (peer >= world->size) return;
  char *out = room(bytes), *in = room(bytes);
  memset(out, world->rank + 1, bytes);
  CommRequest *send, *recv;
  must(comm_send(world, peer, CHANNEL_PAYLOAD, out, bytes, NULL, &send));
  must(comm_recv(world, peer, CHANNEL_PAYLOAD, in, bytes, NULL, &recv));
  must(comm_wait(world, send));
  must(comm_wait(world, recv));
  for (size_t i = 0; i < bytes; i += 511) CHECK(in[i] == peer + 1);
  CHECK(in[bytes - 1] == peer + 1 && in[bytes] == (char)0xa5);
  free(in);
  free(out);
}

static void try_self(void) {
  Comm *self;
  must(comm_self(&self));
  int a[2] = {1, 2}, b[2] = {0, 0};
  CommRequest *requests[4];
  bool done;
  must(comm_recv(self, 0, CHANNEL_PAYLOAD, &b[0], 4, NULL, &requests[0]));
  must(comm_test(self, requests[0], &done));
  CHECK(!done);
  must(comm_send(self, 0, CHANNEL_PAYLOAD, &a[0], 4, NULL, &requests[1]));
  must(comm_send(self, 0, CHANNEL_PAYLOAD, &a[1], 4, NULL, &requests[2]));
  must(comm_recv(self, 0, CHANNEL_PAYLOAD, &b[1], 4, NULL, &requests[3]));
  for (int i = 0; i < 4; i++) must(comm_wait(self, requests[i]));
  CHECK(b[0] == 1 && b[1] == 2);
  try_group(self);
  comm_free(self);
}

// ---- agreement, meshes -------------------------------------------------------------------------

static void try_agree(void) {
  const char *lines[] = {"version 1", "h.3.attn [4, 4]", "h.4.attn [4, 4]"};
  must(comm_agree(world, lines, 3));
  must(comm_agree(world, NULL, 0));
  if (world->size == 1) return;
  int other = world->size - 1;
  char want[160];
  if (world->rank == other) lines[1] = "h.3.mlp [4, 4]";
  CHECK(comm_agree(world, lines, 3) == ST_ECOMM);
  snprintf(want, sizeof want, "rank %d has h.3.mlp [4, 4] where rank 0 has h.3.attn [4, 4]", other);
  CHECK(strstr(status_message(), want) != NULL);
  lines[1] = "h.3.attn [4, 4]";
  CHECK(comm_agree(world, lines, world->rank == other ? 2 : 3) == ST_ECOMM);
  snprintf(want, sizeof want, "rank %d has nothing more where rank 0 has h.4.attn", other);
  CHECK(strstr(status_message(), want) != NULL);
  CHECK(comm_agree(world, lines, world->rank == other ? 3 : 2) == ST_ECOMM);
  snprintf(want, sizeof want, "rank %d has h.4.attn [4, 4] where rank 0 has nothing more", other);
  CHECK(strstr(status_message(), want) != NULL);
  int64_t least = 10 - world->rank;
  must(comm_all_min(world, &least));
  CHECK(least == 10 - other);
}

static void try_mesh_of(int tp, int dp, int pp) {
  int size[MESH_AXES] = {[AXIS_tp] = tp, [AXIS_dp] = dp, [AXIS_pp] = pp};
  Mesh *mesh;
  must(mesh_new(world, size, &mesh));
  int product = 1;
  for (int axis = 0; axis < MESH_AXES; axis++) {
    Comm *group = mesh->group[axis];
    product *= mesh->size[axis];
    CHECK(group->size == mesh->size[axis] && group->rank == mesh->at[axis]);
    for (int i = 0; i < group->size; i++) { // its ranks are those that differ along the axis alone
      int at[MESH_AXES];
      memcpy(at, mesh->at, sizeof at);
      at[axis] = i;
      CHECK(group->member[i] == mesh->all->member[mesh_rank(mesh, at)]);
    }
  }
  CHECK(product == world->size);
  for (int r = 0; r < world->size; r++) {
    int at[MESH_AXES];
    mesh_at(mesh, r, at);
    CHECK(mesh_rank(mesh, at) == r);
  }
  int64_t sum = 1;
  for (int axis = 0; axis < MESH_AXES; axis++) // a product, by one axis after the other
    must(comm_all_reduce(mesh->group[axis], &sum, 1, DT_I64, REDUCE_SUM));
  CHECK(sum == world->size);
  mesh_free(mesh);
}

static void try_mesh(void) {
  int n = world->size;
  Mesh *mesh = NULL;
  try_mesh_of(1, n, 1);
  try_mesh_of(n, 0, 1);
  try_mesh_of(1, 0, n);
  if (n % 2 == 0) try_mesh_of(2, 0, 1), try_mesh_of(1, 0, 2), try_mesh_of(1, 2, 0);
  if (n == 8) try_mesh_of(2, 2, 2);
  int size[MESH_AXES] = {[AXIS_tp] = 1, [AXIS_dp] = n, [AXIS_pp] = 2};
  CHECK(mesh_new(world, size, &mesh) == ST_EVALUE);
  char want[160];
  if (n == 1)
    snprintf(want, sizeof want, "pp 2 makes 2 ranks, but there is 1");
  else
    snprintf(want, sizeof want, "dp %d x pp 2 makes %d ranks, but there are %d", n, 2 * n, n);
  CHECK(strstr(status_message(), want) != NULL);
  size[AXIS_dp] = 0;
  size[AXIS_pp] = n + 1;
  CHECK(mesh_new(world, size, &mesh) == ST_EVALUE);
  size[AXIS_pp] = -1;
  CHECK(mesh_new(world, size, &mesh) == ST_EVALUE);
  size[AXIS_pp] = size[AXIS_tp] = 0;
  CHECK(mesh_new(world, size, &mesh) == ST_EVALUE && strstr(status_message(), "only one can be"));
}

// With RILLE_FAKE_NODE=rank%2: neighbours in the grid share a node though ranks alternate.
static void try_nodes(void) {
  int size[MESH_AXES] = {[AXIS_tp] = 2, [AXIS_dp] = 0, [AXIS_pp] = 1};
  Mesh *mesh;
  must(mesh_new(world, size, &mesh));
  CHECK(mesh->nodes == 2);
  const Comm *tp = mesh->group[AXIS_tp];
  CHECK(tp->member[1] == tp->member[0] + 2);
  CHECK(strcmp(comm_place(tp, 0)->node, comm_place(tp, 1)->node) == 0);
  mesh_free(mesh);
  claim("tp stays inside a node, whatever the order of ranks");
}

// ---- injection ---------------------------------------------------------------------------------

// With RILLE_FAKE_CLOCK=1:SECONDS.
static void try_clocks(double seconds) {
  double *offset = room(2 * (size_t)world->size * sizeof *offset), *error = offset + world->size;
  must(comm_align_clocks(world, offset, error));
  double worst = 0;
  for (int r = 0; r < world->size; r++) {
    double want = r == 1 ? -seconds : 0.0;
    CHECK(fabs(offset[r] - want) <= error[r] + 1e-9);
    if (error[r] > worst) worst = error[r];
  }
  CHECK(offset[0] == 0 && error[0] == 0 && worst < 50e-3); // cores may be busy with others
  if (world->rank == 0) printf("# clocks agree within %.1f us\n", 1e6 * worst);
  free(offset);
  claim("clocks are aligned within the stated error");
}

// Without RILLE_FAKE_CLOCK and RILLE_FAKE_NODE.
static void try_one_clock(void) {
  double *offset = room(2 * (size_t)world->size * sizeof *offset), *error = offset + world->size;
  int64_t before = world->stats.messages;
  must(comm_align_clocks(world, offset, error));
  CHECK(world->stats.messages == before);
  for (int r = 0; r < world->size; r++) CHECK(offset[r] == 0 && error[r] == 0);
  free(offset);
  claim("ranks of one machine have one clock: no message");
}

// With RILLE_FAKE_LINK=MS.
static void try_link(double ms) {
  char byte = 0;
  CommRequest *request;
  double start = clock_now();
  int peer = world->rank ^ 1;
  for (int turn = 0; turn < 2 && world->rank < 2; turn++) {
    if (turn == world->rank)
      must(comm_send(world, peer, CHANNEL_HEADER, &byte, 1, NULL, &request));
    else
      must(comm_recv(world, peer, CHANNEL_HEADER, &byte, 1, NULL, &request));
    must(comm_wait(world, request));
  }
  double took = clock_now() - start;
  if (world->rank == 0) CHECK(took >= 2e-3 * ms && took < 2e-3 * ms + 0.1);
  claim("a delayed link delays each message");
}

static int by_value(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

// Rank 1 waits so long that it looks by itself every 10 ms only: it must be woken.
static void try_sleep(void) {
  enum { TIMES = 7 };
  double late[TIMES], sent;
  long slept = 0;
  for (int i = 0; i < TIMES; i++) {
    CommRequest *request;
    must(comm_barrier(world));
    if (world->rank == 0) {
      struct timespec nap = {0, 133000000};
      nanosleep(&nap, NULL);
      sent = clock_now();
      must(comm_send(world, 1, CHANNEL_PAYLOAD, &sent, sizeof sent, NULL, &request));
      must(comm_wait(world, request));
      continue;
    }
    struct rusage before, after;
    getrusage(RUSAGE_SELF, &before);
    must(comm_recv(world, 0, CHANNEL_PAYLOAD, &sent, sizeof sent, NULL, &request));
    must(comm_wait(world, request));
    late[i] = clock_now() - sent;
    getrusage(RUSAGE_SELF, &after);
    slept += after.ru_nvcsw - before.ru_nvcsw;
  }
  if (world->rank == 1) {
    qsort(late, TIMES, sizeof *late, by_value);
    CHECK(late[TIMES / 2] < 2e-3);
    CHECK(slept < TIMES * 300); // 1000 and more in naps
  }
  claim("a rank that waits sleeps until it is rung");
}

// With RILLE_FAKE_SLOW=1:FACTOR.
static void try_slow(double factor) {
  CHECK(comm_fake_slow() == (world->rank == 1 ? factor : 1.0));
  claim("a rank can be slow");
}

// The last rank sends another number of bytes than 8: the job is lost. A message that comes later
// goes nowhere, and everything fails in the same words, up to the end.
static void try_wrong_size(size_t sent) {
  char data[16] = {0};
  int last = world->size - 1;
  if (world->rank == last) {
    CommRequest *request = NULL;
    must(comm_send(world, 0, CHANNEL_PAYLOAD, data, sent, NULL, &request));
    must(comm_wait(world, request));
    for (double since = clock_now(); clock_now() - since < 0.1;) {
    }
    must(comm_send(world, 0, CHANNEL_GROUP, data, 8, NULL, &request));
    comm_wait(world, request);
  }
  if (world->rank != 0) return;
  CommRequest *request = NULL, *other = NULL;
  char *later = room(8);
  must(comm_recv(world, last, CHANNEL_GROUP, later, 8, NULL, &other));
  must(comm_recv(world, last, CHANNEL_PAYLOAD, data, 8, NULL, &request));
  CHECK(comm_wait(world, request) == ST_ECOMM);
  CHECK(strstr(status_message(), "has not the 8 bytes") != NULL);
  free(later);
  for (double since = clock_now(); clock_now() - since < 0.3;) comm_poll();
  CHECK(comm_wait(world, other) == ST_ECOMM);
  CHECK(strstr(status_message(), "has not the 8 bytes") != NULL);
  CHECK(comm_recv(world, last, CHANNEL_GROUP, data, 8, NULL, &other) == ST_ECOMM);
  if (n_failed == 0) printf("ok a message of another size is the end, and names the sender\n");
  fflush(stdout);
}

static void try_all(void) {
  try_group(world);
  try_nan(world);
  claim("collectives give what one rank computes, bit for bit");
  try_overlap(world);
  for (int i = 0; i < COUNTS; i++)
    for (DType dtype = DT_F32; dtype <= DT_BF16; dtype++)
      try_overlap_scatter(world, counts[i], dtype);
  claim("sums under way at once, moved on by polls");
  try_splits();
  claim("groups made in different orders do not mix");
  try_many_groups();
  claim("groups come and go by the hundred");
  try_flood();
  try_head_on();
  claim("messages arrive in order, with hundreds under way");
  try_self();
  claim("a group of one rank alone");
  try_agree();
  claim("agreement names what differs and where");
  try_mesh();
  claim("a mesh's groups are slices of the grid");
  try_one_clock();
}

int main(int argc, char **argv) {
  const char *what = argc > 1 ? argv[1] : "all";
  if (comm_world(&world) != ST_OK) {
    fprintf(stderr, "%s\n", status_message());
    return 1;
  }
  if (strcmp(what, "clock") == 0)
    try_clocks(atof(argv[2]));
  else if (strcmp(what, "link") == 0)
    try_link(atof(argv[2]));
  else if (strcmp(what, "sleep") == 0)
    try_sleep();
  else if (strcmp(what, "slow") == 0)
    try_slow(atof(argv[2]));
  else if (strcmp(what, "node") == 0)
    try_nodes();
  else if (strcmp(what, "wrong-size") == 0)
    try_wrong_size((size_t)atoi(argv[2]));
  else
    try_all();
  return has_failed || n_failed > 0;
}
