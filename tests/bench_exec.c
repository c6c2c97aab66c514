// bench_exec - the executor against the simulator: stages that sleep instead of computing, so that
// 8 ranks can be timed on few cores; and what an action costs where stages take no time.
//
//     mpirun -n 8 bench_exec [--ms 5] [--rounds 5] [--cold] [--json]
//
// For each schedule, p and m: the simulated makespan of the times that the stages are to take, with
// messages that take none, the best and the median measured one over it; and how far the actions of
// all ranks start from where a simulation has them, in the median: with the times that the stages
// are to take, and a hop that takes what one took before (measure_hop). Both are in seconds since
// the first start. All ranks are on one machine, so their clocks agree.
//
// In turn with each round a bare loop runs the same list over the same sleeps: memory that all
// ranks have mapped in place of messages, a futex a rank in place of everything else. It is what
// the machine allows, and is measured and simulated in the same way, with its own hop's time.
//
// The sleeps are the instrument's, so what they do wrong is kept out, with the bare loop too:
//  - A core without work halts, and takes longer to wake than one that computes. And some hosts of
//    virtual machines take pages away that lie still: then the first touch of one takes 150 us, and
//    a rank that has slept touches a hundred between two stages. So each rank has a thread that
//    touches its pages in turn in what time nobody else wants (SCHED_IDLE); none with --cold, and
//    under MPICH.
//  - A sleep ends late, by some 30 us, and by milliseconds where the host takes the core away. How
//    late each stage ended is taken off the next one where it made that start later: on its rank,
//    or, told along with the message (Parcel.note), on the rank that waited for it (late_start).
//    The time from the end of a stage to the start of the next is nowhere taken off.
// So it does not see what polls cost within a stage, which sleeps less for it, or is taken to have
// slept late; nor how long a rank that has slept waits for a core on which another's executor runs.
#include "core/poll.h"
#include "core/spans.h"
#include "ops/ops.h"
#include "parallel/exec.h"

#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <malloc.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MAX_ROUNDS = 64 };

typedef struct Options {
  double seconds; // of one F, I or W of a chunk
  int rounds;
  bool json, cold; // cold: without threads that keep the machine warm
} Options;

// ---- a warm machine

enum { MAX_PAGES = 1 << 14 };

// A thread that touches the pages of this process, in what time nobody else wants.
typedef struct Warmer {
  bool is_there, runs;
  pthread_mutex_t lock; // of the list; held by the main thread outside of what is timed
  int core, n;
  const volatile char *page[MAX_PAGES];
} Warmer;

static Warmer warmer = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void *keep_warm(void *nothing) {
  struct sched_param none = {0};
  cpu_set_t one;
  (void)nothing;
  CPU_ZERO(&one);
  CPU_SET(warmer.core, &one);
  if (sched_setaffinity(0, sizeof one, &one) != 0 || sched_setscheduler(0, SCHED_IDLE, &none) != 0)
    return NULL;
  for (;;) {
    pthread_mutex_lock(&warmer.lock);
    for (int i = 0; i < warmer.n; i++) (void)*warmer.page[i];
    pthread_mutex_unlock(&warmer.lock);
  }
}

static void warm_open(int rank) {
  cpu_set_t cores;
  pthread_t thread;
  if (sched_getaffinity(0, sizeof cores, &cores) != 0) return;
  for (int at = -1, left = rank % CPU_COUNT(&cores); left >= 0; left -= CPU_ISSET(at, &cores) != 0)
    warmer.core = ++at;
  pthread_mutex_lock(&warmer.lock);
  warmer.is_there = pthread_create(&thread, NULL, keep_warm, NULL) == 0;
  if (warmer.is_there) pthread_detach(thread);
}

// Lists the pages that are mapped, and lets the thread touch them.
static void warm_begin(void) {
  if (!warmer.is_there) return;
  FILE *maps = fopen("/proc/self/maps", "re");
  int entries = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  char line[512], may[8];
  warmer.n = 0;
  for (uintptr_t at, end; maps && fgets(line, sizeof line, maps);) {
    if (sscanf(line, "%lx-%lx %7s", &at, &end, may) != 3 || may[0] != 'r' || strstr(line, "[v") ||
        (strstr(line, " /dev/") && !strstr(line, " /dev/shm/")))
      continue;
    for (uint64_t entry; at < end && warmer.n < MAX_PAGES; at += 4096) {
      if (pread(entries, &entry, 8, (off_t)(at / 4096 * 8)) != 8) break;
      if (entry >> 63) warmer.page[warmer.n++] = (const volatile char *)at;
    }
  }
  if (maps) fclose(maps);
  if (entries >= 0) close(entries);
  warmer.runs = true;
  pthread_mutex_unlock(&warmer.lock);
}

static void warm_end(void) {
  if (warmer.runs) pthread_mutex_lock(&warmer.lock);
  warmer.runs = false;
}

// ---- stages that sleep

enum { SPIN_US = 40, NAP_US = 500 };

// Sleeps until `end`, and lets messages move on as kernels do between their blocks. A sleeper wakes
// late: the last part is spent awake. Returns how late it ends, in seconds.
static double sleep_until(double end) {
  double left;
  while ((left = end - clock_now()) > 0) {
    double nap = left - SPIN_US * 1e-6;
    if (nap > 0) poll_run();
    if (nap > NAP_US * 1e-6) nap = NAP_US * 1e-6;
    struct timespec t = {0, (long)(nap * 1e9)};
    if (nap > 0) nanosleep(&t, NULL);
  }
  return -left;
}

// How much earlier a stage would have started if no sleep had ended late: its rank by `own`, and
// what it takes in by `sent_late`, which was sent `ahead` seconds before the rank was ready (if
// less than 0, after).
static double late_start(double own, double sent_late, double ahead) {
  double late = ahead < 0 ? fmin(own - ahead, sent_late) : fmin(own, ahead + sent_late);
  return late > 0 ? late : 0;
}

typedef struct Stage {
  Ctx *ctx;
  double seconds;
  double late; // how late the last stage of this rank ended
  const Exec *exec;
  const Action *first; // of this rank's row
} Stage;

// Works from the start of the action on; what it takes in is in `port`, if n > 0.
static void work(Stage *stage, const Port *port, int n, double seconds) {
  double late = stage->late;
  const ExecSpan *span = &exec_spans(stage->exec)[exec_now(stage->exec) - stage->first];
  if (n > 0) {
    double ready = span->start - span->waited;
    late = late_start(late, port->parcel->note, ready - port->parcel->sent);
  }
  stage->late = sleep_until(span->start + seconds - late);
}

// What a stage gives is made within its time, like that of any other.
static Status make(Stage *stage, Parcel *parcel) {
  parcel->n = 1;
  parcel->wants_grad[0] = true;
  return tensor_scalar(stage->ctx, DT_F32, 1, &parcel->value[0]);
}

static Status forward(void *user, StageCall *call) {
  Stage *stage = user;
  if (call->n_out) TRY(make(stage, call->out[0].parcel));
  work(stage, call->in, call->n_in, stage->seconds);
  if (call->n_out) call->out[0].parcel->note = stage->late;
  return ST_OK;
}

static Status backward(void *user, StageCall *call) {
  Stage *stage = user;
  if (call->n_in) TRY(make(stage, call->in[0].parcel));
  work(stage, call->out, call->n_out, (call->kind == ACTION_I ? 1 : 2) * stage->seconds);
  if (call->n_in) call->in[0].parcel->note = stage->late;
  return ST_OK;
}

static Status wgrad(void *user, int stage, int mb) {
  Stage *s = user;
  (void)stage;
  (void)mb;
  work(s, NULL, 0, s->seconds);
  return ST_OK;
}

// ---- the bare loop

// What all ranks have mapped.
typedef struct BareRank {
  _Alignas(128) _Atomic uint32_t bell;
  _Atomic uint32_t is_asleep;
} BareRank;

typedef struct BareMessage {
  _Alignas(64) _Atomic uint32_t round; // in which it was sent last
  double sent, late;
} BareMessage;

typedef struct Bare {
  int stages, mbs, rank;
  const int *holder; // [stages] of the schedule at hand
  uint32_t round;
  size_t bytes;
  BareRank *ranks;
  BareMessage *messages;
} Bare;

static Status bare_open(Comm *comm, int stages, int mbs, Bare *out) {
  size_t head = (size_t)comm->size * sizeof(BareRank);
  *out = (Bare){.stages = stages, .mbs = mbs, .rank = comm->rank};
  out->bytes = head + (size_t)(2 * stages * stages * mbs) * sizeof(BareMessage);
  int file = comm->rank == 0 ? memfd_create("bench_exec", 0) : -1;
  int64_t number = file, works = comm->rank > 0 || (file >= 0 && !ftruncate(file, out->bytes));
  TRY(comm_broadcast(comm, 0, &number, sizeof number));
  if (comm->rank > 0) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", comm_place(comm, 0)->pid, (int)number);
    file = open(path, O_RDWR | O_CLOEXEC);
  }
  void *memory =
      file < 0 ? MAP_FAILED : mmap(NULL, out->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  works = works && memory != MAP_FAILED;
  TRY(comm_all_min(comm, &works));
  if (file >= 0) close(file);
  if (!works) return fail(ST_EIO, "no memory that all ranks see for the bare loop");
  out->ranks = memory;
  out->messages = (void *)((char *)memory + head);
  return ST_OK;
}

// The message that a SEND or RECV action speaks of.
static BareMessage *bare_message(const Bare *bare, Action action) {
  bool is_back = action.kind == ACTION_SEND_B || action.kind == ACTION_RECV_B;
  bool is_sent = action.kind == ACTION_SEND_F || action.kind == ACTION_SEND_B;
  int from = is_sent ? action.stage : action.peer, to = is_sent ? action.peer : action.stage;
  return &bare->messages[((is_back * bare->stages + from) * bare->stages + to) * bare->mbs +
                         action.mb];
}

static void bare_send(const Bare *bare, Action action, int to, double late) {
  BareMessage *message = bare_message(bare, action);
  BareRank *peer = &bare->ranks[to];
  message->sent = clock_now();
  message->late = late;
  atomic_store(&message->round, bare->round);
  atomic_fetch_add(&peer->bell, 1);
  if (atomic_load(&peer->is_asleep)) syscall(SYS_futex, &peer->bell, FUTEX_WAKE, 1, NULL, NULL, 0);
}

// Waits for a message, as comm_sleep does: what sleeps for long wakes slowly. Returns it.
static const BareMessage *bare_wait(const Bare *bare, Action action) {
  static const struct timespec limit = {0, 1000000};
  BareMessage *message = bare_message(bare, action);
  BareRank *me = &bare->ranks[bare->rank];
  for (;;) {
    uint32_t bell = atomic_load(&me->bell);
    if (atomic_load(&message->round) == bare->round) return message;
    atomic_store(&me->is_asleep, 1);
    syscall(SYS_futex, &me->bell, FUTEX_WAIT, bell, &limit, NULL, 0);
    atomic_store(&me->is_asleep, 0);
  }
}

// The RECV before action i of a row that brings what it takes; NULL: none does.
static const Action *bare_needs(const SchedRow *row, int i) {
  Action action = row->action[i];
  ActionKind want = action.kind == ACTION_F ? ACTION_RECV_F : ACTION_RECV_B;
  if (action.kind == ACTION_W) return NULL;
  for (int k = i - 1; k >= 0; k--)
    if (row->action[k].kind == want && row->action[k].stage == action.stage &&
        row->action[k].mb == action.mb)
      return &row->action[k];
  return NULL;
}

// Runs the row; span[row->count] of what computes.
static void bare_run(Bare *bare, const SchedRow *row, double seconds, ExecSpan *span) {
  double own = 0;
  bare->round++;
  for (int i = 0; i < row->count; i++) {
    Action action = row->action[i];
    if (action.kind == ACTION_SEND_F || action.kind == ACTION_SEND_B)
      bare_send(bare, action, bare->holder[action.peer], own);
    if (action_resource(action.kind) != USES_COMPUTE) continue;
    const Action *needs = bare_needs(row, i);
    double ready = clock_now(), late = own;
    if (needs) {
      const BareMessage *message = bare_wait(bare, *needs);
      late = late_start(own, message->late, ready - message->sent);
    }
    span[i].start = clock_now();
    double whole = action.kind == ACTION_B ? 2 * seconds : seconds;
    own = sleep_until(span[i].start + whole - late);
    span[i].end = clock_now();
  }
}

static int compare(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(double *values, int n) {
  qsort(values, (size_t)n, sizeof *values, compare);
  return n ? values[n / 2] : 0;
}

static double largest(Comm *comm, double value) {
  (void)comm_all_reduce(comm, &value, 1, DT_F64, REDUCE_MAX);
  return value;
}

// The median of what all ranks have; values[n], n may differ.
static Status median_of_all(Comm *comm, const double *values, int n, double *out) {
  int most = (int)largest(comm, n), have = 0;
  size_t bytes = (size_t)most * sizeof *values;
  double *mine = malloc(bytes), *all = malloc(bytes * (size_t)comm->size);
  Status status = mine && all ? ST_OK : fail(ST_ENOMEM, "out of memory for %d starts", most);
  if (status != ST_OK) goto done;
  for (int i = 0; i < most; i++) mine[i] = i < n ? values[i] : -1;
  TRY_TO(done, comm_all_gather(comm, mine, all, bytes));
  for (int i = 0; i < most * comm->size; i++)
    if (all[i] >= 0) all[have++] = all[i];
  *out = median(all, have);
done:
  free(mine);
  free(all);
  return status;
}

// ---- one case

enum { EXEC, BARE, RUNNERS };

typedef struct Case {
  const SchedType *type;
  int p, m;
  double seconds, hop[RUNNERS];
} Case;

typedef struct Result {
  double predicted, measured[RUNNERS]; // seconds
  double start_error[RUNNERS];         // seconds, the median of all ranks' actions
  int actions;                         // on this rank
} Result;

// Compares starts with the simulation of the same list, both from the first start on any rank.
static Status measure(Comm *comm, const ExecSpan *span, const SchedRow *row, const SchedSim *sim,
                      int runner, Result *out) {
  const SchedSpan *plan = sim->span + sim->first[comm->rank];
  double *errors = calloc((size_t)row->count + 1, sizeof *errors);
  if (!errors) return fail(ST_ENOMEM, "out of memory for %d starts", row->count);
  double first = 0, last = 0;
  int n = 0;
  for (int i = 0; i < row->count; i++) {
    if (action_resource(row->action[i].kind) != USES_COMPUTE) continue;
    if (n++ == 0) first = span[i].start;
    last = span[i].end;
  }
  double begin = -largest(comm, -first), end = largest(comm, last);
  out->measured[runner] = end - begin;
  out->actions = n;
  n = 0;
  for (int i = 0; i < row->count; i++)
    if (action_resource(row->action[i].kind) == USES_COMPUTE)
      errors[n++] = fabs(span[i].start - begin - plan[i].start);
  Status status = median_of_all(comm, errors, n, &out->start_error[runner]);
  free(errors);
  return status;
}

// A case's lists and what runs them.
typedef struct Bench {
  SchedArena arena;
  Sched *lowered;
  SchedReport *report;
  SchedSim *ideal, *sim[RUNNERS]; // without a message's time, and with it
  Stage stage;
  Exec *exec;
  ExecSpan *span; // of the bare loop
} Bench;

static void bench_close(Bench *bench) {
  exec_free(bench->exec);
  free(bench->span);
  sched_heap_close(&bench->arena);
}

static Status bench_open(Bench *bench, Ctx *ctx, Comm *comm, const Case *c) {
  Sched *sched;
  SchedCase sizes = {.ranks = c->p, .mbs = c->m};
  TRY(sched_generate(&bench->arena, &sched, c->type, &sizes));
  double whole = c->seconds * sched->chunks;
  SchedCosts costs = sched_costs(whole, whole, whole);
  TRY(sched_lower(&bench->arena, &bench->lowered, sched, &costs));
  TRY(sched_check(&bench->arena, &bench->report, bench->lowered));
  TRY(sched_simulate(&bench->arena, &bench->ideal, bench->lowered, &costs));
  for (int runner = 0; runner < RUNNERS; runner++) {
    costs.hop = c->hop[runner];
    TRY(sched_simulate(&bench->arena, &bench->sim[runner], bench->lowered, &costs));
  }
  const SchedRow *row = &bench->lowered->row[comm->rank];
  bench->span = calloc((size_t)row->count + 1, sizeof *bench->span);
  if (!bench->span) return fail(ST_ENOMEM, "out of memory for %d spans", row->count);
  ExecOptions options = {.ctx = ctx,
                         .comm = comm,
                         .sched = bench->lowered,
                         .report = bench->report,
                         .ops = {forward, backward, wgrad, NULL, NULL, NULL},
                         .user = &bench->stage};
  TRY(exec_new(&options, &bench->exec));
  bench->stage = (Stage){ctx, c->seconds, 0, bench->exec, row->action};
  return ST_OK;
}

// bare: NULL where only the time of an action is asked for, on the machine as it is.
static Status run_case(Ctx *ctx, Comm *comm, const Case *c, Bare *bare, int rounds, Result *out) {
  Bench bench = {0};
  Status status;
  sched_heap_open(&bench.arena);
  TRY_TO(done, bench_open(&bench, ctx, comm, c));
  const SchedRow *row = &bench.lowered->row[comm->rank];
  for (int round = 0; round < rounds; round++) {
    out[round].predicted = bench.ideal->makespan;
    bench.stage.late = 0;
    if (bare) warm_begin();
    TRY_TO(done, comm_barrier(comm));
    TRY_TO(done, exec_run(bench.exec));
    if (bare) warm_end();
    const ExecSpan *span = exec_spans(bench.exec);
    TRY_TO(done, measure(comm, span, row, bench.sim[EXEC], EXEC, &out[round]));
    if (!bare) continue;
    bare->holder = bench.lowered->holder;
    warm_begin();
    TRY_TO(done, comm_barrier(comm));
    bare_run(bare, row, c->seconds, bench.span);
    warm_end();
    TRY_TO(done, measure(comm, bench.span, row, bench.sim[BARE], BARE, &out[round]));
  }
done:
  warm_end();
  bench_close(&bench);
  return status;
}

static void print_case(const Comm *comm, const Case *c, const Options *o, const Result *result) {
  double ratio[RUNNERS][MAX_ROUNDS], error[RUNNERS][MAX_ROUNDS], middle[RUNNERS], off[RUNNERS];
  if (comm->rank > 0) return;
  for (int k = 0; k < RUNNERS; k++) {
    for (int round = 0; round < o->rounds; round++) {
      ratio[k][round] = result[round].measured[k] / result[round].predicted;
      error[k][round] = result[round].start_error[k];
    }
    middle[k] = median(ratio[k], o->rounds);
    off[k] = median(error[k], o->rounds);
  }
  printf(o->json
             ? "{\"schedule\":\"%s\",\"p\":%d,\"m\":%d,\"predicted_ms\":%.3f,\"best\":%.4f,"
               "\"median\":%.4f,\"start_error_best_ms\":%.3f,\"start_error_ms\":%.3f,"
               "\"bare_best\":%.4f,\"bare_median\":%.4f,\"bare_start_error_best_ms\":%.3f,"
               "\"bare_start_error_ms\":%.3f}\n"
             : "%-12s p %d  m %2d  %7.1f ms predicted   x %.4f best  %.4f median  starts off by "
               "%.2f ms best  %.2f median   bare: x %.4f  %.4f  %.2f ms  %.2f\n",
         c->type->name, c->p, c->m, result[0].predicted * 1e3, ratio[EXEC][0], middle[EXEC],
         error[EXEC][0] * 1e3, off[EXEC] * 1e3, ratio[BARE][0], middle[BARE], error[BARE][0] * 1e3,
         off[BARE] * 1e3);
  fflush(stdout);
}

// ---- what a message and an action cost

enum { HOP_ROUNDS = 9 };

// Seconds from the end of a stage to the start of the next one on another rank, where that waits:
// of one microbatch that goes through all stages and back, the median of some rounds.
static Status measure_hop(Ctx *ctx, Comm *comm, Bare *bare, double seconds, double *hop) {
  Case c = {sched_find("1f1b"), comm->size, 1, seconds, {0, 0}};
  Result result[HOP_ROUNDS];
  double each[HOP_ROUNDS];
  TRY(run_case(ctx, comm, &c, bare, HOP_ROUNDS, result));
  for (int k = 0; k < RUNNERS; k++) {
    for (int i = 0; i < HOP_ROUNDS; i++)
      each[i] = (result[i].measured[k] - result[i].predicted) / (2 * comm->size - 2);
    hop[k] = median(each, HOP_ROUNDS);
  }
  return ST_OK;
}

static Status print_overhead(Ctx *ctx, Comm *comm, const Options *o) {
  Case c = {sched_find("1f1b"), comm->size, 64, 0, {0, 0}};
  Result result[MAX_ROUNDS];
  TRY(run_case(ctx, comm, &c, NULL, o->rounds, result));
  double each[MAX_ROUNDS];
  for (int round = 0; round < o->rounds; round++)
    each[round] = result[round].measured[EXEC] / result[round].actions * 1e6;
  if (comm->rank == 0)
    printf(o->json ? "{\"overhead_us\":%.2f,\"p\":%d}\n"
                   : "an action that takes no time costs %.2f us on %d rank(s)\n",
           median(each, o->rounds), comm->size);
  return ST_OK;
}

static Status run_group(Ctx *ctx, Comm *group, const Options *o) {
  static const char *const names[] = {"1f1b", "interleaved", "zb-h1", "zbv"};
  static const int ms[] = {16, 32};
  Case c = {.p = group->size, .seconds = o->seconds};
  Bare bare;
  TRY(print_overhead(ctx, group, o));
  if (group->size <= 2 || o->seconds <= 0) return ST_OK;
  TRY(bare_open(group, 2 * group->size, ms[1], &bare));
  TRY(measure_hop(ctx, group, &bare, o->seconds, c.hop));
  if (group->rank == 0)
    printf(o->json ? "{\"p\":%d,\"hop_us\":%.1f,\"bare_hop_us\":%.1f}\n"
                   : "%d ranks: a message takes %.0f us, in the bare loop %.0f us\n",
           group->size, c.hop[EXEC] * 1e6, c.hop[BARE] * 1e6);
  for (int k = 0; k < 4; k++) {
    for (int i = 0; i < 2; i++) {
      Result result[MAX_ROUNDS];
      c.type = sched_find(names[k]);
      c.m = ms[i];
      TRY(run_case(ctx, group, &c, &bare, o->rounds, result));
      print_case(group, &c, o, result);
    }
  }
  munmap(bare.ranks, bare.bytes);
  return ST_OK;
}

static Status run_all(Ctx *ctx, Comm *world, const Options *o) {
  for (int p = 1; p <= world->size; p *= 2) {
    Comm *group;
    TRY(comm_split(world, world->rank < p ? 0 : -1, world->rank, &group));
    if (group) TRY(run_group(ctx, group, o));
    if (group) comm_free(group);
    TRY(comm_barrier(world));
  }
  return ST_OK;
}

static bool parse(int argc, char **argv, Options *o) {
  for (int i = 1; i < argc; i++) {
    if (strcmp(argv[i], "--json") == 0)
      o->json = true;
    else if (strcmp(argv[i], "--cold") == 0)
      o->cold = true;
    else if (strcmp(argv[i], "--ms") == 0 && i + 1 < argc)
      o->seconds = atof(argv[++i]) * 1e-3;
    else if (strcmp(argv[i], "--rounds") == 0 && i + 1 < argc)
      o->rounds = atoi(argv[++i]);
    else
      return false;
  }
  return o->rounds >= 1 && o->rounds <= MAX_ROUNDS && o->seconds >= 0;
}

// MPICH yields its core at every look, and would give it to the threads that keep it warm.
static bool may_warm(const Options *o) {
  Launch launch;
  launch_read(&launch);
  return !o->cold && (!launch.plugin || strcmp(launch.plugin, "openmpi") == 0);
}

int main(int argc, char **argv) {
  Options o = {.seconds = 5e-3, .rounds = 5};
  Ctx *ctx = NULL;
  Comm *world = NULL;
  if (!parse(argc, argv, &o)) {
    fprintf(stderr, "usage: bench_exec [--ms MS] [--rounds N] [--cold] [--json]\n");
    return 2;
  }
  mallopt(M_TRIM_THRESHOLD, INT_MAX); // no page goes while the warmer touches it
  mallopt(M_MMAP_THRESHOLD, INT_MAX);
  prctl(PR_SET_TIMERSLACK, 1);
  Status status = comm_world(&world);
  if (status == ST_OK && may_warm(&o)) warm_open(world->rank);
  if (status == ST_OK) status = ctx_new(0, &ctx);
  if (status == ST_OK) status = ops_init(ctx);
  if (status == ST_OK) status = run_all(ctx, world, &o);
  if (status != ST_OK) fprintf(stderr, "bench_exec: %s\n", status_message());
  if (status != ST_OK && world) comm_fatal(world, 1);
  comm_world_close(world);
  ctx_delete(ctx);
  return status != ST_OK;
}
