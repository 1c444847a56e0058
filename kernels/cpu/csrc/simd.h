// Vectors of fp32, one kind for each instruction set; included by every translation unit inside its
// own unnamed namespace, so that no two share code. Nothing of the standard library's templates
// may be used there: the linker keeps one copy of a template, maybe that of a newer processor.
//
// The compiler may not contract a * b + c (-ffp-contract=off); fma() is written where it is meant.

static inline float bf16_to_f32(uint16_t v) {
  uint32_t u = (uint32_t)v << 16;
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}

static inline uint16_t f32_to_bf16(float f) {  // round half to even; finite values
  uint32_t u;
  __builtin_memcpy(&u, &f, 4);
  return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// fp16 that is normal, as scales are held, in fp32 and back (rounded half to even).
static inline float f16_to_f32(uint16_t v) {
  const uint32_t u = ((uint32_t)(v & 0x8000) << 16) | (((uint32_t)(v & 0x7fff) << 13) + 0x38000000);
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}

static inline uint16_t f32_to_f16(float f) {  // of magnitudes from 2^-14 to 65504
  uint32_t u;
  __builtin_memcpy(&u, &f, 4);
  const uint32_t size = (u & 0x7fffffff) - 0x38000000;
  return (uint16_t)(((u >> 16) & 0x8000) | ((size + 0xfff + ((size >> 13) & 1)) >> 13));
}

// e4m3 (fn) in fp32: sign and the other 7 bits are put where fp32 has sign, exponent and the top of
// the mantissa; 2^120 makes up for the other bias, exactly, subnormals too. NaN is not handled:
// neither weights nor caches hold it.
static inline float f8_to_f32(uint8_t v) {
  uint32_t u = ((uint32_t)(v & 0x80) << 24) | ((uint32_t)(v & 0x7f) << 20);
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f * 0x1p120f;
}

#if defined(PTQ_ISA_AVX512)

constexpr int W = 16;
typedef __m512 vf;
typedef __m512i vi;
static inline vf zero() { return _mm512_setzero_ps(); }
static inline vf set1(float a) { return _mm512_set1_ps(a); }
static inline vf load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, vf a) { _mm512_storeu_ps(p, a); }
static inline __mmask16 first(int n) { return (__mmask16)((1u << n) - 1); }
static inline vf load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
static inline void store_n(float* p, vf a, int n) { _mm512_mask_storeu_ps(p, first(n), a); }
static inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf min(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline vf abs(vf a) { return _mm512_abs_ps(a); }
static inline vf round(vf a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline vf from_int(vi a) { return _mm512_cvtepi32_ps(a); }
static inline vi to_int(vf a) { return _mm512_cvtps_epi32(a); }
static inline vf exp2_int(vi n) {  // 2^n, -126 <= n <= 127
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
static inline vf load_i8(const int8_t* p) {
  return from_int(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
static inline vf load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
static inline vf load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
static inline vf load_f8(const uint8_t* p) {
  vi v = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
  v = _mm512_and_si512(_mm512_slli_epi32(v, 20), _mm512_set1_epi32((int)0x87f00000));
  return mul(_mm512_castsi512_ps(v), set1(0x1p120f));
}
static inline void store_i8(int8_t* p, vf a) {  // integers in [-128, 127]
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(to_int(a)));
}

#elif defined(PTQ_ISA_AVX2)

constexpr int W = 8;
typedef __m256 vf;
typedef __m256i vi;
static inline vf zero() { return _mm256_setzero_ps(); }
static inline vf set1(float a) { return _mm256_set1_ps(a); }
static inline vf load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, vf a) { _mm256_storeu_ps(p, a); }
static inline vi first(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline vf load_n(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
static inline void store_n(float* p, vf a, int n) { _mm256_maskstore_ps(p, first(n), a); }
static inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf min(vf a, vf b) { return _mm256_min_ps(a, b); }
static inline vf abs(vf a) { return _mm256_andnot_ps(set1(-0.0f), a); }
static inline vf round(vf a) {
  return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline vf from_int(vi a) { return _mm256_cvtepi32_ps(a); }
static inline vi to_int(vf a) { return _mm256_cvtps_epi32(a); }
static inline vf exp2_int(vi n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
static inline vf load_i8(const int8_t* p) {
  return from_int(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
static inline vf load_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline vf load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
static inline vf load_f8(const uint8_t* p) {
  vi v = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
  v = _mm256_and_si256(_mm256_slli_epi32(v, 20), _mm256_set1_epi32((int)0x87f00000));
  return mul(_mm256_castsi256_ps(v), set1(0x1p120f));
}
static inline void store_i8(int8_t* p, vf a) {
  vi v = to_int(a);
  __m128i h = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(h, h));
}

#else  // any processor: the compiler's own vectors

constexpr int W = 8;
typedef float vf __attribute__((vector_size(32)));
typedef int32_t vi __attribute__((vector_size(32)));
static inline vf zero() { return vf{}; }
static inline vf set1(float a) { return vf{} + a; }
static inline vf load(const float* p) {
  vf a;
  __builtin_memcpy(&a, p, sizeof a);
  return a;
}
static inline void store(float* p, vf a) { __builtin_memcpy(p, &a, sizeof a); }
static inline vf load_n(const float* p, int n) {
  vf a = zero();
  for (int i = 0; i < n; i++) a[i] = p[i];
  return a;
}
static inline void store_n(float* p, vf a, int n) {
  for (int i = 0; i < n; i++) p[i] = a[i];
}
static inline vf fma(vf a, vf b, vf c) { return a * b + c; }
static inline vf add(vf a, vf b) { return a + b; }
static inline vf sub(vf a, vf b) { return a - b; }
static inline vf mul(vf a, vf b) { return a * b; }
static inline vf div(vf a, vf b) { return a / b; }
static inline vf max(vf a, vf b) { return a > b ? a : b; }
static inline vf min(vf a, vf b) { return a < b ? a : b; }
static inline vf abs(vf a) { return (vf)((vi)a & 0x7fffffff); }
static inline vf round(vf a) {  // half to even, where |a| < 2^22; larger ones are clamped anyway
  const float magic = 0x1.8p23f;
  vf r = (a + magic) - magic;
  return abs(a) < 0x1p22f ? r : a;
}
static inline vf from_int(vi a) { return __builtin_convertvector(a, vf); }
static inline vi to_int(vf a) { return __builtin_convertvector(round(a), vi); }
static inline vf exp2_int(vi n) { return (vf)((n + 127) << 23); }
static inline vf load_i8(const int8_t* p) {
  vf a;
  for (int i = 0; i < W; i++) a[i] = p[i];
  return a;
}
static inline vf load_bf16(const uint16_t* p) {
  vf a;
  for (int i = 0; i < W; i++) a[i] = bf16_to_f32(p[i]);
  return a;
}
static inline vf load_f16(const uint16_t* p) {
  vi a;
  for (int i = 0; i < W; i++) a[i] = (p[i] & 0x8000) << 16 | (p[i] & 0x7fff) << 13;
  return (vf)a * 0x1p112f;  // subnormal ones too
}
static inline vf load_f8(const uint8_t* p) {
  vf a;
  for (int i = 0; i < W; i++) a[i] = f8_to_f32(p[i]);
  return a;
}
static inline void store_i8(int8_t* p, vf a) {
  for (int i = 0; i < W; i++) p[i] = (int8_t)a[i];
}

#endif

// The bits of a vector, for the compiler's own integer arithmetic, comparisons and choices.
typedef uint32_t bits __attribute__((vector_size(W * 4)));
static inline bits all_bits(uint32_t a) { return bits{} + a; }
static inline vf number_or_zero(vf a) { return (vf)((bits)a & (bits)(a == a)); }

// Up to W elements: lanes beyond `n` are zero, or are not stored.
static inline vf load_part(const float* p, int64_t n) { return n < W ? load_n(p, (int)n) : load(p); }
static inline void store_part(float* p, vf a, int64_t n) {
  if (n < W) {
    store_n(p, a, (int)n);
  } else {
    store(p, a);
  }
}
static inline void store_i8_part(int8_t* p, vf a, int64_t n) {
  int8_t part[W];
  if (n >= W) return store_i8(p, a);
  store_i8(part, a);
  __builtin_memcpy(p, part, n);
}

// Sums and maxima over the lanes, always in the same tree: the upper half on the lower one.
#if defined(PTQ_ISA_AVX512) || defined(PTQ_ISA_AVX2)
#if defined(PTQ_ISA_AVX512)
static inline __m256 lower(vf a) { return _mm512_castps512_ps256(a); }
static inline __m256 upper(vf a) { return _mm512_extractf32x8_ps(a, 1); }
static inline __m128 sum_of_4(vf a) {
  const __m256 b = _mm256_add_ps(lower(a), upper(a));
  return _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
}
static inline __m128 max_of_4(vf a) {
  const __m256 b = _mm256_max_ps(lower(a), upper(a));
  return _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
}
#else
static inline __m128 sum_of_4(vf a) {
  return _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
}
static inline __m128 max_of_4(vf a) {
  return _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
}
#endif
static inline float reduce_add(vf a) {
  __m128 b = sum_of_4(a);
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
static inline float reduce_max(vf a) {
  __m128 b = max_of_4(a);
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
#else
static inline float reduce_add(vf a) {
  float t[W];
  store(t, a);
  for (int n = W / 2; n > 0; n /= 2)
    for (int i = 0; i < n; i++) t[i] = t[i] + t[i + n];
  return t[0];
}

static inline float reduce_max(vf a) {
  float t[W];
  store(t, a);
  for (int n = W / 2; n > 0; n /= 2)
    for (int i = 0; i < n; i++) t[i] = t[i] > t[i + n] ? t[i] : t[i + n];
  return t[0];
}
#endif

// e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln 2 / 2, and the Taylor polynomial of degree 7 of
// e^r (relative error below 2e-7 in all); 0 below -87, infinity is not reached: x is clamped at 88.
// NaN stays NaN: of two operands, min and max return the second where one is NaN.
static inline vf exp(vf x) {
  const vf low = set1(-87.0f);
  vf c = min(set1(88.0f), max(low, x));
  vf n = round(mul(c, set1(1.44269504f)));
  vf r = fma(n, set1(-0.693145752f), c);  // ln 2 in two parts
  r = fma(n, set1(-1.42860677e-6f), r);
  vf p = set1(1.0f / 5040);
  p = fma(p, r, set1(1.0f / 720));
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  vf y = mul(p, exp2_int(to_int(n)));
#if defined(PTQ_ISA_AVX512)
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, low, _CMP_LT_OQ), y, zero());
#elif defined(PTQ_ISA_AVX2)
  return _mm256_andnot_ps(_mm256_cmp_ps(x, low, _CMP_LT_OQ), y);
#else
  return x < low ? zero() : y;
#endif
}

static inline vf choose(bits which, vf yes, vf no) {
  return (vf)(((bits)yes & which) | ((bits)no & ~which));
}

// tanh x: its Taylor polynomial where |x| < 0.3 (relative error below 1e-7), else 1 - 2 / (1 + e^2x).
static inline vf tanh(vf x) {
  const vf one = set1(1.0f), square = mul(x, x);
  vf p = set1(62.0f / 2835);
  p = fma(p, square, set1(-17.0f / 315));
  p = fma(p, square, set1(2.0f / 15));
  p = fma(p, square, set1(-1.0f / 3));
  p = fma(mul(p, square), x, x);
  const vf far = sub(one, div(set1(2.0f), add(one, exp(add(x, x)))));
  return choose((bits)(abs(x) < set1(0.3f)), p, far);
}

// erfc(z) for z >= 0, as e^(-z^2) t P(t) with t = 1 / (1 + 0.3 z) and P of degree 8: fitted to
// e^(z^2) erfc(z) on [0, 9.6] by weighted least squares, with a relative error below 5e-8.
static inline vf erfc(vf z) {
  const vf t = div(set1(1.0f), fma(set1(0.3f), z, set1(1.0f)));
  vf p = set1(-0.129458025f);
  p = fma(p, t, set1(0.48522234f));
  p = fma(p, t, set1(-0.511510253f));
  p = fma(p, t, set1(0.54675281f));
  p = fma(p, t, set1(-0.0939067081f));
  p = fma(p, t, set1(0.214568719f));
  p = fma(p, t, set1(0.148443654f));
  p = fma(p, t, set1(0.17069824f));
  p = fma(p, t, set1(0.169189185f));
  return mul(mul(p, t), exp(sub(zero(), mul(z, z))));
}

// Scratch of one thread, kept between calls and grown when a larger one is needed.
struct Scratch {
  char* data = nullptr;
  size_t size = 0;
  template <class T>
  T* get(size_t count) {
    size_t needed = (count * sizeof(T) + 2 * kAlign - 1) / kAlign * kAlign;
    if (needed > size) {
      __builtin_free(data);
      data = (char*)aligned_alloc(kAlign, needed);
      if (data == nullptr) __builtin_trap();
      size = needed;
    }
    return (T*)data;
  }
};
