// Fuzzes the readers of core/tokens. Input: a byte that chooses the format, two bytes with the size
// of the first file, the first file, then Megatron's .bin. No bytes may crash a reader; in what it
// accepts, all ids and documents can be read.
#include "core/tokens.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size);
int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size) {
  static const TokenFormat formats[] = {TOKENS_AUTO, TOKENS_LLMC, TOKENS_NANOGPT, TOKENS_MEGATRON};
  if (size < 3) return 0;
  TokenFormat format = formats[data[0] % 4];
  size_t n_head = (size_t)data[1] | (size_t)data[2] << 8;
  if (n_head > size - 3) n_head = size - 3;
  TokenFile *file;
  if (tokens_open_memory(&file, format, data + 3, n_head, data + 3 + n_head, size - 3 - n_head,
                         "fuzz") != ST_OK)
    return 0;
  int64_t n = tokens_count(file), id, first, length, total = 0;
  if (n < 1 || n > (int64_t)size) abort();
  for (int64_t i = 0; i < n; i++)
    if (tokens_get(file, i, 1, &id) != ST_OK) abort();
  if (tokens_get(file, n, 1, &id) == ST_OK) abort();
  Status status = tokens_check(file, 300);
  if (status != ST_OK && status != ST_EVALUE) abort();
  for (int64_t i = 0; i < tokens_n_documents(file); i++) {
    if (tokens_document(file, i, &first, &length) != ST_OK || first != total) abort();
    total += length;
  }
  if (tokens_format(file) == TOKENS_MEGATRON && total != n) abort();
  tokens_close(file);
  return 0;
}
