// Packing: from the checkpoint's row-major integers to panels. The layout is told in api.h.

#if defined(PTQ_ISA_AVX512)
constexpr int kPanel = 64;
#else
constexpr int kPanel = 16;
#endif

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Inputs of one lane's 32 bits.
static inline int64_t lane_inputs(int32_t format) {
  return format == kF32 ? 1 : format == kBF16 ? 2 : format == kI4 ? 8 : 4;
}

static inline int64_t group_bytes_of(const Source& s, int64_t inputs) {
  int64_t values = ceil_div(inputs, lane_inputs(s.format)) * kPanel * 4;
  int64_t scales = kPanel * (s.scale_type == kScaleF32 ? 4 : s.scale_type == kScaleBF16 ? 2 : 0);
  return round_up(values + scales + (s.zero != nullptr ? kPanel : 0), kAlign);
}

static inline int64_t groups_of(int64_t inputs, int64_t group) { return ceil_div(inputs, group); }

static int64_t panel_bytes_of(const Source& s) {
  int64_t whole = groups_of(s.inputs, s.group) - 1;
  return whole * group_bytes_of(s, s.group) + group_bytes_of(s, s.inputs - whole * s.group);
}

static void pack_float_panel(const Source& s, int64_t panel, uint8_t* out);  // gemm_float.h

static bool is_int(int32_t format) { return format == kI8 || format == kI4; }

static Packed header_of(const Source& s) {
  Packed h = {};
  h.magic = kMagic;
  h.isa = PTQ_ISA;
  h.format = s.format;
  h.outputs = s.outputs;
  h.inputs = s.inputs;
  h.group = s.group;
  h.scale_type = s.scale_type;
  h.has_zero = s.zero != nullptr;
  h.has_bias = s.bias != nullptr;
  h.panel = kPanel;
  h.panel_bytes = panel_bytes_of(s);
  h.group_bytes = group_bytes_of(s, s.group < s.inputs ? s.group : s.inputs);
  int64_t panels = ceil_div(s.outputs, kPanel);
  h.data_offset = round_up(sizeof(Packed), kAlign);
  h.bias_offset = h.data_offset + panels * h.panel_bytes;
  h.bytes = h.bias_offset + (s.bias != nullptr ? round_up(panels * kPanel * 4, kAlign) : 0);
  return h;
}

static int64_t pack_bytes(const Source& s) { return header_of(s).bytes; }

static void pack_int_group(const Source& s, int64_t panel, int64_t group, int64_t inputs,
                           uint8_t* out) {
  const int8_t* q = (const int8_t*)s.q;
  const int64_t groups = groups_of(s.inputs, s.group), step = lane_inputs(s.format);
  const int64_t quads = ceil_div(inputs, step);
  float* scale_f32 = (float*)(out + quads * kPanel * 4);
  uint16_t* scale_bf16 = (uint16_t*)scale_f32;
  int8_t* zero = (int8_t*)scale_f32 + kPanel * (s.scale_type == kScaleF32 ? 4 : 2);
  for (int64_t lane = 0; lane < kPanel; lane++) {
    const int64_t row = panel * kPanel + lane;
    if (row >= s.outputs) continue;  // zeros
    const int8_t* from = q + row * s.inputs + group * s.group;
    for (int64_t i = 0; i < quads * step; i++) {
      uint8_t* to = out + (i / step * kPanel + lane) * 4 + i % 4;
      if (s.format == kI8) {
        *to = i < inputs ? (uint8_t)from[i] : 0;
      } else {
        const uint8_t nibble = (uint8_t)((i < inputs ? from[i] : 0) + 8);
        *to |= i % 8 < 4 ? nibble : (uint8_t)(nibble << 4);
      }
    }
    const float scale = s.scale[row * groups + group];
    if (s.scale_type == kScaleF32) scale_f32[lane] = scale;
    if (s.scale_type == kScaleBF16) scale_bf16[lane] = f32_to_bf16(scale);
    if (s.zero != nullptr) zero[lane] = s.zero[row * groups + group];
  }
}

static void pack(const Source& s, void* out, const Team& team) {
  const Packed h = header_of(s);
  uint8_t* base = (uint8_t*)out;
  if (team.id == 0) {
    __builtin_memcpy(out, &h, sizeof h);
    if (s.bias != nullptr) {
      float* bias = (float*)(base + h.bias_offset);
      for (int64_t i = 0; i < (h.bytes - h.bias_offset) / 4; i++)
        bias[i] = i < s.outputs ? s.bias[i] : 0.0f;
    }
  }
  const Range panels = share(ceil_div(s.outputs, kPanel), team);
  for (int64_t panel = panels.begin; panel < panels.end; panel++) {
    uint8_t* to = base + h.data_offset + panel * h.panel_bytes;
    __builtin_memset(to, 0, h.panel_bytes);
    if (!is_int(s.format)) {
      pack_float_panel(s, panel, to);
      continue;
    }
    for (int64_t group = 0; group < groups_of(s.inputs, s.group); group++) {
      const int64_t rest = s.inputs - group * s.group;
      pack_int_group(s, panel, group, rest < s.group ? rest : s.group, to + group * h.group_bytes);
    }
  }
}
