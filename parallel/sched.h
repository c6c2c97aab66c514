// sched - pipeline schedules as data: the order in which each rank runs forwards, backwards and
// messages; generators, lowering, checker, simulator, text forms.
//
//     generate (or parse) ---> check ---> lower ---> check ---> run, simulate, draw
//       compute actions                 + messages, reductions, steps
//
// Words. p ranks of one pipeline, m microbatches (mb), v stages a rank (chunks), S = p*v stages.
// F forward; I dgrad, the backward for a stage's inputs; W wgrad, the backward for its weights;
// B = I and W in one. Times F, I, W are for a rank's whole share of the model: a chunk costs F/v.
//
// Numbered invariants, kept by every generator and by the lowering, tested by sched_check:
//   1  every (stage, mb) has one F and one B, or one F, one I and one W
//   2  F before I or B before W
//   3  sends and receives match pairwise, in channel order
//   4  no deadlock under rendezvous sends
//   5  live activations never exceed the declared bound
//   6  each reduction once, after all its contributions
//   7  each (stage, mb) runs on exactly one rank, where that copy of the stage is held
//   8  I, W and B of a stage ascend in mb; else a run is equal "to rounding" only
//
// The files sched*.c but sched_heap.c and sched_cli.c use no libc beyond mem* functions: memory
// comes from a SchedArena, text goes to a SchedOut.
#ifndef RILLE_PARALLEL_SCHED_H
#define RILLE_PARALLEL_SCHED_H

#include "core/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// ---- memory and text -------------------------------------------------------------------------

// Memory for everything that the functions below return: blocks handed out in order and given back
// all at once by whoever owns them. After a failure `message` holds what was wrong and what to do.
typedef struct SchedArena {
  char *at;    // rest of the current block
  size_t left; // bytes
  // Returns a further block of at least *bytes, sets *bytes to what it has, or returns NULL.
  // NULL itself: the first block is all.
  void *(*more)(struct SchedArena *arena, size_t *bytes);
  void *user; // of more
  char message[480];
} SchedArena;

// count * size bytes of zeros, aligned for any type; NULL if there are none (message is set).
void *sched_alloc(SchedArena *arena, size_t count, size_t size);

// An arena over malloc (sched_heap.c), and its end. Nothing made in it may be used after that.
void sched_heap_open(SchedArena *arena);
void sched_heap_close(SchedArena *arena);

// Where text goes.
typedef struct SchedOut {
  void (*write)(void *user, const char *bytes, size_t count);
  void *user;
} SchedOut;

// A small printf: %s %c %d %lld %g %%, width and `-`; %g prints at most 12 significant digits, or
// with a precision that many decimals; trailing zeros are dropped in both, never an exponent
// between 1e-5 and 1e15.
void sched_print(const SchedOut *out, const char *format, ...) PRINTF_LIKE(2, 3);

// Records words as the arena's message, in the same format, and returns `status`.
Status sched_fail(SchedArena *arena, Status status, const char *format, ...) PRINTF_LIKE(3, 4);

// A text that grows in an arena; `out` writes to it. What does not fit is dropped and `is_full`
// set. `text` always ends in a zero byte once something was written.
typedef struct SchedText {
  SchedArena *arena;
  char *text;
  size_t length, room;
  bool is_full;
} SchedText;
SchedOut sched_text_out(SchedText *text);

// ---- actions ---------------------------------------------------------------------------------

// What a kind of action needs and does.
enum {
  NEEDS_OUTPUT = 1,  // the outputs of the stages before
  NEEDS_GRAD = 2,    // the gradients from the stages after
  NEEDS_F = 4,       // its own forward
  NEEDS_I = 8,       // its own dgrad
  GIVES_OUTPUT = 16, // its end lets the stages after go on
  GIVES_GRAD = 32,   // its end lets the stages before go on
  KEEPS = 64,        // an activation is live from its start
  FREES = 128,       // ... to its end
  CONTRIBUTES = 256, // adds to the stage's weight gradients
  SENDS = 512,       // a message leaves
  RECEIVES = 1024,   // a message is expected
};

// What an action occupies while it runs.
typedef enum SchedResource { USES_NOTHING, USES_COMPUTE, USES_LINK, USES_GROUP } SchedResource;

// X(name, text, resource, properties). OVERLAP_F_B stands before two compute actions of its rank,
// an F and a B, that may run at once; it is printed as one cell, (2F5;1B3)OVERLAP_F_B.
#define ACTION_LIST(X)                                                             \
  X(F, "F", USES_COMPUTE, NEEDS_OUTPUT | GIVES_OUTPUT | KEEPS)                     \
  X(I, "I", USES_COMPUTE, NEEDS_F | NEEDS_GRAD | GIVES_GRAD)                       \
  X(W, "W", USES_COMPUTE, NEEDS_I | FREES | CONTRIBUTES)                           \
  X(B, "B", USES_COMPUTE, NEEDS_F | NEEDS_GRAD | GIVES_GRAD | FREES | CONTRIBUTES) \
  X(SEND_F, "SEND_F", USES_LINK, SENDS)                                            \
  X(RECV_F, "RECV_F", USES_LINK, RECEIVES)                                         \
  X(SEND_B, "SEND_B", USES_LINK, SENDS)                                            \
  X(RECV_B, "RECV_B", USES_LINK, RECEIVES)                                         \
  X(REDUCE_GRAD, "REDUCE_GRAD", USES_GROUP, 0)                                     \
  X(REDUCE_TIED, "REDUCE_TIED", USES_GROUP, 0)                                     \
  X(STEP, "STEP", USES_NOTHING, 0)                                                 \
  X(OVERLAP_F_B, "OVERLAP_F_B", USES_NOTHING, 0)

typedef enum ActionKind {
#define X(name, text, resource, properties) ACTION_##name,
  ACTION_LIST(X)
#undef X
      ACTION_KINDS
} ActionKind;

// One entry of a rank's list.
typedef struct Action {
  ActionKind kind;
  int stage; // whose work; of SEND the sender, of RECV the receiver
  int mb;    // of REDUCE_TIED the group; -1 where there is none
  int peer;  // of SEND and RECV the stage at the other end; else -1
} Action;

const char *action_text(ActionKind kind);
int action_properties(ActionKind kind);
SchedResource action_resource(ActionKind kind);

// ---- schedules -------------------------------------------------------------------------------

typedef enum SchedPlacement {
  PLACE_LOOP,  // stage s on rank s mod p
  PLACE_V,     // rank r owns r and 2p-1-r
  PLACE_WAVE,  // chunk c of rank r is stage c*p+r for even c, c*p+(p-1-r) for odd
  PLACE_GIVEN, // by a list
} SchedPlacement;

// A value that flows from one stage to another beside the chain s -> s+1.
typedef struct SchedEdge {
  int from, to;  // stages, from < to
  bool has_grad; // its gradient flows back
} SchedEdge;

// A stage that holds a copy of a tied weight.
typedef struct SchedTied {
  int group, stage;
} SchedTied;

// The list of one rank. A list that repeats for ever has actions [0, body) before the first step
// and [epilogue, count) after the last; a synchronous one is all body: 0 and count.
typedef struct SchedRow {
  Action *action;
  int count, room;
  int body, epilogue;
} SchedRow;

struct SchedType;

// A schedule for one pipeline. Stages are global: copy c of stage s is written c*S + s.
typedef struct Sched {
  const char *name;
  const struct SchedType *type; // NULL: a user's own
  int ranks, chunks, mbs, copies;
  int stages; // S = ranks * chunks, of one copy
  int group;  // of interleaved: as asked for, 0 balanced groups
  SchedPlacement placement;
  int *holder;     // [copies*stages] the rank that holds it
  SchedRow *row;   // [ranks]
  int64_t *bound;  // [ranks] declared: most live activations, in chunks; -1: not declared
  bool lowered;    // messages, reductions and steps are in the lists
  SchedEdge *edge; // [edges] beside the chain
  int edges;
  SchedTied *tied; // [tieds]
  int tieds;
  int tied_groups;
  const char *warning; // "" or what the user should know
  SchedArena *arena;   // where it lives
} Sched;

// The copy that runs microbatch mb.
int sched_copy_of(const Sched *sched, int mb);

// Whether the stage is the first or the last of its copy.
bool sched_is_first(const Sched *sched, int stage);
bool sched_is_last(const Sched *sched, int stage);

// An empty schedule of one copy. holder[S] is read for PLACE_GIVEN alone.
// EVALUE: sizes below 1 or too large; a rank without exactly v stages.
Status sched_new(SchedArena *arena, Sched **out, const char *name, int ranks, int chunks, int mbs,
                 SchedPlacement placement, const int *holder);

// Adds an action at the end of a rank's list.
Status sched_push(Sched *sched, int rank, Action action);

// The same from its text: `2F0`, `(2F5;1B3)OVERLAP_F_B`. EFORMAT: not an action.
Status sched_push_text(Sched *sched, int rank, const char *text, size_t length);

// Declares the most live activations that a rank holds, in chunks (whole-rank units times v).
Status sched_declare(Sched *sched, int rank, int64_t chunks);

// Adds an edge beside the chain; before sched_lower. EVALUE: not from < to, or known already.
Status sched_add_edge(Sched *sched, int from, int to, bool has_grad);

// Says that these stages share a tied weight; before sched_lower.
Status sched_add_tied(Sched *sched, const int *stages, int count);

// ---- generators ------------------------------------------------------------------------------

// What formulas and generators are asked for. Times are whole-rank.
typedef struct SchedCase {
  int ranks, chunks, mbs;
  int group; // of interleaved; 0: balanced groups of at least p, as large as they must be
  double F, I, W;
  double overlap; // whole-rank time of an overlapped pair; below 0: none, F and then B
} SchedCase;

// One known schedule. Formulas return false where none holds.
typedef struct SchedType {
  const char *name;
  const char *alias; // torch.distributed.pipelining's name, or ""
  const char *help;
  SchedPlacement placement;
  int chunks, chunks_min, chunks_max; // default and allowed stages a rank; max 0: any
  int chunks_step;                    // allowed: min, min + step, ...
  bool splits;                        // backward is I and W
  bool peak_is_exact;                 // else peak() is a bound that need not be reached
  Status (*generate)(Sched *sched);
  int64_t (*peak)(const SchedCase *c, int rank); // live activations, in chunks
  bool (*span)(const SchedCase *c, double *bubble);
  bool (*makespan)(const SchedCase *c, double *bubble);
} SchedType;

// All of them, in the order of the documentation.
const SchedType *sched_types(int *count);

// By name or alias, in any case; NULL if there is none, or if the alias stands for fewer chunks.
const SchedType *sched_find(const char *name);

// The known schedule or alias with the nearest spelling; NULL if none is near.
const char *sched_nearest(const char *name);

// Makes the schedule: compute actions only. chunks 0: the type's default. Only sizes and group of
// the case are read. EVALUE: sizes that the type does not allow; the message has the valid values.
Status sched_generate(SchedArena *arena, Sched **out, const SchedType *type, const SchedCase *c);

// ---- simulator -------------------------------------------------------------------------------

// What one microbatch keeps of a stage, in bytes.
typedef struct SchedBytes {
  double for_i; // from F to the end of I (or B)
  double for_w; // from F to the end of W (or B)
  double grads; // kept output gradients, from I to the end of W
} SchedBytes;

// What things cost. All zero but F, I, W is a fair start; see sched_costs.
typedef struct SchedCosts {
  double F, I, W;                        // whole-rank times; B = I + W; a chunk costs 1/v of it
  double overlap;                        // whole-rank time of a pair; below 0: F, then B
  double reduce_grad, reduce_tied, step; // for each action
  double at_least;                       // no compute action takes less than this
  double hop;                            // latency of a message
  double message_bytes;                  // size of a message
  double bytes_per_second;               // of a channel; 0: no limit
  const double *stage_factor;            // [stages] multiplies the times of a stage; NULL: 1
  const double *mb_factor;               // [mbs] multiplies the times of a microbatch; NULL: 1
  // The time of a compute action, instead of all of the above but overlap; NULL: as above.
  double (*price)(const void *user, Action action);
  const void *user;
  const SchedBytes *bytes; // [stages] of one microbatch; NULL: not counted
} SchedCosts;

// F, I, W; no overlap, no latency.
SchedCosts sched_costs(double F, double I, double W);

// When an action ran, and how long its rank stood idle before it.
typedef struct SchedSpan {
  double start, end, waited;
} SchedSpan;

// A simulated step. Row r's spans begin at span[first[r]].
typedef struct SchedSim {
  int64_t *first;     // [ranks+1]
  SchedSpan *span;    // [first[ranks]]
  double *busy;       // [ranks] time computing
  double *begin;      // [ranks] start of the first compute action
  double *end;        // [ranks] end of the last
  int64_t *peak;      // [ranks] most live activations, in chunks
  double *peak_bytes; // [ranks] most live bytes of activations and kept gradients
  double makespan;
  double makespan_bubble; // makespan - compute time of the busiest rank
  double span_bubble;     // max over ranks of end - begin - busy
} SchedSim;

// Runs the lists: ranks in order, asynchronous sends. EVALUE: an action out of range, a double or a
// missing one, a deadlock (sched_check says where).
Status sched_simulate(SchedArena *arena, SchedSim **out, const Sched *sched,
                      const SchedCosts *costs);

// A measured step as a simulated one: figures, peaks, times from the first start on, multiplied by
// `scale` (1000: milliseconds of seconds). span[first[ranks]] as in SchedSim, on one clock; one of
// no length did not run. EVALUE: a span that ends before it starts.
Status sched_measured(SchedArena *arena, SchedSim **out, const Sched *sched, const SchedSpan *span,
                      double scale);

// The costs of a measured step: the mean times of each kind of action of each stage, of reductions
// and of steps; no latency. What a simulation with them does not explain is not the actions'. Their
// price is in `arena`.
Status sched_mean_costs(SchedArena *arena, SchedCosts *out, const Sched *sched,
                        const SchedSim *measured);

// A link of the critical path: an action and why it could not start earlier.
typedef struct SchedLink {
  int rank, index;
  bool by_message; // it waited for the link before it on another rank; else its own rank was busy
} SchedLink;

// The chain of actions that decides the makespan, first to last.
Status sched_critical_path(SchedArena *arena, SchedLink **out, int *count, const Sched *sched,
                           const SchedSim *sim);

// ---- lowering --------------------------------------------------------------------------------

// Adds SEND and RECV by one global order, REDUCE_GRAD, REDUCE_TIED and STEP. costs NULL: F = I = W.
// EVALUE: as sched_simulate.
Status sched_lower(SchedArena *arena, Sched **out, const Sched *sched, const SchedCosts *costs);

// ---- checker ---------------------------------------------------------------------------------

// A place in the lists; index -1: the end of the row. rank -1: nowhere.
typedef struct SchedPlace {
  int rank, index;
} SchedPlace;

// How many receives must stand posted at once on the channel from rank `from` to rank `to`.
typedef struct SchedDepth {
  int from, to, depth;
} SchedDepth;

typedef struct SchedReport {
  int broken;          // 0, or the invariant from 1 to 7 that the schedule breaks
  bool is_to_rounding; // invariant 8 is broken: gradients are summed in another order
  SchedPlace at;       // the offending action (of 8, if that is all)
  SchedPlace other;    // the one it collides with
  SchedPlace *cycle;   // [cycle_length] of 4: where the ranks stand, each waiting for the next
  SchedPlace *wanted;  // [cycle_length] what each waits for
  int cycle_length;
  char message[320];
  int64_t *peak;     // [ranks] as simulated
  SchedDepth *depth; // [depths] channels in use; lowered schedules only
  int depths;
} SchedReport;

// Judges a schedule by the invariants. ENOMEM only: a broken schedule is a result.
Status sched_check(SchedArena *arena, SchedReport **out, const Sched *sched);

// The report in words; for a broken schedule the table with an arrow at the offending action, and
// the cycle drawn. width: columns of the terminal, 0: 100.
void sched_print_report(const SchedOut *out, const Sched *sched, const SchedReport *report,
                        int width);

// ---- text forms ------------------------------------------------------------------------------

// One action in torch.distributed.pipelining's form. Needs the row for pairs: index of its marker.
void sched_print_action(const SchedOut *out, Action action);

// The action at `index` of a row, or the pair that its marker begins, as one cell. Returns how many
// actions that are.
int sched_print_cell(const SchedOut *out, const SchedRow *row, int index);

// A row a rank, a cell an action.
void sched_print_csv(const SchedOut *out, const Sched *sched);

// Reads it; also what torch.distributed.pipelining writes (empty cells are idle time). Sizes and
// placement come from the text. EFORMAT, with row and cell.
Status sched_parse_csv(SchedArena *arena, Sched **out, const char *name, const char *text,
                       size_t length);

// Schedule, times, bubbles, peaks, depths and formulas as one JSON object. report may be NULL.
void sched_print_json(const SchedOut *out, const Sched *sched, const SchedSim *sim,
                      const SchedCosts *costs, const SchedReport *report);

// All known schedules side by side, at ranks, mbs, F, I, W and overlap of the case: bubbles with
// messages of no and some latency, the bubble left between steps, the most live activations.
Status sched_print_table(SchedArena *arena, const SchedOut *out, const SchedCase *c);

// The critical path in words.
void sched_print_path(const SchedOut *out, const Sched *sched, const SchedSim *sim,
                      const SchedLink *path, int count);

// ---- drawings --------------------------------------------------------------------------------

// How wide and how colourful a terminal drawing is.
typedef struct SchedTerminal {
  int width; // columns; 0: no limit
  enum { SCHED_COLOUR_NONE, SCHED_COLOUR_256, SCHED_COLOUR_TRUE } colour;
} SchedTerminal;

// The timeline, a line a rank, wrapped to the width.
void sched_draw_terminal(const SchedOut *out, const Sched *sched, const SchedSim *sim,
                         const SchedTerminal *terminal);

// Several timelines of one schedule, one above the other in each band, on the scale of the first.
typedef struct SchedTimeline {
  const char *title; // a line above it; NULL: none
  const SchedSim *sim;
} SchedTimeline;
void sched_draw_terminals(const SchedOut *out, const Sched *sched, const SchedTimeline *timeline,
                          int n, const SchedTerminal *terminal);

// The timeline as an SVG image: stage colours, F light, I and W between, B dark.
void sched_draw_svg(const SchedOut *out, const Sched *sched, const SchedSim *sim,
                    const SchedCosts *costs);

// A self-contained page: the timeline, the activation-memory curve of each rank, the figures.
void sched_draw_html(const SchedOut *out, const Sched *sched, const SchedSim *sim,
                     const SchedCosts *costs);

// Predicted above measured on one time axis, as an SVG image; both of the same lists, in
// milliseconds.
void sched_draw_compare(const SchedOut *out, const Sched *sched, const SchedSim *predicted,
                        const SchedSim *measured);

// Chrome trace JSON (opens in Perfetto); one unit of time is `unit_us` microseconds.
void sched_draw_trace(const SchedOut *out, const Sched *sched, const SchedSim *sim, double unit_us);

#ifdef __cplusplus
}
#endif
#endif
