// main - runs the C tests: tests [--list] [--suite NAME] [--case NAME] [--fork]
//
// Each failure is printed with file, line, case and test; the last line is the count.
#include "tests/tests.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "suites.h"

#define X(name) Suite *name##_suite(void);
SUITE_LIST(X)
#undef X

static const struct {
  const char *name;
  Suite *(*make)(void);
} suites[] = {
#define X(name) {#name, name##_suite},
    SUITE_LIST(X)
#undef X
};
enum { N_SUITES = sizeof suites / sizeof *suites };

static bool use_fork;
static int n_skipped;

void tests_use_fork(void) { use_fork = true; }

void tests_skip(const char *why) {
  printf("skipped: %s\n", why);
  n_skipped++;
}

typedef struct Options {
  const char *suite, *tcase; // NULL: all
  bool fork, list;
} Options;

static bool parse(int argc, char **argv, Options *options) {
  for (int i = 1; i < argc; i++) {
    bool has_value = i + 1 < argc;
    if (strcmp(argv[i], "--list") == 0) {
      options->list = true;
    } else if (strcmp(argv[i], "--fork") == 0) {
      options->fork = true;
    } else if (strcmp(argv[i], "--suite") == 0 && has_value) {
      options->suite = argv[++i];
    } else if (strcmp(argv[i], "--case") == 0 && has_value) {
      options->tcase = argv[++i];
    } else {
      return false;
    }
  }
  return true;
}

int main(int argc, char **argv) {
  Options options = {0};
  if (!parse(argc, argv, &options)) {
    fprintf(stderr, "usage: %s [--list] [--suite NAME] [--case NAME] [--fork]\n", argv[0]);
    return 2;
  }
  setvbuf(stdout, NULL, _IOLBF, 0);
  setenv("CK_DEFAULT_TIMEOUT", "60", 0); // seconds a forked test
  int n_run = 0, n_failed = 0;
  for (int i = 0; i < N_SUITES; i++) {
    if (options.list) puts(suites[i].name);
    if (options.list || (options.suite && strcmp(options.suite, suites[i].name) != 0)) continue;
    use_fork = options.fork;
    SRunner *runner = srunner_create(suites[i].make());
    srunner_set_fork_status(runner, use_fork ? CK_FORK : CK_NOFORK);
    srunner_run(runner, NULL, options.tcase, CK_NORMAL);
    n_run += srunner_ntests_run(runner);
    n_failed += srunner_ntests_failed(runner);
    srunner_free(runner);
  }
  if (options.list) return 0;
  if (n_run == 0) fprintf(stderr, "no test has this name\n");
  printf("%d passed, %d failed", n_run - n_failed, n_failed);
  if (n_skipped > 0) printf(", %d skipped", n_skipped);
  printf("\n");
  return n_run > 0 && n_failed == 0 ? 0 : 1;
}
