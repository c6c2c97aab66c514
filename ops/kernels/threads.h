// threads - the one pool of threads that kernels run on.
//
// Work is cut into blocks whose size does not depend on the number of threads; blocks are handed
// out by a counter, so a slow core takes fewer of them. Which thread runs a block never shows in a
// result.
//
// The pool is made of POSIX threads, not of OpenMP's: how a waiting thread waits, where it is
// pinned and what happens at fork() can then be chosen by the process itself, and the same pool
// runs under gcc, clang and the thread sanitizer. A BLAS library called from a block is told to use
// one thread.
//
// Invariants:
//  1. Work of one block, or of a call from within a block, runs on the calling thread at once.
//  2. A second caller that finds the pool busy runs its work serially; it never waits for the pool.
//  3. After fork() the child has a pool of its own, made at first use.
//  4. The poll hook (core/poll.h) runs on the calling thread only, between blocks and where a long
//  one says threads_poll, at most once in 100 us.
#ifndef RILLE_OPS_KERNELS_THREADS_H
#define RILLE_OPS_KERNELS_THREADS_H

#include "core/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Handles the items [begin, end) of a parallel_for.
typedef void (*RangeFn)(void *context, int64_t begin, int64_t end);

// Calls fn for [0, n) cut into blocks of `grain` items (the last may be shorter), on all threads.
// Returns when all are done. n <= grain: one call, on this thread. grain >= 1.
void parallel_for(int64_t n, int64_t grain, RangeFn fn, void *context);

// Within a block: lets the poll hook run, if this is the calling thread and it has not run lately.
// A product is one block where there is one thread, and messages must move on meanwhile.
void threads_poll(void);

// Threads that parallel_for uses: RILLE_THREADS, else OMP_NUM_THREADS, else the cores that
// sched_getaffinity grants, shared among the ranks that a launcher put on this machine.
int threads_count(void);

// How many ranks a launcher put on this machine, and which of them this one is, from 0; without a
// launcher 1 and 0.
void threads_local_ranks(int *n_local, int *local);

// EVALUE if RILLE_THREADS, OMP_NUM_THREADS or RILLE_WAIT have values that mean nothing.
Status threads_environment(void);

// Sets the number of threads, 1 .. 256; the pool follows at its next use. Not from within a block.
void threads_set(int count);

// True if the pool's threads are pinned, one a core.
bool threads_pinned(void);

// Gives the calling thread back the process's whole set of cores: for a helper thread (data loader,
// watchdog) that was started after the pool was pinned.
void threads_unpin_self(void);

// Scratch of this thread: THREADS_SCRATCH bytes, 64-byte aligned, contents undefined, valid until
// the block ends. Touched pages count as workspace: threads_scratch_bytes() is their upper bound.
enum { THREADS_SCRATCH = 8 << 20 };
void *threads_scratch(void);
size_t threads_scratch_bytes(void);

#ifdef __cplusplus
}
#endif
#endif
