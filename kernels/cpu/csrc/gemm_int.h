// Linear layers of integer products: exact int32 sums within a group, fp32 between groups.
//
//     one group:  y = sum * (x_scale * scale) + bias
//     groups:     y = x_scale * (sum_0 * scale_0 + sum_1 * scale_1 + ...) + bias, added by fma in
//                 this order
//
// Activations are int8; or fp32 (kWide) that becomes int16 here: x = x_scale q, a power of two for
// each row's inputs that share a scale of the weight. With z = -zero point, x_sum = sum(q),
//
//     y = (sum_0 + z_0 x_sum_0) * (scale_0 * x_scale_0) + (...) * (...) + bias
//
// Where prepared inputs have one byte, q = 256 high + low, two int8, each a row to the tiles: high
// ones are even, low ones odd.
//
// In whatever way rows and outputs are cut, an element is computed by these operations alone.
//
// Few rows: each thread reads its panels front to back and decodes them in registers, for four rows
// at a time; from the second time on, a panel comes from a cache. More rows: a task is up to
// kRowBlock rows times kTaskOutputs outputs. Inputs are taken in blocks whose prepared rows stay in
// the second-level cache, blocks in chunks whose prepared weights stay in the first-level one;
// chunks are cut into parts, each a group or a piece of one. With kStreams a task decodes panels in
// registers, too, which takes less than to prepare them. Where inputs become int16, so that more
// tasks are no cheaper ones, threads get as many blocks of rows each.

// Of a task; larger where inputs become int16, which is done once for each task, and largest where
// it keeps no sums of all its outputs.
template <bool kWide>
constexpr int64_t kRowBlock = kWide ? 96 : 48;
template <bool kWide>
constexpr int64_t kTaskOutputs = kStreams<kWide> ? 4096 : kWide ? 1024 : 256;
constexpr int64_t kBlockBytes = 4096;   // of a row of prepared inputs
constexpr int64_t kChunkBytes = 16384;  // of prepared weights
constexpr int64_t kWideGroup = 256;     // inputs of a group, if they are in fp32

// Scratch of one thread, cut from one piece of memory.
struct Space {
  char* x;          // [rows, x_stride]
  int32_t* starts;  // [rows, starts_stride]
  int64_t x_stride, starts_stride;
  uint8_t* weights;  // [kChunkBytes]
  float* factor;     // [parts of a chunk, kPanel]
  int32_t* base;     // likewise
  float *zero, *x_scale;  // likewise; as in Operands
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
                           panels * rows * kPanel * 4,  chunk_parts * kPanel * 4,
                           rows * parts * 8};
  int64_t offsets[10] = {};
  for (int i = 0; i < 9; i++) offsets[i + 1] = offsets[i] + round_up(sizes[i], kAlign);
  char* at = scratch.get<char>(offsets[9]);
  s.x = at;
  s.starts = (int32_t*)(at + offsets[1]);
  s.weights = (uint8_t*)(at + offsets[2]);
  s.factor = (float*)(at + offsets[3]);
  s.base = (int32_t*)(at + offsets[4]);
  s.partial = (int32_t*)(at + offsets[5]);
  s.total = (float*)(at + offsets[6]);
  s.zero = (float*)(at + offsets[7]);
  s.x_scale = (float*)(at + offsets[8]);
  return s;
}

// Prepares rows of the inputs of chunks, and where sums of their parts start: at minus what the
// weights' kBase adds; with zero points, at minus the sum of the inputs, times read_group's base.
template <int F, bool kWide>
static void prepare_rows(const Cut<F>& cut, const LinearArgs& a, Range rows, Range chunks,
                         const Space& s) {
  constexpr int P = kPlanes<F, kWide>;
  for (int64_t row = 0; row < rows.end - rows.begin; row++) {
    const int64_t from = (rows.begin + row) * a.x_stride;
    char* to = s.x + row * P * s.x_stride;
    int32_t* start = s.starts + row * P * s.starts_stride;
    float* scales = s.x_scale + row * s.starts_stride * 2;
    for (int64_t index = chunks.begin; index < chunks.end; index++) {
      const Chunk c = cut.at(index);
      for (int64_t part = 0; part < c.parts; part++, start++, scales += 2) {
        const int64_t padded = cut.part_lanes(c, part) * cut.lane;
        const int64_t begin = (c.group + part) * cut.w.group + c.lane * cut.lane;
        int64_t end = (c.group + part + 1) * cut.w.group;
        if (end > cut.w.inputs) end = cut.w.inputs;
        const int64_t count = end - begin < padded ? end - begin : padded;
        if constexpr (kWide) {
          widen_inputs<F>((const float*)a.x + from + begin, count, padded, to, s.x_stride, scales);
          start[0] = 0;
          start[(P - 1) * s.starts_stride] = (int32_t)scales[1] * -kBase<F>;
        } else {
          const int32_t sum = prepare_inputs<F>((const int8_t*)a.x + from + begin, count, padded, to);
          start[0] = cut.w.zero_type ? -sum : -sum * kBase<F>;
        }
        to += padded * kXBytes<F>;
      }
    }
  }
}

// Writes rows of a panel: scales, bias and what `accumulate` adds to.
template <int F, bool kWide>
static void finish(const Cut<F>& cut, const LinearArgs& a, int64_t panel, Range rows,
                   const float* total) {
  const float* bias = (const float*)((const uint8_t*)&cut.w + cut.w.bias_offset) + panel * kPanel;
  float scale[kPanel];
  int32_t base[kPanel];
  if (cut.groups == 1) read_group(cut, cut.panel(panel), 0, scale, base);
  const int64_t outputs = cut.w.outputs - panel * kPanel;
  for (int64_t row = rows.begin; row < rows.end; row++, total += kPanel * kPlanes<F, kWide>) {
    const vf x_scale = set1(kWide ? 1.0f : a.x_scale[a.x_scale_per_row ? row : 0]);
    float* y = a.y + row * a.y_stride + panel * kPanel;
    for (int n = 0; n < kPanel && n < outputs; n += W) {
      vf t = load(total + n);
      if (!kWide) t = mul(t, cut.groups == 1 ? mul(x_scale, load(scale + n)) : x_scale);
      if (cut.w.has_bias) t = add(t, load(bias + n));
      if (a.accumulate) t = add(load_part(y + n, outputs - n), t);
      store_part(y + n, t, outputs - n);
    }
  }
}

// End of the t-th of `times` shares of rows; planes stay together.
static inline int64_t share_of(int64_t rows, int64_t t, int64_t times, int planes) {
  return rows / planes * (t + 1) / times * planes;
}

// All rows times a packed panel, up to 4 at a time; the second time it comes from the cache.
template <int F, bool kWide>
static void stream_rows(const Cut<F>& cut, const uint8_t* panel, int64_t rows, Operands o) {
  constexpr int P = kPlanes<F, kWide>;
  const int64_t times = ceil_div(rows, 4);
  for (int64_t t = 0, done = 0; t < times; t++) {
    const int64_t r = share_of(rows, t, times, P) - done;
    if (P == 1 && r == 1) stream<F, kWide, 1>(cut, panel, o);
    if (r == 2) stream<F, kWide, 2>(cut, panel, o);
    if (P == 1 && r == 3) stream<F, kWide, 3>(cut, panel, o);
    if (r == 4) stream<F, kWide, 4>(cut, panel, o);
    done += r;
    skip_rows(o, r, P);
  }
}

// Rows of x times some panels, which are decoded in registers.
template <int F, bool kWide>
static void stream_task(const Cut<F>& cut, const LinearArgs& a, Range rows, Range panels,
                        const Space& s) {
  const int64_t count = (rows.end - rows.begin) * kPlanes<F, kWide>;
  prepare_rows<F, kWide>(cut, a, rows, Range{0, 1}, s);
  const Operands o = {nullptr,   nullptr,    nullptr,         nullptr,   s.x,    s.starts,
                      s.x_scale, s.x_stride, s.starts_stride, s.partial, s.total};
  for (int64_t panel = panels.begin; panel < panels.end; panel++) {
    __builtin_memset(s.total, 0, count * kPanel * 4);
    stream_rows<F, kWide>(cut, cut.panel(panel), count, o);
    finish<F, kWide>(cut, a, panel, rows, s.total);
  }
}

template <int F, bool kWide>
static void few_rows(const LinearArgs& a, const Team& team) {
  const Packed& w = *a.weight;
  const Cut<F> cut(w, INT32_MAX);  // all in one chunk
  const int64_t rows = a.rows * kPlanes<F, kWide>, bytes = cut.chunk_bytes(cut.at(0));
  const Space s = space_of(rows, bytes, cut.groups, 1, 1);
  const Range panels = share(ceil_div(w.outputs, kPanel), team);
  stream_task<F, kWide>(cut, a, Range{0, a.rows}, panels, s);
}

// Prepares a chunk of a panel; returns the end of what it read.
template <int F, bool kWide>
static const uint8_t* prepare_chunk(const Cut<F>& cut, const Chunk& c, const uint8_t* panel,
                                    const Space& s) {
  uint8_t* out = s.weights;
  const uint8_t* packed = panel;
  for (int64_t part = 0; part < c.parts; part++) {
    const int64_t lanes = cut.part_lanes(c, part);
    packed = panel + (c.group + part) * cut.w.group_bytes + c.lane * kStep;
    prepare_weights<F>(packed, lanes, out);
    packed += lanes * kStep;
    const int64_t at = part * kPanel;
    if constexpr (kWide) {
      read_wide(cut, panel, c.group + part, s.factor + at, s.zero + at);
    } else {
      read_factors(cut, panel, c.group + part, s.factor + at, s.base + at);
    }
    out += lanes * cut.lane_bytes / 4 * kStep;
  }
  return packed;
}

// All rows of a task times a prepared chunk, cut into tiles as equal as can be. Between tiles, the
// `ahead` bytes at `next` are brought to the second-level cache: the next chunk.
template <int F, bool kWide>
static void multiply_chunk(const Chunk& c, int64_t rows, Operands o, const uint8_t* next,
                           int64_t ahead) {
  constexpr int P = kPlanes<F, kWide>;
  const int64_t tiles = ceil_div(rows, kTileRows<F>);
  for (int64_t t = 0, done = 0; t < tiles; t++) {
    const int64_t r = share_of(rows, t, tiles, P) - done;
    for (int64_t i = ahead * t / tiles; i < ahead * (t + 1) / tiles; i += 64)
      __builtin_prefetch(next + i, 0, 2);
    if (P == 1 && r == 1) tile<F, kWide, 1>(o, c);
    if (r == 2) tile<F, kWide, 2>(o, c);
    if constexpr (kTileRows<F> > 2) {
      if (P == 1 && r == 3) tile<F, kWide, 3>(o, c);
      if (r == 4) tile<F, kWide, 4>(o, c);
    }
    if constexpr (kTileRows<F> > 4) {
      if (P == 1 && r == 5) tile<F, kWide, 5>(o, c);
      if (r == 6) tile<F, kWide, 6>(o, c);
    }
    done += r;
    skip_rows(o, r, P);
  }
}

template <int F, bool kWide>
static void run_task(const Cut<F>& cut, const LinearArgs& a, Range rows, Range panels,
                     int64_t block, const Space& s) {
  const int64_t count = (rows.end - rows.begin) * kPlanes<F, kWide>, area = count * kPanel;
  __builtin_memset(s.total, 0, (panels.end - panels.begin) * area * 4);
  for (int64_t from = 0; from < cut.chunks; from += block) {
    const Range chunks = {from, from + block < cut.chunks ? from + block : cut.chunks};
    prepare_rows<F, kWide>(cut, a, rows, chunks, s);
    for (int64_t panel = panels.begin; panel < panels.end; panel++) {
      const int64_t at = (panel - panels.begin) * area;
      const bool zeros = cut.w.zero_type != kNoZero;
      Operands o = {s.weights, s.factor, zeros && !kWide ? s.base : nullptr,
                    zeros ? s.zero : nullptr, s.x, s.starts, s.x_scale, s.x_stride,
                    s.starts_stride, s.partial + at, s.total + at};
      for (int64_t index = chunks.begin; index < chunks.end; index++) {
        const Chunk c = cut.at(index);
        const uint8_t* next = prepare_chunk<F, kWide>(cut, c, cut.panel(panel), s);
        multiply_chunk<F, kWide>(c, count, o, next, kChunkBytes * 4 / cut.lane_bytes);
        o.x += cut.chunk_bytes(c);
        o.starts += c.parts;
        o.x_scale += c.parts * 2;
      }
    }
  }
  for (int64_t panel = panels.begin; panel < panels.end; panel++)
    finish<F, kWide>(cut, a, panel, rows, s.total + (panel - panels.begin) * area);
}

// Panels of a task: kTaskOutputs, or fewer so that each thread gets some.
template <bool kWide>
static int64_t task_panels(int64_t panels, int64_t row_blocks, const Team& team) {
  const int tasks = row_blocks == 1 ? 1 : kStreams<kWide> ? 2 : 4;  // of a thread
  const int64_t fair = ceil_div(panels * row_blocks, tasks * team.size);
  const int64_t most = kTaskOutputs<kWide> / kPanel;
  return fair < most ? fair : most;
}

template <int F, bool kWide>
static void many_rows(const LinearArgs& a, const Team& team) {
  constexpr int P = kPlanes<F, kWide>;
  constexpr int64_t lanes = kChunkBytes / kPanel / Cut<F>::lane_bytes;
  const Packed& w = *a.weight;
  const Cut<F> cut(w, kStreams<kWide> ? INT32_MAX : lanes);
  constexpr int64_t tile_rows = (kStreams<kWide> ? 4 : kTileRows<F>) / P;
  int64_t row_blocks = ceil_div(a.rows * P, kRowBlock<kWide>);
  if (kWide && 2 * row_blocks > team.size) row_blocks = round_up(row_blocks, team.size);
  const int64_t tiles = ceil_div(a.rows, tile_rows), panels = ceil_div(w.outputs, kPanel);
  const int64_t block_rows = ceil_div(tiles, row_blocks) * tile_rows;
  const int64_t width = task_panels<kWide>(panels, row_blocks, team);
  const int64_t block = kBlockBytes * kPanel / kChunkBytes;  // chunks that share prepared rows
  const Space s = kStreams<kWide> ? space_of(block_rows * P, cut.chunk_bytes(cut.at(0)),
                                             cut.groups, 1, 1)
                                  : space_of(block_rows * P, kBlockBytes, block * cut.per,
                                             cut.per, width);
  const auto run = [&](Range rows, int64_t begin, int64_t end) {
    const Range own = {begin, begin + width < end ? begin + width : end};
    if constexpr (kStreams<kWide>) {
      stream_task<F, kWide>(cut, a, rows, own, s);
    } else {
      run_task<F, kWide>(cut, a, rows, own, block, s);
    }
  };
  if (row_blocks == 1) {
    const Range mine = share(panels, team);
    for (int64_t p = mine.begin; p < mine.end; p += width) run(Range{0, a.rows}, p, mine.end);
    return;
  }
  team.restart();
  const int64_t tasks = ceil_div(panels, width) * row_blocks;
  for (int64_t task = team.take(); task < tasks; task = team.take()) {
    const int64_t block = task % row_blocks, end = tiles * (block + 1) / row_blocks * tile_rows;
    const Range rows = {tiles * block / row_blocks * tile_rows, end < a.rows ? end : a.rows};
    run(rows, task / row_blocks * width, panels);
  }
}

template <int F, bool kWide>
static void linear_of(const LinearArgs& a, const Team& team) {
  if (a.rows == 0) return;
  if (a.rows <= kDirectRows<kWide>) {
    few_rows<F, kWide>(a, team);
  } else {
    many_rows<F, kWide>(a, team);
  }
}

static void linear_int(const LinearArgs& a, const Team& team) {
  if (a.weight->format == kI8) {
    linear_of<kI8, false>(a, team);
  } else {
    linear_of<kI4, false>(a, team);
  }
}

// Products of inputs in fp32 with weights in groups so short that their sums stay below 2^31, and
// one scale serves all of their inputs well. Returns whether it is one.
static bool linear_wide(const LinearArgs& a, const Team& team) {
  const Packed& w = *a.weight;
  if (w.group > kWideGroup) return false;
#if defined(PTQ_ISA_AVX512) || defined(PTQ_ISA_AVX2)
  if (w.format == kI8) return linear_of<kI8, true>(a, team), true;
  if (w.format == kI4) return linear_of<kI4, true>(a, team), true;
#endif
  return false;
}
