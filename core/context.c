// context - construction, interning, random calls.
#include "core/context.h"

#include "core/hash.h"
#include "core/profile.h"
#include "core/tape.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

Status ctx_new(size_t memory_limit, Ctx **out) {
  Ctx *ctx = calloc(1, sizeof *ctx);
  if (!ctx) return fail(ST_ENOMEM, "out of memory for the context");
  Status status = pool_new(memory_limit, &ctx->pool);
  if (status != ST_OK) {
    free(ctx);
    return status;
  }
  device_cpu(&ctx->cpu, ctx->pool);
  device_meta(&ctx->meta, ctx->pool);
  ctx->grad_enabled = true;
  ctx->place.step = -1;
  ctx->module = "";
  *out = ctx;
  return ST_OK;
}

void ctx_delete(Ctx *ctx) {
  if (!ctx) return;
  ordinals_free(ctx, &ctx->ordinals);
  for (int i = 0; i < ctx->interned_room; i++) free(ctx->interned[i]);
  free(ctx->interned);
  free(ctx->op_needs);
  span_log_delete(ctx->spans);
  op_profile_delete(ctx->profile);
  pool_delete(ctx->pool);
  free(ctx);
}

// Doubles the open-addressing table of interned strings.
static bool grow_interned(Ctx *ctx) {
  int room = ctx->interned_room ? 2 * ctx->interned_room : 64;
  char **table = calloc((size_t)room, sizeof *table);
  if (!table) return false;
  for (int i = 0; i < ctx->interned_room; i++) {
    if (!ctx->interned[i]) continue;
    int at = (int)(hash_string(ctx->interned[i], 0) & (uint64_t)(room - 1));
    while (table[at]) at = (at + 1) & (room - 1);
    table[at] = ctx->interned[i];
  }
  free(ctx->interned);
  ctx->interned = table;
  ctx->interned_room = room;
  return true;
}

const char *ctx_intern(Ctx *ctx, const char *words) {
  if (2 * (ctx->n_interned + 1) > ctx->interned_room && !grow_interned(ctx)) return "?";
  int mask = ctx->interned_room - 1;
  int at = (int)(hash_string(words, 0) & (uint64_t)mask);
  for (; ctx->interned[at]; at = (at + 1) & mask)
    if (strcmp(ctx->interned[at], words) == 0) return ctx->interned[at];
  char *copy = strdup(words);
  if (!copy) return "?"; // words for messages only: not worth a failure
  ctx->interned[at] = copy;
  ctx->n_interned++;
  return copy;
}

static Status ordinals_next(Ctx *ctx, const char *module, int64_t *out) {
  Ordinals *o = &ctx->ordinals;
  for (int i = 0; i < o->n; i++) {
    if (o->module[i] != module) continue;
    *out = o->count[i]++;
    return ST_OK;
  }
  if (o->n == o->room) {
    int room = o->room ? 2 * o->room : 32;
    const char **modules = realloc(o->module, (size_t)room * sizeof *modules);
    if (modules) o->module = modules;
    int64_t *counts = realloc(o->count, (size_t)room * sizeof *counts);
    if (counts) o->count = counts;
    if (!modules || !counts) return fail(ST_ENOMEM, "out of memory for random ordinals");
    o->room = room;
  }
  o->module[o->n] = module;
  o->count[o->n++] = 1;
  *out = 0;
  return ST_OK;
}

Status ctx_random_call(Ctx *ctx, RandomCall *out) {
  int64_t ordinal = 0;
  TRY(ordinals_next(ctx, ctx->module, &ordinal));
  out->key = hash_mix(hash_string(ctx->module, ctx->seed), (uint64_t)ordinal);
  out->key = hash_mix(out->key, (uint64_t)ctx->place.unit);
  out->first_sample = ctx->place.first_sample;
  out->n_samples = ctx->place.n_samples;
  out->step = ctx->place.step;
  return ST_OK;
}

Status ordinals_copy(Ctx *ctx, const Ordinals *from, Ordinals *out) {
  (void)ctx;
  *out = (Ordinals){0};
  if (from->n == 0) return ST_OK;
  out->module = malloc((size_t)from->n * sizeof *out->module);
  out->count = malloc((size_t)from->n * sizeof *out->count);
  if (!out->module || !out->count) {
    ordinals_free(ctx, out);
    return fail(ST_ENOMEM, "out of memory for random ordinals");
  }
  memcpy(out->module, from->module, (size_t)from->n * sizeof *out->module);
  memcpy(out->count, from->count, (size_t)from->n * sizeof *out->count);
  out->n = out->room = from->n;
  return ST_OK;
}

void ordinals_free(Ctx *ctx, Ordinals *ordinals) {
  (void)ctx;
  free(ordinals->module);
  free(ordinals->count);
  *ordinals = (Ordinals){0};
}

Where ctx_where(Ctx *ctx) {
  if (!ctx->where) return (Where){NULL, 0};
  return ctx->where(ctx->where_user);
}

Status struct_alloc(Ctx *ctx, size_t bytes, void *out_pointer) {
  void *block;
  TRY(pool_alloc(ctx->pool, bytes, MEM_STRUCTURES, &block));
  memcpy(out_pointer, &block, sizeof block);
  return ST_OK;
}

void struct_free(Ctx *ctx, void *block, size_t bytes) {
  pool_free(ctx->pool, block, bytes, MEM_STRUCTURES);
}
