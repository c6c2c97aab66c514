// sched_heap - an arena over malloc.
#include "parallel/sched.h"

#include <stdlib.h>
#include <string.h>

enum { BLOCK = 64 << 10, BLOCK_MAX = 16 << 20 };

// A block of one arena; the list begins at arena->user, newest first. The payload follows.
typedef struct Block {
  struct Block *next;
  size_t bytes;
} Block;

// Blocks double in size, so that large schedules need few.
static void *more(SchedArena *arena, size_t *bytes) {
  Block *newest = arena->user;
  size_t size = newest ? 2 * newest->bytes : BLOCK;
  if (size > BLOCK_MAX) size = BLOCK_MAX;
  if (size < *bytes) size = *bytes;
  if (size > SIZE_MAX - sizeof(Block)) return NULL;
  Block *block = malloc(sizeof(Block) + size);
  if (!block) return NULL;
  *block = (Block){.next = newest, .bytes = size};
  arena->user = block;
  *bytes = size;
  return block + 1;
}

void sched_heap_open(SchedArena *arena) {
  memset(arena, 0, sizeof *arena);
  arena->more = more;
}

void sched_heap_close(SchedArena *arena) {
  for (Block *block = arena->user, *next; block; block = next) {
    next = block->next;
    free(block);
  }
  memset(arena, 0, sizeof *arena);
}
