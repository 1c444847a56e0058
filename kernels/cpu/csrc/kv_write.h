// Writing to the paged cache: keys and values of new tokens, quantized head by head.

constexpr int64_t kBlock = 64;  // tokens of a block of the cache

static inline int64_t element_bytes(int32_t format) {
  return format == kF32 ? 4 : format == kBF16 ? 2 : 1;
}

// One head of one token, scaled by `scale`, or by `channel_scale` where there is one.
static void write_quantized(const float* x, void* out, int64_t dim, int32_t format, float scale,
                            const float* channel_scale) {
  for (int64_t i = 0; i < dim; i += W) {
    const int64_t n = dim - i;
    vf s = set1(scale);
    if (channel_scale != nullptr) s = load_part(channel_scale + i, n);
    const vf v = load_part(x + i, n);
    const vf code = format == kI8 ? quantized_i8(v, s) : Float8(div(v, s)).code();
    store_i8_part((int8_t*)out + i, code, n);
  }
}

static void write_float(const float* x, void* out, int64_t dim, int32_t format) {
  if (format == kF32) {
    __builtin_memcpy(out, x, dim * sizeof(float));
    return;
  }
  uint16_t* to = (uint16_t*)out;
  for (int64_t i = 0; i < dim; i++) to[i] = x[i] == x[i] ? f32_to_bf16(x[i]) : 0x7fc0;
}

// place: of the head's token in the pool, in tokens. False if the token cannot be scaled.
static bool write_head(int32_t format, const float* x, int64_t dim, void* pool, float* scales,
                       int32_t kind, int64_t place, int64_t head) {
  void* out = (uint8_t*)pool + place * dim * element_bytes(format);
  if (kind == kScaleNone) {
    write_float(x, out, dim, format);
  } else if (kind == kScaleToken) {
    const float scale = scale_of(absmax(x, dim), format);
    if (!__builtin_isfinite(scale)) return false;
    scales[place] = scale;
    write_quantized(x, out, dim, format, scale, nullptr);
  } else if (kind == kScaleChannel) {
    write_quantized(x, out, dim, format, 1.0f, scales + head * dim);
  } else {
    write_quantized(x, out, dim, format, scales[head], nullptr);
  }
  return true;
}

static void write_kv(const WriteKvArgs& a, const Team& team) {
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
      const int32_t format = a.kv_format;
      if (!write_head(format, k, a.dim, a.k_pool, a.k_scale, a.k_scale_kind, place, head) ||
          !write_head(format, v, a.v_dim, a.v_pool, a.v_scale, a.v_scale_kind, place, head))
        problem = kNonfinite;
    }
    if (problem) __atomic_fetch_or(a.problem, problem, __ATOMIC_RELAXED);
  }
}
