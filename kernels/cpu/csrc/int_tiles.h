// Integer products of a tile: a few rows of x times one panel of outputs, exact in int32. What
// differs between instruction sets is here: how weights and inputs are prepared, and the loop.
//
// A step takes 32 bits of a row of x and 32 bits of each output of the panel:
//     AVX2      kI8: two int16 each, vpmaddwd. A lane's four inputs make the pairs (0, 2), (1, 3)
//               kI4: four uint8 times four int8, vpmaddubsw; no more than 2 * 15 * 128 in int16,
//               so that 8 steps add up in int16 before they are widened
//     AVX-512   four uint8 times four int8, vpdpbusd, which adds up in int32; kI8 as q + 128
//     portable  two int16 each, for both formats
// Weights that are held unsigned are larger by kBase; that is taken back through the sum of x.

constexpr int kVectors = kPanel / W;
constexpr int64_t kStep = kPanel * 4;  // bytes of a step's weights
constexpr int64_t kAhead = 2048;       // bytes that weights are fetched ahead

static inline int32_t load_32(const void* p) {
  int32_t v;
  __builtin_memcpy(&v, p, 4);
  return v;
}

#if defined(PTQ_ISA_AVX512)

template <bool kWide>
constexpr int kDirectRows = kWide ? 12 : 4;
template <bool kWide>
constexpr bool kStreams = kWide;  // whether weights of many rows are not prepared, either
template <int F>
constexpr int kTileRows = 6;
template <int F>
constexpr int kXBytes = 1;  // of a prepared input
template <int F>
constexpr int kBase = F == kI8 ? 128 : 8;

static inline vi set1_i32(int32_t a) { return _mm512_set1_epi32(a); }
static inline vi load_i32(const void* p) { return _mm512_loadu_si512(p); }
static inline void store_i32(void* p, vi a) { _mm512_storeu_si512(p, a); }
static inline vi add_i32(vi a, vi b) { return _mm512_add_epi32(a, b); }
static inline vi mul_i32(vi a, vi b) { return _mm512_mullo_epi32(a, b); }
static inline vi times_256(vi a) { return _mm512_slli_epi32(a, 8); }
static inline vi low_nibbles(vi a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
static inline vi high_nibbles(vi a) { return low_nibbles(_mm512_srli_epi16(a, 4)); }
static inline vi plus_128(vi a) { return _mm512_xor_si512(a, _mm512_set1_epi8(-128)); }

// acc += four products. In assembly: as an intrinsic, GCC 12 moves accumulators to the stack.
static inline __attribute__((always_inline)) void dot4(vi& acc, vi w, vi x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
}

// Sum of 64 inputs, added up in lanes.
static inline vi sum_inputs(vi sum, const int8_t* x) {
  dot4(sum, _mm512_set1_epi8(1), load_i32(x));
  return sum;
}

template <int F>
static inline void prepare_vector(const int8_t* x, void* out) {
  store_i32(out, load_i32(x));
}

template <int F>
static void prepare_weights(const uint8_t* p, int64_t lanes, uint8_t* out) {
  for (int64_t i = 0; i < lanes; i++, p += kStep, out += kStep * (F == kI4 ? 2 : 1)) {
    for (int v = 0; v < kVectors; v++) {
      const vi raw = load_i32(p + v * 64);
      store_i32(out + v * 64, F == kI4 ? low_nibbles(raw) : plus_128(raw));
      if (F == kI4) store_i32(out + kStep + v * 64, high_nibbles(raw));
    }
  }
}

template <int F, int R>
static inline __attribute__((always_inline)) void multiply(const uint8_t* w, const char* x,
                                                           int64_t stride, int64_t steps,
                                                           vi (&acc)[R][kVectors]) {
  for (int64_t i = 0; i < steps; i++, w += kStep) {
    vi q[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) q[v] = load_i32(w + v * 64);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const vi b = set1_i32(load_32(x + r * stride + i * 4));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) dot4(acc[r][v], q[v], b);
    }
  }
}

// The same from packed lanes, for rows so few that weights are not prepared first.
template <int F, int R>
static inline __attribute__((always_inline)) void multiply_packed(const uint8_t* p, const char* x,
                                                                  int64_t stride, int64_t lanes,
                                                                  vi (&acc)[R][kVectors]) {
  constexpr int64_t per_lane = F == kI4 ? 8 : 4;
  for (int64_t i = 0; i < lanes; i++, p += kStep, x += per_lane) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
      __builtin_prefetch(p + kAhead + v * 64);
      const vi raw = load_i32(p + v * 64);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const char* from = x + r * stride;
        if (F == kI4) {
          dot4(acc[r][v], low_nibbles(raw), set1_i32(load_32(from)));
          dot4(acc[r][v], high_nibbles(raw), set1_i32(load_32(from + 4)));
        } else {
          dot4(acc[r][v], plus_128(raw), set1_i32(load_32(from)));
        }
      }
    }
  }
}

#elif defined(PTQ_ISA_AVX2)

template <bool kWide>
constexpr int kDirectRows = kWide ? 2 : 12;
template <bool kWide>
constexpr bool kStreams = false;
template <int F>
constexpr int kTileRows = F == kI8 ? 6 : 4;  // kI4 has int16 sums beside the int32 ones
template <int F>
constexpr int kXBytes = F == kI8 ? 2 : 1;
template <int F>
constexpr int kBase = F == kI8 ? 0 : 8;

static inline vi set1_i32(int32_t a) { return _mm256_set1_epi32(a); }
static inline vi load_i32(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline void store_i32(void* p, vi a) { _mm256_storeu_si256((__m256i*)p, a); }
static inline vi add_i32(vi a, vi b) { return _mm256_add_epi32(a, b); }
static inline vi mul_i32(vi a, vi b) { return _mm256_mullo_epi32(a, b); }
static inline vi times_256(vi a) { return _mm256_slli_epi32(a, 8); }
static inline vi low_nibbles(vi a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
static inline vi high_nibbles(vi a) { return low_nibbles(_mm256_srli_epi16(a, 4)); }
static inline vi even_i16(vi a) { return _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8); }
static inline vi odd_i16(vi a) { return _mm256_srai_epi16(a, 8); }

// acc += products, two of int16 or four of uint8 w and int8 x. In assembly: GCC 12 sums intrinsics
// of several steps in an order of its own, which takes more registers than there are.
static inline __attribute__((always_inline)) void dot2(vi& acc, vi w, vi x) {
  vi t;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(acc), "=x"(t) : "x"(w), "x"(x));
}
static inline __attribute__((always_inline)) void dot4(vi& acc16, vi w, vi x) {
  vi t;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(acc16), "=x"(t) : "x"(w), "x"(x));
}
static inline __attribute__((always_inline)) vi first_dot4(vi w, vi x) {
  vi t;
  asm("vpmaddubsw %2, %1, %0" : "=x"(t) : "x"(w), "x"(x));
  return t;
}
// int16 ones, loaded where they are used: loops before need all registers.
static inline __attribute__((always_inline)) vi load_ones() {
  alignas(32) static const int16_t ones[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  vi t;
  asm volatile("vmovdqa %1, %0" : "=x"(t) : "m"(ones));
  return t;
}
static inline vi widen_add(vi acc, vi sum16, vi ones) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(sum16, ones));
}

static inline vi sum_inputs(vi sum, const int8_t* x) {  // of 32 inputs, in lanes
  const vi ones = _mm256_set1_epi16(1);
  return widen_add(sum, _mm256_maddubs_epi16(_mm256_set1_epi8(1), load_i32(x)), ones);
}

template <int F>
static inline void prepare_vector(const int8_t* x, void* out) {
  const vi raw = load_i32(x);
  if (F == kI4) return store_i32(out, raw);
  const vi even = even_i16(raw), odd = odd_i16(raw);
  const vi a = _mm256_unpacklo_epi32(even, odd), b = _mm256_unpackhi_epi32(even, odd);
  store_i32(out, _mm256_permute2x128_si256(a, b, 0x20));
  store_i32((char*)out + 32, _mm256_permute2x128_si256(a, b, 0x31));
}

template <int F>
static void prepare_weights(const uint8_t* p, int64_t lanes, uint8_t* out) {
  for (int64_t i = 0; i < lanes; i++, p += kStep, out += 2 * kStep) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; v++) {
      const vi raw = load_i32(p + v * 32);
      store_i32(out + v * 32, F == kI4 ? low_nibbles(raw) : even_i16(raw));
      store_i32(out + kStep + v * 32, F == kI4 ? high_nibbles(raw) : odd_i16(raw));
    }
  }
}

// Steps of kI4, at most 8, and their widening.
template <int R>
static inline __attribute__((always_inline)) void multiply_run(const uint8_t* w, const char* x,
                                                               int64_t stride, int steps,
                                                               vi (&acc)[R][kVectors]) {
  vi sum[R][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < steps; i++) {
    const vi w0 = load_i32(w + i * kStep), w1 = load_i32(w + i * kStep + 32);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const vi b = set1_i32(load_32(x + r * stride + i * 4));
      if (i == 0) {
        sum[r][0] = first_dot4(w0, b);
        sum[r][1] = first_dot4(w1, b);
      } else {
        dot4(sum[r][0], w0, b);
        dot4(sum[r][1], w1, b);
      }
    }
  }
  const vi ones = load_ones();
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    acc[r][0] = widen_add(acc[r][0], sum[r][0], ones);
    acc[r][1] = widen_add(acc[r][1], sum[r][1], ones);
  }
}

template <int F, int R>
static inline __attribute__((always_inline)) void multiply(const uint8_t* w, const char* x,
                                                           int64_t stride, int64_t steps,
                                                           vi (&acc)[R][kVectors]) {
  if (F == kI4) {
    for (; steps >= 8; steps -= 8, w += 8 * kStep, x += 32) multiply_run<R>(w, x, stride, 8, acc);
    for (; steps > 0; steps -= 2, w += 2 * kStep, x += 8) multiply_run<R>(w, x, stride, 2, acc);
    return;
  }
  for (int64_t i = 0; i < steps; i += 2, w += 2 * kStep) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      const vi w0 = load_i32(w + j * kStep), w1 = load_i32(w + j * kStep + 32);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const vi b = set1_i32(load_32(x + r * stride + (i + j) * 4));
        dot2(acc[r][0], w0, b);
        dot2(acc[r][1], w1, b);
      }
    }
  }
}

// kI4 from packed lanes, at most 4 of them.
template <int R>
static inline __attribute__((always_inline)) void multiply_packed_run(const uint8_t* p,
                                                                      const char* x,
                                                                      int64_t stride, int lanes,
                                                                      vi (&acc)[R][kVectors]) {
  vi sum[R][kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < lanes; i++) {
    __builtin_prefetch(p + kAhead + i * kStep);
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; v++) {
      const vi raw = load_i32(p + i * kStep + v * 32);
      const vi low = low_nibbles(raw), high = high_nibbles(raw);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const char* from = x + r * stride + i * 8;
        const vi b = set1_i32(load_32(from));
        if (i == 0) {
          sum[r][v] = first_dot4(low, b);
        } else {
          dot4(sum[r][v], low, b);
        }
        dot4(sum[r][v], high, set1_i32(load_32(from + 4)));
      }
    }
  }
  const vi ones = load_ones();
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    acc[r][0] = widen_add(acc[r][0], sum[r][0], ones);
    acc[r][1] = widen_add(acc[r][1], sum[r][1], ones);
  }
}

// The same from packed lanes, for rows so few that weights are not prepared first.
template <int F, int R>
static inline __attribute__((always_inline)) void multiply_packed(const uint8_t* p, const char* x,
                                                                  int64_t stride, int64_t lanes,
                                                                  vi (&acc)[R][kVectors]) {
  if (F == kI4) {
    for (; lanes >= 4; lanes -= 4, p += 4 * kStep, x += 32)
      multiply_packed_run<R>(p, x, stride, 4, acc);
    for (; lanes > 0; lanes--, p += kStep, x += 8) multiply_packed_run<R>(p, x, stride, 1, acc);
    return;
  }
  for (int64_t i = 0; i < lanes; i++, p += kStep, x += 8) {
    __builtin_prefetch(p + kAhead);
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; v++) {
      const vi raw = load_i32(p + v * 32);
      const vi even = even_i16(raw), odd = odd_i16(raw);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        dot2(acc[r][v], even, set1_i32(load_32(x + r * stride)));
        dot2(acc[r][v], odd, set1_i32(load_32(x + r * stride + 4)));
      }
    }
  }
}

#else

template <bool kWide>
constexpr int kDirectRows = 0;
template <bool kWide>
constexpr bool kStreams = false;
template <int F>
constexpr int kTileRows = 2;
template <int F>
constexpr int kXBytes = 2;
template <int F>
constexpr int kBase = F == kI8 ? 0 : 8;
typedef uint32_t vu __attribute__((vector_size(32)));

static inline vi set1_i32(int32_t a) { return vi{} + a; }
static inline vi load_i32(const void* p) {
  vi a;
  __builtin_memcpy(&a, p, sizeof a);
  return a;
}
static inline void store_i32(void* p, vi a) { __builtin_memcpy(p, &a, sizeof a); }
static inline vi add_i32(vi a, vi b) { return a + b; }
static inline vi mul_i32(vi a, vi b) { return a * b; }
static inline vi times_256(vi a) { return a * 256; }
static inline vi low_i16(vi a) { return (vi)((vu)a << 16) >> 16; }

static inline vi sum_inputs(vi sum, const int8_t* x) {  // of 32 inputs, in lanes
  for (int i = 0; i < 32; i++) sum[i % W] += x[i];
  return sum;
}

template <int F>
static inline void prepare_vector(const int8_t* x, void* out) {
  int16_t pairs[32];
  for (int i = 0; i < 32; i++) pairs[i / 4 * 4 + i % 2 * 2 + i % 4 / 2] = x[i];
  __builtin_memcpy(out, pairs, sizeof pairs);
}

template <int F>
static void prepare_weights(const uint8_t* p, int64_t lanes, uint8_t* out) {
  for (int64_t i = 0; i < lanes; i++, p += kStep) {
    for (int half = 0; half < (F == kI4 ? 2 : 1); half++, out += 2 * kStep) {
      for (int n = 0; n < kPanel * 4; n++) {
        const int16_t q = F == kI8 ? (int8_t)p[n] : half ? p[n] >> 4 : p[n] & 15;
        __builtin_memcpy(out + n % 2 * kStep + n / 4 * 4 + n % 4 / 2 * 2, &q, 2);
      }
    }
  }
}

template <int F, int R>
static inline void multiply(const uint8_t* w, const char* x, int64_t stride, int64_t steps,
                            vi (&acc)[R][kVectors]) {
  for (int64_t i = 0; i < steps; i++, w += kStep) {
    for (int v = 0; v < kVectors; v++) {
      const vi pairs = load_i32(w + v * 32);
      for (int r = 0; r < R; r++) {
        const vi b = set1_i32(load_32(x + r * stride + i * 4));
        acc[r][v] += low_i16(pairs) * low_i16(b) + (pairs >> 16) * (b >> 16);
      }
    }
  }
}

template <int F, int R>
static inline void multiply_packed(const uint8_t*, const char*, int64_t, int64_t,
                                   vi (&)[R][kVectors]) {}

#endif
