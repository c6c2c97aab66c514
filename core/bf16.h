// bf16 - one bfloat16 value to f32 and back.
#ifndef RILLE_CORE_BF16_H
#define RILLE_CORE_BF16_H

#include <stdint.h>
#include <string.h>

static inline float bf16_widen(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

// To nearest, ties to even; NaN stays a (quiet) NaN.
static inline uint16_t bf16_narrow(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#endif
