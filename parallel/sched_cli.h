// sched_cli - `rille schedule`: draw, check and simulate a schedule from the command line.
#ifndef RILLE_PARALLEL_SCHED_CLI_H
#define RILLE_PARALLEL_SCHED_CLI_H

#include "parallel/sched.h"

#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

// Makes the schedule that a script describes. Returns 0, or the exit code with words in `err`.
typedef int (*SchedLoad)(void *user, const char *path, const SchedCase *sizes, Sched **out,
                         FILE *err);

// argv[0] is the word "schedule". `load` (NULL: no scripts) is asked for names that end in .lua.
// Returns the exit code: 0, 1 an error or a broken schedule, 2 wrong usage.
int sched_main(int argc, char **argv, FILE *out, FILE *err, SchedLoad load, void *user);

#ifdef __cplusplus
}
#endif
#endif
