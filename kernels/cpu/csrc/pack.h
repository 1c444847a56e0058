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

// The 32 bits of a lane that hold `count` inputs; zeros make up for what is missing.
static inline uint32_t pack_lane(int32_t format, const int8_t* q, int64_t count) {
  if (format == kI8) {
    uint32_t bytes = 0;
    __builtin_memcpy(&bytes, q, count < 4 ? count : 4);
    return bytes;
  }
  uint8_t nibbles[8] = {}, bytes[4];  // q + 8 is q's low nibble with the other sign
  __builtin_memcpy(nibbles, q, count < 8 ? count : 8);
  for (int i = 0; i < 4; i++)
    bytes[i] = (uint8_t)(((nibbles[i] & 15) | (nibbles[4 + i] << 4)) ^ 0x88);
  uint32_t lane;
  __builtin_memcpy(&lane, bytes, 4);
  return lane;
}

static void pack_int_group(const Source& s, int64_t panel, int64_t group, int64_t inputs,
                           uint8_t* out) {
  const int64_t groups = groups_of(s.inputs, s.group), step = lane_inputs(s.format);
  const int64_t lanes = ceil_div(inputs, step);
  float* scale_f32 = (float*)(out + lanes * kPanel * 4);
  uint16_t* scale_bf16 = (uint16_t*)scale_f32;
  int8_t* zero = (int8_t*)scale_f32 + kPanel * (s.scale_type == kScaleF32 ? 4 : 2);
  const int64_t left = s.outputs - panel * kPanel, rows = left < kPanel ? left : kPanel;
  // 16 lanes at a time: rows lie far apart, and their lines of the cache are read whole.
  for (int64_t from = 0; from < lanes; from += 16) {
    const int64_t to = from + 16 < lanes ? from + 16 : lanes;
    for (int64_t row = 0; row < rows; row++) {
      const int64_t at = (panel * kPanel + row) * s.inputs + group * s.group;
      const int8_t* q = (const int8_t*)s.q + at;
      for (int64_t i = from; i < to; i++) {
        const uint32_t lane = inputs - i * step >= step
                                  ? pack_lane(s.format, q + i * step, step)
                                  : pack_lane(s.format, q + i * step, inputs - i * step);
        __builtin_memcpy(out + (i * kPanel + row) * 4, &lane, 4);
      }
    }
  }
  for (int64_t row = 0; row < rows; row++) {
    const int64_t at = (panel * kPanel + row) * groups + group;
    if (s.scale_type == kScaleF32) scale_f32[row] = s.scale[at];
    if (s.scale_type == kScaleBF16) scale_bf16[row] = f32_to_bf16(s.scale[at]);
    if (s.zero != nullptr) zero[row] = s.zero[at];
  }
}

// A panel of floats.
static void pack_float_panel(const Source& s, int64_t panel, uint8_t* out) {
  const int64_t inputs = lane_inputs(s.format), size = 4 / inputs;
  const int64_t groups = groups_of(s.inputs, s.group), group_bytes = group_bytes_of(s, s.group);
  for (int64_t lane = 0; lane < kPanel && panel * kPanel + lane < s.outputs; lane++) {
    const int64_t row = panel * kPanel + lane;
    for (int64_t g = 0; g < groups; g++) {
      const int64_t rest = s.inputs - g * s.group, count = rest < s.group ? rest : s.group;
      const uint8_t* from = (const uint8_t*)s.q + (row * s.inputs + g * s.group) * size;
      uint8_t* to = out + g * group_bytes + lane * 4;
      for (int64_t byte = 0; byte < count * size; byte += 4, to += kPanel * 4)
        __builtin_memcpy(to, from + byte, count * size - byte < 4 ? count * size - byte : 4);
      to -= lane * 4;  // the scales
      if (s.scale_type == kScaleF32) ((float*)to)[lane] = s.scale[row * groups + g];
      if (s.scale_type == kScaleBF16)
        ((uint16_t*)to)[lane] = f32_to_bf16(s.scale[row * groups + g]);
    }
  }
}

static void pack(const Source& s, void* out, const Team& team) {
  const Packed h = header_of(s);
  uint8_t* base = (uint8_t*)out;
  if (team.id == 0) {
    __builtin_memset(out, 0, h.data_offset);
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
