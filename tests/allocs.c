// allocs - makes the n-th allocation fail.
//
// The linker's --wrap=malloc sends calls of malloc to __wrap_malloc, and __real_malloc is the true
// one (a sanitizer's, under sanitizers).
#include "tests/allocs.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local int countdown;
static _Thread_local bool has_failed;

void *__real_malloc(size_t bytes);
void *__real_aligned_alloc(size_t alignment, size_t bytes);
void *__real_calloc(size_t n, size_t bytes);
void *__real_realloc(void *old, size_t bytes);
char *__real_strdup(const char *string);
void *__wrap_malloc(size_t bytes);
void *__wrap_aligned_alloc(size_t alignment, size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
void *__wrap_realloc(void *old, size_t bytes);
char *__wrap_strdup(const char *string);
int __wrap_asprintf(char **out, const char *format, ...);

void test_alloc_fail_at(int n) {
  countdown = n;
  has_failed = false;
}

bool test_alloc_has_failed(void) { return has_failed; }

static bool strikes(void) {
  if (countdown <= 0 || --countdown > 0) return false;
  has_failed = true;
  errno = ENOMEM;
  return true;
}

void *__wrap_malloc(size_t bytes) { return strikes() ? NULL : __real_malloc(bytes); }

void *__wrap_aligned_alloc(size_t alignment, size_t bytes) {
  return strikes() ? NULL : __real_aligned_alloc(alignment, bytes);
}

void *__wrap_calloc(size_t n, size_t bytes) { return strikes() ? NULL : __real_calloc(n, bytes); }

void *__wrap_realloc(void *old, size_t bytes) {
  return strikes() ? NULL : __real_realloc(old, bytes);
}

char *__wrap_strdup(const char *string) { return strikes() ? NULL : __real_strdup(string); }

int __wrap_asprintf(char **out, const char *format, ...) {
  if (strikes()) return -1;
  va_list args;
  va_start(args, format);
  int n = vasprintf(out, format, args);
  va_end(args);
  return n;
}
