// fit - a straight line fitted to points, in C: tensors, a parameter, gradients, an optimizer.
//
//     cc fit.c $(pkg-config --cflags --libs rille) -o fit && ./fit
#include "core/tape.h"
#include "core/weights.h"
#include "ops/ops.h"
#include "ops/optim.h"

#include <stdio.h>

// mean((x w' + b - y)^2), recorded on the tape; *loss is owned by the caller.
static Status forward(Ctx *ctx, Tensor *x, Tensor *y, Tensor *w, Tensor *b, Tensor **loss) {
  Tensor *line = NULL, *gap = NULL, *square = NULL;
  Status status;
  TRY_TO(done, ops_call(ctx, OP_linear, NULL, (Tensor *[]){x, w, b}, 3, &line));
  TRY_TO(done, ops_call(ctx, OP_sub, NULL, (Tensor *[]){line, y}, 2, &gap));
  TRY_TO(done, ops_call(ctx, OP_square, NULL, &gap, 1, &square));
  TRY_TO(done, ops_call(ctx, OP_mean, NULL, &square, 1, loss));
done:
  tensor_release(ctx, line);
  tensor_release(ctx, gap);
  tensor_release(ctx, square);
  return status;
}

static Status fit(Ctx *ctx) {
  const float xs[] = {0, 1, 2, 3}, ys[] = {1, 3, 5, 7}; // y = 2 x + 1
  Tensor *x = NULL, *y = NULL, *w = NULL, *b = NULL, *loss = NULL;
  WeightSet *set = NULL;
  double value = 0;
  Status status;
  TRY_TO(done, tensor_from_data(ctx, DT_F32, 2, (int64_t[]){4, 1}, xs, &x));
  TRY_TO(done, tensor_from_data(ctx, DT_F32, 2, (int64_t[]){4, 1}, ys, &y));
  TRY_TO(done, param_new(ctx, "w", DT_F32, 2, (int64_t[]){1, 1}, &w));
  TRY_TO(done, param_new(ctx, "b", DT_F32, 1, (int64_t[]){1}, &b));
  TRY_TO(done, weightset_new(ctx, (Param *[]){w->param, b->param}, 2, 0, 0, 1, &set));
  for (int step = 1; step <= 200; step++) {
    weightset_zero_grads(set);
    TRY_TO(done, forward(ctx, x, y, w, b, &loss));
    TRY_TO(done, tensor_item(loss, &value));
    TRY_TO(done, backward(ctx, &loss, NULL, 1, BACKWARD_B, NULL));
    tensor_release(ctx, loss);
    loss = NULL;
    SgdOptions options = {.lr = 0.1, .grad_scale = 1, .is_first = step == 1};
    TRY_TO(done, optim_sgd(ctx, set, &options));
  }
  double slope = 0, offset = 0;
  TRY_TO(done, tensor_item(w, &slope));
  TRY_TO(done, tensor_item(b, &offset));
  printf("y = %.3f x + %.3f, loss %.1e\n", slope, offset, value);
done:
  weightset_release(ctx, set);
  for (int i = 0; i < 5; i++) tensor_release(ctx, (Tensor *[]){x, y, w, b, loss}[i]);
  return status;
}

int main(void) {
  Ctx *ctx = NULL;
  Status status = ctx_new(0, &ctx);
  if (status == ST_OK) status = ops_init(ctx);
  if (status == ST_OK) status = fit(ctx);
  if (status != ST_OK) fprintf(stderr, "fit: %s\n", status_message());
  ctx_delete(ctx);
  return status != ST_OK;
}
