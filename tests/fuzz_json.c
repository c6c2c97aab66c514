// Fuzzes core/json: no text may crash the reader, and what it accepts must survive being written
// and read again.
#include "core/json.h"

#include <stdlib.h>

static void write_value(JsonWriter *writer, const JsonValue *value) {
  switch (value->kind) {
  case JSON_NULL: json_null(writer); break;
  case JSON_BOOL: json_bool(writer, value->boolean); break;
  case JSON_NUMBER:
    if (value->is_integer) {
      json_int(writer, value->integer);
    } else {
      json_double(writer, value->number);
    }
    break;
  case JSON_STRING: json_string(writer, value->string); break;
  case JSON_ARRAY:
  case JSON_OBJECT:
    if (value->kind == JSON_OBJECT) {
      json_begin_object(writer);
    } else {
      json_begin_array(writer);
    }
    for (const JsonValue *child = value->first; child; child = child->next) {
      if (child->key) json_key(writer, child->key);
      write_value(writer, child);
    }
    if (value->kind == JSON_OBJECT) {
      json_end_object(writer);
    } else {
      json_end_array(writer);
    }
    break;
  }
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size);
int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size) {
  JsonTree *tree, *again;
  if (json_parse(&tree, (const char *)data, size) != ST_OK) return 0;
  JsonWriter writer = {0};
  const char *text;
  size_t n;
  write_value(&writer, json_root(tree));
  if (json_finish(&writer, &text, &n) != ST_OK || json_parse(&again, text, n) != ST_OK) abort();
  json_free(again);
  json_writer_free(&writer);
  json_free(tree);
  return 0;
}
