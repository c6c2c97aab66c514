// exec - runs the list of one rank of a lowered schedule: calls the stages, moves tensors between
// them, and records what took how long.
//
//     F      wait for the inputs on all edges into the stage -> forward -> outputs to the edges out
//     B, I   wait for the gradients on all edges out -> backward -> gradients to the edges in
//     W      wgrad
//     SEND   hands a parcel to the channel     RECV  nothing: receives are posted ahead
//     REDUCE_GRAD, REDUCE_TIED, STEP           the callbacks of these names
//
// Edges: the chain s -> s+1, then those that the schedule has beside it. A stage sees them as
// ports: edges into it and out of it, the chain's first. Two stages of one rank hand tensors over
// without a message.
//
// Invariants:
//  1. Actions run in the order of the list, each once.
//  2. Each stage callback gets every input exactly once; what it returns goes to every edge.
//  3. After exec_run nothing is under way: all messages have been sent, received and consumed.
#ifndef RILLE_PARALLEL_EXEC_H
#define RILLE_PARALLEL_EXEC_H

#include "parallel/channel.h"

#ifdef __cplusplus
extern "C" {
#endif

// One edge as a stage sees it.
typedef struct Port {
  int stage;      // at the other end
  bool has_grad;  // a gradient flows back
  Parcel *parcel; // forward: values; backward: gradients
} Port;

// A call of a stage. forward: reads in, fills out; backward: reads out (gradients), fills in.
// Parcels to be filled are there and empty; values put there are owned by them.
typedef struct StageCall {
  ActionKind kind; // F, B, I, W
  int stage, mb;
  int n_in, n_out;
  Port *in, *out;
} StageCall;

// What the stages do; every one returns a Status and gets `user` first. reduce_* and step may be
// NULL.
typedef struct StageOps {
  Status (*forward)(void *user, StageCall *call);
  Status (*backward)(void *user, StageCall *call); // B: all of it; I: dgrad alone
  Status (*wgrad)(void *user, int stage, int mb);
  Status (*reduce_grad)(void *user, int stage);
  Status (*reduce_tied)(void *user, int group, int stage);
  Status (*step)(void *user, int stage);
} StageOps;

// When an action ran. Times in seconds of this rank's clock.
typedef struct ExecSpan {
  double start, end; // of the work itself
  double waited;     // before start, for a message
  int32_t from;      // the stage whose message came last; -1: none was waited for
  double sent;       // when that message left its sender, on the sender's clock
  double arrived;    // and when it was here
} ExecSpan;

typedef struct ExecOptions {
  Ctx *ctx;
  Comm *comm;                // the ranks of one pipeline, in order
  Device *device;            // where what arrives is placed; NULL: the CPU
  const Sched *sched;        // lowered, checked; borrowed until exec_free
  const SchedReport *report; // of it: depths
  StageOps ops;
  void *user;
} ExecOptions;

typedef struct Exec Exec;

// Errors: EVALUE if the schedule is not lowered or has another number of ranks than the group.
Status exec_new(const ExecOptions *options, Exec **out);
void exec_free(Exec *exec);

// One step: the whole list. Errors: what a callback says, with the action in front; ECOMM.
Status exec_run(Exec *exec);

// Forward passes alone of microbatches 0 .. mbs-1 (at most the schedule's), in the list's order.
Status exec_forward(Exec *exec, int mbs);

// Of the latest run, an entry for each action of this rank's row; not run: start 0, end 0.
const ExecSpan *exec_spans(const Exec *exec);

// The action that runs now, or NULL.
const Action *exec_now(const Exec *exec);

#ifdef __cplusplus
}
#endif
#endif
