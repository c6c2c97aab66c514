// pipeline - stages written in C: rank r multiplies by its w, the loss is the sum of what the last
// rank gives, and every rank prints the gradient of its w.
//
//     cc pipeline.c $(pkg-config --cflags --libs rille) -o pipeline && mpirun -n 4 ./pipeline
#include "ops/ops.h"
#include "parallel/exec.h"

#include <stdio.h>

typedef struct Stage {
  Ctx *ctx;
  float w, dw, x[8]; // x: what forward was given, by microbatch
} Stage;

static float get(const Port *port) { return *(float *)tensor_data(port->parcel->value[0]); }

static Status put(Ctx *ctx, Port *port, float value) {
  *port->parcel = (Parcel){.n = 1, .wants_grad = {true}};
  return tensor_from_data(ctx, DT_F32, 0, NULL, &value, &port->parcel->value[0]);
}

static Status forward(void *user, StageCall *call) {
  Stage *stage = user;
  float x = stage->x[call->mb] = call->n_in ? get(&call->in[0]) : (float)(call->mb + 1);
  return call->n_out ? put(stage->ctx, &call->out[0], stage->w * x) : ST_OK;
}

static Status backward(void *user, StageCall *call) {
  Stage *stage = user;
  float dy = call->n_out ? get(&call->out[0]) : 1;
  stage->dw += dy * stage->x[call->mb];
  return call->n_in ? put(stage->ctx, &call->in[0], dy * stage->w) : ST_OK;
}

static Status run(Ctx *ctx, Comm *world, SchedArena *arena) {
  Stage stage = {.ctx = ctx, .w = (float)(world->rank + 2)};
  SchedCase sizes = {.ranks = world->size, .mbs = 8};
  Sched *sched;
  SchedReport *report;
  Exec *exec;
  TRY(sched_generate(arena, &sched, sched_find("1f1b"), &sizes));
  TRY(sched_lower(arena, &sched, sched, NULL));
  TRY(sched_check(arena, &report, sched));
  TRY(exec_new(&(ExecOptions){.ctx = ctx,
                              .comm = world,
                              .sched = sched,
                              .report = report,
                              .ops = {.forward = forward, .backward = backward},
                              .user = &stage},
               &exec));
  Status status = exec_run(exec);
  exec_free(exec);
  printf("rank %d: w = %g, dw = %g\n", world->rank, (double)stage.w, (double)stage.dw);
  return status;
}

int main(void) {
  Ctx *ctx = NULL;
  Comm *world = NULL;
  SchedArena arena;
  sched_heap_open(&arena);
  Status status = comm_world(&world);
  if (status == ST_OK) status = ctx_new(0, &ctx);
  if (status == ST_OK) status = ops_init(ctx);
  if (status == ST_OK) status = run(ctx, world, &arena);
  if (status != ST_OK) fprintf(stderr, "pipeline: %s\n", status_message());
  if (status != ST_OK && world) comm_fatal(world, 1);
  sched_heap_close(&arena);
  ctx_delete(ctx);
  comm_world_close(world);
  return status != ST_OK;
}
