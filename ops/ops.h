// ops - the table of operations, and calling them from C.
#ifndef RILLE_OPS_OPS_H
#define RILLE_OPS_OPS_H

#include "core/op.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum OpId {
#define OP(name, flags, n_out, n_saved, inputs, args, needs, defer, help) OP_##name,
#define OP_V(name, flags, inputs, args, help) OP_##name,
#define OP_NG(name, flags, n_out, n_saved, inputs, args, help) OP_##name,
#include "ops/ops.def"
#undef OP
#undef OP_V
#undef OP_NG
  OP_COUNT
} OpId;

// The row of an op; the table's order is ops.def's.
const Op *op_row(OpId id);

// The row by its name, or NULL.
const Op *op_find(const char *name);

// Looks whether the environment variables that kernels obey have values that mean something.
// Errors: EVALUE.
Status ops_environment(void);

// Binds the table to a context: before any op runs in it. Errors: those of ops_environment.
Status ops_init(Ctx *ctx);

// What the CPU kernels run with: instruction level, product library, threads.
typedef struct OpsCpu {
  const char *level, *blas; // "avx512"; "rille": what computes f32 products
  int n_threads;
  bool pinned;
} OpsCpu;
OpsCpu ops_cpu(void);

// One op on n_in inputs with its public outputs, owned by the caller. args NULL: the row's
// defaults.
Status ops_call(Ctx *ctx, OpId id, const OpArgs *args, Tensor **in, int n_in, Tensor **out);

// The arguments of a row at their defaults; required ones are 0.
void op_args_default(const Op *op, OpArgs *out);

// One argument of a row, from its words "name:type=fallback".
typedef struct ArgSpec {
  char name[24], type[8], fallback[16];
  bool required; // no fallback
} ArgSpec;

// Fills out[0..n) and returns n, at most OP_MAX_ARGS + 1. A list goes to OpArgs.list, the others to
// OpArgs.v in order.
int op_arg_specs(const Op *op, ArgSpec *out);

#ifdef __cplusplus
}
#endif
#endif
