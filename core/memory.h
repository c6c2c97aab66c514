// memory - accounting by kind, and a size-classed pool that every tensor and every graph structure
// comes from.
//
// A freed block goes to the free list of its class and is handed out again: a training step repeats
// its shapes, so from the second step on nothing is asked of the system.
//
// Invariants:
//  1. Bytes are accounted as asked for, rounded up to 64; the sum over kinds is what tensors hold.
//  2. A block is 64-byte aligned; its class is a function of its size alone, so free needs the
//  size.
//  3. No allocation makes the total pass `limit`; before one fails, cached blocks are given back
//  and
//     the pressure callback (the script's garbage collector) has run once.
#ifndef RILLE_CORE_MEMORY_H
#define RILLE_CORE_MEMORY_H

#include "core/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// X(name, label, what to change when this kind is the largest)
#define MEM_KIND_LIST(X)                                                                        \
  X(PARAMETERS, "parameters", "split the model over more ranks, or store it as bf16")           \
  X(GRADIENTS, "gradients", "split the model over more ranks")                                  \
  X(OPTIMIZER, "optimizer", "plain SGD keeps no state; AdamW keeps two values a parameter")     \
  X(ACTIVATIONS, "activations",                                                                 \
    "halving batch.micro halves them; recompute = true keeps one tensor a unit instead of all") \
  X(WORKSPACE, "workspace", "smaller microbatches need less")                                   \
  X(COMMUNICATION, "communication", "smaller microbatches need less")                           \
  X(STRUCTURES, "structures", "graphs that are never released: use rille.no_grad for evaluation")

typedef enum MemKind {
#define X(name, label, hint) MEM_##name,
  MEM_KIND_LIST(X)
#undef X
      MEM_KINDS
} MemKind;

typedef struct MemUse {
  size_t current, peak; // bytes
} MemUse;

typedef struct Pool Pool;

// Bytes of the machine's memory (cgroup limit included).
size_t pool_machine_memory(void);

// A pool that holds at most `limit` bytes; 0: the machine's memory (cgroup limit included).
Status pool_new(size_t limit, Pool **out);
void pool_delete(Pool *pool);

// A 64-byte aligned block of `bytes` (0 gives a valid pointer); contents undefined.
Status pool_alloc(Pool *pool, size_t bytes, MemKind kind, void **out);

// Returns a block; `bytes` and `kind` as given to pool_alloc. NULL is allowed.
void pool_free(Pool *pool, void *block, size_t bytes, MemKind kind);

// Moves `bytes` of accounting from one kind to another (a block changes its role).
void pool_recount(Pool *pool, size_t bytes, MemKind from, MemKind to);

// Gives cached blocks back to the system; those of a slab (memory.c) once all of it is free.
void pool_trim(Pool *pool);

MemUse pool_use(const Pool *pool, MemKind kind);
MemUse pool_total(const Pool *pool);
size_t pool_limit(const Pool *pool);
const char *mem_kind_label(MemKind kind);

// Sets every peak to the current value.
void pool_reset_peaks(Pool *pool);

// Called once before an allocation fails: may free tensors (a full garbage collection).
void pool_on_pressure(Pool *pool, void (*callback)(void *user), void *user);

// Inside the poll hook the callback must not run: holds it back (true) or lets it run again; what
// was before. An allocation that fails while it is held may succeed later.
bool pool_hold_pressure(Pool *pool, bool hold);
bool pool_pressure_held(const Pool *pool);

// Bytes allocated since the last call with reset: drives the script's garbage collector.
size_t pool_debt(Pool *pool, int reset);

// Test hook: the n-th allocation from now fails (n >= 1); 0 switches it off.
void pool_fail_at(Pool *pool, int64_t n);

// count * size with overflow check. Errors: ENOMEM if the product passes 2^62.
Status checked_mul(int64_t count, int64_t size, int64_t *out);

// "1.2 GiB", "640 KiB" into a caller's buffer.
const char *format_bytes(char *buffer, size_t size, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
