// Fuzzes the reader of core/safetensors: no bytes may crash it, and in what it accepts the tensors
// cover the data exactly.
#include "core/safetensors.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size);
int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size) {
  Safetensors *file;
  if (safetensors_open_memory(&file, data, size, "fuzz") != ST_OK) return 0;
  const unsigned char *next = NULL;
  unsigned sum = 0;
  for (int64_t i = 0; i < safetensors_count(file); i++) {
    const SafetensorsEntry *entry = safetensors_at(file, i);
    if (next && entry->data != next) abort();
    if (entry->data < data || entry->n_bytes > data + size - entry->data) abort();
    if (safetensors_find(file, entry->name) != entry) abort();
    for (int64_t k = 0; k < entry->n_bytes; k++) sum += entry->data[k];
    next = entry->data + entry->n_bytes;
  }
  if (next && next != data + size) abort();
  volatile unsigned keep = sum; // the reads must happen
  (void)keep;
  safetensors_close(file);
  return 0;
}
