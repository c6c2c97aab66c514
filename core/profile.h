// profile - where the time of ops goes: seconds, calls and floating point operations of the kernels
// that ran, by op and, for products, by their shapes.
#ifndef RILLE_CORE_PROFILE_H
#define RILLE_CORE_PROFILE_H

#include "core/status.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct OpTime {
  char what[96]; // "matmul 2048x384x1152", "gelu_tanh"
  int64_t calls;
  double seconds, flops;
} OpTime;

typedef struct OpProfile {
  OpTime *rows;
  int n, room;
} OpProfile;

Status op_profile_new(OpProfile **out);
void op_profile_delete(OpProfile *profile); // NULL is ignored

// Adds a call to the row `what` (cut at 95 characters), which is made if it is not there yet.
// Without memory for it the call is not counted.
void op_profile_add(OpProfile *profile, const char *what, double seconds, double flops);

#ifdef __cplusplus
}
#endif
#endif
