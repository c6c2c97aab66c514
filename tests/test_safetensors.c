// Tests of core/safetensors. tests/golden/*.safetensors were written by the format's own library
// (make_safetensors.py beside them).
#include "core/safetensors.h"

#include "tests/files.h"
#include "tests/tests.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static TestFolder folder;

static void setup(void) { test_folder_make(&folder); }
static void teardown(void) { test_folder_remove(&folder); }

static double element(const SafetensorsEntry *entry, int i) {
  union {
    float f;
    double d;
    uint32_t u;
  } bits = {.d = 0};
  uint16_t half;
  int64_t i64;
  int32_t i32;
  switch (entry->dtype) {
  case DT_F32: memcpy(&bits, entry->data + 4 * i, 4); return (double)bits.f;
  case DT_F64: memcpy(&bits, entry->data + 8 * i, 8); return bits.d;
  case DT_BF16:
    memcpy(&half, entry->data + 2 * i, 2);
    bits.u = (uint32_t)half << 16;
    return (double)bits.f;
  case DT_I64: memcpy(&i64, entry->data + 8 * i, 8); return (double)i64;
  case DT_I32: memcpy(&i32, entry->data + 4 * i, 4); return i32;
  case DT_U8:
  case DT_BOOL: return entry->data[i];
  }
  return 0;
}

START_TEST(reads_the_librarys_own_file) {
  Safetensors *file;
  ck_assert_int_eq(safetensors_open(&file, "tests/golden/safetensors.safetensors"), ST_OK);
  ck_assert_int_eq(safetensors_count(file), 10);
  static const char *const names[] = {"f32", "f64", "bf16", "i64", "i32", "u8", "bool"};
  for (int n = 0; n < 7; n++) {
    const SafetensorsEntry *entry = safetensors_find(file, names[n]);
    ck_assert_ptr_nonnull(entry);
    ck_assert(entry->is_readable);
    ck_assert_str_eq(dtype_name(entry->dtype), names[n]);
    ck_assert_int_eq(entry->n_dims, 2);
    ck_assert(entry->shape[0] == 2 && entry->shape[1] == 3 && entry->n_elements == 6);
    ck_assert_int_eq(entry->n_bytes, 6 * (int64_t)dtype_size(entry->dtype));
    for (int i = 0; i < 6; i++) {
      const double expected[] = {i / 4.0, i / 3.0, i / 2.0,   i - 1099511627776.0,
                                 i - 3,   40 * i,  i % 2 == 0};
      ck_assert(element(entry, i) == expected[n]);
    }
  }
  const SafetensorsEntry *half = safetensors_find(file, "f16");
  ck_assert(!half->is_readable && half->n_bytes == 12);
  ck_assert_str_eq(half->dtype_name, "F16");
  const SafetensorsEntry *scalar = safetensors_find(file, "h.0.\xc3\xa9\"\\");
  ck_assert(scalar->n_dims == 0 && scalar->n_elements == 1 && element(scalar, 0) == 7);
  const SafetensorsEntry *empty = safetensors_find(file, "empty");
  ck_assert(empty->n_dims == 2 && empty->n_elements == 0 && empty->n_bytes == 0);
  ck_assert_str_eq(safetensors_metadata(file, "format"), "pt");
  ck_assert_ptr_null(safetensors_metadata(file, "f32"));
  ck_assert_int_eq(safetensors_n_metadata(file), 2);
  ck_assert_ptr_eq(safetensors_find(file, "head"), safetensors_find(file, "f32"));
  ck_assert_ptr_null(safetensors_find(file, "f3"));
  ck_assert_ptr_null(safetensors_at(file, 10));
  for (int64_t i = 1; i < 10; i++)
    ck_assert(safetensors_at(file, i)->data ==
              safetensors_at(file, i - 1)->data + safetensors_at(file, i - 1)->n_bytes);
  safetensors_close(file);
  safetensors_close(NULL);
}
END_TEST

// A file with this header and n_data bytes of data, in memory.
static Status open_made(Safetensors **out, const char *header, size_t n_data) {
  uint64_t n = strlen(header);
  size_t size = 8 + n + n_data;
  unsigned char *copy = calloc(1, size);
  memcpy(copy, &n, 8);
  memcpy(copy + 8, header, n);
  Status status = safetensors_open_memory(out, copy, size, "made");
  if (status == ST_OK) safetensors_close(*out);
  free(copy);
  return status;
}

#define A(dtype, shape, offsets) \
  "\"a\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"
#define B(dtype, shape, offsets) \
  "\"b\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static const struct {
  const char *header;
  size_t n_data;
  const char *message; // NULL: it is well-formed
} headers[] = {
    {"{}", 0, NULL},
    {"{}    ", 0, NULL},
    {"{\"__metadata__\":{}}", 0, NULL},
    {"{" A("F32", "[2]", "[0,8]") "}", 8, NULL},
    {"{" A("F32", "[]", "[0,4]") "}", 4, NULL},
    {"{" A("F32", "[0,7]", "[0,0]") "}", 0, NULL},
    {"{" A("F4", "[3,2]", "[0,3]") "}", 3, NULL},
    {"{" B("F32", "[1]", "[4,8]") "," A("F32", "[1]", "[0,4]") "}", 8, NULL},
    {"{" B("F32", "[0]", "[4,4]") "," A("F32", "[1]", "[0,4]") "}", 4, NULL},
    {"{" B("F32", "[0]", "[0,0]") "," A("F32", "[1]", "[0,4]") "}", 4, NULL},
    {"", 0, "made: expected a header that starts with '{' at byte 8"},
    {" {}", 0, "expected a header that starts with '{'"},
    {"[]", 0, "expected a header that starts with '{'"},
    {"{", 0, "made: its JSON header: line 1 column 2: expected a key or '}'"},
    {"{}x", 0, "made: its JSON header: line 1 column 3: expected the end"},
    {"{" A("F32", "[1]", "[0,4]") "," A("F32", "[1]", "[4,8]") "}", 8, "\"a\" is there twice"},
    {"{\"a\":3}", 0, "made: tensor \"a\": expected an object, found a number"},
    {"{\"a\":{\"shape\":[],\"data_offsets\":[0,4]}}", 4, "a string as dtype, found none"},
    {"{\"a\":{\"dtype\":4,\"shape\":[],\"data_offsets\":[0,4]}}", 4, "dtype, found a number"},
    {"{" A("F99", "[1]", "[0,4]") "}", 4, "tensor \"a\": unknown dtype \"F99\""},
    {"{" A("f32", "[1]", "[0,4]") "}", 4, "unknown dtype \"f32\""},
    {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "an array as shape, found none"},
    {"{" A("F32", "2", "[0,8]") "}", 8, "an array as shape, found a number"},
    {"{" A("F32", "[-2]", "[0,8]") "}", 8, "expected sizes of 0 and more"},
    {"{" A("F32", "[2.0]", "[0,8]") "}", 8, "expected sizes of 0 and more"},
    {"{" A("F32", "[\"2\"]", "[0,8]") "}", 8, "expected sizes of 0 and more"},
    {"{" A("F32", "[4294967296,4294967296]", "[0,8]") "}", 8, "more than 2^63 elements"},
    {"{" A("F64", "[2305843009213693952]", "[0,0]") "}", 0, "span its 2305843009213693952"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "expected data_offsets [begin, end]"},
    {"{" A("F32", "[1]", "[0]") "}", 4, "expected data_offsets [begin, end]"},
    {"{" A("F32", "[1]", "[0,4,8]") "}", 4, "expected data_offsets [begin, end]"},
    {"{" A("F32", "[1]", "[4,0]") "}", 4, "expected data_offsets [begin, end]"},
    {"{" A("F32", "[1]", "[-4,0]") "}", 4, "expected data_offsets [begin, end]"},
    {"{" A("F32", "[1]", "[0,4.0]") "}", 4, "expected data_offsets [begin, end]"},
    {"{" A("F32", "[2]", "[0,4]") "}", 4, "span its 2 elements of F32, found [0, 4]"},
    {"{" A("F4", "[3]", "[0,1]") "}", 1, "span its 3 elements of F4"},
    {"{" A("F32", "[2]", "[0,8]") "}", 7,
     "expected its data at bytes [0, 8) after the header, found only 7 bytes there: the file is "
     "cut"},
    {"{" A("F32", "[1]", "[0,4]") "}", 5,
     "expected 4 bytes of data after the header, found 5: the rest belongs to no tensor"},
    {"{}", 1, "expected 0 bytes of data after the header, found 1"},
    {"{" A("F32", "[1]", "[4,8]") "}", 8,
     "begin at 0, the end of the tensor before it, found 4: a hole"},
    {"{" A("F32", "[1]", "[0,4]") "," B("F32", "[1]", "[8,12]") "}", 12, "found 8: a hole"},
    {"{" A("F32", "[1]", "[0,4]") "," B("F32", "[1]", "[2,6]") "}", 6, "found 2: an overlap"},
    {"{" A("F32", "[1]", "[0,4]") "," B("F32", "[1]", "[0,4]") "}", 4, "found 0: an overlap"},
    {"{\"__metadata__\":[]}", 0, "expected an object as __metadata__, found an array"},
    {"{\"__metadata__\":{\"k\":1}}", 0,
     "expected strings in __metadata__, found a number at \"k\""},
    {"{\"__metadata__\":{\"alias:x\":\"a\"}}", 0,
     "\"x\" is an alias of \"a\", which is not in the file"},
    {"{\"__metadata__\":{\"alias:a\":\"a\"}," A("F32", "[1]", "[0,4]") "}", 4,
     "\"a\" is both a tensor and an alias"},
};

START_TEST(every_fault_of_a_header_is_named) {
  for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) {
    Safetensors *file = NULL;
    Status status = open_made(&file, headers[i].header, headers[i].n_data);
    if (!headers[i].message) {
      ck_assert_msg(status == ST_OK, "%s: %s", headers[i].header, status_message());
      continue;
    }
    ck_assert_msg(status == ST_EFORMAT, "%s is accepted", headers[i].header);
    ck_assert_ptr_null(file);
    ck_assert(test_message_has("made: "));
    ck_assert(test_message_has(headers[i].message));
  }
}
END_TEST

START_TEST(foreign_and_cut_files_are_named) {
  Safetensors *file = NULL;
  ck_assert_int_eq(safetensors_open_memory(&file, "", 0, "m"), ST_EFORMAT);
  ck_assert(test_message_has("m: expected a safetensors file, found an empty file"));
  ck_assert_int_eq(safetensors_open_memory(&file, "\2\0\0\0\0\0\0", 7, "m"), ST_EFORMAT);
  ck_assert(test_message_has("of at least 8 bytes, found 7 bytes"));
  ck_assert_int_eq(safetensors_open_memory(&file, "\3\0\0\0\0\0\0\0{}", 10, "m"), ST_EFORMAT);
  ck_assert(test_message_has("expected a header of 3 bytes, found 10 bytes in the file"));
  ck_assert_int_eq(safetensors_open_memory(&file, "PK\3\4PK\3\4{}", 10, "m"), ST_EFORMAT);
  ck_assert(test_message_has("at most 100000000 bytes, found the length"));
  ck_assert(test_message_has("no safetensors file?"));
  ck_assert_int_eq(safetensors_open(&file, test_path(&folder, "none")), ST_EIO);
  ck_assert(test_message_has("none: cannot open: No such file"));
  // Every cut of a good file is refused.
  size_t size;
  TestFolder golden = {.path = "tests/golden"};
  char *data = test_file_get(&golden, "safetensors.safetensors", &size);
  for (size_t n = 0; n < size; n++) {
    char *copy = malloc(n + 1);
    memcpy(copy, data, n);
    ck_assert_int_eq(safetensors_open_memory(&file, copy, n, "cut"), ST_EFORMAT);
    free(copy);
  }
  free(data);
}
END_TEST

// ---- shards ---------------------------------------------------------------------------------

START_TEST(reads_shards) {
  Safetensors *file;
  ck_assert_int_eq(safetensors_open(&file, "tests/golden/golden.safetensors.index.json"), ST_OK);
  ck_assert_int_eq(safetensors_count(file), 2);
  const SafetensorsEntry *a = safetensors_find(file, "a.weight");
  const SafetensorsEntry *b = safetensors_find(file, "b.weight");
  ck_assert(element(a, 1) == 1 && element(b, 1) == 2);
  ck_assert_str_eq(safetensors_path(file, b), "tests/golden/golden-00002-of-00002.safetensors");
  ck_assert_str_eq(safetensors_metadata(file, "format"), "pt");
  safetensors_close(file);
}
END_TEST

static Status open_index(const char *weight_map) {
  Safetensors *file = NULL;
  char text[512];
  snprintf(text, sizeof text, "{\"metadata\":{\"total_size\":8},\"weight_map\":%s}", weight_map);
  test_file_put(&folder, "index.json", text, strlen(text));
  Status status = safetensors_open(&file, test_path(&folder, "index.json"));
  if (status == ST_OK) safetensors_close(file);
  return status;
}

static void put_shard(const char *file, const char *header, size_t n_data) {
  unsigned char bytes[512] = {0};
  uint64_t n = strlen(header);
  memcpy(bytes, &n, 8);
  memcpy(bytes + 8, header, n);
  test_file_put(&folder, file, bytes, 8 + n + n_data);
}

START_TEST(every_fault_of_shards_is_named) {
  put_shard("1", "{" A("U8", "[3]", "[0,3]") "}", 3);
  put_shard("2", "{" B("U8", "[3]", "[0,3]") "}", 3);
  put_shard("3", "{" A("U8", "[1]", "[0,1]") "," B("U8", "[1]", "[1,2]") "}", 2);
  ck_assert_int_eq(open_index("{\"a\":\"1\",\"b\":\"2\"}"), ST_OK);
  ck_assert_int_eq(open_index("{}"), ST_OK);
  static const struct {
    const char *weight_map;
    Status status;
    const char *message;
  } cases[] = {
      {"{\"a\":\"1\",\"b\":\"9\"}", ST_EIO, "/9: cannot open: No such file"},
      {"{\"a\":\"1\",\"b\":\"1\"}", ST_EFORMAT, "expected tensor \"b\" in shard 1, which has none"},
      {"{\"a\":\"2\",\"b\":\"1\"}", ST_EFORMAT, "expected tensor \"a\" in shard 2, found it in 1"},
      {"{\"a\":\"3\"}", ST_EFORMAT, "tensor \"b\" of shard 3 is not in the index"},
      {"{\"0\":\"1\",\"a\":\"1\"}", ST_EFORMAT, "expected tensor \"0\" in shard 1"},
      {"{\"a\":\"1\",\"b\":\"3\"}", ST_EFORMAT, "tensor \"a\" is in two shards"},
      {"{\"a\":1}", ST_EFORMAT, "expected a file name for tensor \"a\", found a number"},
      {"{\"a\":\"../1\"}", ST_EFORMAT,
       "expected the name of a file beside the index, found \"../1\""},
      {"{\"a\":\"\"}", ST_EFORMAT, "the name of a file beside the index"},
      {"{\"a\":\"..\"}", ST_EFORMAT, "the name of a file beside the index"},
      {"[]", ST_EFORMAT, "expected an object \"weight_map\", found an array"},
      {"{\"a\":\"1\"", ST_EFORMAT, "expected ',' or '}'"},
      {"{\"a\":\"1\",\"b\":\"index.json\"}", ST_EFORMAT,
       "/index.json: expected a header of at most"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    ck_assert_int_eq(open_index(cases[i].weight_map), cases[i].status);
    ck_assert(test_message_has("index.json"));
    ck_assert(test_message_has(cases[i].message));
  }
  test_file_put(&folder, "x.json", "{}", 2);
  Safetensors *file;
  ck_assert_int_eq(safetensors_open(&file, test_path(&folder, "x.json")), ST_EFORMAT);
  ck_assert(test_message_has("x.json: expected an object \"weight_map\", found none"));
}
END_TEST

// ---- writing --------------------------------------------------------------------------------

static const int64_t shape23[] = {2, 3}, shape_empty[] = {0, 5};
static const SafetensorsSpec specs[] = {
    {"z.u8", DT_U8, 2, shape23},         {"b.f32", DT_F32, 2, shape23},
    {"a.f32", DT_F32, 2, shape23},       {"a.bf16", DT_BF16, 2, shape23},
    {"scalar.f64", DT_F64, 0, NULL},     {"empty", DT_I64, 2, shape_empty},
    {"\xc3\xa9\"", DT_BOOL, 1, shape23},
};
enum { N_SPECS = sizeof specs / sizeof *specs };
static const SafetensorsPair metadata[] = {{"format", "pt"}, {"alias:head", "b.f32"}};

// Byte k of tensor i is 16 i + k, but 0 or 1 for bool. The last piece goes before the first.
static Status write_sample(const char *path, FileFault *fault) {
  SafetensorsWriter *writer = NULL;
  TRY(safetensors_writer_open(&writer, path, specs, N_SPECS, metadata, 2, fault));
  Status status = ST_OK;
  static const size_t sizes[N_SPECS] = {6, 24, 24, 12, 8, 0, 2};
  for (int i = N_SPECS - 1; i >= 0 && status == ST_OK; i--) {
    unsigned char bytes[24];
    for (size_t k = 0; k < 24; k++)
      bytes[k] = (unsigned char)(specs[i].dtype == DT_BOOL ? k % 2 : 16 * (size_t)i + k);
    size_t half = sizes[i] / 2;
    status = safetensors_write(writer, i, (int64_t)half, bytes + half, sizes[i] - half);
    if (status == ST_OK) status = safetensors_write(writer, i, 0, bytes, half);
  }
  if (status == ST_OK) return safetensors_commit(writer);
  safetensors_abort(writer);
  return status;
}

static void check_sample(const char *path) {
  Safetensors *file;
  ck_assert_int_eq(safetensors_open(&file, path), ST_OK);
  ck_assert_int_eq(safetensors_count(file), N_SPECS);
  for (int i = 0; i < N_SPECS; i++) {
    const SafetensorsEntry *entry = safetensors_find(file, specs[i].name);
    ck_assert_ptr_nonnull(entry);
    ck_assert_int_eq(entry->dtype, specs[i].dtype);
    ck_assert_int_eq(entry->n_dims, specs[i].n_dims);
    for (int d = 0; d < entry->n_dims; d++) ck_assert_int_eq(entry->shape[d], specs[i].shape[d]);
    ck_assert_uint_eq((uintptr_t)entry->data % dtype_size(entry->dtype), 0);
    for (int64_t k = 0; k < entry->n_bytes; k++)
      ck_assert_int_eq(entry->data[k], entry->dtype == DT_BOOL ? k % 2 : 16 * i + k);
  }
  // Large elements first, then by name.
  ck_assert_str_eq(safetensors_at(file, 2)->name, "a.f32");
  ck_assert_str_eq(safetensors_at(file, 3)->name, "b.f32");
  ck_assert_str_eq(safetensors_metadata(file, "format"), "pt");
  ck_assert_ptr_eq(safetensors_find(file, "head"), safetensors_find(file, "b.f32"));
  safetensors_close(file);
}

START_TEST(what_is_written_is_read) {
  const char *keep = getenv("RILLE_TEST_SAFETENSORS"); // to look at it with other readers
  const char *path = keep ? keep : test_path(&folder, "w.safetensors");
  ck_assert_int_eq(write_sample(path, NULL), ST_OK);
  check_sample(path);
  SafetensorsWriter *writer;
  ck_assert_int_eq(safetensors_writer_open(&writer, path, NULL, 0, NULL, 0, NULL), ST_OK);
  if (keep) {
    safetensors_abort(writer);
    return;
  }
  ck_assert_int_eq(safetensors_commit(writer), ST_OK);
  size_t size;
  char *data = test_file_get(&folder, "w.safetensors", &size);
  ck_assert_uint_eq(size, 16);
  ck_assert_int_eq(memcmp(data, "\10\0\0\0\0\0\0\0{}      ", 16), 0);
  free(data);
}
END_TEST

START_TEST(nth_write_failure_keeps_the_previous_file) {
  const char *path = test_path(&folder, "w.safetensors");
  ck_assert_int_eq(write_sample(path, NULL), ST_OK);
  int n = 0;
  for (bool is_done = false; !is_done; n++) {
    FileFault fault = {.countdown = n + 1, .error = EIO};
    Status status = write_sample(path, &fault);
    is_done = fault.countdown > 0;
    ck_assert_int_eq(status, is_done ? ST_OK : ST_EIO);
    ck_assert_int_eq(test_folder_count(&folder), 1);
    check_sample(path);
  }
  ck_assert_int_gt(n, 15);
}
END_TEST

static Status open_writer(const SafetensorsSpec *tensors, int64_t n, const SafetensorsPair *pairs,
                          int64_t n_pairs) {
  SafetensorsWriter *writer = NULL;
  Status status =
      safetensors_writer_open(&writer, test_path(&folder, "w"), tensors, n, pairs, n_pairs, NULL);
  if (status == ST_OK) safetensors_abort(writer);
  ck_assert_int_eq(test_folder_count(&folder), 0);
  return status;
}

START_TEST(writer_refuses_what_readers_would) {
  static const int64_t negative[] = {-1}, huge[] = {INT64_C(1) << 62, 4};
  SafetensorsSpec twice[] = {specs[0], specs[1], specs[0]};
  ck_assert_int_eq(open_writer(twice, 3, NULL, 0), ST_EVALUE);
  ck_assert(test_message_has("two tensors are named \"z.u8\""));
  ck_assert_int_eq(open_writer(&(SafetensorsSpec){"\xff", DT_U8, 0, NULL}, 1, NULL, 0), ST_EVALUE);
  ck_assert_int_eq(open_writer(&(SafetensorsSpec){"__metadata__", DT_U8, 0, NULL}, 1, NULL, 0),
                   ST_EVALUE);
  ck_assert(test_message_has("cannot be the name of a tensor"));
  ck_assert_int_eq(open_writer(&(SafetensorsSpec){"a", DT_U8, 1, negative}, 1, NULL, 0), ST_EVALUE);
  ck_assert_int_eq(open_writer(&(SafetensorsSpec){"a", DT_U8, 2, huge}, 1, NULL, 0), ST_EVALUE);
  ck_assert(test_message_has("tensor \"a\": its shape is negative or too large"));
  ck_assert_int_eq(open_writer(specs, 1, &(SafetensorsPair){"alias:x", "nothing"}, 1), ST_EVALUE);
  ck_assert(test_message_has("there is no such tensor"));
  ck_assert_int_eq(open_writer(specs, 2, &(SafetensorsPair){"alias:z.u8", "b.f32"}, 1), ST_EVALUE);
  ck_assert(test_message_has("it is a tensor itself"));
  SafetensorsPair pairs[] = {{"k", "1"}, {"k", "2"}};
  ck_assert_int_eq(open_writer(specs, 2, pairs, 2), ST_EVALUE);
  ck_assert(test_message_has("metadata \"k\" is there twice"));
  ck_assert_int_eq(open_writer(specs, 2, &(SafetensorsPair){"k", "\xff"}, 1), ST_EVALUE);
}
END_TEST

START_TEST(writer_insists_on_every_byte) {
  SafetensorsWriter *writer;
  const char *path = test_path(&folder, "w");
  char bytes[24] = {0};
  ck_assert_int_eq(safetensors_writer_open(&writer, path, specs, 2, NULL, 0, NULL), ST_OK);
  ck_assert_int_eq(safetensors_write(writer, 2, 0, bytes, 1), ST_ERANGE);
  ck_assert_int_eq(safetensors_write(writer, 0, 1, bytes, 6), ST_ERANGE);
  ck_assert(test_message_has("tensor \"z.u8\" has 6 bytes, asked to write 6 at byte 1"));
  ck_assert_int_eq(safetensors_write(writer, 0, -1, bytes, 1), ST_ERANGE);
  ck_assert_int_eq(safetensors_write(writer, 0, 0, bytes, 6), ST_OK);
  ck_assert_int_eq(safetensors_write(writer, 1, 0, bytes, 23), ST_OK);
  ck_assert_int_eq(safetensors_commit(writer), ST_ESTATE);
  ck_assert(test_message_has("expected 24 bytes of tensor \"b.f32\", 23 were written"));
  ck_assert_int_eq(test_folder_count(&folder), 0);
  safetensors_abort(NULL);
}
END_TEST

Suite *safetensors_suite(void);
Suite *safetensors_suite(void) {
  Suite *suite = suite_create("safetensors");
  TCase *tests = tcase_create("safetensors");
  tcase_add_checked_fixture(tests, setup, teardown);
  tcase_add_test(tests, reads_the_librarys_own_file);
  tcase_add_test(tests, every_fault_of_a_header_is_named);
  tcase_add_test(tests, foreign_and_cut_files_are_named);
  tcase_add_test(tests, reads_shards);
  tcase_add_test(tests, every_fault_of_shards_is_named);
  tcase_add_test(tests, what_is_written_is_read);
  tcase_add_test(tests, nth_write_failure_keeps_the_previous_file);
  tcase_add_test(tests, writer_refuses_what_readers_would);
  tcase_add_test(tests, writer_insists_on_every_byte);
  suite_add_tcase(suite, tests);
  return suite;
}
