// Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): y += B (A x) of rows that have the same one, in
// fp32. Four ranks and two rows are taken at a time, so that what is read of A and B, one run of memory
// each, counts twice; a row's sums are its own, in one order.

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
