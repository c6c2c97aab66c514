// tests - what a test file shares with the runner.
//
// tests/test_<x>.c defines `Suite *<x>_suite(void)`; the Makefile finds it.
#ifndef RILLE_TESTS_TESTS_H
#define RILLE_TESTS_TESTS_H

#include <check.h>

// Old names of check.h that stand in the way of core/status.h.
#undef fail
#undef fail_if
#undef fail_unless

// check writes down every assertion that holds, before it goes on: a loop over millions of elements
// would take minutes and fill the disk with them.
#undef ck_assert_msg
#define ck_assert_msg(expr, ...) \
  ((expr) ? (void)0              \
          : _ck_assert_failed(__FILE__, __LINE__, "Assertion '" #expr "' failed", __VA_ARGS__))

// Called while a suite is made: its tests run each in a process of its own (for tests that are to
// die, or of time-outs). Without it they run in the runner's process, since a fork after a
// threaded GEMM hangs the child.
void tests_use_fork(void);

// Says why something is not tested on this machine, and counts it. Not in a forked test.
void tests_skip(const char *why);

#endif
