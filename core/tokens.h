// tokens - files of token ids: reading three formats, writing one.
//
//   llm.c     int32[256] header (20240520, version 1: u16; 20240801, version 7: u32; [2] = count),
//             then the ids. What Rille writes.
//   nanoGPT   u16 ids and nothing else; read only when asked for by name, since any file would do
//   Megatron  <x>.idx (types, lengths, documents) beside <x>.bin (ids)
//
// Files are mapped; all of a header is checked at once, ids against a vocabulary by tokens_check.
// Every message names the file, what was expected and what was found.
#ifndef RILLE_CORE_TOKENS_H
#define RILLE_CORE_TOKENS_H

#include <stddef.h>
#include <stdint.h>

#include "core/file.h"
#include "core/status.h"

#ifdef __cplusplus
extern "C" {
#endif

// X(NAME, name): the formats, and what users call them. auto tells llm.c and Megatron apart.
#define TOKEN_FORMAT_LIST(X) \
  X(AUTO, "auto")            \
  X(LLMC, "llm.c")           \
  X(NANOGPT, "nanogpt")      \
  X(MEGATRON, "megatron")

typedef enum TokenFormat {
#define X(NAME, name) TOKENS_##NAME,
  TOKEN_FORMAT_LIST(X)
#undef X
} TokenFormat;

const char *token_format_name(TokenFormat format);

// Errors: EVALUE naming what there is.
Status token_format_from_name(TokenFormat *out, const char *name);

typedef struct TokenFile TokenFile;

// Opens and checks a token file. Megatron: `path` is the .idx, the .bin, or both without ending.
// Errors: EIO, EFORMAT.
Status tokens_open(TokenFile **out, const char *path, TokenFormat format);

// The same over borrowed memory; ids[n_id_bytes] is the .bin of Megatron, else NULL.
Status tokens_open_memory(TokenFile **out, TokenFormat format, const void *data, size_t size,
                          const void *ids, size_t n_id_bytes, const char *name);

// NULL is ignored.
void tokens_close(TokenFile *file);

// Number of ids; at least 1.
int64_t tokens_count(const TokenFile *file);
TokenFormat tokens_format(const TokenFile *file);

// out[n] = ids first .. first + n - 1. Errors: ERANGE.
Status tokens_get(const TokenFile *file, int64_t first, int64_t n, int64_t *out);

// Reads the whole file. Errors: EVALUE naming the first id that is not in [0, vocab), and where.
Status tokens_check(const TokenFile *file, int64_t vocab);

// Documents of a Megatron file, 0 for the others. Document i is ids [*first, *first + *n); 0 <= i <
// the number. Errors: ERANGE.
int64_t tokens_n_documents(const TokenFile *file);
Status tokens_document(const TokenFile *file, int64_t i, int64_t *first, int64_t *n);

typedef struct TokenWriter TokenWriter;

// Starts a file in llm.c's format, u16 for vocab <= 65536, else u32; it appears whole at commit.
// 1 <= vocab <= 2^31. `fault` as in file_writer_open. Errors: EVALUE, EIO.
Status token_writer_open(TokenWriter **out, const char *path, int64_t vocab, FileFault *fault);

// Appends ids[n]. Errors: EVALUE for an id not in [0, vocab), or more than 2^31 - 1 ids in the file
// (the format counts in int32); nothing was appended then. EIO.
Status token_writer_put(TokenWriter *writer, const int64_t *ids, int64_t n);

// Puts the file in place and frees the writer, also on failure. Errors: EIO, ESTATE without ids.
Status token_writer_commit(TokenWriter *writer);

// Drops the file and frees the writer; NULL is ignored.
void token_writer_abort(TokenWriter *writer);

// Byte-level tokens of a text file (vocabulary 256): ids = bytes. *n = their number, may be NULL.
// Errors: EFORMAT for an empty text, EVALUE if both paths are one file, EIO.
Status tokens_from_text(int64_t *n, const char *text_path, const char *out_path);

#ifdef __cplusplus
}
#endif
#endif
