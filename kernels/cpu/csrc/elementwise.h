// Row-wise ops: norm, activation, rotary embedding, quantization.

static void quantize(const QuantizeArgs&, const Team&) { __builtin_trap(); }
static void rms_norm(const float*, const float*, float, float*, int64_t, int64_t, int64_t, int64_t, const Team&) { __builtin_trap(); }
static void silu_mul(const float*, const float*, float*, int64_t, int64_t, int64_t, int64_t, const Team&) { __builtin_trap(); }
static void rope(const float*, const float*, const float*, float*, int64_t, int64_t, int64_t, int64_t, int64_t, const Team&) { __builtin_trap(); }
