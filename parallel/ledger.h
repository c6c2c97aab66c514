// ledger - the bubble ledger of a step: where the idle time of each rank went, by cause.
//
//     rank 1  [F0]....[F1]..[B0]..[F2]      a gap is what is left between the spans of a rank
//                  |      |
//                  |      a message that took long (link), or that its sender sent late (late peer)
//                  what the schedule makes it wait even where all actions take their usual time
//
// How. The usual time of a kind of action is a median, and a simulation with usual times and no
// latency says how long each gap would be: that much is the schedule's own (warm-up, order,
// cool-down). What a gap has beyond it is followed back along the messages and actions that held it
// up, and charged to the first of them that took longer than usual: a message in flight to its
// link, an action to its rank. So a rank that is slow is named also by ranks that never talk to it.
//
// Invariants:
//  1. For each rank the causes sum to its idle time, and busy + idle is the step.
//  2. Pure: the same spans give the same ledger on every rank.
#ifndef RILLE_PARALLEL_LEDGER_H
#define RILLE_PARALLEL_LEDGER_H

#include "parallel/sched.h"

#ifdef __cplusplus
extern "C" {
#endif

// X(name, word, meaning)
#define LEDGER_CAUSE_LIST(X)                                                      \
  X(WARM_UP, "warm_up", "the pipeline fills: before the rank's first backward")   \
  X(ORDER, "order", "the schedule makes it wait between its phases")              \
  X(COOL_DOWN, "cool_down", "the pipeline drains: after the rank's last forward") \
  X(LATE, "late_peer", "a rank took longer than usual, or sent late")             \
  X(LINK, "link", "a message was under way")                                      \
  X(BARRIER, "barrier", "a reduction or step waited for others")                  \
  X(OWN, "own", "nothing to wait for: the rank itself was slow to begin its next action")

typedef enum LedgerCause {
#define X(name, word, meaning) LEDGER_##name,
  LEDGER_CAUSE_LIST(X)
#undef X
      LEDGER_CAUSES
} LedgerCause;

const char *ledger_cause(LedgerCause cause);

// Of a compute action that waited for a message: where the last one came from, when it left its
// sender, and when all of it was there.
typedef struct LedgerMessage {
  int from;             // the stage; -1: nothing was waited for
  double sent, arrived; // seconds, on the aligned clock
} LedgerMessage;

typedef struct Ledger {
  int ranks;
  double begin, end; // of the step: first start and last end on any rank
  double *busy;      // [ranks] seconds in actions
  double *idle;      // [ranks] end - begin - busy
  double *cause;     // [ranks][LEDGER_CAUSES] seconds
  double *late;      // [ranks][ranks] idle of the first because the second was late
  double *link; // [ranks][ranks] idle of anybody because of messages from the first to the second
  int latest;   // the rank to whose lateness most idle time is due; -1: to none's
  double lateness; // that time, summed over ranks
} Ledger;

// The ledger of one step. Row r's spans begin at span[first[r]], one for each action of the lowered
// list; their clocks are aligned; a span begins after its rank stopped waiting (of REDUCE_TIED: at
// any time since it came there); one of no length is left out. message: as span, read for compute
// actions; NULL: messages take no time. Errors: EVALUE: not a lowered schedule, or a span that ends
// before it starts.
Status ledger_make(SchedArena *arena, Ledger **out, const Sched *sched, const int64_t *first,
                   const SchedSpan *span, const LedgerMessage *message);

// Remembers over steps which rank was the latest.
typedef struct LedgerWatch {
  int rank, steps; // the latest one, and for how many steps in a row
  double share;    // of the idle time its lateness caused in the time of all ranks, on average
} LedgerWatch;

// Adds a step. Returns the rank that stays slow: the latest in at least `steps` steps in a row, and
// to blame for at least `share` (0.02: 2%) of the time of all ranks; -1: there is none.
int ledger_watch(LedgerWatch *watch, const Ledger *ledger, int steps, double share);

// The ledger in words: a line a cause, who is late for whom.
void ledger_print(const SchedOut *out, const Ledger *ledger);

#ifdef __cplusplus
}
#endif
#endif
