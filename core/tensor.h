// tensor - a refcounted Storage and views of it.
//
//    handle (script) --+                    owners: tensors that keep the bytes alive
//    node's saved    --+--> Tensor --> Storage --> bytes
//    scope           --+                    refs: tensors that know the storage
//
// Outside a trainer step every Tensor owns its storage. Inside one, a handle that the script holds
// is weak: the scope of the unit call owns, and when the unit returns, what was neither saved for
// backward nor returned is released at once, whatever the script's collector still knows.
//
// Invariants:
//  1. bytes live while owners > 0; a Storage struct lives while refs > 0; owners <= refs.
//  2. A weak Tensor never touches the bytes of a storage without owners (tensor_alive says).
//  3. Every in-place write bumps storage->version; of a parameter, or of a view of one, the
//     parameter's version instead: its neighbours in the flat array have not changed.
#ifndef RILLE_CORE_TENSOR_H
#define RILLE_CORE_TENSOR_H

#include "core/device.h"
#include "core/dtype.h"
#include "core/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MAX_DIMS = 8 };

typedef struct Ctx Ctx;
typedef struct Node Node;
typedef struct Param Param;
typedef struct Arena Arena;
typedef struct WeightSet WeightSet;

// A line of the user's script; source is interned, NULL if unknown.
typedef struct Where {
  const char *source;
  int line;
} Where;

typedef struct Storage {
  Device *device;
  void *data; // NULL on the meta device and once released
  size_t bytes;
  MemKind kind;
  int refs, owners;
  int saves;        // how many nodes keep it for backward
  uint32_t version; // inv. 3
  bool released;    // the bytes are gone: its arena ended
  bool foreign;     // the bytes belong to somebody else (a mapped file)
  Where written;    // the latest in-place write
  int64_t step;     // trainer step and microbatch it was made in; -1 outside
  int microbatch;
  Arena *arena;   // accounts it while saves > 0
  WeightSet *set; // whose flat array of weights it is; else NULL
} Storage;

// A stretch of a cut dimension: n entries from `at` of the whole on. is_counted: this rank answers
// for it in norms and fingerprints (of several that hold the same one, one does).
typedef struct ShardRun {
  int64_t at, n;
  bool is_counted;
} ShardRun;

// What a parameter holds of a whole whose dimension `dim` is `full` long: the runs one after the
// other (a fused projection by heads has one each of q, k and v), then padding, which is 0 and in
// no norm or fingerprint.
enum { MAX_SHARD_RUNS = 4 };
typedef struct Shard {
  int dim, n_runs;
  int64_t full;
  ShardRun runs[MAX_SHARD_RUNS];
} Shard;

typedef struct Tensor {
  int refs;
  DType dtype;
  int ndim;
  bool requires_grad; // a gradient flows to or through it
  bool depends_data;  // D: depends on microbatch data (ids included)
  bool depends_param; // P: depends on a parameter
  bool deferred;      // P only: some GEMM-like op consumes it, so its gradient waits for W
  bool weak;          // does not own its storage
  int64_t shape[MAX_DIMS], stride[MAX_DIMS], offset; // in elements
  Storage *storage;
  Node *node; // its producer in the graph; NULL for leaves
  int out_index;
  Param *param;        // a parameter of a model: storage is resolved through it
  struct Tensor *grad; // a leaf's gradient
  Shard *shard;        // NULL: whole
} Tensor;

// What a new tensor looks like; strides are row-major unless it is an alias.
typedef struct TensorSpec {
  DType dtype;
  int ndim;
  int64_t shape[MAX_DIMS];
  bool alias; // a view of input 0 with the strides and offset below
  int64_t stride[MAX_DIMS], offset;
} TensorSpec;

// A contiguous tensor of undefined contents, accounted under `kind`.
Status tensor_new(Ctx *ctx, Device *device, const TensorSpec *spec, MemKind kind, Tensor **out);
Status tensor_zeros(Ctx *ctx, Device *device, DType dtype, int ndim, const int64_t *shape,
                    MemKind kind, Tensor **out);

// A contiguous CPU tensor with a copy of `data` (row-major, shape's number of elements).
Status tensor_from_data(Ctx *ctx, DType dtype, int ndim, const int64_t *shape, const void *data,
                        Tensor **out);

// A 0-d CPU tensor with this value.
Status tensor_scalar(Ctx *ctx, DType dtype, double value, Tensor **out);

// A second Tensor over the same storage; owns it even where `base` is weak, carries no graph.
Status tensor_alias(Ctx *ctx, const Tensor *base, const TensorSpec *spec, Tensor **out);
Status tensor_detach(Ctx *ctx, const Tensor *base, Tensor **out);

Tensor *tensor_retain(Tensor *tensor);
void tensor_release(Ctx *ctx, Tensor *tensor); // NULL is allowed

// One owner, or one ref, of a storage goes (tensor_release and scope_close do).
void storage_disown(Storage *storage);
void storage_forget(Ctx *ctx, Storage *storage);

// Turns an owning tensor into a weak one and back. Errors of tensor_strengthen: ESTATE if the bytes
// are gone.
void tensor_weaken(Tensor *tensor);
Status tensor_strengthen(Tensor *tensor);

// Errors: ESTATE, with the step and microbatch it belonged to, if the bytes are gone.
Status tensor_alive(const Tensor *tensor);

int64_t tensor_numel(const Tensor *tensor);
bool tensor_contiguous(const Tensor *tensor);
void tensor_spec(const Tensor *tensor, TensorSpec *out);
void spec_row_major(TensorSpec *spec);
int64_t spec_numel(const TensorSpec *spec);

// The address of element 0; NULL on the meta device.
static inline void *tensor_data(const Tensor *tensor) {
  char *data = (char *)tensor->storage->data;
  return data ? data + (size_t)tensor->offset * dtype_size(tensor->dtype) : NULL;
}

static inline bool tensor_is_meta(const Tensor *tensor) {
  return tensor->storage && tensor->storage->device->kind == DEV_META;
}

// Element i (row-major index) as a double. Errors: EDEVICE on meta, ESTATE.
Status tensor_read(const Tensor *tensor, int64_t i, double *out);

// The value of a tensor with one element. Errors: ESHAPE otherwise.
Status tensor_item(const Tensor *tensor, double *out);

// Records an in-place write (inv. 3).
void tensor_written(Ctx *ctx, Tensor *tensor);

// "f32[2, 3]" into a caller's buffer.
const char *format_tensor(char *buffer, size_t size, const Tensor *tensor);
const char *format_shape(char *buffer, size_t size, int ndim, const int64_t *shape);

#ifdef __cplusplus
}
#endif
#endif
