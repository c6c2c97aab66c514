// op_cases - one table of calls for every row of ops.def, and how their inputs are made.
//
// A case is a row, its inputs and arguments in words. Input j is made from a leaf (contiguous, f64,
// every value exact in bf16) and seen through a view, so that kernels meet strides:
//
//    "n 2,3"      normal values [2, 3]          n normal, p in [0.5, 2], u in (-0.9, 0.9),
//    "n 2,3 t"    a transposed view             d distinct multiples of 1/4, b bool,
//    "i5 4"       i64 in [0, 5)                 h 0 or 1 as i64,
//                                              m normal, wanting no gradient; "." 0-d, "-" absent
//
// views: t last two dimensions swapped, s every second element of the last dimension, f all
// dimensions flipped, e dimension 0 expanded from 1 to 3 (stride 0).
#ifndef RILLE_TESTS_OP_CASES_H
#define RILLE_TESTS_OP_CASES_H

#include "ops/ops.h"

enum { CASE_MAX_IN = 8 };

// What a case is not used for, and what it is.
enum {
  CASE_NO_GRAD = 1,  // values only: kinks, or a result that is not differentiable
  CASE_ROWS = 2,     // dimension 0 of all inputs and outputs is a batch of independent entries
  CASE_BIG = 4,      // large, for threads: bits alone
  CASE_IN0_ROWS = 8, // as CASE_ROWS, but of input 0 alone
};

typedef struct OpCase {
  OpId op;
  const char *inputs; // "n 2,3 | n 3 t"
  const char *args;   // "dim=1 dims=0,2"
  unsigned flags;
  double loose; // multiplies the tolerances of f32 and bf16; 0 counts as 1
} OpCase;

extern const OpCase op_cases[];
extern const int n_op_cases;

// A hidden row and the row whose cases run it.
typedef struct CoveredRow {
  OpId hidden, by;
} CoveredRow;
extern const CoveredRow covered_rows[];
extern const int n_covered_rows;

// A call that must fail: status, and words its message holds beside the op's name.
typedef struct ErrorCase {
  OpId op;
  const char *inputs, *args;
  Status status;
  const char *words[4];
} ErrorCase;
extern const ErrorCase error_cases[];
extern const int n_error_cases;

// The inputs of a case, made.
typedef struct CaseInputs {
  int n;
  Tensor *leaf[CASE_MAX_IN]; // NULL where absent
  Tensor *x[CASE_MAX_IN];    // the view that goes to the op
  char view[CASE_MAX_IN];
} CaseInputs;

// Makes leaves on the CPU; float ones in `dtype`, wanting a gradient if `grad`.
Status case_leaves(Ctx *ctx, const char *inputs, DType dtype, bool grad, CaseInputs *out);
// Makes (again) x from the leaves, recorded if gradients are enabled.
Status case_views(Ctx *ctx, CaseInputs *inputs);
void case_release_views(Ctx *ctx, CaseInputs *inputs);
void case_release(Ctx *ctx, CaseInputs *inputs);

// Arguments from words; what is not named has its default.
void case_args(const Op *op, const char *words, OpArgs *out);

// "add(n 2,3 | n 3; )", into a caller's buffer.
const char *case_name(const Op *op, const char *inputs, const char *args, char *buffer,
                      size_t size);

#endif
