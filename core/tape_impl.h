// tape_impl - what tape.c and backward.c share; not installed.
#ifndef RILLE_CORE_TAPE_IMPL_H
#define RILLE_CORE_TAPE_IMPL_H

#include "core/tape.h"

// One input of a node: its producer, or the leaf whose gradient it is.
typedef struct Edge {
  Node *node; // retained; NULL for leaves and where no gradient is wanted
  Tensor *leaf;
  int out_index;
  bool wanted, has_data;
  bool defer; // the op's gradient for this input is GEMM-like
} Edge;

// A tensor kept for backward and the version it had.
typedef struct Kept {
  Tensor *tensor;
  Tensor *base; // of a view of a parameter: the parameter, whose version counts too
  uint64_t version;
} Kept;

struct Node {
  int refs, n_in, n_out, n_saved;
  const Op *op;
  OpArgs args;
  OpNeeds needs;
  uint64_t sequence;
  int unit;
  const char *module;
  Where where;
  bool has_data; // D
  bool deferred; // P only, and a GEMM-like op consumes an output
  bool queued;   // in a heap of the running backward
  bool consumed; // backward has passed: its saved tensors are gone
  void *user;
  void (*drop)(Ctx *ctx, void *user);
  Node *next;          // in ctx->dying
  TensorSpec *in_spec; // [n_in]
  Edge *edges;         // [n_in]
  Kept *kept;          // [n_in] inputs, [n_out] outputs, [n_saved] hidden outputs
  Tensor **dout;       // [n_out] gradients arrived so far
};

void node_drop_kept(Ctx *ctx, Kept *kept);

#endif
