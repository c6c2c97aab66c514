// sched_bind - schedules as Lua objects: what other bindings take from them.
#ifndef RILLE_LUA_SCHED_BIND_H
#define RILLE_LUA_SCHED_BIND_H

#include "lua/binding.h"
#include "parallel/ledger.h"

#ifdef __cplusplus
extern "C" {
#endif

// A schedule bound to its sizes, as recipe:build gives it. All of it lives as long as the userdata.
typedef struct SchedBox {
  SchedArena arena;
  Sched *sched;        // compute actions as generated
  Sched *lowered;      // with messages, reductions and steps; NULL: not finished
  SchedReport *report; // of the lowered list: channel depths, whether it is exact
} SchedBox;

// What exec:spans() gives of an action, as doubles: start, end, waited, from, sent, arrived.
enum { SPAN_FIELDS = 6 };

// The finished schedule at a stack index, borrowed; else a Lua error.
const SchedBox *sched_check_box(lua_State *L, Rille *r, int index);

// Memory that Lua frees with the userdata that this pushes; sched_scratch_close gives it back
// before.
SchedArena *sched_scratch_push(lua_State *L);

// Costs from the table at an index (absent: F = I = W = 1) for a schedule of these sizes, with
// their lists in `arena`:
//   F, I, W, overlap, hop, message_bytes, bytes_per_second, reduce_grad, reduce_tied, step
//   stage_factor, mb_factor    lists of numbers
//   stage_costs                a list {F, I, W} a stage, instead of F, I, W; B = I + W, or a fourth
//   bytes                      a list {for_i, for_w, grads} a stage
// Raises a Lua error on anything else.
void sched_costs_check(lua_State *L, Rille *r, int index, const Sched *sched, SchedArena *arena,
                       SchedCosts *out);

// The method sched:ledger(spans, clocks), of ledger_bind.c.
int sched_ledger(lua_State *L);

// What all ranks measured of one step.
typedef struct SchedMeasured {
  int64_t *first;         // [ranks + 1]
  SchedSpan *span;        // [first[ranks]] of the lowered lists
  LedgerMessage *message; // as span
  bool has_messages;      // some action waited for one
} SchedMeasured;

// Reads it from the list at `index`: spans[rank + 1] is what exec:spans() gave on that rank, or a
// list of {start, end, waited, from, sent, arrived} for each action. At `clocks` nil, or a list of
// seconds to be added to each rank's times. Raises a Lua error.
void sched_spans_check(lua_State *L, Rille *r, int index, int clocks, const Sched *sched,
                       SchedArena *arena, SchedMeasured *out);

// What `rille schedule` asks for where the name is a script: a SchedLoad of sched_cli.h whose user
// is a lua_State. The schedule lives as long as the state.
int sched_load_script(void *user, const char *path, const SchedCase *sizes, Sched **out, FILE *err);

#ifdef __cplusplus
}
#endif
#endif
