// kernels - picks the table for this machine.
#include "ops/kernels/kernels.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

extern const CpuKernels cpu_kernels_plain;
#if defined __x86_64__
extern const CpuKernels cpu_kernels_avx2, cpu_kernels_avx512, cpu_kernels_amx;

// The levels are x86-64-v3 and -v4, whose parts come together in every CPU that has the last of
// them.
static bool has_avx2(void) {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi2");
}
static bool has_avx512(void) {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd");
}
// The kernel grants the tiles' registers on demand, to the whole process (Linux 5.16 and later;
// arch/x86/xstate.rst).
static bool has_amx(void) {
  enum { AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
  unsigned a, b, c, d;
  return has_avx512() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && d & AMX_BF16 && d & AMX_TILE &&
         syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif
static bool always(void) { return true; }

// From the best to the plainest.
static const struct {
  const CpuKernels *table;
  bool (*runs_here)(void);
} levels[] = {
#if defined __x86_64__
    {&cpu_kernels_amx, has_amx},
    {&cpu_kernels_avx512, has_avx512},
    {&cpu_kernels_avx2, has_avx2},
#endif
    {&cpu_kernels_plain, always},
};
enum { N_LEVELS = sizeof levels / sizeof *levels };

static const CpuKernels *chosen;
static pthread_once_t once = PTHREAD_ONCE_INIT;

const CpuKernels *cpu_kernels_of(const char *level) {
  for (int i = 0; i < N_LEVELS; i++)
    if (strcmp(levels[i].table->level, level) == 0)
      return levels[i].runs_here() ? levels[i].table : NULL;
  return NULL;
}

Status cpu_kernels_environment(void) {
  const char *wanted = getenv("RILLE_CPU");
  if (!wanted || !*wanted || cpu_kernels_of(wanted)) return ST_OK;
  char names[64] = "";
  bool is_known = false;
  for (int i = 0; i < N_LEVELS; i++) {
    is_known |= strcmp(levels[i].table->level, wanted) == 0;
    if (!levels[i].runs_here()) continue;
    size_t at = strlen(names);
    snprintf(names + at, sizeof names - at, "%s%s", at ? ", " : "", levels[i].table->level);
  }
  if (is_known)
    return fail(ST_EVALUE, "RILLE_CPU=%s: this machine cannot run these kernels, it can run %s",
                wanted, names);
  return fail(ST_EVALUE, "RILLE_CPU=%.40s: there are no such kernels, this machine can run %s",
              wanted, names);
}

static void choose(void) {
  const char *wanted = getenv("RILLE_CPU");
  if (wanted) chosen = cpu_kernels_of(wanted);
  for (int i = 0; !chosen; i++)
    if (levels[i].runs_here()) chosen = levels[i].table;
}

const CpuKernels *cpu_kernels(void) {
  pthread_once(&once, choose);
  return chosen;
}
