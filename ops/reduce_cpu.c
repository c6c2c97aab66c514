// reduce_cpu - reductions on the CPU: x as [outer, red, inner], by ops/kernels for real numbers.
//
// Where the reduced dimensions are neighbours they are red, in place; else x is brought into the
// order [kept, reduced] in scratch, with inner = 1. Which of the two, and so the order of a sum, is
// a function of x's shape and the dimensions alone: neither strides nor threads show in the bits.
#include "ops/dense_cpu.h"
#include "ops/kernels/kernels.h"
#include "ops/kernels/threads.h"
#include "ops/ops.h"
#include "ops/reduce.h"
#include "ops/rows.h"

#include <string.h>

typedef struct Plan {
  int64_t outer, red, inner;
  int order[MAX_DIMS]; // x's dimensions as [outer, red, inner] has them
  bool in_place;       // x lies so already
} Plan;

static Plan make_plan(const Tensor *x, const OpArgs *args) {
  unsigned reduced = 0;
  for (int i = 0; i < args->n_list; i++) reduced |= 1u << args->list[i];
  int first = -1, last = -1;
  for (int d = 0; d < x->ndim; d++) {
    if (!(reduced >> d & 1) || x->shape[d] == 1) continue;
    if (first < 0) first = d;
    last = d;
  }
  Plan plan = {1, 1, 1, {0}, tensor_contiguous(x)};
  bool neighbours = true;
  for (int d = 0; d < x->ndim; d++) {
    bool is_kept = !(reduced >> d & 1);
    plan.order[d] = d;
    if (is_kept && x->shape[d] != 1 && d > first && d < last) neighbours = false;
    if (!is_kept)
      plan.red *= x->shape[d];
    else if (first >= 0 && d > last)
      plan.inner *= x->shape[d];
    else
      plan.outer *= x->shape[d];
  }
  if (neighbours) return plan;
  plan.outer *= plan.inner;
  plan.inner = 1;
  plan.in_place = false;
  int n = 0;
  for (int d = 0; d < x->ndim; d++)
    if (!(reduced >> d & 1)) plan.order[n++] = d;
  for (int d = 0; d < x->ndim; d++)
    if (reduced >> d & 1) plan.order[n++] = d;
  return plan;
}

// What a reduction of this dtype computes in.
static DType real_type(DType dtype) { return dtype == DT_F64 ? DT_F64 : DT_F32; }

// What integers are read as where they lie, or copied to.
static DType integer_type(DType dtype, OpId id) {
  if (id == OP_argmax || id == OP_argmin) return DT_I64;
  if (id == OP_any || id == OP_all) return DT_BOOL;
  return dtype;
}

int64_t reduce_workspace(const OpCall *call) {
  const Tensor *x = call->in[0];
  OpId id = (OpId)call->op->id;
  Plan plan = make_plan(x, &call->args);
  bool real = dtype_is_float(x->dtype) && id != OP_any && id != OP_all;
  DType compute = real ? real_type(x->dtype) : integer_type(x->dtype, id);
  bool copies = !plan.in_place || compute != x->dtype || id == OP_argmin;
  int64_t result = dense_bytes(plan.outer * plan.inner, real ? compute : DT_I64);
  return result + (copies ? dense_bytes(plan.outer * plan.red * plan.inner, compute) : 0);
}

// x in compute's type and the plan's order: in place, or copied to the end of the scratch.
static const void *operand(const KernelCall *call, const Plan *plan, DType compute,
                           int64_t result_bytes, bool copies) {
  const Tensor *x = call->in[0];
  if (plan->in_place && x->dtype == compute && !copies) return tensor_data(x);
  void *copy = (char *)call->workspace + result_bytes;
  dense_read(x, plan->order, compute, copy);
  return copy;
}

// ---- real numbers
static void reduce_real(const KernelCall *call, ReduceFn fn, int64_t correction) {
  const Tensor *x = call->in[0];
  Tensor *out = call->out[0];
  if (tensor_numel(out) == 0) return;
  DType compute = real_type(x->dtype);
  Plan plan = make_plan(x, call->args);
  int64_t result_bytes = dense_bytes(plan.outer * plan.inner, compute);
  bool direct = out->dtype == compute && tensor_contiguous(out), adds = call->accumulate & 1;
  Reduce reduce = {.outer = plan.outer,
                   .red = plan.red,
                   .inner = plan.inner,
                   .a = operand(call, &plan, compute, result_bytes, false),
                   .out = direct ? tensor_data(out) : call->workspace,
                   .correction = correction,
                   .accumulate = direct && adds};
  if (compute == DT_F64)
    cpu_kernels()->reduce_f64(fn, &reduce);
  else
    cpu_kernels()->reduce_f32(fn, &reduce);
  if (!direct) dense_write(out, compute, call->workspace, adds);
}

// ---- integers and truth values
typedef enum Fold { FOLD_SUM, FOLD_MAX, FOLD_MIN, FOLD_ANY, FOLD_ALL } Fold;

typedef struct FoldJob {
  Fold fold;
  const Plan *plan;
  DType dtype;
  const void *a;
  int64_t *out; // [outer, inner]
} FoldJob;

// out[o, i] folded with a[o, r, i] for all r but the first, which out holds already.
#define FOLD_ROWS(expression)                            \
  for (int64_t r = 1; r < red; r++)                      \
    for (int64_t i = 0; i < inner; i++) {                \
      int64_t v = (int64_t)a[r * inner + i], s = out[i]; \
      out[i] = (expression);                             \
    }                                                    \
  break;
#define FOLDS(T)                                                         \
  static void fold_##T(const FoldJob *job, int64_t begin, int64_t end) { \
    int64_t red = job->plan->red, inner = job->plan->inner;              \
    for (int64_t o = begin; o < end; o++) {                              \
      const T *a = (const T *)job->a + o * red * inner;                  \
      int64_t *out = job->out + o * inner;                               \
      for (int64_t i = 0; i < inner; i++)                                \
        out[i] = red > 0 ? (int64_t)a[i] : job->fold == FOLD_ALL;        \
      switch (job->fold) {                                               \
      case FOLD_SUM: FOLD_ROWS((int64_t)((uint64_t)s + (uint64_t)v))     \
      case FOLD_MAX: FOLD_ROWS(v > s ? v : s)                            \
      case FOLD_MIN: FOLD_ROWS(v < s ? v : s)                            \
      case FOLD_ANY: FOLD_ROWS(s | v)                                    \
      case FOLD_ALL: FOLD_ROWS(s &v)                                     \
      }                                                                  \
    }                                                                    \
  }
FOLDS(int64_t)
FOLDS(int32_t)
FOLDS(uint8_t)

static void fold_items(void *context, int64_t begin, int64_t end) {
  const FoldJob *job = context;
  switch (job->dtype) {
  case DT_I64: fold_int64_t(job, begin, end); break;
  case DT_I32: fold_int32_t(job, begin, end); break;
  case DT_U8:
  case DT_BOOL: fold_uint8_t(job, begin, end); break;
  case DT_F32:
  case DT_F64:
  case DT_BF16: break;
  }
}

static void reduce_integer(const KernelCall *call, OpId id, Fold fold) {
  const Tensor *x = call->in[0];
  Tensor *out = call->out[0];
  if (tensor_numel(out) == 0) return;
  Plan plan = make_plan(x, call->args);
  FoldJob job = {fold, &plan, integer_type(x->dtype, id), NULL, call->workspace};
  job.a = operand(call, &plan, job.dtype, dense_bytes(plan.outer * plan.inner, DT_I64), false);
  parallel_for(plan.outer, 32768 / (plan.red * plan.inner + 1) + 1, fold_items, &job);
  dense_write(out, DT_I64, job.out, call->accumulate & 1);
}

static void reduce_any_type(const KernelCall *call, OpId id, ReduceFn fn, Fold fold) {
  if (dtype_is_float(call->in[0]->dtype))
    reduce_real(call, fn, 0);
  else
    reduce_integer(call, id, fold);
}

void cpu_sum(const KernelCall *call) { reduce_any_type(call, OP_sum, REDUCE_sum, FOLD_SUM); }
void cpu_max(const KernelCall *call) { reduce_any_type(call, OP_max, REDUCE_max, FOLD_MAX); }
void cpu_min(const KernelCall *call) { reduce_any_type(call, OP_min, REDUCE_min, FOLD_MIN); }
void cpu_mean(const KernelCall *call) { reduce_real(call, REDUCE_mean, 0); }
void cpu_logsumexp(const KernelCall *call) { reduce_real(call, REDUCE_logsumexp, 0); }
void cpu_var(const KernelCall *call) { reduce_real(call, REDUCE_var, call->args->v[0].i); }
void cpu_any(const KernelCall *call) { reduce_integer(call, OP_any, FOLD_ANY); }
void cpu_all(const KernelCall *call) { reduce_integer(call, OP_all, FOLD_ALL); }

// ---- positions
static void negate(void *a, DType dtype, int64_t n) {
  if (dtype == DT_F64)
    cpu_kernels()->unary_f64(UNARY_neg, a, a, n, 0, 0);
  else if (dtype == DT_F32)
    cpu_kernels()->unary_f32(UNARY_neg, a, a, n, 0, 0);
  else
    for (int64_t i = 0; i < n; i++) ((int64_t *)a)[i] = ~((int64_t *)a)[i]; // order turned round
}

static void argmax_i64(const Plan *plan, const int64_t *a, int64_t *out) {
  for (int64_t at = 0; at < plan->outer * plan->inner; at++) {
    const int64_t *row = a + at / plan->inner * plan->red * plan->inner + at % plan->inner;
    int64_t best = 0;
    for (int64_t r = 1; r < plan->red; r++)
      if (row[r * plan->inner] > row[best * plan->inner]) best = r;
    out[at] = best;
  }
}

// The first of the largest; argmin is the same of -x.
static void position(const KernelCall *call, bool of_min) {
  const Tensor *x = call->in[0];
  Tensor *out = call->out[0];
  if (tensor_numel(out) == 0) return;
  Plan plan = make_plan(x, call->args);
  bool real = dtype_is_float(x->dtype);
  DType compute = real ? real_type(x->dtype) : DT_I64;
  int64_t result_bytes = dense_bytes(plan.outer * plan.inner, real ? compute : DT_I64);
  const void *a = operand(call, &plan, compute, result_bytes, of_min);
  if (of_min) negate((char *)call->workspace + result_bytes, compute, tensor_numel(x));
  if (compute == DT_F64)
    cpu_kernels()->argmax_f64(tensor_data(out), a, plan.outer, plan.red, plan.inner);
  else if (compute == DT_F32)
    cpu_kernels()->argmax_f32(tensor_data(out), a, plan.outer, plan.red, plan.inner);
  else
    argmax_i64(&plan, a, tensor_data(out));
}
void cpu_argmax(const KernelCall *call) { position(call, false); }
void cpu_argmin(const KernelCall *call) { position(call, true); }

// ---- running sums
int64_t cumsum_workspace(const OpCall *call) {
  return dense_bytes(tensor_numel(call->in[0]), DT_F64); // as wide as i64
}

typedef struct CumsumJob {
  void *a; // [outer, n, inner] of f64 or i64, in place
  int64_t n, inner;
  bool reverse, real;
} CumsumJob;

#define RUNNING_SUM(T, A)                                               \
  for (int64_t k = 1; k < job->n; k++) {                                \
    T *row = (A) + (job->reverse ? job->n - 1 - k : k) * job->inner;    \
    const T *last = row + (job->reverse ? job->inner : -job->inner);    \
    for (int64_t i = 0; i < job->inner; i++) row[i] = row[i] + last[i]; \
  }

static void cumsum_items(void *context, int64_t begin, int64_t end) {
  const CumsumJob *job = context;
  int64_t step = job->n * job->inner;
  for (int64_t o = begin; o < end; o++) {
    if (job->real) {
      RUNNING_SUM(double, (double *)job->a + o * step)
    } else {
      RUNNING_SUM(uint64_t, (uint64_t *)job->a + o * step)
    }
  }
}

void cpu_cumsum(const KernelCall *call) {
  const Tensor *x = call->in[0];
  int64_t numel = tensor_numel(x);
  if (numel == 0) return;
  bool real = dtype_is_float(x->dtype);
  CumsumJob job = {call->workspace, 1, 1, call->args->v[1].i, real};
  for (int d = (int)call->args->v[0].i; d < x->ndim; d++) job.inner *= x->shape[d];
  if (x->ndim > 0) job.n = x->shape[call->args->v[0].i];
  job.inner /= job.n;
  dense_read(x, NULL, real ? DT_F64 : DT_I64, job.a);
  int64_t outer = numel / (job.n * job.inner);
  parallel_for(outer, 32768 / (job.n * job.inner + 1) + 1, cumsum_items, &job);
  dense_write(call->out[0], real ? DT_F64 : DT_I64, job.a, call->accumulate & 1);
}
