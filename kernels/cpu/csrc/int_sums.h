// Sums of integer products: how packed integers are cut along their inputs, how inputs are prepared,
// and how sums are begun, multiplied by a tile of rows, and added to totals in fp32. What is computed,
// and in which order, says gemm_int.h.

// Rows of the tiles for each of x.
template <int F, bool kWide>
constexpr int kPlanes = kWide && kXBytes<F> == 1 ? 2 : 1;

// Inputs x [count] as the tiles take them, zeros up to `padded`; returns their sum. Whole vectors
// are written: up to 64 bytes beyond.
template <int F>
static int32_t prepare_inputs(const int8_t* x, int64_t count, int64_t padded, char* out) {
  constexpr int64_t width = W * 4;
  vi sums = set1_i32(0);
  for (int64_t i = 0; i < padded; i += width) {
    int8_t rest[width] = {};
    const int8_t* from = x + i;
    if (count - i < width) {
      if (count > i) __builtin_memcpy(rest, from, count - i);
      from = rest;
    }
    sums = sum_inputs(sums, from);
    prepare_vector<F>(from, out + i * kXBytes<F>);
  }
  int32_t lanes[W], sum = 0;
  store_i32(lanes, sums);
  for (int i = 0; i < W; i++) sum += lanes[i];
  return sum;
}

// The power of two that inputs whose absmax is this are multiples of, up to 32514 times: so that
// no high half is beyond 127.
static inline float unit_of(float absmax) {
  const float most = absmax * (129.0f / 128);
  uint32_t u;
  __builtin_memcpy(&u, &most, 4);
  int32_t exponent = (int32_t)(u >> 23 & 255) - 14;
  if (exponent < 27) exponent = 27;  // 2^-100, of what is next to nothing
  u = (uint32_t)exponent << 23;
  float unit;
  __builtin_memcpy(&unit, &u, 4);
  return unit;
}

// Inputs x [count] as int16, zeros up to `padded`, as the tiles take them; in two planes, `apart`
// bytes, where they take int8. `scales` gets x_scale and x_sum.
template <int F>
static void widen_inputs(const float* x, int64_t count, int64_t padded, char* out, int64_t apart,
                         float* scales) {
  vf most = zero(), wrong = zero(), sum = zero();
  for (int64_t i = 0; i < count; i += W) {
    const vf v = load_part(x + i, count - i);
    most = max(most, abs(v));
    wrong = add(wrong, sub(v, v));
  }
  const float unit = unit_of(reduce_max(most));
  for (int64_t i = 0; i < padded; i += W) {
    const vf q = round(mul(load_part(x + i, count - i), set1(1.0f / unit)));
    sum = add(sum, q);
    if (kXBytes<F> == 1) {
      const vf high = round(fma(q, set1(1.0f / 256), set1(1.0f / 1024)));  // halves go up
      store_i8((int8_t*)out + i, high);
      store_i8((int8_t*)out + apart + i, fma(high, set1(-256.0f), q));
    } else {
      int32_t whole[W];
      store_i32(whole, to_int(q));
      int16_t* pairs = (int16_t*)out + i;
      for (int j = 0; j < W; j++) pairs[j / 4 * 4 + j % 2 * 2 + j % 4 / 2] = (int16_t)whole[j];
    }
  }
  const float nothing = reduce_add(wrong);  // NaN where an input is not finite
  scales[0] = unit + nothing;
  scales[1] = nothing == 0.0f ? reduce_add(sum) : 0.0f;
}

// Parts of equal length, but for the last.
struct Chunk {
  int64_t group, parts;             // first group; a group a part, or a piece of `group`
  int64_t lane, lanes, last_lanes;  // first lane within the group; lanes of a part, of the last
  bool first, last;                 // parts begin their groups, end them
};

// How a weight is cut.
template <int F>
struct Cut {
  static constexpr int64_t lane = F == kI4 ? 8 : 4;         // inputs
  static constexpr int64_t lane_bytes = lane * kXBytes<F>;  // of prepared inputs
  const Packed& w;
  int64_t groups, group_lanes, max_lanes;
  int64_t per, pieces, chunks;  // groups of a chunk, or chunks of a group; one of them is 1

  Cut(const Packed& weight, int64_t lanes) : w(weight), max_lanes(lanes) {
    groups = groups_of(w.inputs, w.group);
    group_lanes = ceil_div(w.group, lane);
    per = group_lanes <= max_lanes ? max_lanes / group_lanes : 1;
    if (per > groups) per = groups;
    pieces = ceil_div(group_lanes, max_lanes);
    chunks = pieces == 1 ? ceil_div(groups, per)
                         : (groups - 1) * pieces + ceil_div(lanes_of(groups - 1), max_lanes);
  }
  int64_t lanes_of(int64_t group) const {
    return group == groups - 1 ? ceil_div(w.inputs - group * w.group, lane) : group_lanes;
  }
  Chunk at(int64_t index) const {
    Chunk c = {index / pieces * per, 1, index % pieces * max_lanes, 0, 0, true, true};
    if (pieces == 1) {
      c.parts = groups - c.group < per ? groups - c.group : per;
      c.lanes = group_lanes;
      c.last_lanes = lanes_of(c.group + c.parts - 1);
    } else {
      const int64_t left = lanes_of(c.group) - c.lane;
      c.lanes = c.last_lanes = left < max_lanes ? left : max_lanes;
      c.first = c.lane == 0;
      c.last = left <= max_lanes;
    }
    return c;
  }
  int64_t part_lanes(const Chunk& c, int64_t part) const {
    return part == c.parts - 1 ? c.last_lanes : c.lanes;
  }
  int64_t chunk_bytes(const Chunk& c) const {  // of a row of prepared inputs
    return ((c.parts - 1) * c.lanes + c.last_lanes) * lane_bytes;
  }
  const uint8_t* panel(int64_t index) const {  // the lanes of its first group
    return (const uint8_t*)&w + w.data_offset + index * w.panel_bytes + lead_of(w.zero_type, kPanel);
  }
};

// A group's scales, and what its integers are too large by: the zero point and kBase.
template <int F>
static inline void read_group(const Cut<F>& cut, const uint8_t* panel, int64_t group, float* scale,
                              int32_t* base) {
  const uint8_t* p = panel + group * cut.w.group_bytes + cut.lanes_of(group) * kStep;
  const int8_t* zero_points = (const int8_t*)p + kPanel * scale_bytes(cut.w.scale_type);
  for (int i = 0; i < kPanel; i += W) {
    store(scale + i, load_scales(cut.w, p, i));
    const vf zeros = cut.w.zero_type == kZeroI8 ? load_i8(zero_points + i) : zero();
    store_i32(base + i, to_int(add(zeros, set1((float)kBase<F>))));
  }
}

// The same for sums of groups: a single group's scale is left to the end.
template <int F>
static inline void read_factors(const Cut<F>& cut, const uint8_t* panel, int64_t group,
                                float* factor, int32_t* base) {
  read_group(cut, panel, group, factor, base);
  for (int i = 0; cut.groups == 1 && i < kPanel; i += W) store(factor + i, set1(1.0f));
}

// The same for inputs in fp32: scales, and negative zero points.
template <int F>
static inline void read_wide(const Cut<F>& cut, const uint8_t* panel, int64_t group, float* scale,
                             float* zero) {
  int32_t base[kPanel];
  read_group(cut, panel, group, scale, base);
  const float* points = (const float*)(panel + group * cut.w.group_bytes) - kPanel;
  const bool floats = cut.w.zero_type == kZeroF32;
  for (int i = 0; cut.w.zero_type && i < kPanel; i += W) {
    const vf whole = from_int(add_i32(load_i32(base + i), set1_i32(-kBase<F>)));
    store(zero + i, sub(set1(0.0f), floats ? load(points + i) : whole));
  }
}

// Rows of prepared inputs and what they are multiplied with.
struct Operands {
  const uint8_t* weights;  // prepared, or packed
  const float* factor;     // [parts, kPanel]
  const int32_t* base;     // [parts, kPanel], or null without zero points
  const float* zero;       // the same, of inputs in fp32
  const char* x;           // [rows, x_stride bytes]
  const int32_t* starts;   // [rows, starts_stride]
  const float* x_scale;    // [rows of x, starts_stride, 2]: of inputs in fp32 x_scale and x_sum
  int64_t x_stride, starts_stride;
  int32_t* partial;  // [rows, kPanel]: sums of a group that goes on in the next chunk
  float* total;      // [rows, kPanel]: of groups that are complete
};

static inline void skip_rows(Operands& o, int64_t rows, int planes) {
  o.x += rows * o.x_stride;
  o.starts += rows * o.starts_stride;
  o.x_scale += rows / planes * o.starts_stride * 2;
  o.partial += rows * kPanel;
  o.total += rows * kPanel;
}

// Integers of a part's beginning.
template <int R>
static inline __attribute__((always_inline)) void begin(const Operands& o, bool first, int64_t part,
                                                        vi (&acc)[R][kVectors]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    const vi start = set1_i32(o.starts[r * o.starts_stride + part]);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) acc[r][v] = start;
  }
  if (o.base != nullptr) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++)
        acc[r][v] = mul_i32(acc[r][v], load_i32(o.base + part * kPanel + v * W));
  }
  if (!first) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++)
        acc[r][v] = add_i32(acc[r][v], load_i32(o.partial + r * kPanel + v * W));
  }
}

template <int R>
static inline __attribute__((always_inline)) void end(const Operands& o, bool last, int64_t part,
                                                      vi (&acc)[R][kVectors]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
      const int64_t at = r * kPanel + v * W;
      if (last) {
        const vf factor = load(o.factor + part * kPanel + v * W);
        store(o.total + at, fma(from_int(acc[r][v]), factor, load(o.total + at)));
      } else {
        store_i32(o.partial + at, acc[r][v]);
      }
    }
  }
}

// The same of inputs in fp32, whose groups are whole.
template <int P, int R>
static inline __attribute__((always_inline)) void end_wide(const Operands& o, int64_t part,
                                                           vi (&acc)[R][kVectors]) {
#pragma GCC unroll 8
  for (int r = 0; r + P <= R; r += P) {
    const float* own = o.x_scale + (r / P * o.starts_stride + part) * 2;
    const vf x_scale = set1(own[0]), x_sum = set1(own[1]);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
      const int64_t at = part * kPanel + v * W;
      const vi whole = P == 1 ? acc[r][v] : add_i32(times_256(acc[r][v]), acc[r + P - 1][v]);
      vf sum = from_int(whole);
      if (o.zero != nullptr) sum = fma(load(o.zero + at), x_sum, sum);
      float* total = o.total + r * kPanel + v * W;
      store(total, fma(sum, mul(load(o.factor + at), x_scale), load(total)));
    }
  }
}

// R rows times the prepared weights of a chunk.
template <int F, bool kWide, int R>
static void tile(const Operands& operands, const Chunk& chunk) {
  const Operands o = operands;  // in registers: stores below might change the caller's
  const Chunk c = chunk;
  const uint8_t* w = o.weights;
  const char* x = o.x;
  for (int64_t part = 0; part < c.parts; part++) {
    const int64_t bytes = (part == c.parts - 1 ? c.last_lanes : c.lanes) * Cut<F>::lane_bytes;
    vi acc[R][kVectors];
    begin<R>(o, c.first, part, acc);
    multiply<F, R>(w, x, o.x_stride, bytes / 4, acc);
    if constexpr (kWide) {
      end_wide<kPlanes<F, kWide>>(o, part, acc);
    } else {
      end<R>(o, c.last, part, acc);
    }
    w += bytes / 4 * kStep;
    x += bytes;
  }
}

// R rows times a packed panel.
template <int F, bool kWide, int R>
static void stream(const Cut<F>& cut, const uint8_t* panel, Operands o) {
  float factor[kPanel], zero[kPanel];
  int32_t base[kPanel];
  o.factor = factor;
  o.base = cut.w.zero_type && !kWide ? base : nullptr;
  o.zero = cut.w.zero_type ? zero : nullptr;
  for (int64_t group = 0; group < cut.groups; group++, o.starts++, o.x_scale += 2) {
    vi acc[R][kVectors];
    const int64_t lanes = cut.lanes_of(group);
    if constexpr (kWide) {
      read_wide(cut, panel, group, factor, zero);
    } else {
      read_factors(cut, panel, group, factor, base);
    }
    begin<R>(o, true, 0, acc);
    multiply_packed<F, R>(panel + group * cut.w.group_bytes, o.x, o.x_stride, lanes, acc);
    if constexpr (kWide) {
      end_wide<kPlanes<F, kWide>>(o, 0, acc);
    } else {
      end<R>(o, true, 0, acc);
    }
    o.x += lanes * cut.lane_bytes;
  }
}
