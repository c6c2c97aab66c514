// Tests of core/file: files appear whole or not at all.
#include "core/file.h"

#include "tests/files.h"
#include "tests/tests.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

static TestFolder folder;

static void setup(void) { test_folder_make(&folder); }
static void teardown(void) { test_folder_remove(&folder); }

// Small and large pieces, 300 kB: several flushes, one direct write, one patch in the middle.
static Status write_sample(const char *path, FileFault *fault) {
  FileWriter *writer = NULL;
  Status status = ST_OK;
  char *large = malloc(200000);
  memset(large, 'L', 200000);
  status = file_writer_open(&writer, path, fault);
  for (int i = 0; status == ST_OK && i < 10000; i++) status = file_write(writer, "0123456789", 10);
  if (status == ST_OK) status = file_write(writer, large, 200000);
  if (status == ST_OK) status = file_write_at(writer, 4, "PATCH", 5);
  if (status == ST_OK) status = file_write(writer, "end", 3);
  if (status == ST_OK) ck_assert_int_eq(file_position(writer), 300003);
  if (status == ST_OK) {
    status = file_commit(writer);
  } else {
    file_abort(writer);
  }
  free(large);
  return status;
}

static void check_sample(const char *name) {
  size_t size;
  char *data = test_file_get(&folder, name, &size);
  ck_assert_uint_eq(size, 300003);
  for (size_t i = 0; i < size; i++) {
    char expected = i < 100000 ? (char)('0' + i % 10) : i < 300000 ? 'L' : "end"[i - 300000];
    if (i >= 4 && i < 9) expected = "PATCH"[i - 4];
    ck_assert_int_eq(data[i], expected);
  }
  free(data);
}

START_TEST(writer_writes_what_it_was_given) {
  ck_assert_int_eq(write_sample(test_path(&folder, "a"), NULL), ST_OK);
  check_sample("a");
  ck_assert_int_eq(write_sample(test_path(&folder, "a"), NULL), ST_OK); // over an existing one
  check_sample("a");
  ck_assert_int_eq(test_folder_count(&folder), 1);
  struct stat info;
  mode_t mask = umask(0);
  umask(mask);
  ck_assert_int_eq(stat(test_path(&folder, "a"), &info), 0);
  ck_assert_int_eq(info.st_mode & 0777, 0666 & ~mask);
}
END_TEST

START_TEST(short_writes_and_eintr_are_retried) {
  FileFault fault = {.max_bytes = 777};
  ck_assert_int_eq(write_sample(test_path(&folder, "a"), &fault), ST_OK);
  check_sample("a");
  int n_calls = 0;
  for (int n = 2;; n++) {
    fault = (FileFault){.countdown = n, .error = EINTR};
    Status status = write_sample(test_path(&folder, "a"), &fault);
    if (fault.countdown > 0) break;
    n_calls++;
    // A rename is not interruptible: the system reports no EINTR for it.
    if (status != ST_OK) ck_assert(test_message_has("rename"));
    if (status == ST_OK) check_sample("a");
  }
  ck_assert_int_ge(n_calls, 6);
}
END_TEST

// The n-th call fails, for every n: the old file stays, bit for bit, and nothing is left behind.
START_TEST(nth_failure_keeps_the_previous_file) {
  int n_failures = 0;
  for (int n = 1;; n++) {
    test_file_put(&folder, "a", "previous", 8);
    FileFault fault = {.countdown = n};
    Status status = write_sample(test_path(&folder, "a"), &fault);
    ck_assert_int_eq(test_folder_count(&folder), 1);
    if (fault.countdown > 0) { // no call was left to fail
      ck_assert_int_eq(status, ST_OK);
      check_sample("a");
      break;
    }
    n_failures++;
    ck_assert_int_eq(status, ST_EIO);
    ck_assert(test_message_has(strerror(ENOSPC)));
    if (strstr(status_message(), "folder cannot be synced")) { // the last call, after the rename
      check_sample("a");
      continue;
    }
    ck_assert(test_message_has(test_path(&folder, "a")));
    ck_assert_ptr_nonnull(strstr(status_hint(), "unchanged"));
    char *data = test_file_get(&folder, "a", NULL);
    ck_assert_str_eq(data, "previous");
    free(data);
  }
  // create, 2 flushes, the large write, the patch, the last flush, sync, rename, folder
  ck_assert_int_eq(n_failures, 9);
}
END_TEST

START_TEST(a_failed_writer_stays_failed) {
  FileFault fault = {.countdown = 2, .error = EIO};
  FileWriter *writer;
  char data[100000] = {0};
  ck_assert_int_eq(file_writer_open(&writer, test_path(&folder, "a"), &fault), ST_OK);
  ck_assert_int_eq(file_write(writer, data, sizeof data), ST_EIO);
  ck_assert(test_message_has("cannot write 100000 bytes at offset 0"));
  ck_assert_int_eq(file_write(writer, data, sizeof data), ST_EIO);
  ck_assert_int_eq(file_commit(writer), ST_EIO);
  ck_assert(test_message_has("earlier write"));
  ck_assert_int_eq(test_folder_count(&folder), 0);
}
END_TEST

START_TEST(fault_from_the_environment) {
  setenv("RILLE_FAULT_WRITE", "3", 1);
  ck_assert_int_eq(write_sample(test_path(&folder, "a"), NULL), ST_EIO);
  setenv("RILLE_FAULT_WRITE", "weights:3", 1);
  ck_assert_int_eq(write_sample(test_path(&folder, "a"), NULL), ST_OK);
  ck_assert_int_eq(write_sample(test_path(&folder, "weights"), NULL), ST_EIO);
  unsetenv("RILLE_FAULT_WRITE");
  ck_assert_int_eq(test_folder_count(&folder), 1);
}
END_TEST

START_TEST(abort_leaves_nothing) {
  FileWriter *writer;
  ck_assert_int_eq(file_writer_open(&writer, test_path(&folder, "a"), NULL), ST_OK);
  ck_assert_int_eq(file_write(writer, "x", 1), ST_OK);
  file_abort(writer);
  file_abort(NULL);
  ck_assert_int_eq(test_folder_count(&folder), 0);
}
END_TEST

// A limit of the system itself, in the middle of a write.
START_TEST(a_system_limit_is_an_error) {
  struct rlimit old, small;
  ck_assert_int_eq(getrlimit(RLIMIT_FSIZE, &old), 0);
  small = old;
  small.rlim_cur = 150000;
  test_file_put(&folder, "a", "previous", 8);
  void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
  ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &small), 0);
  Status status = write_sample(test_path(&folder, "a"), NULL);
  ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &old), 0);
  signal(SIGXFSZ, handler);
  ck_assert_int_eq(status, ST_EIO);
  ck_assert(test_message_has("bytes at offset 150000: File too large"));
  ck_assert_int_eq(test_folder_count(&folder), 1);
  char *data = test_file_get(&folder, "a", NULL);
  ck_assert_str_eq(data, "previous");
  free(data);
}
END_TEST

START_TEST(unwritable_targets_are_refused_at_once) {
  FileWriter *writer;
  ck_assert_int_eq(file_writer_open(&writer, "/dev/full", NULL), ST_EIO);
  ck_assert(test_message_has("/dev/full: cannot write: it is no regular file"));
  ck_assert_int_eq(file_writer_open(&writer, folder.path, NULL), ST_EIO);
  ck_assert(test_message_has("it is a directory"));
  ck_assert_int_eq(file_writer_open(&writer, test_path(&folder, "no/such/folder"), NULL), ST_EIO);
  ck_assert(test_message_has("no/such/folder: cannot create: No such file"));
  ck_assert_ptr_nonnull(strstr(status_hint(), "folder exists"));
}
END_TEST

START_TEST(offsets_are_64_bit) {
  FileWriter *writer;
  FileMap map;
  const int64_t far = (INT64_C(5) << 30) + 3;
  ck_assert_int_eq(file_writer_open(&writer, test_path(&folder, "sparse"), NULL), ST_OK);
  ck_assert_int_eq(file_write(writer, "begin", 5), ST_OK);
  ck_assert_int_eq(file_write_at(writer, far, "far", 3), ST_OK);
  ck_assert_int_eq(file_write(writer, "next", 4), ST_OK);
  ck_assert_int_eq(file_commit(writer), ST_OK);
  ck_assert_int_eq(file_map(&map, test_path(&folder, "sparse"), "a test", 0), ST_OK);
  ck_assert_int_eq(map.size, far + 3);
  ck_assert_int_eq(memcmp(map.data, "beginnext\0", 10), 0);
  ck_assert_int_eq(memcmp(map.data + far, "far", 3), 0);
  file_unmap(&map);
}
END_TEST

START_TEST(map_reports_what_it_found) {
  FileMap map = {0};
  test_file_put(&folder, "empty", "", 0);
  test_file_put(&folder, "short", "12345", 5);
  ck_assert_int_eq(file_map(&map, test_path(&folder, "none"), "a token file", 8), ST_EIO);
  ck_assert(test_message_has("none: cannot open: No such file"));
  ck_assert_int_eq(file_map(&map, test_path(&folder, "empty"), "a token file", 8), ST_EFORMAT);
  ck_assert(test_message_has("empty: expected a token file, found an empty file"));
  ck_assert_int_eq(file_map(&map, test_path(&folder, "short"), "a token file", 8), ST_EFORMAT);
  ck_assert(test_message_has("expected a token file of at least 8 bytes, found 5 bytes"));
  ck_assert_int_eq(file_map(&map, folder.path, "a token file", 8), ST_EIO);
  ck_assert(test_message_has("expected a token file, found a directory"));
  ck_assert_int_eq(file_map(&map, "/dev/null", "a token file", 8), ST_EIO);
  ck_assert_ptr_null(map.data); // outputs untouched
  ck_assert_int_eq(file_map(&map, test_path(&folder, "empty"), "a text", 0), ST_OK);
  ck_assert_int_eq(map.size, 0);
  file_unmap(&map);
  ck_assert_int_eq(file_map(&map, test_path(&folder, "short"), "a text", 5), ST_OK);
  ck_assert_int_eq(memcmp(map.data, "12345", 5), 0);
  file_unmap(&map);
  file_unmap(&map);
  ck_assert_int_eq(file_map_memory(&map, "ab", 2, "memory", "a text", 3), ST_EFORMAT);
  ck_assert_int_eq(file_map_memory(&map, "ab", 2, "memory", "a text", 2), ST_OK);
  ck_assert_str_eq(map.name, "memory");
  file_unmap(&map);
}
END_TEST

Suite *file_suite(void);
Suite *file_suite(void) {
  Suite *suite = suite_create("file");
  TCase *tests = tcase_create("file");
  tcase_add_checked_fixture(tests, setup, teardown);
  tcase_add_test(tests, writer_writes_what_it_was_given);
  tcase_add_test(tests, short_writes_and_eintr_are_retried);
  tcase_add_test(tests, nth_failure_keeps_the_previous_file);
  tcase_add_test(tests, a_failed_writer_stays_failed);
  tcase_add_test(tests, fault_from_the_environment);
  tcase_add_test(tests, abort_leaves_nothing);
  tcase_add_test(tests, a_system_limit_is_an_error);
  tcase_add_test(tests, unwritable_targets_are_refused_at_once);
  tcase_add_test(tests, offsets_are_64_bit);
  tcase_add_test(tests, map_reports_what_it_found);
  suite_add_tcase(suite, tests);
  return suite;
}
