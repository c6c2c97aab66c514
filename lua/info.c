// info - `rille info`: what was found on this machine and what was not; with several ranks, who is
// where.
#include "lua/runner.h"

#include "core/memory.h"
#include "ops/ops.h"
#include "parallel/comm.h"
#include "parallel/mesh.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// What of the optional parts was found.
static void libraries(void) {
  const char *const implementations[] = {"openmpi", "mpich"};
  printf("libraries libedit; MPI:");
  int n = 0;
  for (int i = 0; i < 2; i++)
    if (launch_has_plugin(implementations[i])) printf("%s %s", n++ ? "," : "", implementations[i]);
  puts(n ? "" : " not found when Rille was built (make deps says what to install, then make)");
}

static void machine(const Rille *r) {
  char memory[32];
  OpsCpu cpu = ops_cpu();
  printf("rille %s, %s\n", RILLE_VERSION, LUA_RELEASE);
  printf("devices   cpu (%ld cores online), meta; no GPU: there are no kernels for one yet\n",
         sysconf(_SC_NPROCESSORS_ONLN));
  printf("kernels   %s, products by %s, %d thread%s%s\n", cpu.level, cpu.blas, cpu.n_threads,
         cpu.n_threads == 1 ? "" : "s", cpu.pinned ? ", pinned" : "");
  libraries();
  printf("memory    limit %s\n", format_bytes(memory, sizeof memory, pool_limit(r->ctx->pool)));
}

// Reads --tp N, --dp N, --pp N; --sequence-parallel changes nothing of who is where. Returns false
// for anything else.
static bool read_layout(int argc, char **argv, int size[MESH_AXES], bool *is_given) {
  *is_given = false;
  for (int axis = 0; axis < MESH_AXES; axis++) size[axis] = axis == AXIS_dp ? 0 : 1;
  for (int i = 0; i < argc;) {
    int axis = 0;
    if (strcmp(argv[i], "--sequence-parallel") == 0) {
      i++;
      continue;
    }
    while (axis < MESH_AXES && (strncmp(argv[i], "--", 2) != 0 ||
                                strcmp(argv[i] + 2, mesh_axis_name((MeshAxis)axis)) != 0))
      axis++;
    char *end = NULL;
    long n = i + 1 < argc ? strtol(argv[i + 1], &end, 10) : 0;
    if (axis == MESH_AXES || n < 1 || n > INT32_MAX || *end) return false;
    size[axis] = (int)n;
    *is_given = true;
    i += 2;
  }
  return true;
}

static void table(const Comm *world, const int32_t *threads, const Mesh *mesh, bool has_layout) {
  Launch launch;
  launch_read(&launch);
  printf("ranks     %d on %d node%s, started by %s\n", world->size, mesh->nodes,
         mesh->nodes == 1 ? "" : "s", launch.launcher);
  printf("  %4s  %-16s %-14s %7s %8s%s\n", "rank", "node", "cores", "threads", "process",
         has_layout ? "  coordinates" : "");
  for (int rank = 0; rank < world->size; rank++) {
    const CommPlace *place = comm_place(world, rank);
    printf("  %4d  %-16s %-14s %7d %8d", rank, place->node, place->core_set, (int)threads[rank],
           place->pid);
    int at[MESH_AXES], in_mesh = 0;
    while (mesh->all->member[in_mesh] != rank) in_mesh++;
    mesh_at(mesh, in_mesh, at);
    if (has_layout) printf("  pp %d dp %d tp %d", at[AXIS_pp], at[AXIS_dp], at[AXIS_tp]);
    printf("\n");
  }
}

static Status who_is_where(Comm *world, const int size[MESH_AXES], bool has_layout) {
  Mesh *mesh = NULL;
  char warnings[1024];
  int32_t mine = ops_cpu().n_threads;
  int32_t *threads = calloc((size_t)world->size, sizeof *threads);
  if (!threads) return fail(ST_ENOMEM, "out of memory");
  Status status = mesh_new(world, size, &mesh);
  if (status != ST_OK) goto done;
  TRY_TO(done, comm_all_gather(world, &mine, threads, sizeof mine));
  TRY_TO(done, mesh_warnings(mesh, mine, warnings, sizeof warnings));
  if (world->rank == 0 && world->size > 1) {
    table(world, threads, mesh, has_layout);
    fputs(warnings, stdout);
  }
done:
  mesh_free(mesh);
  free(threads);
  return status;
}

int info_main(lua_State *L, int argc, char **argv) {
  const Rille *r = runner_rille(L);
  int size[MESH_AXES];
  bool has_layout;
  Comm *world;
  if (!read_layout(argc, argv, size, &has_layout)) {
    lua_pushstring(L, "info: only --tp N, --dp N, --pp N and --sequence-parallel can be given");
    return runner_report_as(L, EXIT_USAGE);
  }
  if (r->rank == 0) machine(r);
  Status status = comm_world(&world);
  if (status == ST_OK && world->size == 1)
    printf("ranks     1 (no launcher found: rille -n 4 or mpirun starts several)\n");
  if (status == ST_OK) status = who_is_where(world, size, has_layout);
  if (status == ST_OK) return 0;
  lua_pushfstring(L, "info: %s%s%s", status_message(), status_hint()[0] ? "\n    hint: " : "",
                  status_hint());
  return runner_report_as(L, status == ST_EVALUE ? EXIT_USAGE : EXIT_ERROR);
}
