// Heads on their way into the paged cache: keys and values of new tokens, turned where the cache says
// so, and quantized head by head.
//
// int4 is packed two in a byte: byte i of a head has channels i (low) and i + dim / 2 (high), as q + 8.
//
// Heads are turned by a Hadamard matrix: a fast Walsh-Hadamard transform of every run of `size`
// channels, a power of two. Steps of h = 1, 2, 4, ... make (a + b, a - b) of channels i and i + h;
// then comes the factor 1 / sqrt(size). Each number is a tree of sums that no vector's width
// changes, so that all instruction sets, and plain torch, have the same bits.

// Lane i gets that of lane i ^ H.
template <int H>
static inline vf swapped(vf a) {
#if defined(PTQ_ISA_AVX512)
  if constexpr (H == 1) return _mm512_permute_ps(a, 0xb1);
  if constexpr (H == 2) return _mm512_permute_ps(a, 0x4e);
  if constexpr (H == 4) return _mm512_shuffle_f32x4(a, a, 0xb1);
  return _mm512_shuffle_f32x4(a, a, 0x4e);
#elif defined(PTQ_ISA_AVX2)
  if constexpr (H == 1) return _mm256_permute_ps(a, 0xb1);
  if constexpr (H == 2) return _mm256_permute_ps(a, 0x4e);
  return _mm256_permute2f128_ps(a, a, 1);
#else
  vf b = a;
  for (int i = 0; i < W; i++) b[i] = a[i ^ H];
  return b;
#endif
}

// Steps within a vector, up to runs of `size` lanes.
template <int H>
static inline vf turn_lanes(vf a, int64_t size) {
  if constexpr (H < W) {
    if (H >= size) return a;
    bits minus;
    for (int i = 0; i < W; i++) minus[i] = i & H ? (int32_t)0x80000000 : 0;
    return turn_lanes<2 * H>(add(swapped<H>(a), (vf)((bits)a ^ minus)), size);
  } else {
    return a;
  }
}

static void turn_head(const float* x, float* y, int64_t dim, int64_t size) {
  for (int64_t d = 0; d < dim; d += W)
    store_part(y + d, turn_lanes<1>(load_part(x + d, dim - d), size), dim - d);
  for (int64_t h = W; h < size; h *= 2)
    for (int64_t run = 0; run < dim; run += 2 * h)
      for (int64_t d = run; d < run + h; d += W) {
        const vf a = load(y + d), b = load(y + d + h);
        store(y + d, add(a, b));
        store(y + d + h, sub(a, b));
      }
  const vf factor = set1((float)(1.0 / __builtin_sqrt((double)size)));
  for (int64_t d = 0; d < dim; d += W)
    store_part(y + d, mul(load_part(y + d, dim - d), factor), dim - d);
}

// Rows of heads [rows, heads, dim], each at its row's stride; y may be x.
static void turn(const float* x, float* y, int64_t rows, int64_t heads, int64_t dim, int64_t size,
                 int64_t x_stride, int64_t y_stride, const Team& team) {
  const Range own = share(rows, team);
  for (int64_t row = own.begin; row < own.end; row++)
    for (int64_t head = 0; head < heads; head++)
      turn_head(x + row * x_stride + head * dim, y + row * y_stride + head * dim, dim, size);
}

constexpr int64_t kBlock = 64;  // tokens of a block of the cache

// Bytes of n elements.
static inline int64_t bytes_of(int32_t format, int64_t n) {
  return format == kI4 ? n / 2 : n * (format == kF32 ? 4 : format == kBF16 ? 2 : 1);
}

// Integers + 8 of int4, in [0, 15].
static inline vf quantized_i4(vf x, vf scale) {
  const vf q = number_or_zero(round(div(x, scale)));
  return add(min(max(q, set1(-8.0f)), set1(7.0f)), set1(8.0f));
}

// One head of one token, scaled by `scale`, or by `channel_scale` where there is one.
static void write_quantized(const float* x, void* out, int64_t dim, int32_t format, float scale,
                            const float* channel_scale) {
  const int64_t half = dim / 2;
  if (format == kI4) __builtin_memset(out, 0, half);
  for (int64_t i = 0; i < dim; i += W) {
    const int64_t n = dim - i < W ? dim - i : W;
    vf s = set1(scale);
    if (channel_scale != nullptr) s = load_part(channel_scale + i, n);
    const vf v = load_part(x + i, n);
    if (format == kI4) {
      int8_t code[W];
      store_i8(code, quantized_i4(v, s));
      for (int64_t j = 0; j < n; j++) {
        const int64_t d = i + j;
        uint8_t* byte = (uint8_t*)out + (d < half ? d : d - half);
        *byte = (uint8_t)(*byte | (d < half ? code[j] : code[j] << 4));
      }
    } else {
      const vf code = format == kI8 ? quantized_i8(v, s) : Float8(div(v, s)).code();
      store_i8_part((int8_t*)out + i, code, n);
    }
  }
}

// One head of one token in int4, blocks of four channels from the last to the first: the error of
// each channel, times its row of `feedback` [dim, dim], 0 from its block on, moves those before.
// `moved` is space for dim floats and W more.
static void write_compensated(const float* x, void* out, int64_t dim, float scale,
                              const float* feedback, float* moved) {
  constexpr int64_t kAtOnce = 4;
  const int64_t half = dim / 2;
  uint8_t* bytes = (uint8_t*)out;
  __builtin_memcpy(moved, x, dim * sizeof(float));
  for (int64_t start = (dim - 1) / kAtOnce * kAtOnce; start >= 0; start -= kAtOnce) {
    const int64_t count = dim - start < kAtOnce ? dim - start : kAtOnce;
    vf error[kAtOnce];
    for (int64_t i = count - 1; i >= 0; i--) {
      const int64_t d = start + i;
      float q = __builtin_rintf(moved[d] / scale);
      q = q < -8.0f ? -8.0f : q > 7.0f ? 7.0f : q;
      error[i] = set1(x[d] - q * scale);
      if (d >= half) bytes[d - half] = (uint8_t)(((int)q + 8) << 4);
      else bytes[d] = (uint8_t)(bytes[d] | ((int)q + 8));
    }
    for (int64_t d = 0; d < start; d += W) {
      vf sum = load(moved + d);
      for (int64_t i = count - 1; i >= 0; i--)
        sum = add(sum, mul(error[i], load_part(feedback + (start + i) * dim + d, dim - d)));
      store(moved + d, sum);
    }
  }
}

// A scale for a head of one token from its numbers: of int4 that makes -8 of the one of largest
// magnitude, so that it may be negative.
static float token_scale(const float* x, int64_t dim, int32_t format) {
  const float top = absmax(x, dim);
  if (format != kI4 || !__builtin_isfinite(top)) return scale_of(top, format);
  bool positive = false, negative = false;  // whether `top` stands there with that sign
  for (int64_t i = 0; i < dim; i++) {
    positive |= x[i] == top;
    negative |= x[i] == -top;
  }
  const float scale = top * 0.125f;
  return positive && !negative ? -scale : scale;
}

// The nearest number that fp16 holds, of at least the least normal one.
static float held_in_f16(float scale) {
  float size = __builtin_fabsf(scale);
  size = size < 0x1p-14f ? 0x1p-14f : size > 65504.0f ? 65504.0f : size;
  return f16_to_f32(f32_to_f16(__builtin_copysignf(size, scale)));
}

static void write_float(const float* x, void* out, int64_t dim, int32_t format) {
  if (format == kF32) {
    __builtin_memcpy(out, x, dim * sizeof(float));
    return;
  }
  uint16_t* to = (uint16_t*)out;
  for (int64_t i = 0; i < dim; i++) to[i] = x[i] == x[i] ? f32_to_bf16(x[i]) : 0x7fc0;
}

// place: of the head's token in the pool, in tokens; feedback: of the head, and space for it, or
// null. False if the token cannot be scaled.
static bool write_head(int32_t format, const float* x, int64_t dim, void* pool, float* scales,
                       int32_t kind, int64_t place, int64_t head, const float* feedback,
                       float* moved) {
  void* out = (uint8_t*)pool + place * bytes_of(format, dim);
  if (kind == kScaleNone) {
    write_float(x, out, dim, format);
  } else if (kind == kScaleToken || kind == kScaleTokenF16) {
    float scale = token_scale(x, dim, format);
    if (!__builtin_isfinite(scale)) return false;
    if (kind == kScaleToken) {
      scales[place] = scale;
    } else {
      scale = held_in_f16(scale);
      ((uint16_t*)scales)[place] = f32_to_f16(scale);
    }
    if (feedback != nullptr) write_compensated(x, out, dim, scale, feedback, moved);
    else write_quantized(x, out, dim, format, scale, nullptr);
  } else if (kind == kScaleChannel) {
    write_quantized(x, out, dim, format, 1.0f, scales + head * dim);
  } else {
    write_quantized(x, out, dim, format, scales[head], nullptr);
  }
  return true;
}

static void write_kv(const WriteKvArgs& a, const Team& team) {
  static thread_local Scratch scratch;
  float* moved = scratch.get<float>(2 * a.dim + W);
  float* centred = a.k_offset == nullptr ? nullptr : moved + a.dim + W;
  const Range items = share(a.tokens * a.kv_heads, team);
  for (int64_t item = items.begin; item < items.end; item++) {
    const int64_t token = item / a.kv_heads, head = item % a.kv_heads, slot = a.slots[token];
    int32_t problem = 0;
    if (slot < 0 || slot >= a.blocks * kBlock) {
      problem = kNoSuchBlock;
    } else {
      const int64_t place = (slot / kBlock * a.kv_heads + head) * kBlock + slot % kBlock;
      const float *k = a.k + token * a.stride + head * a.dim;
      const float *v = a.v + token * a.v_stride + head * a.v_dim;
      if (centred != nullptr) {
        for (int64_t d = 0; d < a.dim; d++) centred[d] = k[d] - a.k_offset[head * a.dim + d];
        k = centred;
      }
      if (a.sink_tokens > 0 && a.positions[token] < a.sink_tokens) {
        const int64_t own = (slot / kBlock * a.kv_heads + head) * a.sink_tokens + a.positions[token];
        write_float(k, a.sink_k + own * a.dim, a.dim, kBF16);
        write_float(v, a.sink_v + own * a.v_dim, a.v_dim, kBF16);
      }
      const float* feedback =
          a.k_feedback == nullptr ? nullptr : a.k_feedback + head * a.dim * a.dim;
      if (!write_head(a.k_format, k, a.dim, a.k_pool, a.k_scale, a.k_scale_kind, place, head,
                      feedback, moved) ||
          !write_head(a.v_format, v, a.v_dim, a.v_pool, a.v_scale, a.v_scale_kind, place, head,
                      nullptr, nullptr))
        problem = kNonfinite;
    }
    if (problem) __atomic_fetch_or(a.problem, problem, __ATOMIC_RELAXED);
  }
}
