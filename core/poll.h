// poll - the one hook that runs between kernels and between row blocks of long ones: it serves
// message progress, Ctrl-C and the heart-beat. One of the two mutable globals of Rille.
#ifndef RILLE_CORE_POLL_H
#define RILLE_CORE_POLL_H

#ifdef __cplusplus
extern "C" {
#endif

// Called on the main thread only; must be short, must not fail and must not touch tensors. NULL:
// none.
extern void (*poll_hook)(void);

static inline void poll_run(void) {
  if (poll_hook) poll_hook();
}

#ifdef __cplusplus
}
#endif
#endif
