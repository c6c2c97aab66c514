// exec - see exec.h.
#include "parallel/exec.h"

#include "core/poll.h"
#include "core/spans.h"
#include "parallel/sched_inner.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// The edges of one stage of this rank, as ports without parcels.
typedef struct StagePorts {
  Port *in, *out;
  int n_in, n_out;
} StagePorts;

// What comes from one rank in a run: its RECV actions in order, and where their parcels go.
typedef struct Expected {
  Action *action;
  Parcel ***where;
  int n, room;
} Expected;

struct Exec {
  Ctx *ctx;
  Comm *comm;
  const Sched *sched;
  const SchedRow *row; // of this rank
  StageOps ops;
  void *user;
  Channel **channel;  // [ranks]; NULL: nothing goes there or comes from there
  Expected *expected; // [ranks]
  StagePorts *ports;  // [stages] of this rank's
  Parcel **box;       // [messages] what has arrived and not been consumed, or waits to be sent
  ExecSpan *span;     // [row->count]
  SchedName *name;    // [row->count] for those who ask what a rank is doing
  const Action *now;
  bool has_failed; // a run ended with an error
  bool is_running;
};

// ---- messages and where they are kept

// The box of a message on an edge: forward from `from` to `to`, or the gradient back.
static Parcel **box_of(Exec *exec, int from, int to, int mb, bool is_grad) {
  Action send =
      is_grad ? (Action){ACTION_SEND_B, to, mb, from} : (Action){ACTION_SEND_F, from, mb, to};
  int64_t number = sched_message(exec->sched, send);
  assert(number >= 0);
  return &exec->box[number];
}

// The box that a SEND or RECV action speaks of.
static Parcel **box_of_action(Exec *exec, Action action) {
  int64_t number = sched_message(exec->sched, action);
  assert(number >= 0);
  return &exec->box[number];
}

static bool is_recv(Action action) {
  return action.kind == ACTION_RECV_F || action.kind == ACTION_RECV_B;
}

static Channel *channel_of(Exec *exec, int stage) {
  return exec->channel[exec->sched->holder[stage]];
}

static Status progress(Exec *exec) {
  for (int rank = 0; rank < exec->comm->size; rank++) {
    if (!exec->channel[rank]) continue;
    channel_progress(exec->channel[rank]);
    TRY(channel_check(exec->channel[rank]));
  }
  return ST_OK;
}

// From the poll hook: between kernels, where garbage must not be collected.
static void on_poll(void *user) {
  Exec *exec = user;
  bool held = pool_hold_pressure(exec->ctx->pool, true);
  for (int rank = 0; rank < exec->comm->size; rank++)
    if (exec->channel[rank]) channel_progress(exec->channel[rank]);
  pool_hold_pressure(exec->ctx->pool, held);
}

// Waits until a box is full.
static Status wait_for(Exec *exec, Parcel **box, int from, ExecSpan *span) {
  if (*box) return ST_OK;
  double since = clock_now();
  const char *name = exec->name[exec->now - exec->row->action].text;
  while (!*box) {
    TRY(progress(exec));
    if (*box) break;
    TRY(comm_waiting(exec->comm, exec->sched->holder[from], name, since));
  }
  span->waited += clock_now() - since;
  span->from = from;
  span->sent = (*box)->sent;
  span->arrived = (*box)->arrived;
  return ST_OK;
}

// Takes a parcel out of its box: from here on it is an activation like any other.
static Status take(Exec *exec, int from, int to, int mb, bool is_grad, ExecSpan *span,
                   Parcel **out) {
  Parcel **box = box_of(exec, from, to, mb, is_grad);
  int sender = is_grad ? to : from, receiver = is_grad ? from : to;
  TRY(wait_for(exec, box, sender, span));
  Parcel *parcel = *box;
  *box = NULL;
  *out = parcel;
  if (exec->sched->holder[sender] == exec->sched->holder[receiver]) return ST_OK;
  for (int i = 0; i < parcel->n; i++) {
    Storage *storage = parcel->value[i] ? parcel->value[i]->storage : NULL;
    if (!storage || storage->kind != MEM_COMMUNICATION) continue;
    pool_recount(exec->ctx->pool, storage->bytes, MEM_COMMUNICATION, MEM_ACTIVATIONS);
    storage->kind = MEM_ACTIVATIONS;
  }
  channel_consumed(channel_of(exec, sender));
  return ST_OK;
}

// ---- compute actions

static void drop_ports(Exec *exec, Port *port, int n) {
  for (int k = 0; k < n; k++) {
    parcel_delete(exec->ctx, port[k].parcel);
    port[k].parcel = NULL;
  }
}

// Moves what a stage gave into the boxes of its edges.
static void give(Exec *exec, int stage, int mb, Port *port, int n, bool is_grad) {
  for (int k = 0; k < n; k++) {
    if (!port[k].parcel) continue;
    int from = is_grad ? port[k].stage : stage, to = is_grad ? stage : port[k].stage;
    Parcel **box = box_of(exec, from, to, mb, is_grad);
    assert(!*box);
    port[k].parcel->sent = port[k].parcel->arrived = comm_clock();
    *box = port[k].parcel;
    port[k].parcel = NULL;
  }
}

static Status fresh_parcels(Port *port, int n, bool only_grad) {
  for (int k = 0; k < n; k++)
    if (port[k].has_grad || !only_grad) TRY(parcel_new(&port[k].parcel));
  return ST_OK;
}

// A rank that is to seem slow (RILLE_FAKE_SLOW) takes its time; messages move on meanwhile.
static void slow_down(ExecSpan *span) {
  double factor = comm_fake_slow();
  if (factor <= 1) return;
  double end = span->start + factor * (span->end - span->start);
  while (comm_clock() < end) {
    struct timespec nap = {0, 100000};
    nanosleep(&nap, NULL);
    poll_run();
  }
  span->end = comm_clock();
}

static Status run_stage(Exec *exec, Action action, ExecSpan *span) {
  const StagePorts *ports = &exec->ports[action.stage];
  StageCall call = {action.kind,  action.stage, action.mb, ports->n_in,
                    ports->n_out, ports->in,    ports->out};
  bool is_f = action.kind == ACTION_F;
  Status status = ST_OK;
  Port *taken = is_f ? call.in : call.out, *given = is_f ? call.out : call.in;
  int n_taken = is_f ? call.n_in : call.n_out, n_given = is_f ? call.n_out : call.n_in;
  for (int k = 0; k < n_taken; k++) {
    if (!is_f && !taken[k].has_grad) continue;
    int from = is_f ? taken[k].stage : action.stage, to = is_f ? action.stage : taken[k].stage;
    TRY_TO(done, take(exec, from, to, action.mb, !is_f, span, &taken[k].parcel));
  }
  TRY_TO(done, fresh_parcels(given, n_given, !is_f));
  span->start = comm_clock();
  status = is_f ? exec->ops.forward(exec->user, &call) : exec->ops.backward(exec->user, &call);
  span->end = comm_clock();
  if (status == ST_OK) slow_down(span);
  if (status == ST_OK) give(exec, action.stage, action.mb, given, n_given, !is_f);
done:
  drop_ports(exec, call.in, call.n_in);
  drop_ports(exec, call.out, call.n_out);
  return status;
}

static Status run_wgrad(Exec *exec, Action action, ExecSpan *span) {
  span->start = comm_clock();
  TRY(exec->ops.wgrad(exec->user, action.stage, action.mb));
  span->end = comm_clock();
  slow_down(span);
  return ST_OK;
}

static Status send(Exec *exec, Action action) {
  Parcel **box = box_of_action(exec, action), *parcel = *box;
  assert(parcel);
  *box = NULL;
  return channel_send(channel_of(exec, action.peer), action, parcel);
}

static Status run_action(Exec *exec, Action action, ExecSpan *span) {
  const StageOps *ops = &exec->ops;
  switch (action.kind) {
  case ACTION_F:
  case ACTION_I:
  case ACTION_B: return run_stage(exec, action, span);
  case ACTION_W: return run_wgrad(exec, action, span);
  case ACTION_SEND_F:
  case ACTION_SEND_B: return send(exec, action);
  case ACTION_REDUCE_GRAD:
    return ops->reduce_grad ? ops->reduce_grad(exec->user, action.stage) : ST_OK;
  case ACTION_REDUCE_TIED:
    return ops->reduce_tied ? ops->reduce_tied(exec->user, action.mb, action.stage) : ST_OK;
  case ACTION_STEP: return ops->step ? ops->step(exec->user, action.stage) : ST_OK;
  case ACTION_RECV_F:
  case ACTION_RECV_B:
  case ACTION_OVERLAP_F_B: return ST_OK;
  case ACTION_KINDS: break;
  }
  assert(action.kind < ACTION_KINDS);
  return ST_OK;
}

// ---- a run

// The actions that take part: all, or forward passes of the first microbatches.
static bool takes_part(Action action, int forward_mbs) {
  if (forward_mbs == 0) return true;
  bool is_forward =
      action.kind == ACTION_F || action.kind == ACTION_SEND_F || action.kind == ACTION_RECV_F;
  return is_forward && action.mb < forward_mbs;
}

// What will come from each rank, in order.
static Status expect(Exec *exec, int forward_mbs) {
  for (int rank = 0; rank < exec->comm->size; rank++) exec->expected[rank].n = 0;
  for (int i = 0; i < exec->row->count; i++) {
    Action action = exec->row->action[i];
    if (!is_recv(action) || !takes_part(action, forward_mbs)) continue;
    Expected *e = &exec->expected[exec->sched->holder[action.peer]];
    assert(e->n < e->room);
    e->action[e->n] = action;
    e->where[e->n++] = box_of_action(exec, action);
  }
  for (int rank = 0; rank < exec->comm->size; rank++) {
    const Expected *e = &exec->expected[rank];
    if (exec->channel[rank])
      TRY(channel_expect(exec->channel[rank], e->action, (Parcel * *const *)e->where, e->n));
  }
  return ST_OK;
}

// All that was sent is out (inv. 3).
static Status finish(Exec *exec) {
  double since = clock_now();
  for (;;) {
    int busy = -1;
    TRY(progress(exec));
    for (int rank = 0; rank < exec->comm->size; rank++)
      if (exec->channel[rank] && !channel_idle(exec->channel[rank])) busy = rank;
    if (busy < 0) return ST_OK;
    TRY(comm_waiting(exec->comm, busy, "the last messages of a step", since));
  }
}

static Status run(Exec *exec, int forward_mbs) {
  memset(exec->span, 0, (size_t)exec->row->count * sizeof *exec->span);
  TRY(expect(exec, forward_mbs));
  for (int i = 0; i < exec->row->count; i++) {
    Action action = exec->row->action[i];
    ExecSpan *span = &exec->span[i];
    if (!takes_part(action, forward_mbs)) continue;
    span->from = -1;
    if (is_recv(action)) { // nothing to do: it is there when its consumer has it
      span->start = span->end = comm_clock();
      continue;
    }
    exec->now = &exec->row->action[i];
    comm_doing(exec->name[i].text);
    double start = comm_clock();
    TRY(run_action(exec, action, span));
    if (span->end <= 0) {
      span->start = start;
      span->end = comm_clock();
    }
  }
  exec->now = NULL;
  comm_doing("the script");
  return finish(exec);
}

// After an error one rank alone can begin anew; several no longer agree on what has been sent.
static Status recover(Exec *exec) {
  if (!exec->has_failed) return ST_OK;
  if (exec->comm->size > 1)
    return fail_hint(fail(ST_ESTATE, "an earlier step of this pipeline has failed on this rank"),
                     "other ranks wait in that step: end the run, do not catch its errors");
  for (int64_t k = 0; k < sched_messages(exec->sched); k++) {
    parcel_delete(exec->ctx, exec->box[k]);
    exec->box[k] = NULL;
  }
  exec->has_failed = false;
  return ST_OK;
}

static Status run_polled(Exec *exec, int forward_mbs) {
  if (exec->is_running)
    return fail_hint(fail(ST_ESTATE, "a pass of this pipeline is running"),
                     "step, evaluate and predict cannot be called from within a unit");
  TRY(recover(exec));
  exec->is_running = true;
  exec->comm->on_poll = on_poll;
  exec->comm->poll_user = exec;
  Status status = run(exec, forward_mbs);
  exec->comm->on_poll = NULL;
  exec->is_running = false;
  exec->has_failed = status != ST_OK;
  return status;
}

Status exec_run(Exec *exec) { return run_polled(exec, 0); }

Status exec_forward(Exec *exec, int mbs) {
  if (mbs < 1 || mbs > exec->sched->mbs)
    return fail(ST_EVALUE, "forward of %d microbatches: the schedule has 1 to %d", mbs,
                exec->sched->mbs);
  return run_polled(exec, mbs);
}

const ExecSpan *exec_spans(const Exec *exec) { return exec->span; }
const Action *exec_now(const Exec *exec) { return exec->now; }

// ---- beginning and end

static Status make_ports(Exec *exec, int stage) {
  const Sched *sched = exec->sched;
  StagePorts *ports = &exec->ports[stage];
  for (int is_into = 0; is_into < 2; is_into++) {
    int n = 0, *count = is_into ? &ports->n_in : &ports->n_out;
    for (SchedEdgeWalk walk = {.sched = sched, .stage = stage, .is_into = is_into};
         sched_next_edge(&walk);)
      n++;
    Port *port = calloc((size_t)n + 1, sizeof *port);
    if (!port) return fail(ST_ENOMEM, "out of memory for the edges of a stage");
    *(is_into ? &ports->in : &ports->out) = port;
    for (SchedEdgeWalk walk = {.sched = sched, .stage = stage, .is_into = is_into};
         sched_next_edge(&walk);)
      port[(*count)++] = (Port){walk.other, walk.has_grad, NULL};
  }
  return ST_OK;
}

// Room for what comes from each rank, and a channel to every rank that something goes to or comes
// from.
static Status open_channels(Exec *exec, const ExecOptions *options) {
  int ranks = exec->sched->ranks, me = exec->comm->rank;
  for (int rank = 0; rank < ranks; rank++) {
    int n_recv = 0, n_send = 0, depth = 1;
    for (int i = 0; i < exec->row->count; i++) {
      Action action = exec->row->action[i];
      if (action.peer < 0 || exec->sched->holder[action.peer] != rank) continue;
      *(is_recv(action) ? &n_recv : &n_send) += 1;
    }
    if (n_recv + n_send == 0) continue;
    for (int k = 0; k < options->report->depths; k++)
      if (options->report->depth[k].from == rank && options->report->depth[k].to == me)
        depth = options->report->depth[k].depth;
    Device *device = options->device ? options->device : &exec->ctx->cpu;
    TRY(channel_open(exec->ctx, exec->comm, rank, depth, device, &exec->channel[rank]));
    Expected *e = &exec->expected[rank];
    e->room = n_recv;
    e->action = calloc((size_t)n_recv + 1, sizeof *e->action);
    e->where = calloc((size_t)n_recv + 1, sizeof *e->where);
    if (!e->action || !e->where) return fail(ST_ENOMEM, "out of memory for %d messages", n_recv);
  }
  return ST_OK;
}

Status exec_new(const ExecOptions *options, Exec **out) {
  const Sched *sched = options->sched;
  if (!sched->lowered)
    return fail(ST_EVALUE, "schedule %s has no messages yet: lower it first", sched->name);
  if (sched->ranks != options->comm->size)
    return fail(ST_EVALUE, "schedule %s is for %d ranks, the group has %d", sched->name,
                sched->ranks, options->comm->size);
  Exec *exec = calloc(1, sizeof *exec);
  if (!exec) return fail(ST_ENOMEM, "out of memory for an executor");
  *exec = (Exec){.ctx = options->ctx,
                 .comm = options->comm,
                 .sched = sched,
                 .row = &sched->row[options->comm->rank],
                 .ops = options->ops,
                 .user = options->user};
  Status status = ST_OK;
  size_t stages = (size_t)sched->copies * sched->stages, ranks = (size_t)sched->ranks;
  exec->channel = calloc(ranks, sizeof *exec->channel);
  exec->expected = calloc(ranks, sizeof *exec->expected);
  exec->ports = calloc(stages, sizeof *exec->ports);
  exec->box = calloc((size_t)sched_messages(sched) + 1, sizeof *exec->box);
  exec->span = calloc((size_t)exec->row->count + 1, sizeof *exec->span);
  exec->name = calloc((size_t)exec->row->count + 1, sizeof *exec->name);
  if (!exec->channel || !exec->expected || !exec->ports || !exec->box || !exec->span ||
      !exec->name) {
    status = fail(ST_ENOMEM, "out of memory for an executor of %d actions", exec->row->count);
    goto failed;
  }
  for (int i = 0; i < exec->row->count; i++) exec->name[i] = sched_name(exec->row->action[i]);
  for (int stage = 0; stage < (int)stages; stage++)
    if (sched->holder[stage] == exec->comm->rank) TRY_TO(failed, make_ports(exec, stage));
  TRY_TO(failed, open_channels(exec, options));
  *out = exec;
  return ST_OK;
failed:
  exec_free(exec);
  return status;
}

void exec_free(Exec *exec) {
  if (!exec) return;
  for (int64_t k = 0; exec->box && k < sched_messages(exec->sched); k++)
    parcel_delete(exec->ctx, exec->box[k]);
  for (int rank = 0; rank < exec->sched->ranks; rank++) {
    if (exec->channel) channel_close(exec->channel[rank]);
    if (!exec->expected) continue;
    free(exec->expected[rank].action);
    free(exec->expected[rank].where);
  }
  for (int stage = 0; exec->ports && stage < exec->sched->copies * exec->sched->stages; stage++) {
    free(exec->ports[stage].in);
    free(exec->ports[stage].out);
  }
  free(exec->channel);
  free(exec->expected);
  free(exec->ports);
  free(exec->box);
  free(exec->span);
  free(exec->name);
  free(exec);
}
