// json - a strict reader (RFC 8259) and a writer of JSON.
//
// The reader builds a tree in one arena. It refuses what JSON does not allow, and beyond that
// duplicate keys, the character U+0000 (so that every string is a C string), numbers that overflow
// a double, and nesting deeper than JSON_DEPTH. Numbers do not depend on the locale.
#ifndef RILLE_CORE_JSON_H
#define RILLE_CORE_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { JSON_DEPTH = 64 };

// X(NAME, words): the kinds of values, and how messages call them.
#define JSON_KIND_LIST(X)  \
  X(NULL, "null")          \
  X(BOOL, "true or false") \
  X(NUMBER, "a number")    \
  X(STRING, "a string")    \
  X(ARRAY, "an array")     \
  X(OBJECT, "an object")

typedef enum JsonKind {
#define X(NAME, words) JSON_##NAME,
  JSON_KIND_LIST(X)
#undef X
} JsonKind;

// The words for a kind ("an array").
const char *json_kind_words(JsonKind kind);

typedef struct JsonValue JsonValue;
struct JsonValue {
  JsonKind kind;
  bool boolean;
  bool is_integer;       // NUMBER without fraction and exponent that fits: `integer` is exact
  const char *key;       // its name, for a member of an object, else NULL
  const JsonValue *next; // its next sibling in the array or object
  int64_t count;         // children of an ARRAY or OBJECT, bytes of a STRING
  int64_t integer;
  union {
    double number;          // NUMBER, always
    const char *string;     // STRING: UTF-8, ends with a NUL
    const JsonValue *first; // ARRAY, OBJECT: children in the order of the text
  };
};

typedef struct JsonTree JsonTree;

// Reads the whole text (UTF-8, need not end with a NUL, not kept). Errors: EFORMAT "line 1 column
// 17: expected ..., found ...".
Status json_parse(JsonTree **out, const char *text, size_t size);

const JsonValue *json_root(const JsonTree *tree);

// Frees the tree with all its values; NULL is ignored.
void json_free(JsonTree *tree);

// The member of an object, NULL if there is none or `object` is no object. Linear in the members.
const JsonValue *json_get(const JsonValue *object, const char *key);

// True if the bytes are well-formed UTF-8 (no overlong forms, no surrogates).
bool json_is_utf8(const char *text, size_t size);

// A growing text. Zero-initialise; commas and colons come by themselves. A failed allocation is
// remembered and reported by json_finish.
typedef struct JsonWriter {
  char *text; // size bytes, no final NUL before json_finish
  size_t size, capacity;
  int depth;
  bool has_failed;
  bool after_key;
  bool has_items[JSON_DEPTH];
} JsonWriter;

// An array or object takes values until its end; in an object json_key goes before each value.
// Nesting deeper than JSON_DEPTH is a bug (assert).
void json_begin_object(JsonWriter *writer);
void json_end_object(JsonWriter *writer);
void json_begin_array(JsonWriter *writer);
void json_end_array(JsonWriter *writer);
void json_key(JsonWriter *writer, const char *key);

// Bytes that are not UTF-8 become U+FFFD.
void json_string(JsonWriter *writer, const char *string);
void json_int(JsonWriter *writer, int64_t value);
void json_bool(JsonWriter *writer, bool value);
void json_null(JsonWriter *writer);

// The shortest decimal that reads back as the same double; null if it is not finite.
void json_double(JsonWriter *writer, double value);

// *text[*size], followed by a NUL, is the writer's until json_writer_free. size may be NULL.
Status json_finish(JsonWriter *writer, const char **text, size_t *size);

// Empties the writer but keeps its memory, for the next text.
void json_writer_reset(JsonWriter *writer);
void json_writer_free(JsonWriter *writer);

#ifdef __cplusplus
}
#endif
#endif
