// comm - messages and collectives between the ranks of a group.
//
// A transport is a table of functions. `self` (one rank) is built in; MPI comes as a plugin,
// rille_mpi_<impl>.so, opened when a launcher started us. Nothing progresses by itself: comm_poll
// moves everything on, and runs from core's poll hook between kernels and between row blocks.
//
//     comm_send/recv ---> CommRequest ---> comm_test ... done      (the buffer is free again)
//
// Collectives are built here on send and receive, in rank order, so that every rank gets the same
// bits on every run, and a sum of slices equals the sum of the whole; a transport may bring its
// own.
//
// Invariants:
//  1. Messages of one (sender, receiver, channel) arrive in the order in which they were sent.
//  2. A buffer belongs to the transport until its request is done.
//  3. A sum is taken in rank order, in f32 for f32 and bf16, in f64 for f64: the same bits on all
//     ranks.
//  4. Every rank of a group calls the same collectives in the same order.
//  5. After an error of the transport, or of comm_waiting, the job is lost: nothing writes to any
//     buffer, and what is asked later fails in the same words, which end the job at the latest when
//     this rank leaves.
#ifndef RILLE_PARALLEL_COMM_H
#define RILLE_PARALLEL_COMM_H

#include "core/device.h"
#include "core/dtype.h"
#include "core/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Comm Comm;
typedef struct CommRequest CommRequest;       // a message under way
typedef struct CommCollective CommCollective; // a collective under way

// Channels keep kinds of messages apart; each is ordered for itself.
enum {
  CHANNEL_HEADER,  // of a pipeline: what comes next
  CHANNEL_PAYLOAD, // ... the tensors
  CHANNEL_GROUP,   // collectives
  CHANNEL_CONTROL, // heart-beats, notices of leaving: the library's own
  CHANNELS
};

// Bytes of a message that goes in one piece and is there as soon as it is sent.
enum { COMM_SHORT = 2048 };

// What a sum is taken with.
typedef enum CommReduce { REDUCE_SUM, REDUCE_MAX } CommReduce;

// A message of the control channel: questions after a rank's life, and how ranks end.
typedef struct CommNotice {
  int32_t kind;      // of parallel/comm_impl.h
  int32_t code;      // exit code of a rank that has left
  int32_t waits_for; // rank of the world that the sender waits for; -1: none
  int32_t root;      // the end of the chain of ranks that wait for each other; -1: the sender
  double age;        // seconds since anybody in that chain did some work
  uint64_t hash;     // of a failing rank's words
  char doing[48], root_doing[48];
} CommNotice;

typedef struct CommVtable {
  const char *name;
  // Starts a message of `bytes` (any size: cut into pieces below 2^31 elements) after what is in
  // `stream` now. Errors: ECOMM.
  Status (*send)(Comm *comm, int peer, int channel, const void *data, size_t bytes, Stream *stream,
                 CommRequest **out);
  // got: where to say how many bytes have come, at most `bytes`, which is at most COMM_SHORT; NULL:
  // only `bytes` will do.
  Status (*recv)(Comm *comm, int peer, int channel, void *data, size_t bytes, size_t *got,
                 Stream *stream, CommRequest **out);
  // Moves everything on; *done says whether this request is. A done or failed request is gone.
  // Errors: ECOMM, if the sender sent another number of bytes.
  Status (*test)(Comm *comm, CommRequest *request, bool *done);
  // Moves everything of the world on; true if a notice has arrived. Short; never blocks; does not
  // allocate.
  bool (*poll)(Comm *world, CommNotice *out, int *from);
  // Sends a notice and forgets it; dropped if too many are under way.
  void (*say)(Comm *world, int to, const CommNotice *notice);
  // Ends the whole job at once, with this exit code. Does not return.
  void (*abort)(Comm *world, int code);
  // Optional: whether something under way moves on only where this rank looks again and again, so
  // that it must not sleep until comm_ring.
  bool (*needs_looks)(Comm *world);
  // Optional: takes back every message under way, but for notices; their buffers are free then.
  void (*drop)(Comm *world);
  // Optional: what the transport keeps for a group, made by all its ranks at once.
  Status (*open_group)(Comm *parent, Comm *group);
  void (*close_group)(Comm *group);
  // Optional: of the transport's own (NULL: built on send and recv).
  Status (*all_reduce)(Comm *comm, void *data, int64_t count, DType dtype, CommReduce how,
                       Stream *stream, CommRequest **out);
} CommVtable;

// What a group has cost this rank since it was made.
typedef struct CommStats {
  int64_t messages, bytes; // sent
  double waited;           // seconds in which this rank did nothing but wait
  double busy;             // seconds in which it waited or something was under way behind its work
} CommStats;

struct Comm {
  const CommVtable *vtable;
  int rank, size;
  void *transport;   // of the vtable
  int64_t id;        // the same on all ranks of the group; keeps the messages of groups apart
  const int *member; // [size] ranks of the world; owned
  Comm *next;        // all groups of this process
  CommStats stats;
  int n_under_way;   // collectives
  double busy_since; // ... since when there has been one
  // Called by comm_poll after this group has moved on (NULL: nothing): a pipeline's channels answer
  // a header with the receive of what it announces. Must not fail, must not wait.
  void (*on_poll)(void *user);
  void *poll_user;
};

// What a plugin exports under the name rille_transport.
typedef struct CommTransport {
  const char *name; // "openmpi"
  // Fills vtable, rank, size and transport. Called once.
  Status (*open)(Comm *world);
  void (*close)(Comm *world); // every rank calls it, after its last message
} CommTransport;

// ---- the world -------------------------------------------------------------------------------

// What the launcher's variables say: which launcher, how many ranks, which one this is, and how
// many share this node.
typedef struct Launch {
  const char *launcher; // "mpirun of Open MPI", "mpiexec of MPICH", "srun"; NULL: none
  const char *plugin;   // "openmpi" or "mpich"; NULL: none
  int rank, world, local_rank, local_world;
} Launch;
void launch_read(Launch *out);
// Whether the plugin for an MPI ("openmpi", "mpich") was built.
bool launch_has_plugin(const char *plugin);
// Tells `rille -n`, if it started us, with which code this rank ends: a launcher may lose it, mix
// it with those of the ranks that it killed, or put a crash of MPI_Finalize in its place.
void launch_tell(int code);
// In the file that RILLE_DOING names, which `rille -n` makes, each rank has a page of this many
// bytes for what it is doing.
enum { COMM_WORDS_PAGE = 4096 };
// The signal that `rille -n` got, where it passed another one on in its place; else `number`. For
// signal handlers.
int launch_meant(int number);
// EVALUE if one of the environment variables that parallel/ reads has a value that means nothing.
Status launch_environment(void);

// The world: of the launcher that started us, or of one rank; the same at every call, never freed.
// Errors: ECOMM, with what to do: the plugin is missing, the launcher says 8 and MPI says 1 (the
// other MPI's launcher), ...
Status comm_world(Comm **out);
// The end: waits until every rank has come here, then leaves in order. Other ranks that still wait
// for this one learn that it has left. Runs at exit by itself.
void comm_world_close(Comm *world);
// With which code this process will end: what the ranks that wait for it are told.
void comm_leaving(int code);

// A rank as the world knows it.
typedef struct CommPlace {
  char node[64];
  int node_index;     // from 0, in order of the first rank on each
  int pid, cores;     // cores: how many this rank may run on
  char core_set[48];  // which: "0-3,8"
  int local, n_local; // its number among the ranks of its node, and how many they are
  int n_online;       // cores of the node
  int row;            // its descriptor of the file where it says what it is doing; -1: none
  int64_t row_at;     // ... and where in it
  uint64_t clock;     // which clock it reads; 0: not known, or one that a test changed
} CommPlace;
// Of a rank of the group.
const CommPlace *comm_place(const Comm *comm, int rank);

// A group of this rank alone, without a transport.
Status comm_self(Comm **out);

// A group of the ranks with the same colour, ordered by key, then rank. Collective over `comm`.
// colour < 0: in no group, *out is NULL.
Status comm_split(Comm *comm, int colour, int key, Comm **out);
void comm_free(Comm *comm); // not collective
// The group of this process that has this id; NULL: it has been freed.
Comm *comm_by_id(int64_t id);

// ---- messages --------------------------------------------------------------------------------

Status comm_send(Comm *comm, int peer, int channel, const void *data, size_t bytes, Stream *stream,
                 CommRequest **out);
Status comm_recv(Comm *comm, int peer, int channel, void *data, size_t bytes, Stream *stream,
                 CommRequest **out);
// A message of at most `room` bytes, up to COMM_SHORT; when it is done, *got says how many.
Status comm_recv_short(Comm *comm, int peer, int channel, void *data, size_t room, size_t *got,
                       CommRequest **out);
Status comm_test(Comm *comm, CommRequest *request, bool *done);
// Waits; meanwhile everything moves on, and the failure checks of comm_waiting run.
Status comm_wait(Comm *comm, CommRequest *request);

// Moves every group of this process on; what the poll hook calls.
void comm_poll(void);

// For transports: there is something for a rank of the group, which may sleep in a wait.
void comm_ring(const Comm *comm, int peer);

// ---- waiting, and what can go wrong meanwhile ------------------------------------------------

// One turn of a loop that waits for rank `peer` of the group (-1: for any or all): moves everything
// on, sleeps a little where ranks share cores, answers and asks for signs of life.
// `what` says what for, in words ("2F0", "the gradient norm"); `since` when the waiting began.
// Errors: ECOMM: the peer has left the script, or gave no sign of life for the stall time-out.
Status comm_waiting(Comm *comm, int peer, const char *what, double since);

// Says what this rank is doing, for the reports of others and of the watchdog; `what` is copied
// (at most 47 characters). Counts as a sign of life.
void comm_doing(const char *what);

// Seconds without a sign of life after which a peer counts as stalled: RILLE_STALL_TIMEOUT, else
// 300. Sets them, if more than 0; returns what holds.
double comm_stall_timeout(double seconds);

// Reports the recorded failure as the cause, once, with node, rank and coordinates, and ends the
// job with `code`. In a world of one rank: returns. Ranks that fail at the same time in the same
// words report once.
void comm_fatal(Comm *comm, int code);
// The same in the caller's words.
void comm_fatal_words(const char *words, int code);

// How this rank is named in reports beside its number and node: "pp 1 dp 0"; copied.
void comm_coordinates(const char *words);

// ---- collectives -----------------------------------------------------------------------------
// All of them are collective over the group and return when this rank's part is done; while they
// wait, everything moves on.

Status comm_barrier(Comm *comm);
// data[bytes] of rank `root` to all.
Status comm_broadcast(Comm *comm, int root, void *data, size_t bytes);
// out[size][bytes]: everyone's in[bytes].
Status comm_all_gather(Comm *comm, const void *in, void *out, size_t bytes);
// out[bytes_of[0]], out[bytes_of[1]] ...: parts of different sizes; bytes_of[size] is known to all.
Status comm_all_gather_v(Comm *comm, const void *in, void *out, const int64_t *bytes_of);
// out[count]: the rank'th slice of the sum over ranks of in[size][count].
Status comm_reduce_scatter(Comm *comm, const void *in, void *out, int64_t count, DType dtype);
// data[count]: the sum (or maximum) over ranks, the same bits everywhere (inv. 3).
Status comm_all_reduce(Comm *comm, void *data, int64_t count, DType dtype, CommReduce how);
// out[size][bytes]: the rank'th block of everyone's in[size][bytes].
Status comm_all_to_all(Comm *comm, const void *in, void *out, size_t bytes);

// The same, under way: start, test until done. Until then the buffers are the collective's. Its own
// ones come from `pool` (NULL: malloc), accounted as communication. A done collective is gone.
Status comm_all_reduce_start(Comm *comm, Pool *pool, void *data, int64_t count, DType dtype,
                             CommReduce how, CommCollective **out);
Status comm_reduce_scatter_start(Comm *comm, Pool *pool, const void *in, void *out, int64_t count,
                                 DType dtype, CommCollective **under_way);
// in may be this rank's place in out.
Status comm_all_gather_start(Comm *comm, Pool *pool, const void *in, void *out, size_t bytes,
                             CommCollective **under_way);
Status comm_collective_test(CommCollective *collective, bool *done);
Status comm_collective_wait(CommCollective *collective, const char *what);
// Waits for everything that is under way in this process, before the memory of it goes.
Status comm_collectives_settle(void);

// Whether all ranks have the same list of lines; else ECOMM on every rank, with the first line that
// differs and who has which: "rank 5 has h.3.mlp where rank 0 has h.3.attn".
Status comm_agree(Comm *comm, const char *const *lines, int count);

// The least, over ranks, of a small number: what all are willing to do.
Status comm_all_min(Comm *comm, int64_t *value);

// ---- clocks ----------------------------------------------------------------------------------

// Measures how far the clocks of the ranks are from rank 0's, by round trips: offset[size] seconds
// to be added to a rank's comm_clock to get rank 0's, error[size] at most this wrong. On all ranks.
// Ranks of one machine, in one time namespace, read the same clock: nothing is measured.
Status comm_align_clocks(Comm *comm, double *offset, double *error);
// Seconds on this rank's clock: clock_now, plus what RILLE_FAKE_CLOCK says.
double comm_clock(void);

// How many times as long this rank's actions are to take: RILLE_FAKE_SLOW; 1: as they are.
double comm_fake_slow(void);

#ifdef __cplusplus
}
#endif
#endif
