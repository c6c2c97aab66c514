// ops - the table made of ops.def.
#include "ops/ops.h"

#include "ops/kernels/kernels.h"
#include "ops/kernels/threads.h"
#include "ops/rows.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static const Op table[OP_COUNT] = {
#define OP(name, flags, n_out, n_saved, inputs, args, needs, defer, help)    \
  {OP_##name, #name, inputs,  args,         needs,       defer,              \
   (flags),   n_out, n_saved, shape_##name, grad_##name, {cpu_##name, NULL}, \
   help},
#define OP_V(name, flags, inputs, args, help)                                         \
  {OP_##name, #name, inputs,       args,        "",           "",  (flags) | OP_VIEW, \
   1,         0,     shape_##name, grad_##name, {NULL, NULL}, help},
#define OP_NG(name, flags, n_out, n_saved, inputs, args, help)                                   \
  {OP_##name,          #name, inputs, args, "", "", (flags), n_out, n_saved, shape_##name, NULL, \
   {cpu_##name, NULL}, help},
#include "ops/ops.def"
#undef OP
#undef OP_V
#undef OP_NG
};

const Op *op_row(OpId id) { return &table[id]; }

const Op *op_find(const char *name) {
  for (int i = 0; i < OP_COUNT; i++)
    if (strcmp(table[i].name, name) == 0) return &table[i];
  return NULL;
}

static const CoreOps core_ops = {&table[OP_contiguous], &table[OP_cast]};

Status ops_environment(void) {
  TRY(cpu_kernels_environment());
  return threads_environment();
}

Status ops_init(Ctx *ctx) {
  TRY(ops_environment());
  OpNeeds *needs = calloc(OP_COUNT, sizeof *needs);
  if (!needs) return fail(ST_ENOMEM, "out of memory for the op table");
  for (int i = 0; i < OP_COUNT; i++) op_needs(&table[i], &needs[i]);
  ctx->op_needs = needs;
  ctx->core_ops = &core_ops;
  return ST_OK;
}

static void copy_word(char *to, size_t room, const char *from, size_t n) {
  assert(n < room);
  memcpy(to, from, n);
  to[n] = 0;
}

int op_arg_specs(const Op *op, ArgSpec *out) {
  int n = 0;
  for (const char *at = op->args; *at; n++) {
    assert(n <= OP_MAX_ARGS);
    size_t length = strcspn(at, " "), colon = strcspn(at, ":"), equals = strcspn(at, "=");
    ArgSpec *spec = &out[n];
    spec->required = equals >= length;
    size_t end = spec->required ? length : equals;
    copy_word(spec->name, sizeof spec->name, at, colon);
    copy_word(spec->type, sizeof spec->type, at + colon + 1, end - colon - 1);
    copy_word(spec->fallback, sizeof spec->fallback, at + end + !spec->required,
              length - end - !spec->required);
    at += length;
    while (*at == ' ') at++;
  }
  return n;
}

void op_args_default(const Op *op, OpArgs *out) {
  ArgSpec specs[OP_MAX_ARGS + 1];
  int n = op_arg_specs(op, specs), place = 0;
  memset(out, 0, sizeof *out);
  out->n_list = -1;
  for (int i = 0; i < n; i++) {
    const ArgSpec *spec = &specs[i];
    if (strcmp(spec->type, "list") == 0) continue;
    ArgValue *value = &out->v[place++];
    if (spec->required) continue;
    if (strcmp(spec->type, "float") == 0)
      value->f = strtod(spec->fallback, NULL); // reads inf too
    else if (strcmp(spec->type, "bool") == 0)
      value->i = strcmp(spec->fallback, "true") == 0;
    else
      value->i = strtoll(spec->fallback, NULL, 10);
  }
}

OpsCpu ops_cpu(void) {
  return (OpsCpu){cpu_kernels()->level, gemm_library(), threads_count(), threads_pinned()};
}

Status ops_call(Ctx *ctx, OpId id, const OpArgs *args, Tensor **in, int n_in, Tensor **out) {
  OpArgs defaults;
  if (!args) {
    op_args_default(&table[id], &defaults);
    args = &defaults;
  }
  return op_apply(ctx, &table[id], in, n_in, args, out);
}
