// Tests of core/tokens and core/order.
#include "core/tokens.h"

#include "core/order.h"
#include "tests/files.h"
#include "tests/tests.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static TestFolder folder;

static void setup(void) { test_folder_make(&folder); }
static void teardown(void) { test_folder_remove(&folder); }

static Status write_tokens(const char *path, int64_t vocab, int64_t n, FileFault *fault) {
  TokenWriter *writer = NULL;
  TRY(token_writer_open(&writer, path, vocab, fault));
  Status status = ST_OK;
  for (int64_t i = 0; i < n && status == ST_OK;) {
    int64_t ids[5000], step = n - i < 5000 ? n - i : 5000;
    for (int64_t k = 0; k < step; k++) ids[k] = (i + k) * 7919 % vocab;
    status = token_writer_put(writer, ids, step);
    i += step;
  }
  if (status == ST_OK) return token_writer_commit(writer);
  token_writer_abort(writer);
  return status;
}

static void check_tokens(const char *path, int64_t vocab, int64_t n) {
  TokenFile *file;
  ck_assert_int_eq(tokens_open(&file, path, TOKENS_AUTO), ST_OK);
  ck_assert_int_eq(tokens_format(file), TOKENS_LLMC);
  ck_assert_int_eq(tokens_count(file), n);
  ck_assert_int_eq(tokens_check(file, vocab), ST_OK);
  for (int64_t i = 0; i < n; i += 1 + n / 100) {
    int64_t ids[3] = {-1, -1, -1}, want = n - i < 3 ? n - i : 3;
    ck_assert_int_eq(tokens_get(file, i, want, ids), ST_OK);
    for (int64_t k = 0; k < 3; k++)
      ck_assert_int_eq(ids[k], k < want ? (i + k) * 7919 % vocab : -1);
  }
  tokens_close(file);
}

START_TEST(what_is_written_is_read) {
  static const int64_t vocabs[] = {1, 256, 50257, 65536, 65537, 151936, INT64_C(1) << 31};
  static const int64_t counts[] = {1, 4096, 100000};
  for (int v = 0; v < 7; v++) {
    for (int c = 0; c < 3; c++) {
      const char *path = test_path(&folder, "t.bin");
      ck_assert_int_eq(write_tokens(path, vocabs[v], counts[c], NULL), ST_OK);
      check_tokens(path, vocabs[v], counts[c]);
      // The layout, byte for byte as llm.c defines it.
      size_t size;
      char *data = test_file_get(&folder, "t.bin", &size);
      int32_t header[256];
      memcpy(header, data, sizeof header);
      bool is_narrow = vocabs[v] <= 65536;
      ck_assert_int_eq(header[0], is_narrow ? 20240520 : 20240801);
      ck_assert_int_eq(header[1], is_narrow ? 1 : 7);
      ck_assert_int_eq(header[2], counts[c]);
      for (int i = 3; i < 256; i++) ck_assert_int_eq(header[i], 0);
      ck_assert_uint_eq(size, 1024 + (size_t)counts[c] * (is_narrow ? 2 : 4));
      free(data);
    }
  }
}
END_TEST

START_TEST(ids_are_checked_against_the_vocabulary) {
  TokenFile *file;
  TokenWriter *writer;
  const char *path = test_path(&folder, "t.bin");
  ck_assert_int_eq(write_tokens(path, 50257, 20000, NULL), ST_OK);
  ck_assert_int_eq(tokens_open(&file, path, TOKENS_AUTO), ST_OK);
  ck_assert_int_eq(tokens_check(file, 50000), ST_EVALUE);
  int64_t first = 0; // the first id of 50000 and more, by search
  while (first * 7919 % 50257 < 50000) first++;
  char words[128];
  snprintf(words, sizeof words, "size 50000, found %d at index %d", (int)(first * 7919 % 50257),
           (int)first);
  ck_assert(test_message_has(words));
  ck_assert(test_message_has(path));
  int64_t ids[8];
  ck_assert_int_eq(tokens_get(file, 0, 0, ids), ST_OK);
  ck_assert_int_eq(tokens_get(file, 20000, 0, ids), ST_OK);
  ck_assert_int_eq(tokens_get(file, 19999, 2, ids), ST_ERANGE);
  ck_assert(test_message_has("asked for 2 ids from 19999 on, it has 20000"));
  ck_assert_int_eq(tokens_get(file, -1, 1, ids), ST_ERANGE);
  ck_assert_int_eq(tokens_get(file, INT64_MAX, 1, ids), ST_ERANGE);
  ck_assert_int_eq(tokens_get(file, 1, INT64_MAX, ids), ST_ERANGE);
  ck_assert_int_eq(tokens_get(file, 1, -1, ids), ST_ERANGE);
  ck_assert_int_eq(tokens_n_documents(file), 0);
  ck_assert_int_eq(tokens_document(file, 0, ids, ids + 1), ST_ERANGE);
  tokens_close(file);

  path = test_path(&folder, "w.bin");
  ck_assert_int_eq(token_writer_open(&writer, path, 0, NULL), ST_EVALUE);
  ck_assert_int_eq(token_writer_open(&writer, path, (INT64_C(1) << 31) + 1, NULL), ST_EVALUE);
  ck_assert_int_eq(token_writer_open(&writer, path, 256, NULL), ST_OK);
  ids[0] = 1, ids[1] = 256, ids[2] = -1;
  ck_assert_int_eq(token_writer_put(writer, ids, 1), ST_OK);
  ck_assert_int_eq(token_writer_put(writer, ids, 2), ST_EVALUE);
  ck_assert(test_message_has("below the vocabulary size 256, found 256 at index 2"));
  ck_assert_int_eq(token_writer_put(writer, ids + 2, 1), ST_EVALUE);
  ck_assert(test_message_has("found -1 at index 1"));
  ck_assert_int_eq(token_writer_commit(writer), ST_OK); // what was refused was not appended
  ck_assert_int_eq(tokens_open(&file, path, TOKENS_AUTO), ST_OK);
  ck_assert_int_eq(tokens_count(file), 1);
  tokens_close(file);
  ck_assert_int_eq(token_writer_open(&writer, path, 256, NULL), ST_OK);
  ck_assert_int_eq(token_writer_commit(writer), ST_ESTATE);
  ck_assert_int_eq(test_folder_count(&folder), 2);
}
END_TEST

START_TEST(nth_write_failure_keeps_the_previous_file) {
  const char *path = test_path(&folder, "t.bin");
  ck_assert_int_eq(write_tokens(path, 256, 1000, NULL), ST_OK);
  int n_failures = 0;
  for (bool is_done = false; !is_done; n_failures++) {
    FileFault fault = {.countdown = n_failures + 1};
    Status status = write_tokens(path, 50257, 100000, &fault);
    is_done = fault.countdown > 0;
    ck_assert_int_eq(status, is_done ? ST_OK : ST_EIO);
    ck_assert_int_eq(test_folder_count(&folder), 1);
    bool is_new = is_done || strstr(status_message(), "folder cannot be synced");
    check_tokens(path, is_new ? 50257 : 256, is_new ? 100000 : 1000);
    if (!is_done && is_new) ck_assert_int_eq(write_tokens(path, 256, 1000, NULL), ST_OK);
  }
  ck_assert_int_gt(n_failures, 7);
}
END_TEST

START_TEST(foreign_and_cut_files_are_named) {
  TokenFile *file = NULL;
  size_t size;
  ck_assert_int_eq(tokens_open(&file, test_path(&folder, "none.bin"), TOKENS_AUTO), ST_EIO);
  ck_assert(test_message_has("none.bin: cannot open"));
  ck_assert_int_eq(write_tokens(test_path(&folder, "t.bin"), 256, 500, NULL), ST_OK);
  char *data = test_file_get(&folder, "t.bin", &size);
  for (size_t n = 0; n < size; n++) {
    char *copy = malloc(n + 1);
    memcpy(copy, data, n);
    ck_assert_int_eq(tokens_open_memory(&file, TOKENS_LLMC, copy, n, NULL, 0, "cut"), ST_EFORMAT);
    ck_assert_int_eq(tokens_open_memory(&file, TOKENS_AUTO, copy, n, NULL, 0, "cut"), ST_EFORMAT);
    free(copy);
  }
  ck_assert(test_message_has("cut: expected 2024 bytes for the 500 ids that its header announces, "
                             "found 2023: it is cut short"));
  struct {
    int word;
    int32_t value;
    TokenFormat format;
    const char *message;
  } cases[] = {
      {2, 499, TOKENS_AUTO, "expected 2022 bytes for the 499 ids"},
      {2, -1, TOKENS_AUTO, "its header and size disagree"},
      {1, 2, TOKENS_AUTO, "expected version 1 of llm.c's token format 20240520, found version 2"},
      {0, 20240801, TOKENS_AUTO, "expected version 7 of llm.c's token format 20240801"},
      {0, 0x08d73401, TOKENS_AUTO,
       "expected a token file (llm.c's, or a Megatron .idx), found 2024"},
      {0, 5, TOKENS_LLMC, "expected llm.c's token header (20240520 or 20240801), found 5"},
      {0, (int32_t)__builtin_bswap32(20240520), TOKENS_AUTO, "found big-endian ones"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char *copy = malloc(size + 1);
    memcpy(copy, data, size);
    memcpy(copy + 4 * cases[i].word, &cases[i].value, 4);
    ck_assert_int_eq(tokens_open_memory(&file, cases[i].format, copy, size, NULL, 0, "made"),
                     ST_EFORMAT);
    ck_assert(test_message_has("made: "));
    ck_assert(test_message_has(cases[i].message));
    free(copy);
  }
  free(data);
  test_file_put(&folder, "text.txt", "In the beginning", 16);
  ck_assert_int_eq(tokens_open(&file, test_path(&folder, "text.txt"), TOKENS_AUTO), ST_EFORMAT);
  ck_assert(test_message_has("text.txt: expected a token file"));
  ck_assert_ptr_nonnull(strstr(status_hint(), "a text must be made into tokens first"));
  ck_assert_ptr_null(file);
}
END_TEST

START_TEST(nanogpt_only_when_asked_for) {
  TokenFile *file;
  const uint16_t ids[] = {0, 50256, 65535};
  test_file_put(&folder, "n.bin", ids, sizeof ids);
  ck_assert_int_eq(tokens_open(&file, test_path(&folder, "n.bin"), TOKENS_AUTO), ST_EFORMAT);
  ck_assert_ptr_nonnull(strstr(status_hint(), "say format \"nanogpt\""));
  ck_assert_int_eq(tokens_open(&file, test_path(&folder, "n.bin"), TOKENS_NANOGPT), ST_OK);
  ck_assert_int_eq(tokens_count(file), 3);
  int64_t out[3];
  ck_assert_int_eq(tokens_get(file, 0, 3, out), ST_OK);
  ck_assert(out[0] == 0 && out[1] == 50256 && out[2] == 65535);
  ck_assert_int_eq(tokens_check(file, 65535), ST_EVALUE);
  tokens_close(file);
  ck_assert_int_eq(tokens_open_memory(&file, TOKENS_NANOGPT, ids, 5, NULL, 0, "odd"), ST_EFORMAT);
  ck_assert(test_message_has("odd: expected ids of 2 bytes each, found an odd size of 5 bytes"));
}
END_TEST

// ---- Megatron -------------------------------------------------------------------------------

typedef struct Index {
  unsigned char bytes[256];
  size_t size;
} Index;

static void put(Index *index, int64_t value, size_t n) {
  memcpy(index->bytes + index->size, &value, n);
  index->size += n;
}

// 3 sequences of 2, 0 and 3 ids in 2 documents, element type `code` of `width` bytes; the layout is
// Megatron-LM's indexed_dataset.py.
static Index make_index(int code, int width) {
  Index index = {.bytes = "MMIDIDX\0", .size = 9};
  put(&index, 1, 8);
  put(&index, code, 1);
  put(&index, 3, 8);
  put(&index, 3, 8);
  put(&index, 2, 4), put(&index, 0, 4), put(&index, 3, 4);
  put(&index, 0, 8), put(&index, 2 * width, 8), put(&index, 2 * width, 8);
  put(&index, 0, 8), put(&index, 1, 8), put(&index, 3, 8);
  return index;
}

START_TEST(reads_megatron) {
  static const struct {
    int code, width;
  } types[] = {{1, 1}, {2, 1}, {3, 2}, {4, 4}, {5, 8}, {8, 2}};
  for (int t = 0; t < 6; t++) {
    unsigned char ids[40] = {0};
    for (int i = 0; i < 5; i++) ids[i * types[t].width] = (unsigned char)(i + 100);
    Index index = make_index(types[t].code, types[t].width);
    test_file_put(&folder, "m.idx", index.bytes, index.size);
    test_file_put(&folder, "m.bin", ids, 5 * (size_t)types[t].width);
    static const struct {
      const char *name;
      TokenFormat format;
    } ways[] = {{"m.idx", TOKENS_AUTO},
                {"m.idx", TOKENS_MEGATRON},
                {"m.bin", TOKENS_MEGATRON},
                {"m", TOKENS_MEGATRON}};
    for (int way = 0; way < 4; way++) {
      TokenFile *file;
      int64_t out[5], first, n;
      ck_assert_int_eq(tokens_open(&file, test_path(&folder, ways[way].name), ways[way].format),
                       ST_OK);
      ck_assert_int_eq(tokens_count(file), 5);
      ck_assert_int_eq(tokens_get(file, 0, 5, out), ST_OK);
      for (int i = 0; i < 5; i++) ck_assert_int_eq(out[i], i + 100);
      ck_assert_int_eq(tokens_n_documents(file), 2);
      ck_assert_int_eq(tokens_document(file, 0, &first, &n), ST_OK);
      ck_assert(first == 0 && n == 2);
      ck_assert_int_eq(tokens_document(file, 1, &first, &n), ST_OK);
      ck_assert(first == 2 && n == 3);
      ck_assert_int_eq(tokens_document(file, 2, &first, &n), ST_ERANGE);
      ck_assert_int_eq(tokens_document(file, -1, &first, &n), ST_ERANGE);
      tokens_close(file);
    }
  }
  // Negative ids are outside any vocabulary.
  TokenFile *file;
  Index index = make_index(4, 4);
  int32_t ids[5] = {1, 2, 3, -7, 5};
  ck_assert_int_eq(
      tokens_open_memory(&file, TOKENS_MEGATRON, index.bytes, index.size, ids, 20, "m"), ST_OK);
  ck_assert_int_eq(tokens_check(file, INT64_MAX), ST_EVALUE);
  ck_assert(test_message_has("found -7 at index 3"));
  tokens_close(file);
}
END_TEST

START_TEST(every_fault_of_a_megatron_index_is_named) {
  static const struct {
    size_t at, bytes;
    int64_t value;
    const char *message;
  } cases[] = {
      {0, 1, 'm', "expected a Megatron index, which begins with MMIDIDX"},
      {8, 1, 1, "expected a Megatron index"},
      {9, 8, 2, "expected version 1 of the Megatron index, found 2"},
      {17, 1, 0, "expected a dtype of integers"},
      {17, 1, 7, "8 u16), found 7"},
      {18, 8, 4, "expected a size of 34 + 12 x 4 sequences + 8 x 3 document bounds, found 94"},
      {18, 8, -1, "12 x -1 sequences"},
      {18, 8, INT64_MAX, "sequences + 8 x 3"},
      {26, 8, 0, "8 x 0 document bounds"},
      {26, 8, INT64_MIN, "document bounds"},
      {34, 4, 3, "sequence 1: expected it at byte 12 of the .bin, found byte 8, length 0"},
      {34, 4, -2, "sequence 0: expected it at byte 0 of the .bin, found byte 0, length -2"},
      {42, 4, 4, "expected 24 bytes, as its index says, found 20: it is cut short"},
      {42, 4, 2, "expected 16 bytes, as its index says, found 20: they do not belong together"},
      {46, 8, 4, "sequence 0: expected it at byte 0"},
      {62, 8, 4, "sequence 2: expected it at byte 8"},
      {70, 8, 1,
       "document bound 0: expected bounds that ascend from 0 to the 3 sequences, found 1"},
      {78, 8, 4, "document bound 1: expected bounds that ascend"},
      {78, 8, -1, "document bound 1"},
      {86, 8, 2,
       "document bound 2: expected bounds that ascend from 0 to the 3 sequences, found 2"},
  };
  const int32_t ids[5] = {0};
  TokenFile *file = NULL;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    Index index = make_index(4, 4);
    memcpy(index.bytes + cases[i].at, &cases[i].value, cases[i].bytes);
    ck_assert_int_eq(
        tokens_open_memory(&file, TOKENS_MEGATRON, index.bytes, index.size, ids, 20, "made"),
        ST_EFORMAT);
    ck_assert(test_message_has("made: "));
    ck_assert(test_message_has(cases[i].message));
  }
  Index index = make_index(4, 4);
  for (size_t n = 0; n < index.size; n++) {
    unsigned char *copy = malloc(n + 1);
    memcpy(copy, index.bytes, n);
    ck_assert_int_eq(tokens_open_memory(&file, TOKENS_MEGATRON, copy, n, ids, 20, "cut"),
                     ST_EFORMAT);
    free(copy);
  }
  test_file_put(&folder, "m.idx", index.bytes, index.size);
  ck_assert_int_eq(tokens_open(&file, test_path(&folder, "m.idx"), TOKENS_AUTO), ST_EIO);
  ck_assert(test_message_has("m.bin: cannot open"));
  test_file_put(&folder, "x.tok", index.bytes, index.size);
  ck_assert_int_eq(tokens_open(&file, test_path(&folder, "x.tok"), TOKENS_AUTO), ST_EFORMAT);
  ck_assert(test_message_has("x.tok: a Megatron index must be named .idx"));
  ck_assert_ptr_null(file);
}
END_TEST

// ---- text and order -------------------------------------------------------------------------

START_TEST(text_becomes_its_bytes) {
  char text[10000];
  for (size_t i = 0; i < sizeof text; i++) text[i] = (char)(i * 31 % 256);
  test_file_put(&folder, "text", text, sizeof text);
  int64_t n = 0, ids[10000];
  const char *out = test_path(&folder, "text.bin");
  ck_assert_int_eq(tokens_from_text(&n, test_path(&folder, "text"), out), ST_OK);
  ck_assert_int_eq(n, 10000);
  TokenFile *file;
  ck_assert_int_eq(tokens_open(&file, out, TOKENS_AUTO), ST_OK);
  ck_assert_int_eq(tokens_count(file), 10000);
  ck_assert_int_eq(tokens_check(file, 256), ST_OK);
  ck_assert_int_eq(tokens_get(file, 0, 10000, ids), ST_OK);
  for (int i = 0; i < 10000; i++) ck_assert_int_eq(ids[i], i * 31 % 256);
  tokens_close(file);
  test_file_put(&folder, "empty", "", 0);
  ck_assert_int_eq(tokens_from_text(&n, test_path(&folder, "empty"), out), ST_EFORMAT);
  ck_assert(test_message_has("empty: expected a text, found an empty file"));
  ck_assert_int_eq(tokens_from_text(&n, test_path(&folder, "none"), out), ST_EIO);
  const char *path = test_path(&folder, "text");
  ck_assert_int_eq(tokens_from_text(NULL, path, path), ST_EVALUE);
  ck_assert(test_message_has("the tokens would replace the text"));
  setenv("RILLE_FAULT_WRITE", "3", 1);
  ck_assert_int_eq(tokens_from_text(NULL, path, out), ST_EIO);
  unsetenv("RILLE_FAULT_WRITE");
  ck_assert_int_eq(test_folder_count(&folder), 3);
}
END_TEST

START_TEST(format_names) {
  TokenFormat format = TOKENS_AUTO;
  ck_assert_int_eq(token_format_from_name(&format, "megatron"), ST_OK);
  ck_assert_int_eq(format, TOKENS_MEGATRON);
  ck_assert_str_eq(token_format_name(TOKENS_LLMC), "llm.c");
  ck_assert_int_eq(token_format_from_name(&format, "tiktoken"), ST_EVALUE);
  ck_assert(test_message_has("unknown token format \"tiktoken\"; there are: auto llm.c nanogpt"));
}
END_TEST

START_TEST(windows_fill_the_file) {
  ck_assert_int_eq(order_n_windows(0, 8), 0);
  ck_assert_int_eq(order_n_windows(8, 8), 0);
  ck_assert_int_eq(order_n_windows(9, 8), 1);
  ck_assert_int_eq(order_n_windows(16, 8), 1);
  ck_assert_int_eq(order_n_windows(17, 8), 2);
  for (int64_t n = 0; n < 100; n++)
    for (int64_t T = 1; T < 20; T++) {
      int64_t windows = order_n_windows(n, T);
      ck_assert(windows == 0 || (windows - 1) * T + T + 1 <= n); // the last one is inside
      ck_assert(windows * T + T + 1 > n);                        // and one more would not be
    }
}
END_TEST

START_TEST(every_epoch_visits_every_window_once) {
  enum { N = 997 };
  int64_t previous[N] = {0};
  for (int64_t epoch = 0; epoch < 3; epoch++) {
    char seen[N] = {0};
    int n_same = 0, n_in_place = 0;
    for (int64_t i = 0; i < N; i++) {
      int64_t window = order_window(11, epoch * N + i, N);
      ck_assert(window >= 0 && window < N && !seen[window]++);
      n_same += window == previous[i];
      n_in_place += window == i;
      previous[i] = window;
    }
    // Random orders agree in about one place.
    if (epoch > 0) ck_assert_int_lt(n_same, 10);
    ck_assert_int_lt(n_in_place, 10);
  }
  int n_same = 0;
  for (int64_t i = 0; i < N; i++) n_same += order_window(11, i, N) == order_window(12, i, N);
  ck_assert_int_lt(n_same, 10);
  ck_assert_int_eq(order_window(1, INT64_MAX, 1), 0);
}
END_TEST

Suite *tokens_suite(void);
Suite *tokens_suite(void) {
  Suite *suite = suite_create("tokens");
  TCase *tests = tcase_create("tokens");
  tcase_add_checked_fixture(tests, setup, teardown);
  tcase_add_test(tests, what_is_written_is_read);
  tcase_add_test(tests, ids_are_checked_against_the_vocabulary);
  tcase_add_test(tests, nth_write_failure_keeps_the_previous_file);
  tcase_add_test(tests, foreign_and_cut_files_are_named);
  tcase_add_test(tests, nanogpt_only_when_asked_for);
  tcase_add_test(tests, reads_megatron);
  tcase_add_test(tests, every_fault_of_a_megatron_index_is_named);
  tcase_add_test(tests, text_becomes_its_bytes);
  tcase_add_test(tests, format_names);
  tcase_add_test(tests, windows_fill_the_file);
  tcase_add_test(tests, every_epoch_visits_every_window_once);
  suite_add_tcase(suite, tests);
  return suite;
}
