// spans - what ran when: the raw material of traces, bubble ledgers and profiles. Time spent
// waiting for a peer and time spent transferring are separate.
#ifndef RILLE_CORE_SPANS_H
#define RILLE_CORE_SPANS_H

#include "core/status.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Span {
  char what[24]; // "2F0", "adamw", "data"
  int rank;
  double start, end, waited; // seconds on this rank's monotonic clock
} Span;

typedef struct SpanLog {
  Span *spans;
  int64_t n, room;
  int rank;
} SpanLog;

// Seconds on the monotonic clock.
double clock_now(void);

Status span_log_new(int rank, SpanLog **out);
void span_log_delete(SpanLog *log);
void span_log_clear(SpanLog *log);

// Appends a span; a NULL log records nothing. what is cut at 23 characters.
Status span_add(SpanLog *log, const char *what, double start, double end, double waited);

// Writes the log in Chrome's trace format (opens in Perfetto). Errors: EIO.
Status span_log_write_trace(const SpanLog *log, const char *path);

#ifdef __cplusplus
}
#endif
#endif
