// Attention to one block of 64 cached tokens: the three products of its inner loop, for one kv head
// and the rows (queries times their heads) that share it.
//
// All of it is fp32. A score is summed over the head's dimension in W partial sums, which are then
// added in one tree; what a row gathers of V is added token by token. Neither order depends on how
// many rows are taken at once, so that a row has the same bits in any company.

static inline vf widen(const float* p) { return load(p); }
static inline vf widen(const uint16_t* p) { return load_bf16(p); }
static inline vf widen(const int8_t* p) { return load_i8(p); }
// e4m3 in units of 1 / kUnitF8: as fp16, whose exponent is biased by 8 more, subnormals included.
#if defined(PTQ_ISA_AVX512)
constexpr float kUnitF8 = 256.0f;
static inline vf widen(const uint8_t* p) {
  __m256i v = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
  v = _mm256_and_si256(_mm256_slli_epi16(v, 7), _mm256_set1_epi16((short)0xbf80));
  return _mm512_cvtph_ps(v);
}
#elif defined(PTQ_ISA_AVX2)
constexpr float kUnitF8 = 256.0f;
static inline vf widen(const uint8_t* p) {
  __m128i v = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));
  v = _mm_and_si128(_mm_slli_epi16(v, 7), _mm_set1_epi16((short)0xbf80));
  return _mm256_cvtph_ps(v);
}
#else
constexpr float kUnitF8 = 1.0f;
static inline vf widen(const uint8_t* p) { return load_f8(p); }
#endif
// Two of int4 in a byte: of W bytes, the vectors of their low and of their high numbers.
struct I4 {
  uint8_t byte;
};
struct Pair {
  vf low, high;
};
#if defined(PTQ_ISA_AVX512)
static inline Pair widen(const I4* p) {  // a table look-up heeds the lowest four bits alone
  const vf values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  return {_mm512_permutexvar_ps(bytes, values),
          _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), values)};
}
#elif defined(PTQ_ISA_AVX2)
static inline Pair widen(const I4* p) {
  const __m128i bytes = _mm_loadl_epi64((const __m128i*)p), low = _mm_set1_epi8(15);
  const __m128i eight = _mm_set1_epi8(8);
  const __m128i a = _mm_sub_epi8(_mm_and_si128(bytes, low), eight);
  const __m128i b = _mm_sub_epi8(_mm_and_si128(_mm_srli_epi16(bytes, 4), low), eight);
  return {from_int(_mm256_cvtepi8_epi32(a)), from_int(_mm256_cvtepi8_epi32(b))};
}
#else
static inline Pair widen(const I4* p) {
  int8_t low[W], high[W];
  for (int i = 0; i < W; i++) {
    low[i] = (int8_t)((p[i].byte & 15) - 8);
    high[i] = (int8_t)((p[i].byte >> 4) - 8);
  }
  return {load_i8(low), load_i8(high)};
}
#endif

// Vectors that are widened at once. Those of int4 are channels d and d + dim / 2; in this order the
// channels of a query, or of a result, lie beside such keys or values.
template <class T>
constexpr int kAtOnce = 1;
template <>
constexpr int kAtOnce<I4> = 2;

// Floats of a head as it is widened.
static inline int64_t width_of(int32_t format, int64_t dim) {
  return format == kI4 ? 2 * round_up(dim / 2, W) : round_up(dim, W);
}

static inline float unit_of(int32_t format) { return format == kF8 ? kUnitF8 : 1.0f; }

// Keeps a loaded vector in a register: GCC would load it again for each product.
static inline void keep(vf& a) {
#if defined(PTQ_ISA_AVX512)
  asm("" : "+v"(a));
#elif defined(PTQ_ISA_AVX2)
  asm("" : "+x"(a));
#endif
  (void)a;
}

// Lane i gets the sum of a[i]: lanes are added in one tree, the same for all i.
#if defined(PTQ_ISA_AVX512)
static inline __m512 add_pairs(__m512 a, __m512 b) {
  return add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}
static inline __m512 add_fours(__m512 a, __m512 b, __m512 c, __m512 d) {  // of each 128 bits
  const __m512d x = _mm512_castps_pd(add_pairs(a, b)), y = _mm512_castps_pd(add_pairs(c, d));
  return add(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}
static inline __m512 add_quarters(__m512 a, __m512 b) {
  return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
static inline vf reduce_each(const vf* a) {
  return add_quarters(add_quarters(add_fours(a[0], a[1], a[2], a[3]),
                                   add_fours(a[4], a[5], a[6], a[7])),
                      add_quarters(add_fours(a[8], a[9], a[10], a[11]),
                                   add_fours(a[12], a[13], a[14], a[15])));
}
#elif defined(PTQ_ISA_AVX2)
// A sum of halves that lie crosswise: one shuffle and one blend each.
static inline vf add_halves(vf a, vf b) {  // [4 of a, 4 of b]
  return add(_mm256_permute2f128_ps(a, b, 0x21), _mm256_blend_ps(a, b, 0xf0));
}
static inline vf add_quarters(vf a, vf b) {  // of each 128 bits: [2 of a, 2 of b]
  return add(_mm256_shuffle_ps(a, b, 0x4e), _mm256_blend_ps(a, b, 0xcc));
}
static inline vf add_pairs(vf a, vf b) {  // of each 128 bits: a, b, a, b
  return add(_mm256_permute_ps(_mm256_blend_ps(b, a, 0xaa), 0xb1), _mm256_blend_ps(a, b, 0xaa));
}
static inline vf reduce_each(const vf* a) {
  return add_pairs(add_quarters(add_halves(a[0], a[4]), add_halves(a[2], a[6])),
                   add_quarters(add_halves(a[1], a[5]), add_halves(a[3], a[7])));
}
#else
static inline vf reduce_each(const vf* a) {
  vf sums = zero();
  for (int i = 0; i < W; i++) sums[i] = reduce_add(a[i]);
  return sums;
}
#endif

// Asks for the cache lines of some bytes, which a thread will want one block later.
static inline void fetch(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kAlign) __builtin_prefetch((const char*)p + i);
}

// Tokens of a block that a row sees.
struct Span {
  int begin, end;
};

// s[r][t] = q[r] . k[t] for R rows and the tokens of a span, widened to whole tiles. `next`: the
// keys wanted next.
template <int R, class T>
static void scores_of(const float* q, const T* k, const T* next, int64_t width, Span span,
                      float* s) {
  constexpr int kTokens = R == 1 ? W : R == 2 ? W / 2 : W / 4;  // R * kTokens <= W sums in a tile
  for (int t = span.begin / kTokens * kTokens; t < span.end; t += kTokens) {
    const int64_t row = width / kAtOnce<T>;  // elements
    fetch(next + t * row, kTokens * row * (int64_t)sizeof(T));
    vf sum[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) sum[i] = zero();
    if constexpr (kAtOnce<T> == 2) {
      for (int64_t d = 0; d < width; d += 2 * W) {
        vf low[R], high[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          low[r] = load(q + r * width + d);
          high[r] = load(q + r * width + d + W);
        }
#pragma GCC unroll 16
        for (int j = 0; j < kTokens; j++) {
          const Pair key = widen(k + (t + j) * row + d / 2);
#pragma GCC unroll 4
          for (int r = 0; r < R; r++) {
            vf& own = sum[r * kTokens + j];
            own = fma(high[r], key.high, fma(low[r], key.low, own));
          }
        }
      }
    } else for (int64_t d = 0; d < width; d += W) {
      vf key[kTokens];
#pragma GCC unroll 16
      for (int j = 0; j < kTokens; j++) key[j] = widen(k + (t + j) * width + d);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        vf query = load(q + r * width + d);
        keep(query);
#pragma GCC unroll 16
        for (int j = 0; j < kTokens; j++)
          sum[r * kTokens + j] = fma(query, key[j], sum[r * kTokens + j]);
      }
    }
    float sums[W];
    store(sums, reduce_each(sum));
    for (int r = 0; r < R; r++)
      __builtin_memcpy(s + r * kBlock + t, sums + r * kTokens, sizeof(float) * kTokens);
  }
}

// What is done to a row's scores before the softmax: a bound c of c tanh(s / c), 0 for none, and a
// slope that each position is weighed by, less that of the query (`offset`, of the block's first).
struct Bend {
  float softcap, slope, offset;
};

// Scores of one row to weights e^(s - top), 0 outside the span. `top` is the largest score so far,
// `sum` that of the weights; returns what earlier sums are to be multiplied by.
static inline float weigh(float* s, Span span, const float* k_scale, const float* v_scale,
                          const Bend& bend, float* top, float* sum) {
  static const float kLane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  constexpr int kVectors = kBlock / W;
  const vf lane = load(kLane), hidden = set1(-__builtin_inff());
  const vf begin = set1((float)span.begin), end = set1((float)span.end);
  vf score[kVectors], largest = set1(*top);
  const bool all = span.begin == 0 && span.end == kBlock;
  for (int i = 0; i < kVectors; i++) {
    score[i] = load(s + i * W);
    if (k_scale != nullptr) score[i] = mul(score[i], load(k_scale + i * W));
    if (bend.softcap != 0.0f) score[i] = softcapped(score[i], bend.softcap);
    const vf index = add(lane, set1((float)(i * W)));
    if (bend.slope != 0.0f)
      score[i] = add(score[i], mul(set1(bend.slope), add(index, set1(bend.offset))));
    if (!all) {
      const bits seen = (bits)(index >= begin) & (bits)(index < end);
      score[i] = (vf)(((bits)score[i] & seen) | ((bits)hidden & ~seen));
    }
    largest = max(largest, score[i]);
  }
  const float next = reduce_max(largest);
  const vf minus = set1(next);
  vf total = zero();
  for (int i = 0; i < kVectors; i++) {
    vf weight = exp(sub(score[i], minus));
    total = add(total, weight);
    if (v_scale != nullptr) weight = mul(weight, load(v_scale + i * W));
    store(s + i * W, weight);
  }
  float decay[W] = {1.0f};
  if (next != *top) store(decay, exp(sub(set1(*top), minus)));
  *sum = *sum * decay[0] + reduce_add(total);
  *top = next;
  return decay[0];
}

// N vectors of out[r] = out[r] decay[r] + sum of p[r][t] v[t] over the tokens of a span.
template <int R, int N, class T>
static inline void gather_vectors(const float* p, const T* v, const T* next, int64_t width,
                                  Span span, const float* decay, float* out) {
  vf sum[R][N];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int j = 0; j < N; j++) sum[r][j] = mul(load(out + r * width + j * W), set1(decay[r]));
  for (int t = span.begin; t < span.end; t++) {
    const int64_t row = width / kAtOnce<T>;
    __builtin_prefetch(next + t * row);
    vf value[N];
    if constexpr (kAtOnce<T> == 2) {
#pragma GCC unroll 16
      for (int j = 0; j < N; j += 2) {
        const Pair pair = widen(v + t * row + j / 2 * W);
        value[j] = pair.low;
        value[j + 1] = pair.high;
      }
    } else {
#pragma GCC unroll 16
      for (int j = 0; j < N; j++) value[j] = widen(v + t * width + j * W);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const vf weight = set1(p[r * kBlock + t]);
#pragma GCC unroll 16
      for (int j = 0; j < N; j++) sum[r][j] = fma(weight, value[j], sum[r][j]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int j = 0; j < N; j++) store(out + r * width + j * W, sum[r][j]);
}

template <int R, class T>
static void gather(const float* p, const T* v, const T* next, int64_t width, Span span,
                   const float* decay, float* out) {
  constexpr int kVectors = R == 1 ? W : R == 2 ? W / 2 : W / 4;
  constexpr int kFew = kAtOnce<T>;
  int64_t d = 0;
  for (; d + kVectors * W <= width; d += kVectors * W)
    gather_vectors<R, kVectors>(p, v + d / kFew, next + d / kFew, width, span, decay, out + d);
  for (; d < width; d += kFew * W)
    gather_vectors<R, kFew>(p, v + d / kFew, next + d / kFew, width, span, decay, out + d);
}

// A block of K or V as fp32 [64][width], zero beyond dim.
template <class T>
static const float* widened(const T* from, const T* next, int64_t dim, int64_t width, float* to) {
  constexpr int kMany = kAtOnce<T>;
  const int64_t count = dim / kMany;  // elements of a head
  for (int64_t t = 0; t < kBlock; t++, from += count, next += count, to += width) {
    fetch(next, count * (int64_t)sizeof(T));
    for (int64_t d = 0; d < count; d += W) {
      T part[W];
      const T* own = from + d;
      if (count - d < W) {
        __builtin_memset(part, kMany == 2 ? 0x88 : 0, sizeof part);  // of int4 two zeros
        __builtin_memcpy(part, own, (count - d) * sizeof(T));
        own = part;
      }
      if constexpr (kMany == 2) {
        const Pair pair = widen(own);
        store(to + 2 * d, pair.low);
        store(to + 2 * d + W, pair.high);
      } else {
        store(to + d, widen(own));
      }
    }
  }
  return to - kBlock * width;
}
