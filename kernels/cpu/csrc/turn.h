// Heads turned by a Hadamard matrix: a fast Walsh-Hadamard transform of every run of `size`
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
