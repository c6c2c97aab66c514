// tensor - storages, views, lifetimes.
#include "core/tensor.h"

#include "core/bf16.h"
#include "core/context.h"
#include "core/tape.h"
#include "core/weights.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

void spec_row_major(TensorSpec *spec) {
  int64_t stride = 1;
  for (int d = spec->ndim - 1; d >= 0; d--) {
    spec->stride[d] = stride;
    stride *= spec->shape[d] > 0 ? spec->shape[d] : 1;
  }
  spec->offset = 0;
  spec->alias = false;
}

int64_t spec_numel(const TensorSpec *spec) {
  int64_t n = 1;
  for (int d = 0; d < spec->ndim; d++) n *= spec->shape[d];
  return n;
}

// Bytes of a spec, checked. Errors: ENOMEM.
static Status spec_bytes(const TensorSpec *spec, int64_t *out) {
  int64_t n = (int64_t)dtype_size(spec->dtype);
  for (int d = 0; d < spec->ndim; d++) TRY(checked_mul(spec->shape[d], n, &n));
  *out = n;
  return ST_OK;
}

static Status storage_new(Ctx *ctx, Device *device, size_t bytes, MemKind kind, Storage **out) {
  Storage *storage;
  TRY(struct_alloc(ctx, sizeof *storage, &storage));
  memset(storage, 0, sizeof *storage);
  Status status = device->vtable->alloc(device, bytes, kind, &storage->data);
  if (status != ST_OK) {
    struct_free(ctx, storage, sizeof *storage);
    return status;
  }
  storage->device = device;
  storage->bytes = bytes;
  storage->kind = kind;
  storage->step = ctx->place.step;
  storage->microbatch = ctx->place.microbatch;
  storage->refs = storage->owners = 1;
  *out = storage;
  return ST_OK;
}

void storage_disown(Storage *storage) {
  assert(storage->owners > 0);
  if (--storage->owners > 0) return;
  if (!storage->foreign)
    storage->device->vtable->free(storage->device, storage->data, storage->bytes, storage->kind);
  storage->data = NULL;
  storage->released = true;
}

void storage_forget(Ctx *ctx, Storage *storage) {
  assert(storage->refs > 0);
  if (--storage->refs == 0) struct_free(ctx, storage, sizeof *storage);
}

static Status tensor_struct(Ctx *ctx, const TensorSpec *spec, Tensor **out) {
  Tensor *tensor;
  TRY(struct_alloc(ctx, sizeof *tensor, &tensor));
  memset(tensor, 0, sizeof *tensor);
  tensor->refs = 1;
  tensor->dtype = spec->dtype;
  tensor->ndim = spec->ndim;
  size_t n = (size_t)spec->ndim * sizeof(int64_t);
  memcpy(tensor->shape, spec->shape, n);
  memcpy(tensor->stride, spec->stride, n);
  tensor->offset = spec->offset;
  *out = tensor;
  return ST_OK;
}

Status tensor_new(Ctx *ctx, Device *device, const TensorSpec *spec, MemKind kind, Tensor **out) {
  TensorSpec dense = *spec;
  spec_row_major(&dense);
  int64_t bytes;
  TRY(spec_bytes(&dense, &bytes));
  Tensor *tensor;
  TRY(tensor_struct(ctx, &dense, &tensor));
  Status status = storage_new(ctx, device, (size_t)bytes, kind, &tensor->storage);
  if (status != ST_OK) {
    struct_free(ctx, tensor, sizeof *tensor);
    return status;
  }
  *out = tensor;
  return ST_OK;
}

static void make_spec(TensorSpec *spec, DType dtype, int ndim, const int64_t *shape) {
  assert(ndim <= MAX_DIMS);
  memset(spec, 0, sizeof *spec);
  spec->dtype = dtype;
  spec->ndim = ndim;
  if (ndim) memcpy(spec->shape, shape, (size_t)ndim * sizeof *shape);
  spec_row_major(spec);
}

Status tensor_zeros(Ctx *ctx, Device *device, DType dtype, int ndim, const int64_t *shape,
                    MemKind kind, Tensor **out) {
  TensorSpec spec;
  make_spec(&spec, dtype, ndim, shape);
  TRY(tensor_new(ctx, device, &spec, kind, out));
  return device->vtable->zero(device, (*out)->storage->data, (*out)->storage->bytes, NULL);
}

Status tensor_from_data(Ctx *ctx, DType dtype, int ndim, const int64_t *shape, const void *data,
                        Tensor **out) {
  TensorSpec spec;
  make_spec(&spec, dtype, ndim, shape);
  TRY(tensor_new(ctx, &ctx->cpu, &spec, MEM_ACTIVATIONS, out));
  if ((*out)->storage->bytes) memcpy((*out)->storage->data, data, (*out)->storage->bytes);
  return ST_OK;
}

static void store(void *to, DType dtype, double value) {
  switch (dtype) {
  case DT_F32: *(float *)to = (float)value; break;
  case DT_F64: *(double *)to = value; break;
  case DT_BF16: *(uint16_t *)to = bf16_narrow((float)value); break;
  case DT_I64: *(int64_t *)to = real_to_int64(value); break;
  case DT_I32: *(int32_t *)to = (int32_t)real_to_int64(value); break;
  case DT_U8: *(uint8_t *)to = (uint8_t)real_to_int64(value); break;
  case DT_BOOL: *(uint8_t *)to = value != 0; break;
  }
}

static double load(const void *from, DType dtype) {
  switch (dtype) {
  case DT_F32: return (double)*(const float *)from;
  case DT_F64: return *(const double *)from;
  case DT_BF16: return (double)bf16_widen(*(const uint16_t *)from);
  case DT_I64: return (double)*(const int64_t *)from;
  case DT_I32: return (double)*(const int32_t *)from;
  case DT_U8:
  case DT_BOOL: return (double)*(const uint8_t *)from;
  }
  return 0;
}

Status tensor_scalar(Ctx *ctx, DType dtype, double value, Tensor **out) {
  TensorSpec spec;
  make_spec(&spec, dtype, 0, NULL);
  TRY(tensor_new(ctx, &ctx->cpu, &spec, MEM_ACTIVATIONS, out));
  store((*out)->storage->data, dtype, value);
  return ST_OK;
}

Status tensor_alias(Ctx *ctx, const Tensor *base, const TensorSpec *spec, Tensor **out) {
  Tensor *tensor;
  TRY(tensor_struct(ctx, spec, &tensor));
  tensor->storage = base->storage;
  tensor->storage->refs++;
  tensor->storage->owners++;
  tensor->depends_data = base->depends_data;
  tensor->depends_param = base->depends_param;
  *out = tensor;
  return ST_OK;
}

Status tensor_detach(Ctx *ctx, const Tensor *base, Tensor **out) {
  TensorSpec spec;
  TRY(tensor_alive(base));
  tensor_spec(base, &spec);
  return tensor_alias(ctx, base, &spec, out);
}

Tensor *tensor_retain(Tensor *tensor) {
  tensor->refs++;
  return tensor;
}

void tensor_release(Ctx *ctx, Tensor *tensor) {
  if (!tensor) return;
  assert(tensor->refs > 0);
  if (--tensor->refs > 0) return;
  if (tensor->node) node_release(ctx, tensor->node);
  if (tensor->grad) tensor_release(ctx, tensor->grad);
  if (tensor->storage) {
    if (!tensor->weak) storage_disown(tensor->storage);
    storage_forget(ctx, tensor->storage);
  }
  if (tensor->param) param_delete(ctx, tensor->param);
  if (tensor->shard) struct_free(ctx, tensor->shard, sizeof *tensor->shard);
  struct_free(ctx, tensor, sizeof *tensor);
}

void tensor_weaken(Tensor *tensor) {
  assert(!tensor->weak && tensor->storage);
  tensor->weak = true;
  storage_disown(tensor->storage);
}

Status tensor_strengthen(Tensor *tensor) {
  if (!tensor->weak) return ST_OK;
  TRY(tensor_alive(tensor));
  tensor->weak = false;
  tensor->storage->owners++;
  return ST_OK;
}

Status tensor_alive(const Tensor *tensor) {
  const Storage *storage = tensor->storage;
  if (!storage || !storage->released) return ST_OK;
  char shape[128];
  format_tensor(shape, sizeof shape, tensor);
  return fail_hint(fail(ST_ESTATE,
                        "this tensor %s belongs to step %lld, microbatch %d, and has been released",
                        shape, (long long)storage->step, storage->microbatch),
                   "use x:keep() inside the step to hold on to a value");
}

int64_t tensor_numel(const Tensor *tensor) {
  int64_t n = 1;
  for (int d = 0; d < tensor->ndim; d++) n *= tensor->shape[d];
  return n;
}

bool tensor_contiguous(const Tensor *tensor) {
  int64_t stride = 1;
  for (int d = tensor->ndim - 1; d >= 0; d--) {
    if (tensor->shape[d] == 0) return true;
    if (tensor->shape[d] != 1 && tensor->stride[d] != stride) return false;
    stride *= tensor->shape[d];
  }
  return true;
}

void tensor_spec(const Tensor *tensor, TensorSpec *out) {
  out->dtype = tensor->dtype;
  out->ndim = tensor->ndim;
  size_t n = (size_t)tensor->ndim * sizeof(int64_t);
  memcpy(out->shape, tensor->shape, n);
  memcpy(out->stride, tensor->stride, n);
  out->offset = tensor->offset;
  out->alias = true;
}

Status tensor_read(const Tensor *tensor, int64_t i, double *out) {
  TRY(tensor_alive(tensor));
  if (tensor_is_meta(tensor))
    return fail(ST_EDEVICE, "a tensor on the meta device has a shape but no values");
  int64_t at = tensor->offset;
  for (int d = tensor->ndim - 1; d >= 0; d--) {
    at += i % tensor->shape[d] * tensor->stride[d];
    i /= tensor->shape[d];
  }
  *out = load((const char *)tensor->storage->data + (size_t)at * dtype_size(tensor->dtype),
              tensor->dtype);
  return ST_OK;
}

Status tensor_item(const Tensor *tensor, double *out) {
  if (tensor_numel(tensor) != 1) {
    char shape[128];
    return fail_hint(fail(ST_ESHAPE, "item() needs a tensor with one element, this one is %s",
                          format_tensor(shape, sizeof shape, tensor)),
                     "reduce it first (x:sum(), x:mean()) or index one element (x[0])");
  }
  return tensor_read(tensor, 0, out);
}

void tensor_written(Ctx *ctx, Tensor *tensor) {
  Tensor *base = tensor_base(tensor);
  tensor->storage->written = ctx_where(ctx);
  if (!base) {
    tensor->storage->version++;
    return;
  }
  base->param->version++;
  if (base->param->set) base->param->set->stepped = tensor->storage->written;
}

const char *format_shape(char *buffer, size_t size, int ndim, const int64_t *shape) {
  size_t at = 0;
  int n = snprintf(buffer, size, "[");
  for (int d = 0; d < ndim && n >= 0 && at + (size_t)n < size; d++) {
    at += (size_t)n;
    n = snprintf(buffer + at, size - at, "%s%lld", d ? ", " : "", (long long)shape[d]);
  }
  if (n >= 0) at += (size_t)n;
  if (at < size) snprintf(buffer + at, size - at, "]");
  return buffer;
}

const char *format_tensor(char *buffer, size_t size, const Tensor *tensor) {
  char shape[112];
  snprintf(buffer, size, "%s%s%s", dtype_name(tensor->dtype),
           format_shape(shape, sizeof shape, tensor->ndim, tensor->shape),
           tensor_is_meta(tensor) ? " on meta" : "");
  return buffer;
}
