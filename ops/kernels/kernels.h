// kernels - the table of CPU kernels, and the level of instructions that it was chosen for.
//
// Each body is compiled once for each level (plain, avx2, avx512, amx); CPUID picks one at first
// use, the environment variable RILLE_CPU may ask for a lower one. Kernels take raw pointers,
// cannot fail, and run on the pool of threads.h; what they need checked is checked by the caller
// (ops/).
//
// Invariants:
//  1. An element of a result depends on the values it is made of alone: not on offset, alignment,
//  tail,
//     or thread count. Sums run in an order that is a function of the reduced length alone.
//  2. f32 accumulates in f32 lanes or wider; f64 in f64.
//  3. NaN goes through every function, max and min included.
//  4. Outputs must not overlap inputs, except where "in place" is said: then exactly the same
//  pointer.
//  5. `accumulate` adds to what the output holds; without it the output is written without being
//  read.
#ifndef RILLE_OPS_KERNELS_KERNELS_H
#define RILLE_OPS_KERNELS_KERNELS_H

#include "core/status.h"
#include "ops/kernels/gemm.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// clang-format off
// X(name): out = f(a). p0, p1: clamp's bounds.
#define UNARY_LIST(X) \
  X(copy) X(neg) X(abs) X(sign) X(square) X(reciprocal) X(exp) X(log) X(sqrt) X(rsqrt) X(tanh) \
  X(sigmoid) X(erf) X(relu) X(gelu) X(gelu_tanh) X(silu) X(clamp)

// X(name): out = f(a, b). The *_bwd rows take a = d(out), b = x (exp, sqrt, rsqrt, tanh and
// sigmoid: b = the forward result) and give d(x).
#define BINARY_LIST(X) \
  X(add) X(sub) X(mul) X(div) X(pow) X(max) X(min) X(abs_bwd) X(log_bwd) X(sqrt_bwd) \
  X(rsqrt_bwd) X(tanh_bwd) X(sigmoid_bwd) X(erf_bwd) X(relu_bwd) X(gelu_bwd) X(gelu_tanh_bwd) \
  X(silu_bwd) X(square_bwd) X(reciprocal_bwd)
// clang-format on

#define COMPARE_LIST(X) X(eq) X(ne) X(lt) X(le) X(gt) X(ge)

// var divides by (red - correction); logsumexp is exact for infinities.
#define REDUCE_LIST(X) X(sum) X(mean) X(max) X(min) X(logsumexp) X(var)

typedef enum UnaryFn {
#define X(name) UNARY_##name,
  UNARY_LIST(X)
#undef X
} UnaryFn;

typedef enum BinaryFn {
#define X(name) BINARY_##name,
  BINARY_LIST(X)
#undef X
} BinaryFn;

typedef enum CompareFn {
#define X(name) COMPARE_##name,
  COMPARE_LIST(X)
#undef X
} CompareFn;

typedef enum ReduceFn {
#define X(name) REDUCE_##name,
  REDUCE_LIST(X)
#undef X
} ReduceFn;

// a[outer, red, inner] -> out[outer, inner].
typedef struct Reduce {
  int64_t outer, red, inner;
  const void *a;
  void *out;
  int64_t correction; // of var
  bool accumulate;    // out += result
} Reduce;

// Rows of `columns` elements, contiguous. Unused pointers are NULL.
typedef struct Softmax {
  int64_t rows, columns;
  const void *x;       // forward: input
  void *y;             // forward: output, in place allowed
  const void *y_saved; // backward: what forward gave
  const void *dy;
  void *dx; // in place of dy allowed
  bool accumulate;
} Softmax;

// Layer norm: y = (x - mean) rstd gamma + beta; RMS norm (is_rms): y = x rstd gamma.
// rstd = 1 / sqrt(var + eps), var without correction (RMS: mean of squares).
typedef struct Norm {
  int64_t rows, columns;
  bool is_rms;
  double eps;
  const void *x;            // [rows, columns]
  const void *gamma, *beta; // [columns], each may be NULL
  void *y;                  // forward: [rows, columns], in place allowed
  void *mean, *rstd;        // [rows]; forward writes, backward reads; mean is unused by RMS norm
  const void *dy;           // backward: [rows, columns]
  void *dx;                 // backward: [rows, columns] or NULL; in place of dy allowed
  void *dgamma, *dbeta;     // backward: [columns] or NULL
  bool accumulate_dx, accumulate_params;
  void *workspace; // backward: norm_workspace(rows, columns, sizeof element) bytes, if dgamma or
                   // dbeta
} Norm;
size_t norm_workspace(int64_t rows, int64_t columns, size_t element);

// loss[r] = (1-s) nll(target) + s mean_v nll(v) + z lse^2, s = smoothing, z = z_loss; 0 if the
// target is ignore_index. Backward: dlogits[r,v] = seed[r] d loss[r] / d logits[r,v], 0 for ignored
// rows.
typedef struct CrossEntropy {
  int64_t rows, columns;  // columns: classes
  const void *logits;     // [rows, columns]
  const int64_t *targets; // [rows], ignore_index or 0 .. columns-1
  int64_t ignore_index;
  double smoothing, z_loss;
  void *loss;       // forward: [rows]
  void *lse;        // [rows]: log sum exp; forward writes, backward reads
  const void *seed; // backward: [rows], or one value for all rows if seed_is_scalar
  bool seed_is_scalar;
  void *dlogits; // backward: [rows, columns]; in place of logits allowed
  bool accumulate;
} CrossEntropy;

// Where head h of step t of sample b starts: b*batch + t*time + h*head; its D elements are
// contiguous.
typedef struct HeadStrides {
  int64_t batch, time, head;
} HeadStrides;

// Scaled dot-product attention, tile by tile (FlashAttention-2, arXiv:2307.08691): no T x S matrix.
// Query i sees key j if j <= i + S - T (causal), j > i + S - T - window (window > 0), and
// j < i + S - T + window (window > 0, not causal). A row that sees no key gives 0, its lse is -inf.
typedef struct Attention {
  int64_t B, T, S, H, Hkv, D; // Hkv divides H; query head h reads key head h / (H/Hkv); D <= 256
  const void *q, *k, *v;      // [B,T,H,D], [B,S,Hkv,D] by strides
  HeadStrides q_at, k_at, v_at;
  double scale; // of the scores
  bool causal;
  int64_t window;   // 0: none
  const void *mask; // NULL, or additive [B,H,T,S] by mask_at (0 broadcasts); same type as q
  struct {
    int64_t batch, head, row, column;
  } mask_at;
  void *out; // [B,T,H,D] by out_at; forward writes, backward reads
  HeadStrides out_at;
  void *lse;        // [B,H,T]; forward writes, backward reads; natural log
  const void *dout; // backward: like out, by dout_at
  HeadStrides dout_at;
  void *dq, *dk, *dv; // backward; by their own strides; each may be NULL
  HeadStrides dq_at, dk_at, dv_at;
  bool accumulate_dq, accumulate_dk, accumulate_dv;
  void *workspace; // backward: attention_workspace() bytes
} Attention;
// Bytes of workspace of the backward pass: linear in T.
size_t attention_workspace(const Attention *attention, size_t element);

// Rotary embedding (RoFormer, arXiv:2104.09864): turns pairs by positions[t] theta^(-2i/n_rotated).
// Pair i is (i, i + n/2), Llama's, or (2i, 2i + 1) if interleaved; elements from n_rotated on are
// copied. Backward is the same with `inverse`.
typedef struct Rope {
  int64_t B, T, H, D, n_rotated;
  const void *x; // [B,T,H,D] by x_at
  void *y;       // like x, by y_at; in place allowed
  HeadStrides x_at, y_at;
  const int64_t *positions; // [T], or NULL for first_position + t
  int64_t first_position;
  double theta;
  bool interleaved, inverse, accumulate;
} Rope;

// Dropout: y = keep ? x / (1-p) : 0. keep of element e of sample s is bit of Philox4x32-10 (Salmon
// et al., SC 2011) at counter (e / 4, s, step) under `key`, word e % 4: a function of these alone.
typedef struct Dropout {
  int64_t samples, elements; // x[samples, elements], contiguous
  const void *x;
  void *y; // in place allowed
  double p;
  uint64_t key;
  int64_t first_sample; // global index of sample 0
  int64_t step;
  // inner > 0: x holds parts of samples, its element i is (i / inner) whole + offset + i % inner.
  int64_t inner, whole, offset;
  bool accumulate;
} Dropout;

// p -= lr * update, on flat arrays. grad_scale multiplies g first (clipping, loss scale,
// averaging).
typedef struct Adamw { // Loshchilov and Hutter, arXiv:1711.05101; decay is p *= 1 - lr * decay
  int64_t n;
  void *p;
  const void *g;
  void *m, *v;
  double lr, beta1, beta2, eps, decay, grad_scale;
  int64_t step; // 1 for the first: bias corrections are 1 - beta^step
} Adamw;

typedef struct Sgd { // as PyTorch defines it: m = momentum m + (1-dampening) g, m = g at the first
                     // step
  int64_t n;
  void *p;
  const void *g;
  void *m;                                           // NULL if momentum is 0
  double lr, momentum, dampening, decay, grad_scale; // decay is added to g: g += decay * p
  bool nesterov, is_first;
} Sgd;

// X(return type, name, parameters): every kernel with a level of its own, for R in f32, f64, T its
// type.
#define CPU_KERNEL_LIST(X, R, T)                                                                 \
  X(void, gemm_##R, (const Gemm *gemm))                                                          \
  /* contiguous runs, on the calling thread; in place allowed (out == a or out == b) */          \
  X(void, unary_##R, (UnaryFn fn, T * out, const T *a, int64_t n, double p0, double p1))         \
  X(void, binary_##R, (BinaryFn fn, T * out, const T *a, const T *b, int64_t n))                 \
  X(void, compare_##R, (CompareFn fn, uint8_t * out, const T *a, const T *b, int64_t n))         \
  /* on all threads */                                                                           \
  X(void, reduce_##R, (ReduceFn fn, const Reduce *reduce))                                       \
  X(void, argmax_##R, (int64_t * out, const T *a, int64_t outer, int64_t red, int64_t inner))    \
  X(void, softmax_##R, (const Softmax *softmax))                                                 \
  X(void, softmax_bwd_##R, (const Softmax *softmax))                                             \
  X(void, log_softmax_##R, (const Softmax *softmax))                                             \
  X(void, log_softmax_bwd_##R, (const Softmax *softmax))                                         \
  X(void, norm_##R, (const Norm *norm))                                                          \
  X(void, norm_bwd_##R, (const Norm *norm))                                                      \
  X(void, cross_entropy_##R, (const CrossEntropy *loss))                                         \
  X(void, cross_entropy_bwd_##R, (const CrossEntropy *loss))                                     \
  X(void, attention_##R, (const Attention *attention))                                           \
  X(void, attention_bwd_##R, (const Attention *attention))                                       \
  X(void, rope_##R, (const Rope *rope))                                                          \
  X(void, dropout_##R, (const Dropout *dropout))                                                 \
  X(void, adamw_##R, (const Adamw *adamw))                                                       \
  X(void, sgd_##R, (const Sgd *sgd))                                                             \
  /* sum of squares in f64, in fixed blocks */                                                   \
  X(double, sum_squares_##R, (const T *a, int64_t n))                                            \
  X(void, axpy_##R, (T * y, const T *x, int64_t n, double alpha)) /* y += alpha x */             \
  X(void, scale_##R, (T * y, int64_t n, double alpha))            /* y *= alpha; 0 clears NaN */ \
  X(void, fill_##R, (T * y, int64_t n, double value))

// bf16 runs, on the calling thread: round to nearest even. multiply_adds: the yardstick of the
// benchmarks: `rounds` of independent multiply-adds in registers; returns the operations done.
#define CPU_OTHER_LIST(X)                                      \
  X(void, widen, (float *out, const uint16_t *a, int64_t n))   \
  X(void, narrow, (uint16_t * out, const float *a, int64_t n)) \
  X(double, multiply_adds, (int64_t rounds))

typedef struct CpuKernels {
  const char *level; // "plain", "avx2", "avx512", "amx"
#define X(type, name, parameters) type(*name) parameters;
  CPU_KERNEL_LIST(X, f32, float)
  CPU_KERNEL_LIST(X, f64, double)
  CPU_OTHER_LIST(X)
#undef X
} CpuKernels;

// The table for this machine, chosen once: the best level that CPUID grants, or the one that
// RILLE_CPU names (cpu_kernels_environment says whether it can).
const CpuKernels *cpu_kernels(void);

// EVALUE if RILLE_CPU names kernels that do not exist or do not run here.
Status cpu_kernels_environment(void);

// The table of a level by name, or NULL if it does not exist or this machine cannot run it.
const CpuKernels *cpu_kernels_of(const char *level);

#ifdef __cplusplus
}
#endif
#endif
