// elementwise - the element-wise rows and the kernel function of each: one list for shape rules and
// kernels. X(row, function of ops/kernels/kernels.h)
#ifndef RILLE_OPS_ELEMENTWISE_H
#define RILLE_OPS_ELEMENTWISE_H

// clang-format off
#define UNARY_ROWS(X) \
  X(neg, neg) X(abs, abs) X(sign, sign) X(square, square) X(reciprocal, reciprocal) X(exp, exp) \
  X(log, log) X(sqrt, sqrt) X(rsqrt, rsqrt) X(tanh, tanh) X(sigmoid, sigmoid) X(erf, erf) \
  X(relu, relu) X(gelu, gelu) X(gelu_tanh, gelu_tanh) X(silu, silu)

#define BINARY_ROWS(X) \
  X(add, add) X(sub, sub) X(mul, mul) X(div, div) X(pow, pow) X(maximum, max) X(minimum, min)

#define COMPARE_ROWS(X) X(eq, eq) X(ne, ne) X(lt, lt) X(le, le) X(gt, gt) X(ge, ge)

#define LOGICAL_ROWS(X) X(logical_and, and) X(logical_or, or) X(logical_xor, xor)

#define BOOL_BINARY_ROWS(X) COMPARE_ROWS(X) LOGICAL_ROWS(X)

#define BACKWARD_ROWS(X) \
  X(abs_bwd, abs_bwd) X(log_bwd, log_bwd) X(sqrt_bwd, sqrt_bwd) X(rsqrt_bwd, rsqrt_bwd) \
  X(tanh_bwd, tanh_bwd) X(sigmoid_bwd, sigmoid_bwd) X(erf_bwd, erf_bwd) X(relu_bwd, relu_bwd) \
  X(gelu_bwd, gelu_bwd) X(gelu_tanh_bwd, gelu_tanh_bwd) X(silu_bwd, silu_bwd) \
  X(square_bwd, square_bwd) X(reciprocal_bwd, reciprocal_bwd)
// clang-format on

#endif
