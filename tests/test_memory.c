// test_memory - the pool: blocks of all sizes, cached, cut from slabs, given back.
#include "core/memory.h"
#include "tests/tests.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { MIB = 1 << 20, BLOCKS = 64 };

// Bytes of this process that lie in memory.
static size_t resident(void) {
  long size = 0, pages = 0;
  FILE *f = fopen("/proc/self/statm", "r");
  ck_assert_ptr_nonnull(f);
  ck_assert_int_eq(fscanf(f, "%ld %ld", &size, &pages), 2);
  fclose(f);
  return (size_t)pages * (size_t)sysconf(_SC_PAGESIZE);
}

static size_t size_at(int i) { return (size_t)(i % 7 + 1) * 48 * 1024 + (size_t)i * 24 * 1024; }

// Takes BLOCKS blocks and fills each with its number.
static void take_all(Pool *pool, unsigned char **block) {
  for (int i = 0; i < BLOCKS; i++) {
    void *p;
    ck_assert_int_eq(pool_alloc(pool, size_at(i), MEM_ACTIVATIONS, &p), ST_OK);
    block[i] = p;
    ck_assert_uint_eq((uintptr_t)p % 64, 0);
    memset(p, i, size_at(i));
  }
}

static void check_block(const unsigned char *block, int i) {
  for (size_t at = 0; at < size_at(i); at++) ck_assert_uint_eq(block[at], (unsigned)i);
}

START_TEST(blocks_do_not_overlap_and_are_used_again) {
  Pool *pool;
  unsigned char *block[BLOCKS];
  ck_assert_int_eq(pool_new(0, &pool), ST_OK);
  for (int round = 0; round < 3; round++) {
    take_all(pool, block);
    for (int i = 0; i < BLOCKS; i++) check_block(block[i], i);
    for (int i = 0; i < BLOCKS; i++) pool_free(pool, block[i], size_at(i), MEM_ACTIVATIONS);
    if (round == 1) pool_trim(pool);
  }
  ck_assert_uint_eq(pool_total(pool).current, 0);
  pool_delete(pool);
}
END_TEST

START_TEST(trim_gives_memory_back_and_leaves_what_is_held) {
  enum { HELD = BLOCKS / 2 };
  Pool *pool;
  unsigned char *block[BLOCKS], *held;
  ck_assert_int_eq(pool_new(0, &pool), ST_OK);
  take_all(pool, block);
  size_t before = resident(), freed = 0;
  for (int i = 0; i < BLOCKS; i++) {
    if (i == HELD) continue;
    pool_free(pool, block[i], size_at(i), MEM_ACTIVATIONS);
    freed += size_at(i);
  }
  pool_trim(pool);
#if defined(__SANITIZE_ADDRESS__) // keeps what is freed
  (void)before, (void)freed;
#else
  ck_assert_uint_ge(before, resident() + freed / 2);
#endif
  held = block[HELD];
  take_all(pool, block); // what is left of the slab of the held one is handed out too
  check_block(held, HELD);
  for (int i = 0; i < BLOCKS; i++) check_block(block[i], i);
  for (int i = 0; i < BLOCKS; i++) pool_free(pool, block[i], size_at(i), MEM_ACTIVATIONS);
  pool_free(pool, held, size_at(HELD), MEM_ACTIVATIONS);
  pool_delete(pool);
}
END_TEST

// Blocks that stay, one in every slab, and sizes that change from step to step: what is free in the
// slabs is used for other sizes, and memory stays within the limit.
START_TEST(slabs_that_are_held_are_used_for_other_sizes) {
  enum { STEPS = 200, EACH = 40, LIMIT = 96 << 20 };
  Pool *pool;
  void *kept[STEPS], *block[EACH];
  ck_assert_int_eq(pool_new(LIMIT, &pool), ST_OK);
  size_t before = resident(), most = before;
  for (int step = 0; step < STEPS; step++) {
    size_t size = (size_t)(20 + step * 7 % 1500) << 10;
    for (int i = 0; i < EACH; i++) {
      ck_assert_int_eq(pool_alloc(pool, size, MEM_ACTIVATIONS, &block[i]), ST_OK);
      memset(block[i], step, size);
      if (i == EACH / 2) {
        ck_assert_int_eq(pool_alloc(pool, 20 << 10, MEM_ACTIVATIONS, &kept[step]), ST_OK);
        memset(kept[step], step, 20 << 10);
      }
    }
    if (resident() > most) most = resident();
    for (int i = 0; i < EACH; i++) {
      ck_assert_uint_eq(((unsigned char *)block[i])[size - 1], (unsigned char)step);
      pool_free(pool, block[i], size, MEM_ACTIVATIONS);
    }
  }
#if !defined(__SANITIZE_ADDRESS__)
  ck_assert_uint_le(most - before, (size_t)LIMIT + (16 << 20));
#endif
  for (int step = 0; step < STEPS; step++) {
    for (int at = 0; at < 20 << 10; at++)
      ck_assert_uint_eq(((unsigned char *)kept[step])[at], (unsigned char)step);
    pool_free(pool, kept[step], 20 << 10, MEM_ACTIVATIONS);
  }
  pool_delete(pool);
}
END_TEST

Suite *memory_suite(void);
Suite *memory_suite(void) {
  Suite *suite = suite_create("memory");
  TCase *tcase = tcase_create("pool");
  tcase_add_test(tcase, blocks_do_not_overlap_and_are_used_again);
  tcase_add_test(tcase, slabs_that_are_held_are_used_for_other_sizes);
  tcase_add_test(tcase, trim_gives_memory_back_and_leaves_what_is_held);
  suite_add_tcase(suite, tcase);
  return suite;
}
