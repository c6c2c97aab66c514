// launch - `rille -n N ...`: starts N ranks of itself on this machine.
#ifndef RILLE_LUA_LAUNCH_H
#define RILLE_LUA_LAUNCH_H

#ifdef __cplusplus
extern "C" {
#endif

// argv[first] is N; what follows are the arguments of each rank. Returns the exit code of the job:
// the script's where ranks end by themselves, 128 + n after signal n.
int launch_main(int argc, char **argv, int first);

#ifdef __cplusplus
}
#endif
#endif
