// isa - the vector layer that kernel bodies (*.isa.c) are written against: one source, compiled
// once for each instruction set, with the names of its functions suffixed by it.
//
// Invariants:
//  1. loadn/storen touch exactly n <= lanes elements; the missing lanes read as zero. A tail goes
//     through the same instructions as the body.
//  2. Multiply-adds are written as fma_*: nothing is left to the compiler's contraction, so an
//     expression has the same bits wherever it is inlined.
//  3. max_*(a, b) and min_*(a, b) give b if either is NaN (as the x86 instructions do).
#ifndef RILLE_OPS_KERNELS_ISA_H
#define RILLE_OPS_KERNELS_ISA_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define PASTE2(a, b) a##_##b
#define PASTE(a, b) PASTE2(a, b)
#define KERNEL(name) PASTE(name, ISA) // softmax_f32 -> softmax_f32_avx2
#define INLINE static inline __attribute__((always_inline, unused))

#if defined __AVX512F__ && defined __AVX512VL__ && defined __AVX512DQ__
#define VECTOR_BYTES 64
#include <immintrin.h>
#elif defined __AVX2__ && defined __FMA__
#define VECTOR_BYTES 32
#include <immintrin.h>
#else
#define VECTOR_BYTES 16
#endif
// Before a return to other code, where a function takes or gives wide vectors: the compiler then
// leaves their upper halves dirty, which costs the SSE code that follows 200 ns.
#if VECTOR_BYTES > 16
#define CLEAN_UPPER() _mm256_zeroupper()
#else
#define CLEAN_UPPER() ((void)0)
#endif
#define LANES_f32 (VECTOR_BYTES / 4)
#define LANES_f64 (VECTOR_BYTES / 8)

typedef float vec_f32 __attribute__((vector_size(VECTOR_BYTES)));
typedef double vec_f64 __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t mask_f32 __attribute__((vector_size(VECTOR_BYTES)));
typedef int64_t mask_f64 __attribute__((vector_size(VECTOR_BYTES)));
typedef float loose_f32 __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef double loose_f64 __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));

#define FOR_REALS(X) X(f32, float, int32_t) X(f64, double, int64_t)

#define X(R, T, I)                                                                              \
  INLINE vec_##R load_##R(const T *p) { return (vec_##R) * (const loose_##R *)p; }              \
  INLINE void store_##R(T *p, vec_##R v) { *(loose_##R *)p = (loose_##R)v; }                    \
  INLINE vec_##R select_##R(mask_##R m, vec_##R a, vec_##R b) {                                 \
    return (vec_##R)((m & (mask_##R)a) | (~m & (mask_##R)b));                                   \
  }                                                                                             \
  INLINE vec_##R abs_##R(vec_##R a) {                                                           \
    return (vec_##R)((mask_##R)a & (mask_##R)(((mask_##R){0} - 1) ^ sign_##R));                 \
  }                                                                                             \
  /* |a| with the sign of b */                                                                  \
  INLINE vec_##R copysign_##R(vec_##R a, vec_##R b) {                                           \
    return (vec_##R)(((mask_##R)a & ~(mask_##R)sign_##R) | ((mask_##R)b & (mask_##R)sign_##R)); \
  }
#define sign_f32 (((mask_f32){0} + 1) << 31)
#define sign_f64 (((mask_f64){0} + 1) << 63)
FOR_REALS(X)
#undef X

#if VECTOR_BYTES == 64
INLINE vec_f32 set1_f32(float s) { return (vec_f32)_mm512_set1_ps(s); }
INLINE vec_f64 set1_f64(double s) { return (vec_f64)_mm512_set1_pd(s); }
INLINE vec_f32 fma_f32(vec_f32 a, vec_f32 b, vec_f32 c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vec_f64 fma_f64(vec_f64 a, vec_f64 b, vec_f64 c) { return _mm512_fmadd_pd(a, b, c); }
INLINE vec_f32 max_f32(vec_f32 a, vec_f32 b) { return _mm512_max_ps(a, b); }
INLINE vec_f64 max_f64(vec_f64 a, vec_f64 b) { return _mm512_max_pd(a, b); }
INLINE vec_f32 min_f32(vec_f32 a, vec_f32 b) { return _mm512_min_ps(a, b); }
INLINE vec_f64 min_f64(vec_f64 a, vec_f64 b) { return _mm512_min_pd(a, b); }
INLINE vec_f32 sqrt_f32(vec_f32 a) { return _mm512_sqrt_ps(a); }
INLINE vec_f64 sqrt_f64(vec_f64 a) { return _mm512_sqrt_pd(a); }
INLINE vec_f32 loadn_f32(const float *p, int64_t n) {
  return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}
INLINE vec_f64 loadn_f64(const double *p, int64_t n) {
  return _mm512_maskz_loadu_pd((__mmask8)((1u << n) - 1), p);
}
INLINE void storen_f32(float *p, int64_t n, vec_f32 v) {
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), v);
}
INLINE void storen_f64(double *p, int64_t n, vec_f64 v) {
  _mm512_mask_storeu_pd(p, (__mmask8)((1u << n) - 1), v);
}
#else
#define X(R, T, I)                                     \
  INLINE vec_##R loadn_##R(const T *p, int64_t n) {    \
    T lanes[LANES_##R] = {0};                          \
    for (int64_t i = 0; i < n; i++) lanes[i] = p[i];   \
    return load_##R(lanes);                            \
  }                                                    \
  INLINE void storen_##R(T *p, int64_t n, vec_##R v) { \
    T lanes[LANES_##R];                                \
    store_##R(lanes, v);                               \
    for (int64_t i = 0; i < n; i++) p[i] = lanes[i];   \
  }
FOR_REALS(X)
#undef X
#if VECTOR_BYTES == 32
INLINE vec_f32 set1_f32(float s) { return (vec_f32)_mm256_set1_ps(s); }
INLINE vec_f64 set1_f64(double s) { return (vec_f64)_mm256_set1_pd(s); }
INLINE vec_f32 fma_f32(vec_f32 a, vec_f32 b, vec_f32 c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vec_f64 fma_f64(vec_f64 a, vec_f64 b, vec_f64 c) { return _mm256_fmadd_pd(a, b, c); }
INLINE vec_f32 max_f32(vec_f32 a, vec_f32 b) { return _mm256_max_ps(a, b); }
INLINE vec_f64 max_f64(vec_f64 a, vec_f64 b) { return _mm256_max_pd(a, b); }
INLINE vec_f32 min_f32(vec_f32 a, vec_f32 b) { return _mm256_min_ps(a, b); }
INLINE vec_f64 min_f64(vec_f64 a, vec_f64 b) { return _mm256_min_pd(a, b); }
INLINE vec_f32 sqrt_f32(vec_f32 a) { return _mm256_sqrt_ps(a); }
INLINE vec_f64 sqrt_f64(vec_f64 a) { return _mm256_sqrt_pd(a); }
#else
INLINE vec_f32 set1_f32(float s) { return (vec_f32){s, s, s, s}; }
INLINE vec_f64 set1_f64(double s) { return (vec_f64){s, s}; }
#define X(R, T, I)                                                                 \
  INLINE vec_##R fma_##R(vec_##R a, vec_##R b, vec_##R c) { return a * b + c; }    \
  INLINE vec_##R max_##R(vec_##R a, vec_##R b) { return select_##R(a > b, a, b); } \
  INLINE vec_##R min_##R(vec_##R a, vec_##R b) { return select_##R(a < b, a, b); }
FOR_REALS(X)
#undef X
INLINE vec_f32 sqrt_f32(vec_f32 a) {
  for (int i = 0; i < LANES_f32; i++) a[i] = sqrtf(a[i]);
  return a;
}
INLINE vec_f64 sqrt_f64(vec_f64 a) {
  for (int i = 0; i < LANES_f64; i++) a[i] = sqrt(a[i]);
  return a;
}
#endif
#endif

// a < b ? x : y, lane by lane.
#if VECTOR_BYTES == 64
INLINE vec_f32 less_f32(vec_f32 a, vec_f32 b, vec_f32 x, vec_f32 y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
INLINE vec_f64 less_f64(vec_f64 a, vec_f64 b, vec_f64 x, vec_f64 y) {
  return _mm512_mask_blend_pd(_mm512_cmp_pd_mask(a, b, _CMP_LT_OQ), y, x);
}
#else
INLINE vec_f32 less_f32(vec_f32 a, vec_f32 b, vec_f32 x, vec_f32 y) {
  return select_f32(a < b, x, y);
}
INLINE vec_f64 less_f64(vec_f64 a, vec_f64 b, vec_f64 x, vec_f64 y) {
  return select_f64(a < b, x, y);
}
#endif

// One lane's multiply-add, with the rounding of fma_*.
#if VECTOR_BYTES > 16
INLINE float fma1_f32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
INLINE double fma1_f64(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
INLINE float fma1_f32(float a, float b, float c) { return a * b + c; }
INLINE double fma1_f64(double a, double b, double c) { return a * b + c; }
#endif

// Horizontal sum: upper half to lower half until one lane is left.
#if VECTOR_BYTES > 16
#if VECTOR_BYTES == 64
INLINE __m256 halves_f32(vec_f32 v) {
  return _mm512_castps512_ps256(v) + _mm512_extractf32x8_ps(v, 1);
}
INLINE __m256d halves_f64(vec_f64 v) {
  return _mm512_castpd512_pd256(v) + _mm512_extractf64x4_pd(v, 1);
}
#else
INLINE __m256 halves_f32(vec_f32 v) { return v; }
INLINE __m256d halves_f64(vec_f64 v) { return v; }
#endif
INLINE float hsum_f32(vec_f32 v) {
  __m256 eight = halves_f32(v);
  __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
  __m128 two = four + _mm_movehl_ps(four, four);
  return two[0] + two[1];
}
INLINE double hsum_f64(vec_f64 v) {
  __m256d four = halves_f64(v);
  __m128d two = _mm256_castpd256_pd128(four) + _mm256_extractf128_pd(four, 1);
  return two[0] + two[1];
}
#else
#define X(R, T, I)                                                \
  INLINE T hsum_##R(vec_##R v) {                                  \
    T lanes[LANES_##R];                                           \
    store_##R(lanes, v);                                          \
    for (int half = LANES_##R / 2; half > 0; half /= 2)           \
      for (int i = 0; i < half; i++) lanes[i] += lanes[i + half]; \
    return lanes[0];                                              \
  }
FOR_REALS(X)
#undef X
#endif

// Horizontal maximum; NaN if there is one.
#define X(R, T, I)                                                  \
  INLINE T hmax_##R(vec_##R v) {                                    \
    T lanes[LANES_##R];                                             \
    store_##R(lanes, v);                                            \
    T best = lanes[0];                                              \
    for (int i = 1; i < LANES_##R; i++)                             \
      if (lanes[i] > best || lanes[i] != lanes[i]) best = lanes[i]; \
    return best;                                                    \
  }                                                                 \
  /* a with lanes >= n replaced by fill */                          \
  INLINE vec_##R pad_##R(vec_##R a, int64_t n, T fill) {            \
    vec_##R index = load_##R(lane_index_##R);                       \
    return select_##R(index < set1_##R((T)n), a, set1_##R(fill));   \
  }
static const float lane_index_f32[16]
    __attribute__((unused)) = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
static const double lane_index_f64[8] __attribute__((unused)) = {0, 1, 2, 3, 4, 5, 6, 7};
FOR_REALS(X)
#undef X

#endif
