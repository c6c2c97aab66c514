// scope - ownership of a step's tensors, accounting of what backward keeps.
#include "core/scope.h"

#include "core/context.h"

#include <assert.h>
#include <stdlib.h>

void scope_open(Ctx *ctx, Scope *scope) {
  *scope = (Scope){.outer = ctx->scope};
  ctx->scope = scope;
}

Status scope_adopt(Ctx *ctx, Tensor *tensor) {
  Scope *scope = ctx->scope;
  if (!scope || tensor->weak || !tensor->storage || tensor->param) return ST_OK;
  if (scope->n == scope->room) {
    int room = scope->room ? 2 * scope->room : 32;
    Storage **grown = realloc(scope->storages, (size_t)room * sizeof(Storage *));
    if (!grown) return fail(ST_ENOMEM, "out of memory for a list of %d tensors", room);
    scope->storages = grown;
    scope->room = room;
  }
  tensor->weak = true; // its ownership moves to the list
  tensor->storage->refs++;
  scope->storages[scope->n++] = tensor->storage;
  return ST_OK;
}

Status scope_close(Ctx *ctx, Scope *scope, Tensor **kept, int n_kept) {
  assert(ctx->scope == scope);
  Status status = ST_OK;
  for (int i = 0; i < n_kept && status == ST_OK; i++) status = tensor_strengthen(kept[i]);
  for (int i = 0; i < scope->n; i++) {
    storage_disown(scope->storages[i]);
    storage_forget(ctx, scope->storages[i]);
  }
  free(scope->storages);
  ctx->scope = scope->outer;
  for (int i = 0; i < n_kept && status == ST_OK; i++) status = scope_adopt(ctx, kept[i]);
  return status;
}

void arena_save(Arena *arena, Tensor *tensor) {
  Storage *storage = tensor->storage;
  if (storage->saves++ > 0) return;
  storage->arena = arena;
  if (!arena) return;
  arena->bytes += storage->bytes;
  if (arena->bytes > arena->peak) arena->peak = arena->bytes;
}

void arena_drop(Tensor *tensor) {
  Storage *storage = tensor->storage;
  assert(storage->saves > 0);
  if (--storage->saves > 0) return;
  if (storage->arena) storage->arena->bytes -= storage->bytes;
  storage->arena = NULL;
}
