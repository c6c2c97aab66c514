// Tests of core/json. What is valid and what is not comes from RFC 8259.
#include "core/json.h"

#include "tests/files.h"
#include "tests/tests.h"

#include <float.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Parses from an exact-size copy, so that a sanitizer sees any read beyond the end.
static Status parse(JsonTree **out, const char *text, size_t size) {
  char *copy = malloc(size ? size : 1);
  memcpy(copy, text, size);
  Status status = json_parse(out, copy, size);
  free(copy);
  return status;
}

static JsonTree *parsed(const char *text) {
  JsonTree *tree = NULL;
  Status status = parse(&tree, text, strlen(text));
  ck_assert_msg(status == ST_OK, "%s: %s", text, status_message());
  return tree;
}

START_TEST(reads_every_kind) {
  JsonTree *tree =
      parsed(" {\"a\" : [1, -2.5e1, true,false , null],\r\n\t\"s\":\"x\\n\\u00e9\xc3\xa9\", "
             "\"o\":{}, \"e\":[]} ");
  const JsonValue *root = json_root(tree);
  ck_assert_int_eq(root->kind, JSON_OBJECT);
  ck_assert_int_eq(root->count, 4);
  const JsonValue *a = json_get(root, "a");
  ck_assert_int_eq(a->kind, JSON_ARRAY);
  ck_assert_int_eq(a->count, 5);
  const JsonValue *item = a->first;
  ck_assert(item->kind == JSON_NUMBER && item->is_integer && item->integer == 1);
  item = item->next;
  ck_assert(item->kind == JSON_NUMBER && !item->is_integer && item->number == -25);
  item = item->next;
  ck_assert(item->kind == JSON_BOOL && item->boolean);
  item = item->next;
  ck_assert(item->kind == JSON_BOOL && !item->boolean);
  item = item->next;
  ck_assert(item->kind == JSON_NULL && !item->next);
  const JsonValue *s = json_get(root, "s");
  ck_assert_str_eq(s->string, "x\n\xc3\xa9\xc3\xa9");
  ck_assert_int_eq(s->count, 6);
  ck_assert(json_get(root, "o")->kind == JSON_OBJECT && !json_get(root, "o")->first);
  ck_assert(json_get(root, "e")->kind == JSON_ARRAY && json_get(root, "e")->count == 0);
  ck_assert_ptr_null(json_get(root, "b"));
  ck_assert_ptr_null(json_get(a, "a"));
  ck_assert_ptr_null(json_get(NULL, "a"));
  json_free(tree);
  json_free(NULL);
}
END_TEST

START_TEST(integers_are_exact) {
  static const struct {
    const char *text;
    bool is_integer;
    int64_t integer;
  } cases[] = {
      {"9007199254740993", true, INT64_C(9007199254740993)}, // 2^53 + 1: no double
      {"9223372036854775807", true, INT64_MAX},
      {"-9223372036854775808", true, INT64_MIN},
      {"9223372036854775808", false, 0},
      {"-0", true, 0},
      {"1.0", false, 0},
      {"1e2", false, 0},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    JsonTree *tree = parsed(cases[i].text);
    ck_assert_int_eq(json_root(tree)->is_integer, cases[i].is_integer);
    ck_assert_int_eq(json_root(tree)->integer, cases[i].integer);
    ck_assert(json_root(tree)->number == strtod(cases[i].text, NULL));
    json_free(tree);
  }
}
END_TEST

START_TEST(strings_are_unescaped) {
  JsonTree *tree = parsed("\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0041\\u00E9\\u20ac\\ud834\\uDD1e\"");
  ck_assert_str_eq(json_root(tree)->string, "\"\\/\b\f\n\r\tA\xc3\xa9\xe2\x82\xac\xf0\x9d\x84\x9e");
  json_free(tree);
}
END_TEST

// What must be refused, and what the message says.
static const struct {
  const char *text, *message;
} bad[] = {
    {"", "line 1 column 1: expected a value, found the end of the text"},
    {"  ", "line 1 column 3"},
    {"\xef\xbb\xbf{}", "expected a value, found the byte 0xef"},
    {"{", "expected a key or '}', found the end of the text"},
    {"[", "expected a value, found the end"},
    {"[1,]", "line 1 column 4: expected a value, found ']'"},
    {"[,1]", "expected a value, found ','"},
    {"[1 2]", "line 1 column 4: expected ',' or ']', found '2'"},
    {"[1", "expected ',' or ']'"},
    {"[1}", "expected ',' or ']', found '}'"},
    {"{\"a\":1,}", "expected a key, found '}'"},
    {"{\"a\" 1}", "expected ':', found '1'"},
    {"{a:1}", "expected a key or '}', found 'a'"},
    {"{\"a\":}", "expected a value, found '}'"},
    {"{\"a\":1 \"b\":2}", "expected ',' or '}', found '\"'"},
    {"{\n \"a\": 1,\n \"a\": 2}",
     "line 3 column 8: expected each key once, but \"a\" is there twice"},
    {"[1]x", "line 1 column 4: expected the end of the text, found 'x'"},
    {"[1][2]", "expected the end of the text"},
    {"01", "expected no digit after a leading 0"},
    {"-", "expected a digit, found the end"},
    {"+1", "expected a value, found '+'"},
    {".5", "expected a value"},
    {"1.", "expected a digit"},
    {"1e", "expected a digit"},
    {"1e+", "expected a digit"},
    {"0x10", "expected the end of the text, found 'x'"},
    {"1e999", "a number that a double can hold"},
    {"NaN", "expected a value"},
    {"Infinity", "expected a value"},
    {"nul", "expected null, true or false"},
    {"trux", "line 1 column 4: expected null, true or false, found 'x'"},
    {"True", "expected a value"},
    {"'a'", "expected a value"},
    {"\"a", "expected '\"' to end the string, found the end"},
    {"\"a\\", "after a backslash, found the end"},
    {"\"\\x\"", "after a backslash, found 'x'"},
    {"\"\\u12g4\"", "expected 4 hexadecimal digits, found 'g'"},
    {"\"\\u12", "expected 4 hexadecimal digits"},
    {"\"\\u0000\"", "expected no \\u0000"},
    {"\"\\ud800\"", "pair of surrogates"},
    {"\"\\ud800\\u0041\"", "pair of surrogates"},
    {"\"\\udc00\"", "pair of surrogates"},
    {"\"a\tb\"", "expected an escape instead of a control character, found the byte 0x09"},
    {"\"\x80\"", "expected UTF-8, found the byte 0x80"},
    {"\"\xc0\xaf\"", "expected UTF-8"},         // overlong
    {"\"\xe0\x9f\xbf\"", "expected UTF-8"},     // overlong
    {"\"\xed\xa0\x80\"", "expected UTF-8"},     // a surrogate
    {"\"\xf4\x90\x80\x80\"", "expected UTF-8"}, // beyond U+10FFFF
    {"\"\xf0\x8f\xbf\xbf\"", "expected UTF-8"}, // overlong
    {"\"\xe2\x82\"", "expected UTF-8"},         // cut
    {"\"\xe2\x82", "expected UTF-8"},
    {"[1]//", "expected the end of the text"},
};

START_TEST(malformed_text_is_refused_with_its_place) {
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    JsonTree *tree = NULL;
    ck_assert_msg(parse(&tree, bad[i].text, strlen(bad[i].text)) == ST_EFORMAT, "%s", bad[i].text);
    ck_assert_ptr_null(tree);
    ck_assert(test_message_has(bad[i].message));
  }
  JsonTree *tree = NULL;
  ck_assert_int_eq(parse(&tree, "[1\0]", 4), ST_EFORMAT);
  ck_assert(test_message_has("found the byte 0x00"));
  ck_assert_int_eq(parse(&tree, "\"a\0b\"", 5), ST_EFORMAT);
}
END_TEST

// Every prefix of a text is refused, and so is every text with one byte changed to 0xff.
START_TEST(every_cut_is_refused) {
  const char *text =
      "{\"a\":[1,-2.5e1,true,null,\"\\u00e9\xc3\xa9\"],\"b\":{\"c\":\"\\ud834\\udd1e\"}}";
  size_t size = strlen(text);
  for (size_t n = 0; n < size; n++) {
    JsonTree *tree = NULL;
    ck_assert_int_eq(parse(&tree, text, n), ST_EFORMAT);
    char copy[128];
    memcpy(copy, text, size);
    copy[n] = '\xff';
    ck_assert_int_eq(parse(&tree, copy, size), ST_EFORMAT);
  }
}
END_TEST

START_TEST(nesting_has_a_limit) {
  char text[2 * JSON_DEPTH + 8];
  JsonTree *tree = NULL;
  for (int depth = JSON_DEPTH; depth <= JSON_DEPTH + 1; depth++) {
    memset(text, '[', (size_t)depth);
    memset(text + depth, ']', (size_t)depth);
    Status status = parse(&tree, text, 2 * (size_t)depth);
    ck_assert_int_eq(status, depth <= JSON_DEPTH ? ST_OK : ST_EFORMAT);
    if (status == ST_OK) json_free(tree);
  }
  ck_assert(test_message_has("at most 64 levels"));
  // Siblings are not levels.
  tree =
      parsed("[[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],"
             "[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],"
             "[],[],[],[],[],[],[],[],[],[],[],[],[],[]]");
  json_free(tree);
}
END_TEST

// Objects above and below the size where a hash table takes over, the duplicate anywhere.
START_TEST(duplicates_are_found_in_large_objects) {
  for (int n = 2; n < 200; n = n * 3 / 2 + 1) {
    for (int twin = 0; twin < n; twin += n / 2) {
      JsonWriter writer = {0};
      JsonTree *tree = NULL;
      const char *text;
      size_t size;
      json_begin_object(&writer);
      for (int i = 0; i < n + 1; i++) {
        char key[16];
        snprintf(key, sizeof key, "k%d", i == n ? twin : i);
        json_key(&writer, key);
        json_int(&writer, i);
      }
      json_end_object(&writer);
      ck_assert_int_eq(json_finish(&writer, &text, &size), ST_OK);
      ck_assert_int_eq(json_parse(&tree, text, size), ST_EFORMAT);
      ck_assert(test_message_has("is there twice"));
      json_writer_free(&writer);
    }
  }
}
END_TEST

static const char *write_one(JsonWriter *writer, double value) {
  const char *text;
  json_writer_reset(writer);
  json_double(writer, value);
  ck_assert_int_eq(json_finish(writer, &text, NULL), ST_OK);
  return text;
}

START_TEST(doubles_are_written_shortest_and_exact) {
  JsonWriter writer = {0};
  ck_assert_str_eq(write_one(&writer, 0.1), "0.1");
  ck_assert_str_eq(write_one(&writer, 3), "3");
  ck_assert_str_eq(write_one(&writer, -0.0), "-0");
  ck_assert_str_eq(write_one(&writer, 1e300), "1e+300");
  ck_assert_str_eq(write_one(&writer, (double)NAN), "null");
  ck_assert_str_eq(write_one(&writer, -(double)INFINITY), "null");
  const double values[] = {1.0 / 3, 5e-324, DBL_MAX, DBL_MIN, 0x1.fffffffffffffp-3, 123456789.125};
  for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
    JsonTree *tree = parsed(write_one(&writer, values[i]));
    ck_assert(json_root(tree)->number == values[i]);
    json_free(tree);
  }
  json_writer_free(&writer);
}
END_TEST

START_TEST(writer_escapes_and_separates) {
  JsonWriter writer = {0};
  const char *text;
  for (int round = 0; round < 2; round++) {
    json_writer_reset(&writer);
    json_begin_object(&writer);
    json_key(&writer, "a\"\\\n");
    json_string(&writer, "\x01\x7f\xc3\xa9\xff\xc3");
    json_key(&writer, "list");
    json_begin_array(&writer);
    json_int(&writer, INT64_MIN);
    json_bool(&writer, true);
    json_null(&writer);
    json_begin_array(&writer);
    json_end_array(&writer);
    json_begin_object(&writer);
    json_end_object(&writer);
    json_end_array(&writer);
    json_key(&writer, "no");
    json_bool(&writer, false);
    json_end_object(&writer);
    ck_assert_int_eq(json_finish(&writer, &text, NULL), ST_OK);
    ck_assert_str_eq(text,
                     "{\"a\\\"\\\\\\u000a\":\"\\u0001\\u007f\xc3\xa9\xef\xbf\xbd\xef\xbf\xbd\","
                     "\"list\":[-9223372036854775808,true,null,[],{}],\"no\":false}");
  }
  json_free(parsed(text));
  json_writer_free(&writer);
}
END_TEST

// A locale with a decimal comma, where the machine has one, changes nothing.
START_TEST(numbers_do_not_depend_on_the_locale) {
  static const char *const names[] = {"de_DE.UTF-8", "fr_FR.UTF-8", "de_DE", "fr_FR"};
  char *old = strdup(setlocale(LC_NUMERIC, NULL));
  bool has_comma = false;
  for (size_t i = 0; i < sizeof names / sizeof *names && !has_comma; i++)
    has_comma = setlocale(LC_NUMERIC, names[i]) && strcmp(localeconv()->decimal_point, ",") == 0;
  if (has_comma) {
    JsonWriter writer = {0};
    ck_assert_str_eq(write_one(&writer, 2.5), "2.5");
    json_writer_free(&writer);
    JsonTree *tree = parsed("2.5");
    ck_assert(json_root(tree)->number == 2.5);
    json_free(tree);
  } else {
    tests_skip("no locale with a decimal comma is installed");
  }
  setlocale(LC_NUMERIC, old);
  free(old);
}
END_TEST

START_TEST(utf8_check) {
  ck_assert(json_is_utf8("", 0));
  ck_assert(json_is_utf8("a\xc3\xa9\xe2\x82\xac\xf0\x9d\x84\x9e\xed\x9f\xbf\xf4\x8f\xbf\xbf", 17));
  ck_assert(!json_is_utf8("a\xc3", 2));
  ck_assert(!json_is_utf8("\xed\xa0\x80", 3));
}
END_TEST

Suite *json_suite(void);
Suite *json_suite(void) {
  Suite *suite = suite_create("json");
  TCase *tests = tcase_create("json");
  tcase_add_test(tests, reads_every_kind);
  tcase_add_test(tests, integers_are_exact);
  tcase_add_test(tests, strings_are_unescaped);
  tcase_add_test(tests, malformed_text_is_refused_with_its_place);
  tcase_add_test(tests, every_cut_is_refused);
  tcase_add_test(tests, nesting_has_a_limit);
  tcase_add_test(tests, duplicates_are_found_in_large_objects);
  tcase_add_test(tests, doubles_are_written_shortest_and_exact);
  tcase_add_test(tests, writer_escapes_and_separates);
  tcase_add_test(tests, numbers_do_not_depend_on_the_locale);
  tcase_add_test(tests, utf8_check);
  suite_add_tcase(suite, tests);
  return suite;
}
