// order - which tokens a sample is: a pure function of (seed, sample number).
//
// A token file of n ids is cut into windows of T + 1 ids, T apart (inputs are the first T ids of a
// window, targets the last T, so neighbours share one id). Samples are numbered over all time;
// sample k belongs to epoch k / n_windows, and each epoch visits every window once, in an order of
// its own. Nothing depends on ranks, batch sizes or on what was read before: a resumed run goes on
// with the next number.
#ifndef RILLE_CORE_ORDER_H
#define RILLE_CORE_ORDER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Windows in n_tokens ids; 0 if they do not fill one. T >= 1.
int64_t order_n_windows(int64_t n_tokens, int64_t T);

// The window of a sample, in [0, n_windows); its first id is window x T. sample >= 0, n_windows >=
// 1.
int64_t order_window(uint64_t seed, int64_t sample, int64_t n_windows);

#ifdef __cplusplus
}
#endif
#endif
