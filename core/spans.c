// spans - the log and its Chrome trace form.
#include "core/spans.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

double clock_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

Status span_log_new(int rank, SpanLog **out) {
  SpanLog *log = calloc(1, sizeof *log);
  if (!log) return fail(ST_ENOMEM, "out of memory for the span log");
  log->rank = rank;
  *out = log;
  return ST_OK;
}

void span_log_delete(SpanLog *log) {
  if (!log) return;
  free(log->spans);
  free(log);
}

void span_log_clear(SpanLog *log) {
  if (log) log->n = 0;
}

Status span_add(SpanLog *log, const char *what, double start, double end, double waited) {
  if (!log) return ST_OK;
  if (log->n == log->room) {
    int64_t room = log->room ? 2 * log->room : 256;
    Span *grown = realloc(log->spans, (size_t)room * sizeof *grown);
    if (!grown) return fail(ST_ENOMEM, "out of memory for %lld spans", (long long)room);
    log->spans = grown;
    log->room = room;
  }
  Span *span = &log->spans[log->n++];
  snprintf(span->what, sizeof span->what, "%s", what);
  span->rank = log->rank;
  span->start = start;
  span->end = end;
  span->waited = waited;
  return ST_OK;
}

Status span_log_write_trace(const SpanLog *log, const char *path) {
  FILE *f = fopen(path, "w");
  if (!f) return fail(ST_EIO, "cannot write trace %s: %s", path, strerror(errno));
  fprintf(f, "{\"traceEvents\":[");
  for (int64_t i = 0; i < log->n; i++) {
    const Span *s = &log->spans[i];
    fprintf(f, "%s\n{\"ph\":\"X\",\"name\":\"%s\",\"ts\":%.3f,\"dur\":%.3f,\"pid\":%d,\"tid\":0}",
            i ? "," : "", s->what, 1e6 * s->start, 1e6 * (s->end - s->start), s->rank);
  }
  fprintf(f, "\n]}\n");
  int failed = ferror(f);
  if (fclose(f) != 0 || failed)
    return fail(ST_EIO, "cannot write trace %s: %s", path, strerror(errno));
  return ST_OK;
}
