// Rows of a packed weight as floats: the embedding of a model whose head is quantized and tied.
#pragma once
#include <string.h>

#include "api.h"

namespace ptq {

// Value i of the lane at p, in units of its scale; api.h and gemm_float.h describe the layouts.
static inline float value_at(int32_t format, const uint8_t* p, int64_t i, float zero) {
  if (format == kI8) return (float)(int8_t)p[i] - zero;
  if (format == kI4) return (float)((i < 4 ? p[i] & 15 : p[i - 4] >> 4) - 8) - zero;
  float value;
  uint32_t bits;
  if (format == kF8) {  // as fp32 2^-120 of it, subnormal numbers too
    bits = (uint32_t)(p[i] & 0x80) << 24 | (uint32_t)(p[i] & 0x7f) << 20;
    memcpy(&value, &bits, 4);
    return value * 0x1p120f;
  }
  if (format == kF16) {  // likewise 2^-112
    uint16_t half;
    memcpy(&half, p + 2 * i, 2);
    bits = (uint32_t)(half & 0x8000) << 16 | (uint32_t)(half & 0x7fff) << 13;
    memcpy(&value, &bits, 4);
    return value * 0x1p112f;
  }
  if (format == kBF16) {
    uint16_t half;
    memcpy(&half, p + 2 * i, 2);
    bits = (uint32_t)half << 16;
  } else {
    memcpy(&bits, p, 4);
  }
  memcpy(&value, &bits, 4);
  return value;
}

static inline float scale_at(const Packed& w, const uint8_t* scales, int64_t lane) {
  if (w.scale_type == kNoScale) return 1.0f;
  const int32_t format = w.scale_type == kScaleF32 ? kF32 : w.scale_type == kScaleF16 ? kF16 : kBF16;
  return value_at(format, scales + lane * scale_bytes(w.scale_type), 0, 0.0f);
}

static inline float zero_at(const Packed& w, const uint8_t* group, const uint8_t* scales,
                            int64_t lane) {
  const int8_t* zeros = (const int8_t*)scales + w.panel * scale_bytes(w.scale_type);
  float value = w.zero_type == kZeroI8 ? (float)zeros[lane] : 0.0f;
  if (w.zero_type == kZeroF32) memcpy(&value, group + lane * 4, 4);
  return value;
}

// Row `row` of w, [inputs]: (q - zero) * scale, as numerics.py dequantizes.
static inline void unpack_row(const Packed& w, int64_t row, float* out) {
  const bool half = w.format == kBF16 || w.format == kF16;
  const int64_t each = w.format == kF32 ? 1 : half ? 2 : w.format == kI4 ? 8 : 4;
  const int64_t lane = row % w.panel;
  const uint8_t* group = (const uint8_t*)&w + w.data_offset + row / w.panel * w.panel_bytes;
  for (int64_t begin = 0; begin < w.inputs; begin += w.group, group += w.group_bytes) {
    const int64_t rest = w.inputs - begin, size = rest < w.group ? rest : w.group;
    const uint8_t* lanes = group + lead_of(w.zero_type, w.panel);
    const uint8_t* scales = lanes + (size + each - 1) / each * w.panel * 4;
    const float scale = scale_at(w, scales, lane), zero = zero_at(w, group, scales, lane);
    for (int64_t i = 0; i < size; i++) {
      const uint8_t* at = lanes + (i / each * w.panel + lane) * 4;
      out[begin + i] = value_at(w.format, at, i % each, zero) * scale;
    }
  }
}

}  // namespace ptq
