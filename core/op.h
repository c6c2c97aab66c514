// op - what an operation is. Core knows this, not which operations exist: those are the rows of
// ops/ops.def.
//
// A row binds a name, the names of inputs and arguments (from which the script binding, the help
// text and the error messages follow), a shape rule, a backward and one kernel a device. Calling an
// op:
//
//    promote dtypes -> make inputs contiguous (if the kernel asks) -> shape rule -> check indices
//      -> allocate outputs -> kernel -> record on the tape
//
// Everything that can fail comes before the kernel; a kernel cannot, unless it communicates.
#ifndef RILLE_CORE_OP_H
#define RILLE_CORE_OP_H

#include "core/context.h"
#include "core/status.h"
#include "core/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  OP_MAX_OUT = 4, // public outputs and hidden ones kept for backward together
  OP_MAX_ARGS = 8,
  OP_MAX_VARIADIC = 64, // inputs of a variadic op (longer lists are cut by the caller)
  OP_MAX_LIST = 24,     // the numbers in a list argument (shapes, dims, pads, slices)
};

typedef union ArgValue {
  int64_t i;
  double f;
} ArgValue;

typedef struct OpArgs {
  ArgValue v[OP_MAX_ARGS]; // in the order of the row's args
  int n_list;              // -1: the list was not given
  int64_t list[OP_MAX_LIST];
} OpArgs;

// Copies what is set: the whole struct is large, and a copy of it costs as much as a small op.
static inline void op_args_copy(OpArgs *to, const OpArgs *from) {
  for (int k = 0; k < OP_MAX_ARGS; k++) to->v[k] = from->v[k];
  to->n_list = from->n_list;
  for (int k = 0; k < from->n_list; k++) to->list[k] = from->list[k];
}

// Flags of a row.
enum {
  OP_CONTIGUOUS = 1,   // the kernel wants row-major inputs
  OP_PROMOTE = 2,      // inputs are brought to a common dtype
  OP_FLOAT = 4,        // inputs must be floating point (integers are refused, not cast)
  OP_VIEW = 8,         // the output is an alias of input 0; no kernel
  OP_HIDDEN = 16,      // not offered to scripts
  OP_VARIADIC = 32,    // any number of inputs
  OP_ELEMENTWISE = 64, // element-wise: an in-place form exists (name_)
  OP_DENSE_ROWS = 256, // the last stride must be 1 (else copied)
  OP_MATRIX = 128,     // of the last two strides one must be 1 (else copied)
  OP_TOGETHER = 1024, // its gradients call other ranks: all of a group must come to it in one order
  OP_SUMS = 2048,     // its gradient is a sum over ranks: weight gradients run meanwhile
  OP_KEPT = 512,      // one output, which a checkpointed region keeps instead of making it again
};

typedef struct Op Op;

// A call on its way: the shape rule reads the inputs and args and fills the rest.
typedef struct OpCall {
  Ctx *ctx;
  const Op *op;
  int n_in;
  Tensor **in;                // absent optional inputs are NULL
  OpArgs args;                // the shape rule may normalise (negative dims)
  bool records;               // it will be on the tape: hidden outputs are wanted
  int n_out, n_saved;         // the rule may lower n_saved
  TensorSpec out[OP_MAX_OUT]; // n_out public ones, then n_saved hidden ones
  int64_t workspace;          // bytes of scratch the kernel needs
  double flops;
  int index_in; // input whose values must lie in [0, index_limit), or equal index_skip; -1: none
  int64_t index_limit, index_skip;
  const Tensor *known; // what the kernel would give; NULL: it is not known yet
} OpCall;

// What a kernel gets. Outputs and inputs as in OpCall; accumulate: bit k set means add to out[k].
typedef struct KernelCall {
  const OpArgs *args;
  int n_in, n_out;
  Tensor **in, **out;
  void *workspace;
  unsigned accumulate;
  Status *status; // ST_OK; a kernel that communicates may leave a failure there
} KernelCall;

// What a backward gets. in[j], out[i], saved[k] are present if the row's `needs` named them for a
// wanted gradient; in_spec[j] always. dout[i] is NULL where no gradient arrived. A wanted din[j]:
//   NULL on entry                 the backward sets it to a tensor that it owns (may be a view of
//   dout) given, accumulate bit unset   written over given, accumulate bit set     added to
// grad_give does the right one of the three with a finished tensor.
typedef struct GradCall {
  Ctx *ctx;
  const Op *op;
  const OpArgs *args;
  void *user;           // of a node made by tape_record_custom
  struct Backward *run; // the backward under way
  int n_in, n_out;
  Tensor **in, **out, **saved;
  const TensorSpec *in_spec;
  Tensor **dout;
  uint64_t need, accumulate; // bit masks over inputs
  Tensor **din;
} GradCall;

typedef Status (*ShapeRule)(OpCall *call);
typedef Status (*GradRule)(GradCall *call);
typedef void (*Kernel)(const KernelCall *call);

struct Op {
  int id;             // row number; -1: not in the table
  const char *name;   // as scripts see it
  const char *inputs; // "x w bias?": names in order, ? optional, * any number
  const char *args;   // "dim:int=-1 dims:list": type int float bool dtype list group
  const char *needs;  // "x:w w:x": which of inputs (by name), out, saved each gradient reads
  const char *defer;  // inputs whose gradient is GEMM-like and waits for W where it has no D
  unsigned flags;
  int n_out, n_saved;
  ShapeRule shape;
  GradRule grad; // NULL: not differentiable
  Kernel kernel[DEV_KINDS];
  const char *help;
};

// Parsed once from a row's strings.
enum { OP_MAX_IN = 6 };
typedef struct OpNeeds {
  unsigned in[OP_MAX_IN]; // for the gradient of input j: mask of inputs read
  unsigned out[OP_MAX_IN];
  unsigned saved[OP_MAX_IN];
  unsigned defer; // mask of inputs
} OpNeeds;

// Parses `needs` and `defer`. Variadic ops: everything is read by every gradient of input 0's row.
void op_needs(const Op *op, OpNeeds *out);

// Runs an op on any number of inputs and records it. out[0..op->n_out) are owned by the caller.
// Errors: what the shape rule says, ERANGE for index values, ESTATE for released inputs, ESTOPPED,
// ECOMM of a kernel that communicates.
Status op_apply(Ctx *ctx, const Op *op, Tensor **in, int n_in, const OpArgs *args, Tensor **out);

// The same for an op with OP_KEPT whose output is known: `known`, of the right shape, instead of
// running the kernel.
Status op_apply_known(Ctx *ctx, const Op *op, Tensor **in, int n_in, const OpArgs *args,
                      const Tensor *known, Tensor **out);

// Runs an op without recording, into tensors the caller has: each of the right shape and dtype,
// contiguous; accumulate as in KernelCall. Hidden outputs are made and dropped.
Status op_apply_into(Ctx *ctx, const Op *op, Tensor **in, int n_in, const OpArgs *args,
                     Tensor **out, unsigned accumulate);

// to = from, or to += from with accumulate (of op_apply_into's mask, the one output). to has from's
// shape and a dtype of its own, contiguous.
Status op_cast_into(Ctx *ctx, Tensor *to, Tensor *from, bool accumulate);

// Runs an element-wise op with input 0 as its output. Errors: ESTATE where a gradient would be
// lost.
Status op_apply_inplace(Ctx *ctx, const Op *op, Tensor **in, int n_in, const OpArgs *args);

// Runs the shape rule alone.
Status op_infer(Ctx *ctx, const Op *op, Tensor **in, int n_in, const OpArgs *args, OpCall *out);

// Hands a finished gradient (owned by the callee from here on) to input j; NULL is passed over.
Status grad_give(GradCall *call, int j, Tensor *owned);
static inline bool grad_wants(const GradCall *call, int j) { return (call->need >> j) & 1; }

// Ops that core itself calls; bound once by ops (ops_init).
typedef struct CoreOps {
  const Op *contiguous; // a row-major copy
  const Op *cast;       // args.v[0].i = dtype: a row-major copy in another dtype; may accumulate
} CoreOps;

#ifdef __cplusplus
}
#endif
#endif
