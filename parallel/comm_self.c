// comm_self - the transport of a world of one rank: messages to itself, matched in order.
#include "parallel/comm_impl.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

// A send or a receive that waits for its other half, or whose half has come.
struct CommRequest {
  void *data;
  size_t bytes;
  size_t *got; // of a receive: what has come; NULL: only `bytes` will do
  bool is_done;
  bool is_wrong; // the other half had another size
  CommRequest *next;
};

// The halves that wait, of one channel: all sends, or all receives.
typedef struct Waiting {
  CommRequest *first, **last;
  bool are_sends;
} Waiting;

typedef struct SelfGroup {
  Waiting waiting[CHANNELS];
} SelfGroup;

// A send has met its receive.
static void match(CommRequest *send, CommRequest *recv) {
  bool fits = recv->got ? send->bytes <= recv->bytes : send->bytes == recv->bytes;
  if (fits && send->bytes) memcpy(recv->data, send->data, send->bytes);
  if (fits && recv->got) *recv->got = send->bytes;
  send->is_wrong = recv->is_wrong = !fits;
  send->is_done = recv->is_done = true;
}

static Status self_start(Comm *comm, int channel, bool is_send, void *data, size_t bytes,
                         size_t *got, CommRequest **out) {
  assert(channel >= 0 && channel < CHANNELS);
  CommRequest *mine = calloc(1, sizeof *mine);
  if (!mine) return fail(ST_ENOMEM, "out of memory for a message");
  mine->data = data;
  mine->bytes = bytes;
  mine->got = got;
  Waiting *waiting = &((SelfGroup *)comm->transport)->waiting[channel];
  CommRequest *other = waiting->first;
  if (other && waiting->are_sends != is_send) {
    waiting->first = other->next;
    if (!waiting->first) waiting->last = &waiting->first;
    match(is_send ? mine : other, is_send ? other : mine);
  } else {
    if (!waiting->first) waiting->last = &waiting->first;
    waiting->are_sends = is_send;
    *waiting->last = mine;
    waiting->last = &mine->next;
  }
  *out = mine;
  return ST_OK;
}

static Status self_send(Comm *comm, int peer, int channel, const void *data, size_t bytes,
                        Stream *stream, CommRequest **out) {
  (void)peer, (void)stream;
  union { // the request holds one pointer for both directions
    const void *from;
    void *to;
  } it = {.from = data};
  return self_start(comm, channel, true, it.to, bytes, NULL, out);
}

static Status self_recv(Comm *comm, int peer, int channel, void *data, size_t bytes, size_t *got,
                        Stream *stream, CommRequest **out) {
  (void)peer, (void)stream;
  return self_start(comm, channel, false, data, bytes, got, out);
}

static Status self_test(Comm *comm, CommRequest *request, bool *done) {
  (void)comm;
  *done = request->is_done;
  if (!*done) return ST_OK;
  bool is_wrong = request->is_wrong;
  free(request);
  return is_wrong ? fail(ST_ECOMM, "a message to oneself was sent and received with two sizes")
                  : ST_OK;
}

static bool self_poll(Comm *world, CommNotice *out, int *from) {
  (void)world, (void)out, (void)from;
  return false;
}

static void self_say(Comm *world, int to, const CommNotice *notice) {
  (void)world, (void)to, (void)notice;
}

static void self_abort(Comm *world, int code) {
  (void)world;
  exit(code);
}

static Status self_open_group(Comm *parent, Comm *group) {
  (void)parent;
  SelfGroup *self = calloc(1, sizeof *self);
  if (!self) return fail(ST_ENOMEM, "out of memory for a group");
  group->transport = self;
  return ST_OK;
}

// What is under way belongs to whoever started it.
static void self_close_group(Comm *group) { free(group->transport); }

static const CommVtable self = {.name = "self",
                                .send = self_send,
                                .recv = self_recv,
                                .test = self_test,
                                .poll = self_poll,
                                .say = self_say,
                                .abort = self_abort,
                                .open_group = self_open_group,
                                .close_group = self_close_group};

Status comm_self(Comm **out) {
  Comm like = {.vtable = &self};
  int member = comm_process()->launch.rank;
  return comm_group_new(&like, -1, 0, 1, &member, out);
}
