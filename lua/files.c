// files - rille.core: safetensors, JSON, files that appear whole, directories.
#include "lua/binding.h"

#include "core/file.h"
#include "core/hash.h"
#include "core/json.h"
#include "core/safetensors.h"
#include "core/weights.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

// ---- JSON

static void encode(lua_State *L, Rille *r, JsonWriter *w, int depth);

// A table with an array part is an array; any other an object, its keys sorted.
static void encode_table(lua_State *L, Rille *r, JsonWriter *w, int depth) {
  int t = lua_gettop(L);
  int64_t n = (int64_t)lua_rawlen(L, t);
  if (n > 0) {
    json_begin_array(w);
    for (int64_t i = 1; i <= n; i++) {
      lua_rawgeti(L, t, i);
      encode(L, r, w, depth + 1);
      lua_pop(L, 1);
    }
    json_end_array(w);
    return;
  }
  lua_newtable(L); // the keys, to be sorted: pairs() has no order
  int keys = lua_gettop(L), n_keys = 0;
  for (lua_pushnil(L); lua_next(L, t);) {
    lua_pop(L, 1);
    if (lua_type(L, -1) != LUA_TSTRING) raise_value(L, r, "json: keys of an object are strings");
    lua_pushvalue(L, -1);
    lua_rawseti(L, keys, ++n_keys);
  }
  lua_getglobal(L, "table");
  lua_getfield(L, -1, "sort");
  lua_pushvalue(L, keys);
  lua_call(L, 1, 0);
  lua_pop(L, 1);
  json_begin_object(w);
  for (int i = 1; i <= n_keys; i++) {
    lua_rawgeti(L, keys, i);
    json_key(w, lua_tostring(L, -1));
    lua_rawget(L, t);
    encode(L, r, w, depth + 1);
    lua_pop(L, 1);
  }
  json_end_object(w);
  lua_pop(L, 1);
}

// The value on top.
static void encode(lua_State *L, Rille *r, JsonWriter *w, int depth) {
  if (depth >= JSON_DEPTH - 1) raise_value(L, r, "json: nested deeper than %d", JSON_DEPTH);
  luaL_checkstack(L, 8, "json");
  switch (lua_type(L, -1)) {
  case LUA_TNIL: json_null(w); return;
  case LUA_TBOOLEAN: json_bool(w, lua_toboolean(L, -1)); return;
  case LUA_TSTRING: json_string(w, lua_tostring(L, -1)); return;
  case LUA_TTABLE: encode_table(L, r, w, depth); return;
  case LUA_TNUMBER:
    if (lua_isinteger(L, -1))
      json_int(w, lua_tointeger(L, -1));
    else
      json_double(w, lua_tonumber(L, -1));
    return;
  default: raise_value(L, r, "json: a %s has no form in JSON", luaL_typename(L, -1));
  }
}

static const char WRITER[] = "rille.json writer"; // a JsonWriter, freed also on errors

static int writer_gc(lua_State *L) {
  json_writer_free(lua_touserdata(L, 1));
  return 0;
}

// json_encode(value) -> text. NaN and infinities become null.
static int json_encode(lua_State *L) {
  Rille *r = binding_of(L);
  lua_settop(L, 1); // nothing is nil
  JsonWriter *w = box_push(L, WRITER, sizeof *w);
  lua_pushvalue(L, 1);
  encode(L, r, w, 0);
  const char *text;
  size_t size;
  check_status(L, r, json_finish(w, &text, &size));
  lua_pushlstring(L, text, size);
  return 1;
}

static void push_json(lua_State *L, const JsonValue *value) {
  luaL_checkstack(L, 4, "json");
  switch (value->kind) {
  case JSON_NULL: lua_pushnil(L); return;
  case JSON_BOOL: lua_pushboolean(L, value->boolean); return;
  case JSON_NUMBER:
    if (value->is_integer)
      lua_pushinteger(L, value->integer);
    else
      lua_pushnumber(L, value->number);
    return;
  case JSON_STRING: lua_pushlstring(L, value->string, (size_t)value->count); return;
  case JSON_ARRAY:
  case JSON_OBJECT: break;
  }
  lua_newtable(L);
  int64_t i = 0;
  for (const JsonValue *child = value->first; child; child = child->next) {
    push_json(L, child);
    if (child->key)
      lua_setfield(L, -2, child->key);
    else
      lua_rawseti(L, -2, ++i);
  }
}

// Protected: the tree is freed whatever happens.
static int push_tree(lua_State *L) {
  const JsonTree *tree = lua_touserdata(L, 1);
  push_json(L, json_root(tree));
  return 1;
}

// json_decode(text) -> value; null is nil.
static int json_decode(lua_State *L) {
  Rille *r = binding_of(L);
  string_check(L, r, 1, "json_decode: the text");
  size_t size;
  const char *text = lua_tolstring(L, 1, &size);
  JsonTree *tree;
  check_status(L, r, json_parse(&tree, text, size));
  lua_pushcfunction(L, push_tree);
  lua_pushlightuserdata(L, tree);
  int failed = lua_pcall(L, 1, 1, 0);
  json_free(tree);
  return failed ? lua_error(L) : 1;
}

// ---- files and directories

// write_atomic(path, text): the file appears whole, or the old one stays.
static int write_atomic(lua_State *L) {
  Rille *r = binding_of(L);
  size_t size;
  const char *path = string_check(L, r, 1, "write_atomic: path");
  string_check(L, r, 2, "write_atomic: the text");
  const char *text = lua_tolstring(L, 2, &size);
  FileWriter *writer;
  check_status(L, r, file_writer_open(&writer, path, NULL));
  Status status = file_write(writer, text, size);
  if (status != ST_OK)
    file_abort(writer);
  else
    status = file_commit(writer);
  check_status(L, r, status);
  return 0;
}

// make_directory(path): with all above it; one that exists is fine.
static int make_directory(lua_State *L) {
  Rille *r = binding_of(L);
  char path[4096];
  const char *given = string_check(L, r, 1, "make_directory: path");
  if (strlen(given) >= sizeof path) raise_value(L, r, "the path %s is too long", given);
  strcpy(path, given);
  for (char *at = path + 1;; at++) {
    if (*at != '/' && *at != 0) continue;
    char end = *at;
    *at = 0;
    struct stat info;
    if (mkdir(path, 0777) != 0 &&
        !(errno == EEXIST && stat(path, &info) == 0 && S_ISDIR(info.st_mode)))
      check_status(L, r, fail(ST_EIO, "cannot make the directory %s: %s", path, strerror(errno)));
    if (end == 0) return 0;
    *at = end;
  }
}

// ---- safetensors

static const char SAFETENSORS[] = "rille.safetensors file"; // a box with a Safetensors *

static Safetensors *file_of(lua_State *L, Rille *r) {
  Safetensors **box = box_check(L, r, 1, SAFETENSORS);
  if (!*box) raise_value(L, r, "the safetensors file is closed");
  return *box;
}

static int open_safetensors(lua_State *L) {
  Rille *r = binding_of(L);
  const char *path = string_check(L, r, 1, "safetensors_open: path");
  Safetensors **box = box_push(L, SAFETENSORS, sizeof *box);
  check_status(L, r, safetensors_open(box, path));
  return 1;
}

static int close_safetensors(lua_State *L) {
  Safetensors **box = box_check(L, binding_of(L), 1, SAFETENSORS);
  safetensors_close(*box);
  *box = NULL;
  return 0;
}

static int names(lua_State *L) {
  Safetensors *file = file_of(L, binding_of(L));
  lua_newtable(L);
  for (int64_t i = 0; i < safetensors_count(file); i++) {
    lua_pushstring(L, safetensors_at(file, i)->name);
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

static int metadata(lua_State *L) {
  Safetensors *file = file_of(L, binding_of(L));
  lua_newtable(L);
  for (int64_t i = 0; i < safetensors_n_metadata(file); i++) {
    SafetensorsPair pair = safetensors_metadata_at(file, i);
    lua_pushstring(L, pair.value);
    lua_setfield(L, -2, pair.key);
  }
  return 1;
}

// file:read(name) -> a tensor with a copy of the values.
static int read_tensor(lua_State *L) {
  Rille *r = binding_of(L);
  Safetensors *file = file_of(L, r);
  const char *name = string_check(L, r, 2, "read: the name");
  const SafetensorsEntry *entry = safetensors_find(file, name);
  if (!entry) raise_value(L, r, "there is no tensor %s in the file", name);
  if (!entry->is_readable)
    raise_value(L, r, "tensor %s has dtype %s, which Rille cannot hold", name, entry->dtype_name);
  if (entry->n_dims > MAX_DIMS)
    raise_value(L, r, "tensor %s has %d dimensions, at most %d are possible", name, entry->n_dims,
                MAX_DIMS);
  Tensor *t;
  check_status(
      L, r, tensor_from_data(r->ctx, entry->dtype, entry->n_dims, entry->shape, entry->data, &t));
  push_tensor(L, r, t);
  return 1;
}

// file:describe(name) -> dtype, {dimensions}, without reading a value; the dtype as the file names
// it where Rille has no such type. Nothing for a name that is not there.
static int describe_tensor(lua_State *L) {
  Rille *r = binding_of(L);
  const char *name = string_check(L, r, 2, "describe: the name");
  const SafetensorsEntry *entry = safetensors_find(file_of(L, r), name);
  if (!entry) return 0;
  lua_pushstring(L, entry->is_readable ? dtype_name(entry->dtype) : entry->dtype_name);
  lua_createtable(L, entry->n_dims, 0);
  for (int d = 0; d < entry->n_dims; d++) {
    lua_pushinteger(L, entry->shape[d]);
    lua_rawseti(L, -2, d + 1);
  }
  return 2;
}

// What is to be written, while Lua errors are still possible; freed by Lua.
typedef struct WriteList {
  int64_t n, n_pairs;
  SafetensorsSpec *specs;
  Tensor **tensors;
  SafetensorsPair *pairs;
} WriteList;

// Reads {key = value} at 3, if it is there.
static void read_metadata(lua_State *L, Rille *r, WriteList *list) {
  if (!lua_istable(L, 3)) return;
  for (lua_pushnil(L); lua_next(L, 3); lua_pop(L, 1)) list->n_pairs++;
  list->pairs = lua_newuserdatauv(L, (size_t)list->n_pairs * sizeof *list->pairs + 1, 0);
  int64_t i = 0;
  for (lua_pushnil(L); lua_next(L, 3); lua_pop(L, 1)) {
    if (lua_type(L, -2) != LUA_TSTRING || lua_type(L, -1) != LUA_TSTRING)
      raise_value(L, r, "save: metadata maps strings to strings");
    list->pairs[i++] = (SafetensorsPair){lua_tostring(L, -2), lua_tostring(L, -1)};
  }
}

// Reads {{name, tensor}, ...} at 2 and {key = value} at 3; everything lives in Lua's memory.
static WriteList read_list(lua_State *L, Rille *r) {
  table_check(L, r, 2, "save: the tensors");
  WriteList list = {.n = (int64_t)lua_rawlen(L, 2)};
  list.specs = lua_newuserdatauv(L, (size_t)list.n * sizeof *list.specs + 1, 0);
  list.tensors = lua_newuserdatauv(L, (size_t)list.n * sizeof *list.tensors + 1, 0);
  for (int64_t i = 0; i < list.n; i++) {
    lua_rawgeti(L, 2, i + 1);
    if (!lua_istable(L, -1)) raise_value(L, r, "save: entry %d is no {name, tensor}", (int)i + 1);
    lua_rawgeti(L, -1, 1);
    const char *name = lua_tostring(L, -1);
    if (!name) raise_value(L, r, "save: entry %d has no name", (int)i + 1);
    lua_rawgeti(L, -2, 2);
    Tensor *t = tensor_check(L, r, lua_gettop(L), name);
    list.tensors[i] = t;
    list.specs[i] = (SafetensorsSpec){name, t->dtype, t->ndim, t->shape};
    lua_pop(L, 3);
  }
  read_metadata(L, r, &list);
  return list;
}

// Reads {{name, dtype, {dimensions}}, ...} at 2 and {key = value} at 3, as read_list does.
static WriteList read_specs(lua_State *L, Rille *r) {
  table_check(L, r, 2, "safetensors_writer: the tensors");
  WriteList list = {.n = (int64_t)lua_rawlen(L, 2)};
  list.specs = lua_newuserdatauv(L, (size_t)list.n * sizeof *list.specs + 1, 0);
  int64_t(*shapes)[MAX_DIMS] = lua_newuserdatauv(L, (size_t)list.n * sizeof *shapes + 1, 0);
  for (int64_t i = 0; i < list.n; i++) {
    lua_rawgeti(L, 2, i + 1);
    table_check(L, r, -1, "safetensors_writer: an entry");
    lua_rawgeti(L, -1, 1);
    lua_rawgeti(L, -2, 2);
    lua_rawgeti(L, -3, 3);
    SafetensorsSpec *spec = &list.specs[i];
    spec->name = string_check(L, r, lua_gettop(L) - 2, "safetensors_writer: a name");
    const char *dtype = string_check(L, r, lua_gettop(L) - 1, "safetensors_writer: a dtype");
    check_status(L, r, dtype_from_name(&spec->dtype, dtype));
    table_check(L, r, -1, "safetensors_writer: a shape");
    lua_Unsigned n = lua_rawlen(L, -1);
    if (n > MAX_DIMS)
      raise_value(L, r, "safetensors_writer: at most %d dimensions are possible", MAX_DIMS);
    for (spec->n_dims = 0; spec->n_dims < (int)n; spec->n_dims++, lua_pop(L, 1)) {
      lua_rawgeti(L, -1, spec->n_dims + 1);
      shapes[i][spec->n_dims] = integer_check(L, r, -1, "safetensors_writer: a dimension");
    }
    spec->shape = shapes[i];
    lua_pop(L, 4);
  }
  read_metadata(L, r, &list);
  return list;
}

// The values of one tensor, contiguous, to the file.
static Status write_values(Rille *r, SafetensorsWriter *writer, int64_t i, Tensor *t) {
  Tensor *dense = t;
  TRY(tensor_alive(t));
  if (tensor_is_meta(t)) return fail(ST_EDEVICE, "save: a tensor on the meta device has no values");
  if (!tensor_contiguous(t)) {
    TensorSpec spec;
    tensor_spec(t, &spec);
    TRY(tensor_new(r->ctx, &r->ctx->cpu, &spec, MEM_WORKSPACE, &dense));
    Status status = tensor_assign(r->ctx, dense, t);
    if (status != ST_OK) {
      tensor_release(r->ctx, dense);
      return status;
    }
  }
  size_t bytes = (size_t)tensor_numel(t) * dtype_size(t->dtype);
  Status status = safetensors_write(writer, i, 0, tensor_data(dense), bytes);
  if (dense != t) tensor_release(r->ctx, dense);
  return status;
}

// The values of the tensor in argument 1 and how many bytes they take.
static const void *values_check(lua_State *L, Rille *r, const char *who, size_t *bytes) {
  Tensor *t = tensor_check(L, r, 1, who);
  if (t->param) check_status(L, r, param_place(r->ctx, t->param));
  check_status(L, r, tensor_alive(t));
  if (tensor_is_meta(t) || !tensor_contiguous(t))
    raise_value(L, r, "%s: row-major values are wanted", who);
  *bytes = (size_t)tensor_numel(t) * dtype_size(t->dtype);
  return tensor_data(t);
}

// digest(tensor, before) -> 64 bits over its values' bytes, row-major, that go on from `before`.
static int digest(lua_State *L) {
  Rille *r = binding_of(L);
  size_t bytes;
  int64_t before = integer_check(L, r, 2, "digest: what it goes on from");
  const void *values = values_check(L, r, "digest: the argument", &bytes);
  lua_pushinteger(L, (lua_Integer)hash_bytes(values, bytes, (uint64_t)before));
  return 1;
}

// bytes(tensor) -> its values as they are in memory, row-major.
static int bytes_of(lua_State *L) {
  size_t bytes;
  const void *values = values_check(L, binding_of(L), "bytes: the argument", &bytes);
  lua_pushlstring(L, values, bytes);
  return 1;
}

// safetensors_write(path, {{name, tensor}, ...}, {key = value})
static int write_safetensors(lua_State *L) {
  Rille *r = binding_of(L);
  const char *path = string_check(L, r, 1, "save: path");
  lua_settop(L, 3);
  WriteList list = read_list(L, r);
  Status status = ST_OK;
  for (int64_t i = 0; i < list.n && status == ST_OK; i++)
    if (list.tensors[i]->param) status = param_place(r->ctx, list.tensors[i]->param);
  check_status(L, r, status);
  SafetensorsWriter *writer;
  check_status(
      L, r,
      safetensors_writer_open(&writer, path, list.specs, list.n, list.pairs, list.n_pairs, NULL));
  for (int64_t i = 0; i < list.n && status == ST_OK; i++)
    status = write_values(r, writer, i, list.tensors[i]);
  if (status != ST_OK)
    safetensors_abort(writer);
  else
    status = safetensors_commit(writer);
  check_status(L, r, status);
  return 0;
}

// ---- a safetensors file, one tensor after the other

static const char TENSOR_WRITER[] = "rille.safetensors writer"; // a box with a SafetensorsWriter *

// safetensors_writer(path, {{name, dtype, {dimensions}}, ...}, {key = value}) -> a writer. The file
// appears with commit(); without it there is none.
static int open_writer(lua_State *L) {
  Rille *r = binding_of(L);
  const char *path = string_check(L, r, 1, "safetensors_writer: path");
  lua_settop(L, 3);
  WriteList list = read_specs(L, r);
  SafetensorsWriter **box = box_push(L, TENSOR_WRITER, sizeof *box);
  check_status(
      L, r, safetensors_writer_open(box, path, list.specs, list.n, list.pairs, list.n_pairs, NULL));
  return 1;
}

static int abort_writer(lua_State *L) {
  SafetensorsWriter **box = box_check(L, binding_of(L), 1, TENSOR_WRITER);
  safetensors_abort(*box);
  *box = NULL;
  return 0;
}

static SafetensorsWriter **writer_of(lua_State *L, Rille *r) {
  SafetensorsWriter **box = box_check(L, r, 1, TENSOR_WRITER);
  if (!*box) raise_value(L, r, "the safetensors file is written or given up");
  return box;
}

// Values that begin at index `at` of dimension `dim` of a whole that is `full` long there, its
// other dimensions theirs. t: row-major.
static Status write_part(SafetensorsWriter *writer, int64_t i, const Tensor *t, int dim, int64_t at,
                         int64_t full) {
  int64_t n_rows = 1, inner = (int64_t)dtype_size(t->dtype);
  for (int d = 0; d < dim; d++) n_rows *= t->shape[d];
  for (int d = dim + 1; d < t->ndim; d++) inner *= t->shape[d];
  size_t bytes = (size_t)(t->shape[dim] * inner);
  const char *data = tensor_data(t);
  for (int64_t row = 0; row < n_rows; row++)
    TRY(safetensors_write(writer, i, (row * full + at) * inner, data + (size_t)row * bytes, bytes));
  return ST_OK;
}

// writer:write(i, tensor): the values of entry i (from 1); writer:write(i, tensor, dim, at, full):
// of its part that begins at index `at` of a dimension that is `full` long.
static int write_entry(lua_State *L) {
  Rille *r = binding_of(L);
  SafetensorsWriter *writer = *writer_of(L, r);
  int64_t i = integer_check(L, r, 2, "write: the entry") - 1;
  Tensor *t = tensor_check(L, r, 3, "write: the values");
  if (t->param) check_status(L, r, param_place(r->ctx, t->param));
  if (lua_isnoneornil(L, 4)) {
    check_status(L, r, write_values(r, writer, i, t));
    return 0;
  }
  int64_t dim = integer_check(L, r, 4, "write: the dimension");
  int64_t at = integer_check(L, r, 5, "write: where the part begins");
  int64_t full = integer_check(L, r, 6, "write: the whole's length");
  check_status(L, r, tensor_alive(t));
  if (tensor_is_meta(t) || !tensor_contiguous(t) || dim < 0 || dim >= t->ndim || at < 0 ||
      at > full || t->shape[dim] > full - at)
    raise_value(L, r, "write: row-major values of a part of the entry are wanted");
  check_status(L, r, write_part(writer, i, t, (int)dim, at, full));
  return 0;
}

static int commit_writer(lua_State *L) {
  Rille *r = binding_of(L);
  SafetensorsWriter **box = writer_of(L, r), *writer = *box;
  *box = NULL;
  check_status(L, r, safetensors_commit(writer));
  return 0;
}

void files_bind(lua_State *L, Rille *r, int rille) {
  static const luaL_Reg functions[] = {
      {"json_encode", json_encode},
      {"json_decode", json_decode},
      {"write_atomic", write_atomic},
      {"make_directory", make_directory},
      {"digest", digest},
      {"bytes", bytes_of},
      {"safetensors_open", open_safetensors},
      {"safetensors_write", write_safetensors},
      {"safetensors_writer", open_writer},
      {NULL, NULL},
  };
  static const luaL_Reg methods[] = {
      {"names", names},      {"metadata", metadata},       {"describe", describe_tensor},
      {"read", read_tensor}, {"close", close_safetensors}, {NULL, NULL},
  };
  static const luaL_Reg writer_methods[] = {
      {"write", write_entry},
      {"commit", commit_writer},
      {"abort", abort_writer},
      {NULL, NULL},
  };
  static const luaL_Reg tensor_writer_meta[] = {
      {"__gc", abort_writer}, {"__close", abort_writer}, {NULL, NULL}};
  static const luaL_Reg file_meta[] = {{"__gc", close_safetensors}, {NULL, NULL}};
  static const luaL_Reg writer_meta[] = {{"__gc", writer_gc}, {NULL, NULL}};
  box_bind(L, r, SAFETENSORS, methods, file_meta);
  box_bind(L, r, WRITER, NULL, writer_meta);
  box_bind(L, r, TENSOR_WRITER, writer_methods, tensor_writer_meta);
  lua_getfield(L, rille, "core");
  binding_register(L, r, functions);
  lua_pop(L, 1);
}
