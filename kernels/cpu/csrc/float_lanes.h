// From the 32 bits of a lane of a packed weight to fp32. A lane holds consecutive inputs of one
// output: one fp32, two bf16 or fp16, four e4m3, four int8 or eight int4. What is decoded stands for the
// weight up to a power of two, which spares instructions and costs no bit.

#if defined(PTQ_ISA_AVX512)
static inline vi lane_bits(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline vi shift_left(vi v, int n) { return _mm512_slli_epi32(v, n); }
static inline vi keep(vi v, uint32_t mask) { return _mm512_and_si512(v, _mm512_set1_epi32(mask)); }
static inline vi flip(vi v, uint32_t mask) { return _mm512_xor_si512(v, _mm512_set1_epi32(mask)); }
static inline vf as_float(vi v) { return _mm512_castsi512_ps(v); }
// Sign and 7 bits of every second byte, where bf16 has them: of each pair of bytes the high one.
static inline vi high_bytes(vi v) { return keep(_mm512_srai_epi16(v, 4), 0x87f087f0u); }
static inline vi low_bytes(vi v) { return high_bytes(_mm512_slli_epi16(v, 8)); }
// The low fp16 of all lanes, then the high ones.
static inline vi halves_apart(vi v) {
  const vi pairs = _mm512_set4_epi32(0x0f0e0b0a, 0x07060302, 0x0d0c0908, 0x05040100);
  const vi order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
  return _mm512_permutexvar_epi64(order, _mm512_shuffle_epi8(v, pairs));
}
static inline vf from_half(vi v, int high) {
  return _mm512_cvtph_ps(high ? _mm512_extracti64x4_epi64(v, 1) : _mm512_castsi512_si256(v));
}
#elif defined(PTQ_ISA_AVX2)
static inline vi lane_bits(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline vi shift_left(vi v, int n) { return _mm256_slli_epi32(v, n); }
static inline vi keep(vi v, uint32_t mask) { return _mm256_and_si256(v, _mm256_set1_epi32(mask)); }
static inline vi flip(vi v, uint32_t mask) { return _mm256_xor_si256(v, _mm256_set1_epi32(mask)); }
static inline vf as_float(vi v) { return _mm256_castsi256_ps(v); }
// Sign and 7 bits of every second byte, where bf16 has them: of each pair of bytes the high one.
static inline vi high_bytes(vi v) { return keep(_mm256_srai_epi16(v, 4), 0x87f087f0u); }
static inline vi low_bytes(vi v) { return high_bytes(_mm256_slli_epi16(v, 8)); }
// The low fp16 of all lanes, then the high ones.
static inline vi halves_apart(vi v) {
  const vi pairs = _mm256_set_epi32(0x0f0e0b0a, 0x07060302, 0x0d0c0908, 0x05040100, 0x0f0e0b0a,
                                    0x07060302, 0x0d0c0908, 0x05040100);
  return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(v, pairs), 0xd8);
}
static inline vf from_half(vi v, int high) {
  return _mm256_cvtph_ps(high ? _mm256_extracti128_si256(v, 1) : _mm256_castsi256_si128(v));
}
#else
typedef uint32_t vu __attribute__((vector_size(32)));
static inline vi lane_bits(const uint8_t* p) {
  vi v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
static inline vi shift_left(vi v, int n) { return (vi)((vu)v << n); }
static inline vi keep(vi v, uint32_t mask) { return (vi)((vu)v & mask); }
static inline vi flip(vi v, uint32_t mask) { return (vi)((vu)v ^ mask); }
static inline vf as_float(vi v) { return (vf)v; }
// Sign and 7 bits of every second byte, where bf16 has them: of each pair of bytes the high one.
static inline vi high_bytes(vi v) {
  return (vi)(((vu)v & 0x80008000u) | (((vu)v >> 4) & 0x07f007f0u));
}
static inline vi low_bytes(vi v) { return high_bytes(shift_left(keep(v, 0x00ff00ffu), 8)); }
static inline vi halves_apart(vi v) { return v; }
// As fp32 2^-112 of it, subnormal numbers too; infinity and NaN are no weights.
static inline vf from_half(vi v, int high) {
  const vu u = high ? (vu)v : (vu)v << 16;
  return (vf)((u & 0x80000000u) | ((u & 0x7fff0000u) >> 3)) * 0x1p112f;
}
#endif

// Each lane type: kInputs; read() of W lanes; input(j), which is w / kUnit; kRow, a power of two
// that rows of x are multiplied with where weights are used as input() gives them.
struct LaneF32 {
  static constexpr int kInputs = 1;
  static constexpr float kUnit = 1.0f, kRow = 1.0f;
  vi bits;
  static inline LaneF32 read(const uint8_t* p) { return {lane_bits(p)}; }
  inline vf input(int) const { return as_float(bits); }
};

struct LaneBF16 {
  static constexpr int kInputs = 2;
  static constexpr float kUnit = 1.0f, kRow = 1.0f;
  vi bits;
  static inline LaneBF16 read(const uint8_t* p) { return {lane_bits(p)}; }
  inline vf input(int j) const {
    return as_float(j == 0 ? shift_left(bits, 16) : keep(bits, 0xffff0000u));
  }
};

struct LaneF16 {
  static constexpr int kInputs = 2;
  static constexpr float kUnit = 1.0f, kRow = 1.0f;
  vi halves;
  static inline LaneF16 read(const uint8_t* p) { return {halves_apart(lane_bits(p))}; }
  inline vf input(int j) const { return from_half(halves, j); }
};

#if defined(PTQ_ISA_AVX512)
// e4m3 with the exponent of fp32. Subnormal ones, sign and m of (-1)^s 2^-6 m / 8, come out as
// (-1)^s 2^-7 (1 + m / 8) at first: twice that, less (-1)^s 2^-6. Intel's processors take a hundred
// cycles for an operation on numbers that are subnormal in fp32.
struct LaneF8 {
  static constexpr int kInputs = 4;
  static constexpr float kUnit = 1.0f, kRow = 1.0f;
  vi low, high;  // inputs 0 and 2, 1 and 3
  static inline LaneF8 read(const uint8_t* p) {
    const vi v = lane_bits(p);
    return {low_bytes(v), high_bytes(v)};
  }
  inline vf input(int j) const {
    const vi v = j % 2 == 0 ? low : high;
    const vi u = j < 2 ? shift_left(v, 16) : keep(v, 0xffff0000u);
    const vf f = as_float(_mm512_add_epi32(u, _mm512_set1_epi32(120 << 23)));
    const __mmask16 subnormal = _mm512_testn_epi32_mask(u, _mm512_set1_epi32(0x07800000));
    const vi unit = _mm512_or_si512(keep(u, 0x80000000u), _mm512_set1_epi32(0x3c800000));  // 2^-6
    return _mm512_mask_sub_ps(f, subnormal, add(f, f), as_float(unit));
  }
};
#else
// e4m3 as bf16 with the exponent of e4m3: 2^-120 of the value. The smallest become subnormal, on
// which multiplications are slow and fused ones are not (Zen), so that these are all there is: a
// row times 2^60 and weights as they are, or weights times 2^60 and a row as it is. Both are exact
// and give the same products.
struct LaneF8 {
  static constexpr int kInputs = 4;
  static constexpr float kUnit = 0x1p120f, kRow = 0x1p60f;
  vi low, high;  // inputs 0 and 2, 1 and 3
  static inline LaneF8 read(const uint8_t* p) {
    const vi v = lane_bits(p);
    return {low_bytes(v), high_bytes(v)};
  }
  inline vf input(int j) const {
    const vi v = j % 2 == 0 ? low : high;
    return as_float(j < 2 ? shift_left(v, 16) : keep(v, 0xffff0000u));
  }
};
#endif

struct LaneI8 {
  static constexpr int kInputs = 4;
  static constexpr float kUnit = 0x1p-24f, kRow = 1.0f;
  vi bits;
  static inline LaneI8 read(const uint8_t* p) { return {lane_bits(p)}; }
  inline vf input(int j) const {
    return from_int(keep(shift_left(bits, 24 - 8 * j), 0xff000000u));
  }
};

// Nibbles are q + 8; with the high bit flipped they are two's complement.
struct LaneI4 {
  static constexpr int kInputs = 8;
  static constexpr float kUnit = 0x1p-28f, kRow = 1.0f;
  vi bits;
  static inline LaneI4 read(const uint8_t* p) { return {flip(lane_bits(p), 0x88888888u)}; }
  inline vf input(int j) const {
    const int bit = j < 4 ? 8 * j : 8 * (j - 4) + 4;
    return from_int(keep(shift_left(bits, 28 - bit), 0xf0000000u));
  }
};
