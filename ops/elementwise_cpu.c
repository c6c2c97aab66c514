// elementwise_cpu - element-wise ops on the CPU, for any strides and dtypes, in blocks.
//
//     operand --load--> block of a compute type --function--> block --store--> result
//
// A block is up to BLOCK elements of f32 (for f32, bf16), f64, or i64 (for integers and bool). An
// operand that is dense and of the compute type already is used where it lies; so is the result.
// Elements are independent, so neither blocks nor threads show in the bits.
#include "core/bf16.h"
#include "ops/elementwise.h"
#include "ops/rows.h"

#include "ops/kernels/kernels.h"
#include "ops/kernels/threads.h"
#include "ops/ops.h"

#include <assert.h>
#include <math.h>
#include <string.h>

enum { BLOCK = 1024, MAX_OPERANDS = 4, GRAIN = 32768 }; // result first

typedef enum Compute { IN_F32, IN_F64, IN_I64 } Compute;

typedef enum Form { UNARY, BINARY, COMPARE, LOGICAL, WHERE, COPY, NOT, FINITE } Form;

typedef enum LogicalFn { LOGICAL_and, LOGICAL_or, LOGICAL_xor } LogicalFn;

typedef struct Operand {
  char *data;
  DType dtype;
  int64_t stride[MAX_DIMS]; // in elements
} Operand;

typedef struct Walk {
  Form form;
  int fn;
  Compute compute;
  double p0, p1;
  bool accumulate;
  int ndim, n;
  int64_t size[MAX_DIMS];
  Operand operand[MAX_OPERANDS];
  const CpuKernels *kernels;
} Walk;

static Compute compute_type(DType dtype) {
  switch (dtype) {
  case DT_F32:
  case DT_BF16: return IN_F32;
  case DT_F64: return IN_F64;
  case DT_I64:
  case DT_I32:
  case DT_U8:
  case DT_BOOL: return IN_I64;
  }
  return IN_F64;
}

// Loads: n elements, `stride` apart, into a dense block of type T.
#define LOADS(NAME, T, FROM_FLOAT)                                                             \
  static void load_##NAME(T *to, const char *from, DType dtype, int64_t stride, int64_t n) {   \
    switch (dtype) {                                                                           \
    case DT_F32:                                                                               \
      for (int64_t i = 0; i < n; i++)                                                          \
        to[i] = (T)FROM_FLOAT(((const float *)(const void *)from)[i * stride]);                \
      break;                                                                                   \
    case DT_F64:                                                                               \
      for (int64_t i = 0; i < n; i++)                                                          \
        to[i] = (T)FROM_FLOAT(((const double *)(const void *)from)[i * stride]);               \
      break;                                                                                   \
    case DT_BF16:                                                                              \
      for (int64_t i = 0; i < n; i++)                                                          \
        to[i] = (T)FROM_FLOAT(bf16_widen(((const uint16_t *)(const void *)from)[i * stride])); \
      break;                                                                                   \
    case DT_I64:                                                                               \
      for (int64_t i = 0; i < n; i++)                                                          \
        to[i] = (T)((const int64_t *)(const void *)from)[i * stride];                          \
      break;                                                                                   \
    case DT_I32:                                                                               \
      for (int64_t i = 0; i < n; i++)                                                          \
        to[i] = (T)((const int32_t *)(const void *)from)[i * stride];                          \
      break;                                                                                   \
    case DT_U8:                                                                                \
    case DT_BOOL:                                                                              \
      for (int64_t i = 0; i < n; i++)                                                          \
        to[i] = (T)((const uint8_t *)(const void *)from)[i * stride];                          \
      break;                                                                                   \
    }                                                                                          \
  }
#define AS_IS(v) (v)
#define AS_INTEGER(v) real_to_int64((double)(v))
LOADS(f32, float, AS_IS)
LOADS(f64, double, AS_IS)
LOADS(i64, int64_t, AS_INTEGER)

// Stores: a dense block of T to n elements, `stride` apart; adds if asked to.
#define STORE_TO(U, VALUE, OLD)                \
  for (int64_t i = 0; i < n; i++) {            \
    U *at = (U *)(void *)to + i * stride;      \
    *at = add ? (U)(VALUE + OLD) : (U)(VALUE); \
  }                                            \
  break;
#define STORES(NAME, T, TO_INTEGER)                                                         \
  static void store_##NAME(char *to, DType dtype, int64_t stride, const T *from, int64_t n, \
                           bool add) {                                                      \
    switch (dtype) {                                                                        \
    case DT_F32: STORE_TO(float, (float)from[i], *at)                                       \
    case DT_F64: STORE_TO(double, (double)from[i], *at)                                     \
    case DT_I64: STORE_TO(int64_t, TO_INTEGER(from[i]), *at)                                \
    case DT_I32: STORE_TO(int32_t, TO_INTEGER(from[i]), *at)                                \
    case DT_U8: STORE_TO(uint8_t, TO_INTEGER(from[i]), *at)                                 \
    case DT_BOOL: STORE_TO(uint8_t, (from[i] != 0), 0)                                      \
    case DT_BF16:                                                                           \
      for (int64_t i = 0; i < n; i++) {                                                     \
        uint16_t *at = (uint16_t *)(void *)to + i * stride;                                 \
        *at = bf16_narrow((float)from[i] + (add ? bf16_widen(*at) : 0.0f));                 \
      }                                                                                     \
      break;                                                                                \
    }                                                                                       \
  }
STORES(f32, float, AS_INTEGER)
STORES(f64, double, real_to_int64)
STORES(i64, int64_t, AS_IS)

static bool native(Compute compute, DType dtype) {
  return (compute == IN_F32 && dtype == DT_F32) || (compute == IN_F64 && dtype == DT_F64) ||
         (compute == IN_I64 && dtype == DT_I64);
}

// Integer functions; the rest are refused by the rows' flags.
static void unary_i64(const Walk *w, int64_t *out, const int64_t *a, int64_t n) {
  double lo = w->p0, hi = w->p1;
  for (int64_t i = 0; i < n; i++) {
    int64_t v = a[i];
    switch ((UnaryFn)w->fn) {
    case UNARY_neg: v = (int64_t)(0 - (uint64_t)v); break;
    case UNARY_abs: v = v < 0 ? (int64_t)(0 - (uint64_t)v) : v; break;
    case UNARY_sign: v = (v > 0) - (v < 0); break;
    case UNARY_square: v = (int64_t)((uint64_t)v * (uint64_t)v); break;
    case UNARY_relu: v = v > 0 ? v : 0; break;
    case UNARY_clamp:
      v = (double)v < lo ? real_to_int64(lo) : (double)v > hi ? real_to_int64(hi) : v;
      break;
    default: assert(false && "no integer form"); // of a kernels.h list that is longer than ours
    }
    out[i] = v;
  }
}

static void binary_i64(int fn, int64_t *out, const int64_t *a, const int64_t *b, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    uint64_t x = (uint64_t)a[i], y = (uint64_t)b[i];
    switch ((BinaryFn)fn) {
    case BINARY_add: out[i] = (int64_t)(x + y); break;
    case BINARY_sub: out[i] = (int64_t)(x - y); break;
    case BINARY_mul: out[i] = (int64_t)(x * y); break;
    case BINARY_max: out[i] = a[i] > b[i] ? a[i] : b[i]; break;
    case BINARY_min: out[i] = a[i] < b[i] ? a[i] : b[i]; break;
    case BINARY_relu_bwd: out[i] = b[i] > 0 ? a[i] : 0; break;
    default: assert(false && "no integer form");
    }
  }
}

static void compare_i64(int fn, uint8_t *out, const int64_t *a, const int64_t *b, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    switch ((CompareFn)fn) {
    case COMPARE_eq: out[i] = a[i] == b[i]; break;
    case COMPARE_ne: out[i] = a[i] != b[i]; break;
    case COMPARE_lt: out[i] = a[i] < b[i]; break;
    case COMPARE_le: out[i] = a[i] <= b[i]; break;
    case COMPARE_gt: out[i] = a[i] > b[i]; break;
    case COMPARE_ge: out[i] = a[i] >= b[i]; break;
    }
  }
}

static bool logical(int fn, bool a, bool b) {
  switch ((LogicalFn)fn) {
  case LOGICAL_and: return a && b;
  case LOGICAL_or: return a || b;
  case LOGICAL_xor: return a != b;
  }
  return false;
}

// One block in compute type T: in[] are dense; flags go to `flags` for forms with a bool result.
#define RUN(NAME, T, UNARY_CALL, BINARY_CALL, COMPARE_CALL, FINITE_TEST)                       \
  static void run_##NAME(const Walk *w, T *out, uint8_t *flags, const T *const *in,            \
                         const uint8_t *cond, int64_t n) {                                     \
    switch (w->form) {                                                                         \
    case UNARY: UNARY_CALL; break;                                                             \
    case BINARY: BINARY_CALL; break;                                                           \
    case COMPARE: COMPARE_CALL; break;                                                         \
    case COPY:                                                                                 \
      if (out != in[0]) memcpy(out, in[0], (size_t)n * sizeof(T));                             \
      break;                                                                                   \
    case WHERE:                                                                                \
      for (int64_t i = 0; i < n; i++) out[i] = cond[i] ? in[1][i] : in[2][i];                  \
      break;                                                                                   \
    case LOGICAL:                                                                              \
      for (int64_t i = 0; i < n; i++) flags[i] = logical(w->fn, in[0][i] != 0, in[1][i] != 0); \
      break;                                                                                   \
    case NOT:                                                                                  \
      for (int64_t i = 0; i < n; i++) flags[i] = in[0][i] == 0;                                \
      break;                                                                                   \
    case FINITE:                                                                               \
      for (int64_t i = 0; i < n; i++) flags[i] = FINITE_TEST(in[0][i]);                        \
      break;                                                                                   \
    }                                                                                          \
  }
#define IS_FINITE(v) ((v) - (v) == 0)
#define ALWAYS(v) 1
RUN(f32, float, w->kernels->unary_f32((UnaryFn)w->fn, out, in[0], n, w->p0, w->p1),
    w->kernels->binary_f32((BinaryFn)w->fn, out, in[0], in[1], n),
    w->kernels->compare_f32((CompareFn)w->fn, flags, in[0], in[1], n), IS_FINITE)
RUN(f64, double, w->kernels->unary_f64((UnaryFn)w->fn, out, in[0], n, w->p0, w->p1),
    w->kernels->binary_f64((BinaryFn)w->fn, out, in[0], in[1], n),
    w->kernels->compare_f64((CompareFn)w->fn, flags, in[0], in[1], n), IS_FINITE)
RUN(i64, int64_t, unary_i64(w, out, in[0], n), binary_i64(w->fn, out, in[0], in[1], n),
    compare_i64(w->fn, flags, in[0], in[1], n), ALWAYS)

static bool gives_flags(Form form) {
  return form == COMPARE || form == LOGICAL || form == NOT || form == FINITE;
}

// A block: n elements along the last dimension, operand k at at[k].
#define BLOCKS(NAME, T, COMPUTE)                                                                \
  static void block_##NAME(const Walk *w, char *const *at, const int64_t *stride, int64_t n) {  \
    T loaded[MAX_OPERANDS - 1][BLOCK], result[BLOCK];                                           \
    uint8_t flags[BLOCK], cond[BLOCK];                                                          \
    const T *in[MAX_OPERANDS - 1] = {0};                                                        \
    const Operand *o = w->operand;                                                              \
    bool to_flags = gives_flags(w->form);                                                       \
    bool direct = !to_flags && !w->accumulate && stride[0] == 1 && native(COMPUTE, o[0].dtype); \
    T *out = direct ? (T *)(void *)at[0] : result;                                              \
    for (int k = 1; k < w->n; k++) {                                                            \
      if (w->form == WHERE && k == 1) {                                                         \
        double truth[BLOCK];                                                                    \
        load_f64(truth, at[k], o[k].dtype, stride[k], n);                                       \
        for (int64_t i = 0; i < n; i++) cond[i] = truth[i] != 0;                                \
      } else if (stride[k] == 1 && native(COMPUTE, o[k].dtype)) {                               \
        in[k - 1] = (const T *)(const void *)at[k];                                             \
      } else {                                                                                  \
        load_##NAME(loaded[k - 1], at[k], o[k].dtype, stride[k], n);                            \
        in[k - 1] = loaded[k - 1];                                                              \
      }                                                                                         \
    }                                                                                           \
    if (!to_flags && !direct && w->form == COPY) {                                              \
      store_##NAME(at[0], o[0].dtype, stride[0], in[0], n, w->accumulate);                      \
      return;                                                                                   \
    }                                                                                           \
    bool flags_direct = to_flags && stride[0] == 1 && o[0].dtype == DT_BOOL;                    \
    run_##NAME(w, out, flags_direct ? (uint8_t *)at[0] : flags, in, cond, n);                   \
    if (flags_direct || direct) return;                                                         \
    if (to_flags)                                                                               \
      for (int64_t i = 0; i < n; i++) ((uint8_t *)at[0])[i * stride[0]] = flags[i];             \
    else                                                                                        \
      store_##NAME(at[0], o[0].dtype, stride[0], result, n, w->accumulate);                     \
  }
BLOCKS(f32, float, IN_F32)
BLOCKS(f64, double, IN_F64)
BLOCKS(i64, int64_t, IN_I64)

static void block(const Walk *w, char *const *at, const int64_t *stride, int64_t n) {
  switch (w->compute) {
  case IN_F32: block_f32(w, at, stride, n); break;
  case IN_F64: block_f64(w, at, stride, n); break;
  case IN_I64: block_i64(w, at, stride, n); break;
  }
}

// Elements [begin, end) of the row-major index space, in runs along the last dimension.
static void run_range(void *context, int64_t begin, int64_t end) {
  const Walk *w = context;
  int last = w->ndim - 1;
  int64_t index[MAX_DIMS], stride[MAX_OPERANDS], rest = begin;
  size_t width[MAX_OPERANDS];
  for (int d = last; d >= 0; d--) {
    index[d] = rest % w->size[d];
    rest /= w->size[d];
  }
  for (int k = 0; k < w->n; k++) {
    stride[k] = w->operand[k].stride[last];
    width[k] = dtype_size(w->operand[k].dtype);
  }
  while (begin < end) {
    char *at[MAX_OPERANDS];
    for (int k = 0; k < w->n; k++) {
      int64_t offset = 0;
      for (int d = 0; d <= last; d++) offset += index[d] * w->operand[k].stride[d];
      at[k] = w->operand[k].data + offset * (int64_t)width[k];
    }
    int64_t run = w->size[last] - index[last];
    if (run > end - begin) run = end - begin;
    for (int64_t done = 0; done < run; done += BLOCK) {
      int64_t n = run - done < BLOCK ? run - done : BLOCK;
      block(w, at, stride, n);
      for (int k = 0; k < w->n; k++) at[k] += n * stride[k] * (int64_t)width[k];
    }
    begin += run;
    index[last] = 0;
    for (int d = last - 1; d >= 0 && ++index[d] == w->size[d]; d--) index[d] = 0;
  }
}

// Drops dimensions of size 1 and merges neighbours that every operand walks through evenly.
static void collapse(Walk *w) {
  int kept = 0;
  for (int d = 0; d < w->ndim; d++) {
    if (w->size[d] == 1) continue;
    bool merges = kept > 0;
    for (int k = 0; merges && k < w->n; k++)
      merges = w->operand[k].stride[kept - 1] == w->operand[k].stride[d] * w->size[d];
    if (merges) {
      w->size[kept - 1] *= w->size[d];
    } else {
      w->size[kept++] = w->size[d];
    }
    for (int k = 0; k < w->n; k++) w->operand[k].stride[kept - 1] = w->operand[k].stride[d];
  }
  if (kept == 0) {
    w->size[0] = 1;
    for (int k = 0; k < w->n; k++) w->operand[k].stride[0] = 1;
    kept = 1;
  }
  w->ndim = kept;
}

static void set_operand(Operand *operand, const Tensor *t, const Tensor *out) {
  operand->data = tensor_data(t);
  operand->dtype = t->dtype;
  int lead = out->ndim - t->ndim;
  for (int d = 0; d < out->ndim; d++) {
    bool repeats = d < lead || (t->shape[d - lead] == 1 && out->shape[d] != 1);
    operand->stride[d] = repeats ? 0 : t->stride[d - lead];
  }
}

static Compute call_compute(Form form, const KernelCall *call) {
  const Tensor *a = call->in[0];
  DType to = call->out[0]->dtype;
  if (form == WHERE) return compute_type(call->in[1]->dtype);
  if (form == LOGICAL) // each operand has a truth of its own
    return compute_type(a->dtype) == IN_I64 && compute_type(call->in[1]->dtype) == IN_I64 ? IN_I64
                                                                                          : IN_F64;
  if (form != COPY) return compute_type(a->dtype);
  Compute from = compute_type(a->dtype), into = compute_type(to);
  return from == into ? from : IN_F64;
}

static void elementwise(const KernelCall *call, Form form, int fn) {
  Walk w;
  const Tensor *out = call->out[0];
  w.form = form;
  w.fn = fn;
  w.compute = call_compute(form, call);
  w.p0 = call->args->v[0].f;
  w.p1 = call->args->v[1].f;
  w.accumulate = call->accumulate & 1;
  w.kernels = cpu_kernels();
  w.n = call->n_in + 1;
  w.ndim = out->ndim;
  int64_t numel = 1;
  for (int d = 0; d < out->ndim; d++) numel *= w.size[d] = out->shape[d];
  if (numel == 0) return;
  set_operand(&w.operand[0], out, out);
  for (int j = 0; j < call->n_in; j++) set_operand(&w.operand[j + 1], call->in[j], out);
  collapse(&w);
  parallel_for(numel, GRAIN, run_range, &w);
}

#define X(name, fn) \
  void cpu_##name(const KernelCall *call) { elementwise(call, UNARY, UNARY_##fn); }
UNARY_ROWS(X)
X(clamp, clamp)
#undef X
#define X(name, fn) \
  void cpu_##name(const KernelCall *call) { elementwise(call, BINARY, BINARY_##fn); }
BINARY_ROWS(X)
BACKWARD_ROWS(X)
#undef X
#define X(name, fn) \
  void cpu_##name(const KernelCall *call) { elementwise(call, COMPARE, COMPARE_##fn); }
COMPARE_ROWS(X)
#undef X
#define X(name, fn) \
  void cpu_##name(const KernelCall *call) { elementwise(call, LOGICAL, LOGICAL_##fn); }
LOGICAL_ROWS(X)
#undef X
void cpu_where(const KernelCall *call) { elementwise(call, WHERE, 0); }
void cpu_cast(const KernelCall *call) { elementwise(call, COPY, 0); }
void cpu_contiguous(const KernelCall *call) { elementwise(call, COPY, 0); }
void cpu_logical_not(const KernelCall *call) { elementwise(call, NOT, 0); }
void cpu_isfinite(const KernelCall *call) { elementwise(call, FINITE, 0); }
