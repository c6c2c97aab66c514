// launch - `rille -n N ...`: finds the launcher of an MPI that Rille was built for, starts it with
// flags that suit one machine, passes signals on, and shows of its words what a user needs.
//
//     rille -n 4 x.lua ---> mpirun -n 4 rille x.lua ---> 4 ranks
//            ^  stderr, without the launcher's banners  |
//            +------------------------------------------+
//
// Signals: an mpirun that gets SIGTERM or SIGINT sends its ranks SIGTERM and kills them a second
// later, too soon for a checkpoint and too late for Ctrl-C, but it forwards SIGUSR1. So SIGINT and
// the first SIGTERM become SIGUSR1, and a byte in a file that the ranks share says what is meant:
// they stop in order, or end at once. A second SIGTERM is passed on as it is.
#include "lua/launch.h"

#include "lua/runner.h"
#include "parallel/comm.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_RANKS = 4096, LINE = 4096 };

// ---- which launcher --------------------------------------------------------------------------

typedef struct Mpi {
  const char *plugin, *sign; // the sign is in what its launcher says to --version
  const char *names[6];      // those with a suffix need no question
  const char *flags[6];
  const char *package;
  bool speaks_on_stdout; // its own words too
} Mpi;

static const Mpi mpis[] = {
    {"openmpi",
     "Open MPI",
     {"mpirun.openmpi", "mpirun", "mpiexec", NULL},
     {"--oversubscribe", "--bind-to", "none", NULL},
     "openmpi-bin",
     false},
    {"mpich",
     "HYDRA",
     {"mpiexec.mpich", "mpiexec.hydra", "mpiexec", "mpirun", NULL},
     {"-launcher", "fork", "-bind-to", "none", NULL},
     "mpich",
     true},
};
enum { MPIS = sizeof mpis / sizeof *mpis };

static bool is_on_path(const char *name) {
  const char *path = getenv("PATH");
  char file[LINE];
  while (path && *path) {
    size_t n = strcspn(path, ":");
    snprintf(file, sizeof file, "%.*s/%s", (int)n, path, name);
    if (access(file, X_OK) == 0) return true;
    path += n + (path[n] == ':');
  }
  return false;
}

static bool has_sign(const char *name, const char *sign) {
  char command[128], line[256];
  snprintf(command, sizeof command, "%s --version 2>/dev/null", name);
  FILE *pipe = popen(command, "r");
  bool found = false;
  while (pipe && fgets(line, sizeof line, pipe)) found = found || strstr(line, sign);
  if (pipe) pclose(pipe);
  return found;
}

static const char *launcher_of(const Mpi *mpi) {
  for (int i = 0; mpi->names[i]; i++) {
    const char *name = mpi->names[i];
    if (is_on_path(name) && (strchr(name, '.') || has_sign(name, mpi->sign))) return name;
  }
  return NULL;
}

static const char *find_launcher(const Mpi **out) {
  const char *wanted = getenv("RILLE_MPI");
  const Mpi *built = NULL;
  for (int i = 0; i < MPIS; i++) {
    if (wanted && *wanted && strcmp(wanted, mpis[i].plugin) != 0) continue;
    if (!launch_has_plugin(mpis[i].plugin)) continue;
    *out = built = &mpis[i];
    const char *name = launcher_of(built);
    if (name) return name;
  }
  if (built)
    fprintf(stderr, "rille: -n: there is no launcher of %s on the PATH\n    hint: install %s\n",
            built->sign, built->package);
  else
    fprintf(stderr,
            "rille: -n: Rille was built without %s\n    hint: install Open MPI (libopenmpi-dev, "
            "openmpi-bin) and build again with make\n",
            wanted && *wanted ? wanted : "an MPI");
  return NULL;
}

// What the user has set stays.
static void set_environment(int n) {
  if (geteuid() == 0) {
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 0);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 0);
  }
  if (n > sysconf(_SC_NPROCESSORS_ONLN)) setenv("OMPI_MCA_mpi_yield_when_idle", "1", 0);
  if (!getenv("OMPI_MCA_pml")) setenv("OMPI_MCA_btl", "self,vader", 0);
  setenv("OMPI_MCA_pml", "ob1", 0);
  setenv("OMPI_MCA_plm", "isolated", 0); // this machine alone, also inside a Slurm job
}

// A file without a name, which ranks find by the path in RILLE_LAUNCH: the signal that this process
// got (0: none), and a byte for each rank that has ended, its exit code.
static int share_codes(void) {
  char path[64];
  int file = memfd_create("rille-codes", MFD_CLOEXEC);
  snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)getpid(), file);
  if (file >= 0 && write(file, "", 1) == 1) setenv("RILLE_LAUNCH", path, 1);
  return file;
}

// A file where each rank keeps, in a page of its own, what it is doing: it outlives the rank. Found
// by the path in RILLE_DOING.
static int share_words(int n) {
  char path[64];
  int file = memfd_create("rille-doing", MFD_CLOEXEC);
  snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)getpid(), file);
  if (file >= 0 && ftruncate(file, (off_t)n * COMM_WORDS_PAGE) == 0) setenv("RILLE_DOING", path, 1);
  return file;
}

// ---- what the launcher says ------------------------------------------------------------------

// What the launcher's words tell of the end.
typedef struct News {
  const char *launcher;
  bool has_reported; // a rank has said why
  int n_ranks;
  int told;  // descriptor of the file where ranks say with which code they end
  int doing; // ... where they keep what they are doing
  int killed_rank, killed_by;
  char killed_where[128];
} News;

// Reads lines of the ranks and of the launcher, and keeps back the launcher's.
typedef struct Filter {
  FILE *to;
  News *news;
  int from; // -1: at its end
  char line[LINE];
  size_t n;
  bool is_open;        // the beginning of this line has been shown already
  bool is_banner;      // inside of one, between two rules
  char held[2 * LINE]; // an empty line and a rule, which may begin one
} Filter;

static bool starts(const char *line, const char *with) {
  return strncmp(line, with, strlen(with)) == 0;
}

// A line of nothing but - or =.
static bool is_rule(const char *line) {
  size_t n = strspn(line, "-");
  if (n < 40) n = strspn(line, "=");
  return n >= 40 && (line[n] == '\n' || line[n] == 0);
}

static bool begins_banner(const char *line) {
  static const char *const known[] = {"MPI_ABORT was invoked", "Primary job  terminated",
                                      "=   BAD TERMINATION", NULL};
  for (int i = 0; known[i]; i++)
    if (starts(line, known[i])) return true;
  line = strchr(line, ' '); // after the launcher's own name
  return line && (starts(line, " noticed that process rank") || starts(line, " detected that one"));
}

static bool is_chatter(const char *line) {
  static const char *const parts[] = {"orte_base_help_aggregate",
                                      "more process has sent help",
                                      "more processes have sent help",
                                      ": Forwarding signal",
                                      ": killing job...",
                                      "Sending Ctrl-C to processes",
                                      "Press Ctrl-C again",
                                      "abort is already in progress",
                                      "/util/show_help.c",
                                      NULL};
  for (int i = 0; parts[i]; i++)
    if (strstr(line, parts[i])) return true;
  return starts(line, "Abort(") || starts(line, "YOUR APPLICATION TERMINATED WITH") ||
         starts(line, "This typically refers to a problem with your application") ||
         starts(line, "Please see the FAQ page for debugging suggestions");
}

// Learns from a line of the launcher how the job ended.
static void learn(News *news, const char *line) {
  const char *text = strstr(line, "process rank "), *sign = strstr(line, "exited on signal ");
  if (text && sign) {
    sscanf(text, "process rank %d", &news->killed_rank);
    sscanf(sign, "exited on signal %d", &news->killed_by);
    const char *node = strstr(line, "on node ");
    if (node) sscanf(node, "on node %127s", news->killed_where);
  }
  text = strstr(line, "EXIT STRING: ");
  if (text && (sign = strstr(text, "(signal "))) sscanf(sign, "(signal %d", &news->killed_by);
  int pid;
  char node[100];
  if (sscanf(line, "=   PID %d RUNNING AT %99s", &pid, node) == 2)
    snprintf(news->killed_where, sizeof news->killed_where, "%s, process %d", node, pid);
}

static void show(const Filter *f, const char *text) { fputs(text, f->to); }

static void show_held(Filter *f) {
  show(f, f->held);
  f->held[0] = 0;
}

static void take_line(Filter *f, const char *line) {
  if (f->is_banner) {
    learn(f->news, line);
    if (is_rule(line)) f->is_banner = false;
    return;
  }
  if (f->held[0] && begins_banner(line)) { // the line after a rule tells
    f->held[0] = 0;
    learn(f->news, line);
    f->is_banner = true;
    return;
  }
  if (is_rule(line) || (line[0] == '\n' && f->to == stdout)) {
    if (is_rule(f->held) || f->held[0] == 0 || line[0] == '\n') show_held(f);
    snprintf(f->held + strlen(f->held), sizeof f->held - strlen(f->held), "%s", line);
    return;
  }
  show_held(f);
  if (is_chatter(line)) {
    learn(f->news, line);
    return;
  }
  if (starts(line, "rille: ") && f->to == stderr) f->news->has_reported = true;
  show(f, line);
}

static void take(Filter *f, const char *bytes, size_t n) {
  for (size_t i = 0; i < n; i++) {
    f->line[f->n++] = bytes[i];
    if (bytes[i] != '\n' && f->n < sizeof f->line - 1) continue;
    f->line[f->n] = 0;
    if (f->is_open)
      show(f, f->line);
    else
      take_line(f, f->line);
    f->is_open = bytes[i] != '\n';
    f->n = 0;
  }
  fflush(f->to);
}

// What does not end in a line break is shown when nothing more comes.
static void take_pause(Filter *f) {
  if (f->is_banner) return;
  if (f->held[0] == '\n' && !f->held[1]) show_held(f);
  if (f->n > 0 && !f->held[0]) {
    f->line[f->n] = 0;
    show(f, f->line);
    f->n = 0;
    f->is_open = true;
  }
  fflush(f->to);
}

static void take_end(Filter *f) {
  show_held(f);
  take_pause(f);
}

// ---- signals ---------------------------------------------------------------------------------

// What the handler leaves to the loop: a handler gets nothing but a number.
static struct { volatile sig_atomic_t stop, kill, interrupt, file; } asked;

// At once, so that ranks know before the launcher, which has Ctrl-C from the terminal itself, turns
// to them.
static void mean(int number) {
  unsigned char byte = (unsigned char)number;
  int before = errno;
  if (pwrite(asked.file, &byte, 1, 0) != 1) byte = 0; // ranks take the signal as it comes
  errno = before;
}

static void on_signal(int number) {
  if (number == SIGINT)
    asked.interrupt = 1;
  else if (number == SIGTERM && asked.stop)
    asked.kill = 1;
  else
    asked.stop = 1;
  if (!asked.interrupt || number == SIGINT) mean(number);
}

static void catch_signals(int file) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  asked.file = file;
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  sigaction(SIGTERM, &action, NULL);
  sigaction(SIGUSR1, &action, NULL);
  sigaction(SIGINT, &action, NULL);
}

// Passes on what has been asked since; `passed` is what has been passed on already.
static void pass_signals(pid_t child, int passed[3]) {
  if (asked.stop && !passed[0]) passed[0] = 1, kill(child, SIGUSR1);
  if (asked.kill && !passed[1]) passed[1] = 1, kill(child, SIGTERM);
  if (asked.interrupt && !passed[2]) passed[2] = 1, kill(child, SIGUSR1);
}

// ---- the job ---------------------------------------------------------------------------------

static void start_launcher(const char *launcher, const Mpi *mpi, int n, int argc, char **argv) {
  char count[16], program[LINE];
  const char **words = calloc((size_t)argc + 16, sizeof *words);
  ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
  if (!words) _exit(EXIT_ERROR);
  snprintf(count, sizeof count, "%d", n);
  if (length > 0)
    program[length] = 0;
  else
    snprintf(program, sizeof program, "%s", argv[0]);
  int k = 0;
  words[k++] = launcher;
  words[k++] = "-n";
  words[k++] = count;
  for (int i = 0; mpi->flags[i]; i++) words[k++] = mpi->flags[i];
  words[k++] = program;
  for (int i = 1; i < argc; i++) words[k++] = argv[i];
  prctl(PR_SET_PDEATHSIG, SIGTERM); // where this process is killed, the job ends too
  execvp(launcher, (char **)(uintptr_t)words);
  fprintf(stderr, "rille: %s cannot be started: %s\n", launcher, strerror(errno));
  _exit(EXIT_ERROR);
}

// Relays until both streams of the launcher have ended; returns what waitpid gives.
static int relay(Filter filters[2], pid_t child) {
  char bytes[LINE];
  int passed[3] = {0, 0, 0};
  while (filters[0].from >= 0 || filters[1].from >= 0) {
    pass_signals(child, passed);
    struct pollfd ready[2] = {{.fd = filters[0].from, .events = POLLIN},
                              {.fd = filters[1].from, .events = POLLIN}};
    int n = poll(ready, 2, 100);
    for (int i = 0; i < 2; i++) {
      Filter *f = &filters[i];
      if (f->from < 0) continue;
      if (n == 0) take_pause(f);
      if (n <= 0 || !ready[i].revents) continue;
      ssize_t got = read(f->from, bytes, sizeof bytes);
      if (got > 0) take(f, bytes, (size_t)got);
      if (got > 0 || (got < 0 && errno == EINTR)) continue;
      take_end(f);
      f->from = -1;
    }
  }
  int status;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) pass_signals(child, passed);
  return status;
}

static int conclude(const News *news, int status) {
  if (asked.interrupt) return 128 + SIGINT;
  int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  int by = news->killed_by;
  // The ranks know best. Where all of them have left in order, the launcher's words do not count:
  // Open MPI 4.1's PMIx thread crashes in one of some hundred calls of MPI_Finalize.
  unsigned char told[MAX_RANKS];
  ssize_t n = pread(news->told, told, sizeof told, 1);
  for (ssize_t i = 0; i < n; i++)
    if (told[i]) return told[i];
  if (n == news->n_ranks) return 0;
  if (WIFSIGNALED(status) && !asked.kill) {
    by = WTERMSIG(status);
    fprintf(stderr, "rille: %s was killed by signal %d (%s)\n", news->launcher, by, strsignal(by));
    return 128 + by;
  }
  if (by == SIGUSR1 && asked.stop) { // nobody was there to write a checkpoint
    fprintf(stderr, "rille: stopped on request; no checkpoint was written\n");
    return 128 + SIGTERM;
  }
  if (by == 0 || news->has_reported) return code;
  fprintf(stderr, "rille: ");
  char words[64] = "";
  if (news->killed_rank >= 0) {
    off_t page = (off_t)news->killed_rank * COMM_WORDS_PAGE;
    if (pread(news->doing, words, sizeof words - 1, page) < 1) words[0] = 0;
    fprintf(stderr, "rank %d (node %s)%s%s%s", news->killed_rank, news->killed_where,
            words[0] ? ", in " : "", words, words[0] ? "," : "");
  } else {
    fprintf(stderr, "a rank (node %s)", news->killed_where);
  }
  fprintf(stderr, " was killed by signal %d (%s)%s\n", by, strsignal(by),
          by == SIGKILL ? "\n    hint: where nobody killed it, the machine ran out of memory: see "
                          "dmesg"
                        : "");
  return 128 + by;
}

static int usage(const char *words) {
  fprintf(stderr, "rille: -n: %s\n    hint: rille -n 4 script.lua [argument...]\n", words);
  return EXIT_USAGE;
}

int launch_main(int argc, char **argv, int first) {
  char *end = NULL;
  Launch launch;
  long n = first < argc ? strtol(argv[first], &end, 10) : 0;
  if (n < 1 || n > MAX_RANKS || *end) return usage("a number of ranks is wanted");
  if (first + 1 >= argc) return usage("a script is wanted (the prompt is for one process)");
  launch_read(&launch);
  if (launch.world > 1) {
    if (launch.rank == 0) usage("this process is a rank already: leave out mpirun, or -n");
    return EXIT_USAGE;
  }
  argv[first] = argv[0];
  argv += first;
  argc -= first;
  if (n == 1) {
    execv("/proc/self/exe", argv);
    return usage(strerror(errno));
  }
  const Mpi *mpi;
  const char *launcher = find_launcher(&mpi);
  int out[2] = {-1, -1}, err[2];
  if (!launcher || pipe2(err, O_CLOEXEC) != 0) return EXIT_ERROR;
  if (mpi->speaks_on_stdout && pipe2(out, O_CLOEXEC) != 0) return EXIT_ERROR;
  News news = {.launcher = launcher,
               .killed_rank = -1,
               .n_ranks = (int)n,
               .told = share_codes(),
               .doing = share_words((int)n)};
  set_environment((int)n);
  catch_signals(news.told);
  pid_t child = fork();
  if (child == 0) {
    dup2(err[1], STDERR_FILENO);
    if (out[1] >= 0) dup2(out[1], STDOUT_FILENO);
    start_launcher(launcher, mpi, (int)n, argc, argv);
  }
  close(err[1]);
  if (out[1] >= 0) close(out[1]);
  if (child < 0) return usage(strerror(errno));
  Filter filters[2] = {{.to = stderr, .news = &news, .from = err[0]},
                       {.to = stdout, .news = &news, .from = out[0]}};
  return conclude(&news, relay(filters, child));
}
