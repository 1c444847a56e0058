// Attention over the paged cache (online softmax: Milakov and Gimelshein 2018; split over tokens:
// Dao et al. 2023, "Flash-Decoding").
//
// Positions are cut into splits of 256, counted from 0. Within a split a row goes through its blocks
// of 64 in order, keeping the largest score so far, the sum of weights and the weighted sum of V;
// splits are then merged in order in the same way. A tile of queries goes through all its splits on
// one thread, or, where there are too few tiles for the threads, its splits are shared out and
// merged afterwards: the arithmetic is the same. Positions that a row does not see change nothing:
// their weight is exactly 0, and the factor of what was summed before exactly 1.

constexpr int64_t kSplit = 256;     // positions
constexpr int64_t kQueryRows = 32;   // rows of a tile, if the heads of one query are not more
constexpr int64_t kDirectQueryRows = 8;  // more rows than that: K and V are widened to fp32 first
constexpr float kLowest = -1e30f;   // largest score of no scores; finite, so that 0 * e^0 is 0

// Some queries of one sequence, which go through the cache together.
struct Tile {
  int64_t sequence, first, queries, position;  // first: row of q; position: of the first query
  int64_t begin, end;                          // positions that any of them sees
  int64_t first_split() const { return begin / kSplit; }
  int64_t splits() const { return ceil_div(end, kSplit) - first_split(); }
};

struct Shape {
  int64_t group, queries, rows;  // queries and rows of a tile at most
  int64_t width, v_width;        // padded dim and v_dim
  explicit Shape(const AttentionArgs& a) {
    group = a.heads / a.kv_heads;
    queries = group < kQueryRows ? kQueryRows / group : 1;
    rows = queries * group;
    width = width_of(a.k_format, a.dim);
    v_width = width_of(a.v_format, a.v_dim);
  }
};

// Goes through the tiles of a call; last queries first, as they see most.
struct Tiles {
  const AttentionArgs& a;
  const Shape& shape;
  int64_t sequence = -1, left = 0;
  Tile tile = {};
  bool next() {
    while (left == 0) {
      if (++sequence == a.sequences) return false;
      left = ceil_div(a.query_start[sequence + 1] - a.query_start[sequence], shape.queries);
    }
    left--;
    const int64_t start = a.query_start[sequence], count = a.query_start[sequence + 1] - start;
    const int64_t offset = left * shape.queries, rest = count - offset;
    tile.sequence = sequence;
    tile.first = start + offset;
    tile.queries = rest < shape.queries ? rest : shape.queries;
    tile.position = a.context_len[sequence] - count + offset;
    tile.end = tile.position + tile.queries;
    tile.begin = a.window > 0 && tile.position >= a.window ? tile.position + 1 - a.window : 0;
    return true;
  }
};

// Sums of the rows of a tile; what a row has gathered stands for out / sum.
struct Sums {
  float *top, *sum, *out;  // [rows], [rows], [rows][width]
  static int64_t floats(int64_t rows, int64_t width) { return round_up(rows * (width + 2), W); }
  Sums(float* data, int64_t rows, int64_t width)
      : top(data + rows * width), sum(top + rows), out(data) {}
  void clear(int64_t rows, int64_t width) const {
    for (int64_t r = 0; r < rows; r++) top[r] = kLowest;
    __builtin_memset(sum, 0, rows * sizeof(float));
    __builtin_memset(out, 0, rows * width * sizeof(float));
  }
};

static void merge(const Sums& into, const Sums& from, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; r++) {
    const float top = into.top[r] > from.top[r] ? into.top[r] : from.top[r];
    const vf a = exp(set1(into.top[r] - top)), b = exp(set1(from.top[r] - top));
    float factor[2][W];
    store(factor[0], a);
    store(factor[1], b);
    into.top[r] = top;
    into.sum[r] = into.sum[r] * factor[0][0] + from.sum[r] * factor[1][0];
    for (int64_t d = r * width; d < (r + 1) * width; d += W)
      store(into.out + d, fma(load(from.out + d), b, mul(load(into.out + d), a)));
  }
}

// A block of one kv head: [64][dim] of K and V, scales of its tokens or null, and what comes next.
template <class K, class V>
struct Block {
  int64_t start;  // position of its first token
  const K* k;
  const V* v;
  const float *k_scale, *v_scale;
  const K* next_k;
  const V* next_v;
};

// Channels [from, from + W) of a head of `dim`, those of `vectors` that lie at `d` as it is widened.
struct Place {
  int64_t from, left;  // left: how many of them there are
  Place(int32_t format, int64_t dim, int64_t d) : from(d), left(dim - d) {
    if (format != kI4) return;
    const int64_t half = dim / 2, inner = d / (2 * W) * W;
    from = inner + (d / W % 2 ? half : 0);
    left = half - inner;
  }
};

// One kv head of one tile on one thread.
struct Attender {
  const AttentionArgs& a;
  const Shape& shape;
  const Tile& tile;
  int64_t head, rows;
  int64_t from = 0, to = INT64_MAX;  // positions that are looked at, whatever rows see
  float *q, *s, *decay, *k_wide, *v_wide, *scales;

  static int64_t floats(const Shape& shape) {
    return shape.rows * (shape.width + kBlock + W) + kBlock * (shape.width + shape.v_width + 2);
  }
  Attender(const AttentionArgs& args, const Shape& sh, const Tile& t, int64_t h, float* data)
      : a(args), shape(sh), tile(t), head(h), rows(t.queries * sh.group) {
    k_wide = data;
    v_wide = k_wide + kBlock * shape.width;
    scales = v_wide + kBlock * shape.v_width;
    q = scales + 2 * kBlock;
    s = q + shape.rows * shape.width;
    decay = s + shape.rows * kBlock;
    load_queries();
  }

  void load_queries() {
    for (int64_t r = 0; r < rows; r++) {
      const float* from = a.q + (tile.first + r / shape.group) * a.q_stride +
                          (head * shape.group + r % shape.group) * a.dim;
      float* to = q + r * shape.width;
      __builtin_memset(to, 0, shape.width * sizeof(float));
      for (int64_t d = 0; d < shape.width; d += W) {
        const Place own(a.k_format, a.dim, d);
        vf scale = set1(a.softmax_scale * unit_of(a.k_format));
        if (a.k_scale_kind == kScaleHead) scale = mul(scale, set1(a.k_scale[head]));
        if (a.k_scale_kind == kScaleChannel)
          scale = mul(scale, load_part(a.k_scale + head * a.dim + own.from, own.left));
        store(to + d, mul(load_part(from + own.from, own.left), scale));
      }
    }
  }

  // Tokens of the block at `start` that a row sees.
  Span span(int64_t row, int64_t start) const {
    const int64_t position = tile.position + row / shape.group - start;
    int64_t begin = a.window > 0 ? position + 1 - a.window : 0, end = position + 1;
    begin = begin < from - start ? from - start : begin;
    begin = begin < 0 ? 0 : begin > kBlock ? kBlock : begin;
    end = end > to - start ? to - start : end;
    end = end < begin ? begin : end > kBlock ? kBlock : end;
    return {(int)begin, (int)end};
  }
  // Of a run of rows, which see later tokens the later they are.
  Span span_of_all(int64_t row, int64_t count, int64_t start) const {
    const Span first = span(row, start), last = span(row + count - 1, start);
    return {first.begin, last.end > first.begin ? last.end : first.begin};
  }

  template <int R, class K, class V>
  void attend_rows(const Block<K, V>& b, int64_t row, const Sums& sums) {
    const Span all = span_of_all(row, R, b.start);
    if (all.begin == all.end) return;
    float* score = s + row * kBlock;
    scores_of<R>(q + row * shape.width, b.k, b.next_k, shape.width, all, score);
    for (int64_t r = 0; r < R; r++)
      decay[r] = weigh(score + r * kBlock, span(row + r, b.start), b.k_scale, b.v_scale,
                       bend(row + r, b.start), sums.top + row + r, sums.sum + row + r);
    gather<R>(score, b.v, b.next_v, shape.v_width, all, decay, sums.out + row * shape.v_width);
  }

  Bend bend(int64_t row, int64_t start) const {
    const float slope = a.alibi == nullptr ? 0.0f : a.alibi[head * shape.group + row % shape.group];
    return {a.softcap, slope, (float)(start - tile.position - row / shape.group)};
  }

  template <class K, class V>
  void attend_block(const Block<K, V>& b, const Sums& sums) {
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) attend_rows<4>(b, row, sums);
    if (rows - row == 3) attend_rows<3>(b, row, sums);
    if (rows - row == 2) attend_rows<2>(b, row, sums);
    if (rows - row == 1) attend_rows<1>(b, row, sums);
  }

  // Where the head's tokens of a position's block begin in the pools, in tokens; -1: nowhere.
  int64_t place_of(int64_t position) const {
    const int64_t block = a.block_tables[tile.sequence * a.table_stride + position / kBlock];
    if (block >= 0 && block < a.blocks) return (block * a.kv_heads + head) * kBlock;
    __atomic_fetch_or(a.problem, (int32_t)kNoSuchBlock, __ATOMIC_RELAXED);
    return -1;
  }

  // Scales of a block's tokens in fp32, `own` of those two where they are held in fp16.
  const float* token_scales(const float* pool, int32_t kind, int64_t place, float* own) const {
    if (kind == kScaleToken) return pool + place;
    if (kind != kScaleTokenF16) return nullptr;
    const uint16_t* held = (const uint16_t*)pool + place;
    for (int64_t t = 0; t < kBlock; t++) own[t] = f16_to_f32(held[t]);
    return own;
  }

  // Keys or values of sink tokens, a block of them [64][width], in units of what queries were
  // multiplied by, or of what the result will be.
  void widen_sinks(const uint16_t* held, int32_t format, int32_t kind, const float* scale,
                   int64_t dim, int64_t width, float* out) const {
    __builtin_memset(out, 0, kBlock * width * sizeof(float));
    for (int64_t t = 0; t < a.sink_tokens; t++)
      for (int64_t d = 0; d < width; d++) {
        const Place own(format, dim, d / W * W);
        const int64_t lane = d % W, channel = own.from + lane;
        if (lane >= own.left) continue;
        float unit = unit_of(format);
        if (kind == kScaleHead) unit *= scale[head];
        if (kind == kScaleChannel) unit *= scale[head * dim + channel];
        out[t * width + d] = bf16_to_f32(held[t * dim + channel]) / unit;
      }
  }

  // The sink tokens of a sequence that begins at `place`, in tokens of the pools.
  void attend_sinks(int64_t place, const Sums& sums) {
    const int64_t first = place / kBlock * a.sink_tokens;
    widen_sinks(a.sink_k + first * a.dim, a.k_format, a.k_scale_kind, a.k_scale, a.dim,
                shape.width, k_wide);
    widen_sinks(a.sink_v + first * a.v_dim, a.v_format, a.v_scale_kind, a.v_scale, a.v_dim,
                shape.v_width, v_wide);
    to = a.sink_tokens;
    attend_block(Block<float, float>{0, k_wide, v_wide, nullptr, nullptr, k_wide, v_wide}, sums);
    from = to;
    to = INT64_MAX;
  }

  template <class K, class V>
  void attend_split(int64_t split, const Sums& sums) {
    const int64_t k_size = a.dim / kAtOnce<K>, v_size = a.v_dim / kAtOnce<V>;  // elements of a head
    const K* k_pool = (const K*)a.k_pool;
    const V* v_pool = (const V*)a.v_pool;
    const int64_t last = split * kSplit + kSplit < tile.end ? split * kSplit + kSplit : tile.end;
    int64_t start = split * kSplit > tile.begin ? split * kSplit : tile.begin / kBlock * kBlock;
    int64_t place = place_of(start);
    if (start == 0 && place >= 0 && a.sink_tokens > 0) attend_sinks(place, sums);
    while (place >= 0) {
      const int64_t next = start + kBlock < tile.end ? place_of(start + kBlock) : place;
      Block<K, V> b = {start, k_pool + place * k_size, v_pool + place * v_size, nullptr, nullptr,
                       k_pool + next * k_size, v_pool + next * v_size};
      b.k_scale = token_scales(a.k_scale, a.k_scale_kind, place, scales);
      b.v_scale = token_scales(a.v_scale, a.v_scale_kind, place, scales + kBlock);
      const bool whole = a.dim == shape.width && a.v_dim == shape.v_width;  // vectors
      if (whole && (rows <= kDirectQueryRows || sizeof(K) == sizeof(float))) {
        attend_block(b, sums);
      } else {
        const float* k = widened(b.k, b.next_k, a.dim, shape.width, k_wide);
        const float* v = widened(b.v, b.next_v, a.v_dim, shape.v_width, v_wide);
        attend_block(Block<float, float>{start, k, v, b.k_scale, b.v_scale, k, v}, sums);
      }
      start += kBlock;
      if (start >= last) return;
      place = next;
    }
  }

  void attend(int64_t split, const Sums& sums) {
    sums.clear(rows, shape.v_width);
    if (a.k_format == kI8 && a.v_format == kI4) attend_split<int8_t, I4>(split, sums);
    if (a.k_format == kI8 && a.v_format == kI8) attend_split<int8_t, int8_t>(split, sums);
    if (a.k_format == kI4) attend_split<I4, I4>(split, sums);
    if (a.k_format == kF8) attend_split<uint8_t, uint8_t>(split, sums);
    if (a.k_format == kBF16) attend_split<uint16_t, uint16_t>(split, sums);
    if (a.k_format == kF32) attend_split<float, float>(split, sums);
  }
};

// The weights' sum of a row with that of its sink, which has the logit z and no value: both in units
// of e^-top. Where z is the larger by far, what the row gathered is nothing beside it.
static inline float with_sink(float sum, float top, float z) {
  float weight[W];
  store(weight, exp(set1(z - top)));
  return sum + weight[0];
}

static void write_row(const AttentionArgs& a, const Shape& shape, const Tile& tile, int64_t head,
                      const Sums& sums, int64_t r) {
  const int64_t own = head * shape.group + r % shape.group;
  float* to = a.out + (tile.first + r / shape.group) * a.out_stride + own * a.v_dim;
  float total = sums.sum[r] == 0.0f ? 1.0f : sums.sum[r];
  if (a.sinks != nullptr) total = with_sink(total, sums.top[r], a.sinks[own]);
  const vf sum = set1(total);
  const float v_scale = a.v_scale_kind == kScaleHead ? a.v_scale[head] : 1.0f;
  const vf scale = set1(v_scale * unit_of(a.v_format));
  const float* out = sums.out + r * shape.v_width;
  for (int64_t d = 0; d < shape.v_width; d += W) {
    const Place own(a.v_format, a.v_dim, d);
    store_part(to + own.from, mul(div(load(out + d), sum), scale), own.left);
  }
}

// Which tiles are shared out by splits: those that would keep one thread busy for more than a
// quarter of its share of everything.
struct Plan {
  double limit = 0;
  int64_t partials = 0;  // floats, of all splits of such tiles
  double cost(const Tile& tile) const { return (double)(tile.end - tile.begin) * tile.queries; }
  bool is_split(const Tile& tile) const { return tile.splits() > 1 && cost(tile) > limit; }
  Plan(const AttentionArgs& a, const Shape& shape, int threads) {
    for (Tiles tiles{a, shape}; tiles.next();) limit += cost(tiles.tile) * (double)a.kv_heads;
    if (threads > 1) limit = limit / (4 * threads);
    for (Tiles tiles{a, shape}; tiles.next();)
      if (is_split(tiles.tile)) partials += floats(tiles.tile, a, shape);
  }
  static int64_t floats(const Tile& t, const AttentionArgs& a, const Shape& shape) {
    return a.kv_heads * t.splits() * Sums::floats(t.queries * shape.group, shape.v_width);
  }
};

// Floats of `partials` that a team needs; a smaller team does not need more.
static int64_t attention_floats(const AttentionArgs& a, int threads) {
  return Plan(a, Shape(a), threads).partials;
}

static void merge_splits(const AttentionArgs& a, const Shape& shape, const Plan& plan,
                         const Team& team) {
  float* partials = a.partials;
  for (Tiles tiles{a, shape}; tiles.next();) {
    const Tile& tile = tiles.tile;
    if (!plan.is_split(tile)) continue;
    const int64_t rows = tile.queries * shape.group, size = Sums::floats(rows, shape.v_width);
    const Range heads = share(a.kv_heads, team);
    for (int64_t head = heads.begin; head < heads.end; head++) {
      float* data = partials + head * tile.splits() * size;
      Sums total(data, rows, shape.v_width);
      for (int64_t i = 1; i < tile.splits(); i++)
        merge(total, Sums(data + i * size, rows, shape.v_width), rows, shape.v_width);
      for (int64_t r = 0; r < rows; r++) write_row(a, shape, tile, head, total, r);
    }
    partials += Plan::floats(tile, a, shape);
  }
}

// Work is dealt out in turn: the items of a tile cost the same, tiles come the longest first.
static void attention(const AttentionArgs& a, const Team& team) {
  static thread_local Scratch scratch;
  const Shape shape(a);
  const Plan plan(a, shape, team.size);
  const int64_t size = Sums::floats(shape.rows, shape.v_width);
  float* own = scratch.get<float>(Attender::floats(shape) + 2 * size);
  float *sums = own + Attender::floats(shape), *partials = a.partials;
  int64_t first = 0;  // items of the tiles before
  for (Tiles tiles{a, shape}; tiles.next();) {
    const Tile& tile = tiles.tile;
    const bool split = plan.is_split(tile);
    const int64_t parts = split ? tile.splits() : 1, items = a.kv_heads * parts;
    const int64_t rows = tile.queries * shape.group, part = Sums::floats(rows, shape.v_width);
    for (int64_t item = (team.id + team.size - first % team.size) % team.size; item < items;
         item += team.size) {
      const int64_t head = item / parts;
      Attender attender(a, shape, tile, head, own);
      if (split) {
        attender.attend(tile.first_split() + item % parts,
                        Sums(partials + item * part, rows, shape.v_width));
        continue;
      }
      Sums total(sums, rows, shape.v_width), one(sums + size, rows, shape.v_width);
      attender.attend(tile.first_split(), total);
      for (int64_t i = 1; i < tile.splits(); i++) {
        attender.attend(tile.first_split() + i, one);
        merge(total, one, rows, shape.v_width);
      }
      for (int64_t r = 0; r < rows; r++) write_row(a, shape, tile, head, total, r);
    }
    first += items;
    if (split) partials += items * part;
  }
  if (plan.partials == 0) return;
  team.barrier();
  merge_splits(a, shape, plan, team);
}
