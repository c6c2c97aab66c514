// channel - see channel.h.
#include "parallel/channel.h"

#include "core/op.h"

#include <assert.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

// A tensor of a message.
typedef struct Slot {
  uint8_t dtype, ndim, present, wants_grad;
} Slot;

enum { MAGIC = 0x52430002, BODY = 242 };

// What goes first, up to where its body is used. The magic number changes with the layout of this
// struct.
typedef struct Header {
  uint32_t magic;
  int32_t kind, stage, mb, peer, n;
  int32_t holds_all; // the tensors' bytes are in the body; else they come in messages of their own
  double note, sent;
  Slot slot[PARCEL_MAX];
  int64_t body[BODY]; // the shapes of the tensors that are present, then what they hold
} Header;

// It arrives in one piece, and wakes who sleeps.
_Static_assert(sizeof(Header) == COMM_SHORT, "a header is a short message");
_Static_assert((size_t)PARCEL_MAX *MAX_DIMS <= BODY, "a header has room for all shapes");

// A message on its way out.
typedef struct Outgoing {
  struct Outgoing *next;
  Parcel *parcel;                       // NULL: the header holds all
  CommRequest *request[PARCEL_MAX + 1]; // [0] the header's; NULL: done or never there
  size_t bytes;                         // of the header
  Header header;                        // last: its body is filled as far as it is used
} Outgoing;

// A message on its way in. It is free, or waits for its header, or for its tensors.
typedef struct Incoming {
  enum { IN_FREE, IN_HEADER, IN_ROOM, IN_PAYLOAD } state; // ROOM: the header is here, memory not
  int index;                                              // among the expected ones
  int body_at;                                            // in its body, behind the shapes
  size_t bytes;                                           // of the header
  Header header;
  CommRequest *header_request, *request[PARCEL_MAX];
  Parcel *parcel;
} Incoming;

struct Channel {
  Ctx *ctx;
  Comm *comm;
  int peer, depth;
  Device *device;
  Outgoing *first, *last; // under way
  Outgoing *spare;        // done: to be used again
  Incoming *ring;         // [depth] message k is in ring[k % depth]
  const Action *action;
  Parcel **const *where;
  int expected, posted, arrived, consumed;
  Status status; // of channel_progress; its words are in `kept`
  KeptStatus kept;
};

// ---- parcels

Status parcel_new(Parcel **out) {
  *out = calloc(1, sizeof **out);
  return *out ? ST_OK : fail(ST_ENOMEM, "out of memory for a message between stages");
}

void parcel_delete(Ctx *ctx, Parcel *parcel) {
  if (!parcel) return;
  for (int i = 0; i < parcel->n; i++) tensor_release(ctx, parcel->value[i]);
  free(parcel);
}

// ---- sending

// Row-major bytes that the message can own.
static Status settle(Ctx *ctx, Tensor **value) {
  Tensor *own = NULL;
  if (tensor_contiguous(*value)) return ST_OK;
  bool enabled = ctx->grad_enabled;
  ctx->grad_enabled = false;
  OpArgs args = {.n_list = -1};
  Status status = op_apply(ctx, ctx->core_ops->contiguous, value, 1, &args, &own);
  ctx->grad_enabled = enabled;
  if (status != ST_OK) return status;
  tensor_release(ctx, *value);
  *value = own;
  return ST_OK;
}

static size_t bytes_of(const Tensor *tensor) {
  return (size_t)tensor_numel(tensor) * dtype_size(tensor->dtype);
}

// Puts what the tensors hold into what is left of the body, if there is room and the host can read
// them. Returns the bytes.
static size_t fill_body(Header *header, int at, const Parcel *parcel) {
  size_t total = 0, room = (size_t)(BODY - at) * sizeof *header->body;
  for (int i = 0; i < parcel->n; i++) {
    const Tensor *value = parcel->value[i];
    size_t bytes = value ? bytes_of(value) : 0;
    if (bytes > room - total || (value && value->storage->device->kind != DEV_CPU)) return 0;
    total += bytes;
  }
  char *to = (char *)&header->body[at];
  for (int i = 0; i < parcel->n; i++) {
    if (!parcel->value[i]) continue;
    size_t bytes = bytes_of(parcel->value[i]);
    if (bytes > 0) memcpy(to, tensor_data(parcel->value[i]), bytes);
    to += bytes;
  }
  header->holds_all = 1;
  return total;
}

static Status fill_header(Ctx *ctx, Outgoing *out, Action action, Parcel *parcel) {
  Header *header = &out->header;
  int at = 0;
  header->magic = MAGIC;
  header->kind = action.kind;
  header->stage = action.stage;
  header->mb = action.mb;
  header->peer = action.peer;
  header->n = parcel->n;
  header->note = parcel->note;
  for (int i = 0; i < parcel->n; i++) {
    if (!parcel->value[i]) continue;
    TRY(settle(ctx, &parcel->value[i]));
    const Tensor *value = parcel->value[i];
    header->slot[i] = (Slot){(uint8_t)value->dtype, (uint8_t)value->ndim, 1, parcel->wants_grad[i]};
    memcpy(&header->body[at], value->shape, (size_t)value->ndim * sizeof *header->body);
    at += value->ndim;
  }
  out->bytes = offsetof(Header, body) + (size_t)at * sizeof *header->body;
  out->bytes += fill_body(header, at, parcel);
  header->sent = comm_clock();
  return ST_OK;
}

static Outgoing *outgoing_new(Channel *channel) {
  Outgoing *out = channel->spare;
  if (out)
    channel->spare = out->next;
  else
    out = malloc(sizeof *out);
  if (out) memset(out, 0, offsetof(Outgoing, header.body));
  return out;
}

static void outgoing_free(Channel *channel, Outgoing *out) {
  out->next = channel->spare;
  channel->spare = out;
}

Status channel_send(Channel *channel, Action action, Parcel *parcel) {
  Ctx *ctx = channel->ctx;
  Outgoing *out = outgoing_new(channel);
  if (!out) {
    parcel_delete(ctx, parcel);
    return fail(ST_ENOMEM, "out of memory for a message between stages");
  }
  out->parcel = parcel;
  Status status = fill_header(ctx, out, action, parcel);
  if (status != ST_OK) {
    parcel_delete(ctx, parcel);
    outgoing_free(channel, out);
    return status;
  }
  if (channel->last)
    channel->last->next = out;
  else
    channel->first = out;
  channel->last = out;
  if (out->header.holds_all) {
    parcel_delete(ctx, parcel);
    out->parcel = NULL;
  }
  TRY(comm_send(channel->comm, channel->peer, CHANNEL_HEADER, &out->header, out->bytes, NULL,
                &out->request[0]));
  if (!out->parcel) return ST_OK;
  for (int i = 0; i < parcel->n; i++) {
    const Tensor *value = parcel->value[i];
    if (value && bytes_of(value) > 0)
      TRY(comm_send(channel->comm, channel->peer, CHANNEL_PAYLOAD, tensor_data(value),
                    bytes_of(value), NULL, &out->request[i + 1]));
  }
  return ST_OK;
}

// Tests a request that may be there; *all stays true if it is done.
static Status test(Channel *channel, CommRequest **request, bool *all) {
  bool done = true;
  if (*request) TRY(comm_test(channel->comm, *request, &done));
  if (done)
    *request = NULL;
  else
    *all = false;
  return ST_OK;
}

// Messages that are out give their tensors up (inv. 2).
static Status progress_sends(Channel *channel) {
  for (Outgoing **at = &channel->first; *at;) {
    Outgoing *out = *at;
    bool done = true;
    int n = out->parcel ? out->parcel->n : 0;
    for (int i = 0; i <= n; i++) TRY(test(channel, &out->request[i], &done));
    if (!done) {
      at = &out->next;
      continue;
    }
    *at = out->next;
    parcel_delete(channel->ctx, out->parcel);
    outgoing_free(channel, out);
  }
  channel->last = channel->first;
  while (channel->last && channel->last->next) channel->last = channel->last->next;
  return ST_OK;
}

// ---- receiving

// Posts headers as far as the depth allows (inv. 1).
static Status post(Channel *channel) {
  while (channel->posted < channel->expected &&
         channel->posted - channel->consumed < channel->depth) {
    Incoming *in = &channel->ring[channel->posted % channel->depth];
    // A slot may still hold a message that came later than those consumed before it.
    if (in->state != IN_FREE) return ST_OK;
    TRY(comm_recv_short(channel->comm, channel->peer, CHANNEL_HEADER, &in->header,
                        sizeof in->header, &in->bytes, &in->header_request));
    in->state = IN_HEADER;
    in->index = channel->posted++;
  }
  return ST_OK;
}

// Whether that many bytes are a header with room for what it announces.
static bool is_sound_header(const Header *header, size_t bytes) {
  size_t used = offsetof(Header, body);
  if (bytes < used || header->magic != MAGIC || header->n < 0 || header->n > PARCEL_MAX)
    return false;
  for (int i = 0; i < header->n; i++) {
    const Slot *slot = &header->slot[i];
    if (slot->ndim > MAX_DIMS || slot->dtype >= DTYPE_COUNT) return false;
    if (slot->present) used += slot->ndim * sizeof *header->body;
  }
  return used <= bytes;
}

// The header must be that of the message which the list expects here.
static Status check_header(const Channel *channel, const Incoming *in) {
  const Header *header = &in->header;
  Action want = channel->action[in->index];
  ActionKind kind = want.kind == ACTION_RECV_F ? ACTION_SEND_F : ACTION_SEND_B;
  bool is_sound = is_sound_header(header, in->bytes);
  if (is_sound && header->kind == (int)kind && header->stage == want.peer &&
      header->peer == want.stage && header->mb == want.mb)
    return ST_OK;
  if (!is_sound)
    return fail(ST_ECOMM, "rank %d sent something that is no pipeline message (another version?)",
                channel->peer);
  return fail(ST_ECOMM, "rank %d sent %d%s%d to stage %d where %d%s%d to stage %d was expected",
              channel->peer, header->stage, action_text((ActionKind)header->kind), header->mb,
              header->peer, want.peer, action_text(kind), want.mb, want.stage);
}

static Status make_room(Channel *channel, Incoming *in) {
  Parcel *parcel;
  const Header *header = &in->header;
  TRY(parcel_new(&parcel));
  in->body_at = 0;
  for (int i = 0; i < header->n; i++) {
    const Slot *slot = &header->slot[i];
    parcel->n = i + 1;
    parcel->wants_grad[i] = slot->wants_grad;
    if (!slot->present) continue;
    TensorSpec spec = {.dtype = (DType)slot->dtype, .ndim = slot->ndim};
    memcpy(spec.shape, &header->body[in->body_at], (size_t)slot->ndim * sizeof *spec.shape);
    in->body_at += slot->ndim;
    spec_row_major(&spec);
    Status status =
        tensor_new(channel->ctx, channel->device, &spec, MEM_COMMUNICATION, &parcel->value[i]);
    if (status != ST_OK) {
      parcel_delete(channel->ctx, parcel);
      return status;
    }
  }
  parcel->note = header->note;
  parcel->sent = header->sent;
  in->parcel = parcel;
  return ST_OK;
}

// Takes what the tensors hold out of the body.
static Status read_body(const Channel *channel, const Incoming *in) {
  const char *from = (const char *)&in->header.body[in->body_at];
  size_t left = in->bytes - (size_t)(from - (const char *)&in->header);
  for (int i = 0; i < in->parcel->n; i++) {
    const Tensor *value = in->parcel->value[i];
    if (!value) continue;
    size_t bytes = bytes_of(value);
    if (bytes > left) return fail(ST_ECOMM, "rank %d sent less than it said", channel->peer);
    const DeviceVtable *does = channel->device->vtable;
    if (bytes > 0) TRY(does->copy_in(channel->device, tensor_data(value), from, bytes, NULL));
    from += bytes;
    left -= bytes;
  }
  return ST_OK;
}

static Status receive_payload(Channel *channel, Incoming *in) {
  const Parcel *parcel = in->parcel;
  if (in->header.holds_all) TRY(read_body(channel, in));
  for (int i = 0; i < parcel->n; i++) {
    const Tensor *value = parcel->value[i];
    if (value && bytes_of(value) > 0 && !in->header.holds_all)
      TRY(comm_recv(channel->comm, channel->peer, CHANNEL_PAYLOAD, tensor_data(value),
                    bytes_of(value), NULL, &in->request[i]));
  }
  in->state = IN_PAYLOAD;
  return ST_OK;
}

// Moves one message on; *passes: the next one's payload may be posted (they come in order).
static Status progress_incoming(Channel *channel, Incoming *in, bool *passes) {
  bool done = true;
  if (in->state == IN_HEADER) {
    TRY(test(channel, &in->header_request, &done));
    if (!done) return *passes = false, ST_OK;
    TRY(check_header(channel, in));
    in->state = IN_ROOM;
  }
  if (in->state == IN_ROOM) {
    Status status = make_room(channel, in);
    if (status == ST_ENOMEM && pool_pressure_held(channel->ctx->pool))
      return *passes = false, ST_OK; // tried again while waiting, where garbage can be collected
    TRY(status);
    TRY(receive_payload(channel, in));
  }
  if (in->state == IN_PAYLOAD) {
    for (int i = 0; i < in->parcel->n; i++) TRY(test(channel, &in->request[i], &done));
    if (!done) return ST_OK;
    in->parcel->arrived = comm_clock();
    *channel->where[in->index] = in->parcel;
    in->parcel = NULL;
    in->state = IN_FREE;
    channel->arrived++;
  }
  return ST_OK;
}

static Status progress(Channel *channel) {
  TRY(progress_sends(channel));
  TRY(post(channel)); // first: what has come already is seen by this look, before any sleep
  bool passes = true;
  for (int k = channel->posted - channel->depth; k < channel->posted && passes; k++) {
    if (k < 0) continue;
    Incoming *in = &channel->ring[k % channel->depth];
    if (in->state != IN_FREE && in->index == k) TRY(progress_incoming(channel, in, &passes));
  }
  return post(channel);
}

// Keeps the first failure for channel_check.
static void keep(Channel *channel, Status status) {
  if (status == ST_OK) return;
  channel->status = status;
  status_keep(&channel->kept);
}

void channel_progress(Channel *channel) {
  if (channel->status == ST_OK) keep(channel, progress(channel));
}

Status channel_check(Channel *channel) {
  if (channel->status == ST_OK) return ST_OK;
  return status_again(channel->status, &channel->kept);
}

Status channel_expect(Channel *channel, const Action *action, Parcel **const *where, int count) {
  assert(channel_idle(channel));
  channel->action = action;
  channel->where = where;
  channel->expected = count;
  channel->posted = channel->arrived = channel->consumed = 0;
  return post(channel);
}

void channel_consumed(Channel *channel) { channel->consumed++; }

bool channel_idle(const Channel *channel) {
  return !channel->first && channel->arrived == channel->expected;
}

// ---- beginning and end

Status channel_open(Ctx *ctx, Comm *comm, int peer, int depth, Device *device, Channel **out) {
  Channel *channel = calloc(1, sizeof *channel);
  Incoming *ring = calloc((size_t)depth, sizeof *ring);
  if (!channel || !ring) {
    free(channel);
    free(ring);
    return fail(ST_ENOMEM, "out of memory for a channel of depth %d", depth);
  }
  *channel = (Channel){
      .ctx = ctx, .comm = comm, .peer = peer, .depth = depth, .device = device, .ring = ring};
  *out = channel;
  return ST_OK;
}

// The transport writes to what it was given as long as a request is pending: then that is left to
// it. It happens at the end of a job that failed.
void channel_close(Channel *channel) {
  if (!channel) return;
  bool is_pending = channel->first != NULL;
  for (int i = 0; i < channel->depth; i++) {
    is_pending =
        is_pending || channel->ring[i].state == IN_HEADER || channel->ring[i].state == IN_PAYLOAD;
  }
  if (is_pending) return;
  for (int i = 0; i < channel->depth; i++) parcel_delete(channel->ctx, channel->ring[i].parcel);
  for (Outgoing *out = channel->spare, *next; out; out = next) {
    next = out->next;
    free(out);
  }
  free(channel->ring);
  free(channel);
}
