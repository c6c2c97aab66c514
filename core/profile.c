// profile - a list of rows, searched from its start: there are some dozens.
#include "core/profile.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

Status op_profile_new(OpProfile **out) {
  OpProfile *profile = calloc(1, sizeof *profile);
  if (!profile) return fail(ST_ENOMEM, "out of memory for a profile");
  *out = profile;
  return ST_OK;
}

void op_profile_delete(OpProfile *profile) {
  if (!profile) return;
  free(profile->rows);
  free(profile);
}

void op_profile_add(OpProfile *profile, const char *what, double seconds, double flops) {
  int i = 0;
  while (i < profile->n &&
         strncmp(profile->rows[i].what, what, sizeof profile->rows[i].what - 1) != 0)
    i++;
  if (i == profile->room) {
    int room = profile->room ? 2 * profile->room : 64;
    OpTime *grown = realloc(profile->rows, (size_t)room * sizeof *grown);
    if (!grown) return;
    profile->rows = grown;
    profile->room = room;
  }
  OpTime *row = &profile->rows[i];
  if (i == profile->n) {
    memset(row, 0, sizeof *row);
    snprintf(row->what, sizeof row->what, "%s", what);
    profile->n++;
  }
  row->calls++;
  row->seconds += seconds;
  row->flops += flops;
}
