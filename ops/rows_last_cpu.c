// rows_last_cpu - softmax, norms and cross-entropy on the CPU, by ops/kernels.
#include "ops/rows_last.h"

#include "ops/kernels/kernels.h"
#include "ops/ops.h"
#include "ops/rows.h"
#include "ops/stage.h"

#include <string.h>

// ---- softmax
typedef void (*SoftmaxFn)(const Softmax *softmax);

// x[outer, n, inner] -> rows [outer, inner, n], and back.
static void columns_to_rows(char *to, const char *from, size_t width, int64_t outer, int64_t n,
                            int64_t inner) {
  for (int64_t o = 0; o < outer; o++)
    for (int64_t i = 0; i < inner; i++)
      for (int64_t k = 0; k < n; k++)
        memcpy(to + (size_t)((o * inner + i) * n + k) * width,
               from + (size_t)((o * n + k) * inner + i) * width, width);
}

static void rows_to_columns(char *to, const char *from, size_t width, int64_t outer, int64_t n,
                            int64_t inner) {
  for (int64_t o = 0; o < outer; o++)
    for (int64_t k = 0; k < n; k++)
      for (int64_t i = 0; i < inner; i++)
        memcpy(to + (size_t)((o * n + k) * inner + i) * width,
               from + (size_t)((o * inner + i) * n + k) * width, width);
}

// A dimension that is not the last: gathered into rows, run, scattered back.
static void run_columns(const KernelCall *call, Stage *stage, Softmax *s, SoftmaxFn fn,
                        bool is_backward) {
  const Tensor *x = call->in[call->n_in - 1];
  int dim = (int)call->args->v[0].i;
  size_t width = x->dtype == DT_F64 ? sizeof(double) : sizeof(float);
  int64_t outer = 1, inner = 1, n = x->shape[dim];
  for (int d = 0; d < dim; d++) outer *= x->shape[d];
  for (int d = dim + 1; d < x->ndim; d++) inner *= x->shape[d];
  size_t bytes = (size_t)(outer * inner * n) * width;
  char *a = stage->at, *b = a + bytes, *result = is_backward ? b + bytes : b;
  char *out = is_backward ? s->dx : s->y;
  columns_to_rows(a, is_backward ? s->dy : s->x, width, outer, n, inner);
  if (is_backward) columns_to_rows(b, s->y_saved, width, outer, n, inner);
  if (s->accumulate) columns_to_rows(result, out, width, outer, n, inner);
  Softmax rows = {.rows = outer * inner, .columns = n, .accumulate = s->accumulate};
  if (is_backward) {
    rows.dy = a;
    rows.y_saved = b;
    rows.dx = result;
  } else {
    rows.x = a;
    rows.y = result;
  }
  fn(&rows);
  rows_to_columns(out, result, width, outer, n, inner);
}

static void softmax_call(const KernelCall *call, SoftmaxFn f32, SoftmaxFn f64, bool is_backward) {
  const Tensor *x = call->in[call->n_in - 1];
  if (tensor_numel(x) == 0) return;
  Stage stage = stage_begin(call);
  Softmax s = {.columns = x->shape[x->ndim - 1], .accumulate = call->accumulate & 1};
  s.rows = tensor_numel(x) / s.columns;
  if (is_backward) {
    s.dy = stage_in(&stage, call->in[0]);
    s.y_saved = stage_in(&stage, call->in[1]);
    s.dx = stage_out(&stage, call->out[0], s.accumulate);
  } else {
    s.x = stage_in(&stage, x);
    s.y = stage_out(&stage, call->out[0], false);
  }
  SoftmaxFn fn = is_f64(x) ? f64 : f32;
  if (call->args->v[0].i == x->ndim - 1)
    fn(&s);
  else
    run_columns(call, &stage, &s, fn, is_backward);
  stage_end(&stage);
}

void cpu_softmax(const KernelCall *call) {
  const CpuKernels *k = cpu_kernels();
  softmax_call(call, k->softmax_f32, k->softmax_f64, false);
}
void cpu_log_softmax(const KernelCall *call) {
  const CpuKernels *k = cpu_kernels();
  softmax_call(call, k->log_softmax_f32, k->log_softmax_f64, false);
}
void cpu_softmax_bwd(const KernelCall *call) {
  const CpuKernels *k = cpu_kernels();
  softmax_call(call, k->softmax_bwd_f32, k->softmax_bwd_f64, true);
}
void cpu_log_softmax_bwd(const KernelCall *call) {
  const CpuKernels *k = cpu_kernels();
  softmax_call(call, k->log_softmax_bwd_f32, k->log_softmax_bwd_f64, true);
}

// ---- norms
static void norm_call(const KernelCall *call, bool is_rms) {
  const Tensor *x = call->in[0];
  if (tensor_numel(x) == 0) return;
  Stage stage = stage_begin(call);
  Norm norm = {.columns = x->shape[x->ndim - 1], .is_rms = is_rms, .eps = call->args->v[0].f};
  norm.rows = tensor_numel(x) / norm.columns;
  norm.x = stage_in(&stage, x);
  norm.gamma = call->n_in > 1 ? stage_in(&stage, call->in[1]) : NULL;
  norm.beta = call->n_in > 2 ? stage_in(&stage, call->in[2]) : NULL;
  norm.y = stage_out(&stage, call->out[0], false);
  norm.mean = tensor_data(call->out[1]);
  norm.rstd = tensor_data(call->out[2]);
  if (is_f64(x))
    cpu_kernels()->norm_f64(&norm);
  else
    cpu_kernels()->norm_f32(&norm);
  stage_end(&stage);
}
void cpu_layer_norm(const KernelCall *call) { norm_call(call, false); }
void cpu_rms_norm(const KernelCall *call) { norm_call(call, true); }

int64_t norm_bwd_workspace(const OpCall *call) {
  const Tensor *x = call->in[1];
  int64_t columns = x->shape[x->ndim - 1];
  int64_t rows = columns ? tensor_numel(x) / columns : 0;
  return stage_bytes(call) + (int64_t)norm_workspace(rows, columns, sizeof(double));
}

// One of dgamma and dbeta is added to and the other written: what is written starts from zero.
static void even_out(Tensor *gamma, Tensor *beta, unsigned *accumulate) {
  unsigned both = *accumulate >> 1 & 3;
  if (!gamma || !beta || both == 0 || both == 3) return;
  Tensor *fresh = both & 1 ? beta : gamma;
  memset(tensor_data(fresh), 0, (size_t)tensor_numel(fresh) * dtype_size(fresh->dtype));
  *accumulate |= 6;
}

void cpu_norm_bwd(const KernelCall *call) {
  const Tensor *x = call->in[1];
  if (tensor_numel(x) == 0) {
    for (int i = 1; i < 3; i++)
      if (call->out[i] && !(call->accumulate >> i & 1))
        memset(tensor_data(call->out[i]), 0,
               (size_t)tensor_numel(call->out[i]) * dtype_size(call->out[i]->dtype));
    return;
  }
  unsigned accumulate = call->accumulate;
  even_out(call->out[1], call->out[2], &accumulate);
  Stage stage = stage_begin(call);
  Norm norm = {.columns = x->shape[x->ndim - 1], .is_rms = call->args->v[0].i};
  norm.rows = tensor_numel(x) / norm.columns;
  norm.dy = stage_in(&stage, call->in[0]);
  norm.x = stage_in(&stage, x);
  norm.mean = tensor_data(call->in[2]), norm.rstd = tensor_data(call->in[3]);
  norm.gamma = stage_in(&stage, call->in[4]);
  norm.dx = stage_out(&stage, call->out[0], accumulate & 1);
  norm.dgamma = stage_out(&stage, call->out[1], accumulate & 2);
  norm.dbeta = stage_out(&stage, call->out[2], accumulate & 4);
  norm.accumulate_dx = accumulate & 1;
  norm.accumulate_params = accumulate & (call->out[1] ? 2 : 4);
  norm.workspace = stage.at;
  if (is_f64(x))
    cpu_kernels()->norm_bwd_f64(&norm);
  else
    cpu_kernels()->norm_bwd_f32(&norm);
  stage_end(&stage);
}

// ---- cross-entropy
static CrossEntropy loss_of(const OpArgs *args, const Tensor *logits, const Tensor *targets) {
  CrossEntropy loss = {.columns = logits->shape[logits->ndim - 1],
                       .rows = tensor_numel(targets),
                       .targets = tensor_data(targets),
                       .ignore_index = args->v[0].i,
                       .smoothing = args->v[1].f,
                       .z_loss = args->v[2].f};
  return loss;
}

void cpu_cross_entropy_each(const KernelCall *call) {
  const Tensor *logits = call->in[0];
  Stage stage = stage_begin(call);
  CrossEntropy loss = loss_of(call->args, logits, call->in[1]);
  loss.logits = stage_in(&stage, logits);
  loss.loss = tensor_data(call->out[0]);
  loss.lse = tensor_data(call->out[1]);
  if (is_f64(logits))
    cpu_kernels()->cross_entropy_f64(&loss);
  else
    cpu_kernels()->cross_entropy_f32(&loss);
}

void cpu_cross_entropy_bwd(const KernelCall *call) {
  const Tensor *logits = call->in[1];
  Stage stage = stage_begin(call);
  CrossEntropy loss = loss_of(call->args, logits, call->in[2]);
  loss.seed = stage_in(&stage, call->in[0]);
  loss.logits = stage_in(&stage, logits);
  loss.lse = tensor_data(call->in[3]);
  loss.accumulate = call->accumulate & 1;
  loss.dlogits = stage_out(&stage, call->out[0], loss.accumulate);
  if (is_f64(logits))
    cpu_kernels()->cross_entropy_bwd_f64(&loss);
  else
    cpu_kernels()->cross_entropy_bwd_f32(&loss);
  stage_end(&stage);
}
