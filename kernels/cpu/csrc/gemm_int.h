// Linear layers of integer activations: exact int32 sums within a group, fp32 between groups.
//
//     one group:  y = sum * (x_scale * scale) + bias
//     groups:     y = x_scale * (sum_0 * scale_0 + sum_1 * scale_1 + ...) + bias, added by fma in
//                 this order
//
// In whatever way rows and outputs are cut, an element is computed by these operations alone.
//
// Few rows: each thread reads its panels front to back and decodes them in registers, for four rows
// at a time; from the second time on, a panel comes from a cache. More rows: a task is up to
// kRowBlock rows times kTaskOutputs outputs. Inputs are taken in blocks whose prepared rows stay in
// the second-level cache, blocks in chunks whose prepared weights stay in the first-level one;
// chunks are cut into parts, each a group or a piece of one.

constexpr int64_t kRowBlock = 48, kTaskOutputs = 256;
constexpr int64_t kBlockBytes = 4096;   // of a row of prepared inputs
constexpr int64_t kChunkBytes = 16384;  // of prepared weights

// A group's scales, and what its integers are too large by: the zero point and kBase.
template <int F>
static inline void read_group(const Cut<F>& cut, const uint8_t* panel, int64_t group, float* scale,
                              int32_t* base) {
  const uint8_t* p = panel + group * cut.w.group_bytes + cut.lanes_of(group) * kStep;
  const bool bf16 = cut.w.scale_type == kScaleBF16;
  const int8_t* zero_points = (const int8_t*)p + kPanel * (bf16 ? 2 : 4);
  for (int i = 0; i < kPanel; i += W) {
    store(scale + i, bf16 ? load_bf16((const uint16_t*)p + i) : load((const float*)p + i));
    const vf zeros = cut.w.zero_type ? load_i8(zero_points + i) : zero();
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

// Rows of prepared inputs and what they are multiplied with.
struct Operands {
  const uint8_t* weights;  // prepared, or packed
  const float* factor;     // [parts, kPanel]
  const int32_t* base;     // [parts, kPanel], or null without zero points
  const char* x;           // [rows, x_stride bytes]
  const int32_t* starts;   // [rows, starts_stride]
  int64_t x_stride, starts_stride;
  int32_t* partial;  // [rows, kPanel]: sums of a group that goes on in the next chunk
  float* total;      // [rows, kPanel]: of groups that are complete
};

static inline void skip_rows(Operands& o, int64_t rows) {
  o.x += rows * o.x_stride;
  o.starts += rows * o.starts_stride;
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

// R rows times the prepared weights of a chunk.
template <int F, int R>
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
    end<R>(o, c.last, part, acc);
    w += bytes / 4 * kStep;
    x += bytes;
  }
}

// R rows times a packed panel.
template <int F, int R>
static void stream(const Cut<F>& cut, const uint8_t* panel, Operands o) {
  float factor[kPanel];
  int32_t base[kPanel];
  o.factor = factor;
  o.base = cut.w.zero_type ? base : nullptr;
  for (int64_t group = 0; group < cut.groups; group++, o.starts++) {
    vi acc[R][kVectors];
    read_factors(cut, panel, group, factor, base);
    begin<R>(o, true, 0, acc);
    const int64_t lanes = cut.lanes_of(group);
    multiply_packed<F, R>(panel + group * cut.w.group_bytes, o.x, o.x_stride, lanes, acc);
    end<R>(o, true, 0, acc);
    o.x += lanes * cut.lane_bytes;
  }
}

// Scratch of one thread, cut from one piece of memory.
struct Space {
  char* x;          // [rows, x_stride]
  int32_t* starts;  // [rows, starts_stride]
  int64_t x_stride, starts_stride;
  uint8_t* weights;  // [kChunkBytes]
  float* factor;     // [parts of a chunk, kPanel]
  int32_t* base;     // likewise
  int32_t* partial;  // [panels, rows, kPanel]
  float* total;      // likewise
};

// For rows whose prepared inputs take `bytes`, in `parts` parts, `chunk_parts` at a time. Rows lie
// 64 bytes more apart than they are long: at powers of two they would share sets of the cache.
static Space space_of(int64_t rows, int64_t bytes, int64_t parts, int64_t chunk_parts,
                      int64_t panels) {
  static thread_local Scratch scratch;
  Space s = {};
  s.x_stride = round_up(bytes, kAlign) + 1024 + kAlign;
  s.starts_stride = parts;
  const int64_t sizes[] = {rows * s.x_stride + kAlign,  rows * parts * 4,
                           kChunkBytes,                 chunk_parts * kPanel * 4,
                           chunk_parts * kPanel * 4,    panels * rows * kPanel * 4,
                           panels * rows * kPanel * 4};
  int64_t offsets[8] = {};
  for (int i = 0; i < 7; i++) offsets[i + 1] = offsets[i] + round_up(sizes[i], kAlign);
  char* at = scratch.get<char>(offsets[7]);
  s.x = at;
  s.starts = (int32_t*)(at + offsets[1]);
  s.weights = (uint8_t*)(at + offsets[2]);
  s.factor = (float*)(at + offsets[3]);
  s.base = (int32_t*)(at + offsets[4]);
  s.partial = (int32_t*)(at + offsets[5]);
  s.total = (float*)(at + offsets[6]);
  return s;
}

// Prepares rows of the inputs of chunks, and where sums of their parts start: at minus what the
// weights' kBase adds; with zero points, at minus the sum of the inputs, times read_group's base.
template <int F>
static void prepare_rows(const Cut<F>& cut, const LinearArgs& a, Range rows, Range chunks,
                         const Space& s) {
  for (int64_t row = rows.begin; row < rows.end; row++) {
    const int8_t* x = (const int8_t*)a.x + row * a.x_stride;
    char* to = s.x + (row - rows.begin) * s.x_stride;
    int32_t* start = s.starts + (row - rows.begin) * s.starts_stride;
    for (int64_t index = chunks.begin; index < chunks.end; index++) {
      const Chunk c = cut.at(index);
      for (int64_t part = 0; part < c.parts; part++) {
        const int64_t padded = cut.part_lanes(c, part) * cut.lane;
        const int64_t begin = (c.group + part) * cut.w.group + c.lane * cut.lane;
        int64_t end = (c.group + part + 1) * cut.w.group;
        if (end > cut.w.inputs) end = cut.w.inputs;
        const int64_t count = end - begin < padded ? end - begin : padded;
        const int32_t sum = prepare_inputs<F>(x + begin, count, padded, to);
        *start++ = cut.w.zero_type ? -sum : -sum * kBase<F>;
        to += padded * kXBytes<F>;
      }
    }
  }
}

// Writes rows of a panel: scales, bias and what `accumulate` adds to.
template <int F>
static void finish(const Cut<F>& cut, const LinearArgs& a, int64_t panel, Range rows,
                   const float* total) {
  const float* bias = (const float*)((const uint8_t*)&cut.w + cut.w.bias_offset) + panel * kPanel;
  float scale[kPanel];
  int32_t base[kPanel];
  if (cut.groups == 1) read_group(cut, cut.panel(panel), 0, scale, base);
  const int64_t outputs = cut.w.outputs - panel * kPanel;
  for (int64_t row = rows.begin; row < rows.end; row++, total += kPanel) {
    const vf x_scale = set1(a.x_scale[a.x_scale_per_row ? row : 0]);
    float* y = a.y + row * a.y_stride + panel * kPanel;
    for (int n = 0; n < kPanel && n < outputs; n += W) {
      vf t = load(total + n);
      t = mul(t, cut.groups == 1 ? mul(x_scale, load(scale + n)) : x_scale);
      if (cut.w.has_bias) t = add(t, load(bias + n));
      if (a.accumulate) t = add(load_part(y + n, outputs - n), t);
      store_part(y + n, t, outputs - n);
    }
  }
}

// All rows times a packed panel, up to 4 at a time; the second time it comes from the cache.
template <int F>
static void stream_rows(const Cut<F>& cut, const uint8_t* panel, int64_t rows, Operands o) {
  const int64_t times = ceil_div(rows, 4);
  for (int64_t t = 0, done = 0; t < times; t++) {
    const int64_t r = rows * (t + 1) / times - done;
    if (r == 1) stream<F, 1>(cut, panel, o);
    if (r == 2) stream<F, 2>(cut, panel, o);
    if (r == 3) stream<F, 3>(cut, panel, o);
    if (r == 4) stream<F, 4>(cut, panel, o);
    done += r;
    skip_rows(o, r);
  }
}

template <int F>
static void few_rows(const LinearArgs& a, const Team& team) {
  const Packed& w = *a.weight;
  const Cut<F> cut(w, INT32_MAX);  // all in one chunk
  const Space s = space_of(a.rows, cut.chunk_bytes(cut.at(0)), cut.groups, 1, 1);
  prepare_rows(cut, a, Range{0, a.rows}, Range{0, 1}, s);
  const Operands o = {nullptr,    nullptr,         nullptr,   s.x,    s.starts,
                      s.x_stride, s.starts_stride, s.partial, s.total};
  const Range panels = share(ceil_div(w.outputs, kPanel), team);
  for (int64_t panel = panels.begin; panel < panels.end; panel++) {
    __builtin_memset(s.total, 0, a.rows * kPanel * 4);
    stream_rows(cut, cut.panel(panel), a.rows, o);
    finish(cut, a, panel, Range{0, a.rows}, s.total);
  }
}

// Prepares a chunk of a panel; returns the end of what it read.
template <int F>
static const uint8_t* prepare_chunk(const Cut<F>& cut, const Chunk& c, const uint8_t* panel,
                                    const Space& s) {
  uint8_t* out = s.weights;
  const uint8_t* packed = panel;
  for (int64_t part = 0; part < c.parts; part++) {
    const int64_t lanes = cut.part_lanes(c, part);
    packed = panel + (c.group + part) * cut.w.group_bytes + c.lane * kStep;
    prepare_weights<F>(packed, lanes, out);
    packed += lanes * kStep;
    read_factors(cut, panel, c.group + part, s.factor + part * kPanel, s.base + part * kPanel);
    out += lanes * cut.lane_bytes / 4 * kStep;
  }
  return packed;
}

// All rows of a task times a prepared chunk, cut into tiles as equal as can be. Between tiles, the
// `ahead` bytes at `next` are brought to the second-level cache: the next chunk.
template <int F>
static void multiply_chunk(const Chunk& c, int64_t rows, Operands o, const uint8_t* next,
                           int64_t ahead) {
  const int64_t tiles = ceil_div(rows, kTileRows<F>);
  for (int64_t t = 0, done = 0; t < tiles; t++) {
    const int64_t r = rows * (t + 1) / tiles - done;
    for (int64_t i = ahead * t / tiles; i < ahead * (t + 1) / tiles; i += 64)
      __builtin_prefetch(next + i, 0, 2);
    if (r == 1) tile<F, 1>(o, c);
    if (r == 2) tile<F, 2>(o, c);
    if constexpr (kTileRows<F> > 2) {
      if (r == 3) tile<F, 3>(o, c);
      if (r == 4) tile<F, 4>(o, c);
    }
    if constexpr (kTileRows<F> > 4) {
      if (r == 5) tile<F, 5>(o, c);
      if (r == 6) tile<F, 6>(o, c);
    }
    done += r;
    skip_rows(o, r);
  }
}

template <int F>
static void run_task(const Cut<F>& cut, const LinearArgs& a, Range rows, Range panels,
                     int64_t block, const Space& s) {
  const int64_t count = rows.end - rows.begin, area = count * kPanel;
  __builtin_memset(s.total, 0, (panels.end - panels.begin) * area * 4);
  for (int64_t from = 0; from < cut.chunks; from += block) {
    const Range chunks = {from, from + block < cut.chunks ? from + block : cut.chunks};
    prepare_rows(cut, a, rows, chunks, s);
    for (int64_t panel = panels.begin; panel < panels.end; panel++) {
      const int64_t at = (panel - panels.begin) * area;
      Operands o = {s.weights, s.factor, cut.w.zero_type ? s.base : nullptr, s.x, s.starts,
                    s.x_stride, s.starts_stride, s.partial + at, s.total + at};
      for (int64_t index = chunks.begin; index < chunks.end; index++) {
        const Chunk c = cut.at(index);
        const uint8_t* next = prepare_chunk(cut, c, cut.panel(panel), s);
        multiply_chunk<F>(c, count, o, next, kChunkBytes * 4 / cut.lane_bytes);
        o.x += cut.chunk_bytes(c);
        o.starts += c.parts;
      }
    }
  }
  for (int64_t panel = panels.begin; panel < panels.end; panel++)
    finish(cut, a, panel, rows, s.total + (panel - panels.begin) * area);
}

// Panels of a task: kTaskOutputs, or fewer so that each thread gets some.
static int64_t task_panels(int64_t panels, int64_t row_blocks, const Team& team) {
  const int64_t fair = ceil_div(panels * row_blocks, row_blocks == 1 ? team.size : 4 * team.size);
  const int64_t most = kTaskOutputs / kPanel;
  return fair < most ? fair : most;
}

template <int F>
static void many_rows(const LinearArgs& a, const Team& team) {
  const Packed& w = *a.weight;
  const Cut<F> cut(w, kChunkBytes / kPanel / Cut<F>::lane_bytes);
  const int64_t row_blocks = ceil_div(a.rows, kRowBlock), panels = ceil_div(w.outputs, kPanel);
  const int64_t block_rows = round_up(ceil_div(a.rows, row_blocks), kTileRows<F>);
  const int64_t width = task_panels(panels, row_blocks, team);
  const int64_t block = kBlockBytes * kPanel / kChunkBytes;  // chunks that share prepared rows
  const Space s = space_of(block_rows, kBlockBytes, block * cut.per, cut.per, width);
  if (row_blocks == 1) {
    const Range mine = share(panels, team), rows = {0, a.rows};
    for (int64_t p = mine.begin; p < mine.end; p += width)
      run_task(cut, a, rows, Range{p, p + width < mine.end ? p + width : mine.end}, block, s);
    return;
  }
  team.restart();
  const int64_t tasks = ceil_div(panels, width) * row_blocks;
  for (int64_t task = team.take(); task < tasks; task = team.take()) {
    const int64_t p = task / row_blocks * width, row = task % row_blocks * block_rows;
    const Range rows = {row, row + block_rows < a.rows ? row + block_rows : a.rows};
    if (rows.begin < rows.end)
      run_task(cut, a, rows, Range{p, p + width < panels ? p + width : panels}, block, s);
  }
}

template <int F>
static void linear_int_of(const LinearArgs& a, const Team& team) {
  if (a.rows <= kDirectRows) {
    few_rows<F>(a, team);
  } else {
    many_rows<F>(a, team);
  }
}

static void linear_int(const LinearArgs& a, const Team& team) {
  if (a.rows == 0) return;
  if (a.weight->format == kI8) {
    linear_int_of<kI8>(a, team);
  } else {
    linear_int_of<kI4>(a, team);
  }
}
