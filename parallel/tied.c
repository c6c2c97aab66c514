// tied - see tied.h.
#include "parallel/tied.h"

Status tied_exchange(Ctx *ctx, Comm *comm, Param *param, const TiedUse *uses, int n) {
  for (int k = 0; k < n; k++) {
    GradUse *use;
    TRY(param_grad_buffer(ctx, param, uses[k].unit, &use));
    unsigned char written = uses[k].rank == comm->rank && use->written;
    TRY(comm_broadcast(comm, uses[k].rank, &written, sizeof written));
    use->written = written;
    if (!written) continue;
    size_t bytes = (size_t)tensor_numel(use->grad) * dtype_size(use->grad->dtype);
    TRY(comm_broadcast(comm, uses[k].rank, tensor_data(use->grad), bytes));
  }
  return ST_OK;
}
