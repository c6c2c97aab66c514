// mesh - rank arithmetic, and the groups that come of it.
#include "parallel/mesh.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const names[] = {
#define X(name) #name,
    MESH_AXIS_LIST(X)
#undef X
};

const char *mesh_axis_name(MeshAxis axis) { return names[axis]; }

int mesh_rank(const Mesh *mesh, const int at[MESH_AXES]) {
  int rank = 0;
  for (int axis = MESH_AXES - 1; axis >= 0; axis--) {
    assert(at[axis] >= 0 && at[axis] < mesh->size[axis]);
    rank = rank * mesh->size[axis] + at[axis];
  }
  return rank;
}

void mesh_at(const Mesh *mesh, int rank, int at[MESH_AXES]) {
  for (int axis = 0; axis < MESH_AXES; axis++) {
    at[axis] = rank % mesh->size[axis];
    rank /= mesh->size[axis];
  }
}

// "pp 1 dp 0": the axes that there are.
static const char *coordinates(const Mesh *mesh, const int at[MESH_AXES], char *buffer,
                               size_t room) {
  size_t n = 0;
  buffer[0] = 0;
  for (int axis = MESH_AXES - 1; axis >= 0; axis--)
    if (mesh->size[axis] > 1 && n < room)
      n += (size_t)snprintf(buffer + n, room - n, "%s%s %d", n ? " " : "", names[axis], at[axis]);
  return buffer;
}

const char *mesh_describe(const Mesh *mesh, int rank, char *buffer, size_t size) {
  int at[MESH_AXES];
  char words[64];
  mesh_at(mesh, rank, at);
  coordinates(mesh, at, words, sizeof words);
  snprintf(buffer, size, "rank %d (node %s%s%s)", mesh->all->member[rank],
           comm_place(mesh->all, rank)->node, words[0] ? ", " : "", words);
  return buffer;
}

// "dp 2 x pp 3": the axes that were asked for and are more than 1.
static const char *describe_sizes(const int size[MESH_AXES], char *buffer, size_t room) {
  static const MeshAxis order[] = {AXIS_dp, AXIS_tp, AXIS_pp};
  size_t n = 0;
  snprintf(buffer, room, "dp, tp and pp of 1");
  for (size_t i = 0; i < sizeof order / sizeof *order; i++)
    if (size[order[i]] > 1 && n < room)
      n += (size_t)snprintf(buffer + n, room - n, "%s%s %d", n ? " x " : "", names[order[i]],
                            size[order[i]]);
  return buffer;
}

// Fills in the axis that is left open. Errors: EVALUE.
static Status fit_sizes(int n_ranks, const int asked[MESH_AXES], int size[MESH_AXES]) {
  int64_t product = 1;
  int open = -1;
  char words[96];
  for (int axis = 0; axis < MESH_AXES; axis++) {
    if (asked[axis] < 0)
      return fail(ST_EVALUE, "%s = %d: a number of ranks is at least 1", names[axis], asked[axis]);
    if (asked[axis] == 0 && open >= 0)
      return fail(ST_EVALUE, "%s and %s are both left open: only one can be", names[open],
                  names[axis]);
    if (asked[axis] == 0)
      open = axis;
    else
      product *= asked[axis];
    size[axis] = asked[axis];
    if (product > 1 << 30) return fail(ST_EVALUE, "%s = %d is too large", names[axis], asked[axis]);
  }
  if (open >= 0) size[open] = n_ranks % product ? 0 : (int)(n_ranks / product);
  if ((open >= 0 && size[open] > 0) || (open < 0 && product == n_ranks)) return ST_OK;
  Status status = fail(
      ST_EVALUE, "%s %s %lld rank%s%s, but there %s %d", describe_sizes(asked, words, sizeof words),
      product == 1 ? "make" : "makes", (long long)product, product == 1 ? "" : "s",
      open >= 0 ? " a copy of the model" : "", n_ranks == 1 ? "is" : "are", n_ranks);
  bool by_hand = n_ranks > 1 && !getenv("RILLE_LAUNCH"); // which `rille -n` sets
  char start[64];
  snprintf(start, sizeof start, by_hand ? "mpirun -n %lld rille" : "rille -n %lld",
           (long long)product);
  if (open >= 0)
    return fail_hint(status, "start a multiple of %lld ranks: %s ...", (long long)product, start);
  return fail_hint(status, "start %lld rank%s (%s ...), or give dp, tp and pp whose product is %d",
                   (long long)product, product == 1 ? "" : "s", start, n_ranks);
}

// Ranks sorted by node, so that neighbours in the grid share one.
static int place_by_node(const Comm *comm) {
  int mine = comm_place(comm, comm->rank)->node_index, place = 0;
  for (int i = 0; i < comm->size; i++) {
    int node = comm_place(comm, i)->node_index;
    place += node < mine || (node == mine && i < comm->rank);
  }
  return place;
}

static Status number_nodes(Mesh *mesh) {
  const Comm *all = mesh->all;
  mesh->node = malloc((size_t)all->size * sizeof *mesh->node);
  if (!mesh->node) return fail(ST_ENOMEM, "out of memory for a mesh");
  for (int i = 0; i < all->size; i++) {
    int k = 0;
    while (k < i && comm_place(all, k)->node_index != comm_place(all, i)->node_index) k++;
    mesh->node[i] = k < i ? mesh->node[k] : mesh->nodes++;
  }
  return ST_OK;
}

Status mesh_new(Comm *comm, const int size[MESH_AXES], Mesh **out) {
  int fitted[MESH_AXES];
  TRY(fit_sizes(comm->size, size, fitted));
  Mesh *mesh = calloc(1, sizeof *mesh);
  if (!mesh) return fail(ST_ENOMEM, "out of memory for a mesh");
  memcpy(mesh->size, fitted, sizeof fitted);
  Status status = comm_split(comm, 0, place_by_node(comm), &mesh->all);
  if (status != ST_OK) goto failed;
  mesh_at(mesh, mesh->all->rank, mesh->at);
  TRY_TO(failed, number_nodes(mesh));
  for (int axis = 0; axis < MESH_AXES; axis++) {
    int others[MESH_AXES];
    memcpy(others, mesh->at, sizeof others);
    others[axis] = 0; // the first rank of the slice names it
    TRY_TO(failed,
           comm_split(mesh->all, mesh_rank(mesh, others), mesh->at[axis], &mesh->group[axis]));
  }
  char words[64];
  comm_coordinates(coordinates(mesh, mesh->at, words, sizeof words));
  *out = mesh;
  return ST_OK;
failed:
  mesh_free(mesh);
  return status;
}

void mesh_free(Mesh *mesh) {
  if (!mesh) return;
  for (int axis = 0; axis < MESH_AXES; axis++) comm_free(mesh->group[axis]);
  comm_free(mesh->all);
  free(mesh->node);
  free(mesh);
}

// ---- warnings --------------------------------------------------------------------------------

// Appends a line; what has no room is cut.
static void warn(char *buffer, size_t size, const char *format, ...) PRINTF_LIKE(3, 4);
static void warn(char *buffer, size_t size, const char *format, ...) {
  size_t at = strlen(buffer);
  va_list args;
  va_start(args, format);
  vsnprintf(buffer + at, size - at, format, args);
  va_end(args);
}

// The first tp group that spans nodes: its neighbours talk in every layer.
static void warn_nodes(const Mesh *mesh, char *buffer, size_t size) {
  int tp = mesh->size[AXIS_tp];
  for (int rank = 0; rank < mesh->all->size; rank++) {
    int first = rank - rank % tp;
    if (mesh->node[rank] == mesh->node[first]) continue;
    warn(buffer, size,
         "warning: tp %d spans nodes: ranks %d and %d share a tp group, but are on %s and %s\n"
         "    hint: tp must divide the ranks on each node: mpirun --map-by ppr:%d:node\n",
         tp, mesh->all->member[first], mesh->all->member[rank], comm_place(mesh->all, first)->node,
         comm_place(mesh->all, rank)->node, tp);
    return;
  }
}

// By the first rank that is short of cores.
static void warn_cores(const Mesh *mesh, const int32_t *threads, char *buffer, size_t size) {
  for (int rank = 0; rank < mesh->all->size; rank++) {
    const CommPlace *place = comm_place(mesh->all, rank);
    bool is_bound = place->cores < place->n_online;
    if (threads[rank] > place->cores) {
      warn(buffer, size,
           "warning: rank %d has %d threads on %d core%s%s\n    hint: %s, or RILLE_THREADS=%d\n",
           mesh->all->member[rank], threads[rank], place->cores, place->cores == 1 ? "" : "s",
           is_bound ? ", to which the launcher bound it" : "",
           is_bound ? "mpirun --bind-to none" : "fewer ranks on this node", place->cores);
      return;
    }
    if (is_bound && place->cores * place->n_local < place->n_online) {
      warn(buffer, size,
           "warning: rank %d is bound to %d of %d cores, and %d rank%s on its node cannot use the "
           "rest\n    hint: mpirun --bind-to none\n",
           mesh->all->member[rank], place->cores, place->n_online, place->n_local,
           place->n_local == 1 ? "" : "s");
      return;
    }
  }
}

Status mesh_warnings(const Mesh *mesh, int threads, char *buffer, size_t size) {
  int32_t mine = threads;
  int32_t *all = malloc((size_t)mesh->all->size * sizeof *all);
  if (!all) return fail(ST_ENOMEM, "out of memory for a mesh");
  buffer[0] = 0;
  Status status = comm_all_gather(mesh->all, &mine, all, sizeof mine);
  if (status == ST_OK && mesh->all->size > 1) {
    warn_nodes(mesh, buffer, size);
    warn_cores(mesh, all, buffer, size);
  }
  free(all);
  return status;
}
