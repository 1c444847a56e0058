// Row-wise ops: quantization, norm, activation, rotary embedding. What is left of a row after whole
// vectors goes through the same vector code, so that a value does not depend on where it is.
//
// Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) are among them: y += B (A x) of rows that have
// the same one, in fp32. Four ranks and two rows are taken at a time, so that what is read of A and B,
// one run of memory each, counts twice; a row's sums are its own, in one order.

constexpr int64_t kColumns = 1024;  // of a row that one thread takes at a time; whole vectors
constexpr float kTinyScale = 0x1p-60f;

// Largest magnitude of n values, NaN if there is one: as integers, the bits of NaN are the largest.
static float absmax(const float* x, int64_t n) {
  bits top[4] = {};
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int j = 0; j < 4; j++) {
      const bits a = (bits)abs(load(x + i + j * W));
      top[j] = a > top[j] ? a : top[j];
    }
  for (; i < n; i += W) {
    const bits a = (bits)abs(load_part(x + i, n - i));
    top[0] = a > top[0] ? a : top[0];
  }
  for (int j = 1; j < 4; j++) top[0] = top[j] > top[0] ? top[j] : top[0];
  uint32_t largest = 0;
  for (int j = 0; j < W; j++) largest = top[0][j] > largest ? top[0][j] : largest;
  float result;
  __builtin_memcpy(&result, &largest, 4);
  return result;
}

static inline float top_of(int32_t format) { return format == kI8 ? 127.0f : 448.0f; }

// Symmetric scale, tiny for zeros; NaN and infinity stay.
static inline float scale_of(float absmax, int32_t format) {
  const float scale = absmax / top_of(format);
  return scale < kTinyScale ? kTinyScale : scale;
}

// Integers in [-127, 127]; 0 for NaN.
static inline vf quantized_i8(vf x, vf scale) {
  const vf q = number_or_zero(round(div(x, scale)));
  return min(max(q, set1(-127.0f)), set1(127.0f));
}

// e4m3, rounded half to even. A magnitude with the exponent e (-6 at least) is rounded to a
// multiple of 2^(e - 3) by adding 2^(e + 20), where fp32 has just that step.
struct Float8 {
  vf clamped, sum;
  bits exponent, bias;  // bits of 2^e; bits of 2^(e + 20)
  explicit Float8(vf x) {
    clamped = min(set1(448.0f), max(set1(-448.0f), x));  // NaN stays
    const bits low = all_bits(0x3c800000), high = all_bits(0x43800000);  // 2^-6, 2^8
    exponent = (bits)clamped & 0x7f800000;
    exponent = exponent > low ? exponent : low;
    exponent = exponent < high ? exponent : high;
    bias = exponent + (20u << 23);
    sum = add(abs(clamped), (vf)bias);
  }
  vf value() const { return (vf)((bits)sub(sum, (vf)bias) | ((bits)clamped & 0x80000000)); }
  // The byte as an integer in [-128, 127]. The sum's last bits count the steps, 16 at most.
  vf code() const {
    bits code = ((exponent - 0x3c800000) >> 20) + ((bits)sum - bias);
    code = code - (((bits)clamped >> 31) << 7);
    const bits number = (bits)(clamped == clamped);
    return from_int((vi)((code & number) | (~number & 127)));
  }
};

// One run of values that share a scale; begin: its place in q and values.
static void quantize_run(const QuantizeArgs& a, const float* x, float scale, int64_t begin,
                         int64_t count) {
  const vf s = set1(scale);
  for (int64_t i = 0; i < count; i += W) {
    const vf v = load_part(x + i, count - i);
    if (a.format == kI8) {
      store_i8_part(a.q + begin + i, quantized_i8(v, s), count - i);
    } else {
      store_part(a.values + begin + i, mul(Float8(div(v, s)).value(), s), count - i);
    }
  }
}

static void quantize(const QuantizeArgs& a, const Team& team) {
  const int64_t width = a.scale != nullptr ? kColumns : a.group;
  const int64_t pieces = ceil_div(a.columns, width);
  const Range items = share(a.rows * pieces, team);
  for (int64_t item = items.begin; item < items.end; item++) {
    const int64_t row = item / pieces, column = item % pieces * width;
    const int64_t rest = a.columns - column, count = rest < width ? rest : width;
    const float* x = a.x + row * a.x_stride + column;
    float scale;
    if (a.scale != nullptr) {
      scale = *a.scale;
    } else {
      scale = scale_of(absmax(x, count), a.format);
      if (a.scales != nullptr) a.scales[item] = scale;
      if (a.problem != nullptr && !__builtin_isfinite(scale))
        __atomic_fetch_or(a.problem, (int32_t)kNonfinite, __ATOMIC_RELAXED);
    }
    quantize_run(a, x, scale, row * a.columns + column, count);
  }
}

// Squares are summed in 4 vectors, each in its order.
static void rms_norm(const float* x, const float* weight, float eps, float* y, int64_t rows,
                     int64_t columns, int64_t x_stride, int64_t y_stride, const Team& team) {
  const Range items = share(rows, team);
  for (int64_t row = items.begin; row < items.end; row++) {
    const float* from = x + row * x_stride;
    float* to = y + row * y_stride;
    vf sum[4] = {zero(), zero(), zero(), zero()};
    int64_t i = 0;
    for (; i + 4 * W <= columns; i += 4 * W)
      for (int j = 0; j < 4; j++) {
        const vf v = load(from + i + j * W);
        sum[j] = fma(v, v, sum[j]);
      }
    for (; i < columns; i += W) {
      const vf v = load_part(from + i, columns - i);
      sum[0] = fma(v, v, sum[0]);
    }
    const float total = reduce_add(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
    const vf inverse = set1(1.0f / __builtin_sqrtf(total / (float)columns + eps));
    for (i = 0; i < columns; i += W) {
      const vf v = mul(load_part(from + i, columns - i), inverse);
      store_part(to + i, mul(load_part(weight + i, columns - i), v), columns - i);
    }
  }
}

// x sigmoid(x), with e^-|x| so that nothing overflows.
static inline vf silu(vf x) {
  const vf e = exp(sub(zero(), abs(x))), one = set1(1.0f);
  const vf top = (vf)(x < zero() ? (bits)e : (bits)one);
  return mul(x, div(top, add(one, e)));
}

// x sigmoid(2 u), which is x (1 + tanh u) / 2, with u = sqrt(2 / pi) (x + 0.044715 x^3).
static inline vf gelu_tanh(vf x) {
  const vf cube = mul(mul(x, x), mul(x, set1(0.044715f))), one = set1(1.0f);
  const vf twice = mul(set1(1.59576912f), add(x, cube));
  const vf e = exp(sub(zero(), abs(twice)));
  return mul(x, div(choose((bits)(twice < zero()), e, one), add(one, e)));
}

// x Phi(x), with Phi(-|x|) = erfc(|x| / sqrt 2) / 2.
static inline vf gelu(vf x) {
  const vf tail = mul(set1(0.5f), erfc(mul(abs(x), set1(0.707106781f))));
  return mul(x, choose((bits)(x < zero()), tail, sub(set1(1.0f), tail)));
}

template <Activation kind>
static void gated_rows(const float* gate, const float* up, float* y, int64_t rows, int64_t columns,
                       int64_t in_stride, int64_t y_stride, const Team& team) {
  const int64_t pieces = ceil_div(columns, kColumns);
  const Range items = share(rows * pieces, team);
  for (int64_t item = items.begin; item < items.end; item++) {
    const int64_t row = item / pieces, begin = item % pieces * kColumns;
    const int64_t end = begin + kColumns < columns ? begin + kColumns : columns;
    for (int64_t i = begin; i < end; i += W) {
      const vf g = load_part(gate + row * in_stride + i, end - i);
      const vf u = load_part(up + row * in_stride + i, end - i);
      const vf a = kind == kSilu ? silu(g) : kind == kGeluTanh ? gelu_tanh(g) : gelu(g);
      store_part(y + row * y_stride + i, mul(a, u), end - i);
    }
  }
}

static void gated_product(const float* gate, const float* up, float* y, int64_t rows,
                          int64_t columns, int64_t in_stride, int64_t y_stride,
                          Activation activation, const Team& team) {
  const auto run = activation == kSilu       ? gated_rows<kSilu>
                   : activation == kGeluTanh ? gated_rows<kGeluTanh>
                                             : gated_rows<kGelu>;
  run(gate, up, y, rows, columns, in_stride, y_stride, team);
}

static inline vf softcapped(vf x, float bound) {
  return mul(tanh(div(x, set1(bound))), set1(bound));
}

// Each thread takes whole vectors, so that what is left of all goes through the same code.
static void softcap(const float* x, float bound, float* y, int64_t count, const Team& team) {
  const Range vectors = share(ceil_div(count, W), team);
  for (int64_t i = vectors.begin * W; i < vectors.end * W; i += W)
    store_part(y + i, softcapped(load_part(x + i, count - i), bound), count - i);
}

// (x_i, x_{i + dim / 2}) rotated by the angle of the row; y may be x.
static void rope(const float* x, const float* cos, const float* sin, float* y, int64_t rows,
                 int64_t heads, int64_t dim, int64_t x_stride, int64_t y_stride,
                 const Team& team) {
  const int64_t half = dim / 2;
  const Range items = share(rows * heads, team);
  for (int64_t item = items.begin; item < items.end; item++) {
    const int64_t row = item / heads, head = item % heads;
    const float* from = x + row * x_stride + head * dim;
    float* to = y + row * y_stride + head * dim;
    const float *c = cos + row * dim, *s = sin + row * dim;
    for (int64_t i = 0; i < half; i += W) {
      const int64_t n = half - i, j = half + i;
      const vf a = load_part(from + i, n), b = load_part(from + j, n);
      const vf first = sub(mul(a, load_part(c + i, n)), mul(b, load_part(s + i, n)));
      const vf second = add(mul(b, load_part(c + j, n)), mul(a, load_part(s + j, n)));
      store_part(to + i, first, n);
      store_part(to + j, second, n);
    }
  }
}

static inline vf load_any(const float* p) { return load(p); }
static inline vf load_any(const uint16_t* p) { return load_bf16(p); }

// u = A x of four ranks and N rows.
template <int N, class T>
static inline void lora_down(const T* a, const float* const* x, int64_t inputs,
                             float (*u)[kLoraRanks]) {
  vf sum[N][kLoraRanks] = {};
  for (int64_t i = 0; i < inputs; i += kLoraRun, a += kLoraRanks * kLoraRun)
    for (int64_t j = 0; j < kLoraRun && i + j < inputs; j += W) {
      vf v[N];
      for (int n = 0; n < N; n++) v[n] = load_part(x[n] + i + j, inputs - i - j);
      for (int r = 0; r < kLoraRanks; r++) {
        const vf run = load_any(a + r * kLoraRun + j);
        for (int n = 0; n < N; n++) sum[n][r] = fma(run, v[n], sum[n][r]);
      }
    }
  for (int n = 0; n < N; n++)
    for (int r = 0; r < kLoraRanks; r++) u[n][r] = reduce_add(sum[n][r]);
}

// y += B u of four ranks and N rows.
template <int N, class T>
static inline void lora_up(const T* b, const float (*u)[kLoraRanks], int64_t outputs,
                           int64_t first, float* const* y) {
  for (int64_t i = 0; i < outputs; i += kLoraRun, b += kLoraRanks * kLoraRun)
    for (int64_t j = 0; j < kLoraRun && i + j < outputs; j += W) {
      const int64_t at = first + i + j, rest = outputs - i - j;
      vf sum[N];
      for (int n = 0; n < N; n++) sum[n] = load_part(y[n] + at, rest);
      for (int r = 0; r < kLoraRanks; r++) {
        const vf run = load_any(b + r * kLoraRun + j);
        for (int n = 0; n < N; n++) sum[n] = fma(run, set1(u[n][r]), sum[n]);
      }
      for (int n = 0; n < N; n++) store_part(y[n] + at, sum[n], rest);
    }
}

template <int N, class T>
static inline void lora_ranks(const T* a, const T* b, const LoraPart& part, int64_t inputs,
                              const float* const* x, float* const* y) {
  float u[N][kLoraRanks];
  lora_down<N>(a, x, inputs, u);
  lora_up<N>(b, u, part.outputs, part.first, y);
}

template <class T>
static void lora_part(const LoraPart& part, int64_t inputs, const float* const* x, float* const* y,
                      int rows) {
  const T *a = (const T*)part.a, *b = (const T*)part.b;
  for (int64_t rank = 0; rank < part.rank; rank += kLoraRanks) {
    int n = 0;
    for (; n + 2 <= rows; n += 2) lora_ranks<2>(a, b, part, inputs, x + n, y + n);
    if (n < rows) lora_ranks<1>(a, b, part, inputs, x + n, y + n);
    a += ceil_div(inputs, kLoraRun) * kLoraRanks * kLoraRun;
    b += ceil_div(part.outputs, kLoraRun) * kLoraRanks * kLoraRun;
  }
}

static void lora(const Lora& own, const float* const* x, float* const* y, int rows) {
  for (int64_t p = 0; p < own.count; p++) {
    const LoraPart& part = own.parts[p];
    if (part.format == kBF16) {
      lora_part<uint16_t>(part, own.inputs, x, y, rows);
    } else {
      lora_part<float>(part, own.inputs, x, y, rows);
    }
  }
}
