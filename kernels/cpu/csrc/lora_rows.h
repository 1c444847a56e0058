// Which rows of a step have which adapter: those that have the same one go through it together.
#pragma once
#include "api.h"

namespace ptq {

// Whether a row before `row` has its slot.
static inline bool has_come(const int64_t* slots, int64_t first, int64_t row) {
  for (int64_t i = row - 1; i >= first; i--)
    if (slots[i] == slots[row]) return true;
  return false;
}

// Adds to rows y what adapters make of rows x, of a range and by one thread: of row i that of
// loras[slots[i] * apart], nothing where the slot is negative.
static inline void add_loras(const Kernels& kernels, const Lora* loras, int64_t apart,
                             const int64_t* slots, const Range& own, const float* x,
                             int64_t x_stride, float* y, int64_t y_stride) {
  const float* from[kLoraRows];
  float* to[kLoraRows];
  for (int64_t row = own.begin; row < own.end; row++) {
    if (slots[row] < 0 || has_come(slots, own.begin, row)) continue;
    const Lora& lora = loras[slots[row] * apart];
    int count = 0;
    for (int64_t i = row; i < own.end; i++) {
      if (slots[i] != slots[row]) continue;
      from[count] = x + i * x_stride;
      to[count++] = y + i * y_stride;
      if (count < kLoraRows) continue;
      kernels.lora(lora, from, to, count);
      count = 0;
    }
    if (count > 0) kernels.lora(lora, from, to, count);
  }
}

}  // namespace ptq
