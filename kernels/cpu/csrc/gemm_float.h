// Linear layers of fp32 activations with weights of any format, but for those that linear_wide of
// gemm_int.h takes.
//
// Panels of kF32, kBF16, kF16 and kF8 are as those of the integers (api.h): a group is
// [ceil(g / n)][panel][n] values, n = 1, 2, 2 and 4 of them in 32 bits, then the scales.
//
// Every output is summed in one order, whatever the number of rows and threads: by segments, which
// are what is left of a group after cuts at every kChunk inputs,
//     partial = fma over the segment's inputs, one after another, from 0
//     total   = fma(partial, scale, total)
// then the bias is added. Segments bound the error of long sums.

constexpr int NV = kPanel / W;   // vectors in a panel
constexpr int64_t kChunk = kPanel > 16 ? 128 : 256;  // 32 or 16 KB of fp32, in the L1 cache
#if defined(PTQ_ISA_AVX512) || defined(PTQ_ISA_AVX2)
constexpr int kFewRows = 4;      // decoded in registers
#else
constexpr int kFewRows = 1;      // fewer functions to compile
#endif
constexpr int kTileRows = 6;     // rows of the register tile

static thread_local Scratch rows_scratch, panel_scratch;  // x, and what one panel needs

// Inputs that are summed together, and where their weights lie.
struct Segment {
  int64_t begin, count;   // inputs
  int64_t zeros, lanes, scales;  // offsets within a panel; zeros: of fp32 ones
};

// Calls body(Segment) for all segments in order.
template <class Lane, class Body>
static inline void for_segments(const Packed& w, const Body& body) {
  for (int64_t g = 0, begin = 0; begin < w.inputs; g++, begin += w.group) {
    const int64_t rest = w.inputs - begin, size = rest < w.group ? rest : w.group;
    const int64_t zeros = g * w.group_bytes, base = zeros + lead_of(w.zero_type, kPanel);
    const int64_t scales = base + ceil_div(size, Lane::kInputs) * kPanel * 4;
    for (int64_t k = 0; k < size; k += kChunk)
      body(Segment{begin + k, size - k < kChunk ? size - k : kChunk, zeros,
                   base + k / Lane::kInputs * kPanel * 4, scales});
  }
}

// Scale of W outputs; sums are in units of Lane::kUnit / Lane::kRow.
template <class Lane>
static inline vf scale_of(const Packed& w, const uint8_t* scales, int v) {
  const vf unit = set1(Lane::kUnit / Lane::kRow);
  return w.scale_type == kNoScale ? unit : mul(load_scales(w, scales, v * W), unit);
}

// Zero points of W outputs, in units of Lane::kUnit.
template <class Lane>
static inline vf zero_of(const Packed& w, const uint8_t* panel, const Segment& s, int v) {
  const vf unit = set1(1.0f / Lane::kUnit);
  if (w.zero_type == kZeroF32) return mul(load((const float*)(panel + s.zeros) + v * W), unit);
  const uint8_t* zeros = panel + s.scales + kPanel * scale_bytes(w.scale_type);
  return mul(load_i8((const int8_t*)zeros + v * W), unit);
}

// y[row, outputs of a panel] from their totals.
static inline void write_outputs(const LinearArgs& a, int64_t row, int64_t panel, const vf* total) {
  const Packed& w = *a.weight;
  const float* bias = (const float*)((const uint8_t*)a.weight + w.bias_offset) + panel * kPanel;
  float* y = a.y + row * a.y_stride + panel * kPanel;
  for (int v = 0; v < NV; v++) {
    const int64_t left = w.outputs - panel * kPanel - v * W;
    if (left <= 0) return;
    vf out = w.has_bias ? add(total[v], load(bias + v * W)) : total[v];
    if (a.accumulate) out = add(load_part(y + v * W, left), out);
    store_part(y + v * W, out, left);
  }
}

// A few rows: weights are decoded in registers and read once, P panels side by side so that there
// are enough independent sums. x: [R][x_stride], each segment padded with zeros to whole lanes.
template <class Lane, bool kZero, int R, int P>
static void few_rows(const LinearArgs& a, const float* x, int64_t x_stride, int64_t panel) {
  const Packed& w = *a.weight;
  const uint8_t* data = (const uint8_t*)a.weight + w.data_offset + panel * w.panel_bytes;
  vf total[P][R][NV], zeros[P][NV];
  for (int p = 0; p < P; p++)
    for (int r = 0; r < R; r++)
      for (int v = 0; v < NV; v++) total[p][r][v] = zero();
  for_segments<Lane>(w, [&](const Segment& s) {
    for (int p = 0; kZero && p < P; p++)
      for (int v = 0; v < NV; v++)
        zeros[p][v] = zero_of<Lane>(w, data + p * w.panel_bytes, s, v);
    vf sum[P][R][NV];
    for (int p = 0; p < P; p++)
      for (int r = 0; r < R; r++)
        for (int v = 0; v < NV; v++) sum[p][r][v] = zero();
    const uint8_t* lanes = data + s.lanes;
    for (int64_t k = 0; k < s.count; k += Lane::kInputs, lanes += kPanel * 4, x += Lane::kInputs) {
      // Two vectors take turns: sums that do not wait for each other stand side by side.
#pragma GCC unroll 8
      for (int i = 0; i < P * NV; i += 2) {
        const int p = i / NV, v = i % NV;
        const uint8_t* from = lanes + p * w.panel_bytes + v * W * 4;
        // One panel is one stream, which the processor alone does not fetch early enough.
        if (P == 1 && v == 0) __builtin_prefetch(from + 2048);
        const Lane pair[2] = {Lane::read(from), Lane::read(from + W * 4)};
#pragma GCC unroll 8
        for (int j = 0; j < Lane::kInputs; j++) {
#pragma GCC unroll 2
          for (int h = 0; h < 2; h++) {
            vf q = pair[h].input(j);
            if (kZero) q = sub(q, zeros[p][v + h]);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
              sum[p][r][v + h] = fma(set1(x[r * x_stride + j]), q, sum[p][r][v + h]);
          }
        }
      }
    }
    for (int p = 0; p < P; p++)
      for (int v = 0; v < NV; v++) {
        const vf scale = scale_of<Lane>(w, data + p * w.panel_bytes + s.scales, v);
        for (int r = 0; r < R; r++) total[p][r][v] = fma(sum[p][r][v], scale, total[p][r][v]);
      }
  });
  for (int p = 0; p < P; p++)
    for (int r = 0; r < R; r++) write_outputs(a, r, panel + p, total[p][r]);
}

template <class Lane, bool kZero, int R>
static void few(const LinearArgs& a, const Team& team) {
  constexpr int P = NV * R > 4 ? 1 : 8 / (NV * R);
  const Packed& w = *a.weight;
  const int64_t groups = groups_of(w.inputs, w.group);
  const int64_t stride = w.inputs + groups * Lane::kInputs;  // at most
  float* x = rows_scratch.get<float>(R * stride);
  for (int r = 0; r < R; r++) {
    const float* from = (const float*)a.x + r * a.x_stride;
    float* to = x + r * stride;
    for_segments<Lane>(w, [&](const Segment& s) {
      for (int64_t i = 0; i < s.count; i++) *to++ = from[s.begin + i] * Lane::kRow;
      for (int64_t i = s.count; i % Lane::kInputs != 0; i++) *to++ = 0.0f;
    });
  }
  const Range panels = share(ceil_div(w.outputs, kPanel), team);
  int64_t panel = panels.begin;
  for (; panel + P <= panels.end; panel += P) few_rows<Lane, kZero, R, P>(a, x, stride, panel);
  for (; panel < panels.end; panel++) few_rows<Lane, kZero, R, 1>(a, x, stride, panel);
}

// Weights of a segment in fp32, [count][panel], multiplied with Lane::kRow.
template <class Lane, bool kZero>
static const float* decode(const Packed& w, const uint8_t* panel, const Segment& s, float* out) {
  if (Lane::kInputs == 1) return (const float*)(panel + s.lanes);
  vf zeros[NV];
  for (int v = 0; kZero && v < NV; v++) zeros[v] = zero_of<Lane>(w, panel, s, v);
  const uint8_t* lanes = panel + s.lanes;
  float* to = out;
  for (int64_t k = 0; k < s.count; k += Lane::kInputs, lanes += kPanel * 4)
    for (int v = 0; v < NV; v++) {
      const Lane lane = Lane::read(lanes + v * W * 4);
#pragma GCC unroll 8
      for (int j = 0; j < Lane::kInputs; j++) {
        vf q = lane.input(j);
        if (kZero) q = sub(q, zeros[v]);
        if (Lane::kRow != 1.0f) q = fma(q, set1(Lane::kRow), zero());
        store(to + (k + j) * kPanel + v * W, q);
      }
    }
  return out;
}

// total[R][panel] = fma(sum over k of x[k][R] w[k][panel], scale, total). Meanwhile `ahead`, which
// is decoded next, is fetched to the L2 cache, a panel's lanes where k & mask is 0.
template <int R>
static void tile(const float* x, const float* w, int64_t count, const vf* scale, float* total,
                 const uint8_t* ahead, int64_t mask) {
  vf sum[R][NV];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < NV; v++) sum[r][v] = zero();
  for (int64_t k = 0; k < count; k++, x += R, w += kPanel) {
    vf q[NV];
    if ((k & mask) == 0) {
      for (int i = 0; i < kPanel * 4; i += 64) __builtin_prefetch(ahead + i, 0, 2);
      ahead += kPanel * 4;
    }
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) q[v] = load(w + v * W);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const vf xr = set1(x[r]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) sum[r][v] = fma(xr, q[v], sum[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < NV; v++) {
      float* t = total + r * kPanel + v * W;
      store(t, fma(sum[r][v], scale[v], load(t)));
    }
}

static inline void tile_of(int64_t rows, const float* x, const float* w, int64_t count,
                           const vf* scale, float* total, const uint8_t* ahead, int64_t mask) {
  if (rows == 6) return tile<6>(x, w, count, scale, total, ahead, mask);
  if (rows == 5) return tile<5>(x, w, count, scale, total, ahead, mask);
  if (rows == 4) return tile<4>(x, w, count, scale, total, ahead, mask);
  if (rows == 3) return tile<3>(x, w, count, scale, total, ahead, mask);
  if (rows == 2) return tile<2>(x, w, count, scale, total, ahead, mask);
  return tile<1>(x, w, count, scale, total, ahead, mask);
}

// Rows of a block of x in tiles of at most kTileRows, of nearly equal size.
struct RowBlock {
  int64_t begin, rows, tiles;
  Range tile(int64_t t) const { return {rows * t / tiles, rows * (t + 1) / tiles}; }
};

// x of a block as the tiles read it, packed by all threads into scratch of the first: segments
// after each other, in each [tiles][count][rows of the tile]. Leaves tickets at 0.
template <class Lane>
static const float* pack_rows(const LinearArgs& a, const RowBlock& block, const Team& team) {
  const bool first = team.id == 0;
  team.barrier();  // nobody reads the rows of the block before
  float* own = first ? rows_scratch.get<float>(block.rows * a.weight->inputs) : nullptr;
  float* packed = team.of_first(own);
  const Range tiles = share(block.tiles, team);
  for (int64_t t = tiles.begin; t < tiles.end; t++) {
    const Range rows = block.tile(t);
    const int64_t size = rows.end - rows.begin;
    const float* from = (const float*)a.x + (block.begin + rows.begin) * a.x_stride;
    for_segments<Lane>(*a.weight, [&](const Segment& s) {
      float* to = packed + block.rows * s.begin + rows.begin * s.count;
      for (int64_t r = 0; r < size; r++)
        for (int64_t k = 0; k < s.count; k++) to[k * size + r] = from[r * a.x_stride + s.begin + k];
    });
  }
  team.restart();
  return packed;
}

// One panel and the tiles of some rows: decoded once for all of them, segment by segment.
template <class Lane, bool kZero>
static void panel_rows(const LinearArgs& a, const RowBlock& block, Range tiles, int64_t panel,
                       const float* x) {
  const Packed& w = *a.weight;
  const uint8_t* data = (const uint8_t*)a.weight + w.data_offset + panel * w.panel_bytes;
  const int64_t begin = block.tile(tiles.begin).begin, end = block.tile(tiles.end - 1).end;
  float* decoded = panel_scratch.get<float>((kChunk + end - begin) * kPanel);
  float* total = decoded + kChunk * kPanel;
  __builtin_memset(total, 0, (end - begin) * kPanel * sizeof(float));
  for_segments<Lane>(w, [&](const Segment& s) {
    const float* q = decode<Lane, kZero>(w, data, s, decoded);
    vf scale[NV];
    const uint8_t* ahead = data + s.lanes + ceil_div(s.count, Lane::kInputs) * kPanel * 4;
    for (int v = 0; v < NV; v++) scale[v] = scale_of<Lane>(w, data + s.scales, v);
    for (int64_t t = tiles.begin; t < tiles.end; t++) {
      const Range rows = block.tile(t);
      tile_of(rows.end - rows.begin, x + block.rows * s.begin + rows.begin * s.count, q, s.count,
              scale, total + (rows.begin - begin) * kPanel, ahead,
              t == tiles.begin ? Lane::kInputs - 1 : ~(int64_t)0);
    }
  });
  for (int64_t row = begin; row < end; row++, total += kPanel) {
    vf sums[NV];
    for (int v = 0; v < NV; v++) sums[v] = load(total + v * W);
    write_outputs(a, block.begin + row, panel, sums);
  }
}

template <class Lane, bool kZero>
static void many(const LinearArgs& a, const Team& team) {
  const int64_t budget = (8 << 20) / (a.weight->inputs * 4);  // x in the L3 cache
  const int64_t most = budget < 96 ? 96 : budget > 1024 ? 1024 : budget;
  const int64_t blocks = ceil_div(a.rows, most), panels = ceil_div(a.weight->outputs, kPanel);
  for (int64_t b = 0; b < blocks; b++) {
    RowBlock block = {a.rows * b / blocks, a.rows * (b + 1) / blocks - a.rows * b / blocks, 0};
    block.tiles = ceil_div(block.rows, kTileRows);
    const float* x = pack_rows<Lane>(a, block, team);
    // Few panels: their rows are cut, so that there is work for all.
    int64_t parts = ceil_div(4 * team.size, panels);
    if (parts > block.tiles) parts = block.tiles;
    for (int64_t i = team.take(); i < panels * parts; i = team.take()) {
      const int64_t part = i % parts;
      const Range tiles = {block.tiles * part / parts, block.tiles * (part + 1) / parts};
      panel_rows<Lane, kZero>(a, block, tiles, i / parts, x);
    }
  }
}

template <class Lane, bool kZero>
static void linear_of(const LinearArgs& a, const Team& team) {
  if (a.rows == 1) return few<Lane, kZero, 1>(a, team);
  if constexpr (kFewRows > 1) {
    if (a.rows == 2) return few<Lane, kZero, 2>(a, team);
    if (a.rows == 3) return few<Lane, kZero, 3>(a, team);
    if (a.rows == 4) return few<Lane, kZero, 4>(a, team);
  }
  many<Lane, kZero>(a, team);
}

static void linear_float(const LinearArgs& a, const Team& team) {
  const Packed& w = *a.weight;
  if (w.format == kF32) return linear_of<LaneF32, false>(a, team);
  if (w.format == kBF16) return linear_of<LaneBF16, false>(a, team);
  if (w.format == kF16) return linear_of<LaneF16, false>(a, team);
  if (w.format == kF8) return linear_of<LaneF8, false>(a, team);
  if (w.format == kI8 && w.zero_type) return linear_of<LaneI8, true>(a, team);
  if (w.format == kI8) return linear_of<LaneI8, false>(a, team);
  if (w.zero_type) return linear_of<LaneI4, true>(a, team);
  linear_of<LaneI4, false>(a, team);
}
