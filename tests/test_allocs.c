// The n-th allocation fails, for every n, in everything that reads and writes files: a clean error,
// no leak (with a leak sanitizer), nothing left behind, the previous file intact.
#include "tests/allocs.h"

#include "core/json.h"
#include "core/safetensors.h"
#include "core/tokens.h"
#include "tests/files.h"
#include "tests/tests.h"

#include <stdio.h>
#include <string.h>

static TestFolder folder;

static void setup(void) { test_folder_make(&folder); }
static void teardown(void) { test_folder_remove(&folder); }

// Runs `action` with the n-th allocation failing, n = 1 .. until all of them have; at least
// `expected` times. n_files is what must lie in the folder after each failure.
static void fail_each(Status (*action)(void), int expected, int n_files) {
  for (int n = 1;; n++) {
    test_alloc_fail_at(n);
    Status status = action();
    bool has_failed = test_alloc_has_failed();
    test_alloc_fail_at(0);
    if (!has_failed) {
      ck_assert_int_eq(status, ST_OK);
      ck_assert_int_gt(n, expected);
      return;
    }
    ck_assert_int_eq(status, ST_ENOMEM);
    ck_assert(test_message_has("no memory"));
    ck_assert_int_eq(test_folder_count(&folder), n_files);
  }
}

static Status parse_json(void) {
  JsonTree *tree;
  char text[20000] = "{\"a\":1";
  size_t n = strlen(text);
  for (int i = 0; i < 400; i++)
    n += (size_t)snprintf(text + n, sizeof text - n, ",\"key %d\":[%d,\"text\"]", i, i);
  text[n++] = '}';
  TRY(json_parse(&tree, text, n));
  json_free(tree);
  return ST_OK;
}

static Status write_json(void) {
  JsonWriter writer = {0};
  const char *text;
  json_begin_array(&writer);
  for (int i = 0; i < 1000; i++) json_int(&writer, i);
  json_end_array(&writer);
  Status status = json_finish(&writer, &text, NULL);
  json_writer_free(&writer);
  return status;
}

START_TEST(json) {
  fail_each(parse_json, 5, 0);
  fail_each(write_json, 5, 0);
}
END_TEST

static Status open_weights(const char *path) {
  Safetensors *file;
  TRY(safetensors_open(&file, path));
  safetensors_close(file);
  return ST_OK;
}

static Status open_single(void) { return open_weights("tests/golden/safetensors.safetensors"); }
static Status open_shards(void) {
  return open_weights("tests/golden/golden.safetensors.index.json");
}

static Status write_weights(void) {
  const int64_t shape[] = {3};
  const SafetensorsSpec specs[] = {{"a", DT_U8, 1, shape}, {"b", DT_U8, 1, shape}};
  const SafetensorsPair pair = {"alias:c", "a"};
  SafetensorsWriter *writer;
  TRY(safetensors_writer_open(&writer, test_path(&folder, "w"), specs, 2, &pair, 1, NULL));
  Status status = safetensors_write(writer, 0, 0, "abc", 3);
  if (status == ST_OK) status = safetensors_write(writer, 1, 0, "abc", 3);
  if (status == ST_OK) return safetensors_commit(writer);
  safetensors_abort(writer);
  return status;
}

START_TEST(safetensors) {
  fail_each(open_single, 8, 0);
  fail_each(open_shards, 15, 0);
  ck_assert_int_eq(write_weights(), ST_OK);
  fail_each(write_weights, 8, 1);
  ck_assert_int_eq(open_weights(test_path(&folder, "w")), ST_OK);
}
END_TEST

static Status open_tokens(const char *name) {
  TokenFile *file;
  TRY(tokens_open(&file, test_path(&folder, name), TOKENS_AUTO));
  tokens_close(file);
  return ST_OK;
}

static Status open_llmc(void) { return open_tokens("t.bin"); }
static Status open_megatron(void) { return open_tokens("m.idx"); }
static Status make_tokens(void) {
  return tokens_from_text(NULL, test_path(&folder, "text"), test_path(&folder, "t.bin"));
}

START_TEST(tokens) {
  // One sequence and document of 4 bytes.
  static const char index[] =
      "MMIDIDX\0\0\1\0\0\0\0\0\0\0\1\1\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0\4\0\0\0\0\0"
      "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\1\0\0\0\0\0\0";
  test_file_put(&folder, "text", "text", 4);
  test_file_put(&folder, "m.idx", index, sizeof index);
  test_file_put(&folder, "m.bin", "text", 4);
  ck_assert_int_eq(make_tokens(), ST_OK);
  fail_each(make_tokens, 5, 4);
  fail_each(open_llmc, 1, 4);
  fail_each(open_megatron, 3, 4);
}
END_TEST

Suite *allocs_suite(void);
Suite *allocs_suite(void) {
  Suite *suite = suite_create("allocs");
  TCase *tests = tcase_create("allocs");
  tcase_add_checked_fixture(tests, setup, teardown);
  tcase_add_test(tests, json);
  tcase_add_test(tests, safetensors);
  tcase_add_test(tests, tokens);
  suite_add_tcase(suite, tests);
  return suite;
}
