// files - a folder of its own for a test that writes, and how to look into it.
#include "tests/files.h"

#include "core/status.h"
#include "tests/tests.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int count_entries(const char *path) {
  int n = 0;
  DIR *dir = opendir(path);
  ck_assert_ptr_nonnull(dir);
  for (struct dirent *entry = readdir(dir); entry; entry = readdir(dir))
    n += entry->d_name[0] != '.';
  closedir(dir);
  return n;
}

void test_folder_make(TestFolder *folder) {
  const char *base = getenv("TMPDIR");
  snprintf(folder->path, sizeof folder->path, "%s/rille-test-XXXXXX", base ? base : "/tmp");
  ck_assert_ptr_nonnull(mkdtemp(folder->path));
  folder->n_open = count_entries("/proc/self/fd");
}

const char *test_path(const TestFolder *folder, const char *name) {
  static char paths[8][512];
  static int next;
  char *path = paths[next++ % 8];
  snprintf(path, sizeof paths[0], "%s/%s", folder->path, name);
  return path;
}

void test_file_put(const TestFolder *folder, const char *name, const void *data, size_t size) {
  FILE *file = fopen(test_path(folder, name), "wb");
  ck_assert_ptr_nonnull(file);
  ck_assert_uint_eq(fwrite(data, 1, size, file), size);
  ck_assert_int_eq(fclose(file), 0);
}

char *test_file_get(const TestFolder *folder, const char *name, size_t *size) {
  FILE *file = fopen(test_path(folder, name), "rb");
  ck_assert_ptr_nonnull(file);
  ck_assert_int_eq(fseek(file, 0, SEEK_END), 0);
  size_t n = (size_t)ftell(file);
  rewind(file);
  char *data = malloc(n + 1);
  ck_assert_ptr_nonnull(data);
  ck_assert_uint_eq(fread(data, 1, n, file), n);
  data[n] = 0;
  fclose(file);
  if (size) *size = n;
  return data;
}

int test_folder_count(const TestFolder *folder) { return count_entries(folder->path); }

void test_folder_remove(TestFolder *folder) {
  DIR *dir = opendir(folder->path);
  ck_assert_ptr_nonnull(dir);
  for (struct dirent *entry = readdir(dir); entry; entry = readdir(dir))
    if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
      ck_assert_int_eq(remove(test_path(folder, entry->d_name)), 0);
  closedir(dir);
  ck_assert_int_eq(rmdir(folder->path), 0);
  ck_assert_int_eq(count_entries("/proc/self/fd"), folder->n_open);
}

bool test_message_has(const char *part) {
  if (strstr(status_message(), part)) return true;
  fprintf(stderr, "expected \"%s\" in \"%s\"\n", part, status_message());
  return false;
}
