// safetensors - the weight file of the Hugging Face world: reading, also sharded, and writing.
//
//   u64 N | N bytes of JSON | data          all little-endian
//   {"name": {"dtype": "F32", "shape": [2,3], "data_offsets": [begin, end]},
//    "__metadata__": {"key": "value"}}      offsets count from the byte after the JSON
//
// The reader maps the file and checks all of it before it returns: what it hands out lies inside
// the file. Every message names file and tensor, what was expected and what was found.
//
// A tied weight is stored once; its other name is metadata, "alias:<other name>" = "<name>".
#ifndef RILLE_CORE_SAFETENSORS_H
#define RILLE_CORE_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/dtype.h"
#include "core/file.h"
#include "core/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define SAFETENSORS_ALIAS "alias:"
enum { SAFETENSORS_HEADER_MAX = 100000000 }; // bytes; the cap that readers agree on

// A tensor in a file. All pointers live as long as the Safetensors.
typedef struct SafetensorsEntry {
  const char *name;
  const char *dtype_name; // as in the file
  DType dtype;            // meaningful if is_readable
  bool is_readable;       // false for a dtype that Rille has no type for (F16, F8_E4M3, ...)
  int n_dims;
  int shard;            // the file that holds it
  const int64_t *shape; // [n_dims], row-major
  int64_t n_elements;
  int64_t n_bytes;
  const unsigned char *data; // n_bytes bytes, maybe unaligned for the dtype: copy by memcpy
} SafetensorsEntry;

typedef struct SafetensorsPair {
  const char *key, *value;
} SafetensorsPair;

typedef struct Safetensors Safetensors;

// Opens a .safetensors file, or with a name in .json an index (model.safetensors.index.json) and
// its shards beside it. Errors: EIO, EFORMAT.
Status safetensors_open(Safetensors **out, const char *path);

// The same over borrowed memory that holds one .safetensors file; `name` is for messages.
Status safetensors_open_memory(Safetensors **out, const void *data, size_t size, const char *name);

// NULL is ignored.
void safetensors_close(Safetensors *file);

// The tensors, in the order of their data, shard by shard.
int64_t safetensors_count(const Safetensors *file);
const SafetensorsEntry *safetensors_at(const Safetensors *file, int64_t i);

// By name, or by the other name of a tied weight. NULL if there is none.
const SafetensorsEntry *safetensors_find(const Safetensors *file, const char *name);

// The metadata of all shards, aliases included; NULL if the key is not there.
int64_t safetensors_n_metadata(const Safetensors *file);
SafetensorsPair safetensors_metadata_at(const Safetensors *file, int64_t i);
const char *safetensors_metadata(const Safetensors *file, const char *key);

// The path of the file that holds a tensor.
const char *safetensors_path(const Safetensors *file, const SafetensorsEntry *entry);

// A tensor to be written. Borrowed during safetensors_writer_open only.
typedef struct SafetensorsSpec {
  const char *name;
  DType dtype;
  int n_dims;
  const int64_t *shape;
} SafetensorsSpec;

typedef struct SafetensorsWriter SafetensorsWriter;

// Starts a file of these tensors. Data lies by element size, large first, then by name, so that
// every tensor is aligned. `fault` as in file_writer_open. Errors: EVALUE (a name twice, or not
// UTF-8; an alias of nothing), EIO.
Status safetensors_writer_open(SafetensorsWriter **out, const char *path,
                               const SafetensorsSpec *tensors, int64_t n_tensors,
                               const SafetensorsPair *metadata, int64_t n_metadata,
                               FileFault *fault);

// Bytes [first_byte, first_byte + n_bytes) of tensors[i], in any order, each byte once. Errors:
// ERANGE beyond the tensor, EIO.
Status safetensors_write(SafetensorsWriter *writer, int64_t i, int64_t first_byte, const void *data,
                         size_t n_bytes);

// Puts the file in place as file_commit does, and frees the writer, also on failure. Errors:
// ESTATE naming a tensor of which bytes are missing, EIO.
Status safetensors_commit(SafetensorsWriter *writer);

// Drops the file and frees the writer; NULL is ignored.
void safetensors_abort(SafetensorsWriter *writer);

#ifdef __cplusplus
}
#endif
#endif
