// comm_bind - groups of ranks and meshes as scripts and the library see them.
#include "lua/comm_bind.h"

#include "ops/ops.h"
#include "parallel/comm.h"
#include "parallel/mesh.h"

#include <stdlib.h>
#include <string.h>

static const char COMM[] = "rille.group", MESH[] = "rille.mesh";

typedef struct CommBox {
  Comm *comm; // NULL: freed
  bool is_owned;
} CommBox;

static void push_comm(lua_State *L, Comm *comm, bool is_owned) {
  CommBox *box = box_push(L, COMM, sizeof *box);
  box->comm = comm;
  box->is_owned = is_owned;
}

Comm *comm_at(lua_State *L, Rille *r, int index) {
  CommBox *box = luaL_testudata(L, index, COMM);
  if (box && !box->comm) raise_value(L, r, "this group of ranks has been freed");
  return box ? box->comm : NULL;
}

Comm *comm_check_box(lua_State *L, Rille *r, int index) {
  box_check(L, r, index, COMM);
  return comm_at(L, r, index);
}

static Comm *self_comm(lua_State *L, Rille *r) { return comm_check_box(L, r, 1); }

static int group_free(lua_State *L) {
  Rille *r = binding_of(L);
  CommBox *box = box_check(L, r, 1, COMM);
  if (box->is_owned) comm_free(box->comm);
  box->comm = NULL;
  return 0;
}

static int comm_world_(lua_State *L) {
  Rille *r = binding_of(L);
  Comm *world;
  check_status(L, r, comm_world(&world));
  push_comm(L, world, false);
  return 1;
}

static int group_rank(lua_State *L) {
  lua_pushinteger(L, self_comm(L, binding_of(L))->rank);
  return 1;
}

static int group_size(lua_State *L) {
  lua_pushinteger(L, self_comm(L, binding_of(L))->size);
  return 1;
}

// group:split(colour, key): nil on ranks whose colour is negative.
static int group_split(lua_State *L) {
  Rille *r = binding_of(L);
  Comm *comm = self_comm(L, r), *out;
  int64_t colour = integer_check(L, r, 2, "split: the colour");
  int64_t key = lua_isnoneornil(L, 3) ? comm->rank : integer_check(L, r, 3, "split: the key");
  if (colour > INT32_MAX || key > INT32_MAX || key < INT32_MIN)
    raise_value(L, r, "split: colour and key must be below 2^31");
  check_status(L, r, comm_split(comm, colour < 0 ? -1 : (int)colour, (int)key, &out));
  if (out)
    push_comm(L, out, true);
  else
    lua_pushnil(L);
  return 1;
}

static int group_barrier(lua_State *L) {
  Rille *r = binding_of(L);
  check_status(L, r, comm_barrier(self_comm(L, r)));
  return 0;
}

// ---- bytes

// A tensor whose bytes can be sent as they lie.
static Tensor *plain_tensor(lua_State *L, Rille *r, int index, const char *what) {
  Tensor *t = tensor_check(L, r, index, what);
  check_status(L, r, tensor_alive(t));
  if (tensor_is_meta(t)) raise_value(L, r, "%s: a tensor on meta has no bytes", what);
  if (!tensor_contiguous(t))
    raise_value(L, r, "%s: the tensor is a view with strides\nsend t:contiguous()", what);
  return t;
}

static int root_check(lua_State *L, Rille *r, int index, const Comm *comm) {
  int64_t root = lua_isnoneornil(L, index) ? 0 : integer_check(L, r, index, "broadcast: the root");
  if (root < 0 || root >= comm->size)
    raise_value(L, r, "broadcast: there is no rank %lld among %d", (long long)root, comm->size);
  return (int)root;
}

// The root's string; others may pass anything.
static int broadcast_string(lua_State *L, Rille *r, Comm *comm, int root) {
  size_t length = 0;
  const char *text = NULL;
  if (comm->rank == root) text = luaL_checklstring(L, 2, &length);
  int64_t n = (int64_t)length;
  check_status(L, r, comm_broadcast(comm, root, &n, sizeof n));
  luaL_Buffer out;
  char *bytes = luaL_buffinitsize(L, &out, (size_t)n);
  if (text) memcpy(bytes, text, length);
  check_status(L, r, comm_broadcast(comm, root, bytes, (size_t)n));
  luaL_pushresultsize(&out, (size_t)n);
  return 1;
}

// group:broadcast(x, root): the root's string on all ranks, or its tensor's values in all tensors.
static int group_broadcast(lua_State *L) {
  Rille *r = binding_of(L);
  Comm *comm = self_comm(L, r);
  int root = root_check(L, r, 3, comm);
  if (lua_gettop(L) < 2 || !tensor_at(L, r, 2)) return broadcast_string(L, r, comm, root);
  Tensor *t = plain_tensor(L, r, 2, "broadcast");
  size_t bytes = (size_t)tensor_numel(t) * dtype_size(t->dtype);
  check_status(L, r, comm_broadcast(comm, root, tensor_data(t), bytes));
  if (comm->rank != root) tensor_written(r->ctx, t);
  lua_settop(L, 2);
  return 1;
}

// group:all_reduce(t [, "sum" | "max"]): in place.
static int group_all_reduce(lua_State *L) {
  static const char *const how[] = {"sum", "max", NULL};
  Rille *r = binding_of(L);
  Comm *comm = self_comm(L, r);
  Tensor *t = plain_tensor(L, r, 2, "all_reduce");
  CommReduce reduce = luaL_checkoption(L, 3, "sum", how) == 0 ? REDUCE_SUM : REDUCE_MAX;
  check_status(L, r, comm_all_reduce(comm, tensor_data(t), tensor_numel(t), t->dtype, reduce));
  tensor_written(r->ctx, t);
  lua_settop(L, 2);
  return 1;
}

// ---- collectives under way

// What an object that stands for a collective begins with. Until the collective is done the object
// is in the registry's list RUNNING: the transport writes to memory that the object keeps alive,
// though the script may have forgotten it.
typedef struct Running {
  CommCollective *sum; // NULL: done
  Status status;       // of one that is done
  KeptStatus kept;
} Running;

static const char RUNNING[] = "rille.running";

static void close_running(Running *run, Status status) {
  run->sum = NULL;
  run->status = status;
  if (status != ST_OK) status_keep(&run->kept);
}

// Adds the object at the top to the list, without those that are done.
static void keep_running(lua_State *L) {
  int object = lua_gettop(L), n_kept = 0;
  luaL_getsubtable(L, LUA_REGISTRYINDEX, RUNNING);
  lua_Integer n = (lua_Integer)lua_rawlen(L, -1);
  for (lua_Integer i = 1; i <= n; i++) {
    bool is_done = true;
    lua_rawgeti(L, -1, i);
    Running *run = lua_touserdata(L, -1);
    if (run->sum) {
      Status status = comm_collective_test(run->sum, &is_done);
      if (is_done) close_running(run, status);
    }
    if (is_done)
      lua_pop(L, 1);
    else
      lua_rawseti(L, -2, ++n_kept);
  }
  lua_pushvalue(L, object);
  lua_rawseti(L, -2, ++n_kept);
  for (lua_Integer i = n_kept + 1; i <= n; i++) lua_pushnil(L), lua_rawseti(L, -2, i);
  lua_settop(L, object);
}

static void wait_running(lua_State *L, Rille *r, Running *run, const char *what) {
  if (run->sum) close_running(run, comm_collective_wait(run->sum, what));
  if (run->status != ST_OK) check_status(L, r, status_again(run->status, &run->kept));
}

// At the script's end, when all is done.
static int running_gc(lua_State *L) {
  Running *run = lua_touserdata(L, 1);
  bool is_done = false;
  if (run->sum) close_running(run, comm_collective_test(run->sum, &is_done));
  return 0;
}

// ---- sums under way

static const char SUM[] = "rille.sum";

// group:all_reduce_start(t) -> an object whose wait() returns when t holds the sum.
static int group_all_reduce_start(lua_State *L) {
  Rille *r = binding_of(L);
  Comm *comm = self_comm(L, r);
  Tensor *t = plain_tensor(L, r, 2, "all_reduce_start");
  Running *run = box_push(L, SUM, sizeof *run);
  *run = (Running){0};
  lua_createtable(L, 2, 0); // the tensor and the group live as long as the sum
  lua_pushvalue(L, 2), lua_rawseti(L, -2, 1);
  lua_pushvalue(L, 1), lua_rawseti(L, -2, 2);
  lua_setiuservalue(L, -2, 1);
  tensor_written(r->ctx, t);
  check_status(L, r,
               comm_all_reduce_start(comm, r->ctx->pool, tensor_data(t), tensor_numel(t), t->dtype,
                                     REDUCE_SUM, &run->sum));
  keep_running(L);
  return 1;
}

static int sum_wait(lua_State *L) {
  Rille *r = binding_of(L);
  wait_running(L, r, box_check(L, r, 1, SUM), "a sum over replicas");
  return 0;
}

static const luaL_Reg sum_methods[] = {{"wait", sum_wait}, {NULL, NULL}};

// ---- strings of all ranks, under way

static const char GATHER[] = "rille.gather";

// Each rank's cell is its string behind its length; a sum with zeros elsewhere gathers them.
typedef struct GatherBox {
  Running run;
  Comm *comm; // NULL: has been waited for
  unsigned char *cells;
  int64_t cell;
} GatherBox;

// group:all_gather_start(s, cell) -> an object whose wait(together) gives what all_gather gives;
// strings of more than `cell` bytes cost a second round, for which all ranks must wait together.
static int group_all_gather_start(lua_State *L) {
  Rille *r = binding_of(L);
  Comm *comm = self_comm(L, r);
  size_t length;
  const char *text = luaL_checklstring(L, 2, &length);
  int64_t cell = integer_check(L, r, 3, "all_gather_start: the cell"), n = (int64_t)length;
  if (cell < 1 || cell > 1 << 30)
    raise_value(L, r, "all_gather_start: a cell of %d to %d bytes", 1, 1 << 30);
  cell += (int64_t)sizeof n;
  GatherBox *box = box_push(L, GATHER, sizeof *box);
  unsigned char *cells = lua_newuserdatauv(L, (size_t)(cell * comm->size), 0);
  lua_createtable(L, 3, 0); // what lives as long: cells, the group, the string
  lua_pushvalue(L, -2), lua_rawseti(L, -2, 1);
  lua_pushvalue(L, 1), lua_rawseti(L, -2, 2);
  lua_pushvalue(L, 2), lua_rawseti(L, -2, 3);
  lua_setiuservalue(L, -3, 1);
  lua_pop(L, 1);
  memset(cells, 0, (size_t)(cell * comm->size));
  unsigned char *mine = cells + cell * comm->rank;
  memcpy(mine, &n, sizeof n);
  if (n + (int64_t)sizeof n <= cell) memcpy(mine + sizeof n, text, length);
  *box = (GatherBox){.comm = comm, .cells = cells, .cell = cell};
  check_status(L, r,
               comm_all_reduce_start(comm, r->ctx->pool, cells, cell * comm->size, DT_U8,
                                     REDUCE_SUM, &box->run.sum));
  keep_running(L);
  return 1;
}

static int gather_wait(lua_State *L) {
  Rille *r = binding_of(L);
  GatherBox *box = box_check(L, r, 1, GATHER);
  const Comm *comm = box->comm;
  if (!comm) raise_value(L, r, "wait: this has been waited for");
  box->comm = NULL;
  wait_running(L, r, &box->run, "what other ranks say of a step");
  bool fits = true;
  for (int i = 0; i < comm->size; i++) {
    int64_t n;
    memcpy(&n, box->cells + box->cell * i, sizeof n);
    fits = fits && n + (int64_t)sizeof n <= box->cell;
  }
  if (!fits && !lua_toboolean(L, 2))
    raise_value(L, r,
                "what the ranks say of a step takes a second round, and not all ranks are here"
                "\nread a result after the next step, as the progress line does");
  lua_getiuservalue(L, 1, 1);
  if (!fits) {
    lua_rawgeti(L, -1, 2), lua_getfield(L, -1, "all_gather"), lua_insert(L, -2);
    lua_rawgeti(L, -3, 3);
    lua_call(L, 2, 1);
    return 1;
  }
  lua_createtable(L, comm->size, 0);
  for (int i = 0; i < comm->size; i++) {
    int64_t n;
    const unsigned char *at = box->cells + box->cell * i;
    memcpy(&n, at, sizeof n);
    lua_pushlstring(L, (const char *)at + sizeof n, (size_t)n);
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

static const luaL_Reg gather_methods[] = {{"wait", gather_wait}, {NULL, NULL}};

// group:all_gather(s) -> the list of all ranks' strings, rank 0's at 1.
static int group_all_gather(lua_State *L) {
  Rille *r = binding_of(L);
  Comm *comm = self_comm(L, r);
  size_t length, total = 0;
  const char *text = luaL_checklstring(L, 2, &length);
  int64_t mine = (int64_t)length;
  int64_t *sizes = lua_newuserdatauv(L, (size_t)comm->size * sizeof *sizes, 0);
  check_status(L, r, comm_all_gather(comm, &mine, sizes, sizeof mine));
  for (int i = 0; i < comm->size; i++) total += (size_t)sizes[i];
  char *all = lua_newuserdatauv(L, total + 1, 0);
  check_status(L, r, comm_all_gather_v(comm, text, all, sizes));
  lua_createtable(L, comm->size, 0);
  for (int i = 0; i < comm->size; i++) {
    lua_pushlstring(L, all, (size_t)sizes[i]);
    lua_rawseti(L, -2, i + 1);
    all += sizes[i];
  }
  return 1;
}

// group:stats() -> {messages =, bytes =, waited =, busy =}: what this rank has sent, and seconds.
static int group_stats(lua_State *L) {
  const CommStats *stats = &self_comm(L, binding_of(L))->stats;
  lua_createtable(L, 0, 4);
  lua_pushinteger(L, (lua_Integer)stats->messages);
  lua_setfield(L, -2, "messages");
  lua_pushinteger(L, (lua_Integer)stats->bytes);
  lua_setfield(L, -2, "bytes");
  lua_pushnumber(L, stats->waited);
  lua_setfield(L, -2, "waited");
  lua_pushnumber(L, stats->busy);
  lua_setfield(L, -2, "busy");
  return 1;
}

// group:agree(lines): an error on every rank, unless all have the same list of strings.
static int group_agree(lua_State *L) {
  Rille *r = binding_of(L);
  Comm *comm = self_comm(L, r);
  luaL_checktype(L, 2, LUA_TTABLE);
  int n = (int)lua_rawlen(L, 2);
  const char **lines = lua_newuserdatauv(L, ((size_t)n + 1) * sizeof *lines, 0);
  for (int i = 0; i < n; i++) {
    if (lua_rawgeti(L, 2, i + 1) != LUA_TSTRING)
      raise_value(L, r, "agree: line %d is no string", i);
    lines[i] = lua_tostring(L, -1); // the table keeps it
    lua_pop(L, 1);
  }
  check_status(L, r, comm_agree(comm, lines, n));
  return 0;
}

// group:place(rank) -> node name, number of the node, process, cores
static int group_place(lua_State *L) {
  Rille *r = binding_of(L);
  Comm *comm = self_comm(L, r);
  int64_t rank = lua_isnoneornil(L, 2) ? comm->rank : integer_check(L, r, 2, "place: the rank");
  if (rank < 0 || rank >= comm->size) raise_value(L, r, "place: there is no such rank");
  const CommPlace *place = comm_place(comm, (int)rank);
  lua_pushstring(L, place->node);
  lua_pushinteger(L, place->node_index);
  lua_pushinteger(L, place->pid);
  lua_pushinteger(L, place->cores);
  return 4;
}

// group:align_clocks() -> two lists by rank: seconds to add for rank 0's clock, and how far off.
static int group_align_clocks(lua_State *L) {
  Rille *r = binding_of(L);
  Comm *comm = self_comm(L, r);
  double *offset = lua_newuserdatauv(L, 2 * (size_t)comm->size * sizeof *offset, 0);
  check_status(L, r, comm_align_clocks(comm, offset, offset + comm->size));
  for (int list = 0; list < 2; list++) {
    lua_createtable(L, comm->size, 0);
    for (int i = 0; i < comm->size; i++) {
      lua_pushnumber(L, offset[list * comm->size + i]);
      lua_rawseti(L, -2, i + 1);
    }
  }
  return 2;
}

static const luaL_Reg group_methods[] = {
    {"rank", group_rank},
    {"size", group_size},
    {"split", group_split},
    {"barrier", group_barrier},
    {"broadcast", group_broadcast},
    {"all_reduce", group_all_reduce},
    {"all_reduce_start", group_all_reduce_start},
    {"all_gather_start", group_all_gather_start},
    {"all_gather", group_all_gather},
    {"agree", group_agree},
    {"stats", group_stats},
    {"place", group_place},
    {"align_clocks", group_align_clocks},
    {"free", group_free},
    {NULL, NULL},
};

// ---- meshes

typedef struct MeshBox {
  Mesh *mesh;
} MeshBox;

static Mesh *self_mesh(lua_State *L, Rille *r) {
  return ((MeshBox *)box_check(L, r, 1, MESH))->mesh;
}

static int mesh_gc(lua_State *L) {
  MeshBox *box = box_check(L, binding_of(L), 1, MESH);
  mesh_free(box->mesh);
  box->mesh = NULL;
  return 0;
}

// mesh(group, {tp =, dp =, pp =}): an axis that is missing has size 1, except dp: whatever is left.
static int mesh_new_(lua_State *L) {
  Rille *r = binding_of(L);
  Comm *comm = self_comm(L, r);
  int size[MESH_AXES];
  luaL_checktype(L, 2, LUA_TTABLE);
  for (int axis = 0; axis < MESH_AXES; axis++) {
    lua_getfield(L, 2, mesh_axis_name((MeshAxis)axis));
    int64_t n = axis == AXIS_dp ? 0 : 1;
    if (!lua_isnil(L, -1)) n = integer_check(L, r, -1, mesh_axis_name((MeshAxis)axis));
    if (n > INT32_MAX || (n < 1 && !lua_isnil(L, -1))) n = -1;
    size[axis] = (int)n;
    lua_pop(L, 1);
  }
  MeshBox *box = box_push(L, MESH, sizeof *box);
  Status status = mesh_new(comm, size, &box->mesh);
  if (status == ST_EVALUE) raise_usage(L, r, status);
  check_status(L, r, status);
  return 1;
}

static MeshAxis axis_check(lua_State *L, int index) {
  static const char *const axes[] = {
#define X(name) #name,
      MESH_AXIS_LIST(X)
#undef X
          NULL};
  return (MeshAxis)luaL_checkoption(L, index, NULL, axes);
}

static int mesh_rank_(lua_State *L) {
  lua_pushinteger(L, self_mesh(L, binding_of(L))->all->rank);
  return 1;
}

// mesh:at(axis [, rank]): the coordinate of this rank, or of another one.
static int mesh_at_(lua_State *L) {
  Rille *r = binding_of(L);
  const Mesh *mesh = self_mesh(L, r);
  MeshAxis axis = axis_check(L, 2);
  int64_t rank = lua_isnoneornil(L, 3) ? mesh->all->rank : integer_check(L, r, 3, "at: the rank");
  int at[MESH_AXES];
  if (rank < 0 || rank >= mesh->all->size) raise_value(L, r, "at: there is no such rank");
  mesh_at(mesh, (int)rank, at);
  lua_pushinteger(L, at[axis]);
  return 1;
}

static int mesh_size(lua_State *L) {
  lua_pushinteger(L, self_mesh(L, binding_of(L))->size[axis_check(L, 2)]);
  return 1;
}

// A group of a mesh keeps the mesh alive.
static int push_group_of_mesh(lua_State *L, Comm *comm) {
  push_comm(L, comm, false);
  lua_pushvalue(L, 1);
  lua_setiuservalue(L, -2, 1);
  return 1;
}

static int mesh_group(lua_State *L) {
  return push_group_of_mesh(L, self_mesh(L, binding_of(L))->group[axis_check(L, 2)]);
}

static int mesh_all(lua_State *L) {
  return push_group_of_mesh(L, self_mesh(L, binding_of(L))->all);
}

// mesh:describe([rank]) -> "rank 3 (node b, pp 1 dp 1)"
static int mesh_describe_(lua_State *L) {
  Rille *r = binding_of(L);
  const Mesh *mesh = self_mesh(L, r);
  int64_t rank =
      lua_isnoneornil(L, 2) ? mesh->all->rank : integer_check(L, r, 2, "describe: the rank");
  if (rank < 0 || rank >= mesh->all->size) raise_value(L, r, "describe: there is no such rank");
  char words[128];
  lua_pushstring(L, mesh_describe(mesh, (int)rank, words, sizeof words));
  return 1;
}

// mesh:warnings() -> what is unfortunate about where the ranks are, in lines; "" if nothing is. All
// ranks call it.
static int mesh_warnings_(lua_State *L) {
  Rille *r = binding_of(L);
  char words[2048];
  check_status(L, r, mesh_warnings(self_mesh(L, r), ops_cpu().n_threads, words, sizeof words));
  lua_pushstring(L, words);
  return 1;
}

static const luaL_Reg mesh_methods[] = {
    {"rank", mesh_rank_},         {"at", mesh_at_},  {"size", mesh_size},
    {"group", mesh_group},        {"all", mesh_all}, {"describe", mesh_describe_},
    {"warnings", mesh_warnings_}, {NULL, NULL},
};

// ---- what a script does in the world

static int doing(lua_State *L) {
  comm_doing(luaL_checkstring(L, 1));
  return 0;
}

// give_up(words): reports them as the cause and ends the job; in a world of one an error.
static int give_up(lua_State *L) {
  const char *words = luaL_checkstring(L, 1);
  comm_fatal_words(words, 1);
  return luaL_error(L, "%s", words);
}

static int coordinates(lua_State *L) {
  comm_coordinates(luaL_checkstring(L, 1));
  return 0;
}

// stall_timeout([seconds]) -> seconds that hold
static int stall_timeout(lua_State *L) {
  lua_pushnumber(L, comm_stall_timeout(luaL_optnumber(L, 1, 0)));
  return 1;
}

// os.exit, telling the ranks that wait for this one.
static int leave(lua_State *L) {
  int code = lua_isboolean(L, 1) ? !lua_toboolean(L, 1) : (int)luaL_optinteger(L, 1, 0);
  if (code == 0) check_status(L, binding_of(L), comm_collectives_settle());
  comm_leaving(code);
  lua_pushvalue(L, lua_upvalueindex(2));
  lua_insert(L, 1);
  lua_call(L, lua_gettop(L) - 1, 0);
  return 0;
}

static void wrap_exit(lua_State *L, Rille *r) {
  if (lua_getglobal(L, "os") == LUA_TTABLE) {
    lua_pushlightuserdata(L, r);
    lua_getfield(L, -2, "exit");
    lua_pushcclosure(L, leave, 2);
    lua_setfield(L, -2, "exit");
  }
  lua_pop(L, 1);
}

static const luaL_Reg functions[] = {
    {"comm_world", comm_world_},
    {"mesh", mesh_new_},
    {"doing", doing},
    {"coordinates", coordinates},
    {"give_up", give_up},
    {"stall_timeout", stall_timeout},
    {NULL, NULL},
};

void comm_bind(lua_State *L, Rille *r, int rille) {
  static const luaL_Reg group_meta[] = {{"__gc", group_free}, {NULL, NULL}};
  static const luaL_Reg running_meta[] = {{"__gc", running_gc}, {NULL, NULL}};
  static const luaL_Reg mesh_meta[] = {{"__gc", mesh_gc}, {NULL, NULL}};
  box_bind(L, r, COMM, group_methods, group_meta);
  box_bind(L, r, MESH, mesh_methods, mesh_meta);
  box_bind(L, r, SUM, sum_methods, running_meta);
  box_bind(L, r, GATHER, gather_methods, running_meta);
  lua_getfield(L, rille, "core");
  binding_register(L, r, functions);
  lua_pop(L, 1);
  if (r->world > 1) wrap_exit(L, r);
}
