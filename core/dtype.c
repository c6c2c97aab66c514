// dtype - the element types of tensors and of weight files.
#include "core/dtype.h"

#include <string.h>

static const struct {
  const char *name;
  const char *safetensors;
  size_t size;
} table[] = {
#define X(NAME, name, bytes, safetensors) {#name, safetensors, bytes},
    DTYPE_LIST(X)
#undef X
};

size_t dtype_size(DType dtype) { return table[dtype].size; }
const char *dtype_name(DType dtype) { return table[dtype].name; }
const char *dtype_safetensors_name(DType dtype) { return table[dtype].safetensors; }

Status dtype_from_name(DType *out, const char *name) {
  for (int i = 0; i < DTYPE_COUNT; i++) {
    if (strcmp(name, table[i].name) != 0 && strcmp(name, table[i].safetensors) != 0) continue;
    *out = (DType)i;
    return ST_OK;
  }
#define X(NAME, name, bytes, safetensors) " " #name
  return fail(ST_EDTYPE, "unknown dtype \"%.64s\"; there are:" DTYPE_LIST(X), name);
#undef X
}
