// stage - see the header.
#include "ops/stage.h"

#include "ops/kernels/kernels.h"

#include <assert.h>

static int64_t padded(int64_t numel) { return (numel * (int64_t)sizeof(float) + 63) / 64 * 64; }

int64_t stage_bytes(const OpCall *call) {
  int64_t bytes = 0;
  for (int j = 0; j < call->n_in; j++)
    if (call->in[j] && call->in[j]->dtype == DT_BF16) bytes += padded(tensor_numel(call->in[j]));
  for (int i = 0; i < call->n_out + call->n_saved; i++)
    if (call->out[i].dtype == DT_BF16) bytes += padded(spec_numel(&call->out[i]));
  return bytes;
}

Stage stage_begin(const KernelCall *call) { return (Stage){.at = call->workspace}; }

static float *take(Stage *stage, const Tensor *t) {
  float *wide = (float *)(void *)stage->at;
  stage->at += padded(tensor_numel(t));
  return wide;
}

const void *stage_in(Stage *stage, const Tensor *t) {
  if (!t) return NULL;
  if (t->dtype != DT_BF16) return tensor_data(t);
  float *wide = take(stage, t);
  cpu_kernels()->widen(wide, tensor_data(t), tensor_numel(t));
  return wide;
}

void *stage_out(Stage *stage, Tensor *t, bool accumulate) {
  if (!t) return NULL;
  if (t->dtype != DT_BF16) return tensor_data(t);
  assert(stage->n < STAGE_MAX_OUT);
  float *wide = take(stage, t);
  if (accumulate) cpu_kernels()->widen(wide, tensor_data(t), tensor_numel(t));
  stage->out[stage->n].tensor = t;
  stage->out[stage->n++].wide = wide;
  return wide;
}

void stage_end(Stage *stage) {
  for (int i = 0; i < stage->n; i++)
    cpu_kernels()->narrow(tensor_data(stage->out[i].tensor), stage->out[i].wide,
                          tensor_numel(stage->out[i].tensor));
}
