// binding - what the files of the binding layer share: the state behind one lua_State, and how
// tensors, errors and options cross between C and Lua.
//
// Every C function that scripts can call is a closure whose first upvalue is the Rille as a light
// userdata (binding_of). A tensor is a full userdata that holds one Tensor *, released by its __gc.
//
// Invariants:
//  1. Only this layer raises a Lua error, and only where the C stack below owns nothing.
//  2. A tensor is pushed (and so owned by Lua) at once after it was made; what an error leaves
//     behind is collected.
//  3. C code that calls back into Lua keeps its clean-up in a Guard, closed by Lua also on errors.
#ifndef RILLE_LUA_BINDING_H
#define RILLE_LUA_BINDING_H

#include "core/context.h"
#include "core/op.h"
#include "core/scope.h"
#include "core/status.h"
#include "core/tensor.h"

#include <lauxlib.h>
#include <lua.h>
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NO_RETURN __attribute__((noreturn))

struct OpBinding;
struct Checkpoint;

typedef struct Rille {
  Ctx *ctx;
  lua_State *L;              // the coroutine that entered last: garbage collection, script lines
  const void *tensor_meta;   // the metatable of tensors, as lua_topointer gives it
  int tensor_meta_ref;       // and in the registry
  int list_ref;              // of the list that collect_tensors gave last
  int script_error_ref;      // the error value of a callback that failed (ST_ESCRIPT)
  struct OpBinding *ops;     // COMM_OP_END rows
  const char *last_source;   // interned; of the line that was asked for last
  uint64_t n_calls;          // grows with every op call: how many nodes a checkpoint may need
  struct Checkpoint *region; // the checkpointed region whose first forward runs
  Arena arena_i, arena_w;    // of the microbatches under way
  const char **modules;      // paths to come back to, innermost last
  int n_modules, modules_room;
  int rank, world; // 0 and 1 without a launcher
} Rille;

// The state behind a C function's first upvalue.
static inline Rille *binding_of(lua_State *L) {
  Rille *r = (Rille *)lua_touserdata(L, lua_upvalueindex(1));
  r->L = L;
  return r;
}

// require "rille": in the program through package.preload, in a stock lua5.4 through rille.so.
int luaopen_rille(lua_State *L);

// Sets the functions of `list` in the table on top, each with the state as its upvalue.
void binding_register(lua_State *L, Rille *r, const luaL_Reg *list);
// The same, one closure pushed.
void binding_push(lua_State *L, Rille *r, lua_CFunction fn);

// Each part adds its functions. `rille` is on top; methods of tensors are at `methods`.
void ops_bind(lua_State *L, Rille *r, int rille, int methods);
void tensor_bind(lua_State *L, Rille *r, int rille, int methods);
void index_bind(lua_State *L, Rille *r, int methods);
void make_bind(lua_State *L, Rille *r, int rille, int methods);
void grad_bind(lua_State *L, Rille *r, int rille);
void checkpoint_bind(lua_State *L, Rille *r, int rille);
void custom_bind(lua_State *L, Rille *r, int rille);
void core_bind(lua_State *L, Rille *r, int rille, int methods);
void weights_bind(lua_State *L, Rille *r, int rille);
void files_bind(lua_State *L, Rille *r, int rille);
void signals_bind(lua_State *L, Rille *r, int rille);
void data_bind(lua_State *L, Rille *r, int rille);
void sched_bind(lua_State *L, Rille *r, int rille);
void partition_bind(lua_State *L, Rille *r, int rille);
void ledger_bind(lua_State *L, Rille *r, int rille);
void comm_bind(lua_State *L, Rille *r, int rille);
void exec_bind(lua_State *L, Rille *r, int rille);

// A metatable "rille.<name>" with methods and finalizers of its own, for userdata that hold one
// pointer (box). `methods` and `metamethods` may be NULL.
void box_bind(lua_State *L, Rille *r, const char *name, const luaL_Reg *methods,
              const luaL_Reg *metamethods);
// Pushes a userdata of `bytes` (zeroed) with the metatable of `name`.
void *box_push(lua_State *L, const char *name, size_t bytes);
// The userdata at an index, or an error that names what was wanted.
void *box_check(lua_State *L, Rille *r, int index, const char *name);

// ---- guard.c

// What a C function that calls back into Lua undoes, also when an error passes.
typedef struct Guard {
  void (*close)(Rille *r, struct Guard *guard); // NULL: done already
} Guard;

// A guard of `bytes` (its first member a Guard) at stack index 1, below the arguments; it closes
// when the C function returns or fails.
void *guard_open(lua_State *L, Rille *r, size_t bytes, void (*close)(Rille *r, Guard *guard));
// The same on top of the stack, to be handed to `local x <close>`.
void *guard_push(lua_State *L, Rille *r, size_t bytes, void (*close)(Rille *r, Guard *guard));
void guard_bind(lua_State *L, Rille *r);

// ---- error.c

// Raises the recorded failure: what, operands, module and script line, hint. `in` may be NULL.
// The int is there so that a C function can say `return raise_status(...)`.
int raise_status(lua_State *L, Rille *r, Status status, Tensor **in, int n_in) NO_RETURN;
// The same for an option that is refused, as fail.usage of rille/fail.lua: exit code 2.
int raise_usage(lua_State *L, Rille *r, Status status) NO_RETURN;
// Whether an error value is that of a refused option.
bool is_usage(lua_State *L, int words);
// Raises a failure of the binding itself: fail(), then raise_status.
int raise_value(lua_State *L, Rille *r, const char *format, ...) PRINTF_LIKE(3, 4) NO_RETURN;
// Raises unless ST_OK.
static inline void check_status(lua_State *L, Rille *r, Status status) {
  if (status != ST_OK) raise_status(L, r, status, NULL, 0);
}
// Pops an error value that a callback left and records it: raise_status raises it unchanged.
Status fail_script(lua_State *L, Rille *r);

// The line of the user's script that runs now (the first level outside the embedded library).
Where script_line(void *rille);

// True if a chunk's source is the embedded library's.
bool is_library(const char *source);

// The nearest of n names to `word`; NULL if none is near.
const char *nearest_name(const char *word, const char *const *names, int n);

// ---- value.c

// The tensor at a stack index, or NULL.
static inline Tensor *tensor_at(lua_State *L, const Rille *r, int index) {
  if (!lua_getmetatable(L, index)) return NULL;
  const void *meta = lua_topointer(L, -1);
  lua_pop(L, 1);
  return meta == r->tensor_meta ? *(Tensor **)lua_touserdata(L, index) : NULL;
}
// The same, raising an error that names the function and the argument.
Tensor *tensor_check(lua_State *L, Rille *r, int index, const char *what);

// Pushes a tensor; Lua owns it from here on. A fresh one is adopted by the open scope.
void push_tensor(lua_State *L, Rille *r, Tensor *owned);
// The same for a tensor that is not to be adopted (a parameter, a kept one).
void push_owned(lua_State *L, Rille *r, Tensor *owned);
// Pushes *result, or raises.
int push_result(lua_State *L, Rille *r, Status status, Tensor **result);

// Raise an error "<what> must be ..., got ..." unless the value is of the kind.
const char *string_check(lua_State *L, Rille *r, int index, const char *what);
double number_check(lua_State *L, Rille *r, int index, const char *what);
void table_check(lua_State *L, Rille *r, int index, const char *what);
void callable_check(lua_State *L, Rille *r, int index, const char *what);
DType dtype_check(lua_State *L, Rille *r, int index);
int64_t integer_check(lua_State *L, Rille *r, int index, const char *what);

static inline bool same_shape(int ndim, const int64_t *a, const int64_t *b) {
  for (int d = 0; d < ndim; d++)
    if (a[d] != b[d]) return false;
  return true;
}

// A shape from a table or from consecutive numbers at index; *next is the index after it.
int shape_check(lua_State *L, Rille *r, int index, int64_t *shape, int *next);

// Options of a maker, from a table at `index` (absent: the defaults).
typedef struct MakeOptions {
  DType dtype;
  bool has_dtype;
  Device *device;
  bool requires_grad;
} MakeOptions;
void make_options(lua_State *L, Rille *r, int index, const char *fn, MakeOptions *out);

// A number at `index` as a 0-d tensor that goes with `like` (NULL: f32); owned by the caller.
Status scalar_new(lua_State *L, Rille *r, int index, const Tensor *like, Tensor **out);
// The same, pushed.
Tensor *push_scalar(lua_State *L, Rille *r, int index, const Tensor *like);

// The tensors among the stack's values [from, to] and in tables there, borrowed: a list of *n that
// is good until the next call.
Tensor **collect_tensors(lua_State *L, Rille *r, int from, int to, int *n);

// ---- checkpoint.c

// A checkpointed region's first forward learns which tensors it reads from outside.
void checkpoint_saw(lua_State *L, Rille *r, Tensor **in, int n_in);
// op_apply of an op with OP_KEPT within a region.
Status checkpoint_apply(Rille *r, const Op *op, Tensor **in, int n_in, const OpArgs *args,
                        Tensor **out);

// ---- ops_bind.c

// Runs a row with the arguments on the stack from 1 on; pushes its outputs and returns their
// number.
int op_call(lua_State *L, Rille *r, const struct OpBinding *binding, bool in_place);
// Applies a row by name to tensors; the result is pushed and also returned.
Tensor *op_push(lua_State *L, Rille *r, const char *name, Tensor **in, int n_in,
                const OpArgs *args);

// ---- show.c
int tensor_tostring(lua_State *L);
int tensor_tolist(lua_State *L);
// Pushes element `at` (in elements from the storage's start) as a Lua value.
void push_element(lua_State *L, const Tensor *t, int64_t at);

// ---- assign.c

// target[...] = source, with broadcasting and conversion, for any strides. Errors: ESHAPE, ESTATE.
Status tensor_assign(Ctx *ctx, Tensor *target, Tensor *source);
Status tensor_assign_number(Ctx *ctx, Tensor *target, double value);
// The number or boolean at a stack index; i64 takes integers exactly.
Status assign_value(lua_State *L, Rille *r, int index, Tensor *target);

#ifdef __cplusplus
}
#endif
#endif
