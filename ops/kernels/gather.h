// gather - copies and sums by index. Copies take any element size; sums run in the order of the
// indices for each target element, on any number of threads. Indices must be checked by the caller.
#ifndef RILLE_OPS_KERNELS_GATHER_H
#define RILLE_OPS_KERNELS_GATHER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// out[outer, n, inner] = a[outer, index[n], inner]; a has `size` entries in its middle dim.
// `element` bytes each.
void gather_rows(void *out, const void *a, const int64_t *index, int64_t outer, int64_t size,
                 int64_t n, int64_t inner, size_t element);

// out[outer, index[n], inner] += a[outer, n, inner], out having `size` entries in its middle dim;
// without accumulate out is cleared first.
void scatter_rows_f32(float *out, const float *a, const int64_t *index, int64_t outer, int64_t size,
                      int64_t n, int64_t inner, bool accumulate);
void scatter_rows_f64(double *out, const double *a, const int64_t *index, int64_t outer,
                      int64_t size, int64_t n, int64_t inner, bool accumulate);

// The same two for a table of which a, or out, is rows first .. first + size - 1: an index may be
// any; one outside gives zeros, or adds nothing. out[n, inner], a[n, inner].
void gather_part(void *out, const void *a, const int64_t *index, int64_t first, int64_t size,
                 int64_t n, int64_t inner, size_t element);
void scatter_part_f32(float *out, const float *a, const int64_t *index, int64_t first, int64_t size,
                      int64_t n, int64_t inner, bool accumulate);
void scatter_part_f64(double *out, const double *a, const int64_t *index, int64_t first,
                      int64_t size, int64_t n, int64_t inner, bool accumulate);

// out[o, j, i] = a[o, index[o, j, i], i]: index and out are [outer, n, inner], a [outer, size,
// inner].
void gather_elements(void *out, const void *a, const int64_t *index, int64_t outer, int64_t size,
                     int64_t n, int64_t inner, size_t element);

// out[o, index[o, j, i], i] += a[o, j, i], j ascending; without accumulate out is cleared first.
void scatter_elements_f32(float *out, const float *a, const int64_t *index, int64_t outer,
                          int64_t size, int64_t n, int64_t inner, bool accumulate);
void scatter_elements_f64(double *out, const double *a, const int64_t *index, int64_t outer,
                          int64_t size, int64_t n, int64_t inner, bool accumulate);

#ifdef __cplusplus
}
#endif
#endif
