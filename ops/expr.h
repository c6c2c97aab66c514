// expr - arithmetic on tensors in C, for backwards: calls that chain, with one place for errors.
//
//    Expr e;
//    expr_begin(&e, call->ctx);
//    expr_give(&e, call, 0, expr2(&e, OP_mul, call->dout[0], call->in[1]));
//    return expr_end(&e);
//
// After a failure every further call gives NULL and does nothing; expr_end releases all that was
// made and returns the first failure. Nothing is recorded on the tape.
#ifndef RILLE_OPS_EXPR_H
#define RILLE_OPS_EXPR_H

#include "ops/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { EXPR_MAX = 48 };

typedef struct Expr {
  Ctx *ctx;
  Status status;
  bool grad_enabled; // as it was
  int n;
  Tensor *made[EXPR_MAX]; // owned
} Expr;

void expr_begin(Expr *e, Ctx *ctx);
Status expr_end(Expr *e);

// Results are borrowed: they live until expr_end.
Tensor *expr_n(Expr *e, OpId id, const OpArgs *args, Tensor **in, int n_in);
Tensor *expr1(Expr *e, OpId id, Tensor *a);
Tensor *expr2(Expr *e, OpId id, Tensor *a, Tensor *b);
Tensor *expr2s(Expr *e, OpId id, Tensor *a, double b); // b in a's dtype
Tensor *expr3(Expr *e, OpId id, Tensor *a, Tensor *b, Tensor *c);
Tensor *expr_scalar(Expr *e, DType dtype, double value);
Tensor *expr_cast(Expr *e, Tensor *a, DType dtype);

// A view of `a` with another shape (a copy, if a is not row-major).
Tensor *expr_view(Expr *e, Tensor *a, int ndim, const int64_t *shape);
// Dimensions of size 1, and missing leading ones, repeated to `shape`, as a view with strides 0.
Tensor *expr_expand(Expr *e, Tensor *a, int ndim, const int64_t *shape);
// The last two dimensions swapped, as a view.
Tensor *expr_transpose(Expr *e, Tensor *a);
// Summed over the dimensions in which `spec` was broadcast to a's shape, and brought to spec's
// shape.
Tensor *expr_sum_to(Expr *e, Tensor *a, const TensorSpec *spec);

// Hands t to input j as its gradient (grad_give); NULL is passed over.
void expr_give(Expr *e, GradCall *call, int j, Tensor *t);
// Computes an op straight into din[j] where the tape gave one, else into a new tensor.
void expr_give_op(Expr *e, GradCall *call, int j, OpId id, const OpArgs *args, Tensor **in,
                  int n_in);

// For a backward op with one output for each of the first n inputs: runs it into din[j] where the
// tape gave one, into new tensors where it did not, and without those unwanted (out[j] is NULL).
Status grad_by_op(GradCall *call, OpId bwd, const OpArgs *args, Tensor **in, int n_in, int n);

#ifdef __cplusplus
}
#endif
#endif
