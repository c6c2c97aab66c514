// comm_mpi - the transport over MPI: a plugin, built once for each MPI found.
//
// All groups share one communicator, a copy of the world: a message's tag is made of its group's
// number and its channel, so a new group asks nothing of MPI. One receive for notices always
// stands; testing it moves everything on.
#include "parallel/comm_impl.h"

#include "core/spans.h"

#include <assert.h>
#include <mpi.h>
#include <stdlib.h>
#include <string.h>

enum { NOTICES = 64 }; // under way at once

static const size_t PIECE = (size_t)1 << 30; // bytes; MPI counts in int
static const double DROP_WITHIN = 0.05;      // seconds

// A message: pieces in order, one after the other on the same tag.
struct CommRequest {
  int n, n_done;
  bool is_recv;
  int peer; // of the group
  size_t bytes, piece;
  size_t *got;       // what has been received; NULL: only `bytes` will do
  MPI_Request one;   // of a message of one piece
  MPI_Request *many; // of one of several; else NULL
  double sent_at;    // with a delayed link: the sender's clock, itself a message before the others
  MPI_Request stamp;
  CommRequest *before, *next; // of those under way, or of the free ones
};

// What the process keeps of MPI.
typedef struct World {
  MPI_Comm comm;
  int64_t max_tag;
  size_t piece;
  double delay; // seconds that a message takes at least
  MPI_Request hears;
  CommNotice heard;
  CommNotice said[NOTICES];
  MPI_Request saying[NOTICES];
  CommRequest *under_way, *free;
  int n_slow;   // of those under way, those that are not short
  bool is_ours; // MPI was initialised here
  bool yields;  // as MPI itself would, at its beginning and end
} World;

static Status mpi_failed(int code, const char *what) {
  char words[MPI_MAX_ERROR_STRING];
  int length = 0, kind = MPI_ERR_OTHER;
  MPI_Error_class(code, &kind);
  if (MPI_Error_string(code, words, &length) != MPI_SUCCESS) length = 0;
  return fail(ST_ECOMM, "%s: MPI says %.*s", what, length, words);
}

#define MPI_TRY(call, what)                                   \
  do {                                                        \
    int code_ = (call);                                       \
    if (code_ != MPI_SUCCESS) return mpi_failed(code_, what); \
  } while (0)

// ---- messages --------------------------------------------------------------------------------

static Status tag_of(const Comm *comm, int channel, int *tag) {
  const World *world = comm->transport;
  int64_t wide = comm->id * CHANNELS + channel;
  if (wide > world->max_tag)
    return fail(ST_ECOMM, "this MPI has no room for more than %lld groups of ranks",
                (long long)(world->max_tag / CHANNELS));
  *tag = (int)wide;
  return ST_OK;
}

static bool is_slow(const CommRequest *request) { return request->bytes > COMM_SHORT; }

static Status request_new(World *world, bool is_recv, int peer, size_t bytes, CommRequest **out) {
  CommRequest *request = world->free;
  if (request)
    world->free = request->next;
  else
    request = malloc(sizeof *request);
  if (!request) return fail(ST_ENOMEM, "out of memory for a message");
  size_t piece = bytes <= COMM_SHORT ? COMM_SHORT : world->piece;
  size_t n = bytes <= piece ? 1 : (bytes + piece - 1) / piece;
  *request = (CommRequest){.n = (int)n,
                           .is_recv = is_recv,
                           .peer = peer,
                           .bytes = bytes,
                           .piece = piece,
                           .one = MPI_REQUEST_NULL,
                           .stamp = MPI_REQUEST_NULL};
  if (n > 1) request->many = malloc(n * sizeof *request->many);
  if (n > 1 && !request->many) {
    free(request);
    return fail(ST_ENOMEM, "out of memory for a message of %zu pieces", n);
  }
  for (size_t i = 0; i < n && n > 1; i++) request->many[i] = MPI_REQUEST_NULL;
  request->next = world->under_way;
  if (request->next) request->next->before = request;
  world->under_way = request;
  world->n_slow += is_slow(request);
  *out = request;
  return ST_OK;
}

static void request_free(World *world, CommRequest *request) {
  world->n_slow -= is_slow(request);
  free(request->many);
  if (request->next) request->next->before = request->before;
  *(request->before ? &request->before->next : &world->under_way) = request->next;
  request->next = world->free;
  world->free = request;
}

static size_t piece_bytes(const CommRequest *request, int i) {
  size_t at = (size_t)i * request->piece, left = request->bytes - at;
  return left < request->piece ? left : request->piece;
}

static MPI_Request *piece_request(CommRequest *request, int i) {
  return request->many ? &request->many[i] : &request->one;
}

static Status send_pieces(World *world, CommRequest *request, int to, int tag, const char *data) {
  if (world->delay > 0) {
    request->sent_at = clock_now();
    MPI_TRY(MPI_Isend(&request->sent_at, sizeof(double), MPI_BYTE, to, tag, world->comm,
                      &request->stamp),
            "sending");
  }
  for (int i = 0; i < request->n; i++)
    MPI_TRY(MPI_Isend(data + (size_t)i * request->piece, (int)piece_bytes(request, i), MPI_BYTE, to,
                      tag, world->comm, piece_request(request, i)),
            "sending");
  return ST_OK;
}

static Status mpi_send(Comm *comm, int peer, int channel, const void *data, size_t bytes,
                       Stream *stream, CommRequest **out) {
  (void)stream;
  World *world = comm->transport;
  int tag = 0;
  TRY(tag_of(comm, channel, &tag));
  CommRequest *request;
  TRY(request_new(world, false, peer, bytes, &request));
  TRY(send_pieces(world, request, comm->member[peer], tag, data));
  *out = request;
  comm_ring(comm, peer);
  return ST_OK;
}

static Status recv_pieces(World *world, CommRequest *request, int from, int tag, char *data) {
  if (world->delay > 0)
    MPI_TRY(MPI_Irecv(&request->sent_at, sizeof(double), MPI_BYTE, from, tag, world->comm,
                      &request->stamp),
            "receiving");
  for (int i = 0; i < request->n; i++)
    MPI_TRY(MPI_Irecv(data + (size_t)i * request->piece, (int)piece_bytes(request, i), MPI_BYTE,
                      from, tag, world->comm, piece_request(request, i)),
            "receiving");
  return ST_OK;
}

static Status mpi_recv(Comm *comm, int peer, int channel, void *data, size_t bytes, size_t *got,
                       Stream *stream, CommRequest **out) {
  (void)stream;
  assert(!got || bytes <= COMM_SHORT);
  World *world = comm->transport;
  int tag = 0;
  TRY(tag_of(comm, channel, &tag));
  CommRequest *request;
  TRY(request_new(world, true, peer, bytes, &request));
  request->got = got;
  Status status = recv_pieces(world, request, comm->member[peer], tag, data);
  if (status == ST_OK) *out = request;
  return status;
}

static Status wrong_size(const CommRequest *request, const Comm *comm) {
  Status status = fail(ST_ECOMM, "a message from rank %d has not the %zu bytes that are wanted",
                       comm->member[request->peer], request->bytes);
  return fail_hint(status, "the ranks do not run the same steps: compare their options and data");
}

static Status mpi_test(Comm *comm, CommRequest *request, bool *done) {
  World *world = comm->transport;
  *done = false;
  while (request->n_done < request->n) {
    MPI_Status status;
    int is_done, got;
    int code = MPI_Test(piece_request(request, request->n_done), &is_done, &status);
    if (code == MPI_SUCCESS && !is_done) return ST_OK;
    int kind = MPI_SUCCESS;
    if (code != MPI_SUCCESS) MPI_Error_class(code, &kind);
    bool is_wrong = kind == MPI_ERR_TRUNCATE;
    if (code == MPI_SUCCESS && request->is_recv) {
      MPI_Get_count(&status, MPI_BYTE, &got);
      if (request->got)
        *request->got = (size_t)got;
      else
        is_wrong = (size_t)got != piece_bytes(request, request->n_done);
    }
    if (is_wrong) return wrong_size(request, comm);
    if (code != MPI_SUCCESS) return mpi_failed(code, request->is_recv ? "receiving" : "sending");
    request->n_done++;
  }
  if (world->delay > 0) {
    int is_done;
    MPI_TRY(MPI_Test(&request->stamp, &is_done, MPI_STATUS_IGNORE), "a delayed message");
    if (!is_done) return ST_OK;
    if (request->is_recv && clock_now() < request->sent_at + world->delay) return ST_OK;
  }
  *done = true;
  request_free(world, request);
  return ST_OK;
}

// A receive can be cancelled, a send not, and what has begun may need its peer: so there is an end
// to the patience.
static void mpi_drop(Comm *comm) {
  World *world = comm->transport;
  for (CommRequest *r = world->under_way; r; r = r->next) {
    if (!r->is_recv) continue;
    for (int i = 0; i < r->n; i++)
      if (*piece_request(r, i) != MPI_REQUEST_NULL) MPI_Cancel(piece_request(r, i));
    if (r->stamp != MPI_REQUEST_NULL) MPI_Cancel(&r->stamp);
  }
  double until = clock_now() + DROP_WITHIN;
  while (world->under_way) {
    CommRequest *r = world->under_way;
    int is_done = 1, stamp_is_done = 1;
    for (int i = 0; i < r->n && is_done; i++)
      MPI_Test(piece_request(r, i), &is_done, MPI_STATUS_IGNORE);
    MPI_Test(&r->stamp, &stamp_is_done, MPI_STATUS_IGNORE);
    if ((is_done && stamp_is_done) || clock_now() > until) request_free(world, r);
  }
}

// ---- notices ---------------------------------------------------------------------------------

// A long message asks both sides to look; a delayed one is over by the clock.
static bool mpi_needs_looks(Comm *comm) {
  const World *world = comm->transport;
  return world->n_slow > 0 || world->delay > 0;
}

static void listen_again(World *world) {
  MPI_Irecv(&world->heard, sizeof world->heard, MPI_BYTE, MPI_ANY_SOURCE, CHANNEL_CONTROL,
            world->comm, &world->hears);
}

static bool mpi_poll(Comm *comm, CommNotice *out, int *from) {
  World *world = comm->transport;
  int is_done = 0;
  MPI_Status status;
  if (MPI_Test(&world->hears, &is_done, &status) != MPI_SUCCESS || !is_done) return false;
  *out = world->heard;
  *from = status.MPI_SOURCE;
  listen_again(world);
  return true;
}

static void mpi_say(Comm *comm, int to, const CommNotice *notice) {
  World *world = comm->transport;
  for (int i = 0; i < NOTICES; i++) {
    int is_done = 0;
    MPI_Test(&world->saying[i], &is_done, MPI_STATUS_IGNORE);
    if (!is_done) continue;
    world->said[i] = *notice;
    MPI_Isend(&world->said[i], sizeof *notice, MPI_BYTE, to, CHANNEL_CONTROL, world->comm,
              &world->saying[i]);
    comm_ring(comm, to);
    return;
  }
}

// ---- the world -------------------------------------------------------------------------------

static void mpi_abort(Comm *comm, int code) {
  World *world = comm->transport;
  MPI_Abort(world->comm, code);
  abort();
}

static const CommVtable mpi = {.name = "mpi",
                               .send = mpi_send,
                               .recv = mpi_recv,
                               .test = mpi_test,
                               .poll = mpi_poll,
                               .say = mpi_say,
                               .abort = mpi_abort,
                               .needs_looks = mpi_needs_looks,
                               .drop = mpi_drop};

static size_t piece_limit(void) {
  const char *text = getenv("RILLE_TEST_PIECE");
  long long piece = text ? atoll(text) : 0;
  return piece > 0 && (size_t)piece < PIECE ? (size_t)piece : PIECE;
}

// Where a leak checker runs, it passes over what MPI keeps for itself.
extern void __lsan_disable(void) __attribute__((weak));
extern void __lsan_enable(void) __attribute__((weak));

// Open MPI's own (not in its headers): whether an MPI_Test that finds nothing yields the core,
// which it does where ranks outnumber cores. Says what held before. A rank of Rille sleeps when it
// waits; one that works and looks in between would be put behind all others at every look.
extern bool opal_progress_set_yield_when_idle(bool yields) __attribute__((weak));

static Status start(World *world) {
  int is_initialised = 0, provided, is_set = 0, *most = NULL;
  MPI_Initialized(&is_initialised);
  if (!is_initialised)
    MPI_TRY(MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided), "starting MPI");
  // Errors without a communicator at hand go to the world's, and MPICH's MPI_Test has none.
  if (!is_initialised) MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_TRY(MPI_Comm_dup(MPI_COMM_WORLD, &world->comm), "starting MPI");
  MPI_TRY(MPI_Comm_set_errhandler(world->comm, MPI_ERRORS_RETURN), "starting MPI");
  MPI_TRY(MPI_Comm_get_attr(world->comm, MPI_TAG_UB, &most, &is_set), "starting MPI");
  world->max_tag = is_set ? *most : 32767;
  world->is_ours = !is_initialised;
  if (opal_progress_set_yield_when_idle) world->yields = opal_progress_set_yield_when_idle(false);
  return ST_OK;
}

static Status mpi_open(Comm *out) {
  World *world = calloc(1, sizeof *world);
  if (!world) return fail(ST_ENOMEM, "out of memory for the world");
  if (__lsan_disable) __lsan_disable();
  Status status = start(world);
  if (__lsan_enable) __lsan_enable();
  if (status != ST_OK) {
    free(world);
    return status;
  }
  world->piece = piece_limit();
  const char *delay = getenv("RILLE_FAKE_LINK");
  world->delay = delay ? 1e-3 * atof(delay) : 0.0;
  for (int i = 0; i < NOTICES; i++) world->saying[i] = MPI_REQUEST_NULL;
  MPI_Comm_rank(world->comm, &out->rank);
  MPI_Comm_size(world->comm, &out->size);
  out->vtable = &mpi;
  out->transport = world;
  listen_again(world);
  return ST_OK;
}

// It looks before the end: Open MPI's MPI_Finalize unloads what its reports would name.
extern void __lsan_do_leak_check(void) __attribute__((weak));

static void mpi_close(Comm *comm) {
  World *world = comm->transport;
  MPI_Cancel(&world->hears);
  MPI_Wait(&world->hears, MPI_STATUS_IGNORE);
  for (int i = 0; i < NOTICES; i++)
    if (world->saying[i] != MPI_REQUEST_NULL) MPI_Request_free(&world->saying[i]);
  if (__lsan_do_leak_check && strcmp(RILLE_MPI, "openmpi") == 0) __lsan_do_leak_check();
  if (opal_progress_set_yield_when_idle) opal_progress_set_yield_when_idle(world->yields);
  if (world->is_ours) MPI_Finalize();
}

extern const CommTransport rille_transport;
const CommTransport rille_transport = {.name = RILLE_MPI, .open = mpi_open, .close = mpi_close};
