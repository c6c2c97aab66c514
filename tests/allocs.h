// allocs - makes the n-th allocation fail. The tests are linked so that malloc, aligned_alloc,
// calloc, realloc, strdup and asprintf of the library pass through here.
#ifndef RILLE_TESTS_ALLOCS_H
#define RILLE_TESTS_ALLOCS_H

#include <stdbool.h>

// The n-th allocation of this thread from now fails, once; 0 switches it off.
void test_alloc_fail_at(int n);

// True if it has failed, so that n was not beyond the last allocation.
bool test_alloc_has_failed(void);

#endif
