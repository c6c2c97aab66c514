// weights - parameters, declared before they have storage, and the flat sets that hold them.
//
// A Param is a name, a shape and a recipe for its initial value. Storage appears at first touch (in
// one process) or when an optimizer gathers parameters into WeightSets: one flat array for each
// (stage, group, dtype), padded so that dp divides it, each parameter 64-byte aligned, with its
// gradient (f32, or f64 for f64) and the optimizer's state beside it.
//
// Invariants:
//  1. A parameter is in exactly one WeightSet once placed; moving it to another keeps its value.
//  2. Initial values are a function of (seed, name, global element index): no layout changes them.
//  3. A parameter used by several units has one gradient buffer a unit; the sum is taken in unit
//  order.
//  4. STEP writes a version; the tape saves (parameter, version).
//  5. The shape of a parameter that is cut is its part's; names and element indices are the
//  whole's.
#ifndef RILLE_CORE_WEIGHTS_H
#define RILLE_CORE_WEIGHTS_H

#include "core/context.h"
#include "core/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum RecipeKind {
  RECIPE_ZEROS,
  RECIPE_CONSTANT,
  RECIPE_NORMAL,
  RECIPE_UNIFORM,
  RECIPE_DATA
} RecipeKind;

// How a parameter begins: constant a; normal (mean a, std b); uniform [a, b); a given tensor.
typedef struct Recipe {
  RecipeKind kind;
  double a, b;
  Tensor *data; // owned; RECIPE_DATA
} Recipe;

// A gradient buffer of one use of a parameter: all uses in one unit share it.
typedef struct GradUse {
  int unit;
  Tensor *grad;
  bool written; // in this step; unwritten buffers count as zero and are overwritten by the first
} GradUse;

// Owned by its canonical tensor: retaining that one retains the parameter.
struct Param {
  char *name;
  bool frozen;           // wants no gradient
  const char *elsewhere; // interned: who holds it, where this rank does not; NULL: it may be placed
  Recipe recipe;
  Tensor *tensor;   // the canonical tensor (borrowed): shape, dtype, shard; storage once placed
  uint32_t version; // in-place writes by the script
  WeightSet *set;   // NULL until placed
  int64_t offset;   // in the set, elements
  GradUse *uses;    // ascending by unit; the first one's buffer lies in the set's flat gradient
  int n_uses, uses_room;
  bool is_summed; // the gradient is whole, over uses and then maybe over ranks; nothing came since
};

enum { MAX_OPT_STATE = 3 };

struct WeightSet {
  DType dtype, grad_dtype;
  int group; // of the optimizer (its own hyperparameters)
  int stage;
  int refs;
  Param **params; // borrowed; NULL where the parameter has been collected
  int n_params;
  int64_t numel; // padded
  Tensor *flat;  // [numel]
  uint32_t version;
  Tensor *grad;                 // [numel]; made when first needed
  Tensor *state[MAX_OPT_STATE]; // [numel] f32 each; made by the optimizer
  Where stepped;                // the script line of the latest STEP or in-place write
};

// A declared parameter without storage. name is copied; the tensor's P bit is set.
Status param_new(Ctx *ctx, const char *name, DType dtype, int ndim, const int64_t *shape,
                 Tensor **out);
void param_delete(Ctx *ctx, Param *param); // by the release of its tensor

// Grows with every write to the parameter: STEP, in-place, through a view. Placed parameters only.
uint64_t param_version(const Param *param);
Status param_rename(Ctx *ctx, Param *param, const char *name);

// The canonical tensor of the parameter that t is or is a view of; NULL if there is none. Borrowed.
Tensor *tensor_base(const Tensor *t);
// Grows with every write to the bytes of t, by whatever name. base is what tensor_base(t) gave when
// the version was first asked for, kept alive by the caller. 0 for a parameter without storage.
uint64_t tensor_version(const Tensor *t, const Tensor *base);

// Changes how it begins; on a placed parameter the values are written at once. Takes over
// recipe->data, which has the shape of the whole, or of the part.
Status param_recipe(Ctx *ctx, Param *param, const Recipe *recipe);

// Gives it storage (a set of its own) and its initial value, if it has none yet. Errors: ESTATE, if
// another rank holds it.
Status param_place(Ctx *ctx, Param *param);

// Takes its storage away: the value is lost, and placed again it begins anew. It stays cut.
void param_unplace(Ctx *ctx, Param *param);

// Keeps of a parameter what `shard` says: its dimension becomes `local` long, at least the runs
// together. Placed, it keeps the values of its part, in a set of its own; its gradients are
// dropped. NULL: it is whole again, without storage (a value is lost). Errors: EVALUE for runs that
// overlap or do not fit, ESHAPE if the whole has another length, ESTATE for a placed part.
Status param_shard(Ctx *ctx, Param *param, const Shard *shard, int64_t local);

// Elements that lie one after the other both here and in the whole.
typedef struct Piece {
  int64_t n, at;   // how many; the index in the whole of the first, -1: padding
  bool is_counted; // ShardRun; false for padding
} Piece;

// The longest piece that begins at element i of a parameter, 0 <= i < its number of elements.
Piece param_piece(const Param *param, int64_t i);

// The buffer that the gradient of `unit` goes to; *written says whether to add or to overwrite. The
// caller marks it written. Borrowed.
Status param_grad_buffer(Ctx *ctx, Param *param, int unit, GradUse **out);

// The whole gradient: uses summed in unit order into the first (inv. 3); NULL if none was written.
Status param_grad(Ctx *ctx, Param *param, Tensor **out);

// Gathers parameters into one set; values of placed ones move along, gradients are dropped.
// numel is padded to a multiple of 16 * dp.
Status weightset_new(Ctx *ctx, Param **params, int n, int group, int stage, int dp,
                     WeightSet **out);
// The set lives while one of its parameters does.
void weightset_release(Ctx *ctx, WeightSet *set);
WeightSet *weightset_retain(WeightSet *set);

// Makes the flat gradient complete: sums uses, zeroes what was not written. Before norms and STEP.
Status weightset_finish_grads(Ctx *ctx, WeightSet *set);
// The same for params[first .. first + n - 1] alone; *out is their part of the flat gradient, with
// the padding behind it: [m], owned by the caller.
Status weightset_finish_part(Ctx *ctx, WeightSet *set, int first, int n, Tensor **out);
// Forgets all gradients: the next contribution overwrites.
void weightset_zero_grads(WeightSet *set);
// A zeroed state array (index < MAX_OPT_STATE), made at first call.
Status weightset_state(Ctx *ctx, WeightSet *set, int index, Tensor **out);
// STEP has written the flat array: a new version.
void weightset_stepped(Ctx *ctx, WeightSet *set);

#ifdef __cplusplus
}
#endif
#endif
