// main - the program `rille`: scripts, one-liners, the prompt, and small tools.
#include "lua/launch.h"
#include "lua/runner.h"
#include "lua/sched_bind.h"

#include "core/file.h"
#include "ops/ops.h"
#include "parallel/comm.h"
#include "parallel/sched_cli.h"

#include <lualib.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

// X(name, default, meaning): every environment variable that Rille reads.
#define ENVIRONMENT_LIST(X)                                                                        \
  X("RILLE_CPU", "the best there is", "CPU kernels: plain, avx2, avx512 or amx")                   \
  X("RILLE_THREADS", "the cores, shared by the ranks here", "threads of the CPU kernels")          \
  X("OMP_NUM_THREADS", "", "the same, where RILLE_THREADS is not set")                             \
  X("RILLE_WAIT", "active if the threads fit the cores", "how threads wait: active or passive")    \
  X("RILLE_MPI", "Open MPI if it is there", "what rille -n starts: openmpi or mpich")              \
  X("RILLE_DOING", "set by rille -n", "where ranks keep what they are doing")                      \
  X("RILLE_LAUNCH", "set by rille -n", "where ranks say with which code they end")                 \
  X("RILLE_STALL_TIMEOUT", "300", "seconds without a sign of life after which a rank has stalled") \
  X("RILLE_FAKE_NODE", "the host's name",                                                          \
    "for tests: a name, rank%n, rank/n or rank:name,.. as this node")                              \
  X("RILLE_FAKE_CLOCK", "", "for tests: rank:seconds,... by which clocks are off")                 \
  X("RILLE_FAKE_LINK", "", "for tests: milliseconds that each message takes at least")             \
  X("RILLE_FAKE_SLOW", "", "for tests: rank:factor,... by which actions take longer")              \
  X("RILLE_TEST_PIECE", "1 GiB", "for tests: bytes of the pieces of a long message")               \
  X("RILLE_VERIFY", "", "set by rille verify: where a run writes what it computes")                \
  X("RILLE_FAULT_WRITE", "", "[part of a path:]n: the n-th system call of a file writer fails")    \
  X("XDG_STATE_HOME", "~/.local/state", "the prompt keeps its history there")                      \
  X("NO_COLOR", "", "if set, no colours on the terminal")                                          \
  X("TERM, COLORTERM", "", "which colours the terminal has")                                       \
  X("COLUMNS", "120", "width of drawings that do not go to a terminal")

static const char usage[] =
    "rille                           a prompt; Ctrl-D leaves it\n"
    "rille script.lua [argument...]  run a script (its own --help lists its options)\n"
    "rille -e CODE [argument...]     run CODE and print what it returns\n"
    "rille -i [script.lua]           run the script, then the prompt\n"
    "rille -n N script.lua ...       run N ranks of it on this machine (starts mpirun)\n"
    "rille info [--tp N --pp N ...]  devices, libraries; with several ranks, who is where\n"
    "rille schedule NAME|x.lua ...   draw, check and simulate a pipeline schedule\n"
    "rille verify x.lua --a L --b L  run x.lua under two layouts, compare every bit\n"
    "rille --version, rille --help\n"
    "\n"
    "Exit codes: 0 ok, 1 error, 2 wrong usage, 3 non-finite loss, 75 stopped with a checkpoint.\n"
    "\n"
    "Environment:\n";

static int help(void) {
  fputs(usage, stdout);
#define X(name, fallback, meaning)                                             \
  printf("  %-19s %s%s%s%s\n", name, meaning, *fallback ? " (" : "", fallback, \
         *fallback ? ")" : "");
  ENVIRONMENT_LIST(X)
#undef X
  return 0;
}

// The global table `arg`: the script at 0, its arguments from 1 on, the program below 0.
static void set_arg(lua_State *L, int argc, char **argv, int script) {
  lua_createtable(L, argc - script, script + 1);
  for (int i = 0; i < argc; i++) {
    lua_pushstring(L, argv[i]);
    lua_rawseti(L, -2, i - script);
  }
  lua_setglobal(L, "arg");
}

// require also looks beside the script.
static void add_script_folder(lua_State *L, const char *script) {
  const char *slash = strrchr(script, '/');
  if (!slash) return;
  lua_getglobal(L, "package");
  lua_getfield(L, -1, "path");
  lua_pushlstring(L, script, (size_t)(slash - script));
  lua_pushfstring(L, "%s;%s/?.lua", lua_tostring(L, -2), lua_tostring(L, -1));
  lua_setfield(L, -4, "path");
  lua_pop(L, 3);
}

static int run_script(lua_State *L, int argc, char **argv, int script) {
  set_arg(L, argc, argv, script);
  add_script_folder(L, argv[script]);
  if (access(argv[script], R_OK) != 0) {
    lua_pushfstring(L, "there is no script %s", argv[script]);
    return runner_report_as(L, EXIT_USAGE);
  }
  runner_strict(L);
  if (luaL_loadfile(L, argv[script]) != LUA_OK) return runner_report(L);
  int n = argc - script - 1;
  luaL_checkstack(L, n, "too many arguments");
  for (int i = 1; i <= n; i++) lua_pushstring(L, argv[script + i]);
  return runner_call(L, n, 0) == LUA_OK ? 0 : runner_report(L);
}

static int run_code(lua_State *L, int argc, char **argv, int code) {
  set_arg(L, argc, argv, code);
  lua_getglobal(L, "require");
  lua_pushstring(L, "rille");
  lua_call(L, 1, 1);
  lua_setglobal(L, "rille");
  runner_strict(L);
  if (luaL_loadbuffer(L, argv[code], strlen(argv[code]), "=-e") != LUA_OK) return runner_report(L);
  int at = lua_gettop(L), n_args = argc - code - 1;
  luaL_checkstack(L, n_args + 4, "too many arguments");
  for (int i = 1; i <= n_args; i++) lua_pushstring(L, argv[code + i]);
  if (runner_call(L, n_args, LUA_MULTRET) != LUA_OK) return runner_report(L);
  int n = lua_gettop(L) - at + 1;
  if (n == 0) return 0;
  lua_getglobal(L, "print");
  lua_insert(L, at);
  return runner_call(L, n, 0) == LUA_OK ? 0 : runner_report(L);
}

// A tool that is a module of the library: module.main(arguments).
static int run_tool(lua_State *L, int argc, char **argv, const char *module) {
  set_arg(L, argc, argv, 1);
  lua_getglobal(L, "require");
  lua_pushstring(L, module);
  lua_call(L, 1, 1);
  lua_getfield(L, -1, "main");
  lua_getglobal(L, "arg");
  return runner_call(L, 1, 0) == LUA_OK ? 0 : runner_report(L);
}

// `rille schedule`: needs a Lua state only for schedules that are scripts.
static int schedule_tool(int argc, char **argv) {
  bool has_script = false;
  for (int i = 2; i < argc; i++) {
    size_t length = strlen(argv[i]);
    has_script = has_script || (length > 4 && strcmp(argv[i] + length - 4, ".lua") == 0);
  }
  lua_State *L = has_script ? runner_new(argv[0]) : NULL;
  int code = sched_main(argc - 1, argv + 1, stdout, stderr, L ? sched_load_script : NULL, L);
  if (L) lua_close(L);
  return code;
}

typedef struct Start {
  int argc;
  char **argv;
  int code;
} Start;

static int usage_error(lua_State *L, const char *words, const char *what) {
  lua_pushfstring(L, "%s%s\n    hint: rille --help lists what there is", words, what);
  return runner_report_as(L, EXIT_USAGE);
}

static int no_prompt(lua_State *L) {
  lua_pushstring(L, "the prompt is for one process: give a script");
  return runner_report_as(L, EXIT_USAGE);
}

static int no_verify(lua_State *L) {
  lua_pushstring(L, "verify starts the ranks of its layouts itself: leave out mpirun, or -n");
  return runner_report_as(L, EXIT_USAGE);
}

static int dispatch(lua_State *L, int argc, char **argv) {
  if (argc < 2) return runner_rille(L)->world > 1 ? no_prompt(L) : repl_run(L);
  const char *word = argv[1];
  if (strcmp(word, "info") == 0) return info_main(L, argc - 2, argv + 2);
  if (strcmp(word, "verify") == 0)
    return runner_rille(L)->world > 1 ? no_verify(L) : run_tool(L, argc, argv, "rille.verify");
  if (strcmp(word, "-e") == 0)
    return argc < 3 ? usage_error(L, "-e wants code", "") : run_code(L, argc, argv, 2);
  if (strcmp(word, "-i") == 0) {
    if (runner_rille(L)->world > 1) return no_prompt(L);
    int code = argc > 2 ? run_script(L, argc, argv, 2) : 0;
    return code ? code : repl_run(L);
  }
  if (word[0] == '-' && word[1]) return usage_error(L, "there is no option ", word);
  return run_script(L, argc, argv, 1);
}

// Under pcall, so that nothing that the Lua API raises on the way ends in a panic.
static int protected_start(lua_State *L) {
  Start *start = lua_touserdata(L, 1);
  lua_settop(L, 0);
  start->code = dispatch(L, start->argc, start->argv);
  return 0;
}

// Every rank finds the same; the first says it, and the others let it.
static int no_world(void) {
  Launch launch;
  launch_read(&launch);
  if (launch.rank == 0)
    fprintf(stderr, "rille: %s\n    hint: %s\n", status_message(), status_hint());
  else
    nanosleep(&(struct timespec){.tv_nsec = 500000000}, NULL);
  return EXIT_ERROR;
}

// The exit code of what was printed: a failure if it did not get out.
static int written(int code) {
  if (code != 0 || (fflush(stdout) == 0 && !ferror(stdout))) return code;
  fprintf(stderr, "rille: standard output could not be written (a full disk?)\n");
  return EXIT_ERROR;
}

int main(int argc, char **argv) {
  if (argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0))
    return written(help());
  if (argc > 1 && (strcmp(argv[1], "--version") == 0 || strcmp(argv[1], "-v") == 0)) {
    printf("rille %s\n", RILLE_VERSION);
    return written(0);
  }
  if (ops_environment() != ST_OK || file_environment() != ST_OK || launch_environment() != ST_OK) {
    fprintf(stderr, "rille: %s\n    hint: rille --help lists what there is\n", status_message());
    return EXIT_USAGE;
  }
  if (argc > 1 && strcmp(argv[1], "schedule") == 0) return written(schedule_tool(argc, argv));
  if (argc > 1 && strcmp(argv[1], "-n") == 0) return launch_main(argc, argv, 2);
  Comm *world; // a launched rank learns at once whether its launcher fits
  if (comm_world(&world) != ST_OK) return no_world();
  lua_State *L = runner_new(argv[0]);
  if (!L) {
    fprintf(stderr, "rille: not enough memory to start\n");
    return EXIT_ERROR;
  }
  Start start = {argc, argv, EXIT_ERROR};
  lua_pushcfunction(L, protected_start);
  lua_pushlightuserdata(L, &start);
  if (lua_pcall(L, 1, 0, 0) != LUA_OK) runner_report(L);
  if (start.code == EXIT_SUCCESS && comm_collectives_settle() != ST_OK) {
    fprintf(stderr, "rille: %s\n", status_message());
    start.code = EXIT_ERROR;
  }
  lua_close(L);
  start.code = written(start.code);
  comm_leaving(start.code);
  comm_world_close(world);
  return start.code;
}
