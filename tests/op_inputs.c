// op_inputs - from a case's words to tensors and arguments.
#include "core/hash.h"
#include "core/rng.h"
#include "tests/op_cases.h"

#include <assert.h>
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// One input in words.
typedef struct Words {
  char kind, view;
  int64_t limit;
  int ndim;
  int64_t shape[MAX_DIMS]; // of what the op gets
} Words;

static const char *skip_space(const char *at) {
  while (*at == ' ') at++;
  return at;
}

// Reads one input; returns where the next begins.
static const char *read_words(const char *at, Words *out) {
  memset(out, 0, sizeof *out);
  at = skip_space(at);
  out->kind = *at++;
  char *end;
  if (isdigit((unsigned char)*at)) {
    out->limit = strtoll(at, &end, 10);
    at = end;
  }
  at = skip_space(at);
  while (*at == '.' || isdigit((unsigned char)*at)) {
    if (*at == '.') {
      at++;
      break;
    }
    out->shape[out->ndim++] = strtoll(at, &end, 10);
    at = *end == ',' ? end + 1 : end;
  }
  at = skip_space(at);
  if (*at && *at != '|') out->view = *at++;
  at = skip_space(at);
  return *at == '|' ? at + 1 : at;
}

static double value_of(const Words *w, uint64_t key, int64_t i, int64_t n) {
  double v = 0;
  switch (w->kind) {
  case 'n':
  case 'm': v = rng_normal(key, i); break;
  case 'p': v = 0.5 + 1.5 * rng_uniform(key, i); break;
  case 'u': v = 1.8 * rng_uniform(key, i) - 0.9; break;
  case 'd': return 0.25 * ((double)rng_permute(key, (uint64_t)i, (uint64_t)n) - (double)(n / 2));
  case 'i': return (double)(rng_u64(key, i) % (uint64_t)w->limit);
  case 'b':
  case 'h': return rng_u32(key, i) & 1;
  default: assert(false && "an unknown kind of input");
  }
  float f = (float)v; // exact in bf16
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  bits &= 0xffff0000u;
  memcpy(&f, &bits, sizeof f);
  return (double)f;
}

// The leaf's shape: what the view makes the op's input of.
static void leaf_shape(const Words *w, int64_t *shape) {
  memcpy(shape, w->shape, sizeof w->shape);
  int last = w->ndim - 1;
  if (w->view == 't') shape[last] = w->shape[last - 1], shape[last - 1] = w->shape[last];
  if (w->view == 's') shape[last] = 2 * w->shape[last] + 1;
  if (w->view == 'e') shape[0] = 1;
}

static Status make_leaf(Ctx *ctx, const Words *w, uint64_t key, DType dtype, bool grad,
                        Tensor **out) {
  int64_t shape[MAX_DIMS], n = 1;
  leaf_shape(w, shape);
  for (int d = 0; d < w->ndim; d++) n *= shape[d];
  double *values = malloc((size_t)(n ? n : 1) * sizeof *values);
  if (!values) return fail(ST_ENOMEM, "no memory for a test's input");
  for (int64_t i = 0; i < n; i++) values[i] = value_of(w, key, i, n);
  Tensor *wide = NULL;
  Status status = tensor_from_data(ctx, DT_F64, w->ndim, shape, values, &wide);
  free(values);
  TRY(status);
  OpArgs cast = {.n_list = -1};
  bool real = strchr("nmpud", w->kind) != NULL;
  cast.v[0].i = real ? dtype : w->kind == 'b' ? DT_BOOL : DT_I64;
  status = ops_call(ctx, OP_cast, &cast, &wide, 1, out);
  tensor_release(ctx, wide);
  TRY(status);
  (*out)->depends_data = true;
  (*out)->requires_grad = grad && real && w->kind != 'm' && dtype_is_float(dtype);
  return ST_OK;
}

Status case_leaves(Ctx *ctx, const char *inputs, DType dtype, bool grad, CaseInputs *out) {
  memset(out, 0, sizeof *out);
  const char *at = skip_space(inputs);
  while (*at) {
    assert(out->n < CASE_MAX_IN);
    Words w;
    at = read_words(at, &w);
    int j = out->n++;
    out->view[j] = w.view;
    uint64_t key = hash_mix(hash_string(inputs, 7), (uint64_t)j);
    Status status = w.kind == '-' ? ST_OK : make_leaf(ctx, &w, key, dtype, grad, &out->leaf[j]);
    if (status != ST_OK) {
      case_release(ctx, out);
      return status;
    }
    at = skip_space(at);
  }
  return ST_OK;
}

Status case_views(Ctx *ctx, CaseInputs *inputs) {
  for (int j = 0; j < inputs->n; j++) {
    Tensor *leaf = inputs->leaf[j];
    OpArgs args = {.n_list = -1};
    Status status = ST_OK;
    inputs->x[j] = NULL;
    if (!leaf) continue;
    if (inputs->view[j] == 't') {
      status = ops_call(ctx, OP_t, NULL, &leaf, 1, &inputs->x[j]);
    } else if (inputs->view[j] == 'f') {
      status = ops_call(ctx, OP_flip, NULL, &leaf, 1, &inputs->x[j]);
    } else if (inputs->view[j] == 's') {
      args = (OpArgs){.n_list = -1, .v = {{.i = -1}, {.i = 1}, {.i = INT64_MAX}, {.i = 2}}};
      status = ops_call(ctx, OP_slice, &args, &leaf, 1, &inputs->x[j]);
    } else if (inputs->view[j] == 'e') {
      args.n_list = leaf->ndim;
      memcpy(args.list, leaf->shape, sizeof leaf->shape);
      args.list[0] = 3;
      status = ops_call(ctx, OP_expand, &args, &leaf, 1, &inputs->x[j]);
    } else {
      inputs->x[j] = tensor_retain(leaf);
    }
    if (status != ST_OK) {
      inputs->x[j] = NULL;
      case_release_views(ctx, inputs);
      return status;
    }
  }
  return ST_OK;
}

void case_release_views(Ctx *ctx, CaseInputs *inputs) {
  for (int j = 0; j < inputs->n; j++) {
    tensor_release(ctx, inputs->x[j]);
    inputs->x[j] = NULL;
  }
}

void case_release(Ctx *ctx, CaseInputs *inputs) {
  case_release_views(ctx, inputs);
  for (int j = 0; j < inputs->n; j++) {
    tensor_release(ctx, inputs->leaf[j]);
    inputs->leaf[j] = NULL;
  }
}

// ---- arguments
static const ArgSpec *find_arg(const ArgSpec *specs, int n, const char *name, size_t length,
                               int *place) {
  *place = 0;
  for (int i = 0; i < n; i++) {
    if (strlen(specs[i].name) == length && strncmp(specs[i].name, name, length) == 0)
      return &specs[i];
    if (strcmp(specs[i].type, "list") != 0) ++*place;
  }
  return NULL;
}

static void set_arg(const ArgSpec *spec, const char *at, ArgValue *value, OpArgs *out) {
  if (strcmp(spec->type, "list") == 0) {
    out->n_list = 0;
    while (*at == '-' || isdigit((unsigned char)*at)) {
      char *end;
      out->list[out->n_list++] = strtoll(at, &end, 10);
      at = *end == ',' ? end + 1 : end;
    }
  } else if (strcmp(spec->type, "float") == 0) {
    value->f = strtod(at, NULL);
  } else if (strcmp(spec->type, "bool") == 0) {
    value->i = *at == 't';
  } else if (strcmp(spec->type, "dtype") == 0) {
    char name[8] = "";
    DType dtype = DT_F32;
    snprintf(name, sizeof name, "%.*s", (int)strcspn(at, " "), at);
    Status status = dtype_from_name(&dtype, name);
    assert(status == ST_OK);
    (void)status;
    value->i = dtype;
  } else {
    value->i = strtoll(at, NULL, 10);
  }
}

void case_args(const Op *op, const char *words, OpArgs *out) {
  ArgSpec specs[OP_MAX_ARGS + 1];
  int n = op_arg_specs(op, specs);
  op_args_default(op, out);
  for (const char *at = skip_space(words ? words : ""); *at;) {
    size_t length = strcspn(at, "=");
    int place;
    const ArgSpec *spec = find_arg(specs, n, at, length, &place);
    assert(spec && "a case names an argument that its row does not have");
    at += length + 1;
    set_arg(spec, at, &out->v[place], out);
    at = skip_space(at + strcspn(at, " "));
  }
}

const char *case_name(const Op *op, const char *inputs, const char *args, char *buffer,
                      size_t size) {
  snprintf(buffer, size, "%s(%s; %s)", op->name, inputs, args ? args : "");
  return buffer;
}
