// embedding_cpu - rows of a table, and dropout, on the CPU by ops/kernels.
#include "ops/kernels/gather.h"
#include "ops/kernels/kernels.h"
#include "ops/ops.h"
#include "ops/rows.h"
#include "ops/stage.h"

void cpu_embedding(const KernelCall *call) {
  const Tensor *w = call->in[0], *ids = call->in[1];
  gather_part(tensor_data(call->out[0]), tensor_data(w), tensor_data(ids), call->args->v[0].i,
              w->shape[0], tensor_numel(ids), w->shape[1], dtype_size(w->dtype));
}

// Rows of dy summed by id, in the order of the ids; ids of other parts are passed over. A bf16 dy,
// or result, goes through the workspace.
void cpu_embedding_bwd(const KernelCall *call) {
  const Tensor *dy = call->in[0], *ids = call->in[1];
  Tensor *out = call->out[0];
  Stage stage = stage_begin(call);
  bool accumulate = call->accumulate & 1;
  const void *from = stage_in(&stage, dy);
  void *to = stage_out(&stage, out, accumulate);
  int64_t n = tensor_numel(ids), rows = out->shape[0], columns = out->shape[1];
  int64_t first = call->args->v[1].i;
  if (is_f64(out))
    scatter_part_f64(to, from, tensor_data(ids), first, rows, n, columns, accumulate);
  else
    scatter_part_f32(to, from, tensor_data(ids), first, rows, n, columns, accumulate);
  stage_end(&stage);
}

void cpu_dropout(const KernelCall *call) {
  const Tensor *x = call->in[0];
  const OpArgs *args = call->args;
  if (tensor_numel(x) == 0) return;
  Stage stage = stage_begin(call);
  Dropout dropout = {.samples = args->v[3].i,
                     .elements = tensor_numel(x) / args->v[3].i,
                     .p = args->v[0].f,
                     .key = (uint64_t)args->v[1].i,
                     .first_sample = args->v[2].i,
                     .step = args->v[4].i,
                     .inner = args->v[5].i,
                     .whole = args->v[6].i,
                     .offset = args->v[7].i,
                     .accumulate = call->accumulate & 1};
  dropout.x = stage_in(&stage, x);
  dropout.y = stage_out(&stage, call->out[0], dropout.accumulate);
  if (is_f64(x))
    cpu_kernels()->dropout_f64(&dropout);
  else
    cpu_kernels()->dropout_f32(&dropout);
  stage_end(&stage);
}
