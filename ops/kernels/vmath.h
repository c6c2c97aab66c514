// vmath - elementary functions on vectors: polynomials for f32, libm lane by lane for f64.
//
// Polynomial coefficients are least-maximum fits of our own: weighted least squares on Chebyshev
// nodes, reweighted (Lawson) until the relative error is level; degree chosen so that the fit's
// error stays below 5e-9. Errors against libm in f64 are held by tests/test_kernels.c.
#ifndef RILLE_OPS_KERNELS_VMATH_H
#define RILLE_OPS_KERNELS_VMATH_H

#include "ops/kernels/isa.h"

// ---- f32 ------------------------------------------------------------------------------------
// The lanes whose x is at least a limit, or NaN. shown: the others are 0; where the last operation
// masks them anyway, x is left as it is.
#if VECTOR_BYTES == 64
typedef __mmask16 NotBelow;
INLINE NotBelow not_below(vec_f32 x, float limit) {
  return _mm512_cmp_ps_mask(x, set1_f32(limit), _CMP_NLT_UQ);
}
INLINE vec_f32 shown(NotBelow mask, vec_f32 x) {
  (void)mask;
  return x;
}
#else
typedef mask_f32 NotBelow;
INLINE NotBelow not_below(vec_f32 x, float limit) { return ~(mask_f32)(x < set1_f32(limit)); }
INLINE vec_f32 shown(NotBelow mask, vec_f32 x) { return (vec_f32)(mask & (mask_f32)x); }
#endif

// exp: x = n ln2 + r, |r| <= ln2/2; e^r by polynomial; 2^n by its bits, in two steps so that
// results that overflow or are subnormal come out right. What is 0 in any case (masked scores, say)
// is kept from underflowing, which takes the processor a hundred cycles.
INLINE vec_f32 vexp_f32(vec_f32 x) {
  const vec_f32 magic = set1_f32(12582912.0f); // 1.5 * 2^23: adding it rounds to an integer
  NotBelow mask = not_below(x, -104.0f);
  x = min_f32(set1_f32(89.0f), shown(mask, x));
  vec_f32 shifted = fma_f32(x, set1_f32(1.44269504f), magic);
  vec_f32 n = shifted - magic;
  vec_f32 r = fma_f32(n, set1_f32(-0.693145752f), x); // ln2, upper bits
  r = fma_f32(n, set1_f32(-1.42860677e-6f), r);
  vec_f32 p = set1_f32(0.00138145592f);
  p = fma_f32(p, r, set1_f32(0.0083687352f));
  p = fma_f32(p, r, set1_f32(0.0416683890f));
  p = fma_f32(p, r, set1_f32(0.166665211f));
  p = fma_f32(p, r, set1_f32(0.499999940f));
  p = fma_f32(r * r, p, r) + set1_f32(1.0f);
#if VECTOR_BYTES == 64
  return _mm512_maskz_scalef_ps(mask, p, n);
#else
  mask_f32 exponent = (mask_f32)shifted - (mask_f32)magic;
  mask_f32 half = exponent >> 1;
  p *= (vec_f32)((half + 127) << 23);
  p *= (vec_f32)((exponent - half + 127) << 23);
  return shown(mask, p);
#endif
}

// 2^x for x below 127, nothing lost to reducing the argument; 0 below -126, where it would be
// subnormal.
INLINE vec_f32 vexp2_f32(vec_f32 x) {
  const vec_f32 magic = set1_f32(12582912.0f);
  NotBelow mask = not_below(x, -126.0f);
  x = shown(mask, x);
  vec_f32 shifted = x + magic, n = shifted - magic, r = x - n;
  vec_f32 p = set1_f32(0.00015353362f);
  p = fma_f32(p, r, set1_f32(0.0013398875f));
  p = fma_f32(p, r, set1_f32(0.00961843692f));
  p = fma_f32(p, r, set1_f32(0.0555033237f));
  p = fma_f32(p, r, set1_f32(0.240226477f));
  p = fma_f32(p, r, set1_f32(0.693147182f));
  p = fma_f32(p, r, set1_f32(1.0f));
#if VECTOR_BYTES == 64
  return _mm512_maskz_scalef_ps(mask, p, n);
#else
  return shown(mask, p * (vec_f32)((((mask_f32)shifted - (mask_f32)magic) + 127) << 23));
#endif
}

// log: x = 2^e m, m in [sqrt(1/2), sqrt(2)); log(1+f) = f - f^2/2 + f^3 P(f).
INLINE vec_f32 vlog_f32(vec_f32 x) {
  mask_f32 is_small = x < set1_f32(1.17549435e-38f);
  vec_f32 scaled = select_f32(is_small, x * set1_f32(8388608.0f), x);
  // What has no logarithm stands aside as 1: its bits would overflow below.
  mask_f32 bits = (mask_f32)select_f32(scaled > set1_f32(0.0f), scaled, set1_f32(1.0f));
  mask_f32 e = (bits - 0x3f3504f3) >> 23;
  vec_f32 f = (vec_f32)(bits - (e << 23)) - set1_f32(1.0f);
  vec_f32 exponent = __builtin_convertvector(e + (is_small & -23), vec_f32);
  vec_f32 p = set1_f32(0.0674664006f);
  p = fma_f32(p, f, set1_f32(-0.116756521f));
  p = fma_f32(p, f, set1_f32(0.118881620f));
  p = fma_f32(p, f, set1_f32(-0.124055892f));
  p = fma_f32(p, f, set1_f32(0.142195523f));
  p = fma_f32(p, f, set1_f32(-0.166679963f));
  p = fma_f32(p, f, set1_f32(0.200021192f));
  p = fma_f32(p, f, set1_f32(-0.250000089f));
  p = fma_f32(p, f, set1_f32(0.333333135f));
  vec_f32 square = f * f;
  vec_f32 y = fma_f32(exponent, set1_f32(1.42860677e-6f), p * f * square);
  y = fma_f32(square, set1_f32(-0.5f), y);
  y = fma_f32(exponent, set1_f32(0.693145752f), f + y);
  y = select_f32(x == set1_f32(0.0f), set1_f32(-INFINITY), y);
  y = select_f32(x < set1_f32(0.0f), set1_f32(NAN), y);
  return select_f32((mask_f32)(x < set1_f32(INFINITY)), y, x); // inf and NaN are their own
}

INLINE vec_f32 vsigmoid_f32(vec_f32 x) { return set1_f32(1.0f) / (set1_f32(1.0f) + vexp_f32(-x)); }

// tanh: odd polynomial below 0.625, 1 - 2 / (e^2x + 1) above.
INLINE vec_f32 vtanh_f32(vec_f32 x) {
  vec_f32 a = abs_f32(x), s = x * x;
  vec_f32 p = set1_f32(-0.00570498733f);
  p = fma_f32(p, s, set1_f32(0.0206390880f));
  p = fma_f32(p, s, set1_f32(-0.0537397154f));
  p = fma_f32(p, s, set1_f32(0.133314416f));
  p = fma_f32(p, s, set1_f32(-0.333332807f));
  vec_f32 low = fma_f32(p * s, a, a);
  vec_f32 high = set1_f32(1.0f) - set1_f32(2.0f) / (vexp_f32(a + a) + set1_f32(1.0f));
  return copysign_f32(less_f32(a, set1_f32(0.625f), low, high), x);
}

// erf: odd polynomial below 1, 1 - e^-g(x) above, g = -log erfc by polynomial.
INLINE vec_f32 verf_f32(vec_f32 x) {
  vec_f32 a = min_f32(set1_f32(3.95f), abs_f32(x)), s = a * a;
  vec_f32 p = set1_f32(7.85388256e-5f);
  p = fma_f32(p, s, set1_f32(-0.000801020069f));
  p = fma_f32(p, s, set1_f32(0.00518832868f));
  p = fma_f32(p, s, set1_f32(-0.0268538129f));
  p = fma_f32(p, s, set1_f32(0.112835854f));
  p = fma_f32(p, s, set1_f32(-0.376126260f));
  p = fma_f32(p, s, set1_f32(0.128379167f)) + set1_f32(1.0f); // 2/sqrt(pi), its 1 apart
  vec_f32 g = set1_f32(2.16867575e-5f);
  g = fma_f32(g, a, set1_f32(-0.000441335229f));
  g = fma_f32(g, a, set1_f32(0.00420455588f));
  g = fma_f32(g, a, set1_f32(-0.0252082404f));
  g = fma_f32(g, a, set1_f32(0.108418547f));
  g = fma_f32(g, a, set1_f32(0.633219898f));
  g = fma_f32(g, a, set1_f32(1.12957835f));
  g = fma_f32(g, a, set1_f32(-0.000188036836f));
  vec_f32 high = set1_f32(1.0f) - vexp_f32(-g);
  return copysign_f32(less_f32(a, set1_f32(1.0f), p * a, high), x);
}

// The standard normal distribution: e^-g(a) / 2 = erfc(a) / 2 at a = |x| / sqrt(2), g by
// polynomial; 0 beyond a = 4.15, where erfc / 2 is below 3e-9. Error 4e-8, absolute.
INLINE vec_f32 vcdf_f32(vec_f32 x) {
  vec_f32 full = abs_f32(x) * set1_f32(0.707106781f), a = min_f32(set1_f32(4.15f), full);
  vec_f32 g = set1_f32(-8.04382125e-6f);
  g = fma_f32(g, a, set1_f32(0.000106026637f));
  g = fma_f32(g, a, set1_f32(-0.000587950635f));
  g = fma_f32(g, a, set1_f32(0.00157675997f));
  g = fma_f32(g, a, set1_f32(-5.87813884e-5f));
  g = fma_f32(g, a, set1_f32(-0.0192171428f));
  g = fma_f32(g, a, set1_f32(0.102799207f));
  g = fma_f32(g, a, set1_f32(0.636616111f));
  g = fma_f32(g, a, set1_f32(1.12837934f));
  vec_f32 tail = vexp_f32(-(g * a)) * set1_f32(0.5f);
  tail = less_f32(set1_f32(4.15f), full, set1_f32(0.0f), tail);
  return less_f32(x, set1_f32(0.0f), tail, set1_f32(1.0f) - tail);
}

// ---- f64: libm, lane by lane ------------------------------------------------------------------
#define LANEWISE(name, call)                             \
  INLINE vec_f64 name(vec_f64 x) {                       \
    double lanes[LANES_f64];                             \
    store_f64(lanes, x);                                 \
    for (int i = 0; i < LANES_f64; i++) lanes[i] = call; \
    return load_f64(lanes);                              \
  }
LANEWISE(vexp_f64, exp(lanes[i]))
LANEWISE(vexp2_f64, exp2(lanes[i]))
LANEWISE(vlog_f64, log(lanes[i]))
LANEWISE(vtanh_f64, tanh(lanes[i]))
LANEWISE(verf_f64, erf(lanes[i]))
LANEWISE(vcdf_f64, 0.5 * erfc(-lanes[i] * 0.70710678118654752440))
LANEWISE(vsigmoid_f64, 1 / (1 + exp(-lanes[i])))
#undef LANEWISE

// ---- both -------------------------------------------------------------------------------------
#define LN2 0.69314718055994530942
#define LOG2_E 1.4426950408889634074
#define HALF_SQRT2 0.70710678118654752440   // sqrt(1/2)
#define INV_SQRT_2PI 0.39894228040143267794 // 1 / sqrt(2 pi)
#define SQRT_2_OVER_PI 0.79788456080286535588
#define GELU_CUBIC 0.044715 // of the tanh form (Hendrycks and Gimpel, arXiv:1606.08415 2)

#define X(R, T, I)                                                                         \
  INLINE vec_##R vrelu_##R(vec_##R x) {                                                    \
    return select_##R(x > set1_##R(0), x, select_##R(x == x, set1_##R(0), x));             \
  }                                                                                        \
  INLINE vec_##R vgelu_##R(vec_##R x) { return x * vcdf_##R(x); }                          \
  INLINE vec_##R vgelu_slope_##R(vec_##R x) {                                              \
    vec_##R density = vexp_##R(x * x * set1_##R((T)-0.5)) * set1_##R((T)INV_SQRT_2PI);     \
    return fma_##R(x, density, vcdf_##R(x));                                               \
  }                                                                                        \
  /* 0.5 x (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2/pi) (x + c x^3) */                    \
  INLINE vec_##R vgelu_tanh_gate_##R(vec_##R x) {                                          \
    const T outer = (T)(2 * SQRT_2_OVER_PI), cubic = (T)(2 * SQRT_2_OVER_PI * GELU_CUBIC); \
    return vsigmoid_##R(x * fma_##R(x * x, set1_##R(cubic), set1_##R(outer)));             \
  }                                                                                        \
  INLINE vec_##R vgelu_tanh_##R(vec_##R x) { return x * vgelu_tanh_gate_##R(x); }          \
  INLINE vec_##R vgelu_tanh_slope_##R(vec_##R x) {                                         \
    const T outer = (T)(2 * SQRT_2_OVER_PI), cubic = (T)(6 * SQRT_2_OVER_PI * GELU_CUBIC); \
    vec_##R gate = vgelu_tanh_gate_##R(x);                                                 \
    vec_##R inner = x * fma_##R(x * x, set1_##R(cubic), set1_##R(outer));                  \
    return fma_##R(inner * gate, set1_##R(1) - gate, gate);                                \
  }                                                                                        \
  INLINE vec_##R vsilu_##R(vec_##R x) { return x * vsigmoid_##R(x); }                      \
  INLINE vec_##R vsilu_slope_##R(vec_##R x) {                                              \
    vec_##R gate = vsigmoid_##R(x);                                                        \
    return fma_##R(x * gate, set1_##R(1) - gate, gate);                                    \
  }
FOR_REALS(X)
#undef X

// The largest of sign * a[n]; NaN if there is one. Four chains, for max_* waits for its result.
#define X(R, T, I)                                                                            \
  INLINE T vmax_row_##R(const T *a, int64_t n, T sign) {                                      \
    vec_##R low = set1_##R((T)-INFINITY), s = set1_##R(sign), best[4] = {low, low, low, low}; \
    mask_##R odd = {0};                                                                       \
    int64_t i = 0;                                                                            \
    for (; i + 4 * LANES_##R <= n; i += 4 * LANES_##R)                                        \
      for (int part = 0; part < 4; part++) {                                                  \
        vec_##R x = load_##R(a + i + part * LANES_##R) * s;                                   \
        odd |= (mask_##R)(x != x);                                                            \
        best[part] = max_##R(x, best[part]);                                                  \
      }                                                                                       \
    for (; i < n; i += LANES_##R) {                                                           \
      int64_t left = n - i < LANES_##R ? n - i : LANES_##R;                                   \
      vec_##R x = pad_##R(loadn_##R(a + i, left) * s, left, (T)-INFINITY);                    \
      odd |= (mask_##R)(x != x);                                                              \
      best[0] = max_##R(x, best[0]);                                                          \
    }                                                                                         \
    best[0] = max_##R(max_##R(best[0], best[1]), max_##R(best[2], best[3]));                  \
    return hmax_##R(select_##R(odd, set1_##R((T)NAN), best[0]));                              \
  }
FOR_REALS(X)
#undef X

#endif
