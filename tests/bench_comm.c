// bench_comm - messages beside MPI's own, in the same run: `mpirun -n 2 build/release/bench_comm`.
//
// Ping-pong of 1 and 16 MiB through comm and through bare MPI, interleaved; then a transfer of 16
// MiB around small kernels that poll, and what it costs each side. Medians of rounds; a line a
// figure.
#include "core/poll.h"
#include "core/spans.h"
#include "parallel/comm.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROUNDS = 15, MIB = 1 << 20 };

static Comm *world;

static void must(Status status) {
  if (status == ST_OK) return;
  fprintf(stderr, "%s\n", status_message());
  exit(1);
}

static int by_value(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(double *values, int n) {
  qsort(values, (size_t)n, sizeof *values, by_value);
  return values[n / 2];
}

static void give(char *data, size_t bytes) {
  CommRequest *request;
  must(comm_send(world, 1 - world->rank, CHANNEL_PAYLOAD, data, bytes, NULL, &request));
  must(comm_wait(world, request));
}

static void get(char *data, size_t bytes) {
  CommRequest *request;
  must(comm_recv(world, 1 - world->rank, CHANNEL_PAYLOAD, data, bytes, NULL, &request));
  must(comm_wait(world, request));
}

// Seconds of `turns` there and back.
static double ping_pong(char *data, size_t bytes, int turns, bool bare) {
  int peer = 1 - world->rank;
  must(comm_barrier(world));
  double start = clock_now();
  for (int i = 0; i < 2 * turns; i++) {
    bool sends = i % 2 == world->rank;
    if (bare && sends)
      MPI_Send(data, (int)bytes, MPI_BYTE, peer, 5, MPI_COMM_WORLD);
    else if (bare)
      MPI_Recv(data, (int)bytes, MPI_BYTE, peer, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    else if (sends)
      give(data, bytes);
    else
      get(data, bytes);
  }
  return clock_now() - start;
}

static void compare(size_t bytes, int turns) {
  char *data = malloc(bytes);
  double ours[ROUNDS], bare[ROUNDS], share[ROUNDS];
  if (!data) exit(1);
  memset(data, 1, bytes);
  for (int i = -2; i < ROUNDS; i++) {
    double a = ping_pong(data, bytes, turns, false), b = ping_pong(data, bytes, turns, true);
    if (i < 0) continue;
    ours[i] = a;
    bare[i] = b;
    share[i] = b / a;
  }
  double moved = 2.0 * turns * (double)bytes * 1e-9;
  if (world->rank == 0)
    printf("ping-pong %zu MiB: comm %.2f GB/s, MPI %.2f GB/s, share %.3f\n", bytes / MIB,
           moved / median(ours, ROUNDS), moved / median(bare, ROUNDS), median(share, ROUNDS));
  free(data);
}

// Small kernels in the first-level cache, with a poll after each.
static double kernels(float *x, int n) {
  double start = clock_now();
  for (int k = 0; k < n; k++) {
    for (int i = 0; i < 8192; i++) x[i] = x[i] * 0.999f + 0.001f;
    poll_run();
  }
  return clock_now() - start;
}

// 16 MiB from rank 0 to rank 1 around n kernels; how much longer they take for it.
static void overlap(void) {
  size_t bytes = 16 * MIB;
  char *data = malloc(bytes), *copy = malloc(bytes);
  float x[8192];
  double alone[ROUNDS], under[ROUNDS], copies[ROUNDS];
  if (!data || !copy) exit(1);
  memset(data, 1, bytes);
  memset(copy, 1, bytes);
  for (int i = 0; i < 8192; i++) x[i] = 1;
  double once = 1;
  for (int i = 0; i < 20; i++) {
    double took = kernels(x, 200) / 200;
    if (took < once) once = took;
  }
  int n = (int)(0.02 / once);
  for (int i = -2; i < ROUNDS; i++) {
    must(comm_barrier(world));
    double before = kernels(x, n);
    must(comm_barrier(world));
    CommRequest *request;
    double start = clock_now();
    if (world->rank == 0)
      must(comm_send(world, 1, CHANNEL_PAYLOAD, data, bytes, NULL, &request));
    else
      must(comm_recv(world, 0, CHANNEL_PAYLOAD, data, bytes, NULL, &request));
    kernels(x, n);
    must(comm_wait(world, request));
    double during = clock_now() - start;
    start = clock_now();
    memcpy(copy, data, bytes);
    double copied = clock_now() - start;
    if (i < 0) continue;
    alone[i] = before;
    under[i] = during;
    copies[i] = copied;
  }
  // The best round: what others do on the machine only adds.
  double mine[3] = {0, 0, 0}, all[6];
  qsort(alone, ROUNDS, sizeof *alone, by_value);
  qsort(under, ROUNDS, sizeof *under, by_value);
  qsort(copies, ROUNDS, sizeof *copies, by_value);
  mine[0] = under[0] / alone[0];
  mine[1] = (under[0] - alone[0]) / copies[0];
  mine[2] = under[ROUNDS / 2] / alone[ROUNDS / 2];
  must(comm_all_gather(world, mine, all, sizeof mine));
  if (world->rank == 0)
    printf(
        "16 MiB around 20 ms of kernels, best (median): the sender takes %.3f (%.3f) of the time "
        "alone; the receiver %.3f (%.3f), %.2f of a copy more\n",
        all[0], all[2], all[3], all[5], all[4]);
  free(data);
  free(copy);
}

int main(void) {
  must(comm_world(&world));
  if (world->size != 2) {
    fprintf(stderr, "bench_comm: start 2 ranks: mpirun -n 2 %s\n", "build/release/bench_comm");
    return 2;
  }
  compare(MIB, 20);
  compare(16 * MIB, 4);
  overlap();
  return 0;
}
