// shapes - see the header.
#include "ops/shapes.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

Status shape_fail(const OpCall *call, const char *words, ...) {
  char text[512], inputs[768];
  va_list args;
  va_start(args, words);
  vsnprintf(text, sizeof text, words, args);
  va_end(args);
  size_t at = 0;
  const char *name = call->op->inputs;
  inputs[0] = 0;
  for (int j = 0; j < call->n_in && at < sizeof inputs - 200; j++) {
    int length = (int)strcspn(name, " ?*");
    char shape[160];
    if (call->in[j]) {
      int n = name[length] == '*' || length == 0
                  ? snprintf(inputs + at, sizeof inputs - at, ", input %d is %s", j,
                             format_tensor(shape, sizeof shape, call->in[j]))
                  : snprintf(inputs + at, sizeof inputs - at, ", %.*s is %s", length, name,
                             format_tensor(shape, sizeof shape, call->in[j]));
      if (n > 0) at += (size_t)n;
    }
    if (name[length] != '*') { // a variadic name serves all that follow
      name += strcspn(name, " ");
      while (*name == ' ') name++;
    }
  }
  return fail(ST_ESHAPE, "%s: %s%s", call->op->name, text, inputs);
}

Status shape_broadcast(const OpCall *call, Tensor **in, int n, TensorSpec *out) {
  int ndim = 0;
  for (int j = 0; j < n; j++)
    if (in[j] && in[j]->ndim > ndim) ndim = in[j]->ndim;
  out->ndim = ndim;
  for (int d = 0; d < ndim; d++) {
    out->shape[d] = 1;
    for (int j = 0; j < n; j++) {
      if (!in[j]) continue;
      int own = d - (ndim - in[j]->ndim);
      if (own < 0 || in[j]->shape[own] == 1 || in[j]->shape[own] == out->shape[d]) continue;
      if (out->shape[d] != 1)
        return shape_fail(call, "dimension %d does not broadcast (%lld and %lld)", d - ndim,
                          (long long)out->shape[d], (long long)in[j]->shape[own]);
      out->shape[d] = in[j]->shape[own];
    }
  }
  return ST_OK;
}

Status shape_dim(const OpCall *call, int64_t dim, int ndim, int *out) {
  int64_t d = dim < 0 ? dim + ndim : dim;
  if (d < 0 || d >= ndim)
    return fail_hint(fail(ST_ERANGE, "%s: there is no dimension %lld, x has %d (%d to %d)",
                          call->op->name, (long long)dim, ndim, -ndim, ndim - 1),
                     "dimensions count from 0, negative ones from the end");
  *out = (int)d;
  return ST_OK;
}

Status shape_dims(const OpCall *call, int ndim, unsigned *out) {
  const OpArgs *args = &call->args;
  *out = 0;
  if (args->n_list < 0) {
    *out = (1u << ndim) - 1;
    return ST_OK;
  }
  for (int i = 0; i < args->n_list; i++) {
    int d = 0;
    TRY(shape_dim(call, args->list[i], ndim, &d));
    if (*out >> d & 1) return fail(ST_EVALUE, "%s: dimension %d is given twice", call->op->name, d);
    *out |= 1u << d;
  }
  return ST_OK;
}

void shape_like(TensorSpec *out, const Tensor *t) {
  out->dtype = t->dtype;
  out->ndim = t->ndim;
  memcpy(out->shape, t->shape, (size_t)t->ndim * sizeof *t->shape);
}

Status shape_integer(const OpCall *call, int j) {
  DType dtype = call->in[j]->dtype;
  if (dtype == DT_I64 || dtype == DT_I32 || dtype == DT_U8) return ST_OK;
  return fail_hint(shape_fail(call, "input %d must hold integers", j),
                   "convert it with x:to(\"i64\")");
}

int64_t shape_product(const int64_t *shape, int first, int last) {
  int64_t n = 1;
  for (int d = first; d < last; d++) n *= shape[d];
  return n;
}
