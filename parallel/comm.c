// comm - the world, its groups, and messages.
//
// A group is a list of ranks of the world and a number that all of them agree on; the transport
// keeps the messages of groups apart by that number. So a group costs one gathering of a few bytes,
// no transport's collective that could hang, and numbers never come back.
#include "parallel/comm_impl.h"

#include "core/hash.h"
#include "core/poll.h"
#include "core/spans.h"

#include <assert.h>
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_NOTICES = 16, ID_WORLD = 0, ID_LEAVING, ID_FIRST };

static const double POLL_EVERY = 5e-6; // seconds: kernels can be shorter than a poll

static CommProcess process = {.life = {.lock = PTHREAD_MUTEX_INITIALIZER,
                                       .doing = process.life.own_words,
                                       .row = -1,
                                       .timeout = 300.0},
                              .next_id = ID_FIRST,
                              .fake_slow = 1.0};

CommProcess *comm_process(void) { return &process; }

// ---- groups ----------------------------------------------------------------------------------

Status comm_group_new(const Comm *like, int64_t id, int rank, int size, const int *member,
                      Comm **out) {
  Comm *group = calloc(1, sizeof *group);
  int *members = malloc((size_t)size * sizeof *members);
  if (!group || !members) {
    free(group);
    free(members);
    return fail(ST_ENOMEM, "out of memory for a group of %d ranks", size);
  }
  memcpy(members, member, (size_t)size * sizeof *members);
  *group = (Comm){.vtable = like->vtable,
                  .rank = rank,
                  .size = size,
                  .transport = like->transport,
                  .id = id,
                  .member = members};
  if (group->vtable->open_group) {
    Status status = group->vtable->open_group((Comm *)(uintptr_t)like, group);
    if (status != ST_OK) {
      free(members);
      free(group);
      return status;
    }
  }
  group->next = process.groups;
  process.groups = group;
  *out = group;
  return ST_OK;
}

static void group_delete(Comm *comm) {
  comm_collectives_forget(comm);
  Comm **at = &process.groups;
  while (*at && *at != comm) at = &(*at)->next;
  if (*at) *at = comm->next;
  if (comm->vtable->close_group) comm->vtable->close_group(comm);
  free((void *)(uintptr_t)comm->member);
  free(comm);
}

void comm_free(Comm *comm) {
  if (comm && comm != process.world) group_delete(comm);
}

Comm *comm_by_id(int64_t id) {
  Comm *group = process.groups;
  while (group && group->id != id) group = group->next;
  return group;
}

// What a rank brings to a split.
typedef struct SplitEntry {
  int64_t next_id;
  int32_t colour, key, rank, member;
} SplitEntry;

static int by_key(const void *a, const void *b) {
  const SplitEntry *x = a, *y = b;
  if (x->key != y->key) return x->key < y->key ? -1 : 1;
  return x->rank < y->rank ? -1 : x->rank > y->rank;
}

// A number that no group of any of these ranks has had: each rank's next one is above all it saw.
static int64_t agree_on_id(const SplitEntry *all, int n) {
  int64_t id = 0;
  for (int i = 0; i < n; i++)
    if (all[i].next_id > id) id = all[i].next_id;
  return id;
}

Status comm_split(Comm *comm, int colour, int key, Comm **out) {
  *out = NULL;
  SplitEntry mine = {process.next_id, colour, key, comm->rank, comm->member[comm->rank]};
  SplitEntry *all = malloc((size_t)comm->size * sizeof *all);
  int *member = malloc((size_t)comm->size * sizeof *member);
  Status status = all && member ? ST_OK : fail(ST_ENOMEM, "out of memory for a group");
  if (status != ST_OK) goto done;
  TRY_TO(done, comm_all_gather(comm, &mine, all, sizeof mine));
  int64_t id = agree_on_id(all, comm->size);
  process.next_id = id + 1;
  if (colour < 0) goto done;
  int n = 0, rank = 0;
  for (int i = 0; i < comm->size; i++)
    if (all[i].colour == colour) all[n++] = all[i];
  qsort(all, (size_t)n, sizeof *all, by_key);
  for (int i = 0; i < n; i++) {
    member[i] = all[i].member;
    if (all[i].rank == comm->rank) rank = i;
  }
  status = comm_group_new(comm, id, rank, n, member, out);
done:
  free(member);
  free(all);
  return status;
}

// ---- the world -------------------------------------------------------------------------------

// Writes "0-3,8": the cores that this process may run on.
static void learn_cores(CommPlace *place) {
  cpu_set_t cores;
  place->n_online = (int)sysconf(_SC_NPROCESSORS_ONLN);
  if (sched_getaffinity(0, sizeof cores, &cores) != 0) return;
  place->cores = CPU_COUNT(&cores);
  size_t at = 0, room = sizeof place->core_set;
  for (int first = 0; first < CPU_SETSIZE && at < room; first++) {
    if (!CPU_ISSET(first, &cores)) continue;
    int last = first;
    while (last + 1 < CPU_SETSIZE && CPU_ISSET(last + 1, &cores)) last++;
    int n = snprintf(place->core_set + at, room - at, last > first ? "%s%d-%d" : "%s%d",
                     at ? "," : "", first, last);
    at += (size_t)n;
    first = last;
  }
}

// A number for the clock that this rank reads: processes of one boot of a machine have the same
// CLOCK_MONOTONIC, in one time namespace (a container may have its own). A copy of a running
// machine has its boot's number: its name may tell.
static uint64_t learn_clock(const char *node) {
  static const char *const changed[] = {"RILLE_FAKE_CLOCK", "RILLE_FAKE_NODE"};
  for (size_t i = 0; i < sizeof changed / sizeof *changed; i++)
    if (getenv(changed[i]) && *getenv(changed[i])) return 0;
  char id[64] = "", space[64] = ""; // "time:[4026531834]"; a kernel may have none
  FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
  if (!file) return 0;
  bool known = fgets(id, sizeof id, file) != NULL;
  fclose(file);
  if (!known) return 0;
  if (readlink("/proc/self/ns/time", space, sizeof space - 1) < 0 && errno != ENOENT) return 0;
  return hash_string(node, hash_string(space, hash_string(id, 0)));
}

// Where every rank is. Equal names are one node.
static Status learn_places(Comm *world) {
  CommPlace mine = {.pid = (int)getpid(), .row = process.life.row, .row_at = process.life.row_at};
  learn_cores(&mine);
  if (!comm_fake_node(world->rank, mine.node, sizeof mine.node) &&
      gethostname(mine.node, sizeof mine.node - 1) != 0)
    snprintf(mine.node, sizeof mine.node, "unknown");
  mine.clock = learn_clock(mine.node);
  TRY(comm_all_gather(world, &mine, process.place, sizeof mine));
  int nodes = 0;
  for (int i = 0; i < world->size; i++) {
    CommPlace *place = &process.place[i];
    place->node_index = -1;
    for (int k = 0; k < i && place->node_index < 0; k++)
      if (strcmp(process.place[k].node, place->node) == 0)
        place->node_index = process.place[k].node_index;
    if (place->node_index < 0) place->node_index = nodes++;
  }
  for (int i = 0; i < world->size; i++) {
    CommPlace *place = &process.place[i];
    for (int k = 0; k < world->size; k++) {
      bool is_here = process.place[k].node_index == place->node_index;
      place->n_local += is_here;
      place->local += is_here && k < i;
    }
  }
  return ST_OK;
}

// A transport that learns of another rank's abort may call exit itself: it must not be entered.
static void at_exit(void) {
  if (process.n_inside == 0) comm_world_close(process.world);
}

// Makes the groups of all ranks, over what the transport opened as `opened`.
static Status found_world(const Comm *opened) {
  int size = opened->size;
  process.place = calloc((size_t)size, sizeof *process.place);
  process.peer = calloc((size_t)size, sizeof *process.peer);
  int *member = malloc((size_t)size * sizeof *member);
  Status status = process.place && process.peer && member
                      ? ST_OK
                      : fail(ST_ENOMEM, "out of memory for a world of %d ranks", size);
  if (status != ST_OK) goto done;
  for (int i = 0; i < size; i++) member[i] = i;
  TRY_TO(done, comm_group_new(opened, ID_WORLD, opened->rank, size, member, &process.world));
  TRY_TO(done, comm_group_new(opened, ID_LEAVING, opened->rank, size, member, &process.leaving));
done:
  free(member);
  return status;
}

static Status open_launched(void) {
  const Launch *launch = &process.launch;
  TRY(comm_transport_open(launch, &process.transport));
  Comm opened = {0};
  TRY(process.transport->open(&opened));
  if (opened.size != launch->world) {
    Status status = fail(ST_ECOMM, "%s started %d ranks, but %s sees %d", launch->launcher,
                         launch->world, process.transport->name, opened.size);
    return fail_hint(status,
                     "it is another MPI's launcher, or another version's: use the mpirun that "
                     "belongs to the library, or `rille -n %d script.lua`",
                     launch->world);
  }
  TRY(found_world(&opened));
  comm_life_begin();
  poll_hook = comm_poll;
  atexit(at_exit);
  return ST_OK;
}

Status comm_world(Comm **out) {
  if (!process.world) {
    launch_read(&process.launch);
    process.fake_clock = comm_fake_number("RILLE_FAKE_CLOCK", process.launch.rank, 0.0);
    process.fake_slow = comm_fake_number("RILLE_FAKE_SLOW", process.launch.rank, 1.0);
    const char *wait = getenv("RILLE_WAIT"), *timeout = getenv("RILLE_STALL_TIMEOUT");
    process.shares_cores = process.launch.local_world > (int)sysconf(_SC_NPROCESSORS_ONLN) ||
                           (wait && strcmp(wait, "passive") == 0);
    if (timeout && atof(timeout) > 0) comm_stall_timeout(atof(timeout));
    if (process.launch.world > 1) {
      TRY(open_launched());
    } else {
      Comm *alone;
      process.launch.rank = 0;
      TRY(comm_self(&alone));
      Status status = found_world(alone);
      comm_free(alone);
      TRY(status);
    }
    TRY(learn_places(process.world));
    if (process.launch.world > 1) TRY(comm_bells_hang());
  }
  *out = process.world;
  return ST_OK;
}

void comm_leaving(int code) { process.exit_code = code; }

void comm_world_close(Comm *world) {
  if (!world || process.has_left || world->size == 1) return;
  process.has_left = true; // questions are answered with NOTICE_LEFT from here on
  poll_hook = NULL;
  if (comm_barrier(process.leaving) != ST_OK)
    comm_fatal(world, process.exit_code ? process.exit_code : 1);
  launch_tell(process.exit_code);
  comm_life_end();
  process.transport->close(world);
}

// A library that is unloaded, as by a stock Lua, takes the world of one rank along.
__attribute__((destructor)) static void forget_world(void) {
  Comm *world = process.world;
  if (!world || world->size > 1) return;
  process.world = NULL;
  group_delete(process.leaving);
  group_delete(world);
  free(process.place);
  free(process.peer);
}

const CommPlace *comm_place(const Comm *comm, int rank) {
  return &process.place[comm->member[rank]];
}

// ---- messages --------------------------------------------------------------------------------

Status comm_lose(Status status) {
  if (process.lost != ST_OK || !process.world || process.world->size == 1) return status;
  process.lost = status;
  status_keep(&process.lost_words);
  process.n_inside++;
  if (process.world->vtable->drop) process.world->vtable->drop(process.world);
  process.n_inside--;
  return status_again(process.lost, &process.lost_words);
}

static Status lost_again(void) { return status_again(process.lost, &process.lost_words); }

Status comm_send(Comm *comm, int peer, int channel, const void *data, size_t bytes, Stream *stream,
                 CommRequest **out) {
  assert(peer >= 0 && peer < comm->size && channel >= 0 && channel < CHANNEL_CONTROL);
  if (process.lost != ST_OK) return lost_again();
  process.n_inside++;
  Status status = comm->vtable->send(comm, peer, channel, data, bytes, stream, out);
  process.n_inside--;
  comm->stats.messages++;
  comm->stats.bytes += (int64_t)bytes;
  return status == ST_OK ? status : comm_lose(status);
}

static Status receive(Comm *comm, int peer, int channel, void *data, size_t bytes, size_t *got,
                      Stream *stream, CommRequest **out) {
  assert(peer >= 0 && peer < comm->size && channel >= 0 && channel < CHANNEL_CONTROL);
  if (process.lost != ST_OK) return lost_again();
  process.n_inside++;
  Status status = comm->vtable->recv(comm, peer, channel, data, bytes, got, stream, out);
  process.n_inside--;
  return status == ST_OK ? status : comm_lose(status);
}

Status comm_recv(Comm *comm, int peer, int channel, void *data, size_t bytes, Stream *stream,
                 CommRequest **out) {
  return receive(comm, peer, channel, data, bytes, NULL, stream, out);
}

Status comm_recv_short(Comm *comm, int peer, int channel, void *data, size_t room, size_t *got,
                       CommRequest **out) {
  assert(room <= COMM_SHORT);
  return receive(comm, peer, channel, data, room, got, NULL, out);
}

Status comm_test(Comm *comm, CommRequest *request, bool *done) {
  *done = false;
  if (process.lost != ST_OK) return lost_again();
  process.n_inside++;
  Status status = comm->vtable->test(comm, request, done);
  process.n_inside--;
  return status == ST_OK ? status : comm_lose(status);
}

Status comm_wait(Comm *comm, CommRequest *request) {
  int anybody = -1;
  return comm_wait_all(comm, &request, &anybody, 1, "a message");
}

Status comm_wait_all(Comm *comm, CommRequest **requests, const int *peers, int n,
                     const char *what) {
  double since = 0;
  for (int i = 0; i < n;) {
    if (!requests[i]) {
      i++;
      continue;
    }
    bool done;
    Status status = comm_test(comm, requests[i], &done);
    if (status != ST_OK || done) requests[i] = NULL;
    if (status != ST_OK) return status;
    if (done) continue;
    if (since == 0) since = clock_now();
    TRY(comm_waiting(comm, peers[i], what, since));
  }
  if (since > 0) {
    double waited = clock_now() - since;
    comm->stats.waited += waited;
    comm->stats.busy += waited;
  }
  comm_beat();
  return ST_OK;
}

void comm_listen(void) {
  CommNotice notice;
  int from;
  Comm *world = process.world;
  for (int n = 0; n < MAX_NOTICES; n++) {
    process.n_inside++;
    bool got = world->vtable->poll(world, &notice, &from);
    process.n_inside--;
    if (!got) return;
    comm_notice(from, &notice);
  }
}

void comm_say(int to, const CommNotice *notice) {
  process.n_inside++;
  process.world->vtable->say(process.world, to, notice);
  process.n_inside--;
}

void comm_abort(int code) {
  process.life.abort_code = code;
  process.life.abort_at = clock_now(); // from here on the watchdog sees to it
  process.n_inside++;
  process.world->vtable->abort(process.world, code);
}

void comm_progress(void) {
  if (!process.world) return;
  comm_listen();
  comm_collectives_advance();
  for (Comm *group = process.groups; group; group = group->next)
    if (group->on_poll) group->on_poll(group->poll_user);
}

void comm_poll(void) {
  double now = clock_now();
  if (now - process.life.polled_at < POLL_EVERY) return;
  process.life.polled_at = now;
  comm_beat();
  comm_progress();
}

double comm_clock(void) { return clock_now() + process.fake_clock; }
double comm_fake_slow(void) { return process.fake_slow; }
