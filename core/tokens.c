// tokens - files of token ids: reading three formats, writing one.
//
// Invariants
//  1  After a successful open, `ids` has n elements of the type inside the mapped file, n >= 1.
//  2  Megatron: sequences follow each other in the .bin without gaps, documents are ascending
//     ranges of sequences that end with the last one; so ids can be read flat.
#include "core/tokens.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the ids are read as they lie");

// X(NAME, type, code): element types of ids, and their codes in a Megatron index (0: none).
#define ID_TYPE_LIST(X) \
  X(U8, uint8_t, 1)     \
  X(I8, int8_t, 2)      \
  X(I16, int16_t, 3)    \
  X(I32, int32_t, 4)    \
  X(I64, int64_t, 5)    \
  X(U16, uint16_t, 8)   \
  X(U32, uint32_t, 0)

typedef enum IdType {
#define X(NAME, type, code) ID_##NAME,
  ID_TYPE_LIST(X)
#undef X
} IdType;

enum { LLMC_HEADER_BYTES = 1024, MEGATRON_HEADER_BYTES = 34, BLOCK = 4096 };

// Magic numbers and versions of llm.c's headers.
static const struct {
  int32_t magic, version;
  IdType type;
} llmc_kinds[] = {{20240520, 1, ID_U16}, {20240801, 7, ID_U32}};

static const char megatron_magic[9] = "MMIDIDX\0";

struct TokenFile {
  FileMap map;   // the file; Megatron: the .bin
  FileMap index; // Megatron: the .idx
  TokenFormat format;
  IdType type;
  const unsigned char *ids; // maybe unaligned
  int64_t n;
  int64_t n_sequences, n_documents;
  const unsigned char *pointers;  // i64[n_sequences], byte offsets in the .bin, unaligned
  const unsigned char *documents; // i64[n_documents + 1], sequence numbers, unaligned
};

static const struct {
  TokenFormat format;
  const char *name;
} formats[] = {
#define X(NAME, name) {TOKENS_##NAME, name},
    TOKEN_FORMAT_LIST(X)
#undef X
};

const char *token_format_name(TokenFormat format) { return formats[format].name; }

Status token_format_from_name(TokenFormat *out, const char *name) {
  for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
    if (strcmp(name, formats[i].name) != 0) continue;
    *out = formats[i].format;
    return ST_OK;
  }
#define X(NAME, name) " " name
  return fail(ST_EVALUE, "unknown token format \"%.64s\"; there are:" TOKEN_FORMAT_LIST(X), name);
#undef X
}

static int64_t id_bytes(IdType type) {
  switch (type) {
#define X(NAME, type, code) \
  case ID_##NAME: return sizeof(type);
    ID_TYPE_LIST(X)
#undef X
  }
  return 1;
}

static void read_ids(int64_t *out, const unsigned char *ids, IdType type, int64_t n) {
  switch (type) {
#define X(NAME, ctype, code)                                \
  case ID_##NAME:                                           \
    for (int64_t i = 0; i < n; i++) {                       \
      ctype id;                                             \
      memcpy(&id, ids + i * (int64_t)sizeof id, sizeof id); \
      out[i] = (int64_t)id;                                 \
    }                                                       \
    break;
    ID_TYPE_LIST(X)
#undef X
  }
}

static int64_t read_i64(const unsigned char *array, int64_t i) {
  int64_t value;
  memcpy(&value, array + 8 * i, sizeof value);
  return value;
}

static int32_t read_i32(const unsigned char *array, int64_t i) {
  int32_t value;
  memcpy(&value, array + 4 * i, sizeof value);
  return value;
}

// ---- the formats ----------------------------------------------------------------------------

static Status read_llmc(TokenFile *file) {
  const FileMap *map = &file->map;
  int32_t magic = read_i32(map->data, 0), version = read_i32(map->data, 1);
  size_t kind = 0, n_kinds = sizeof llmc_kinds / sizeof *llmc_kinds;
  while (kind < n_kinds && llmc_kinds[kind].magic != magic) kind++;
  if (kind == n_kinds)
    return fail(ST_EFORMAT, "%s: expected llm.c's token header (20240520 or 20240801), found %d",
                map->name, magic);
  if (version != llmc_kinds[kind].version)
    return fail(ST_EFORMAT, "%s: expected version %d of llm.c's token format %d, found version %d",
                map->name, llmc_kinds[kind].version, magic, version);
  file->type = llmc_kinds[kind].type;
  file->n = read_i32(map->data, 2);
  int64_t expected = LLMC_HEADER_BYTES + file->n * id_bytes(file->type);
  if (file->n < 0 || expected != map->size)
    return fail(
        ST_EFORMAT,
        "%s: expected %lld bytes for the %lld ids that its header announces, found %lld: %s",
        map->name, (long long)expected, (long long)file->n, (long long)map->size,
        map->size < expected ? "it is cut short" : "its header and size disagree");
  file->ids = map->data + LLMC_HEADER_BYTES;
  return ST_OK;
}

static Status read_nanogpt(TokenFile *file) {
  if (file->map.size % 2 != 0)
    return fail(ST_EFORMAT, "%s: expected ids of 2 bytes each, found an odd size of %lld bytes",
                file->map.name, (long long)file->map.size);
  file->type = ID_U16;
  file->n = file->map.size / 2;
  file->ids = file->map.data;
  return ST_OK;
}

// The header of a Megatron index: element type, numbers of sequences and documents, the arrays.
static Status read_megatron_header(TokenFile *file, const unsigned char **lengths) {
  static const struct {
    int code;
    IdType type;
  } codes[] = {
#define X(NAME, ctype, code) {code, ID_##NAME},
      ID_TYPE_LIST(X)
#undef X
  };
  const FileMap *index = &file->index;
  if (memcmp(index->data, megatron_magic, sizeof megatron_magic) != 0)
    return fail(ST_EFORMAT, "%s: expected a Megatron index, which begins with MMIDIDX",
                index->name);
  int64_t version = read_i64(index->data + 9, 0);
  if (version != 1)
    return fail(ST_EFORMAT, "%s: expected version 1 of the Megatron index, found %lld", index->name,
                (long long)version);
  int code = index->data[17];
  size_t kind = 0, n_codes = sizeof codes / sizeof *codes;
  while (kind < n_codes && (codes[kind].code != code || code == 0)) kind++;
  if (kind == n_codes)
    return fail(ST_EFORMAT,
                "%s: expected a dtype of integers (1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 8 u16), found "
                "%d",
                index->name, code);
  file->type = codes[kind].type;
  int64_t S = read_i64(index->data + 18, 0), D = read_i64(index->data + 26, 0);
  bool fits = S >= 0 && D >= 1 && S <= index->size / 12 && D <= index->size / 8;
  if (!fits || MEGATRON_HEADER_BYTES + 12 * S + 8 * D != index->size)
    return fail(ST_EFORMAT,
                "%s: expected a size of 34 + 12 x %lld sequences + 8 x %lld document bounds, found "
                "%lld bytes",
                index->name, (long long)S, (long long)D, (long long)index->size);
  file->n_sequences = S;
  file->n_documents = D - 1;
  *lengths = index->data + MEGATRON_HEADER_BYTES;
  file->pointers = *lengths + 4 * S;
  file->documents = file->pointers + 8 * S;
  return ST_OK;
}

// Inv. 2.
static Status read_megatron(TokenFile *file) {
  const unsigned char *lengths = NULL;
  TRY(read_megatron_header(file, &lengths));
  const char *name = file->index.name;
  int64_t width = id_bytes(file->type), next = 0;
  for (int64_t i = 0; i < file->n_sequences; i++) {
    int64_t length = read_i32(lengths, i), pointer = read_i64(file->pointers, i);
    int64_t end;
    if (length < 0 || pointer != next || __builtin_add_overflow(next, length * width, &end))
      return fail(
          ST_EFORMAT,
          "%s: sequence %lld: expected it at byte %lld of the .bin, found byte %lld, length "
          "%lld",
          name, (long long)i, (long long)next, (long long)pointer, (long long)length);
    next = end;
  }
  if (next != file->map.size)
    return fail(ST_EFORMAT, "%s: expected %lld bytes, as its index says, found %lld: %s",
                file->map.name, (long long)next, (long long)file->map.size,
                file->map.size < next ? "it is cut short" : "they do not belong together");
  for (int64_t i = 0; i <= file->n_documents; i++) {
    int64_t low = i > 0 ? read_i64(file->documents, i - 1) : 0;
    int64_t bound = read_i64(file->documents, i);
    bool is_last = i == file->n_documents;
    if (bound < low || bound > file->n_sequences || (i == 0 && bound != 0) ||
        (is_last && bound != file->n_sequences))
      return fail(
          ST_EFORMAT,
          "%s: document bound %lld: expected bounds that ascend from 0 to the %lld sequences, "
          "found %lld",
          name, (long long)i, (long long)file->n_sequences, (long long)bound);
  }
  file->n = next / width;
  file->ids = file->map.data;
  return ST_OK;
}

// ---- opening --------------------------------------------------------------------------------

static bool ends_in(const char *path, const char *ending) {
  size_t n = strlen(path), m = strlen(ending);
  return n >= m && strcmp(path + n - m, ending) == 0;
}

// Which format the first bytes name. Errors: EFORMAT with what to do.
static Status guess_format(TokenFormat *out, const FileMap *map) {
  int32_t magic = map->size >= 4 ? read_i32(map->data, 0) : 0;
  for (size_t i = 0; i < sizeof llmc_kinds / sizeof *llmc_kinds; i++) {
    if (magic == llmc_kinds[i].magic) {
      *out = TOKENS_LLMC;
      return ST_OK;
    }
    if (magic == (int32_t)__builtin_bswap32((uint32_t)llmc_kinds[i].magic))
      return fail(ST_EFORMAT, "%s: expected little-endian integers, found big-endian ones",
                  map->name);
  }
  if (map->size >= 9 && memcmp(map->data, megatron_magic, sizeof megatron_magic) == 0) {
    *out = TOKENS_MEGATRON;
    return ST_OK;
  }
  fail(ST_EFORMAT,
       "%s: expected a token file (llm.c's, or a Megatron .idx), found %lld bytes that "
       "begin with 0x%08x",
       map->name, (long long)map->size, (unsigned)magic);
  return fail_hint(ST_EFORMAT,
                   "a text must be made into tokens first; for a nanoGPT .bin, which has "
                   "no header, say format \"nanogpt\"; for Megatron name the .idx");
}

static const struct {
  const char *what;
  int64_t min_size; // of the file that begins with the header
} expected_files[] = {
    [TOKENS_AUTO] = {"a token file", 1},
    [TOKENS_LLMC] = {"a token file of llm.c's", LLMC_HEADER_BYTES},
    [TOKENS_NANOGPT] = {"a nanoGPT token file", 2},
    [TOKENS_MEGATRON] = {"a Megatron index", MEGATRON_HEADER_BYTES},
};

// Checks the mapped files against the format and hands over a TokenFile; takes the maps over, also
// on failure. The map of `head` begins with the header; `ids` is Megatron's .bin.
static Status finish_open(TokenFile **out, TokenFormat format, FileMap *head, FileMap *ids) {
  Status status = ST_OK;
  TokenFile *file = calloc(1, sizeof *file);
  if (!file) {
    status = fail(ST_ENOMEM, "%s: no memory to read it", head->name);
    file_unmap(head);
    file_unmap(ids);
    return status;
  }
  file->format = format;
  file->map = format == TOKENS_MEGATRON ? *ids : *head;
  file->index = format == TOKENS_MEGATRON ? *head : *ids;
  switch (format) {
  case TOKENS_AUTO: // resolved by the callers
  case TOKENS_LLMC: status = read_llmc(file); break;
  case TOKENS_NANOGPT: status = read_nanogpt(file); break;
  case TOKENS_MEGATRON: status = read_megatron(file); break;
  }
  if (status == ST_OK && file->n == 0)
    status = fail(ST_EFORMAT, "%s: expected token ids, found none", file->map.name);
  if (status == ST_OK) {
    *out = file;
  } else {
    tokens_close(file);
  }
  return status;
}

static Status open_megatron(TokenFile **out, const char *path) {
  size_t stem = strlen(path);
  if (ends_in(path, ".idx") || ends_in(path, ".bin")) stem -= 4;
  FileMap index = {0}, ids = {0};
  char *name = malloc(stem + 5);
  if (!name) return fail(ST_ENOMEM, "%s: no memory to read it", path);
  memcpy(name, path, stem);
  strcpy(name + stem, ".idx");
  Status status = file_map(&index, name, expected_files[TOKENS_MEGATRON].what,
                           expected_files[TOKENS_MEGATRON].min_size);
  strcpy(name + stem, ".bin");
  if (status == ST_OK) status = file_map(&ids, name, "the ids of a Megatron index", 0);
  free(name);
  if (status == ST_OK) return finish_open(out, TOKENS_MEGATRON, &index, &ids);
  file_unmap(&index);
  return status;
}

Status tokens_open(TokenFile **out, const char *path, TokenFormat format) {
  FileMap map = {0}, none = {0};
  if (format == TOKENS_MEGATRON || (format == TOKENS_AUTO && ends_in(path, ".idx")))
    return open_megatron(out, path);
  TRY(file_map(&map, path, expected_files[format].what, expected_files[format].min_size));
  Status status = format == TOKENS_AUTO ? guess_format(&format, &map) : ST_OK;
  if (status == ST_OK && format == TOKENS_MEGATRON)
    status =
        fail(ST_EFORMAT, "%s: a Megatron index must be named .idx, with its .bin beside it", path);
  if (status == ST_OK && map.size < expected_files[format].min_size)
    status = fail(ST_EFORMAT, "%s: expected %s of at least %lld bytes, found %lld bytes", path,
                  expected_files[format].what, (long long)expected_files[format].min_size,
                  (long long)map.size);
  if (status == ST_OK) return finish_open(out, format, &map, &none);
  file_unmap(&map);
  return status;
}

Status tokens_open_memory(TokenFile **out, TokenFormat format, const void *data, size_t size,
                          const void *ids, size_t n_id_bytes, const char *name) {
  FileMap head = {0}, tail = {0};
  if (format == TOKENS_AUTO) {
    TRY(file_map_memory(&head, data, size, name, expected_files[format].what, 1));
    Status status = guess_format(&format, &head);
    file_unmap(&head);
    if (status != ST_OK) return status;
  }
  TRY(file_map_memory(&head, data, size, name, expected_files[format].what,
                      expected_files[format].min_size));
  Status status = ST_OK;
  if (format == TOKENS_MEGATRON)
    status = file_map_memory(&tail, ids, n_id_bytes, name, "the ids of a Megatron index", 0);
  if (status == ST_OK) return finish_open(out, format, &head, &tail);
  file_unmap(&head);
  return status;
}

void tokens_close(TokenFile *file) {
  if (!file) return;
  file_unmap(&file->map);
  file_unmap(&file->index);
  free(file);
}

// ---- reading --------------------------------------------------------------------------------

int64_t tokens_count(const TokenFile *file) { return file->n; }
TokenFormat tokens_format(const TokenFile *file) { return file->format; }
int64_t tokens_n_documents(const TokenFile *file) { return file->n_documents; }

Status tokens_get(const TokenFile *file, int64_t first, int64_t n, int64_t *out) {
  if (first < 0 || n < 0 || n > file->n || first > file->n - n)
    return fail(ST_ERANGE, "%s: asked for %lld ids from %lld on, it has %lld", file->map.name,
                (long long)n, (long long)first, (long long)file->n);
  read_ids(out, file->ids + first * id_bytes(file->type), file->type, n);
  return ST_OK;
}

Status tokens_check(const TokenFile *file, int64_t vocab) {
  int64_t block[BLOCK];
  for (int64_t first = 0; first < file->n; first += BLOCK) {
    int64_t n = file->n - first < BLOCK ? file->n - first : BLOCK;
    read_ids(block, file->ids + first * id_bytes(file->type), file->type, n);
    for (int64_t i = 0; i < n; i++)
      if (block[i] < 0 || block[i] >= vocab)
        return fail(
            ST_EVALUE,
            "%s: expected ids below the vocabulary size %lld, found %lld at index %lld: it was "
            "made with another tokenizer, or is no file of this format",
            file->map.name, (long long)vocab, (long long)block[i], (long long)first + i);
  }
  return ST_OK;
}

// The first id of a sequence; of the number of sequences, the end.
static int64_t sequence_start(const TokenFile *file, int64_t sequence) {
  if (sequence == file->n_sequences) return file->n;
  return read_i64(file->pointers, sequence) / id_bytes(file->type);
}

Status tokens_document(const TokenFile *file, int64_t i, int64_t *first, int64_t *n) {
  if (i < 0 || i >= file->n_documents)
    return fail(ST_ERANGE, "%s: document %lld of %lld", file->map.name, (long long)i,
                (long long)file->n_documents);
  int64_t start = sequence_start(file, read_i64(file->documents, i));
  *n = sequence_start(file, read_i64(file->documents, i + 1)) - start;
  *first = start;
  return ST_OK;
}

// ---- writing --------------------------------------------------------------------------------

struct TokenWriter {
  FileWriter *file;
  char *path;
  int64_t vocab, n;
  size_t kind; // of llmc_kinds
};

static Status write_header(TokenWriter *writer) {
  int32_t header[LLMC_HEADER_BYTES / 4] = {llmc_kinds[writer->kind].magic,
                                           llmc_kinds[writer->kind].version, (int32_t)writer->n};
  return file_write_at(writer->file, 0, header, sizeof header);
}

Status token_writer_open(TokenWriter **out, const char *path, int64_t vocab, FileFault *fault) {
  static const char blank[LLMC_HEADER_BYTES];
  if (vocab < 1 || vocab > INT64_C(1) << 31)
    return fail(ST_EVALUE, "%s: expected a vocabulary size from 1 to 2^31, found %lld", path,
                (long long)vocab);
  TokenWriter *writer = calloc(1, sizeof *writer);
  if (writer) writer->path = strdup(path);
  if (!writer || !writer->path) {
    free(writer);
    return fail(ST_ENOMEM, "%s: no memory to write it", path);
  }
  writer->vocab = vocab;
  writer->kind = vocab > 65536;
  Status status = file_writer_open(&writer->file, path, fault);
  if (status == ST_OK) status = file_write(writer->file, blank, sizeof blank);
  if (status == ST_OK) {
    *out = writer;
  } else {
    token_writer_abort(writer);
  }
  return status;
}

Status token_writer_put(TokenWriter *writer, const int64_t *ids, int64_t n) {
  if (n > INT32_MAX - writer->n)
    return fail(ST_EVALUE,
                "%s: expected at most 2147483647 ids, the limit of the format; make "
                "several files",
                writer->path);
  for (int64_t i = 0; i < n; i++)
    if (ids[i] < 0 || ids[i] >= writer->vocab)
      return fail(ST_EVALUE,
                  "%s: expected ids below the vocabulary size %lld, found %lld at index "
                  "%lld",
                  writer->path, (long long)writer->vocab, (long long)ids[i],
                  (long long)writer->n + i);
  for (int64_t done = 0; done < n;) {
    uint16_t narrow[BLOCK];
    uint32_t wide[BLOCK];
    size_t block = n - done < BLOCK ? (size_t)(n - done) : BLOCK;
    for (size_t i = 0; i < block; i++) {
      narrow[i] = (uint16_t)ids[done + (int64_t)i];
      wide[i] = (uint32_t)ids[done + (int64_t)i];
    }
    if (llmc_kinds[writer->kind].type == ID_U16) {
      TRY(file_write(writer->file, narrow, block * sizeof *narrow));
    } else {
      TRY(file_write(writer->file, wide, block * sizeof *wide));
    }
    done += (int64_t)block;
  }
  writer->n += n;
  return ST_OK;
}

Status token_writer_commit(TokenWriter *writer) {
  Status status = ST_OK;
  if (writer->n == 0) status = fail(ST_ESTATE, "%s: no ids were written", writer->path);
  if (status == ST_OK) status = write_header(writer);
  if (status == ST_OK) {
    status = file_commit(writer->file);
    writer->file = NULL;
  }
  token_writer_abort(writer);
  return status;
}

void token_writer_abort(TokenWriter *writer) {
  if (!writer) return;
  file_abort(writer->file);
  free(writer->path);
  free(writer);
}

static Status put_bytes(TokenWriter *writer, const FileMap *text) {
  int64_t ids[BLOCK];
  for (int64_t at = 0; at < text->size; at += BLOCK) {
    int64_t n = text->size - at < BLOCK ? text->size - at : BLOCK;
    read_ids(ids, text->data + at, ID_U8, n);
    TRY(token_writer_put(writer, ids, n));
  }
  return ST_OK;
}

Status tokens_from_text(int64_t *n, const char *text_path, const char *out_path) {
  struct stat text_info, out_info;
  if (stat(text_path, &text_info) == 0 && stat(out_path, &out_info) == 0 &&
      text_info.st_dev == out_info.st_dev && text_info.st_ino == out_info.st_ino)
    return fail(ST_EVALUE, "%s: the tokens would replace the text", text_path);
  FileMap text;
  TokenWriter *writer = NULL;
  TRY(file_map(&text, text_path, "a text", 1));
  Status status = token_writer_open(&writer, out_path, 256, NULL);
  if (status == ST_OK) {
    status = put_bytes(writer, &text);
    if (status == ST_OK) {
      status = token_writer_commit(writer);
    } else {
      token_writer_abort(writer);
    }
  }
  if (status == ST_OK && n) *n = text.size;
  file_unmap(&text);
  return status;
}
