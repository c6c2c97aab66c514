// channel - tensors between two ranks of a pipeline, in an order that both know.
//
//     sender:    header (what it is, shapes, when sent)  +  payloads, in the order of its list;
//                what fits into the header (less than 2 KiB in all) goes there instead
//     receiver:  headers posted ahead to a depth; a header's arrival posts its payloads; both done:
//                a Parcel that waits for the action that consumes it
//
// A message of the sender's k-th place is the receiver's k-th expected one; the header says which
// it is, and another one is an error. Everything moves on in channel_progress, which the poll hook
// runs too, so that a transfer overlaps with kernels.
//
// Invariants:
//  1. At most `depth` messages are posted and not yet consumed.
//  2. A sent tensor is owned by the channel until its message is done.
//  3. Bytes that were received and not consumed are accounted as communication.
#ifndef RILLE_PARALLEL_CHANNEL_H
#define RILLE_PARALLEL_CHANNEL_H

#include "core/context.h"
#include "parallel/comm.h"
#include "parallel/sched.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { PARCEL_MAX = 16 }; // tensors on one edge for one microbatch

// What crosses an edge for one microbatch: tensors of any dtype, each with or without a gradient to
// come back. Gradients cross the other way; a missing one is NULL.
typedef struct Parcel {
  int n;
  Tensor *value[PARCEL_MAX]; // owned
  bool wants_grad[PARCEL_MAX];
  double note;          // a number that goes along, of the stages' own
  double sent, arrived; // seconds, on the sender's clock and on this rank's
} Parcel;

Status parcel_new(Parcel **out);
void parcel_delete(Ctx *ctx, Parcel *parcel); // NULL is allowed

typedef struct Channel Channel;

// Both directions between this rank and `peer` of the group. depth: messages posted ahead, from 1.
// device: where what arrives is placed.
Status channel_open(Ctx *ctx, Comm *comm, int peer, int depth, Device *device, Channel **out);
// Where messages are pending, after a failure, their memory is left to the transport.
void channel_close(Channel *channel);

// What will come, in order: action k is a RECV; its parcel goes to *where[k]. Both are borrowed
// until channel_finish. Posts the first ones.
Status channel_expect(Channel *channel, const Action *action, Parcel **const *where, int count);

// Sends a parcel as this SEND action; takes it over.
Status channel_send(Channel *channel, Action action, Parcel *parcel);

// Moves on; must not wait. Errors are kept and returned by the next channel_check.
void channel_progress(Channel *channel);
Status channel_check(Channel *channel);

// The consumer has taken one of the received parcels: channel_progress may post another.
void channel_consumed(Channel *channel);

// Whether all that was sent is out and all that was expected is here.
bool channel_idle(const Channel *channel);

#ifdef __cplusplus
}
#endif
#endif
