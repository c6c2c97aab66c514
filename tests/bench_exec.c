// bench_exec - the executor against the simulator: stages that sleep instead of computing, so that
// 8 ranks can be timed on few cores; and what an action costs where stages take no time.
//
//     mpirun -n 8 bench_exec [--ms 5] [--rounds 5] [--json]
//
// For each schedule, p and m: the simulated makespan of the times that the stages are to take, with
// messages that take none, the best and the median measured one over it; and how far the actions of
// all ranks start from where a simulation has them, in the median: with the times that the stages
// are to take, and messages that take what one took in a measurement before. Both are in seconds
// since the first start. Beside it, for each p, how late as many ranks are that only sleep and send
// nothing: what the machine adds of its own. All ranks are on one machine, so their clocks agree.
#include "core/poll.h"
#include "core/spans.h"
#include "ops/ops.h"
#include "parallel/exec.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

enum { MAX_ROUNDS = 64 };

typedef struct Options {
  double seconds; // of one F, I or W of a chunk
  int rounds;
  bool json;
} Options;

typedef struct Stage {
  Ctx *ctx;
  double seconds;
} Stage;

enum { SPIN_US = 100, NAP_US = 500 };

// Sleeps, and lets messages move on as kernels do between their blocks. A sleeper wakes late: the
// last part is spent awake, so that a stage takes the time that it is to take.
static void work(double seconds) {
  double end = clock_now() + seconds;
  for (double left; (left = end - clock_now()) > 0;) {
    double nap = left - SPIN_US * 1e-6;
    if (nap > 0) poll_run();
    if (nap > NAP_US * 1e-6) nap = NAP_US * 1e-6;
    struct timespec t = {0, (long)(nap * 1e9)};
    if (nap > 0) nanosleep(&t, NULL);
  }
}

static Status put(Stage *stage, Port *port) {
  port->parcel->n = 1;
  port->parcel->wants_grad[0] = true;
  return tensor_scalar(stage->ctx, DT_F32, 1, &port->parcel->value[0]);
}

static Status forward(void *user, StageCall *call) {
  Stage *stage = user;
  work(stage->seconds);
  return call->n_out ? put(stage, &call->out[0]) : ST_OK;
}

static Status backward(void *user, StageCall *call) {
  Stage *stage = user;
  work(call->kind == ACTION_I ? stage->seconds : 2 * stage->seconds);
  return call->n_in ? put(stage, &call->in[0]) : ST_OK;
}

static Status wgrad(void *user, int stage, int mb) {
  (void)stage;
  (void)mb;
  work(((Stage *)user)->seconds);
  return ST_OK;
}

static int compare(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(double *values, int n) {
  qsort(values, (size_t)n, sizeof *values, compare);
  return n ? values[n / 2] : 0;
}

// ---- the machine

enum { HOPS = 40, STAGES_ALONE = 100 };

// Seconds from a send to the end of the wait of a rank that has waited for a stage's time, where
// half of the ranks send at once; the mean of the ranks' medians.
static Status measure_hop(Comm *comm, double seconds, double *out) {
  double taken[HOPS];
  int n = 0, me = comm->rank;
  for (int i = 0; i < HOPS; i++) {
    double sent = 0;
    CommRequest *request;
    TRY(comm_barrier(comm));
    if (me % 2 == i % 2 && me + 1 < comm->size) {
      work(seconds);
      sent = clock_now();
      TRY(comm_send(comm, me + 1, CHANNEL_PAYLOAD, &sent, sizeof sent, NULL, &request));
      TRY(comm_wait(comm, request));
    } else if (me % 2 != i % 2 && me > 0) {
      TRY(comm_recv(comm, me - 1, CHANNEL_PAYLOAD, &sent, sizeof sent, NULL, &request));
      TRY(comm_wait(comm, request));
      taken[n++] = clock_now() - sent;
    }
  }
  double sums[2] = {median(taken, n), n > 0};
  TRY(comm_all_reduce(comm, sums, 2, DT_F64, REDUCE_SUM));
  *out = sums[0] / sums[1];
  return ST_OK;
}

// How late ranks are after STAGES_ALONE stages without messages: seconds, in the mean and at most.
static Status measure_alone(Comm *comm, double seconds, double *mean, double *most) {
  TRY(comm_barrier(comm));
  double start = clock_now();
  for (int i = 0; i < STAGES_ALONE; i++) work(seconds);
  *mean = *most = clock_now() - start - STAGES_ALONE * seconds;
  TRY(comm_all_reduce(comm, mean, 1, DT_F64, REDUCE_SUM));
  TRY(comm_all_reduce(comm, most, 1, DT_F64, REDUCE_MAX));
  *mean /= comm->size;
  return ST_OK;
}

// ---- one case

typedef struct Case {
  const SchedType *type;
  int p, m;
  double seconds, hop;
} Case;

typedef struct Result {
  double predicted, measured; // seconds
  double start_error;         // seconds, the median of all ranks' actions
  int actions;                // on this rank
} Result;

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

// Compares starts with the simulation of the same list, both from the first start on any rank.
static Status measure(Comm *comm, const Exec *exec, const Sched *lowered, const SchedSim *sim,
                      double predicted, Result *out) {
  const SchedRow *row = &lowered->row[comm->rank];
  const ExecSpan *span = exec_spans(exec);
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
  *out = (Result){.predicted = predicted, .measured = end - begin, .actions = n};
  n = 0;
  for (int i = 0; i < row->count; i++)
    if (action_resource(row->action[i].kind) == USES_COMPUTE)
      errors[n++] = fabs(span[i].start - begin - plan[i].start);
  Status status = median_of_all(comm, errors, n, &out->start_error);
  free(errors);
  return status;
}

static Status run_case(Ctx *ctx, Comm *comm, const Case *c, int rounds, Result *out) {
  SchedArena arena;
  Sched *sched, *lowered;
  SchedReport *report;
  SchedSim *sim;
  Exec *exec = NULL;
  Status status;
  Stage stage = {ctx, c->seconds};
  sched_heap_open(&arena);
  SchedCase sizes = {.ranks = c->p, .mbs = c->m};
  TRY_TO(done, sched_generate(&arena, &sched, c->type, &sizes));
  double whole = c->seconds * sched->chunks;
  SchedCosts costs = sched_costs(whole, whole, whole);
  TRY_TO(done, sched_lower(&arena, &lowered, sched, &costs));
  TRY_TO(done, sched_check(&arena, &report, lowered));
  TRY_TO(done, sched_simulate(&arena, &sim, lowered, &costs));
  double predicted = sim->makespan;
  costs.hop = c->hop;
  TRY_TO(done, sched_simulate(&arena, &sim, lowered, &costs));
  ExecOptions options = {.ctx = ctx,
                         .comm = comm,
                         .sched = lowered,
                         .report = report,
                         .ops = {forward, backward, wgrad, NULL, NULL, NULL},
                         .user = &stage};
  TRY_TO(done, exec_new(&options, &exec));
  for (int round = 0; round < rounds; round++) {
    TRY_TO(done, comm_barrier(comm));
    TRY_TO(done, exec_run(exec));
    TRY_TO(done, measure(comm, exec, lowered, sim, predicted, &out[round]));
  }
done:
  exec_free(exec);
  sched_heap_close(&arena);
  return status;
}

static void print_case(const Comm *comm, const Case *c, const Options *o, const Result *result) {
  double ratio[MAX_ROUNDS], error[MAX_ROUNDS];
  if (comm->rank > 0) return;
  for (int round = 0; round < o->rounds; round++) {
    ratio[round] = result[round].measured / result[round].predicted;
    error[round] = result[round].start_error;
  }
  double middle = median(ratio, o->rounds), off = median(error, o->rounds);
  printf(o->json ? "{\"schedule\":\"%s\",\"p\":%d,\"m\":%d,\"predicted_ms\":%.3f,\"best\":%.4f,"
                   "\"median\":%.4f,\"start_error_best_ms\":%.3f,\"start_error_ms\":%.3f}\n"
                 : "%-12s p %d  m %2d  %7.1f ms predicted   x %.4f best  x %.4f median   starts "
                   "off by %.2f ms best  %.2f ms median\n",
         c->type->name, c->p, c->m, result[0].predicted * 1e3, ratio[0], middle, error[0] * 1e3,
         off * 1e3);
  fflush(stdout);
}

// ---- what an action costs

static Status print_overhead(Ctx *ctx, Comm *comm, const Options *o) {
  Case c = {sched_find("1f1b"), comm->size, 64, 0, 0};
  Result result[MAX_ROUNDS];
  TRY(run_case(ctx, comm, &c, o->rounds, result));
  double each[MAX_ROUNDS];
  for (int round = 0; round < o->rounds; round++)
    each[round] = result[round].measured / result[round].actions * 1e6;
  if (comm->rank == 0)
    printf(o->json ? "{\"overhead_us\":%.2f,\"p\":%d}\n"
                   : "an action that takes no time costs %.2f us on %d rank(s)\n",
           median(each, o->rounds), comm->size);
  return ST_OK;
}

static Status run_group(Ctx *ctx, Comm *group, const Options *o) {
  static const char *const names[] = {"1f1b", "interleaved", "zb-h1", "zbv"};
  static const int ms[] = {16, 32};
  double hop = 0, mean, most;
  if (group->size <= 2) return print_overhead(ctx, group, o);
  TRY(measure_hop(group, o->seconds, &hop));
  TRY(measure_alone(group, o->seconds, &mean, &most));
  if (group->rank == 0)
    printf(o->json
               ? "{\"p\":%d,\"hop_us\":%.1f,\"alone_mean_ms\":%.3f,\"alone_most_ms\":%.3f,"
                 "\"stages\":%d}\n"
               : "%d ranks: a message takes %.0f us; without messages they are %.2f ms late (at "
                 "most %.2f) after %d stages\n",
           group->size, hop * 1e6, mean * 1e3, most * 1e3, STAGES_ALONE);
  for (int k = 0; k < 4; k++) {
    for (int i = 0; i < 2; i++) {
      Case c = {sched_find(names[k]), group->size, ms[i], o->seconds, hop};
      Result result[MAX_ROUNDS];
      TRY(run_case(ctx, group, &c, o->rounds, result));
      print_case(group, &c, o, result);
    }
  }
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
    else if (strcmp(argv[i], "--ms") == 0 && i + 1 < argc)
      o->seconds = atof(argv[++i]) * 1e-3;
    else if (strcmp(argv[i], "--rounds") == 0 && i + 1 < argc)
      o->rounds = atoi(argv[++i]);
    else
      return false;
  }
  return o->rounds >= 1 && o->rounds <= MAX_ROUNDS && o->seconds >= 0;
}

int main(int argc, char **argv) {
  Options o = {.seconds = 5e-3, .rounds = 5};
  Ctx *ctx = NULL;
  Comm *world = NULL;
  if (!parse(argc, argv, &o)) {
    fprintf(stderr, "usage: bench_exec [--ms MS] [--rounds N] [--json]\n");
    return 2;
  }
  prctl(PR_SET_TIMERSLACK, 1);
  Status status = comm_world(&world);
  if (status == ST_OK) status = ctx_new(0, &ctx);
  if (status == ST_OK) status = ops_init(ctx);
  if (status == ST_OK) status = run_all(ctx, world, &o);
  if (status != ST_OK) fprintf(stderr, "bench_exec: %s\n", status_message());
  if (status != ST_OK && world) comm_fatal(world, 1);
  comm_world_close(world);
  ctx_delete(ctx);
  return status != ST_OK;
}
