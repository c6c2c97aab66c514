// file - files that appear whole or not at all, and read-only mapped files.
//
// Invariants
//  1  The target changes by one rename, after the temporary file's bytes were synced.
//  2  A writer that fails or is dropped removes its temporary file.
//  3  All writing is pwrite at explicit offsets: `start` is where the buffer belongs.
#include "core/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
  BUFFER_BYTES = 1 << 16,
  CALL_BYTES = 1 << 30 // some systems refuse a write above 2 GiB
};

struct FileWriter {
  char *path, *temporary;
  int fd;
  bool failed;
  int64_t start;   // offset of the buffer's first byte
  size_t buffered; // bytes in the buffer
  FileFault *fault, own_fault;
  unsigned char buffer[BUFFER_BYTES];
};

static Status fail_io(const char *path, const char *what) {
  int error = errno;
  Status status = fail(ST_EIO, "%s: %s: %s", path, what, strerror(error));
  if (error == ENOSPC || error == EDQUOT)
    fail_hint(status, "free some space there; the file that was there before is unchanged");
  if (error == ENOENT) fail_hint(status, "check the name, and that its folder exists");
  return status;
}

// True if this call is to fail; errno is set.
static bool strikes(FileFault *fault) {
  if (fault->countdown <= 0 || --fault->countdown > 0) return false;
  errno = fault->error ? fault->error : ENOSPC;
  return true;
}

// RILLE_FAULT_WRITE=[part of the path:]n.
static FileFault fault_from_environment(const char *path) {
  FileFault fault = {0};
  const char *value = getenv("RILLE_FAULT_WRITE");
  if (!value) return fault;
  const char *colon = strrchr(value, ':');
  if (colon) {
    char part[256];
    snprintf(part, sizeof part, "%.*s", (int)(colon - value), value);
    if (!strstr(path, part)) return fault;
    value = colon + 1;
  }
  fault.countdown = strtoll(value, NULL, 10);
  return fault;
}

Status file_environment(void) {
  const char *value = getenv("RILLE_FAULT_WRITE");
  if (!value) return ST_OK;
  const char *colon = strrchr(value, ':'), *number = colon ? colon + 1 : value;
  char *end;
  if (strtoll(number, &end, 10) >= 1 && !*end) return ST_OK;
  return fail(ST_EVALUE, "RILLE_FAULT_WRITE=%.200s: [part of a path:]n is wanted, n from 1 on",
              value);
}

static int open_retry(const char *path, int flags, mode_t mode) {
  int fd;
  do fd = open(path, flags | O_CLOEXEC, mode);
  while (fd < 0 && errno == EINTR);
  return fd;
}

static void writer_free(FileWriter *writer) {
  if (writer->fd >= 0) close(writer->fd);
  free(writer->path);
  free(writer->temporary);
  free(writer);
}

Status file_writer_open(FileWriter **out, const char *path, FileFault *fault) {
  struct stat there;
  if (stat(path, &there) == 0 && !S_ISREG(there.st_mode))
    return fail(ST_EIO, "%s: cannot write: it is %s", path,
                S_ISDIR(there.st_mode) ? "a directory" : "no regular file");
  FileWriter *writer = malloc(sizeof *writer);
  if (!writer) return fail(ST_ENOMEM, "%s: no memory for a file writer", path);
  memset(writer, 0, offsetof(FileWriter, buffer));
  writer->fd = -1;
  writer->own_fault = fault_from_environment(path);
  writer->fault = fault ? fault : &writer->own_fault;
  writer->path = strdup(path);
  if (!writer->path || asprintf(&writer->temporary, "%s.tmp.%ld", path, (long)getpid()) < 0) {
    writer->temporary = NULL;
    writer_free(writer);
    return fail(ST_ENOMEM, "%s: no memory for a file writer", path);
  }
  if (!strikes(writer->fault))
    writer->fd = open_retry(writer->temporary, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW, 0666);
  if (writer->fd < 0) {
    Status status = fail_io(path, "cannot create");
    writer_free(writer);
    return status;
  }
  *out = writer;
  return ST_OK;
}

static ssize_t write_some(FileWriter *writer, const void *data, size_t n, int64_t offset) {
  if (strikes(writer->fault)) return -1;
  size_t most = writer->fault->max_bytes ? writer->fault->max_bytes : CALL_BYTES;
  return pwrite(writer->fd, data, n < most ? n : most, offset);
}

static Status write_all(FileWriter *writer, const unsigned char *data, size_t n, int64_t offset) {
  if (writer->failed) return fail(ST_EIO, "%s: an earlier write failed", writer->path);
  for (size_t done = 0; done < n;) {
    ssize_t wrote = write_some(writer, data + done, n - done, offset + (int64_t)done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote == 0) errno = ENOSPC;
    if (wrote <= 0) {
      char what[96];
      snprintf(what, sizeof what, "cannot write %zu bytes at offset %lld", n - done,
               (long long)offset + (long long)done);
      writer->failed = true;
      return fail_io(writer->path, what);
    }
    done += (size_t)wrote;
  }
  return ST_OK;
}

static Status flush(FileWriter *writer) {
  TRY(write_all(writer, writer->buffer, writer->buffered, writer->start));
  writer->start += (int64_t)writer->buffered;
  writer->buffered = 0;
  return ST_OK;
}

Status file_write(FileWriter *writer, const void *data, size_t n_bytes) {
  if (writer->buffered + n_bytes > BUFFER_BYTES) TRY(flush(writer));
  if (n_bytes >= BUFFER_BYTES) {
    TRY(write_all(writer, data, n_bytes, writer->start));
    writer->start += (int64_t)n_bytes;
  } else if (n_bytes > 0) {
    memcpy(writer->buffer + writer->buffered, data, n_bytes);
    writer->buffered += n_bytes;
  }
  return ST_OK;
}

Status file_write_at(FileWriter *writer, int64_t offset, const void *data, size_t n_bytes) {
  TRY(flush(writer));
  return write_all(writer, data, n_bytes, offset);
}

int64_t file_position(const FileWriter *writer) {
  return writer->start + (int64_t)writer->buffered;
}

static int sync_retry(FileWriter *writer, int fd) {
  int result;
  do result = strikes(writer->fault) ? -1 : fsync(fd);
  while (result < 0 && errno == EINTR);
  return result;
}

// Some file systems cannot sync a directory and say EINVAL: their renames are as safe as can be.
static Status sync_directory(FileWriter *writer) {
  char *slash = strrchr(writer->path, '/'), first = slash ? slash[slash == writer->path] : 0;
  if (slash) slash[slash == writer->path] = 0;
  int fd = open_retry(slash ? writer->path : ".", O_RDONLY | O_DIRECTORY, 0);
  if (slash) slash[slash == writer->path] = first;
  int result = fd < 0 ? -1 : sync_retry(writer, fd);
  Status status = ST_OK;
  if (result < 0 && errno != EINVAL)
    status = fail(ST_EIO, "%s: the file is in place, but its folder cannot be synced: %s",
                  writer->path, strerror(errno));
  if (fd >= 0) close(fd);
  return status;
}

Status file_commit(FileWriter *writer) {
  Status status = ST_OK;
  int fd;
  TRY_TO(drop, flush(writer));
  if (sync_retry(writer, writer->fd) < 0) {
    status = fail_io(writer->path, "cannot sync");
    goto drop;
  }
  fd = writer->fd;
  writer->fd = -1;
  if (close(fd) < 0 && errno != EINTR) {
    status = fail_io(writer->path, "cannot close");
    goto drop;
  }
  if (strikes(writer->fault) || rename(writer->temporary, writer->path) < 0) {
    status = fail_io(writer->path, "cannot rename the finished file into place");
    goto drop;
  }
  status = sync_directory(writer);
  writer_free(writer);
  return status;
drop:
  file_abort(writer);
  return status;
}

void file_abort(FileWriter *writer) {
  if (!writer) return;
  int error = errno;
  unlink(writer->temporary);
  writer_free(writer);
  errno = error;
}

static Status check_size(const char *name, const char *what, int64_t size, int64_t min_size) {
  if (size >= min_size) return ST_OK;
  if (size == 0) return fail(ST_EFORMAT, "%s: expected %s, found an empty file", name, what);
  return fail(ST_EFORMAT, "%s: expected %s of at least %lld bytes, found %lld bytes", name, what,
              (long long)min_size, (long long)size);
}

static Status map_fd(FileMap *map, int fd, const char *path, const char *what, int64_t min_size) {
  struct stat info;
  if (fstat(fd, &info) < 0) return fail_io(path, "cannot read its size");
  if (S_ISDIR(info.st_mode)) return fail(ST_EIO, "%s: expected %s, found a directory", path, what);
  if (!S_ISREG(info.st_mode))
    return fail(ST_EIO, "%s: expected %s, found no regular file", path, what);
  map->size = info.st_size;
  TRY(check_size(path, what, map->size, min_size));
  if (map->size == 0) return ST_OK;
  void *mapping = mmap(NULL, (size_t)map->size, PROT_READ, MAP_PRIVATE, fd, 0);
  if (mapping == MAP_FAILED) return fail_io(path, "cannot map into memory");
  map->data = map->mapping = mapping;
  return ST_OK;
}

Status file_map(FileMap *out, const char *path, const char *what, int64_t min_size) {
  FileMap map = {0};
  int fd = open_retry(path, O_RDONLY, 0);
  if (fd < 0) return fail_io(path, "cannot open");
  Status status = map_fd(&map, fd, path, what, min_size);
  close(fd);
  if (status != ST_OK) return status;
  map.name = strdup(path);
  if (!map.name) {
    file_unmap(&map);
    return fail(ST_ENOMEM, "%s: no memory to map it", path);
  }
  *out = map;
  return ST_OK;
}

Status file_map_memory(FileMap *out, const void *data, size_t size, const char *name,
                       const char *what, int64_t min_size) {
  TRY(check_size(name, what, (int64_t)size, min_size));
  FileMap map = {.data = data, .size = (int64_t)size, .name = strdup(name)};
  if (!map.name) return fail(ST_ENOMEM, "%s: no memory to read it", name);
  *out = map;
  return ST_OK;
}

void file_unmap(FileMap *map) {
  if (map->mapping) munmap(map->mapping, (size_t)map->size);
  free(map->name);
  *map = (FileMap){0};
}
