// status - the thread-local error record.
#include "core/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#undef fail

static _Thread_local struct {
  char message[2048];
  char hint[1024];
} record;

Status fail(Status status, const char *format, ...) {
  char words[sizeof record.message];
  va_list args;
  va_start(args, format);
  vsnprintf(words, sizeof words, format, args);
  va_end(args);
  memcpy(record.message, words, sizeof words);
  record.hint[0] = 0;
  return status;
}

Status fail_context(Status status, const char *format, ...) {
  char words[sizeof record.message];
  va_list args;
  va_start(args, format);
  int n = vsnprintf(words, sizeof words, format, args);
  va_end(args);
  if (n < 0 || (size_t)n >= sizeof words) n = (int)sizeof words - 1;
  if (snprintf(words + n, sizeof words - (size_t)n, ": %s", record.message) < 0) words[n] = 0;
  memcpy(record.message, words, sizeof words);
  return status;
}

Status fail_hint(Status status, const char *format, ...) {
  char words[sizeof record.hint];
  va_list args;
  va_start(args, format);
  vsnprintf(words, sizeof words, format, args);
  va_end(args);
  memcpy(record.hint, words, sizeof words);
  return status;
}

const char *status_message(void) { return record.message; }
const char *status_hint(void) { return record.hint; }

void status_keep(KeptStatus *out) {
  snprintf(out->message, sizeof out->message, "%.*s", (int)sizeof out->message - 1, record.message);
  snprintf(out->hint, sizeof out->hint, "%.*s", (int)sizeof out->hint - 1, record.hint);
}

Status status_again(Status status, const KeptStatus *kept) {
  (fail)(status, "%s", kept->message);
  return fail_hint(status, "%s", kept->hint);
}

const char *status_words(Status status) {
  switch (status) {
#define X(name, words) \
  case ST_##name: return words;
    STATUS_LIST(X)
#undef X
  }
  return "unknown status";
}
