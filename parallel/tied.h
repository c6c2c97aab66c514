// tied - the gradient of a parameter that stages on several ranks use.
#ifndef RILLE_PARALLEL_TIED_H
#define RILLE_PARALLEL_TIED_H

#include "core/weights.h"
#include "parallel/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

// One unit that uses the parameter, and the rank of the group that runs it.
typedef struct TiedUse {
  int unit, rank;
} TiedUse;

// Gives every rank of the group (those that hold the parameter) all ranks' gradient buffers, one a
// unit; weightset_finish_grads then sums them in unit order, as one process would: the same bits
// everywhere. uses[n]: all of them, ascending by unit, known to all. Collective over the group.
Status tied_exchange(Ctx *ctx, Comm *comm, Param *param, const TiedUse *uses, int n);

#ifdef __cplusplus
}
#endif
#endif
