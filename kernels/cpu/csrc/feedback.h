// One tile of rounding whose errors go on to later columns and rows: see kernels/feedback.py, whose
// plain twin says what is computed. The chain from an element to the next is all that there is to
// wait for; what an element's error does to its column is done by vectors.

// The value of a type's grid next to y: whole numbers, or floats of `mantissa` bits whose smallest
// normal one is 2^exponent. Half to even; |y| < 2^22 once it is clamped.
static inline float to_grid(float y, const FeedbackTile& tile) {
  const float magic = 0x1.8p23f;
  y = y < tile.low ? tile.low : y > tile.high ? tile.high : y;
  if (tile.mantissa < 0) return (y + magic) - magic;
  uint32_t u;
  __builtin_memcpy(&u, &y, 4);
  int power = (int)((u >> 23) & 0xff) - 127;
  power = (power > tile.exponent ? power : tile.exponent) - tile.mantissa;
  const uint32_t finer = (uint32_t)(127 - power) << 23, coarser = (uint32_t)(127 + power) << 23;
  float up, down;
  __builtin_memcpy(&up, &finer, 4);
  __builtin_memcpy(&down, &coarser, 4);
  return ((y * up + magic) - magic) * down;
}

void feedback(const FeedbackTile& tile) {
  constexpr int kRows = kFeedbackRows;
  static_assert(kRows % W == 0, "rows of a tile fill vectors");
  alignas(64) float factor[kRows][kRows] = {}, column[kRows], spread[kRows];
  const int rows = (int)tile.rows, lanes = (rows + W - 1) / W * W;
  for (int i = 0; i < rows; i++)
    for (int l = 0; l < rows; l++) factor[i][l] = tile.row_factor[i * tile.row_stride + l];
  for (int64_t j = 0; j < tile.columns; j++) {
    const float* by_column = tile.column_factor + j * tile.column_stride;
    const float own = by_column[j];
    float* x = tile.x + j * tile.stride;
    for (int i = 0; i < kRows; i++) {
      column[i] = i < rows ? x[i] : 0.0f;
      spread[i] = 0.0f;
    }
    for (int i = 0; i < rows; i++) {
      const int64_t at = j * tile.stride + i;
      const float pivot = factor[i][i] * own, scale = tile.scale[at];
      const float zero = tile.zero == nullptr ? 0.0f : tile.zero[at];
      const float now = tile.values == nullptr ? 0.0f : tile.values[at];
      const float target = tile.values == nullptr ? column[i] : now + column[i] / pivot;
      float q = target / scale;
      if (tile.zero == nullptr) {
        q = to_grid(q, tile);
      } else {  // rounded before the zero point is added, as everywhere
        const float magic = 0x1.8p23f;
        const float bounded = q < -0x1p20f ? -0x1p20f : q > 0x1p20f ? 0x1p20f : q;
        q = to_grid(((bounded + magic) - magic) + zero, tile);
      }
      const float value = (q - zero) * scale;
      const float error = tile.values == nullptr ? (target - value) / pivot : value - now;
      tile.q[at] = q;
      tile.errors[at] = error;
      if (tile.values != nullptr) tile.values[at] = value;
      const vf whole = set1(error), part = set1(-error * own);
      for (int l = i / W * W; l < lanes; l += W)
        store(column + l, fma(part, load(factor[i] + l), load(column + l)));
      for (int l = 0; l < lanes; l += W)
        store(spread + l, fma(whole, load(factor[i] + l), load(spread + l)));
    }
    for (int64_t k = j + 1; k < tile.columns; k++) {
      const vf part = set1(-by_column[k]);
      float* y = tile.x + k * tile.stride;
      for (int l = 0; l < rows; l += W)
        store_part(y + l, fma(part, load(spread + l), load_part(y + l, rows - l)), rows - l);
    }
  }
}
