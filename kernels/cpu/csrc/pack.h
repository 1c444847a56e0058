// Packing: from the checkpoint's row-major weights to panels. api.h describes the layout.

#if defined(PTQ_ISA_AVX512)
constexpr int kPanel = 64;
#else
constexpr int kPanel = 16;
#endif

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Inputs of one lane's 32 bits.
static inline int64_t lane_inputs(int32_t format) {
  return format == kF32 ? 1 : format == kBF16 || format == kF16 ? 2 : format == kI4 ? 8 : 4;
}

static inline int64_t group_bytes_of(const Source& s, int64_t inputs) {
  int64_t values = ceil_div(inputs, lane_inputs(s.format)) * kPanel * 4;
  int64_t scales = kPanel * scale_bytes(s.scale_type);
  int64_t zeros = lead_of(s.zero_type, kPanel) + (s.zero_type == kZeroI8 ? kPanel : 0);
  return round_up(values + scales + zeros, kAlign);
}

static inline int64_t groups_of(int64_t inputs, int64_t group) { return ceil_div(inputs, group); }

static int64_t panel_bytes_of(const Source& s) {
  int64_t whole = groups_of(s.inputs, s.group) - 1;
  return whole * group_bytes_of(s, s.group) + group_bytes_of(s, s.inputs - whole * s.group);
}

static Packed header_of(const Source& s) {
  Packed h = {};
  h.magic = kMagic;
  h.isa = PTQ_ISA;
  h.format = s.format;
  h.outputs = s.outputs;
  h.inputs = s.inputs;
  h.group = s.group;
  h.scale_type = s.scale_type;
  h.zero_type = s.zero_type;
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

// Scales i to i + W of a group's.
static inline vf load_scales(const Packed& w, const uint8_t* scales, int64_t i) {
  if (w.scale_type == kScaleF32) return load((const float*)scales + i);
  const uint16_t* halves = (const uint16_t*)scales + i;
  return w.scale_type == kScaleF16 ? load_f16(halves) : load_bf16(halves);
}

static int64_t pack_bytes(const Source& s) { return header_of(s).bytes; }

// The 32 bits of a lane, of up to 4 bytes of a row, or of 8 whose nibbles are kept (kI4); zeros make
// up for what is missing.
template <bool kNibbles>
static inline uint32_t pack_lane(const uint8_t* q, int64_t bytes) {
  uint64_t raw = 0;
  __builtin_memcpy(&raw, q, bytes);
  if (!kNibbles) return (uint32_t)raw;
  raw &= 0x0f0f0f0f0f0f0f0f;  // q + 8 is q's low nibble with the other sign
  return ((uint32_t)raw | (uint32_t)(raw >> 32) << 4) ^ 0x88888888;
}

template <bool kNibbles>
static void pack_group(const Source& s, int64_t panel, int64_t group, int64_t inputs,
                       uint8_t* out) {
  constexpr int64_t lane_bytes = kNibbles ? 8 : 4;  // of a row
  const int64_t size = lane_bytes / lane_inputs(s.format), bytes = inputs * size;
  const int64_t groups = groups_of(s.inputs, s.group), lanes = ceil_div(bytes, lane_bytes);
  float* zero_f32 = (float*)out;
  out += lead_of(s.zero_type, kPanel);
  float* scale_f32 = (float*)(out + lanes * kPanel * 4);
  uint16_t* scale_half = (uint16_t*)scale_f32;
  int8_t* zero_i8 = (int8_t*)scale_f32 + kPanel * scale_bytes(s.scale_type);
  const int64_t left = s.outputs - panel * kPanel, rows = left < kPanel ? left : kPanel;
  // 16 lanes at a time: rows lie far apart, and their lines of the cache are read whole.
  for (int64_t from = 0; from < lanes; from += 16) {
    const int64_t to = from + 16 < lanes ? from + 16 : lanes;
    for (int64_t row = 0; row < rows; row++) {
      const int64_t at = (panel * kPanel + row) * s.inputs + group * s.group;
      const uint8_t* q = (const uint8_t*)s.q + at * size;
      for (int64_t i = from; i < to; i++) {
        const int64_t begin = i * lane_bytes, rest = bytes - begin;
        const uint32_t lane = rest < lane_bytes ? pack_lane<kNibbles>(q + begin, rest)
                                                : pack_lane<kNibbles>(q + begin, lane_bytes);
        __builtin_memcpy(out + (i * kPanel + row) * 4, &lane, 4);
      }
    }
  }
  for (int64_t row = 0; row < rows; row++) {
    const int64_t at = (panel * kPanel + row) * groups + group;
    if (s.scale_type == kScaleF32) scale_f32[row] = ((const float*)s.scale)[at];
    if (s.scale_type == kScaleBF16) scale_half[row] = f32_to_bf16(((const float*)s.scale)[at]);
    if (s.scale_type == kScaleF16) scale_half[row] = ((const uint16_t*)s.scale)[at];
    if (s.zero_type == kZeroI8) zero_i8[row] = ((const int8_t*)s.zero)[at];
    if (s.zero_type == kZeroF32) zero_f32[row] = ((const float*)s.zero)[at];
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
    for (int64_t group = 0; group < groups_of(s.inputs, s.group); group++) {
      const int64_t rest = s.inputs - group * s.group, inputs = rest < s.group ? rest : s.group;
      uint8_t* at = to + group * h.group_bytes;
      if (s.format == kI4) {
        pack_group<true>(s, panel, group, inputs, at);
      } else {
        pack_group<false>(s, panel, group, inputs, at);
      }
    }
  }
}
