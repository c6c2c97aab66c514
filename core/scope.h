// scope - who owns the tensors of a training step.
//
// A Scope owns the storages that a unit call made; when the unit returns, what was neither saved
// nor returned is released at once. An Arena accounts what backward keeps: two for each
// (stage, microbatch), I (gone after dgrad) and W (GEMM inputs and kept output gradients, gone
// after wgrad). So the live bytes of a rank are nI*aI + nW*aW, a formula that tests check.
#ifndef RILLE_CORE_SCOPE_H
#define RILLE_CORE_SCOPE_H

#include "core/status.h"
#include "core/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Scope {
  struct Scope *outer;
  Storage **storages; // one ownership each
  int n, room;
} Scope;

struct Arena {
  size_t bytes, peak; // bytes of distinct storages saved through it
  const char *name;
};

// Opens a scope inside the context's current one. The caller keeps the struct alive until close.
void scope_open(Ctx *ctx, Scope *scope);

// The scope takes over the caller's ownership of a fresh tensor: the caller's reference becomes
// weak. Without an open scope nothing happens.
Status scope_adopt(Ctx *ctx, Tensor *tensor);

// Closes the innermost scope: `kept` tensors move to the outer scope (or, at the outermost one,
// become owning again); the rest is released. Errors: ESTATE if a kept tensor's bytes were gone
// already.
Status scope_close(Ctx *ctx, Scope *scope, Tensor **kept, int n_kept);

// A node begins or ends keeping a tensor's storage for backward, accounted in `arena` (NULL: not).
void arena_save(Arena *arena, Tensor *tensor);
void arena_drop(Tensor *tensor);

#ifdef __cplusplus
}
#endif
#endif
