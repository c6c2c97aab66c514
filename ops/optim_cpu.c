// optim_cpu - optimizers and norms on the CPU, by ops/kernels.
#include "ops/kernels/kernels.h"
#include "ops/ops.h"
#include "ops/rows.h"

#include <math.h>

void cpu_adamw(const KernelCall *call) {
  const ArgValue *v = call->args->v;
  Adamw step = {.n = tensor_numel(call->in[0]),
                .g = tensor_data(call->in[0]),
                .p = tensor_data(call->out[0]),
                .m = tensor_data(call->out[1]),
                .v = tensor_data(call->out[2]),
                .lr = v[0].f,
                .beta1 = v[1].f,
                .beta2 = v[2].f,
                .eps = v[3].f,
                .decay = v[4].f,
                .grad_scale = v[5].f,
                .step = v[6].i};
  if (call->in[0]->dtype == DT_F64)
    cpu_kernels()->adamw_f64(&step);
  else
    cpu_kernels()->adamw_f32(&step);
}

void cpu_sgd(const KernelCall *call) {
  const ArgValue *v = call->args->v;
  Sgd step = {.n = tensor_numel(call->in[0]),
              .g = tensor_data(call->in[0]),
              .p = tensor_data(call->out[0]),
              .m = call->out[1] ? tensor_data(call->out[1]) : NULL,
              .lr = v[0].f,
              .momentum = v[1].f,
              .dampening = v[2].f,
              .decay = v[3].f,
              .grad_scale = v[4].f,
              .nesterov = v[5].i,
              .is_first = v[6].i};
  if (call->in[0]->dtype == DT_F64)
    cpu_kernels()->sgd_f64(&step);
  else
    cpu_kernels()->sgd_f32(&step);
}

void cpu_sum_squares(const KernelCall *call) {
  const Tensor *x = call->in[0];
  double *out = tensor_data(call->out[0]);
  *out = x->dtype == DT_F64 ? cpu_kernels()->sum_squares_f64(tensor_data(x), tensor_numel(x))
                            : cpu_kernels()->sum_squares_f32(tensor_data(x), tensor_numel(x));
}

void cpu_max_abs(const KernelCall *call) {
  const Tensor *x = call->in[0];
  const CpuKernels *k = cpu_kernels();
  Reduce reduce = {.outer = 1, .red = tensor_numel(x), .inner = 1, .a = tensor_data(x)};
  double ends[2]; // largest and smallest
  for (int i = 0; i < 2; i++) {
    float narrow = 0;
    bool wide = x->dtype == DT_F64;
    reduce.out = wide ? (void *)&ends[i] : (void *)&narrow;
    (wide ? k->reduce_f64 : k->reduce_f32)(i == 0 ? REDUCE_max : REDUCE_min, &reduce);
    if (!wide) ends[i] = (double)narrow;
  }
  double largest = fmax(fabs(ends[0]), fabs(ends[1]));
  *(double *)tensor_data(call->out[0]) = ends[0] != ends[0] ? ends[0] : largest;
}
