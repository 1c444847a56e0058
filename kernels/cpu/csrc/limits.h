// What the machine can do at most, measured with the instructions that the kernels use: the floor
// under every timing of `ptq bench --kernels`.

// Reads a buffer once; gives something that depends on all of it.
static int64_t read_all(const void* data, int64_t bytes, const Team& team) {
  const Range range = share(bytes / 256, team);
  const char* p = (const char*)data;
  int64_t sum = 0;
#if defined(PTQ_ISA_AVX512)
  __m512i a = _mm512_setzero_si512(), b = a;
  for (int64_t i = range.begin; i < range.end; i++) {
    const char* q = p + i * 256;
    __builtin_prefetch(q + 4096);
    __builtin_prefetch(q + 4096 + 128);
    a = _mm512_add_epi64(a, _mm512_loadu_si512(q));
    b = _mm512_add_epi64(b, _mm512_loadu_si512(q + 64));
    a = _mm512_add_epi64(a, _mm512_loadu_si512(q + 128));
    b = _mm512_add_epi64(b, _mm512_loadu_si512(q + 192));
  }
  sum = _mm512_reduce_add_epi64(_mm512_add_epi64(a, b));
#elif defined(PTQ_ISA_AVX2)
  __m256i a = _mm256_setzero_si256(), b = a;
  for (int64_t i = range.begin; i < range.end; i++) {
    const __m256i* q = (const __m256i*)(p + i * 256);
    for (int j = 0; j < 8; j += 2) {
      a = _mm256_add_epi64(a, _mm256_loadu_si256(q + j));
      b = _mm256_add_epi64(b, _mm256_loadu_si256(q + j + 1));
    }
  }
  int64_t lanes[4];
  _mm256_storeu_si256((__m256i*)lanes, _mm256_add_epi64(a, b));
  sum = lanes[0] + lanes[1] + lanes[2] + lanes[3];
#else
  for (int64_t i = range.begin * 32; i < range.end * 32; i++) {
    int64_t v;
    __builtin_memcpy(&v, p + i * 8, 8);
    sum = (int64_t)((uint64_t)sum + (uint64_t)v);
  }
#endif
  return sum;
}

// Multiplies and adds in registers; gives the operations done (2 a multiply-add) by this thread.
// kF32: fused multiply-add; kI8, kI4: the instructions of the integer products.
template <int32_t kFormat>
static double chains(int64_t rounds) {
  constexpr int kChains = 10;  // enough to hide the latency
#if defined(PTQ_ISA_AVX512)
  const vf x = set1(1.0f);
  vf a[kChains];
#pragma GCC unroll 10
  for (int j = 0; j < kChains; j++) a[j] = x;
  for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 10
    for (int j = 0; j < kChains; j++) {
      if (kFormat == kF32) {
        asm volatile("vfmadd231ps %1, %1, %0" : "+v"(a[j]) : "v"(x));
      } else {
        asm volatile("vpdpbusd %1, %1, %0" : "+v"(a[j]) : "v"(x));
      }
    }
  }
  return (double)rounds * kChains * (kFormat == kF32 ? 32 : 128);
#elif defined(PTQ_ISA_AVX2)
  const vf x = set1(1.0f);
  vf a[kChains], t;
#pragma GCC unroll 10
  for (int j = 0; j < kChains; j++) a[j] = x;
  for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 10
    for (int j = 0; j < kChains; j++) {
      if (kFormat == kF32) {
        asm volatile("vfmadd231ps %1, %1, %0" : "+x"(a[j]) : "x"(x));
      } else if (kFormat == kI8) {  // pairs of int16
        asm volatile("vpmaddwd %2, %2, %1\n vpaddd %1, %0, %0" : "+x"(a[j]), "=&x"(t) : "x"(x));
      } else {  // pairs of uint4 and int8
        asm volatile("vpmaddubsw %2, %2, %1\n vpaddw %1, %0, %0" : "+x"(a[j]), "=&x"(t) : "x"(x));
      }
    }
  }
  return (double)rounds * kChains * (kFormat == kF32 ? 16 : kFormat == kI8 ? 32 : 64);
#else
  volatile float one = 1.0f;
  const vf x = set1(one);
  vf a[kChains];
  for (int j = 0; j < kChains; j++) a[j] = x;
  for (int64_t i = 0; i < rounds; i++)
    for (int j = 0; j < kChains; j++) a[j] = fma(x, x, a[j]);
  for (int j = 0; j < kChains; j++) one = one + a[j][0];
  return (double)rounds * kChains * 2 * W;
#endif
}

static double multiply_add(int32_t format, int64_t rounds) {
  if (format == kI8) return chains<kI8>(rounds);
  return format == kI4 ? chains<kI4>(rounds) : chains<kF32>(rounds);
}
