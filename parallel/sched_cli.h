// sched_cli - `rille schedule`: draw, check and simulate a schedule from the command line.
#ifndef RILLE_PARALLEL_SCHED_CLI_H
#define RILLE_PARALLEL_SCHED_CLI_H

#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

// argv[0] is the word "schedule". Returns the exit code: 0, 1 an error or a broken schedule,
// 2 wrong usage.
int sched_main(int argc, char **argv, FILE *out, FILE *err);

#ifdef __cplusplus
}
#endif
#endif
