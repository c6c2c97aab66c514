// device - the CPU and the meta device.
#include "core/device.h"

#include <string.h>

static Status cpu_alloc(Device *device, size_t bytes, MemKind kind, void **out) {
  return pool_alloc(device->pool, bytes, kind, out);
}

static void cpu_free(Device *device, void *block, size_t bytes, MemKind kind) {
  pool_free(device->pool, block, bytes, kind);
}

static Status cpu_copy(Device *device, void *to, const void *from, size_t bytes, Stream *stream) {
  (void)device, (void)stream;
  memcpy(to, from, bytes);
  return ST_OK;
}

static Status cpu_zero(Device *device, void *block, size_t bytes, Stream *stream) {
  (void)device, (void)stream;
  memset(block, 0, bytes);
  return ST_OK;
}

// Work on the CPU is finished when the call returns: streams and events carry nothing.
static Status none_stream_new(Device *device, Stream **out) {
  (void)device;
  *out = NULL;
  return ST_OK;
}
static void none_stream_delete(Device *device, Stream *stream) { (void)device, (void)stream; }
static Status none_event_new(Device *device, Event **out) {
  (void)device;
  *out = NULL;
  return ST_OK;
}
static void none_event_delete(Device *device, Event *event) { (void)device, (void)event; }
static Status none_event(Device *device, Event *event, Stream *stream) {
  (void)device, (void)event, (void)stream;
  return ST_OK;
}
static Status none_synchronize(Device *device, Stream *stream) {
  (void)device, (void)stream;
  return ST_OK;
}

static Status meta_alloc(Device *device, size_t bytes, MemKind kind, void **out) {
  (void)device, (void)bytes, (void)kind;
  *out = NULL;
  return ST_OK;
}
static void meta_free(Device *device, void *block, size_t bytes, MemKind kind) {
  (void)device, (void)block, (void)bytes, (void)kind;
}
static Status meta_copy(Device *device, void *to, const void *from, size_t bytes, Stream *stream) {
  (void)device, (void)to, (void)from, (void)bytes, (void)stream;
  return ST_OK;
}
static Status meta_copy_out(Device *device, void *host, const void *from, size_t bytes,
                            Stream *stream) {
  (void)device, (void)host, (void)from, (void)bytes, (void)stream;
  return fail_hint(fail(ST_EDEVICE, "a tensor on the meta device has a shape but no values"),
                   "run the model on real inputs to read values");
}
static Status meta_zero(Device *device, void *block, size_t bytes, Stream *stream) {
  (void)device, (void)block, (void)bytes, (void)stream;
  return ST_OK;
}

static const DeviceVtable cpu_vtable = {
    cpu_alloc,  cpu_free,        cpu_copy,           cpu_copy,       cpu_copy,
    cpu_zero,   none_stream_new, none_stream_delete, none_event_new, none_event_delete,
    none_event, none_event,      none_synchronize,
};

static const DeviceVtable meta_vtable = {
    meta_alloc, meta_free,       meta_copy,          meta_copy,      meta_copy_out,
    meta_zero,  none_stream_new, none_stream_delete, none_event_new, none_event_delete,
    none_event, none_event,      none_synchronize,
};

static void device_init(Device *device, const DeviceVtable *vtable, DeviceKind kind, Pool *pool,
                        const char *name) {
  memset(device, 0, sizeof *device);
  device->vtable = vtable;
  device->kind = kind;
  device->pool = pool;
  strncpy(device->name, name, sizeof device->name - 1);
}

void device_cpu(Device *device, Pool *pool) {
  device_init(device, &cpu_vtable, DEV_CPU, pool, "cpu");
}

void device_meta(Device *device, Pool *pool) {
  device_init(device, &meta_vtable, DEV_META, pool, "meta");
}
