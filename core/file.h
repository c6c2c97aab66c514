// file - files that appear whole or not at all, and read-only mapped files.
//
// A FileWriter writes to <path>.tmp.<pid> beside the target; file_commit syncs it, renames it onto
// the target and syncs the directory. Until the rename the previous file is untouched; after any
// failure the temporary file is gone. Every message names the file, what was tried, how many bytes
// and the system's reason.
#ifndef RILLE_CORE_FILE_H
#define RILLE_CORE_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "core/status.h"

#ifdef __cplusplus
extern "C" {
#endif

// Makes system calls of a writer fail, for tests. Calls are counted in order: create, every write,
// sync, rename, sync of the directory. Without one, a writer obeys the environment variable
// RILLE_FAULT_WRITE=[part of the path:]n: its n-th call fails as on a full disk.
typedef struct FileFault {
  int64_t countdown; // the call that brings it to 0 fails; 0: none does
  int error;         // with this errno; 0: ENOSPC
  size_t max_bytes;  // a write takes at most so many bytes; 0: no limit
} FileFault;

typedef struct FileWriter FileWriter;

// Starts a file; what exists under `path` stays until file_commit. `fault` may be NULL; it is
// borrowed until the writer ends. Errors: EIO; also when `path` is there and no regular file.
Status file_writer_open(FileWriter **out, const char *path, FileFault *fault);

// Appends n_bytes bytes, buffered. Errors: EIO; then only file_abort or file_commit (which fails)
// may follow.
Status file_write(FileWriter *writer, const void *data, size_t n_bytes);

// Writes at an offset, before or beyond what file_write has appended, which goes on where it was.
// Gaps read as zeros. Errors as file_write.
Status file_write_at(FileWriter *writer, int64_t offset, const void *data, size_t n_bytes);

// Bytes appended by file_write so far.
int64_t file_position(const FileWriter *writer);

// Puts the file in place and frees the writer, also on failure. Errors: EIO; the previous file is
// intact, except when the sync of the directory failed, where the new one is in place, whole, but
// may not survive a power failure.
Status file_commit(FileWriter *writer);

// EVALUE if RILLE_FAULT_WRITE, which fails the n-th system call of a writer, has a value that means
// nothing.
Status file_environment(void);

// Drops the file and frees the writer; NULL is ignored. errno and the error record are kept.
void file_abort(FileWriter *writer);

// A whole file in memory, read-only. data may be unaligned to any type when it comes from
// file_map_memory.
typedef struct FileMap {
  const unsigned char *data;
  int64_t size; // bytes
  char *name;   // the path, for messages
  void *mapping;
} FileMap;

// Maps a file. `what` is what it should be, for messages ("a safetensors file"); a file shorter
// than min_size bytes is an EFORMAT error that says so, an empty one too if min_size > 0. A file
// that others shorten while it is mapped kills the reader (SIGBUS): replace files by renaming, as
// FileWriter does. Errors: EIO, EFORMAT.
Status file_map(FileMap *out, const char *path, const char *what, int64_t min_size);

// A FileMap over borrowed memory, with the checks of file_map.
Status file_map_memory(FileMap *out, const void *data, size_t size, const char *name,
                       const char *what, int64_t min_size);

// Releases; a zeroed FileMap is ignored.
void file_unmap(FileMap *map);

#ifdef __cplusplus
}
#endif
#endif
