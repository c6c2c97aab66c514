// comm_launch - who started us, the plugin that speaks to it, and what tests inject.
#include "parallel/comm_impl.h"

#include "ops/kernels/threads.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int env_number(const char *name, int fallback) {
  const char *text = getenv(name);
  if (!text || !*text) return fallback;
  char *end;
  long value = strtol(text, &end, 10);
  return *end || value < 0 || value > 1 << 24 ? fallback : (int)value;
}

// A launcher is known by the variables that it sets for each rank.
typedef struct Launcher {
  const char *name, *plugin, *rank, *world;
  const char *sign; // a further variable that must be there; NULL: none
} Launcher;

// In this order: Open MPI's mpirun inside an srun sets both.
static const Launcher launchers[] = {
    {"mpirun of Open MPI", "openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", NULL},
    {"mpiexec of MPICH", "mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"},
    {"srun --mpi=pmi2", "mpich", "PMI_RANK", "PMI_SIZE", NULL},
    {"srun --mpi=pmix", "openmpi", "PMIX_RANK", "SLURM_STEP_NUM_TASKS", NULL},
    {"srun", NULL, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"},
};

void launch_read(Launch *out) {
  *out = (Launch){.world = 1, .local_world = 1};
  for (size_t i = 0; i < sizeof launchers / sizeof *launchers; i++) {
    const Launcher *one = &launchers[i];
    int rank = env_number(one->rank, -1), world = env_number(one->world, 0);
    if (rank < 0 || world < 1 || (one->sign && !getenv(one->sign))) continue;
    *out = (Launch){.launcher = one->name, .plugin = one->plugin, .rank = rank, .world = world};
    threads_local_ranks(&out->local_world, &out->local_rank);
    return;
  }
}

// ---- the plugin ------------------------------------------------------------------------------

// The folder of this library (of the program, where it is linked in).
static void own_folder(char *out, size_t size) {
  Dl_info info;
  snprintf(out, size, ".");
  if (!dladdr((const void *)&launchers, &info) || !info.dli_fname) return;
  const char *slash = strrchr(info.dli_fname, '/');
  if (slash) snprintf(out, size, "%.*s", (int)(slash - info.dli_fname), info.dli_fname);
}

static void plugin_path(const char *plugin, char *out, size_t size) {
  char folder[768];
  own_folder(folder, sizeof folder);
  snprintf(out, size, "%s/rille_mpi_%s.so", folder, plugin);
}

bool launch_has_plugin(const char *plugin) {
  char path[1024];
  plugin_path(plugin, path, sizeof path);
  return access(path, R_OK) == 0;
}

static Status no_plugin(const Launch *launch, const char *path, const char *reason) {
  bool is_mpich = strcmp(launch->plugin, "mpich") == 0;
  Status status = fail(ST_ECOMM, "%s started %d ranks, but the plugin for it cannot be used: %s",
                       launch->launcher, launch->world, reason ? reason : path);
  const char *package = is_mpich ? "MPICH (libmpich-dev)" : "Open MPI (libopenmpi-dev openmpi-bin)";
  if (strncmp(launch->launcher, "srun", 4) == 0)
    return fail_hint(status, "start with srun --mpi=%s, or install %s and build again with make",
                     is_mpich ? "pmix" : "pmi2", package);
  return fail_hint(status,
                   "start with the other MPI's launcher or `rille -n %d script.lua`, or install %s "
                   "and build again with make",
                   launch->world, package);
}

Status comm_transport_open(const Launch *launch, const CommTransport **out) {
  if (!launch->plugin) {
    Status status = fail(ST_ECOMM, "%s started %d tasks without an MPI between them",
                         launch->launcher, launch->world);
    return fail_hint(status, "srun --mpi=pmix for Open MPI, srun --mpi=pmi2 for MPICH");
  }
  char path[1024];
  plugin_path(launch->plugin, path, sizeof path);
  // Global: an MPI's own components look for its symbols.
  void *plugin = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  if (!plugin) return no_plugin(launch, path, dlerror());
  const CommTransport *transport = dlsym(plugin, "rille_transport");
  if (!transport) return no_plugin(launch, path, "it has no rille_transport");
  *out = transport;
  return ST_OK;
}

void launch_tell(int code) {
  const char *path = getenv("RILLE_LAUNCH");
  unsigned char byte = (unsigned char)code;
  int file = path ? open(path, O_WRONLY | O_APPEND | O_CLOEXEC) : -1;
  if (file < 0) return;
  if (write(file, &byte, 1) != 1) byte = 0; // then the launcher's word must do
  close(file);
}

int launch_meant(int number) {
  const char *path = getenv("RILLE_LAUNCH");
  int before = errno, file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  unsigned char meant = 0;
  if (file >= 0) {
    if (pread(file, &meant, 1, 0) != 1) meant = 0;
    close(file);
  }
  errno = before;
  return meant ? meant : number;
}

// ---- the environment -------------------------------------------------------------------------

// "number", or by rank "rank:number,..."; numbers from `least` on.
static bool is_number_list(const char *text, double least, bool by_rank) {
  char *end;
  for (;; text = end + 1) {
    double x = strtod(text, &end);
    if (end == text || (!by_rank && *end)) return false;
    if (*end == ':') {
      text = end + 1;
      x = strtod(text, &end);
    }
    if (end == text || !(x >= least) || (*end && *end != ',')) return false;
    if (!*end) return true;
  }
}

Status launch_environment(void) {
  static const struct {
    const char *name, *wanted;
    double least;
    bool by_rank;
  } numbers[] = {{"RILLE_STALL_TIMEOUT", "seconds, more than 0, are wanted", 1e-3, false},
                 {"RILLE_FAKE_CLOCK", "rank:seconds,... is wanted", -1e9, true},
                 {"RILLE_FAKE_SLOW", "rank:factor,... is wanted, factors from 1 on", 1, true},
                 {"RILLE_FAKE_LINK", "milliseconds are wanted", 0, false},
                 {"RILLE_TEST_PIECE", "a number of bytes is wanted", 1, false}};
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
    const char *value = getenv(numbers[i].name);
    if (value && *value && !is_number_list(value, numbers[i].least, numbers[i].by_rank))
      return fail(ST_EVALUE, "%s=%.200s: %s", numbers[i].name, value, numbers[i].wanted);
  }
  const char *mpi = getenv("RILLE_MPI");
  if (mpi && *mpi && strcmp(mpi, "openmpi") != 0 && strcmp(mpi, "mpich") != 0)
    return fail(ST_EVALUE, "RILLE_MPI=%.200s: openmpi or mpich is wanted", mpi);
  return ST_OK;
}

// ---- what tests inject -----------------------------------------------------------------------

// What "0:this,1:that" says of a rank, up to the next comma; NULL: nothing.
static const char *word_of(const char *text, int rank) {
  while (text) {
    char *end;
    long which = strtol(text, &end, 10);
    if (*end == ':' && which == rank) return end + 1;
    text = strchr(text, ',');
    if (text) text++;
  }
  return NULL;
}

const char *comm_fake_node(int rank, char *buffer, size_t size) {
  const char *rule = getenv("RILLE_FAKE_NODE");
  char sign;
  int n;
  if (!rule || !*rule) return NULL;
  if (strchr(rule, ':')) {
    const char *word = word_of(rule, rank);
    if (!word) return NULL;
    snprintf(buffer, size, "%.*s", (int)strcspn(word, ","), word);
    return buffer;
  }
  if (sscanf(rule, "rank%c%d", &sign, &n) == 2 && (sign == '%' || sign == '/') && n > 0)
    snprintf(buffer, size, "node%d", sign == '%' ? rank % n : rank / n);
  else
    snprintf(buffer, size, "%s", rule);
  return buffer;
}

double comm_fake_number(const char *variable, int rank, double fallback) {
  const char *text = getenv(variable);
  if (!text || !*text) return fallback;
  if (!strchr(text, ':')) return atof(text);
  const char *word = word_of(text, rank);
  return word ? atof(word) : fallback;
}
