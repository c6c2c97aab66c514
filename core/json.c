// json - a strict reader (RFC 8259) and a writer of JSON.
//
// The reader is a recursive descent over the text; values and strings go into blocks of an arena
// that is freed as a whole.
#include "core/json.h"

#include "core/hash.h"

#include <assert.h>
#include <errno.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __APPLE__
#include <xlocale.h>
#endif

enum { BLOCK_BYTES = 1 << 14, NUMBER_BYTES = 512, SMALL_OBJECT = 16 };

typedef struct Block {
  struct Block *next;
  size_t used, size;
  max_align_t data[];
} Block;

struct JsonTree {
  Block *blocks; // the newest first
  const JsonValue *root;
};

typedef struct Parser {
  const char *text;
  size_t size, at;
  int depth;
  JsonTree *tree;
  locale_t c_locale; // numbers are read in it
} Parser;

const char *json_kind_words(JsonKind kind) {
  switch (kind) {
#define X(NAME, words) \
  case JSON_##NAME: return words;
    JSON_KIND_LIST(X)
#undef X
  }
  return "nothing";
}

static void *arena_take(JsonTree *tree, size_t bytes) {
  bytes = (bytes + sizeof(max_align_t) - 1) / sizeof(max_align_t) * sizeof(max_align_t);
  Block *block = tree->blocks;
  if (!block || block->size - block->used < bytes) {
    size_t size = bytes > BLOCK_BYTES ? bytes : BLOCK_BYTES;
    block = malloc(sizeof *block + size);
    if (!block) return NULL;
    *block = (Block){tree->blocks, 0, size};
    tree->blocks = block;
  }
  void *memory = (char *)block->data + block->used;
  block->used += bytes;
  return memory;
}

// ---- errors ---------------------------------------------------------------------------------

static Status fail_at(const Parser *parser, size_t at, const char *expected) {
  size_t line = 1, column = 1;
  for (size_t i = 0; i < at; i++) {
    column = parser->text[i] == '\n' ? 1 : column + 1;
    line += parser->text[i] == '\n';
  }
  char found[32] = "the end of the text";
  if (at < parser->size) {
    unsigned char c = (unsigned char)parser->text[at];
    snprintf(found, sizeof found, c > 0x20 && c < 0x7f ? "'%c'" : "the byte 0x%02x", c);
  }
  return fail(ST_EFORMAT, "line %zu column %zu: expected %s, found %s", line, column, expected,
              found);
}

static Status fail_memory(void) { return fail(ST_ENOMEM, "no memory for a JSON text"); }

// ---- UTF-8 ----------------------------------------------------------------------------------

// Bytes of the well-formed character at the start of text[size], 0 if there is none.
// Unicode 15, table 3-7.
static size_t utf8_length(const unsigned char *text, size_t size) {
  unsigned char c = text[0];
  if (c < 0x80) return 1;
  size_t n = c >= 0xc2 && c <= 0xdf ? 2 : (c & 0xf0) == 0xe0 ? 3 : c >= 0xf0 && c <= 0xf4 ? 4 : 0;
  if (n == 0 || n > size) return 0;
  unsigned char low = c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80;
  unsigned char high = c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;
  if (text[1] < low || text[1] > high) return 0;
  for (size_t i = 2; i < n; i++)
    if ((text[i] & 0xc0) != 0x80) return 0;
  return n;
}

bool json_is_utf8(const char *text, size_t size) {
  for (size_t at = 0; at < size;) {
    size_t n = utf8_length((const unsigned char *)text + at, size - at);
    if (n == 0) return false;
    at += n;
  }
  return true;
}

static size_t utf8_put(char *out, uint32_t c) {
  static const unsigned char lead[] = {0, 0, 0xc0, 0xe0, 0xf0};
  size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
  for (size_t i = n - 1; i > 0; i--, c >>= 6) out[i] = (char)(0x80 | (c & 0x3f));
  out[0] = (char)(lead[n] | c);
  return n;
}

// ---- the reader -----------------------------------------------------------------------------

static Status parse_value(Parser *parser, JsonValue *value);

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

static char peek(const Parser *parser) {
  return parser->at < parser->size ? parser->text[parser->at] : 0;
}

static void skip_space(Parser *parser) {
  while (parser->at < parser->size && memchr(" \t\n\r", parser->text[parser->at], 4)) parser->at++;
}

static Status parse_word(Parser *parser, const char *word) {
  for (; *word; word++, parser->at++)
    if (peek(parser) != *word) return fail_at(parser, parser->at, "null, true or false");
  return ST_OK;
}

static Status parse_digits(Parser *parser) {
  if (!is_digit(peek(parser))) return fail_at(parser, parser->at, "a digit");
  while (is_digit(peek(parser))) parser->at++;
  return ST_OK;
}

static Status parse_number(Parser *parser, JsonValue *value) {
  size_t start = parser->at;
  bool is_integer = true;
  if (peek(parser) == '-') parser->at++;
  if (peek(parser) == '0') {
    parser->at++;
    if (is_digit(peek(parser))) return fail_at(parser, parser->at, "no digit after a leading 0");
  } else {
    TRY(parse_digits(parser));
  }
  if (peek(parser) == '.') {
    is_integer = false;
    parser->at++;
    TRY(parse_digits(parser));
  }
  if (peek(parser) == 'e' || peek(parser) == 'E') {
    is_integer = false;
    parser->at++;
    if (peek(parser) == '+' || peek(parser) == '-') parser->at++;
    TRY(parse_digits(parser));
  }
  char copy[NUMBER_BYTES];
  size_t n = parser->at - start;
  if (n >= sizeof copy) return fail_at(parser, start, "a number of at most 511 characters");
  memcpy(copy, parser->text + start, n);
  copy[n] = 0;
  value->kind = JSON_NUMBER;
  value->number = strtod_l(copy, NULL, parser->c_locale);
  if (!isfinite(value->number)) return fail_at(parser, start, "a number that a double can hold");
  errno = 0;
  value->integer = is_integer ? strtoll(copy, NULL, 10) : 0;
  value->is_integer = is_integer && errno == 0;
  if (!value->is_integer) value->integer = 0;
  return ST_OK;
}

// The four hexadecimal digits after \u.
static Status parse_hex(Parser *parser, uint32_t *out) {
  uint32_t code = 0;
  for (int i = 0; i < 4; i++, parser->at++) {
    static const char digits[] = "0123456789abcdef0123456789ABCDEF";
    char c = peek(parser);
    const char *digit = c ? strchr(digits, c) : NULL;
    if (!digit) return fail_at(parser, parser->at, "4 hexadecimal digits");
    code = code << 4 | ((uint32_t)(digit - digits) & 15);
  }
  *out = code;
  return ST_OK;
}

// What follows a backslash; *n bytes at out.
static Status parse_escape(Parser *parser, char *out, size_t *n) {
  static const char names[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
  char c = peek(parser);
  const char *name = c ? strchr(names, c) : NULL;
  if (name) {
    parser->at++;
    out[0] = meanings[name - names];
    *n = 1;
    return ST_OK;
  }
  if (c != 'u') return fail_at(parser, parser->at, "one of \"\\/bfnrtu after a backslash");
  size_t start = parser->at++;
  uint32_t code = 0, low = 0;
  TRY(parse_hex(parser, &code));
  if (code == 0) return fail_at(parser, start, "no \\u0000 in a string");
  if (code >= 0xd800 && code <= 0xdfff) {
    bool is_pair = code < 0xdc00 && parser->size - parser->at >= 6 &&
                   memcmp(parser->text + parser->at, "\\u", 2) == 0;
    if (!is_pair) return fail_at(parser, start, "a pair of surrogates \\ud8xx\\udcxx");
    parser->at += 2;
    TRY(parse_hex(parser, &low));
    if (low < 0xdc00 || low > 0xdfff)
      return fail_at(parser, start, "a pair of surrogates \\ud8xx\\udcxx");
    code = 0x10000 + ((code - 0xd800) << 10 | (low - 0xdc00));
  }
  *n = utf8_put(out, code);
  return ST_OK;
}

// The end of the string that starts after the quote at `at`: bytes up to the closing quote.
static size_t string_bytes(const Parser *parser, size_t at) {
  size_t end = at;
  while (end < parser->size && parser->text[end] != '"')
    end += parser->text[end] == '\\' && end + 1 < parser->size ? 2 : 1;
  return end - at;
}

// At a quote. An escape is never shorter than what it stands for, so the raw bytes bound the size.
static Status parse_string(Parser *parser, const char **out, int64_t *size) {
  if (peek(parser) != '"') return fail_at(parser, parser->at, "a string");
  parser->at++;
  char *string = arena_take(parser->tree, string_bytes(parser, parser->at) + 1);
  if (!string) return fail_memory();
  size_t n = 0, step = 0;
  while (peek(parser) != '"') {
    if (parser->at >= parser->size) return fail_at(parser, parser->at, "'\"' to end the string");
    unsigned char c = (unsigned char)parser->text[parser->at];
    if (c < 0x20) return fail_at(parser, parser->at, "an escape instead of a control character");
    if (c == '\\') {
      parser->at++;
      TRY(parse_escape(parser, string + n, &step));
    } else {
      const char *from = parser->text + parser->at;
      step = utf8_length((const unsigned char *)from, parser->size - parser->at);
      if (step == 0) return fail_at(parser, parser->at, "UTF-8");
      memcpy(string + n, from, step);
      parser->at += step;
    }
    n += step;
  }
  parser->at++;
  string[n] = 0;
  *out = string;
  if (size) *size = (int64_t)n;
  return ST_OK;
}

static Status fail_duplicate(const Parser *parser, const char *key) {
  char expected[160];
  snprintf(expected, sizeof expected, "each key once, but \"%.100s\" is there twice", key);
  return fail_at(parser, parser->at - 1, expected);
}

// The key that stands twice in the object, through a hash table of its members' keys.
static Status check_keys(const Parser *parser, const JsonValue *object) {
  if (object->count <= SMALL_OBJECT) {
    for (const JsonValue *a = object->first; a; a = a->next)
      for (const JsonValue *b = a->next; b; b = b->next)
        if (strcmp(a->key, b->key) == 0) return fail_duplicate(parser, a->key);
    return ST_OK;
  }
  size_t size = 1;
  while (size < 2 * (size_t)object->count) size *= 2;
  const char **slots = calloc(size, sizeof *slots);
  if (!slots) return fail_memory();
  Status status = ST_OK;
  for (const JsonValue *member = object->first; member && status == ST_OK; member = member->next) {
    size_t slot = hash_string(member->key, size) & (size - 1);
    while (slots[slot] && strcmp(slots[slot], member->key) != 0) slot = (slot + 1) & (size - 1);
    if (slots[slot]) status = fail_duplicate(parser, member->key);
    slots[slot] = member->key;
  }
  free(slots);
  return status;
}

// After the opening bracket.
static Status parse_children(Parser *parser, JsonValue *parent) {
  bool is_object = parent->kind == JSON_OBJECT;
  char close = is_object ? '}' : ']';
  const JsonValue **tail = &parent->first;
  for (skip_space(parser); peek(parser) != close || parent->count > 0; skip_space(parser)) {
    JsonValue *child = arena_take(parser->tree, sizeof *child);
    if (!child) return fail_memory();
    *child = (JsonValue){0};
    if (is_object) {
      if (peek(parser) != '"')
        return fail_at(parser, parser->at, parent->count > 0 ? "a key" : "a key or '}'");
      TRY(parse_string(parser, &child->key, NULL));
      skip_space(parser);
      if (peek(parser) != ':') return fail_at(parser, parser->at, "':'");
      parser->at++;
      skip_space(parser);
    }
    TRY(parse_value(parser, child));
    *tail = child;
    tail = &child->next;
    parent->count++;
    skip_space(parser);
    if (peek(parser) == close) break;
    if (peek(parser) != ',')
      return fail_at(parser, parser->at, is_object ? "',' or '}'" : "',' or ']'");
    parser->at++;
  }
  parser->at++;
  return is_object ? check_keys(parser, parent) : ST_OK;
}

static Status parse_value(Parser *parser, JsonValue *value) {
  char c = peek(parser);
  switch (c) {
  case '{':
  case '[':
    if (++parser->depth > JSON_DEPTH) return fail_at(parser, parser->at, "at most 64 levels");
    value->kind = c == '{' ? JSON_OBJECT : JSON_ARRAY;
    value->first = NULL;
    parser->at++;
    TRY(parse_children(parser, value));
    parser->depth--;
    return ST_OK;
  case '"': value->kind = JSON_STRING; return parse_string(parser, &value->string, &value->count);
  case 'n': value->kind = JSON_NULL; return parse_word(parser, "null");
  case 't':
  case 'f':
    value->kind = JSON_BOOL;
    value->boolean = c == 't';
    return parse_word(parser, c == 't' ? "true" : "false");
  default:
    if (c != '-' && !is_digit(c)) return fail_at(parser, parser->at, "a value");
    return parse_number(parser, value);
  }
}

static Status parse_text(Parser *parser) {
  JsonValue *root = arena_take(parser->tree, sizeof *root);
  if (!root) return fail_memory();
  *root = (JsonValue){0};
  skip_space(parser);
  TRY(parse_value(parser, root));
  skip_space(parser);
  if (parser->at < parser->size) return fail_at(parser, parser->at, "the end of the text");
  parser->tree->root = root;
  return ST_OK;
}

Status json_parse(JsonTree **out, const char *text, size_t size) {
  Parser parser = {.text = text, .size = size};
  Status status = ST_OK;
  parser.tree = calloc(1, sizeof *parser.tree);
  parser.c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
  if (!parser.tree || !parser.c_locale) {
    status = fail_memory();
  } else {
    status = parse_text(&parser);
  }
  if (parser.c_locale) freelocale(parser.c_locale);
  if (status == ST_OK) {
    *out = parser.tree;
  } else {
    json_free(parser.tree);
  }
  return status;
}

const JsonValue *json_root(const JsonTree *tree) { return tree->root; }

void json_free(JsonTree *tree) {
  if (!tree) return;
  for (Block *block = tree->blocks; block;) {
    Block *next = block->next;
    free(block);
    block = next;
  }
  free(tree);
}

const JsonValue *json_get(const JsonValue *object, const char *key) {
  if (!object || object->kind != JSON_OBJECT) return NULL;
  for (const JsonValue *member = object->first; member; member = member->next)
    if (strcmp(member->key, key) == 0) return member;
  return NULL;
}

// ---- the writer -----------------------------------------------------------------------------

static void put(JsonWriter *writer, const char *bytes, size_t n) {
  if (writer->has_failed) return;
  if (writer->size + n + 1 > writer->capacity) {
    size_t capacity = 2 * writer->capacity + n + 64;
    char *text = realloc(writer->text, capacity);
    if (!text) {
      writer->has_failed = true;
      return;
    }
    writer->text = text;
    writer->capacity = capacity;
  }
  memcpy(writer->text + writer->size, bytes, n);
  writer->size += n;
}

static void put_words(JsonWriter *writer, const char *words) { put(writer, words, strlen(words)); }

// The comma before every item but the first of a level; none after a key.
static void before_item(JsonWriter *writer) {
  if (writer->depth > 0 && !writer->after_key) {
    if (writer->has_items[writer->depth - 1]) put(writer, ",", 1);
    writer->has_items[writer->depth - 1] = true;
  }
  writer->after_key = false;
}

static void open_level(JsonWriter *writer, const char *bracket) {
  before_item(writer);
  put(writer, bracket, 1);
  assert(writer->depth < JSON_DEPTH);
  writer->has_items[writer->depth++] = false;
}

static void close_level(JsonWriter *writer, const char *bracket) {
  assert(writer->depth > 0 && !writer->after_key);
  writer->depth--;
  put(writer, bracket, 1);
}

void json_begin_object(JsonWriter *writer) { open_level(writer, "{"); }
void json_end_object(JsonWriter *writer) { close_level(writer, "}"); }
void json_begin_array(JsonWriter *writer) { open_level(writer, "["); }
void json_end_array(JsonWriter *writer) { close_level(writer, "]"); }

static void put_string(JsonWriter *writer, const char *string) {
  size_t size = strlen(string);
  put(writer, "\"", 1);
  for (size_t at = 0, n; at < size; at += n) {
    unsigned char c = (unsigned char)string[at];
    char escape[8];
    n = utf8_length((const unsigned char *)string + at, size - at);
    if (c == '"' || c == '\\') {
      escape[0] = '\\', escape[1] = (char)c;
      put(writer, escape, 2);
    } else if (c < 0x20 || c == 0x7f) {
      snprintf(escape, sizeof escape, "\\u%04x", c);
      put(writer, escape, 6);
    } else if (n == 0) {
      put(writer, "\xef\xbf\xbd", 3);
      n = 1;
    } else {
      put(writer, string + at, n);
    }
  }
  put(writer, "\"", 1);
}

void json_key(JsonWriter *writer, const char *key) {
  assert(!writer->after_key);
  before_item(writer);
  put_string(writer, key);
  put(writer, ":", 1);
  writer->after_key = true;
}

void json_string(JsonWriter *writer, const char *string) {
  before_item(writer);
  put_string(writer, string);
}

void json_int(JsonWriter *writer, int64_t value) {
  char text[32];
  snprintf(text, sizeof text, "%lld", (long long)value);
  before_item(writer);
  put_words(writer, text);
}

void json_bool(JsonWriter *writer, bool value) {
  before_item(writer);
  put_words(writer, value ? "true" : "false");
}

void json_null(JsonWriter *writer) {
  before_item(writer);
  put_words(writer, "null");
}

void json_double(JsonWriter *writer, double value) {
  char text[64];
  if (!isfinite(value)) {
    json_null(writer);
    return;
  }
  for (int digits = 15; digits <= 17; digits++) { // 17 digits always suffice
    snprintf(text, sizeof text, "%.*g", digits, value);
    if (strtod(text, NULL) == value) break;
  }
  // The locale's decimal separator, of one or more bytes, becomes a point.
  size_t n = 0;
  for (const char *c = text; *c; c++) {
    if (strchr("0123456789+-e", *c)) {
      text[n++] = *c;
    } else if (n == 0 || text[n - 1] != '.') {
      text[n++] = '.';
    }
  }
  before_item(writer);
  put(writer, text, n);
}

Status json_finish(JsonWriter *writer, const char **text, size_t *size) {
  assert(writer->depth == 0 && !writer->after_key);
  put(writer, "", 0);
  if (writer->has_failed) return fail_memory();
  writer->text[writer->size] = 0;
  *text = writer->text;
  if (size) *size = writer->size;
  return ST_OK;
}

void json_writer_reset(JsonWriter *writer) {
  writer->size = 0;
  writer->depth = 0;
  writer->after_key = writer->has_failed = false;
}

void json_writer_free(JsonWriter *writer) {
  free(writer->text);
  *writer = (JsonWriter){0};
}
