// elementwise - walks the shape in runs, buffers what is not contiguous, calls the run's kernel.
#include "ops/kernels/elementwise.h"

#include "ops/kernels/threads.h"

#include <assert.h>
#include <math.h>
#include <string.h>

enum { RUN = 1024, LONG_RUN = 16384, GRAIN = 16384 }; // elements

typedef float f32;
typedef double f64;
typedef int64_t i64;
typedef int32_t i32;
typedef uint8_t u8;

static const int64_t sizes[] = {
#define X(NAME, name, bytes, safetensors) bytes,
    DTYPE_LIST(X)
#undef X
};

// The type a dtype is computed in.
typedef enum Wide { WIDE_f32, WIDE_f64, WIDE_i64 } Wide;
static const Wide wide_of[] = {WIDE_f32, WIDE_f64, WIDE_f32, WIDE_i64,
                               WIDE_i64, WIDE_i64, WIDE_i64};
static const DType dtype_of_wide[] = {DT_F32, DT_F64, DT_I64};

typedef struct Map Map;
// One run: n elements of each operand in the type computed in.
typedef void (*RunFn)(const Map *map, int64_t n, void *out, const void *const *in);

struct Map {
  MapShape shape; // merged; the last dim is the run
  int n_operands;
  DType dtype[MAP_OPERANDS];
  DType computed[MAP_OPERANDS];
  char *data[MAP_OPERANDS];
  RunFn run;
  int fn;
  double p0, p1;
  bool accumulate;
  int64_t chunk; // elements a run is cut into
};

MapShape map_flat(int64_t n) {
  MapShape shape = {.ndim = 1, .shape = {n}};
  for (int i = 0; i < MAP_OPERANDS; i++) shape.stride[i][0] = 1;
  return shape;
}

static double bf16_value(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return (double)value;
}

// ---- loading and storing a run ------------------------------------------------------------------

// Reads n elements `stride` apart into the computed type.
static void load_run(DType dtype, void *to, const char *from, int64_t stride, int64_t n) {
  switch (dtype) {
#define LOAD(name, type, wide)                                                \
  case DT_##name:                                                             \
    for (int64_t i = 0; i < n; i++)                                           \
      ((wide *)to)[i] = (wide)((const type *)(const void *)from)[i * stride]; \
    break;
    LOAD(F32, f32, f32)
    LOAD(F64, f64, f64)
    LOAD(I64, i64, i64)
    LOAD(I32, i32, i64)
    LOAD(U8, u8, i64)
    LOAD(BOOL, u8, i64)
#undef LOAD
  case DT_BF16: {
    const uint16_t *bits = (const uint16_t *)(const void *)from;
    if (stride == 1)
      cpu_kernels()->widen(to, bits, n);
    else
      for (int64_t i = 0; i < n; i++) ((f32 *)to)[i] = (f32)bf16_value(bits[i * stride]);
    break;
  }
  }
}

static void store_run(DType dtype, char *to, int64_t stride, const void *from, int64_t n) {
  switch (dtype) {
#define STORE(name, type, wide)                                         \
  case DT_##name:                                                       \
    for (int64_t i = 0; i < n; i++)                                     \
      ((type *)(void *)to)[i * stride] = (type)((const wide *)from)[i]; \
    break;
    STORE(F32, f32, f32)
    STORE(F64, f64, f64)
    STORE(I64, i64, i64)
    STORE(I32, i32, i64)
    STORE(U8, u8, i64)
    STORE(BOOL, u8, i64)
#undef STORE
  case DT_BF16: {
    uint16_t *bits = (uint16_t *)(void *)to, run[RUN];
    assert(n <= RUN);
    cpu_kernels()->narrow(stride == 1 ? bits : run, from, n);
    if (stride != 1)
      for (int64_t i = 0; i < n; i++) bits[i * stride] = run[i];
    break;
  }
  }
}

// ---- the walk -----------------------------------------------------------------------------------

// Drops dims of size 1 and joins neighbours that every operand steps through evenly. The dim in
// which the output is contiguous goes last.
static void merge_dims(Map *map, const MapShape *from) {
  MapShape *to = &map->shape;
  int order[MAP_DIMS], n = 0;
  for (int d = 0; d < from->ndim; d++)
    if (from->shape[d] != 1) order[n++] = d;
  for (int i = 1; i < n; i++) // by the output's stride, descending
    for (int j = i; j > 0 && from->stride[0][order[j]] > from->stride[0][order[j - 1]]; j--) {
      int swap = order[j];
      order[j] = order[j - 1], order[j - 1] = swap;
    }
  to->ndim = 0;
  for (int i = 0; i < n; i++) {
    int d = order[i], last = to->ndim - 1;
    bool joins = last >= 0;
    for (int k = 0; k < map->n_operands; k++)
      joins = joins && to->stride[k][last] == from->stride[k][d] * from->shape[d];
    if (!joins) to->shape[++last] = 1, to->ndim++;
    to->shape[last] *= from->shape[d];
    for (int k = 0; k < map->n_operands; k++) to->stride[k][last] = from->stride[k][d];
  }
  if (to->ndim == 0) {
    to->ndim = 1;
    to->shape[0] = 1;
    for (int k = 0; k < map->n_operands; k++) to->stride[k][0] = 1;
  }
}

// n elements of the last dim, from `at` (in elements from each operand's start).
static void do_run(const Map *map, const int64_t *at, int64_t n) {
  _Alignas(64) char buffer[MAP_OPERANDS][RUN * 8];
  const void *in[MAP_OPERANDS];
  int last = map->shape.ndim - 1;
  int64_t stride[MAP_OPERANDS], step = n;
  bool direct[MAP_OPERANDS], filled[MAP_OPERANDS] = {false};
  for (int k = 0; k < map->n_operands; k++) {
    stride[k] = map->shape.stride[k][last];
    direct[k] = stride[k] == 1 && map->dtype[k] == map->computed[k];
    if (!direct[k] || map->accumulate) step = n < RUN ? n : RUN;
  }
  for (int64_t i = 0; i < n; i += step) {
    int64_t count = n - i < step ? n - i : step;
    char *out = map->data[0] + (at[0] + i * stride[0]) * sizes[map->dtype[0]];
    for (int k = 1; k < map->n_operands; k++) {
      const char *from = map->data[k] + (at[k] + i * stride[k]) * sizes[map->dtype[k]];
      in[k - 1] = direct[k] ? from : buffer[k];
      if (direct[k] || (stride[k] == 0 && filled[k])) continue;
      load_run(map->dtype[k], buffer[k], from, stride[k], count);
      filled[k] = true;
    }
    bool is_direct = direct[0] && !map->accumulate;
    map->run(map, count, is_direct ? out : buffer[0], in);
    if (map->accumulate) {
      Wide wide = wide_of[map->dtype[0]];
      const void *old = out;
      _Alignas(64) char before[RUN * 8];
      if (!direct[0]) {
        load_run(map->dtype[0], before, out, stride[0], count);
        old = before;
      }
      if (wide == WIDE_f32)
        cpu_kernels()->binary_f32(BINARY_add, (f32 *)(void *)buffer[0], old,
                                  (f32 *)(void *)buffer[0], count);
      else if (wide == WIDE_f64)
        cpu_kernels()->binary_f64(BINARY_add, (f64 *)(void *)buffer[0], old,
                                  (f64 *)(void *)buffer[0], count);
      else
        for (int64_t j = 0; j < count; j++)
          ((uint64_t *)(void *)buffer[0])[j] += ((const uint64_t *)old)[j];
    }
    if (!is_direct) store_run(map->dtype[0], out, stride[0], buffer[0], count);
  }
}

// Pieces [begin, end): a piece is map->chunk elements of one run.
static void do_pieces(void *context, int64_t begin, int64_t end) {
  const Map *map = context;
  int last = map->shape.ndim - 1;
  int64_t length = map->shape.shape[last], pieces = (length + map->chunk - 1) / map->chunk;
  for (int64_t piece = begin; piece < end; piece++) {
    int64_t row = piece / pieces, start = piece % pieces * map->chunk, at[MAP_OPERANDS];
    for (int k = 0; k < map->n_operands; k++) at[k] = start * map->shape.stride[k][last];
    for (int d = last - 1; d >= 0; d--) {
      int64_t index = row % map->shape.shape[d];
      row /= map->shape.shape[d];
      for (int k = 0; k < map->n_operands; k++) at[k] += index * map->shape.stride[k][d];
    }
    do_run(map, at, length - start < map->chunk ? length - start : map->chunk);
  }
}

static void do_map(Map *map, const MapShape *shape) {
  int64_t rows = 1;
  for (int d = 0; d < shape->ndim; d++)
    if (shape->shape[d] == 0) return;
  merge_dims(map, shape);
  int last = map->shape.ndim - 1;
  for (int d = 0; d < last; d++) rows *= map->shape.shape[d];
  int64_t length = map->shape.shape[last];
  map->chunk = LONG_RUN;
  int64_t pieces = (length + map->chunk - 1) / map->chunk;
  int64_t each = length < map->chunk ? length : map->chunk;
  parallel_for(rows * pieces, GRAIN / each < 1 ? 1 : GRAIN / each, do_pieces, map);
}

static void set_operand(Map *map, int k, DType dtype, const void *data) {
  map->dtype[k] = dtype;
  map->computed[k] = dtype_of_wide[wide_of[dtype]];
  memcpy(&map->data[k], &data, sizeof data); // the output's constness is its caller's
  if (map->n_operands <= k) map->n_operands = k + 1;
}

// ---- functions of a run -------------------------------------------------------------------------

static int64_t unary_int(UnaryFn fn, int64_t x, const Map *map) {
  if (fn == UNARY_copy) return x;
  if (fn == UNARY_neg) return (int64_t)(0 - (uint64_t)x);
  if (fn == UNARY_abs) return x < 0 ? (int64_t)(0 - (uint64_t)x) : x;
  if (fn == UNARY_sign) return (x > 0) - (x < 0);
  if (fn == UNARY_square) return (int64_t)((uint64_t)x * (uint64_t)x);
  if (fn == UNARY_relu) return x > 0 ? x : 0;
  assert(fn == UNARY_clamp);
  if ((double)x < map->p0) return (int64_t)map->p0;
  return (double)x > map->p1 ? (int64_t)map->p1 : x;
}

static void run_unary(const Map *map, int64_t n, void *out, const void *const *in) {
  switch (wide_of[map->dtype[0]]) {
  case WIDE_f32: cpu_kernels()->unary_f32((UnaryFn)map->fn, out, in[0], n, map->p0, map->p1); break;
  case WIDE_f64: cpu_kernels()->unary_f64((UnaryFn)map->fn, out, in[0], n, map->p0, map->p1); break;
  case WIDE_i64:
    for (int64_t i = 0; i < n; i++)
      ((i64 *)out)[i] = unary_int((UnaryFn)map->fn, ((const i64 *)in[0])[i], map);
    break;
  }
}

static int64_t power_int(int64_t base, int64_t exponent) {
  if (exponent < 0) return base == 1 ? 1 : base == -1 ? (exponent % 2 ? -1 : 1) : 0;
  uint64_t result = 1, square = (uint64_t)base;
  for (; exponent; exponent >>= 1, square *= square)
    if (exponent & 1) result *= square;
  return (int64_t)result;
}

static int64_t binary_int(BinaryFn fn, int64_t x, int64_t y) {
  if (fn == BINARY_add) return (int64_t)((uint64_t)x + (uint64_t)y);
  if (fn == BINARY_sub) return (int64_t)((uint64_t)x - (uint64_t)y);
  if (fn == BINARY_mul) return (int64_t)((uint64_t)x * (uint64_t)y);
  if (fn == BINARY_div) return y == 0 ? 0 : y == -1 ? (int64_t)(0 - (uint64_t)x) : x / y;
  if (fn == BINARY_pow) return power_int(x, y);
  if (fn == BINARY_max) return x > y ? x : y;
  assert(fn == BINARY_min);
  return x < y ? x : y;
}

static void run_binary(const Map *map, int64_t n, void *out, const void *const *in) {
  switch (wide_of[map->dtype[0]]) {
  case WIDE_f32: cpu_kernels()->binary_f32((BinaryFn)map->fn, out, in[0], in[1], n); break;
  case WIDE_f64: cpu_kernels()->binary_f64((BinaryFn)map->fn, out, in[0], in[1], n); break;
  case WIDE_i64:
    for (int64_t i = 0; i < n; i++)
      ((i64 *)out)[i] =
          binary_int((BinaryFn)map->fn, ((const i64 *)in[0])[i], ((const i64 *)in[1])[i]);
    break;
  }
}

static void compare_int(CompareFn fn, u8 *out, const i64 *a, const i64 *b, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    bool less = a[i] < b[i], equal = a[i] == b[i], result = false;
    switch (fn) {
    case COMPARE_eq: result = equal; break;
    case COMPARE_ne: result = !equal; break;
    case COMPARE_lt: result = less; break;
    case COMPARE_le: result = less || equal; break;
    case COMPARE_gt: result = !less && !equal; break;
    case COMPARE_ge: result = !less; break;
    }
    out[i] = result;
  }
}

static void run_compare(const Map *map, int64_t n, void *out, const void *const *in) {
  switch (wide_of[map->dtype[1]]) {
  case WIDE_f32: cpu_kernels()->compare_f32((CompareFn)map->fn, out, in[0], in[1], n); break;
  case WIDE_f64: cpu_kernels()->compare_f64((CompareFn)map->fn, out, in[0], in[1], n); break;
  case WIDE_i64: compare_int((CompareFn)map->fn, out, in[0], in[1], n); break;
  }
}

static void run_logic(const Map *map, int64_t n, void *out, const void *const *in) {
  const u8 *a = in[0], *b = in[1];
  u8 *to = out;
  for (int64_t i = 0; i < n; i++) switch ((LogicFn)map->fn) {
    case LOGIC_and: to[i] = a[i] & b[i]; break;
    case LOGIC_or: to[i] = a[i] | b[i]; break;
    case LOGIC_xor: to[i] = a[i] ^ b[i]; break;
    case LOGIC_not: to[i] = !a[i]; break;
    }
}

static void run_where(const Map *map, int64_t n, void *out, const void *const *in) {
  const u8 *cond = in[0];
  switch (wide_of[map->dtype[0]]) {
#define WHERE(type)                                                                     \
  case WIDE_##type:                                                                     \
    for (int64_t i = 0; i < n; i++)                                                     \
      ((type *)out)[i] = cond[i] ? ((const type *)in[1])[i] : ((const type *)in[2])[i]; \
    break;
    WHERE(f32)
    WHERE(f64)
    WHERE(i64)
#undef WHERE
  }
}

// Towards zero, saturated to [low, high]; NaN gives 0.
static int64_t to_int(double x, DType dtype) {
  double low = -9223372036854775808.0, high = 9223372036854775807.0;
  if (dtype == DT_I32) low = -2147483648.0, high = 2147483647.0;
  if (dtype == DT_U8) low = 0, high = 255;
  if (!(x == x)) return 0;
  if (x <= low) return dtype == DT_I64 ? INT64_MIN : (int64_t)low;
  if (x >= high) return dtype == DT_I64 ? INT64_MAX : (int64_t)high;
  return (int64_t)x;
}

static void run_cast(const Map *map, int64_t n, void *out, const void *const *in) {
  DType to = map->dtype[0];
  Wide from = wide_of[map->dtype[1]], wide = wide_of[to];
  for (int64_t i = 0; i < n; i++) {
    i64 whole = from == WIDE_i64 ? ((const i64 *)in[0])[i] : 0;
    f64 real = from == WIDE_f32   ? (f64)((const f32 *)in[0])[i]
               : from == WIDE_f64 ? ((const f64 *)in[0])[i]
                                  : (f64)whole;
    if (to == DT_BOOL)
      ((i64 *)out)[i] = from == WIDE_i64 ? whole != 0 : real != 0;
    else if (wide == WIDE_i64)
      ((i64 *)out)[i] = from == WIDE_i64 ? whole : to_int(real, to);
    else if (wide == WIDE_f32)
      ((f32 *)out)[i] = from == WIDE_i64 ? (f32)whole : (f32)real;
    else
      ((f64 *)out)[i] = real;
  }
}

static void run_copy(const Map *map, int64_t n, void *out, const void *const *in) {
  memmove(out, in[0], (size_t)(n * sizes[map->computed[0]]));
}

// ---- what others call ---------------------------------------------------------------------------

void map_unary(UnaryFn fn, DType dtype, const MapShape *shape, void *out, const void *a, double p0,
               double p1, bool accumulate) {
  Map map = {.run = run_unary, .fn = (int)fn, .p0 = p0, .p1 = p1, .accumulate = accumulate};
  set_operand(&map, 0, dtype, out);
  set_operand(&map, 1, dtype, a);
  do_map(&map, shape);
}

void map_binary(BinaryFn fn, DType dtype, const MapShape *shape, void *out, const void *a,
                const void *b, bool accumulate) {
  Map map = {.run = run_binary, .fn = (int)fn, .accumulate = accumulate};
  set_operand(&map, 0, dtype, out);
  set_operand(&map, 1, dtype, a);
  set_operand(&map, 2, dtype, b);
  do_map(&map, shape);
}

// Results of one byte are computed as bytes.
static void set_bytes(Map *map, int k, const void *data) {
  set_operand(map, k, DT_BOOL, data);
  map->dtype[k] = map->computed[k] = DT_BOOL;
}

void map_compare(CompareFn fn, DType dtype, const MapShape *shape, void *out, const void *a,
                 const void *b) {
  Map map = {.run = run_compare, .fn = (int)fn};
  set_bytes(&map, 0, out);
  set_operand(&map, 1, dtype, a);
  set_operand(&map, 2, dtype, b);
  do_map(&map, shape);
}

void map_logic(LogicFn fn, const MapShape *shape, void *out, const void *a, const void *b) {
  Map map = {.run = run_logic, .fn = (int)fn};
  set_bytes(&map, 0, out);
  set_bytes(&map, 1, a);
  set_bytes(&map, 2, fn == LOGIC_not ? a : b);
  MapShape copy = *shape;
  if (fn == LOGIC_not) memcpy(copy.stride[2], copy.stride[1], sizeof copy.stride[1]);
  do_map(&map, &copy);
}

void map_where(DType dtype, const MapShape *shape, void *out, const void *cond, const void *a,
               const void *b) {
  Map map = {.run = run_where};
  set_operand(&map, 0, dtype, out);
  set_bytes(&map, 1, cond);
  set_operand(&map, 2, dtype, a);
  set_operand(&map, 3, dtype, b);
  do_map(&map, shape);
}

void map_cast(DType to, DType from, const MapShape *shape, void *out, const void *a) {
  Map map = {.run = to == from ? run_copy : run_cast};
  set_operand(&map, 0, to, out);
  set_operand(&map, 1, from, a);
  do_map(&map, shape);
}

// ---- reductions of bool and integers ------------------------------------------------------------

typedef struct Fold {
  uint8_t *out;
  const uint8_t *a;
  int64_t red, inner;
  bool is_all;
} Fold;

static void fold_items(void *context, int64_t begin, int64_t end) {
  const Fold *fold = context;
  for (int64_t at = begin; at < end; at++) {
    const uint8_t *a = fold->a + at / fold->inner * fold->red * fold->inner + at % fold->inner;
    bool result = fold->is_all;
    for (int64_t r = 0; r < fold->red && result == fold->is_all; r++)
      result = a[r * fold->inner] != 0;
    fold->out[at] = result;
  }
}

void reduce_any(uint8_t *out, const uint8_t *a, int64_t outer, int64_t red, int64_t inner) {
  Fold fold = {out, a, red, inner, false};
  parallel_for(outer * inner, GRAIN / (red + 1) + 1, fold_items, &fold);
}

void reduce_all(uint8_t *out, const uint8_t *a, int64_t outer, int64_t red, int64_t inner) {
  Fold fold = {out, a, red, inner, true};
  parallel_for(outer * inner, GRAIN / (red + 1) + 1, fold_items, &fold);
}

typedef struct SumInt {
  int64_t *out;
  const char *a;
  DType dtype;
  int64_t red, inner;
} SumInt;

static void sum_int_items(void *context, int64_t begin, int64_t end) {
  const SumInt *sum = context;
  int64_t size = sizes[sum->dtype], run[RUN];
  for (int64_t at = begin; at < end; at++) {
    const char *a = sum->a + (at / sum->inner * sum->red * sum->inner + at % sum->inner) * size;
    uint64_t total = 0;
    for (int64_t r = 0; r < sum->red; r += RUN) {
      int64_t n = sum->red - r < RUN ? sum->red - r : RUN;
      load_run(sum->dtype, run, a + r * sum->inner * size, sum->inner, n);
      for (int64_t i = 0; i < n; i++) total += (uint64_t)run[i];
    }
    sum->out[at] = (int64_t)total;
  }
}

void reduce_sum_int(int64_t *out, DType dtype, const void *a, int64_t outer, int64_t red,
                    int64_t inner) {
  SumInt sum = {out, a, dtype, red, inner};
  parallel_for(outer * inner, GRAIN / (red + 1) + 1, sum_int_items, &sum);
}
