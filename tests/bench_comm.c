// bench_comm - messages beside MPI's own, in the same run: `mpirun -n 2 build/release/bench_comm`.
//
// Ping-pong of 1 and 16 MiB through comm and through bare MPI, interleaved; then a transfer of 16
// MiB around small kernels that poll, and what it costs each side, beside the copy itself: MPI's
// own where nothing else is to be done, which under Linux reads another process's memory through
// the kernel, and the copy by hand that shared memory would allow. Medians of rounds; a line a
// figure.
#include "core/poll.h"
#include "core/spans.h"
#include "parallel/comm.h"

#include <mpi.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

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

// ---- a transfer around kernels

// Small kernels in the first-level cache, with a poll after each.
static double kernels(float *x, int n) {
  double start = clock_now();
  for (int k = 0; k < n; k++) {
    for (int i = 0; i < 8192; i++) x[i] = x[i] * 0.999f + 0.001f;
    poll_run();
  }
  return clock_now() - start;
}

// How many kernels take 20 ms.
static int enough(float *x) {
  double once = 1;
  for (int i = 0; i < 20; i++) {
    double took = kernels(x, 200) / 200;
    if (took < once) once = took;
  }
  return (int)(0.02 / once);
}

// Memory as the pool gives it to a tensor of this size: in huge pages where they are to be had.
static char *like_a_tensor(size_t bytes) {
  char *data = aligned_alloc(2 * MIB, bytes);
  if (!data) exit(1);
  madvise(data, bytes, MADV_HUGEPAGE);
  memset(data, 1, bytes);
  return data;
}

// Rank 0 writes anew what it sends: it does not lie in the receiver's cache.
static void write_anew(char *data, size_t bytes, int round) {
  if (world->rank == 0) memset(data, round, bytes);
  must(comm_barrier(world));
}

// The receiver's seconds for a copy by hand out of memory that both ranks have mapped.
static double by_hand(char *to, char *shared, size_t bytes, int round) {
  write_anew(shared, bytes, round);
  double start = clock_now();
  if (world->rank == 1) memcpy(to, shared, bytes);
  return clock_now() - start;
}

// ... for one between two tensors of its own, the other of which it has just written.
static double at_home(char *to, char *from, size_t bytes, int round) {
  memset(from, round, bytes);
  double start = clock_now();
  memcpy(to, from, bytes);
  return clock_now() - start;
}

// ... for MPI's own copy: a bare MPI_Recv of what is being sent.
static double by_mpi(char *data, size_t bytes, int round) {
  write_anew(data, bytes, round);
  double start = clock_now();
  if (world->rank == 0)
    MPI_Send(data, (int)bytes, MPI_BYTE, 1, 5, MPI_COMM_WORLD);
  else
    MPI_Recv(data, (int)bytes, MPI_BYTE, 0, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  return clock_now() - start;
}

static double around(char *data, size_t bytes, int round, float *x, int n) {
  CommRequest *request;
  write_anew(data, bytes, round);
  double start = clock_now();
  if (world->rank == 0)
    must(comm_send(world, 1, CHANNEL_PAYLOAD, data, bytes, NULL, &request));
  else
    must(comm_recv(world, 0, CHANNEL_PAYLOAD, data, bytes, NULL, &request));
  kernels(x, n);
  must(comm_wait(world, request));
  return clock_now() - start;
}

static char *shared_memory(size_t bytes) {
  MPI_Win window; // lives as long as the process
  MPI_Aint size;
  int unit;
  void *memory;
  MPI_Win_allocate_shared(world->rank == 0 ? (MPI_Aint)bytes : 0, 1, MPI_INFO_NULL, MPI_COMM_WORLD,
                          &memory, &window);
  MPI_Win_shared_query(window, 0, &size, &unit, &memory);
  return memory;
}

// 16 MiB from rank 0 to rank 1 around 20 ms of kernels: how much longer they take for it, and how
// that compares with the receiver's copy alone, MPI's and one by hand.
static void overlap(void) {
  size_t bytes = 16 * MIB;
  char *data = like_a_tensor(bytes), *other = like_a_tensor(bytes), *shared = shared_memory(bytes);
  float x[8192];
  double share[ROUNDS], more[ROUNDS], hand[ROUNDS], mpi[ROUNDS], home[ROUNDS];
  double mine[5], all[10];
  for (int i = 0; i < 8192; i++) x[i] = 1;
  int n = enough(x);
  for (int i = -2; i < ROUNDS; i++) {
    must(comm_barrier(world));
    double alone = kernels(x, n), under = around(data, bytes, i, x, n);
    double copied = by_mpi(data, bytes, i), by = by_hand(data, shared, bytes, i);
    if (i < 0) continue;
    share[i] = under / alone;
    more[i] = under - alone;
    mpi[i] = copied;
    hand[i] = by;
    home[i] = at_home(data, other, bytes, i);
  }
  mine[0] = median(share, ROUNDS);
  mine[1] = median(more, ROUNDS);
  mine[2] = median(mpi, ROUNDS);
  mine[3] = median(hand, ROUNDS);
  mine[4] = median(home, ROUNDS);
  must(comm_all_gather(world, mine, all, sizeof mine));
  if (world->rank == 0)
    printf("16 MiB around 20 ms of kernels, medians: the sender takes %.3f of the time alone, the "
           "receiver %.3f: %.2f ms more\n"
           "  ... %.2f of MPI's own copy alone (%.2f ms), %.2f of one by hand from shared memory "
           "(%.2f ms), %.2f of one within the receiver (%.2f ms)\n",
           all[0], all[5], all[6] * 1e3, all[6] / all[7], all[7] * 1e3, all[6] / all[8],
           all[8] * 1e3, all[6] / all[9], all[9] * 1e3);
  free(data);
  free(other);
}

// Each rank on a core of its own, where the launcher binds none: two on one core would take turns.
static void take_a_core(void) {
  cpu_set_t cores, one;
  int at = 0;
  if (sched_getaffinity(0, sizeof cores, &cores) != 0 || CPU_COUNT(&cores) < 2) return;
  for (int core = 0; core < CPU_SETSIZE; core++) {
    if (!CPU_ISSET(core, &cores) || at++ != world->rank) continue;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    sched_setaffinity(0, sizeof one, &one);
  }
}

int main(void) {
  must(comm_world(&world));
  if (world->size != 2) {
    fprintf(stderr, "bench_comm: start 2 ranks: mpirun -n 2 %s\n", "build/release/bench_comm");
    return 2;
  }
  take_a_core();
  compare(MIB, 20);
  compare(16 * MIB, 4);
  overlap();
  return 0;
}
