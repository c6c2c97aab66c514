// memory - the pool. Design and invariants are in the header.
#include "core/memory.h"

#include "core/asan_impl.h"

#include <assert.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if HAS_ASAN
#include <sanitizer/asan_interface.h>
#define POISON(p, n) ASAN_POISON_MEMORY_REGION(p, n)
#define UNPOISON(p, n) ASAN_UNPOISON_MEMORY_REGION(p, n)
#else
#define POISON(p, n) ((void)0)
#define UNPOISON(p, n) ((void)0)
#endif

enum {
  ALIGN = 64,
  FINE_LIMIT = 4096, // up to here one class per 64 bytes
  FINE_CLASSES = FINE_LIMIT / ALIGN + 1,
  STEPS = 8, // above: eight classes per doubling, at most 12.5% slack
  COARSE_CLASSES = STEPS * 40,
  CLASSES = FINE_CLASSES + COARSE_CLASSES,
};
// Blocks that hold a huge page or more ask for them. Smaller ones from SLAB_FROM on are cut from
// slabs of huge pages, for on small pages a good part of the time of a light kernel goes to looking
// up addresses; a pool that holds little stays on small ones, which a page of memory fills. A slab
// begins as one free extent; what comes back to one that cannot go as a whole is joined to extents
// again, from which blocks of any size are cut. Beyond the limit no slab is begun, and where none
// is to be had a block is one of its own. (The address sanitizer watches blocks of their own.)
static const size_t HUGE_PAGE = (size_t)2 << 20, SLAB = (size_t)8 << 20, SLAB_FROM = 16 << 10;
static const bool HAS_SLABS = !HAS_ASAN;

// Free space within a slab, kept where it is.
typedef struct Extent {
  struct Extent *next; // at a higher address, not adjacent
  size_t bytes;
} Extent;

typedef struct Slab {
  struct Slab *next;
  char *memory; // SLAB bytes
  size_t spare; // of those, what the extents hold
  Extent *extents;
} Slab;

typedef struct FreeBlock {
  struct FreeBlock *next;
} FreeBlock;

struct Pool {
  FreeBlock *free_blocks[CLASSES];
  Slab *slabs; // the newest first
  MemUse use[MEM_KINDS];
  MemUse total;
  size_t cached; // bytes in the free lists
  size_t spare;  // bytes in the slabs' extents
  size_t limit;
  size_t debt;
  int64_t fail_at;
  void (*pressure)(void *user);
  void *pressure_user;
  bool in_pressure;
};

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// The class of a size, and the bytes that a block of that class really has.
static int class_of(size_t bytes, size_t *block_bytes) {
  if (bytes <= FINE_LIMIT) {
    size_t k = (bytes + ALIGN - 1) / ALIGN;
    if (k == 0) k = 1;
    *block_bytes = k * ALIGN;
    return (int)k - 1;
  }
  int log2 = 63 - __builtin_clzll((unsigned long long)(bytes - 1)); // 2^log2 <= bytes-1
  size_t base = (size_t)1 << log2, step = base / STEPS;
  size_t k = (bytes - base + step - 1) / step; // 1..STEPS
  *block_bytes = base + k * step;
  return FINE_CLASSES + (log2 - 12) * STEPS + (int)k - 1;
}

static size_t bytes_of(int class) {
  if (class < FINE_CLASSES) return (size_t)(class + 1) * ALIGN;
  size_t base = (size_t)1 << (12 + (class - FINE_CLASSES) / STEPS);
  return base + (size_t)((class - FINE_CLASSES) % STEPS + 1) * (base / STEPS);
}

static size_t read_number(const char *path) {
  FILE *f = fopen(path, "r");
  if (!f) return 0;
  unsigned long long n = 0;
  int got = fscanf(f, "%llu", &n);
  fclose(f);
  return got == 1 ? (size_t)n : 0;
}

size_t pool_machine_memory(void) {
  size_t physical = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
  size_t cgroup = read_number("/sys/fs/cgroup/memory.max");
  if (!cgroup) cgroup = read_number("/sys/fs/cgroup/memory/memory.limit_in_bytes");
  return cgroup && cgroup < physical ? cgroup : physical;
}

Status pool_new(size_t limit, Pool **out) {
  Pool *pool = calloc(1, sizeof *pool);
  if (!pool) return fail(ST_ENOMEM, "cannot allocate the memory pool");
  pool->limit = limit ? limit : pool_machine_memory();
  *out = pool;
  return ST_OK;
}

static void *huge_alloc(size_t bytes) {
  void *p = aligned_alloc(HUGE_PAGE, round_up(bytes, HUGE_PAGE));
  // Whole ones only: what lies after the last of them stays on small pages, and costs no more.
  if (p) madvise(p, bytes / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE);
  return p;
}

static bool is_for_slabs(size_t bytes) {
  return HAS_SLABS && bytes >= SLAB_FROM && bytes < HUGE_PAGE;
}

// A block from what is free in the slabs; NULL: none has room for it.
static void *slab_cut(Pool *pool, size_t bytes) {
  if (!is_for_slabs(bytes)) return NULL;
  for (Slab *slab = pool->slabs; slab; slab = slab->next)
    for (Extent **at = &slab->extents, *e; slab->spare >= bytes && (e = *at); at = &e->next) {
      if (e->bytes < bytes) continue;
      if (e->bytes == bytes) {
        *at = e->next;
      } else {
        *at = (Extent *)(void *)((char *)e + bytes);
        **at = (Extent){.next = e->next, .bytes = e->bytes - bytes};
      }
      slab->spare -= bytes;
      pool->spare -= bytes;
      return e;
    }
  return NULL;
}

// Takes a free block back, joined to its neighbours.
static void slab_put(Pool *pool, Slab *slab, void *block, size_t bytes) {
  Extent **at = &slab->extents, *before = NULL, *e = block;
  for (; *at && (uintptr_t)*at < (uintptr_t)block; at = &(*at)->next) before = *at;
  *e = (Extent){.next = *at, .bytes = bytes};
  *at = e;
  slab->spare += bytes;
  pool->spare += bytes;
  if (e->next && (char *)e + e->bytes == (char *)e->next) {
    e->bytes += e->next->bytes;
    e->next = e->next->next;
  }
  if (before && (char *)before + before->bytes == (char *)e) {
    before->bytes += e->bytes;
    before->next = e->next;
  }
}

// A new slab, all of it free; false: it cannot be had.
static bool slab_new(Pool *pool) {
  Slab *slab = malloc(sizeof *slab);
  char *memory = slab ? huge_alloc(SLAB) : NULL;
  if (!memory) {
    free(slab);
    return false;
  }
  *slab = (Slab){.next = pool->slabs, .memory = memory};
  pool->slabs = slab;
  slab_put(pool, slab, memory, SLAB);
  return true;
}

// Memory that the pool holds: in blocks, cached ones too, and free in slabs.
static size_t held(const Pool *pool) { return pool->total.current + pool->cached + pool->spare; }

// A block that neither a list nor a slab has free: from a new slab or the system.
static void *new_block(Pool *pool, size_t block_bytes) {
  if (block_bytes >= HUGE_PAGE) return huge_alloc(block_bytes);
  bool begins = is_for_slabs(block_bytes) && pool->total.current + pool->cached >= HUGE_PAGE &&
                held(pool) + SLAB <= pool->limit;
  if (begins && slab_new(pool)) return slab_cut(pool, block_bytes);
  return aligned_alloc(ALIGN, block_bytes);
}

// The slab that a block was cut from, or NULL.
static Slab *slab_of(const Pool *pool, const FreeBlock *block) {
  Slab *slab = pool->slabs;
  while (slab && (size_t)((uintptr_t)block - (uintptr_t)slab->memory) >= SLAB) slab = slab->next;
  return slab;
}

void pool_trim(Pool *pool) {
  for (int k = 0; k < CLASSES; k++)
    for (FreeBlock *block; (block = pool->free_blocks[k]);) {
      UNPOISON(block, sizeof *block);
      pool->free_blocks[k] = block->next;
      pool->cached -= bytes_of(k);
      Slab *slab = slab_of(pool, block);
      if (slab)
        slab_put(pool, slab, block, bytes_of(k));
      else
        free(block);
    }
  for (Slab **at = &pool->slabs, *slab; (slab = *at);) {
    if (slab->spare < SLAB) {
      at = &slab->next;
      continue;
    }
    *at = slab->next;
    pool->spare -= slab->spare;
    free(slab->memory);
    free(slab);
  }
}

void pool_delete(Pool *pool) {
  if (!pool) return;
  pool_trim(pool);
  free(pool);
}

static Status out_of_memory(Pool *pool, size_t bytes, MemKind kind) {
  char want[32], held[32], limit[32];
  MemKind largest = 0;
  char table[512];
  size_t at = 0;
  for (int k = 0; k < MEM_KINDS; k++) {
    char a[32];
    if (pool->use[k].current > pool->use[largest].current) largest = (MemKind)k;
    if (pool->use[k].current == 0) continue;
    int n = snprintf(table + at, sizeof table - at, "%s%s %s", at ? ", " : "",
                     mem_kind_label((MemKind)k), format_bytes(a, sizeof a, pool->use[k].current));
    if (n > 0 && at + (size_t)n < sizeof table) at += (size_t)n;
  }
  table[at] = 0;
  Status status = fail(ST_ENOMEM, "out of memory: %s more for %s, held %s of %s (%s)",
                       format_bytes(want, sizeof want, bytes), mem_kind_label(kind),
                       format_bytes(held, sizeof held, pool->total.current),
                       format_bytes(limit, sizeof limit, pool->limit), table);
  static const char *const hints[] = {
#define X(name, label, hint) hint,
      MEM_KIND_LIST(X)
#undef X
  };
  return fail_hint(status, "%s hold the most (%s): %s", mem_kind_label(largest),
                   format_bytes(held, sizeof held, pool->use[largest].current), hints[largest]);
}

// A block from what slabs have free once the lists are empty, or NULL.
static void *cut_after_trim(Pool *pool, size_t block_bytes) {
  pool_trim(pool);
  return slab_cut(pool, block_bytes);
}

static void account(Pool *pool, size_t rounded, MemKind kind) {
  MemUse *use = &pool->use[kind];
  use->current += rounded;
  if (use->current > use->peak) use->peak = use->current;
  pool->total.current += rounded;
  if (pool->total.current > pool->total.peak) pool->total.peak = pool->total.current;
  pool->debt += rounded;
}

// A block from the free list or the system; NULL if there is none within the limit.
static void *take(Pool *pool, size_t rounded, size_t block_bytes, int class) {
  if (pool->total.current + rounded > pool->limit) return NULL;
  FreeBlock *block = pool->free_blocks[class];
  if (block) {
    UNPOISON(block, block_bytes);
    pool->free_blocks[class] = block->next;
    pool->cached -= block_bytes;
    return block;
  }
  void *p = slab_cut(pool, block_bytes);
  if (p) return p;
  if (held(pool) + block_bytes > pool->limit && pool->cached >= block_bytes)
    p = cut_after_trim(pool, block_bytes);
  if (!p) p = new_block(pool, block_bytes);
  if (p || !pool->cached) return p;
  p = cut_after_trim(pool, block_bytes);
  return p ? p : new_block(pool, block_bytes);
}

Status pool_alloc(Pool *pool, size_t bytes, MemKind kind, void **out) {
  if (bytes > (size_t)1 << 50) return out_of_memory(pool, bytes, kind);
  size_t block_bytes;
  int class = class_of(bytes, &block_bytes);
  size_t rounded = round_up(bytes ? bytes : 1, ALIGN);
  if (pool->fail_at && --pool->fail_at == 0)
    return fail(ST_ENOMEM, "out of memory: a test made this allocation of %zu bytes for %s fail",
                bytes, mem_kind_label(kind));
  void *p = take(pool, rounded, block_bytes, class);
  if (!p && pool->pressure && !pool->in_pressure) {
    pool->in_pressure = true;
    pool->pressure(pool->pressure_user);
    pool->in_pressure = false;
    p = take(pool, rounded, block_bytes, class);
  }
  if (!p) return out_of_memory(pool, bytes, kind);
  account(pool, rounded, kind);
  *out = p;
  return ST_OK;
}

void pool_free(Pool *pool, void *block, size_t bytes, MemKind kind) {
  if (!block) return;
  size_t block_bytes;
  int class = class_of(bytes, &block_bytes);
  size_t rounded = round_up(bytes ? bytes : 1, ALIGN);
  assert(pool->use[kind].current >= rounded);
  pool->use[kind].current -= rounded;
  pool->total.current -= rounded;
  FreeBlock *free_block = block;
  free_block->next = pool->free_blocks[class];
  pool->free_blocks[class] = free_block;
  pool->cached += block_bytes;
  POISON(block, block_bytes);
}

void pool_recount(Pool *pool, size_t bytes, MemKind from, MemKind to) {
  size_t rounded = round_up(bytes ? bytes : 1, ALIGN);
  assert(pool->use[from].current >= rounded);
  pool->use[from].current -= rounded;
  pool->use[to].current += rounded;
  if (pool->use[to].current > pool->use[to].peak) pool->use[to].peak = pool->use[to].current;
}

MemUse pool_use(const Pool *pool, MemKind kind) { return pool->use[kind]; }
MemUse pool_total(const Pool *pool) { return pool->total; }
size_t pool_limit(const Pool *pool) { return pool->limit; }

void pool_reset_peaks(Pool *pool) {
  for (int k = 0; k < MEM_KINDS; k++) pool->use[k].peak = pool->use[k].current;
  pool->total.peak = pool->total.current;
}

const char *mem_kind_label(MemKind kind) {
  static const char *const labels[] = {
#define X(name, label, hint) label,
      MEM_KIND_LIST(X)
#undef X
  };
  return labels[kind];
}

void pool_on_pressure(Pool *pool, void (*callback)(void *user), void *user) {
  pool->pressure = callback;
  pool->pressure_user = user;
}

bool pool_hold_pressure(Pool *pool, bool hold) {
  bool before = pool->in_pressure;
  pool->in_pressure = hold;
  return before;
}

bool pool_pressure_held(const Pool *pool) { return pool->in_pressure; }

size_t pool_debt(Pool *pool, int reset) {
  size_t debt = pool->debt;
  if (reset) pool->debt = 0;
  return debt;
}

void pool_fail_at(Pool *pool, int64_t n) { pool->fail_at = n; }

Status checked_mul(int64_t count, int64_t size, int64_t *out) {
  int64_t product;
  if (count < 0 || size < 0 || __builtin_mul_overflow(count, size, &product) ||
      product > (int64_t)1 << 62)
    return fail(ST_ENOMEM, "size overflow: %lld x %lld", (long long)count, (long long)size);
  *out = product;
  return ST_OK;
}

const char *format_bytes(char *buffer, size_t size, size_t bytes) {
  static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = (double)bytes;
  int unit = 0;
  while (value >= 1024 && unit < 4) {
    value /= 1024;
    unit++;
  }
  snprintf(buffer, size, unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
  return buffer;
}
