// device - where bytes live and work runs: a table of functions a kind of device implements.
//
// Streams and events are in the interface from the start; on the CPU they are trivially
// synchronous. The meta device has shapes but no bytes: a model run on it allocates nothing.
#ifndef RILLE_CORE_DEVICE_H
#define RILLE_CORE_DEVICE_H

#include "core/memory.h"
#include "core/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The kinds of device; an op row has one kernel for each kind that computes.
typedef enum DeviceKind { DEV_CPU, DEV_META, DEV_KINDS } DeviceKind;

typedef struct Device Device;
typedef struct Stream Stream; // an ordered queue of work; NULL is the device's default stream
typedef struct Event Event;   // a point in a stream

typedef struct DeviceVtable {
  Status (*alloc)(Device *device, size_t bytes, MemKind kind, void **out);
  void (*free)(Device *device, void *block, size_t bytes, MemKind kind);
  // Copies within the device, ordered in `stream`; the regions do not overlap.
  Status (*copy)(Device *device, void *to, const void *from, size_t bytes, Stream *stream);
  Status (*copy_in)(Device *device, void *to, const void *host, size_t bytes, Stream *stream);
  Status (*copy_out)(Device *device, void *host, const void *from, size_t bytes, Stream *stream);
  Status (*zero)(Device *device, void *block, size_t bytes, Stream *stream);
  Status (*stream_new)(Device *device, Stream **out);
  void (*stream_delete)(Device *device, Stream *stream);
  Status (*event_new)(Device *device, Event **out);
  void (*event_delete)(Device *device, Event *event);
  Status (*event_record)(Device *device, Event *event, Stream *stream);
  Status (*event_wait)(Device *device, Event *event, Stream *stream); // the stream waits
  Status (*synchronize)(Device *device, Stream *stream);              // the host waits
} DeviceVtable;

struct Device {
  const DeviceVtable *vtable;
  DeviceKind kind;
  int index; // among devices of its kind
  Pool *pool;
  char name[16]; // "cpu", "meta"
};

// The CPU device over `pool`, and the meta device (which never allocates).
void device_cpu(Device *device, Pool *pool);
void device_meta(Device *device, Pool *pool);

#ifdef __cplusplus
}
#endif
#endif
