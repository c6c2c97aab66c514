// elementwise - maps over strided arrays of any dtype, by the kernels for contiguous runs.
//
// Operands share one shape; a stride of 0 broadcasts. Whatever does not lie contiguously, or is not
// of the type computed in, is brought into a buffer of a few KiB first: one mechanism for
// broadcasting, transposed views and narrow types. f32 and bf16 compute in f32, f64 in f64,
// integers and bool in i64 (results wrap; div of integers rounds towards zero and gives 0 for a
// divisor of 0).
//
// Invariant: an element's result depends on its operands' values alone.
#ifndef RILLE_OPS_KERNELS_ELEMENTWISE_H
#define RILLE_OPS_KERNELS_ELEMENTWISE_H

#include "core/dtype.h"
#include "ops/kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

#define X(name) +1
enum {
  MAP_DIMS = 8,
  MAP_OPERANDS = 4,
  N_UNARY_FNS = 0 UNARY_LIST(X),
  N_BINARY_FNS = 0 BINARY_LIST(X)
};
#undef X

// A shape and, for each operand, its strides in elements: operand 0 is the output.
typedef struct MapShape {
  int ndim; // 0 .. MAP_DIMS
  int64_t shape[MAP_DIMS];
  int64_t stride[MAP_OPERANDS][MAP_DIMS];
} MapShape;

// The shape of n contiguous elements for all operands.
MapShape map_flat(int64_t n);

// out = fn(a), of one dtype; p0 and p1 are clamp's bounds. accumulate: out += fn(a). In place
// allowed. Integers: copy neg abs sign square relu clamp only.
void map_unary(UnaryFn fn, DType dtype, const MapShape *shape, void *out, const void *a, double p0,
               double p1, bool accumulate);

// out = fn(a, b), of one dtype. Integers: add sub mul div pow max min only.
void map_binary(BinaryFn fn, DType dtype, const MapShape *shape, void *out, const void *a,
                const void *b, bool accumulate);

// out (bool) = a fn b, both of dtype.
void map_compare(CompareFn fn, DType dtype, const MapShape *shape, void *out, const void *a,
                 const void *b);

typedef enum LogicFn { LOGIC_and, LOGIC_or, LOGIC_xor, LOGIC_not } LogicFn;

// out (bool) = a fn b, both bool; LOGIC_not ignores b (may be NULL).
void map_logic(LogicFn fn, const MapShape *shape, void *out, const void *a, const void *b);

// out = cond ? a : b; operands out, cond (bool), a, b.
void map_where(DType dtype, const MapShape *shape, void *out, const void *cond, const void *a,
               const void *b);

// out (dtype `to`) = a (dtype `from`). To bool: a != 0. Float to integer: towards zero, saturated,
// NaN gives 0. The same dtype: a copy, of any layout.
void map_cast(DType to, DType from, const MapShape *shape, void *out, const void *a);

// out[outer, inner] (bool) = any or all over red of a[outer, red, inner] (bool).
void reduce_any(uint8_t *out, const uint8_t *a, int64_t outer, int64_t red, int64_t inner);
void reduce_all(uint8_t *out, const uint8_t *a, int64_t outer, int64_t red, int64_t inner);
// out[outer, inner] = sum of integers of a dtype (i64, i32, u8, bool).
void reduce_sum_int(int64_t *out, DType dtype, const void *a, int64_t outer, int64_t red,
                    int64_t inner);

#ifdef __cplusplus
}
#endif
#endif
