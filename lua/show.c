// show - values of tensors as text and as Lua tables.
//
//    f32[2, 3]
//      [[ 1.0000,  2.5000, -3.0000],
//       [ 0.0000,  1.0000,  4.0000]]
//
// A large tensor shows the first and last three along each dimension.
#include "lua/binding.h"

#include "core/weights.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { EDGE = 3, SHOWN_WHOLE = 200, CELL = 32 };

static double element(const Tensor *t, int64_t at) {
  const void *p = (const char *)t->storage->data + (size_t)at * dtype_size(t->dtype);
  switch (t->dtype) {
  case DT_F32: return (double)*(const float *)p;
  case DT_F64: return *(const double *)p;
  case DT_BF16: {
    uint32_t bits = (uint32_t) * (const uint16_t *)p << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
  }
  case DT_I64: return (double)*(const int64_t *)p;
  case DT_I32: return (double)*(const int32_t *)p;
  case DT_U8:
  case DT_BOOL: return (double)*(const uint8_t *)p;
  }
  return 0;
}

void push_element(lua_State *L, const Tensor *t, int64_t at) {
  switch (t->dtype) {
  case DT_F32:
  case DT_F64:
  case DT_BF16: lua_pushnumber(L, element(t, at)); break;
  case DT_I64: lua_pushinteger(L, ((const int64_t *)t->storage->data)[at]); break;
  case DT_I32:
  case DT_U8: lua_pushinteger(L, (lua_Integer)element(t, at)); break;
  case DT_BOOL: lua_pushboolean(L, element(t, at) != 0); break;
  }
}

static void push_nested(lua_State *L, const Tensor *t, int d, int64_t at) {
  if (d == t->ndim) {
    push_element(L, t, at);
    return;
  }
  luaL_checkstack(L, 3, "nested tables");
  lua_createtable(L, (int)t->shape[d], 0);
  for (int64_t i = 0; i < t->shape[d]; i++) {
    push_nested(L, t, d + 1, at + i * t->stride[d]);
    lua_rawseti(L, -2, i + 1);
  }
}

static void check_values(lua_State *L, Rille *r, Tensor *t) {
  check_status(L, r, tensor_alive(t));
  if (tensor_is_meta(t))
    check_status(L, r, fail(ST_EDEVICE, "a tensor on the meta device has a shape but no values"));
  if (!t->storage) check_status(L, r, param_place(r->ctx, t->param));
}

int tensor_tolist(lua_State *L) {
  Rille *r = binding_of(L);
  Tensor *t = tensor_check(L, r, 1, "tolist: the argument");
  check_values(L, r, t);
  push_nested(L, t, 0, t->offset);
  return 1;
}

// How numbers of one tensor look: all alike.
typedef struct Look {
  const Tensor *t;
  bool whole;     // print short
  bool integers;  // no fraction anywhere
  bool exponents; // too large or too small for four decimals
  int width;
} Look;

static void format_cell(char cell[CELL], const Look *look, int64_t at) {
  double value = element(look->t, at);
  if (look->t->dtype == DT_BOOL)
    snprintf(cell, CELL, "%s", value != 0 ? "true" : "false");
  else if (look->t->dtype == DT_I64) // not all of them are doubles
    snprintf(cell, CELL, "%" PRId64, ((const int64_t *)look->t->storage->data)[at]);
  else if (look->t->dtype == DT_I32 || look->t->dtype == DT_U8)
    snprintf(cell, CELL, "%.0f", value);
  else if (!isfinite(value))
    snprintf(cell, CELL, "%s", isnan(value) ? "nan" : value > 0 ? "inf" : "-inf");
  else if (look->exponents)
    snprintf(cell, CELL, "%.4e", value);
  else
    snprintf(cell, CELL, look->integers ? "%.1f" : "%.4f", value);
}

static int64_t next_shown(const Look *look, int d, int64_t i) {
  int64_t n = look->t->shape[d];
  return !look->whole && n > 2 * EDGE && i == EDGE - 1 ? n - EDGE : i + 1;
}

// Calls for each shown element, to learn how wide they are.
static void measure(Look *look, int d, int64_t at, double *largest, double *smallest) {
  const Tensor *t = look->t;
  if (d < t->ndim) {
    for (int64_t i = 0; i < t->shape[d]; i = next_shown(look, d, i))
      measure(look, d + 1, at + i * t->stride[d], largest, smallest);
    return;
  }
  double value = element(t, at), size = fabs(value);
  if (!isfinite(value)) return;
  if (value != floor(value)) look->integers = false;
  if (size > *largest) *largest = size;
  if (size > 0 && size < *smallest) *smallest = size;
}

static void measure_width(Look *look, int d, int64_t at) {
  const Tensor *t = look->t;
  if (d < t->ndim) {
    for (int64_t i = 0; i < t->shape[d]; i = next_shown(look, d, i))
      measure_width(look, d + 1, at + i * t->stride[d]);
    return;
  }
  char cell[CELL];
  format_cell(cell, look, at);
  int width = (int)strlen(cell);
  if (width > look->width) look->width = width;
}

static void show_rows(luaL_Buffer *out, const Look *look, int d, int64_t at) {
  const Tensor *t = look->t;
  char cell[CELL], line[2 * CELL + 8];
  if (d == t->ndim) {
    format_cell(cell, look, at);
    snprintf(line, sizeof line, "%*s", look->width, cell);
    luaL_addstring(out, line);
    return;
  }
  luaL_addstring(out, "[");
  bool last = d == t->ndim - 1;
  for (int64_t i = 0; i < t->shape[d];) {
    show_rows(out, look, d + 1, at + i * t->stride[d]);
    int64_t next = next_shown(look, d, i);
    if (next >= t->shape[d]) break;
    luaL_addstring(out, last ? ", " : ",");
    for (int k = d + 1; !last && k < t->ndim; k++) luaL_addstring(out, "\n");
    if (!last) snprintf(line, sizeof line, "%*s", d + 3, ""), luaL_addstring(out, line);
    if (next != i + 1) {
      luaL_addstring(out, last ? "..., " : "...,");
      if (!last) snprintf(line, sizeof line, "\n%*s", d + 3, ""), luaL_addstring(out, line);
    }
    i = next;
  }
  luaL_addstring(out, "]");
}

static void show_values(luaL_Buffer *out, const Tensor *t) {
  Look look = {.t = t, .integers = true, .whole = tensor_numel(t) <= SHOWN_WHOLE};
  double largest = 0, smallest = HUGE_VAL;
  measure(&look, 0, t->offset, &largest, &smallest);
  look.exponents = largest >= 1e6 || (largest > 0 && largest < 1e-3);
  measure_width(&look, 0, t->offset);
  luaL_addstring(out, "\n  ");
  show_rows(out, &look, 0, t->offset);
}

int tensor_tostring(lua_State *L) {
  Rille *r = binding_of(L);
  Tensor *t = tensor_check(L, r, 1, "tostring: the argument");
  char words[128];
  luaL_Buffer out;
  luaL_buffinit(L, &out);
  if (t->param) {
    luaL_addstring(&out, "parameter ");
    luaL_addstring(&out, t->param->name);
    luaL_addstring(&out, " ");
  }
  luaL_addstring(&out, format_tensor(words, sizeof words, t));
  if (t->requires_grad && !t->param) luaL_addstring(&out, ", requires_grad");
  if (t->storage && t->storage->released)
    luaL_addstring(&out, ", released");
  else if (!t->storage)
    luaL_addstring(&out, ", no storage yet");
  else if (!tensor_is_meta(t) && tensor_numel(t) > 0)
    show_values(&out, t);
  luaL_pushresult(&out);
  return 1;
}
