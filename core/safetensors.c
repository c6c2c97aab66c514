// safetensors - the weight file of the Hugging Face world: reading, also sharded, and writing.
//
// Invariants
//  1  After a successful open the tensors of a file, by data offset, cover its data exactly: no
//     hole, no overlap, the last ends where the file ends.
//  2  Names are unique over all shards, and with an index they are the names that it lists, each in
//     the shard that it says.
//  3  Names, shapes and metadata point into the JSON trees, which live as long as the file.
#include "core/safetensors.h"

#include "core/json.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the data are read as they lie");

typedef struct Shard {
  const char *base; // its name in the index, NULL without one
  FileMap map;
  JsonTree *header;
  int64_t *shapes; // of all its tensors, one after the other
} Shard;

struct Safetensors {
  JsonTree *index; // NULL without one
  Shard *shards;
  int n_shards;
  SafetensorsEntry *entries;
  const SafetensorsEntry **by_name; // sorted
  int64_t n;
  SafetensorsPair *metadata;
  int64_t n_metadata;
};

// dtypes of the format beside those of DTYPE_LIST, with their bits.
static const struct {
  const char *name;
  int bits;
} foreign_dtypes[] = {
    {"F16", 16},        {"I8", 8},      {"I16", 16},        {"U16", 16},    {"U32", 32},
    {"U64", 64},        {"C64", 64},    {"F8_E4M3", 8},     {"F8_E5M2", 8}, {"F8_E8M0", 8},
    {"F8_E4M3FNUZ", 8}, {"F6_E2M3", 6}, {"F8_E5M2FNUZ", 8}, {"F6_E3M2", 6}, {"F4", 4},
};

static Status fail_memory(const char *name) {
  return fail(ST_ENOMEM, "%s: no memory to read its header", name);
}

// ---- one tensor of the header ---------------------------------------------------------------

// Sets dtype and dtype_name; *bits of an element.
static Status read_dtype(SafetensorsEntry *entry, int *bits, const char *path,
                         const JsonValue *value) {
  if (!value || value->kind != JSON_STRING)
    return fail(ST_EFORMAT, "%s: tensor \"%s\": expected a string as dtype, found %s", path,
                entry->name, value ? json_kind_words(value->kind) : "none");
  entry->dtype_name = value->string;
  for (int i = 0; i < DTYPE_COUNT; i++) {
    if (strcmp(value->string, dtype_safetensors_name((DType)i)) != 0) continue;
    entry->dtype = (DType)i;
    entry->is_readable = true;
    *bits = (int)dtype_size((DType)i) * 8;
    return ST_OK;
  }
  for (size_t i = 0; i < sizeof foreign_dtypes / sizeof *foreign_dtypes; i++) {
    if (strcmp(value->string, foreign_dtypes[i].name) != 0) continue;
    *bits = foreign_dtypes[i].bits;
    return ST_OK;
  }
  return fail(ST_EFORMAT, "%s: tensor \"%s\": unknown dtype \"%.40s\"", path, entry->name,
              value->string);
}

// Copies the shape to `shape` and computes the number of elements.
static Status read_shape(SafetensorsEntry *entry, int64_t *shape, const char *path,
                         const JsonValue *value) {
  if (!value || value->kind != JSON_ARRAY)
    return fail(ST_EFORMAT, "%s: tensor \"%s\": expected an array as shape, found %s", path,
                entry->name, value ? json_kind_words(value->kind) : "none");
  entry->shape = shape;
  entry->n_dims = (int)value->count;
  entry->n_elements = 1;
  for (const JsonValue *dim = value->first; dim; dim = dim->next) {
    if (!dim->is_integer || dim->integer < 0)
      return fail(ST_EFORMAT, "%s: tensor \"%s\": expected sizes of 0 and more in shape", path,
                  entry->name);
    *shape++ = dim->integer;
    if (__builtin_mul_overflow(entry->n_elements, dim->integer, &entry->n_elements))
      return fail(ST_EFORMAT, "%s: tensor \"%s\": its shape has more than 2^63 elements", path,
                  entry->name);
  }
  return ST_OK;
}

static Status read_offsets(SafetensorsEntry *entry, int bits, const Shard *shard,
                           int64_t data_start, const JsonValue *value) {
  const char *path = shard->map.name;
  const JsonValue *begin = value && value->kind == JSON_ARRAY ? value->first : NULL;
  const JsonValue *end = begin ? begin->next : NULL;
  if (!end || end->next || !begin->is_integer || !end->is_integer || begin->integer < 0 ||
      end->integer < begin->integer)
    return fail(ST_EFORMAT,
                "%s: tensor \"%s\": expected data_offsets [begin, end], 0 <= begin <= "
                "end",
                path, entry->name);
  int64_t n_bits;
  bool overflows = __builtin_mul_overflow(entry->n_elements, (int64_t)bits, &n_bits);
  entry->n_bytes = end->integer - begin->integer;
  if (overflows || n_bits % 8 != 0 || n_bits / 8 != entry->n_bytes)
    return fail(ST_EFORMAT,
                "%s: tensor \"%s\": expected data_offsets that span its %lld elements of %s, found "
                "[%lld, %lld]",
                path, entry->name, (long long)entry->n_elements, entry->dtype_name,
                (long long)begin->integer, (long long)end->integer);
  int64_t data_bytes = shard->map.size - data_start;
  if (end->integer > data_bytes)
    return fail(
        ST_EFORMAT,
        "%s: tensor \"%s\": expected its data at bytes [%lld, %lld) after the header, found "
        "only %lld bytes there: the file is cut short",
        path, entry->name, (long long)begin->integer, (long long)end->integer,
        (long long)data_bytes);
  entry->data = shard->map.data + data_start + begin->integer;
  return ST_OK;
}

// ---- one file -------------------------------------------------------------------------------

// Parses the header; *data_start is the offset of the first byte of data.
static Status read_header(Shard *shard, int64_t *data_start) {
  const FileMap *map = &shard->map;
  uint64_t n;
  memcpy(&n, map->data, sizeof n);
  if (n > SAFETENSORS_HEADER_MAX)
    return fail(ST_EFORMAT,
                "%s: expected a header of at most %d bytes, found the length %llu: no safetensors "
                "file?",
                map->name, SAFETENSORS_HEADER_MAX, (unsigned long long)n);
  if ((int64_t)n > map->size - 8)
    return fail(
        ST_EFORMAT,
        "%s: expected a header of %llu bytes, found %lld bytes in the file: it is cut short, "
        "or no safetensors file",
        map->name, (unsigned long long)n, (long long)map->size);
  if (n == 0 || map->data[8] != '{')
    return fail(ST_EFORMAT, "%s: expected a header that starts with '{' at byte 8", map->name);
  Status status = json_parse(&shard->header, (const char *)map->data + 8, (size_t)n);
  if (status != ST_OK) return fail_context(status, "%s: its JSON header", map->name);
  *data_start = 8 + (int64_t)n;
  return ST_OK;
}

// Appends the string pairs of __metadata__.
static Status read_metadata(Safetensors *file, const JsonValue *object, const char *path) {
  if (object->kind != JSON_OBJECT)
    return fail(ST_EFORMAT, "%s: expected an object as __metadata__, found %s", path,
                json_kind_words(object->kind));
  size_t n = (size_t)(file->n_metadata + object->count);
  SafetensorsPair *pairs = realloc(file->metadata, (n + 1) * sizeof *pairs);
  if (!pairs) return fail_memory(path);
  file->metadata = pairs;
  for (const JsonValue *member = object->first; member; member = member->next) {
    if (member->kind != JSON_STRING)
      return fail(ST_EFORMAT, "%s: expected strings in __metadata__, found %s at \"%.100s\"", path,
                  json_kind_words(member->kind), member->key);
    pairs[file->n_metadata++] = (SafetensorsPair){member->key, member->string};
  }
  return ST_OK;
}

static int compare_data(const void *a, const void *b) {
  const SafetensorsEntry *x = a, *y = b;
  if (x->data != y->data) return x->data < y->data ? -1 : 1;
  return x->n_bytes < y->n_bytes ? -1 : x->n_bytes > y->n_bytes;
}

// Inv. 1; `entries` are sorted by data.
static Status check_coverage(const SafetensorsEntry *entries, int64_t n, const FileMap *map,
                             int64_t data_start) {
  const unsigned char *start = map->data + data_start, *next = start;
  for (int64_t i = 0; i < n; i++) {
    if (entries[i].data != next)
      return fail(
          ST_EFORMAT,
          "%s: tensor \"%s\": expected data_offsets that begin at %lld, the end of the tensor "
          "before it, found %lld: %s",
          map->name, entries[i].name, (long long)(next - start),
          (long long)(entries[i].data - start), entries[i].data < next ? "an overlap" : "a hole");
    next += entries[i].n_bytes;
  }
  int64_t used = next - start, found = map->size - data_start;
  if (used != found)
    return fail(ST_EFORMAT,
                "%s: expected %lld bytes of data after the header, found %lld: the rest belongs to "
                "no tensor",
                map->name, (long long)used, (long long)found);
  return ST_OK;
}

// Room for the tensors of a header: entries in the file, shapes in the shard.
static Status make_room(Safetensors *file, Shard *shard, const JsonValue *root) {
  size_t n_dims = 1;
  for (const JsonValue *member = root->first; member; member = member->next) {
    const JsonValue *shape = json_get(member, "shape");
    if (shape && shape->kind == JSON_ARRAY) n_dims += (size_t)shape->count;
  }
  size_t n = (size_t)(file->n + root->count);
  SafetensorsEntry *entries = realloc(file->entries, (n + 1) * sizeof *entries);
  if (entries) file->entries = entries;
  shard->shapes = malloc(n_dims * sizeof *shard->shapes);
  return entries && shard->shapes ? ST_OK : fail_memory(shard->map.name);
}

// Reads the mapped shard and appends its tensors to the file.
static Status read_shard(Safetensors *file, Shard *shard) {
  int64_t data_start = 0;
  const char *path = shard->map.name;
  TRY(read_header(shard, &data_start));
  const JsonValue *root = json_root(shard->header);
  TRY(make_room(file, shard, root));
  int64_t *shape = shard->shapes, n = 0;
  SafetensorsEntry *entries = file->entries + file->n;
  for (const JsonValue *member = root->first; member; member = member->next) {
    if (strcmp(member->key, "__metadata__") == 0) {
      TRY(read_metadata(file, member, path));
      continue;
    }
    if (member->kind != JSON_OBJECT)
      return fail(ST_EFORMAT, "%s: tensor \"%s\": expected an object, found %s", path, member->key,
                  json_kind_words(member->kind));
    SafetensorsEntry *entry = &entries[n++];
    *entry = (SafetensorsEntry){.name = member->key, .shard = (int)(shard - file->shards)};
    int bits = 0;
    TRY(read_dtype(entry, &bits, path, json_get(member, "dtype")));
    TRY(read_shape(entry, shape, path, json_get(member, "shape")));
    shape += entry->n_dims;
    TRY(read_offsets(entry, bits, shard, data_start, json_get(member, "data_offsets")));
  }
  qsort(entries, (size_t)n, sizeof *entries, compare_data);
  TRY(check_coverage(entries, n, &shard->map, data_start));
  file->n += n;
  return ST_OK;
}

// ---- names ----------------------------------------------------------------------------------

static int compare_name(const void *a, const void *b) {
  const SafetensorsEntry *const *x = a, *const *y = b;
  return strcmp((*x)->name, (*y)->name);
}

// Sorts by name; inv. 2 between shards.
static Status index_names(Safetensors *file, const char *path) {
  file->by_name = malloc(((size_t)file->n + 1) * sizeof(SafetensorsEntry *));
  if (!file->by_name) return fail_memory(path);
  for (int64_t i = 0; i < file->n; i++) file->by_name[i] = &file->entries[i];
  qsort(file->by_name, (size_t)file->n, sizeof(SafetensorsEntry *), compare_name);
  for (int64_t i = 1; i < file->n; i++) {
    const SafetensorsEntry *a = file->by_name[i - 1], *b = file->by_name[i];
    if (strcmp(a->name, b->name) == 0)
      return fail(ST_EFORMAT, "%s: tensor \"%s\" is in two shards, %s and %s", path, a->name,
                  safetensors_path(file, a), safetensors_path(file, b));
  }
  return ST_OK;
}

static const SafetensorsEntry *find_stored(const Safetensors *file, const char *name) {
  SafetensorsEntry wanted = {.name = name};
  const SafetensorsEntry *key = &wanted;
  const SafetensorsEntry **found =
      bsearch(&key, file->by_name, (size_t)file->n, sizeof(SafetensorsEntry *), compare_name);
  return found ? *found : NULL;
}

// The name after "alias:", NULL if the metadata key is no alias.
static const char *alias_name(const char *key) {
  size_t n = strlen(SAFETENSORS_ALIAS);
  return strncmp(key, SAFETENSORS_ALIAS, n) == 0 ? key + n : NULL;
}

static Status check_aliases(const Safetensors *file, const char *path) {
  for (int64_t i = 0; i < file->n_metadata; i++) {
    const char *alias = alias_name(file->metadata[i].key), *name = file->metadata[i].value;
    if (!alias) continue;
    if (find_stored(file, alias))
      return fail(ST_EFORMAT, "%s: \"%s\" is both a tensor and an alias of \"%s\"", path, alias,
                  name);
    if (!find_stored(file, name))
      return fail(ST_EFORMAT, "%s: \"%s\" is an alias of \"%s\", which is not in the file", path,
                  alias, name);
  }
  return ST_OK;
}

// ---- the index of a sharded model -----------------------------------------------------------

// The shard's place in file->shards, n_shards if it is new.
static int find_shard(const Safetensors *file, const char *base) {
  int i = file->n_shards - 1;
  while (i >= 0 && strcmp(file->shards[i].base, base) != 0) i--;
  return i >= 0 ? i : file->n_shards;
}

// Fills file->shards with the files that the weight map names.
static Status list_shards(Safetensors *file, const JsonValue *weight_map, const char *path) {
  int capacity = 0;
  for (const JsonValue *member = weight_map->first; member; member = member->next) {
    if (member->kind != JSON_STRING)
      return fail(ST_EFORMAT, "%s: expected a file name for tensor \"%s\", found %s", path,
                  member->key, json_kind_words(member->kind));
    const char *base = member->string;
    if (!*base || strchr(base, '/') || strcmp(base, ".") == 0 || strcmp(base, "..") == 0)
      return fail(
          ST_EFORMAT,
          "%s: tensor \"%s\": expected the name of a file beside the index, found \"%.100s\"", path,
          member->key, base);
    if (find_shard(file, base) < file->n_shards) continue;
    if (file->n_shards == capacity) {
      capacity = 2 * capacity + 8;
      Shard *shards = realloc(file->shards, (size_t)capacity * sizeof *shards);
      if (!shards) return fail_memory(path);
      file->shards = shards;
    }
    file->shards[file->n_shards++] = (Shard){.base = base};
  }
  return ST_OK;
}

static Status map_shard(Shard *shard, const char *index_path) {
  const char *slash = strrchr(index_path, '/');
  char *path;
  if (asprintf(&path, "%.*s%s", slash ? (int)(slash + 1 - index_path) : 0, index_path,
               shard->base) < 0)
    return fail_memory(index_path);
  Status status = file_map(&shard->map, path, "a safetensors file", 8);
  free(path);
  if (status != ST_OK) return fail_context(status, "%s names a shard", index_path);
  return ST_OK;
}

static int compare_key(const void *a, const void *b) {
  const JsonValue *const *x = a, *const *y = b;
  return strcmp((*x)->key, (*y)->key);
}

// Walks both sorted lists of names (inv. 2).
static Status compare_lists(const Safetensors *file, const JsonValue **members, int64_t n_members,
                            const char *path) {
  for (int64_t i = 0, j = 0; i < n_members || j < file->n; i++, j++) {
    const JsonValue *member = i < n_members ? members[i] : NULL;
    const SafetensorsEntry *entry = j < file->n ? file->by_name[j] : NULL;
    assert(member || entry);
    int order = !entry ? -1 : !member ? 1 : strcmp(member->key, entry->name);
    if (order < 0)
      return fail(ST_EFORMAT, "%s: expected tensor \"%s\" in shard %s, which has none of that name",
                  path, member->key, member->string);
    if (order > 0)
      return fail(ST_EFORMAT, "%s: tensor \"%s\" of shard %s is not in the index", path,
                  entry->name, file->shards[entry->shard].base);
    if (strcmp(member->string, file->shards[entry->shard].base) != 0)
      return fail(ST_EFORMAT, "%s: expected tensor \"%s\" in shard %s, found it in %s", path,
                  entry->name, member->string, file->shards[entry->shard].base);
  }
  return ST_OK;
}

static Status check_index(const Safetensors *file, const JsonValue *weight_map, const char *path) {
  int64_t n = 0;
  const JsonValue **members = malloc(((size_t)weight_map->count + 1) * sizeof(JsonValue *));
  if (!members) return fail_memory(path);
  for (const JsonValue *member = weight_map->first; member; member = member->next)
    members[n++] = member;
  qsort(members, (size_t)n, sizeof(JsonValue *), compare_key);
  Status status = compare_lists(file, members, n, path);
  free(members);
  return status;
}

static Status read_index(Safetensors *file, const char *path) {
  FileMap map;
  TRY(file_map(&map, path, "a safetensors index", 2));
  Status status = json_parse(&file->index, (const char *)map.data, (size_t)map.size);
  file_unmap(&map);
  if (status != ST_OK) return fail_context(status, "%s", path);
  const JsonValue *weight_map = json_get(json_root(file->index), "weight_map");
  if (!weight_map || weight_map->kind != JSON_OBJECT)
    return fail(ST_EFORMAT, "%s: expected an object \"weight_map\", found %s", path,
                weight_map ? json_kind_words(weight_map->kind) : "none");
  TRY(list_shards(file, weight_map, path));
  for (int i = 0; i < file->n_shards; i++) {
    TRY(map_shard(&file->shards[i], path));
    TRY(read_shard(file, &file->shards[i]));
  }
  TRY(index_names(file, path));
  TRY(check_index(file, weight_map, path));
  return check_aliases(file, path);
}

// ---- what users call ------------------------------------------------------------------------

// One file without an index; takes the map over, also on failure.
static Status read_single(Safetensors *file, FileMap *map) {
  file->shards = calloc(1, sizeof *file->shards);
  if (!file->shards) {
    Status status = fail_memory(map->name);
    file_unmap(map);
    return status;
  }
  file->shards[0].map = *map;
  file->n_shards = 1;
  TRY(read_shard(file, &file->shards[0]));
  TRY(index_names(file, map->name));
  return check_aliases(file, map->name);
}

static Status finish_open(Safetensors **out, Safetensors *file, Status status) {
  if (status == ST_OK) {
    *out = file;
  } else {
    safetensors_close(file);
  }
  return status;
}

Status safetensors_open(Safetensors **out, const char *path) {
  Safetensors *file = calloc(1, sizeof *file);
  if (!file) return fail_memory(path);
  size_t n = strlen(path);
  if (n >= 5 && strcmp(path + n - 5, ".json") == 0)
    return finish_open(out, file, read_index(file, path));
  FileMap map;
  Status status = file_map(&map, path, "a safetensors file", 8);
  if (status == ST_OK) status = read_single(file, &map);
  return finish_open(out, file, status);
}

Status safetensors_open_memory(Safetensors **out, const void *data, size_t size, const char *name) {
  Safetensors *file = calloc(1, sizeof *file);
  if (!file) return fail_memory(name);
  FileMap map;
  Status status = file_map_memory(&map, data, size, name, "a safetensors file", 8);
  if (status == ST_OK) status = read_single(file, &map);
  return finish_open(out, file, status);
}

void safetensors_close(Safetensors *file) {
  if (!file) return;
  for (int i = 0; i < file->n_shards; i++) {
    file_unmap(&file->shards[i].map);
    json_free(file->shards[i].header);
    free(file->shards[i].shapes);
  }
  json_free(file->index);
  free(file->shards);
  free(file->entries);
  free(file->by_name);
  free(file->metadata);
  free(file);
}

int64_t safetensors_count(const Safetensors *file) { return file->n; }

const SafetensorsEntry *safetensors_at(const Safetensors *file, int64_t i) {
  return i >= 0 && i < file->n ? &file->entries[i] : NULL;
}

const SafetensorsEntry *safetensors_find(const Safetensors *file, const char *name) {
  const SafetensorsEntry *entry = find_stored(file, name);
  for (int64_t i = 0; i < file->n_metadata && !entry; i++) {
    const char *alias = alias_name(file->metadata[i].key);
    if (alias && strcmp(alias, name) == 0) entry = find_stored(file, file->metadata[i].value);
  }
  return entry;
}

int64_t safetensors_n_metadata(const Safetensors *file) { return file->n_metadata; }

SafetensorsPair safetensors_metadata_at(const Safetensors *file, int64_t i) {
  return i >= 0 && i < file->n_metadata ? file->metadata[i] : (SafetensorsPair){NULL, NULL};
}

const char *safetensors_metadata(const Safetensors *file, const char *key) {
  for (int64_t i = 0; i < file->n_metadata; i++)
    if (strcmp(file->metadata[i].key, key) == 0) return file->metadata[i].value;
  return NULL;
}

const char *safetensors_path(const Safetensors *file, const SafetensorsEntry *entry) {
  return file->shards[entry->shard].map.name;
}

// ---- writing --------------------------------------------------------------------------------

// A tensor on its way to the file.
typedef struct Piece {
  const SafetensorsSpec *spec; // the caller's, during open only
  char *name;
  size_t element_bytes;
  int64_t n_bytes, begin; // in the data
  int64_t written;        // bytes so far
  int64_t place;          // in the caller's list
} Piece;

struct SafetensorsWriter {
  FileWriter *file;
  char *path;
  int64_t data_start;
  Piece *pieces; // in the caller's order
  int64_t n;
};

// Large elements first, then by name: offsets stay aligned without padding.
static int compare_layout(const void *a, const void *b) {
  const Piece *x = a, *y = b;
  if (x->element_bytes != y->element_bytes) return x->element_bytes > y->element_bytes ? -1 : 1;
  return strcmp(x->name, y->name);
}

static int compare_piece_name(const void *a, const void *b) {
  const Piece *x = a, *y = b;
  return strcmp(x->name, y->name);
}

static int compare_place(const void *a, const void *b) {
  const Piece *x = a, *y = b;
  return x->place < y->place ? -1 : x->place > y->place;
}

static int compare_name_to_piece(const void *name, const void *piece) {
  const Piece *y = piece;
  return strcmp(name, y->name);
}

static Status set_piece(Piece *piece, const SafetensorsSpec *spec, int64_t place,
                        const char *path) {
  if (!json_is_utf8(spec->name, strlen(spec->name)) || strcmp(spec->name, "__metadata__") == 0)
    return fail(ST_EVALUE, "%s: \"%s\" cannot be the name of a tensor in a safetensors file", path,
                spec->name);
  piece->spec = spec;
  piece->place = place;
  piece->element_bytes = dtype_size(spec->dtype);
  piece->n_bytes = (int64_t)piece->element_bytes;
  for (int d = 0; d < spec->n_dims; d++)
    if (spec->shape[d] < 0 ||
        __builtin_mul_overflow(piece->n_bytes, spec->shape[d], &piece->n_bytes))
      return fail(ST_EVALUE, "%s: tensor \"%s\": its shape is negative or too large", path,
                  spec->name);
  piece->name = strdup(spec->name);
  return piece->name ? ST_OK : fail(ST_ENOMEM, "%s: no memory to write it", path);
}

// True if a tensor has this name; pieces are sorted by name.
static bool has_piece(const SafetensorsWriter *writer, const char *name) {
  return bsearch(name, writer->pieces, (size_t)writer->n, sizeof *writer->pieces,
                 compare_name_to_piece) != NULL;
}

// Names and aliases before anything is written; leaves the pieces sorted by name.
static Status check_names(SafetensorsWriter *writer, const SafetensorsPair *metadata,
                          int64_t n_metadata) {
  qsort(writer->pieces, (size_t)writer->n, sizeof *writer->pieces, compare_piece_name);
  for (int64_t i = 1; i < writer->n; i++)
    if (strcmp(writer->pieces[i - 1].name, writer->pieces[i].name) == 0)
      return fail(ST_EVALUE, "%s: two tensors are named \"%s\"", writer->path,
                  writer->pieces[i].name);
  for (int64_t i = 0; i < n_metadata; i++) {
    const char *key = metadata[i].key, *value = metadata[i].value, *alias = alias_name(key);
    if (!json_is_utf8(key, strlen(key)) || !json_is_utf8(value, strlen(value)))
      return fail(ST_EVALUE, "%s: metadata \"%s\" is not UTF-8", writer->path, key);
    for (int64_t j = 0; j < i; j++)
      if (strcmp(metadata[j].key, key) == 0)
        return fail(ST_EVALUE, "%s: metadata \"%s\" is there twice", writer->path, key);
    if (alias && has_piece(writer, alias))
      return fail(ST_EVALUE, "%s: \"%s\" cannot be an alias: it is a tensor itself", writer->path,
                  alias);
    if (alias && !has_piece(writer, value))
      return fail(ST_EVALUE, "%s: \"%s\" cannot be an alias of \"%s\": there is no such tensor",
                  writer->path, alias, value);
  }
  return ST_OK;
}

static void describe_piece(JsonWriter *json, const Piece *piece) {
  json_key(json, piece->name);
  json_begin_object(json);
  json_key(json, "dtype");
  json_string(json, dtype_safetensors_name(piece->spec->dtype));
  json_key(json, "shape");
  json_begin_array(json);
  for (int d = 0; d < piece->spec->n_dims; d++) json_int(json, piece->spec->shape[d]);
  json_end_array(json);
  json_key(json, "data_offsets");
  json_begin_array(json);
  json_int(json, piece->begin);
  json_int(json, piece->begin + piece->n_bytes);
  json_end_array(json);
  json_end_object(json);
}

// The JSON header; gives every piece its offset and leaves the pieces in the order of their data.
static Status compose_header(SafetensorsWriter *writer, JsonWriter *json,
                             const SafetensorsPair *metadata, int64_t n_metadata) {
  qsort(writer->pieces, (size_t)writer->n, sizeof *writer->pieces, compare_layout);
  json_begin_object(json);
  if (n_metadata > 0) {
    json_key(json, "__metadata__");
    json_begin_object(json);
    for (int64_t i = 0; i < n_metadata; i++) {
      json_key(json, metadata[i].key);
      json_string(json, metadata[i].value);
    }
    json_end_object(json);
  }
  int64_t next = 0;
  for (int64_t i = 0; i < writer->n; i++) {
    writer->pieces[i].begin = next;
    if (__builtin_add_overflow(next, writer->pieces[i].n_bytes, &next))
      return fail(ST_EVALUE, "%s: more than 2^63 bytes of tensors", writer->path);
    describe_piece(json, &writer->pieces[i]);
  }
  json_end_object(json);
  return ST_OK;
}

// Length, header and padding to a multiple of 8.
static Status write_header(SafetensorsWriter *writer, JsonWriter *json) {
  const char *text;
  size_t size;
  TRY(json_finish(json, &text, &size));
  uint64_t padded = (size + 7) / 8 * 8;
  if (padded > SAFETENSORS_HEADER_MAX)
    return fail(ST_EVALUE, "%s: its header would have %llu bytes, readers accept %d", writer->path,
                (unsigned long long)padded, SAFETENSORS_HEADER_MAX);
  writer->data_start = 8 + (int64_t)padded;
  TRY(file_write(writer->file, &padded, sizeof padded));
  TRY(file_write(writer->file, text, size));
  return file_write(writer->file, "       ", (size_t)padded - size);
}

Status safetensors_writer_open(SafetensorsWriter **out, const char *path,
                               const SafetensorsSpec *tensors, int64_t n_tensors,
                               const SafetensorsPair *metadata, int64_t n_metadata,
                               FileFault *fault) {
  Status status = ST_OK;
  JsonWriter json = {0};
  SafetensorsWriter *writer = calloc(1, sizeof *writer);
  if (writer) writer->pieces = calloc((size_t)n_tensors + 1, sizeof *writer->pieces);
  if (writer) writer->path = strdup(path);
  if (!writer || !writer->pieces || !writer->path) {
    status = fail(ST_ENOMEM, "%s: no memory to write it", path);
    goto drop;
  }
  for (; writer->n < n_tensors; writer->n++)
    TRY_TO(drop, set_piece(&writer->pieces[writer->n], &tensors[writer->n], writer->n, path));
  TRY_TO(drop, check_names(writer, metadata, n_metadata));
  TRY_TO(drop, compose_header(writer, &json, metadata, n_metadata));
  qsort(writer->pieces, (size_t)writer->n, sizeof *writer->pieces, compare_place);
  TRY_TO(drop, file_writer_open(&writer->file, path, fault));
  TRY_TO(drop, write_header(writer, &json));
  json_writer_free(&json);
  *out = writer;
  return ST_OK;
drop:
  json_writer_free(&json);
  safetensors_abort(writer);
  return status;
}

Status safetensors_write(SafetensorsWriter *writer, int64_t i, int64_t first_byte, const void *data,
                         size_t n_bytes) {
  if (i < 0 || i >= writer->n)
    return fail(ST_ERANGE, "%s: tensor %lld of %lld", writer->path, (long long)i,
                (long long)writer->n);
  Piece *piece = &writer->pieces[i];
  if (first_byte < 0 || first_byte > piece->n_bytes ||
      (uint64_t)n_bytes > (uint64_t)(piece->n_bytes - first_byte))
    return fail(ST_ERANGE, "%s: tensor \"%s\" has %lld bytes, asked to write %zu at byte %lld",
                writer->path, piece->name, (long long)piece->n_bytes, n_bytes,
                (long long)first_byte);
  TRY(file_write_at(writer->file, writer->data_start + piece->begin + first_byte, data, n_bytes));
  piece->written += (int64_t)n_bytes;
  return ST_OK;
}

static void free_writer(SafetensorsWriter *writer) {
  for (int64_t i = 0; writer->pieces && i < writer->n; i++) free(writer->pieces[i].name);
  free(writer->pieces);
  free(writer->path);
  free(writer);
}

Status safetensors_commit(SafetensorsWriter *writer) {
  Status status = ST_OK;
  for (int64_t i = 0; i < writer->n && status == ST_OK; i++)
    if (writer->pieces[i].written != writer->pieces[i].n_bytes)
      status = fail(ST_ESTATE, "%s: expected %lld bytes of tensor \"%s\", %lld were written",
                    writer->path, (long long)writer->pieces[i].n_bytes, writer->pieces[i].name,
                    (long long)writer->pieces[i].written);
  if (status == ST_OK) {
    status = file_commit(writer->file);
  } else {
    file_abort(writer->file);
  }
  free_writer(writer);
  return status;
}

void safetensors_abort(SafetensorsWriter *writer) {
  if (!writer) return;
  file_abort(writer->file);
  free_writer(writer);
}
