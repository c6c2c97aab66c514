// context - everything that would be global elsewhere: pool, devices, grad mode, the place in the
// training step, random streams, the scope that owns fresh tensors.
#ifndef RILLE_CORE_CONTEXT_H
#define RILLE_CORE_CONTEXT_H

#include "core/memory.h"
#include "core/scope.h"
#include "core/spans.h"
#include "core/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

// Where in a training step we are. step -1: outside any.
typedef struct StepPlace {
  int64_t step;
  int microbatch;       // index of the microbatch in the step
  int unit;             // index of the unit of the model (a gradient buffer of its own each)
  int64_t first_sample; // global index of the microbatch's first sample
  int64_t n_samples;    // samples in the microbatch; 0 outside a step
} StepPlace;

// How often each module has drawn in this unit and microbatch: ordinals of its random calls.
typedef struct Ordinals {
  const char **module; // interned paths
  int64_t *count;
  int n, room;
} Ordinals;

// Told during B or W, as soon as it is sure, that this pass contributes nothing more to the
// parameters of units above `unit`: their reduction may start while the rest runs. Not told where
// parameter-only nodes wait for the end. Must not fail, and must not touch the graph.
typedef struct UnitWatch {
  void (*done_above)(void *user, int unit);
  void *user;
} UnitWatch;

struct OpNeeds;
struct CoreOps;

struct Ctx {
  Pool *pool;
  Device cpu, meta;
  bool grad_enabled;
  uint64_t seed;
  uint64_t draws; // draw counter of tensor-making random calls outside the step
  StepPlace place;
  Ordinals ordinals;
  bool dry_run;               // ops on parameters without storage run on meta, nothing is placed
  bool recomputing;           // inside a checkpoint's second forward
  const char *module;         // interned path of the module now running; "" at the top
  Where (*where)(void *user); // the script's line now running
  void *where_user;
  volatile int interrupted;       // set by a signal handler: the next op returns ESTOPPED
  uint64_t sequence;              // of the next node
  Scope *scope;                   // innermost open scope; NULL outside a trainer step
  Arena *arena_i, *arena_w;       // of the running (stage, microbatch); NULL outside a trainer step
  SpanLog *spans;                 // NULL: not recorded
  struct Backward *halves;        // W halves that wait, and the backward under way, in their order
  bool keeps_order;               // no weight gradient runs before its W is called
  const UnitWatch *watch;         // of the next backward; NULL: nobody wants to know
  struct OpProfile *profile;      // NULL: not recorded
  double flops;                   // of every op run, meta ones included
  const struct CoreOps *core_ops; // bound by ops_init
  struct OpNeeds *op_needs;       // by Op.id
  Node *dying;                    // nodes on their way out, so that release does not recurse
  bool releasing;
  char **interned;
  int n_interned, interned_room;
};

// memory_limit in bytes, 0: the machine's.
Status ctx_new(size_t memory_limit, Ctx **out);
void ctx_delete(Ctx *ctx);

// A copy of `words` that lives as long as the context; equal words give the same pointer.
const char *ctx_intern(Ctx *ctx, const char *words);

// The key, first sample, samples and step of the next random call of the running module in the
// running unit: the mask it gives does not depend on microbatch, rank or schedule.
typedef struct RandomCall {
  uint64_t key;
  int64_t first_sample, n_samples, step;
} RandomCall;
Status ctx_random_call(Ctx *ctx, RandomCall *out);

// The ordinals, kept and brought back around a recomputation. `out` is owned by the caller.
Status ordinals_copy(Ctx *ctx, const Ordinals *from, Ordinals *out);
void ordinals_free(Ctx *ctx, Ordinals *ordinals);

// The script's line now running, or {NULL, 0}.
Where ctx_where(Ctx *ctx);

// A struct of the graph from the pool, accounted as structures. Contents undefined.
Status struct_alloc(Ctx *ctx, size_t bytes, void *out_pointer);
void struct_free(Ctx *ctx, void *block, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
