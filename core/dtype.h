// dtype - the element types of tensors and of weight files.
#ifndef RILLE_CORE_DTYPE_H
#define RILLE_CORE_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/status.h"

#ifdef __cplusplus
extern "C" {
#endif

// X(NAME, name, bytes, safetensors): every element type. bool is one byte, 0 or 1.
#define DTYPE_LIST(X)      \
  X(F32, f32, 4, "F32")    \
  X(F64, f64, 8, "F64")    \
  X(BF16, bf16, 2, "BF16") \
  X(I64, i64, 8, "I64")    \
  X(I32, i32, 4, "I32")    \
  X(U8, u8, 1, "U8")       \
  X(BOOL, bool, 1, "BOOL")

typedef enum DType {
#define X(NAME, name, bytes, safetensors) DT_##NAME,
  DTYPE_LIST(X)
#undef X
} DType;

#define X(NAME, name, bytes, safetensors) +1
enum { DTYPE_COUNT = 0 DTYPE_LIST(X) };
#undef X

// Bytes of one element.
size_t dtype_size(DType dtype);

// f32, f64 and bf16: the types that carry gradients.
static inline bool dtype_is_float(DType dtype) {
  return dtype == DT_F32 || dtype == DT_F64 || dtype == DT_BF16;
}

// A real number as an integer, everywhere the same: toward zero, the nearest end of the range for
// what does not fit, 0 for NaN. i32 and u8 keep the low bits of that.
static inline int64_t real_to_int64(double value) {
  if (value != value) return 0;
  if (value >= 9223372036854775807.0) return INT64_MAX;
  if (value <= -9223372036854775808.0) return INT64_MIN;
  return (int64_t)value;
}

// "f32", "bf16", ...: the name that users see.
const char *dtype_name(DType dtype);

// "F32", "BF16", ...: the name in a safetensors header.
const char *dtype_safetensors_name(DType dtype);

// Both name spaces are accepted ("f32", "F32"). Errors: EDTYPE naming what there is.
Status dtype_from_name(DType *out, const char *name);

#ifdef __cplusplus
}
#endif
#endif
