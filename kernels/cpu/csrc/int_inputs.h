// Inputs of integer products as the tiles take them, in their order and type.

// Rows of the tiles for each of x.
template <int F, bool kWide>
constexpr int kPlanes = kWide && kXBytes<F> == 1 ? 2 : 1;

// Inputs x [count] as the tiles take them, zeros up to `padded`; returns their sum. Whole vectors
// are written: up to 64 bytes beyond.
template <int F>
static int32_t prepare_inputs(const int8_t* x, int64_t count, int64_t padded, char* out) {
  constexpr int64_t width = W * 4;
  vi sums = set1_i32(0);
  for (int64_t i = 0; i < padded; i += width) {
    int8_t rest[width] = {};
    const int8_t* from = x + i;
    if (count - i < width) {
      if (count > i) __builtin_memcpy(rest, from, count - i);
      from = rest;
    }
    sums = sum_inputs(sums, from);
    prepare_vector<F>(from, out + i * kXBytes<F>);
  }
  int32_t lanes[W], sum = 0;
  store_i32(lanes, sums);
  for (int i = 0; i < W; i++) sum += lanes[i];
  return sum;
}

// The power of two that inputs whose absmax is this are multiples of, up to 32514 times: so that
// no high half is beyond 127.
static inline float unit_of(float absmax) {
  const float most = absmax * (129.0f / 128);
  uint32_t u;
  __builtin_memcpy(&u, &most, 4);
  int32_t exponent = (int32_t)(u >> 23 & 255) - 14;
  if (exponent < 27) exponent = 27;  // 2^-100, of what is next to nothing
  u = (uint32_t)exponent << 23;
  float unit;
  __builtin_memcpy(&unit, &u, 4);
  return unit;
}

// Inputs x [count] as int16, zeros up to `padded`, as the tiles take them; in two planes, `apart`
// bytes, where they take int8. `scales` gets x_scale and x_sum.
template <int F>
static void widen_inputs(const float* x, int64_t count, int64_t padded, char* out, int64_t apart,
                         float* scales) {
  vf most = zero(), wrong = zero(), sum = zero();
  for (int64_t i = 0; i < count; i += W) {
    const vf v = load_part(x + i, count - i);
    most = max(most, abs(v));
    wrong = add(wrong, sub(v, v));
  }
  const float unit = unit_of(reduce_max(most));
  for (int64_t i = 0; i < padded; i += W) {
    const vf q = round(mul(load_part(x + i, count - i), set1(1.0f / unit)));
    sum = add(sum, q);
    if (kXBytes<F> == 1) {
      const vf high = round(fma(q, set1(1.0f / 256), set1(1.0f / 1024)));  // halves go up
      store_i8((int8_t*)out + i, high);
      store_i8((int8_t*)out + apart + i, fma(high, set1(-256.0f), q));
    } else {
      int32_t whole[W];
      store_i32(whole, to_int(q));
      int16_t* pairs = (int16_t*)out + i;
      for (int j = 0; j < W; j++) pairs[j / 4 * 4 + j % 2 * 2 + j % 4 / 2] = (int16_t)whole[j];
    }
  }
  const float nothing = reduce_add(wrong);  // NaN where an input is not finite
  scales[0] = unit + nothing;
  scales[1] = nothing == 0.0f ? reduce_add(sum) : 0.0f;
}
