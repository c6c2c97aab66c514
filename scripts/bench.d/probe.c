// probe - what this machine gives at this moment: the FMA peak and the copy bandwidth.
//
// Usage: probe THREADS
// A worker like the others (scripts/bench.d/main.lua has the protocol), which also answers
//     fma          GFLOP/s of independent multiply-adds in registers, on all threads, over about 10
//     ms copy         GB/s (read + written) of copying 256 MB spawn N CMD  the seconds that N runs
//     of a shell command took, from fork to its end
// Compiled for the machine it runs on (-O3 -march=native -fopenmp).
#include <fcntl.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifdef __AVX512F__
enum { LANES = 16 };
#elif defined __AVX__
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
enum {
  CHAINS = 12,
  ROUNDS = 200000
}; // 12 chains hide a latency of 4 at 2 a cycle, in 16 registers
enum { COPY_BYTES = 256 << 20 };
typedef float Vec __attribute__((vector_size(LANES * sizeof(float))));

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// X(i): the chains; as twelve names they stay in registers.
#define CHAIN_LIST(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)

static float fma_chains(void) {
  Vec scale = {0}, add = {0}, total = {0};
  scale += 0.999f;
  add += 0.001f;
#define X(i) Vec sum##i = add;
  CHAIN_LIST(X)
#undef X
  for (int round = 0; round < ROUNDS; round++) {
#define X(i)                     \
  sum##i = sum##i * scale + add; \
  __asm__ volatile("" : "+x"(sum##i)); // one multiply-add a round, neither folded nor regrouped
    CHAIN_LIST(X)
#undef X
  }
#define X(i) total += sum##i;
  CHAIN_LIST(X)
#undef X
  return total[0];
}

static double probe_fma(int threads) {
  float total = 0;
  double start = now();
#pragma omp parallel num_threads(threads) reduction(+ : total)
  total += fma_chains();
  double seconds = now() - start;
  return total == 0 ? 0 : 2e-9 * LANES * CHAINS * (double)ROUNDS * threads / seconds;
}

static double probe_copy(int threads, char *from, char *to) {
  size_t share = COPY_BYTES / (size_t)threads;
  double start = now();
#pragma omp parallel num_threads(threads)
  {
    size_t at = share * (size_t)omp_get_thread_num();
    memcpy(to + at, from + at, share);
  }
  return 2e-9 * COPY_BYTES / (now() - start);
}

static double probe_spawn(const char *command) {
  double start = now();
  pid_t child = fork();
  if (child == 0) {
    int null = open("/dev/null", O_RDWR);
    if (null < 0 || dup2(null, 0) < 0 || dup2(null, 1) < 0) _exit(127);
    execl("/bin/sh", "sh", "-c", command, (char *)NULL);
    _exit(127);
  }
  int status = -1;
  if (child < 0 || waitpid(child, &status, 0) < 0 || status) return -1;
  return now() - start;
}

int main(int argc, char **argv) {
  int threads = argc > 1 ? atoi(argv[1]) : 1;
  char *from = NULL, *to = NULL, line[4096];
  printf("ready lanes=%d\n", LANES);
  fflush(stdout);
  while (fgets(line, sizeof line, stdin)) {
    int n = 0, at = 0;
    if (!strcmp(line, "fma\n")) {
      printf("%.3f\n", probe_fma(threads));
    } else if (!strcmp(line, "copy\n")) {
      if (!from) {
        from = malloc(COPY_BYTES), to = malloc(COPY_BYTES);
        if (!from || !to) return 1;
        memset(from, 1, COPY_BYTES);
        probe_copy(threads, from, to); // pages are taken at the first touch
      }
      printf("%.3f\n", probe_copy(threads, from, to));
    } else if (sscanf(line, "spawn %d %n", &n, &at) == 1 && at) {
      line[strcspn(line, "\n")] = 0;
      for (int i = 0; i < n; i++) printf("%.9f%c", probe_spawn(line + at), i + 1 < n ? ' ' : '\n');
    } else {
      printf("unknown %s", line);
    }
    fflush(stdout);
  }
  free(from);
  free(to);
  return 0;
}
