// sched_inner - what the sched files share and nobody else needs.
#ifndef RILLE_PARALLEL_SCHED_INNER_H
#define RILLE_PARALLEL_SCHED_INNER_H

#include "parallel/sched.h"

#include <stdarg.h>

// strlen, as an int.
static inline int sched_length(const char *text) {
  int length = 0;
  while (text[length]) length++;
  return length;
}

// Text into a buffer, cut to its size, ending in a zero byte.
void sched_format(char *buffer, size_t size, const char *format, ...) PRINTF_LIKE(3, 4);
void sched_vformat(char *buffer, size_t size, const char *format, va_list *args);

// The text of an action.
typedef struct SchedName {
  char text[48];
} SchedName;
SchedName sched_name(Action action);

// Room for `count` actions in a row, so that a generator's pushes cannot fail.
Status sched_reserve(Sched *sched, int rank, int64_t count);

// What the formulas of a schedule's type are asked, and whether they hold under these costs at all.
SchedCase sched_case(const Sched *sched, const SchedCosts *costs);
bool sched_has_formula(const Sched *sched, const SchedCosts *costs);

// Edits that turn one word into another, in any case; for "did you mean".
int sched_distance(const char *a, const char *b);

// The largest distance at which a word may be taken for a misspelt name.
int sched_near(const char *word);

// (stage, mb) as an index into arrays of copies * stages * mbs.
static inline int64_t sched_cell(const Sched *sched, int stage, int mb) {
  return (int64_t)stage * sched->mbs + mb;
}

// Where the actions of each cell stand in their holder's row; -1: nowhere. b is an I or a B, w the
// W or the same B.
typedef struct SchedIndex {
  int *f, *b, *w;
} SchedIndex;

// Builds it. *broken is set to 7 or 1, with the places, where an action is out of range, on the
// wrong rank or there twice; else to 0.
Status sched_index(SchedArena *arena, SchedIndex *out, const Sched *sched, SchedPlace *at,
                   SchedPlace *other, int *broken);

// ---- the engine: all ranks run their lists ---------------------------------------------------

// The state of a run. Ranks take turns as long as one can go on; time follows from the inputs.
typedef struct SchedRun {
  const Sched *sched;
  const SchedCosts *costs; // NULL: all actions take no time
  SchedIndex index;
  bool is_rendezvous;             // a SEND waits until its RECV is posted
  int64_t *first;                 // [ranks+1]
  SchedSpan *span;                // NULL: not wanted
  int *at;                        // [ranks] the next action
  double *clock;                  // [ranks] since when the rank is free
  double *pair_start, *pair_end;  // [ranks] of the overlapped pair that runs
  int *pair_left;                 // [ranks] its actions still to come
  int *need_output, *need_grad;   // [stages] inputs that F and B or I of a stage wait for
  uint8_t *got_output, *got_grad; // [cells] of them, arrived
  double *output_at, *grad_at;    // [cells] latest arrival so far
  uint8_t *posted;                // [messages] under rendezvous: the RECV stands
  double *link_free;              // [ranks*ranks] with a bandwidth: when a channel is free
  int *tied_here;                 // [groups] ranks that have arrived
  int *tied_need;                 // [groups] ranks that hold the group
  double *tied_at;                // [groups] latest arrival
  uint8_t *tied_arrived;          // [ranks] waits in a REDUCE_TIED
  int *queue;                     // [ranks] ranks that may go on, as a ring
  int queue_head, queue_length;
  uint8_t *queued; // [ranks]
} SchedRun;

// The number of a message: of an edge, a direction and a microbatch. Edges are numbered by their
// first stage, those beside the chain behind them. -1: the action names no edge.
int64_t sched_message(const Sched *sched, Action action);
int64_t sched_messages(const Sched *sched);

// Prepares and runs until no rank can go on: sched, costs, index, is_rendezvous, first and span are
// set by the caller. ENOMEM only; a deadlock shows in sched_run_is_done.
Status sched_run(SchedArena *arena, SchedRun *run);
bool sched_run_is_done(const SchedRun *run);

// What the next action of a blocked rank waits for: the rank that must act first, and the place in
// its list (index -1: nothing there will ever do it).
SchedPlace sched_run_waits_for(const SchedRun *run, int rank);

// Walks the edges into or out of a stage:
//     SchedEdgeWalk walk = {sched, stage, is_into};
//     while (sched_next_edge(&walk)) use(walk.other, walk.has_grad);
typedef struct SchedEdgeWalk {
  const Sched *sched;
  int stage;
  bool is_into;
  int next;      // 0: the chain, then 1 + the edge beside it
  int other;     // the stage at the other end
  bool has_grad; // its gradient flows back
} SchedEdgeWalk;
bool sched_next_edge(SchedEdgeWalk *walk);

#endif
