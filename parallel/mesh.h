// mesh - the ranks of a run as a grid with named axes: tp fastest, then dp, pp slowest.
//
//     world of 8, tp 2, dp 2, pp 2:      pp 0: [dp 0: 0 1] [dp 1: 2 3]
//                                        pp 1: [dp 0: 4 5] [dp 1: 6 7]
//
// Ranks are sorted by node first, so that the fastest axis stays inside a node. Nothing outside
// this file does rank arithmetic: a group is a slice of the grid along one axis.
#ifndef RILLE_PARALLEL_MESH_H
#define RILLE_PARALLEL_MESH_H

#include "parallel/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

// X(name): fastest first.
#define MESH_AXIS_LIST(X) X(tp) X(dp) X(pp)

typedef enum MeshAxis {
#define X(name) AXIS_##name,
  MESH_AXIS_LIST(X)
#undef X
      MESH_AXES
} MeshAxis;

typedef struct Mesh {
  int size[MESH_AXES];    // their product is the number of ranks
  int at[MESH_AXES];      // this rank's coordinates
  Comm *all;              // every rank of the mesh, in mesh order; owned
  Comm *group[MESH_AXES]; // the ranks that differ from this one along the axis alone; owned
  int *node;              // [all->size] which node each rank is on, from 0 in order of first rank
  int nodes;
} Mesh;

// A mesh over the ranks of `comm` (borrowed). size[axis] 0: whatever is left (of one axis only).
// Collective. Errors: EVALUE, in words of the options (dp, tp, pp), if the product is not the
// number of ranks. This rank's coordinates are told to comm_coordinates.
Status mesh_new(Comm *comm, const int size[MESH_AXES], Mesh **out);
void mesh_free(Mesh *mesh);

// The rank in mesh->all of the given coordinates.
int mesh_rank(const Mesh *mesh, const int at[MESH_AXES]);
// The coordinates of a rank of mesh->all.
void mesh_at(const Mesh *mesh, int rank, int at[MESH_AXES]);
const char *mesh_axis_name(MeshAxis axis);

// "rank 3 (node b, pp 1 dp 1)" into a caller's buffer.
const char *mesh_describe(const Mesh *mesh, int rank, char *buffer, size_t size);

// What is unfortunate about where the ranks are, a line each, with what mends it; "" if nothing is:
// a tp group that spans nodes, ranks bound to fewer cores than they have threads (`threads`: of
// this rank), cores that no rank may use. Collective; the same words on all ranks.
Status mesh_warnings(const Mesh *mesh, int threads, char *buffer, size_t size);

#ifdef __cplusplus
}
#endif
#endif
