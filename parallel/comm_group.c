// comm_group - collectives that move bytes, built on send and receive.
//
// Groups are small (a node's, a pipeline's), so most of them send straight to everyone; only what
// is sent to all ranks by one, and the barrier, go by trees of depth log2(size).
#include "parallel/comm_impl.h"

#include "core/hash.h"
#include "core/spans.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Messages under way to and from everyone: room for two a rank.
typedef struct Flight {
  CommRequest **requests;
  int *peers;
  int n;
} Flight;

static Status flight_new(Flight *flight, const Comm *comm) {
  size_t room = 2 * (size_t)comm->size;
  *flight = (Flight){calloc(room, sizeof(CommRequest *)), calloc(room, sizeof(int)), 0};
  if (flight->requests && flight->peers) return ST_OK;
  free(flight->requests);
  free(flight->peers);
  return fail(ST_ENOMEM, "out of memory for %zu messages", room);
}

static void flight_free(Flight *flight) {
  free(flight->requests);
  free(flight->peers);
}

static Status flight_send(Flight *flight, Comm *comm, int peer, const void *data, size_t bytes) {
  flight->peers[flight->n] = peer;
  return comm_send(comm, peer, CHANNEL_GROUP, data, bytes, NULL, &flight->requests[flight->n++]);
}

static Status flight_recv(Flight *flight, Comm *comm, int peer, void *data, size_t bytes) {
  flight->peers[flight->n] = peer;
  return comm_recv(comm, peer, CHANNEL_GROUP, data, bytes, NULL, &flight->requests[flight->n++]);
}

static Status flight_land(Flight *flight, Comm *comm, const char *what) {
  int n = flight->n;
  flight->n = 0;
  return comm_wait_all(comm, flight->requests, flight->peers, n, what);
}

// Round k: a sign to the rank 2^k above, one from the rank 2^k below (dissemination barrier,
// Hensgen, Finkel, Manber 1988).
Status comm_barrier(Comm *comm) {
  TRY(comm_collectives_drain(comm));
  if (comm->size == 1) return ST_OK;
  Flight flight;
  TRY(flight_new(&flight, comm));
  Status status = ST_OK;
  for (int step = 1; step < comm->size; step *= 2) {
    char in, out = 0;
    TRY_TO(done, flight_recv(&flight, comm, (comm->rank + comm->size - step) % comm->size, &in, 1));
    TRY_TO(done, flight_send(&flight, comm, (comm->rank + step) % comm->size, &out, 1));
    TRY_TO(done, flight_land(&flight, comm, "a barrier"));
  }
done:
  flight_free(&flight);
  return status;
}

// A binomial tree over ranks counted from the root.
Status comm_broadcast(Comm *comm, int root, void *data, size_t bytes) {
  TRY(comm_collectives_drain(comm));
  if (comm->size == 1 || bytes == 0) return ST_OK;
  Flight flight;
  TRY(flight_new(&flight, comm));
  Status status = ST_OK;
  int n = comm->size, place = (comm->rank + n - root) % n, step = 1;
  while (step < n && !(place & step)) step *= 2;
  if (place) {
    TRY_TO(done, flight_recv(&flight, comm, (place - step + root) % n, data, bytes));
    TRY_TO(done, flight_land(&flight, comm, "a broadcast"));
  }
  for (step /= 2; step > 0; step /= 2)
    if (place + step < n)
      TRY_TO(done, flight_send(&flight, comm, (place + step + root) % n, data, bytes));
  status = flight_land(&flight, comm, "a broadcast");
done:
  flight_free(&flight);
  return status;
}

// Everyone's part to everyone: part i of out begins at at(i) and has bytes(i).
static Status gather(Comm *comm, const void *in, char *out, size_t bytes, const int64_t *bytes_of) {
  TRY(comm_collectives_drain(comm));
  Flight flight;
  TRY(flight_new(&flight, comm));
  Status status = ST_OK;
  size_t at = 0, mine = bytes_of ? (size_t)bytes_of[comm->rank] : bytes;
  for (int i = 0; i < comm->size; i++) {
    size_t n = bytes_of ? (size_t)bytes_of[i] : bytes;
    if (i == comm->rank) {
      if (n) memmove(out + at, in, n);
    } else if (n) {
      TRY_TO(done, flight_recv(&flight, comm, i, out + at, n));
    }
    at += n;
  }
  for (int k = 1; k < comm->size && mine; k++) // each begins with another peer
    TRY_TO(done, flight_send(&flight, comm, (comm->rank + k) % comm->size, in, mine));
  status = flight_land(&flight, comm, "a gathering");
done:
  flight_free(&flight);
  return status;
}

Status comm_all_gather(Comm *comm, const void *in, void *out, size_t bytes) {
  return gather(comm, in, out, bytes, NULL);
}

Status comm_all_gather_v(Comm *comm, const void *in, void *out, const int64_t *bytes_of) {
  return gather(comm, in, out, 0, bytes_of);
}

Status comm_all_to_all(Comm *comm, const void *in, void *out, size_t bytes) {
  TRY(comm_collectives_drain(comm));
  if (bytes == 0) return ST_OK;
  Flight flight;
  TRY(flight_new(&flight, comm));
  Status status = ST_OK;
  const char *from = in;
  char *to = out;
  size_t own = (size_t)comm->rank * bytes;
  memcpy(to + own, from + own, bytes);
  for (int k = 1; k < comm->size; k++) {
    int peer = (comm->rank + comm->size - k) % comm->size;
    TRY_TO(done, flight_recv(&flight, comm, peer, to + (size_t)peer * bytes, bytes));
  }
  for (int k = 1; k < comm->size; k++) {
    int peer = (comm->rank + k) % comm->size;
    TRY_TO(done, flight_send(&flight, comm, peer, from + (size_t)peer * bytes, bytes));
  }
  status = flight_land(&flight, comm, "an all-to-all");
done:
  flight_free(&flight);
  return status;
}

Status comm_all_min(Comm *comm, int64_t *value) {
  int64_t opposite = -*value;
  TRY(comm_all_reduce(comm, &opposite, 1, DT_I64, REDUCE_MAX));
  *value = -opposite;
  return ST_OK;
}

// ---- agreement -------------------------------------------------------------------------------

static uint64_t hash_lines(const char *const *lines, int count) {
  uint64_t hash = hash_mix(0, (uint64_t)count);
  for (int i = 0; i < count; i++) hash = hash_string(lines[i], hash);
  return hash;
}

// Finds the first line where this rank differs from rank 0; INT64_MAX: nowhere.
static Status first_difference(Comm *comm, const char *const *lines, int count, int64_t *out) {
  int64_t n = count;
  TRY(comm_broadcast(comm, 0, &n, sizeof n));
  uint64_t *theirs = malloc(((size_t)n + 1) * sizeof *theirs);
  if (!theirs) return fail(ST_ENOMEM, "out of memory for %lld lines", (long long)n);
  if (comm->rank == 0)
    for (int i = 0; i < count; i++) theirs[i] = hash_string(lines[i], 0);
  Status status = comm_broadcast(comm, 0, theirs, (size_t)n * sizeof *theirs);
  *out = n == count ? INT64_MAX : n < count ? n : count;
  for (int64_t i = 0; i < n && i < count; i++) {
    if (theirs[i] == hash_string(lines[i], 0)) continue;
    *out = i;
    break;
  }
  free(theirs);
  return status;
}

// Says on every rank what rank `other` and rank 0 have at line `at`.
static Status explain_difference(Comm *comm, const char *const *lines, int count, int64_t at,
                                 int other) {
  char here[256] = "nothing more", there[256];
  if (at < count) snprintf(here, sizeof here, "%s", lines[at]);
  memcpy(there, here, sizeof there);
  TRY(comm_broadcast(comm, 0, here, sizeof here));
  TRY(comm_broadcast(comm, other, there, sizeof there));
  return fail(ST_ECOMM, "the ranks disagree: rank %d has %s where rank 0 has %s", other, there,
              here);
}

Status comm_agree(Comm *comm, const char *const *lines, int count) {
  uint64_t mine = hash_lines(lines, count);
  int64_t *all = malloc((size_t)comm->size * sizeof *all), at;
  if (!all) return fail(ST_ENOMEM, "out of memory for an agreement");
  Status status;
  TRY_TO(done, comm_all_gather(comm, &mine, all, sizeof mine));
  int other = 0;
  while (other < comm->size && all[other] == all[0]) other++;
  if (other == comm->size) goto done;
  TRY_TO(done, first_difference(comm, lines, count, &at));
  TRY_TO(done, comm_all_gather(comm, &at, all, sizeof at));
  other = 0;
  for (int i = 1; i < comm->size; i++)
    if (all[i] < all[other]) other = i;
  status = explain_difference(comm, lines, count, all[other], other);
done:
  free(all);
  return status;
}

// ---- clocks ----------------------------------------------------------------------------------

enum { ROUND_TRIPS = 40 };

// One round trip with rank 0: its clock when it answered; 0: nobody's turn.
static Status round_trip(Comm *comm, int peer, double *theirs) {
  Flight flight;
  TRY(flight_new(&flight, comm));
  Status status;
  double in = 0, out = 0;
  TRY_TO(done, flight_recv(&flight, comm, peer, &in, sizeof in));
  if (comm->rank == 0) {
    TRY_TO(done, flight_land(&flight, comm, "the clocks"));
    out = comm_clock();
  }
  TRY_TO(done, flight_send(&flight, comm, peer, &out, sizeof out));
  status = flight_land(&flight, comm, "the clocks");
  *theirs = in;
done:
  flight_free(&flight);
  return status;
}

static bool has_one_clock(const Comm *comm) {
  uint64_t clock = comm_place(comm, 0)->clock;
  for (int i = 0; i < comm->size; i++)
    if (clock == 0 || comm_place(comm, i)->clock != clock) return false;
  return true;
}

// The shortest round trip has the least room for error: rank 0's clock was read inside it (Cristian
// 1989).
Status comm_align_clocks(Comm *comm, double *offset, double *error) {
  TRY(comm_collectives_drain(comm));
  double best[2] = {0, 0}, theirs, shortest = 1e300;
  if (has_one_clock(comm)) {
    memset(offset, 0, (size_t)comm->size * sizeof *offset);
    memset(error, 0, (size_t)comm->size * sizeof *error);
    return ST_OK;
  }
  for (int peer = 1; peer < comm->size; peer++) {
    if (comm->rank != 0 && comm->rank != peer) continue;
    for (int i = 0; i < ROUND_TRIPS; i++) {
      double start = comm_clock();
      TRY(round_trip(comm, comm->rank == 0 ? peer : 0, &theirs));
      double end = comm_clock();
      if (comm->rank == 0 || end - start >= shortest) continue;
      shortest = end - start;
      best[0] = theirs - 0.5 * (start + end);
      best[1] = 0.5 * shortest;
    }
  }
  double *all = malloc(2 * (size_t)comm->size * sizeof *all);
  if (!all) return fail(ST_ENOMEM, "out of memory for clocks");
  Status status = comm_all_gather(comm, best, all, sizeof best);
  for (int i = 0; i < comm->size; i++) {
    offset[i] = all[2 * i];
    error[i] = all[2 * i + 1];
  }
  free(all);
  return status;
}
