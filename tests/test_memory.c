// test_memory - the pool: blocks of all sizes, cached, cut from slabs, given back.
#include "core/asan_impl.h"
#include "core/memory.h"
#include "tests/allocs.h"
#include "tests/tests.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { MIB = 1 << 20, BLOCKS = 64, SLAB = 8 << 20 };
static const bool HAS_SLABS = !HAS_ASAN;

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
#if HAS_ASAN // keeps what is freed
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
#if !HAS_ASAN
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

// A pool that holds enough to begin slabs.
static Pool *pool_with(size_t limit, void **held) {
  Pool *pool;
  ck_assert_int_eq(pool_new(limit, &pool), ST_OK);
  ck_assert_int_eq(pool_alloc(pool, 2 * MIB, MEM_ACTIVATIONS, held), ST_OK);
  return pool;
}

static char *take_block(Pool *pool, size_t bytes) {
  void *p;
  ck_assert_int_eq(pool_alloc(pool, bytes, MEM_ACTIVATIONS, &p), ST_OK);
  memset(p, 1, bytes);
  return p;
}

// Where there is no memory for a slab's record, or for the slab, a block is one of its own.
START_TEST(a_block_is_had_where_a_slab_is_not) {
  if (!HAS_SLABS) return;
  for (int n = 1; n <= 2; n++) {
    void *held;
    Pool *pool = pool_with(0, &held);
    test_alloc_fail_at(n);
    char *block = take_block(pool, 100 << 10);
    ck_assert(test_alloc_has_failed());
    test_alloc_fail_at(0);
    char *next = take_block(pool, 100 << 10); // of a slab
    pool_free(pool, block, 100 << 10, MEM_ACTIVATIONS);
    pool_free(pool, next, 100 << 10, MEM_ACTIVATIONS);
    pool_free(pool, held, 2 * MIB, MEM_ACTIVATIONS);
    pool_delete(pool);
  }
}
END_TEST

// What has come back to a slab and what was never cut from it are one.
START_TEST(the_end_of_a_slab_is_joined_to_what_is_free_before_it) {
  if (!HAS_SLABS) return;
  enum { N = 7, SIZE = MIB + MIB / 8 };
  void *held;
  char *block[N];
  Pool *pool = pool_with(0, &held);
  for (int i = 0; i < N; i++) block[i] = take_block(pool, SIZE);
  ck_assert_ptr_eq(block[N - 1], block[0] + (N - 1) * SIZE);
  pool_free(pool, block[N - 1], SIZE, MEM_ACTIVATIONS);
  pool_trim(pool);
  char *larger = take_block(pool, SIZE + MIB / 8);
  ck_assert_ptr_eq(larger, block[N - 1]);
  pool_free(pool, larger, SIZE + MIB / 8, MEM_ACTIVATIONS);
  for (int i = 0; i < N - 1; i++) pool_free(pool, block[i], SIZE, MEM_ACTIVATIONS);
  pool_free(pool, held, 2 * MIB, MEM_ACTIVATIONS);
  pool_delete(pool);
}
END_TEST

// At the limit, what lies in the lists is joined, and a block of another size is cut from it.
START_TEST(what_lists_hold_of_a_slab_is_used_for_another_size) {
  if (!HAS_SLABS) return;
  enum { N = 7, SIZE = MIB + MIB / 8, LARGER = 7 * (MIB / 4) };
  void *held;
  char *block[N];
  Pool *pool = pool_with(2 * MIB + SLAB, &held);
  for (int i = 0; i < N; i++) block[i] = take_block(pool, SIZE);
  for (int i = 2; i < 4; i++) pool_free(pool, block[i], SIZE, MEM_ACTIVATIONS);
  char *larger = take_block(pool, LARGER);
  ck_assert_ptr_eq(larger, block[2]);
  pool_free(pool, larger, LARGER, MEM_ACTIVATIONS);
  for (int i = 0; i < N; i++)
    if (i < 2 || i > 3) pool_free(pool, block[i], SIZE, MEM_ACTIVATIONS);
  pool_free(pool, held, 2 * MIB, MEM_ACTIVATIONS);
  pool_delete(pool);
}
END_TEST

// Slabs count whole: no second one is begun where the limit has no room for it, though the blocks
// of the first leave some.
START_TEST(slabs_count_against_the_limit_whole) {
  if (!HAS_SLABS) return;
  enum { N = 4, SIZE = 13 * (MIB / 8) }; // four in a slab, which leave 1.5 MiB
  for (int has_room = 0; has_room < 2; has_room++) {
    void *held;
    char *block[N];
    Pool *pool = pool_with(2 * MIB + 2 * SLAB - (has_room ? 0 : MIB), &held);
    for (int i = 0; i < N; i++) block[i] = take_block(pool, SIZE);
    test_alloc_fail_at(2); // a slab takes two, a block of its own one
    char *last = take_block(pool, SIZE);
    ck_assert_int_eq(test_alloc_has_failed(), has_room);
    test_alloc_fail_at(0);
    pool_free(pool, last, SIZE, MEM_ACTIVATIONS);
    for (int i = 0; i < N; i++) pool_free(pool, block[i], SIZE, MEM_ACTIVATIONS);
    pool_free(pool, held, 2 * MIB, MEM_ACTIVATIONS);
    pool_delete(pool);
  }
}
END_TEST

Suite *memory_suite(void);
Suite *memory_suite(void) {
  Suite *suite = suite_create("memory");
  TCase *tcase = tcase_create("pool");
  tcase_add_test(tcase, a_block_is_had_where_a_slab_is_not);
  tcase_add_test(tcase, blocks_do_not_overlap_and_are_used_again);
  tcase_add_test(tcase, slabs_count_against_the_limit_whole);
  tcase_add_test(tcase, slabs_that_are_held_are_used_for_other_sizes);
  tcase_add_test(tcase, the_end_of_a_slab_is_joined_to_what_is_free_before_it);
  tcase_add_test(tcase, trim_gives_memory_back_and_leaves_what_is_held);
  tcase_add_test(tcase, what_lists_hold_of_a_slab_is_used_for_another_size);
  suite_add_tcase(suite, tcase);
  return suite;
}
