// threads - the pool: workers that spin for a while, then sleep.
#include "ops/kernels/threads.h"

#include "core/poll.h"

#include <assert.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MAX_THREADS = 256, SPIN_NS = 60000, POLL_NS = 100000 };

typedef struct Job {
  RangeFn fn;
  void *context;
  int64_t n, grain;
} Job;

// The pool is process-wide, as cores are: it is this module's one object.
static struct {
  pthread_mutex_t lock; // guards `sleepers` decisions and the condition variables
  pthread_cond_t wake, done;
  pthread_mutex_t owner; // held by the thread whose parallel_for is running
  _Alignas(64) atomic_uint generation;
  _Alignas(64) atomic_int running; // workers that have not finished the current job
  _Alignas(64) _Atomic int64_t next;
  Job job;
  int n_wanted, n_started; // threads, the caller included
  bool is_passive, is_pinned, is_known;
  int first_cpu; // offset of this rank's first core in the set
  int n_sleeping;
  bool caller_sleeps;
  cpu_set_t cpus;
  atomic_int n_scratch;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER,
          .owner = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER,
          .done = PTHREAD_COND_INITIALIZER};

static _Thread_local bool inside_block;
static _Thread_local bool may_poll; // on the thread that called parallel_for
static _Thread_local int64_t polled_at;
static _Thread_local void *scratch;

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void relax(void) {
#if defined __x86_64__
  __builtin_ia32_pause();
#elif defined __aarch64__
  __asm__ volatile("yield");
#endif
}

static int number_from(const char *const *names) {
  for (; *names; names++) {
    const char *text = getenv(*names);
    if (text && *text) {
      char *end;
      long value = strtol(text, &end, 10);
      if (end != text && value >= 0 && value <= 1 << 20) return (int)value;
    }
  }
  return -1;
}

// A number of threads; OMP_NUM_THREADS may be a list, a number for each level.
static bool is_count(const char *text, bool may_be_list) {
  char *end;
  long value = strtol(text, &end, 10);
  return end != text && value >= 1 && value <= MAX_THREADS &&
         (!*end || (may_be_list && *end == ','));
}

Status threads_environment(void) {
  const char *own = getenv("RILLE_THREADS"), *omp = getenv("OMP_NUM_THREADS");
  const char *wait = getenv("RILLE_WAIT");
  if (own && *own && !is_count(own, false))
    return fail(ST_EVALUE, "RILLE_THREADS=%.40s: a number of threads from 1 to %d is wanted", own,
                MAX_THREADS);
  if (!(own && *own) && omp && *omp && !is_count(omp, true))
    return fail(ST_EVALUE, "OMP_NUM_THREADS=%.40s: a number of threads from 1 to %d is wanted", omp,
                MAX_THREADS);
  if (wait && *wait && strcmp(wait, "active") != 0 && strcmp(wait, "passive") != 0)
    return fail(ST_EVALUE, "RILLE_WAIT=%.40s: active or passive is wanted", wait);
  return ST_OK;
}

// Slurm lists the tasks of each node: "4(x2),3" is 4, 4, 3. Those of a node, or -1.
static int slurm_tasks(const char *list, int node) {
  while (list) {
    char *end;
    long tasks = strtol(list, &end, 10), times = 1;
    if (end == list || tasks < 1 || tasks > 1 << 20) return -1;
    if (strncmp(end, "(x", 2) == 0) times = strtol(end + 2, &end, 10);
    if (node < times) return (int)tasks;
    node -= (int)times;
    list = strchr(end, ',');
    if (list) list++;
  }
  return -1;
}

void threads_local_ranks(int *n_local, int *local) {
  static const char *const sizes[] = {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", NULL};
  static const char *const ranks[] = {"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
                                      "SLURM_LOCALID", NULL};
  static const char *const nodes[] = {"SLURM_NODEID", NULL};
  *n_local = number_from(sizes);
  *local = number_from(ranks);
  int node = number_from(nodes);
  if (*n_local < 1 && node >= 0) *n_local = slurm_tasks(getenv("SLURM_STEP_TASKS_PER_NODE"), node);
  if (*n_local < 1) *n_local = 1;
  if (*local < 0 || *local >= *n_local) *local = 0;
}

// The n-th core of the process's set, or -1.
static int nth_cpu(int n) {
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
    if (CPU_ISSET(cpu, &pool.cpus) && n-- == 0) return cpu;
  return -1;
}

static void pin_self(int thread) {
  int cpu = nth_cpu(pool.first_cpu + thread);
  if (cpu < 0) return;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  pthread_setaffinity_np(pthread_self(), sizeof one, &one);
}

// A rank that a launcher bound to its own cores sees them alone; ranks that were not bound share
// the machine's, and take turns by their local rank.
static void decide_places(void) {
  int n_local, local;
  threads_local_ranks(&n_local, &local);
  int n_cpus = CPU_COUNT(&pool.cpus);
  long n_online = sysconf(_SC_NPROCESSORS_ONLN);
  bool is_bound = n_local > 1 && n_online > 0 && n_cpus * n_local <= n_online;
  int n_sharing = is_bound ? 1 : n_local;
  pool.first_cpu = is_bound ? 0 : local * pool.n_wanted;
  bool fits = pool.n_wanted * n_sharing <= n_cpus;
  const char *wait = getenv("RILLE_WAIT");
  pool.is_passive = wait && strcmp(wait, "passive") == 0;
  if (!wait || (strcmp(wait, "passive") != 0 && strcmp(wait, "active") != 0))
    pool.is_passive = !fits;
  // Ranks of one thread each may be packed on one core too: where they fill the machine, each gets
  // one.
  bool shares_node = n_sharing > 1 && !pool.is_passive && pool.n_wanted * n_sharing == n_cpus;
  pool.is_pinned = fits && (pool.n_wanted > 1 || shares_node);
}

static void learn(void) {
  if (pool.is_known) return;
  pool.is_known = true;
  CPU_ZERO(&pool.cpus);
  if (sched_getaffinity(0, sizeof pool.cpus, &pool.cpus) != 0) CPU_SET(0, &pool.cpus);
  static const char *const names[] = {"RILLE_THREADS", "OMP_NUM_THREADS", NULL};
  int count = number_from(names);
  if (count < 1) {
    int n_local, local;
    threads_local_ranks(&n_local, &local);
    long n_online = sysconf(_SC_NPROCESSORS_ONLN);
    int n_cpus = CPU_COUNT(&pool.cpus);
    bool is_bound = n_local > 1 && n_online > 0 && n_cpus * n_local <= n_online;
    count = is_bound ? n_cpus : n_cpus / n_local;
  }
  pool.n_wanted = count < 1 ? 1 : count > MAX_THREADS ? MAX_THREADS : count;
  decide_places();
  if (pool.is_pinned && pool.n_wanted == 1) pin_self(0); // others do as they start workers
}

void threads_poll(void) {
  if (!may_poll || !poll_hook) return;
  if (now_ns() - polled_at < POLL_NS) return;
  poll_hook();
  polled_at = now_ns();
}

static void begin_polls(void) {
  may_poll = true;
  if (poll_hook) polled_at = now_ns();
}

static void run_blocks(bool is_caller) {
  const Job *job = &pool.job;
  if (is_caller) begin_polls();
  inside_block = true;
  for (;;) {
    int64_t begin = atomic_fetch_add_explicit(&pool.next, job->grain, memory_order_relaxed);
    if (begin >= job->n) break;
    int64_t end = job->n - begin < job->grain ? job->n : begin + job->grain;
    job->fn(job->context, begin, end);
    threads_poll();
  }
  inside_block = may_poll = false;
}

static void wait_for_generation(unsigned seen) {
  if (!pool.is_passive) {
    int64_t start = now_ns();
    do {
      for (int i = 0; i < 64; i++) {
        if (atomic_load_explicit(&pool.generation, memory_order_acquire) != seen) return;
        relax();
      }
    } while (now_ns() - start < SPIN_NS);
  }
  pthread_mutex_lock(&pool.lock);
  pool.n_sleeping++;
  while (atomic_load_explicit(&pool.generation, memory_order_acquire) == seen)
    pthread_cond_wait(&pool.wake, &pool.lock);
  pool.n_sleeping--;
  pthread_mutex_unlock(&pool.lock);
}

typedef struct Birth {
  int thread;
  unsigned generation;
} Birth;

static void *work(void *argument) {
  Birth birth = *(Birth *)argument;
  free(argument);
  if (pool.is_pinned) pin_self(birth.thread);
  unsigned seen = birth.generation;
  for (;;) {
    wait_for_generation(seen);
    seen = atomic_load_explicit(&pool.generation, memory_order_acquire);
    if (birth.thread < pool.n_wanted) run_blocks(false);
    bool is_leaving = birth.thread >= pool.n_wanted;
    if (atomic_fetch_sub_explicit(&pool.running, 1, memory_order_acq_rel) == 1) {
      pthread_mutex_lock(&pool.lock);
      if (pool.caller_sleeps) pthread_cond_signal(&pool.done);
      pthread_mutex_unlock(&pool.lock);
    }
    if (is_leaving) return NULL;
  }
}

static void forget_workers(void) {
  pthread_mutex_init(&pool.lock, NULL);
  pthread_mutex_init(&pool.owner, NULL);
  pthread_cond_init(&pool.wake, NULL);
  pthread_cond_init(&pool.done, NULL);
  pool.n_started = 0;
  pool.n_sleeping = 0;
  pool.caller_sleeps = false;
  inside_block = false;
}

// Starts what is missing. A thread that cannot be started is done without.
static void start_workers(void) {
  static bool has_fork_handler;
  if (!has_fork_handler) {
    has_fork_handler = true;
    pthread_atfork(NULL, NULL, forget_workers);
  }
  if (pool.n_started == 0) {
    pool.n_started = 1;
    if (pool.is_pinned) pin_self(0);
  }
  while (pool.n_started < pool.n_wanted) {
    Birth *birth = malloc(sizeof *birth);
    pthread_t thread;
    if (!birth) break;
    *birth = (Birth){pool.n_started, atomic_load(&pool.generation)};
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    int error = pthread_create(&thread, &attributes, work, birth);
    pthread_attr_destroy(&attributes);
    if (error) {
      free(birth);
      break;
    }
    pool.n_started++;
  }
}

static void publish(void) {
  atomic_store_explicit(&pool.next, 0, memory_order_relaxed);
  atomic_store_explicit(&pool.running, pool.n_started - 1, memory_order_relaxed);
  pthread_mutex_lock(&pool.lock);
  atomic_fetch_add_explicit(&pool.generation, 1, memory_order_acq_rel);
  if (pool.n_sleeping > 0) pthread_cond_broadcast(&pool.wake);
  pthread_mutex_unlock(&pool.lock);
}

static void wait_for_workers(void) {
  if (!pool.is_passive) {
    int64_t start = now_ns();
    do {
      for (int i = 0; i < 64; i++) {
        if (atomic_load_explicit(&pool.running, memory_order_acquire) == 0) return;
        relax();
      }
    } while (now_ns() - start < SPIN_NS);
  }
  pthread_mutex_lock(&pool.lock);
  pool.caller_sleeps = true;
  while (atomic_load_explicit(&pool.running, memory_order_acquire) != 0)
    pthread_cond_wait(&pool.done, &pool.lock);
  pool.caller_sleeps = false;
  pthread_mutex_unlock(&pool.lock);
}

static void run_serially(int64_t n, int64_t grain, RangeFn fn, void *context) {
  bool polled = may_poll;
  if (!inside_block && !polled) begin_polls();
  for (int64_t begin = 0; begin < n; begin += grain) {
    fn(context, begin, n - begin < grain ? n : begin + grain);
    threads_poll();
  }
  may_poll = polled;
}

void parallel_for(int64_t n, int64_t grain, RangeFn fn, void *context) {
  assert(grain >= 1);
  if (n <= 0) return;
  if (n > grain && !inside_block && pthread_mutex_trylock(&pool.owner) == 0) {
    learn();
    if (pool.n_wanted > 1) {
      start_workers();
      pool.job = (Job){fn, context, n, grain};
      publish();
      run_blocks(true);
      wait_for_workers();
      if (pool.n_started > pool.n_wanted) pool.n_started = pool.n_wanted;
      pthread_mutex_unlock(&pool.owner);
      return;
    }
    pthread_mutex_unlock(&pool.owner);
  }
  run_serially(n, grain, fn, context);
}

int threads_count(void) {
  pthread_mutex_lock(&pool.owner);
  learn();
  int count = pool.n_wanted;
  pthread_mutex_unlock(&pool.owner);
  return count;
}

// Workers beyond the new count leave at the next job; pinning is decided anew for those that start.
void threads_set(int count) {
  assert(count >= 1 && count <= MAX_THREADS && !inside_block);
  pthread_mutex_lock(&pool.owner);
  learn();
  pool.n_wanted = count;
  decide_places();
  if (pool.n_started > count) {
    pool.job = (Job){NULL, NULL, 0, 1}; // those that stay find nothing to do
    publish();
    wait_for_workers();
    pool.n_started = count;
  }
  pthread_mutex_unlock(&pool.owner);
}

bool threads_pinned(void) {
  pthread_mutex_lock(&pool.owner);
  learn();
  bool is_pinned = pool.is_pinned;
  pthread_mutex_unlock(&pool.owner);
  return is_pinned;
}

void threads_unpin_self(void) {
  pthread_mutex_lock(&pool.owner);
  learn();
  pthread_setaffinity_np(pthread_self(), sizeof pool.cpus, &pool.cpus);
  pthread_mutex_unlock(&pool.owner);
}

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;

static void scratch_release(void *block) {
  munmap(block, THREADS_SCRATCH);
  atomic_fetch_sub(&pool.n_scratch, 1);
}
static void scratch_make_key(void) { pthread_key_create(&scratch_key, scratch_release); }

void *threads_scratch(void) {
  if (scratch) return scratch;
  pthread_once(&scratch_once, scratch_make_key);
  void *block = mmap(NULL, THREADS_SCRATCH, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (block == MAP_FAILED) {
    fprintf(stderr, "rille: no address space for %d bytes of scratch\n", THREADS_SCRATCH);
    abort();
  }
  madvise(block, THREADS_SCRATCH, MADV_HUGEPAGE);
  pthread_setspecific(scratch_key, block);
  atomic_fetch_add(&pool.n_scratch, 1);
  return scratch = block;
}

size_t threads_scratch_bytes(void) {
  return (size_t)atomic_load(&pool.n_scratch) * (size_t)THREADS_SCRATCH;
}
