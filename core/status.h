// status - how every fallible function of Rille reports: a Status, and words in a thread-local
// record.
//
// A bug is an assert; a user error is a Status, returned before any state has changed. The record
// holds the message of the latest failure of this thread (what went wrong, then an optional hint).
#ifndef RILLE_CORE_STATUS_H
#define RILLE_CORE_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

// X(name, words): every kind of failure.
#define STATUS_LIST(X)                         \
  X(OK, "no error")                            \
  X(ENOMEM, "out of memory")                   \
  X(ESHAPE, "shapes do not fit")               \
  X(EDTYPE, "wrong dtype")                     \
  X(EDEVICE, "wrong device or device failure") \
  X(ERANGE, "index out of range")              \
  X(EVALUE, "wrong value")                     \
  X(ESTATE, "not possible in this state")      \
  X(EIO, "input or output failed")             \
  X(EFORMAT, "malformed file")                 \
  X(ECOMM, "communication failed")             \
  X(ESTOPPED, "interrupted")                   \
  X(ENONFINITE, "non-finite value")            \
  X(ESCRIPT, "error in a script's callback")

typedef enum Status {
#define X(name, words) ST_##name,
  STATUS_LIST(X)
#undef X
} Status;

#ifdef __GNUC__
#define PRINTF_LIKE(f, a) __attribute__((format(printf, f, a)))
#else
#define PRINTF_LIKE(f, a)
#endif

// Records the message of a failure and returns `status`, so that `return fail(ST_ESHAPE, ...)`
// reads well.
Status fail(Status status, const char *format, ...) PRINTF_LIKE(2, 3);
#ifdef __clang_analyzer__ // it does not know that the result is never ST_OK
#define fail(status, ...) ((void)fail(status, __VA_ARGS__), (status))
#endif

// Puts words in front of the recorded message: what the caller was doing ("loading x.safetensors").
Status fail_context(Status status, const char *format, ...) PRINTF_LIKE(2, 3);

// Adds a hint to the recorded failure: what the user can do about it. Returns `status`.
Status fail_hint(Status status, const char *format, ...) PRINTF_LIKE(2, 3);

// The recorded message and hint of this thread's latest failure; "" if there is none.
const char *status_message(void);
const char *status_hint(void);

// A failure that is kept until somebody asks for it: status_keep copies the record, status_again
// records it anew and returns `status`. Words that have no room are cut.
typedef struct KeptStatus {
  char message[1000], hint[400];
} KeptStatus;
void status_keep(KeptStatus *out);
Status status_again(Status status, const KeptStatus *kept);

// The words of a status ("out of memory").
const char *status_words(Status status);

#define TRY(expr)                                 \
  do {                                            \
    Status try_status_ = (expr);                  \
    if (try_status_ != ST_OK) return try_status_; \
  } while (0)

// For functions with `Status status` and a label that releases what they own.
#define TRY_TO(label, expr)          \
  do {                               \
    status = (expr);                 \
    if (status != ST_OK) goto label; \
  } while (0)

#ifdef __cplusplus
}
#endif
#endif
