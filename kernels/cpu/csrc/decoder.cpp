// One step of a decoder, from token ids to logits, by one team of threads: the same kernels in the
// same order as when each is called from Python, so that the logits have the same bits, without
// what it costs to call them one by one.
//
//     h = norm(x);  q, k, v = qkv(h);  q, k = rope(norm(q), norm(k));  cache <- k, v
//     x = x + norm(o(attention(q, cache)))
//     h = norm(x);  x = x + norm(down(activation(gate(h)) * up(h)))
//
// Each norm is there or not. Without one after it, a layer adds to x what it gives.
//
// Who waits for whom, the one rule: a token is one thread's, `tokens_`, from its embedding to its last
// norm. That thread alone writes the token's rows and its place in the cache, and reads nothing of
// other tokens, so that it waits for nobody. Only `linear` and `attend` read what others made, and
// write where others read: they begin and end with a barrier, and nothing else has one. What comes
// after the last `linear` touches the logits alone.
#include "decoder.h"

#include <string.h>

#include "lora_rows.h"
#include "rows.h"

namespace ptq {
namespace {

int64_t rounded(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// The buffers of a step, cut from its workspace.
struct Buffers {
  float *x, *h, *qkv, *attended, *gate_up, *product, *scales;
  int8_t* q;       // integers, or
  float* values;   // values, of the widest input
  int64_t bytes;

  Buffers(const Decoder& d, int64_t tokens, char* base) {
    const int64_t wide = widest(d);
    int64_t at = 0;
    const auto take = [&](int64_t bytes_each) {
      char* p = base + at;
      at += rounded(tokens * bytes_each);
      return p;
    };
    x = (float*)take(d.hidden * 4);
    h = (float*)take(d.hidden * 4);
    qkv = (float*)take((d.heads + 2 * d.kv_heads) * d.dim * 4);
    attended = (float*)take(d.heads * d.dim * 4);
    gate_up = (float*)take(2 * d.intermediate * 4);
    product = (float*)take(d.intermediate * 4);
    scales = (float*)take(4);
    values = (float*)take(wide * 4);
    q = (int8_t*)values;
    bytes = at;
  }

  static int64_t widest(const Decoder& d) {
    int64_t wide = d.hidden > d.intermediate ? d.hidden : d.intermediate;
    return wide > d.heads * d.dim ? wide : d.heads * d.dim;
  }
};

AttentionArgs attention_args(const Decoder& d, const Step& s, const Block& block) {
  AttentionArgs args = {};
  args.k_pool = block.k_pool;
  args.v_pool = block.v_pool;
  args.k_scale = block.k_scale;
  args.v_scale = block.v_scale;
  args.block_tables = s.block_tables;
  args.query_start = s.query_start;
  args.context_len = s.context_len;
  args.sequences = s.sequences;
  args.table_stride = s.table_stride;
  args.q_stride = (d.heads + 2 * d.kv_heads) * d.dim;
  args.out_stride = d.heads * d.dim;
  args.sinks = block.sinks;
  args.heads = d.heads;
  args.kv_heads = d.kv_heads;
  args.dim = args.v_dim = d.dim;
  args.window = block.window;
  args.k_format = block.k_format;
  args.v_format = block.v_format;
  args.k_scale_kind = block.k_scale_kind;
  args.v_scale_kind = block.v_scale_kind;
  args.softmax_scale = d.softmax_scale;
  args.softcap = d.softcap;
  args.blocks = block.cache_blocks;
  args.sink_k = block.sink_k;
  args.sink_v = block.sink_v;
  args.sink_tokens = block.sink_k == nullptr ? 0 : d.sink_tokens;
  args.problem = s.problem;
  args.partials = s.partials;
  return args;
}

// A team of one: what a thread does on its own rows, without barriers.
Team alone(const Team& team) { return Team{0, 1, team.shared}; }

class StepRunner {
 public:
  StepRunner(const Kernels& kernels, const Decoder& decoder, const Step& step, const Team& team)
      : kernels_(kernels), d_(decoder), s_(step), team_(team), solo_(alone(team)),
        tokens_(share(step.tokens, team)), b_(decoder, step.tokens, step.workspace) {
    for (int64_t t = 0; t < s_.tokens; t++) any_sink_ |= is_sink(t);
  }

  void run() {
    embed();
    for (int64_t i = 0; i < d_.layers; i++) {
      tap(i);
      block(d_.blocks[i], s_.adapters == nullptr ? nullptr : s_.loras + i * kAdapted);
    }
    tap(d_.layers);
    if (s_.wanted > 0) logits();  // else prompts that go on
  }

 private:
  void embed() {
    for (int64_t t = tokens_.begin; t < tokens_.end; t++) {
      float* to = b_.x + t * d_.hidden;
      if (d_.embedding_format == kF32) {
        memcpy(to, (const float*)d_.embedding + s_.ids[t] * d_.hidden, d_.hidden * 4);
      } else if (d_.embedding_format == kPackedRows) {
        unpack_row(*(const Packed*)d_.embedding, s_.ids[t], to);
      } else {
        const uint8_t* from = (const uint8_t*)d_.embedding + s_.ids[t] * d_.hidden * 2;
        for (int64_t i = 0; i < d_.hidden; i++)
          to[i] = value_at(d_.embedding_format, from, i, 0.0f);
      }
      if (d_.embedding_scale != 1.0f)
        for (int64_t i = 0; i < d_.hidden; i++) to[i] *= d_.embedding_scale;
    }
  }

  // Tells what a block reads of this thread's tokens, if that is asked for.
  void tap(int64_t index) {
    for (int64_t i = 0; i < s_.tapped; i++)
      for (int64_t t = tokens_.begin; s_.taps[i] == index && t < tokens_.end; t++)
        memcpy(s_.hidden + (t * s_.tapped + i) * d_.hidden, b_.x + t * d_.hidden, d_.hidden * 4);
  }

  // `loras`: those of this block in the first slot, or null where no token has an adapter.
  void block(const Block& block, const Lora* loras) {
    const int64_t q_size = d_.heads * d_.dim, kv_size = d_.kv_heads * d_.dim;
    const float* read = normed(block.before_attention, block.qkv);
    linear(block.qkv, read, s_.tokens, d_.hidden, b_.qkv, q_size + 2 * kv_size, false);
    adapt(loras, kQkv, read, d_.hidden, b_.qkv, q_size + 2 * kv_size);
    for (int64_t t = tokens_.begin; t < tokens_.end; t++) cache(block, t);
    attend(block);
    added(block.o, b_.attended, q_size, block.after_attention, loras, kO);
    read = normed(block.before_feed_forward, block.gate_up);
    linear(block.gate_up, read, s_.tokens, d_.hidden, b_.gate_up, 2 * d_.intermediate, false);
    adapt(loras, kGateUp, read, d_.hidden, b_.gate_up, 2 * d_.intermediate);
    for (int64_t t = tokens_.begin; t < tokens_.end; t++) {
      const float* gate = b_.gate_up + t * 2 * d_.intermediate;
      kernels_.gated_product(gate, gate + d_.intermediate, b_.product + t * d_.intermediate, 1,
                             d_.intermediate, 0, 0, (Activation)d_.activation, solo_);
    }
    added(block.down, b_.product, d_.intermediate, block.after_feed_forward, loras, kDown);
  }

  // norm(x), or x where there is no norm, quantized as `next` wants it.
  const float* normed(const float* weight, const Layer& next) {
    if (weight != nullptr) norm(b_.x, weight);
    const float* rows = weight != nullptr ? b_.h : b_.x;
    prepare(next, rows, d_.hidden);
    return rows;
  }

  // h = norm(rows), of this thread's tokens; rows may be h.
  void norm(const float* rows, const float* weight) {
    for (int64_t t = tokens_.begin; t < tokens_.end; t++)
      kernels_.rms_norm(rows + t * d_.hidden, weight, d_.eps, b_.h + t * d_.hidden, 1, d_.hidden, 0,
                        0, solo_);
  }

  // x = x + norm(layer(rows)), or x + layer(rows) where there is no norm.
  void added(const Layer& layer, const float* rows, int64_t inputs, const float* weight,
             const Lora* loras, Adapted which) {
    prepare(layer, rows, inputs);
    if (weight == nullptr && loras == nullptr)
      return linear(layer, rows, s_.tokens, inputs, b_.x, d_.hidden, true);
    linear(layer, rows, s_.tokens, inputs, b_.h, d_.hidden, false);
    adapt(loras, which, rows, inputs, b_.h, d_.hidden);
    if (weight != nullptr) norm(b_.h, weight);
    for (int64_t i = tokens_.begin * d_.hidden; i < tokens_.end * d_.hidden; i++)
      b_.x[i] = b_.x[i] + b_.h[i];
  }

  bool is_sink(int64_t t) const { return s_.positions[t] < d_.sink_tokens; }

  // Whether rows of this step have two static scales.
  bool has_two_scales(const Layer& layer) const { return layer.sink_scale != nullptr && any_sink_; }

  // Quantizes this thread's rows for a layer.
  void prepare(const Layer& layer, const float* x, int64_t columns) {
    const auto run = [&](int64_t first, int64_t end, const float* scale) {
      quantize(layer, scale, x + first * columns, columns, first, end - first);
    };
    if (layer.kind != kInputFloat && tokens_.end > tokens_.begin) {
      if (!has_two_scales(layer)) {
        run(tokens_.begin, tokens_.end, layer.scale);
      } else {
        for (int64_t t = tokens_.begin; t < tokens_.end; t++) {
          const float* own = is_sink(t) ? layer.sink_scale : layer.scale;
          run(t, t + 1, own);
          b_.scales[t] = *own;
        }
      }
    }
  }

  void quantize(const Layer& layer, const float* scale, const float* x, int64_t columns,
                int64_t first, int64_t rows) {
    QuantizeArgs args = {};
    args.x = x;
    args.rows = rows;
    args.columns = args.x_stride = columns;
    args.group = layer.group > 0 ? layer.group : columns;
    args.scale = scale;
    args.format = layer.kind == kInputI8 ? kI8 : kF8;
    args.q = b_.q + first * columns;
    args.values = b_.values + first * columns;
    args.scales = layer.kind == kInputI8 ? b_.scales + first : nullptr;
    args.problem = s_.problem;
    kernels_.quantize(args, solo_);
  }

  // y = layer(x), or y += layer(x), of rows that `prepare` has quantized: all threads together.
  void linear(const Layer& layer, const float* x, int64_t rows, int64_t inputs, float* y,
              int64_t outputs, bool accumulate) {
    const bool integers = layer.kind == kInputI8;
    LinearArgs args = {};
    args.weight = layer.weight;
    args.x = integers ? (const void*)b_.q : layer.kind == kInputF8 ? b_.values : x;
    args.x_is_int8 = integers;
    args.x_scale_per_row = layer.scale == nullptr || has_two_scales(layer);
    args.x_scale = args.x_scale_per_row ? b_.scales : layer.scale;
    args.accumulate = accumulate;
    args.rows = rows;
    args.x_stride = inputs;
    args.y_stride = outputs;
    args.y = y;
    team_.barrier();
    kernels_.linear(args, team_);
    team_.barrier();
  }

  // y += what adapters make of x, of this thread's tokens.
  void adapt(const Lora* loras, Adapted which, const float* x, int64_t inputs, float* y,
             int64_t outputs) {
    if (loras != nullptr)
      add_loras(kernels_, loras + which, d_.layers * kAdapted, s_.adapters, tokens_, x, inputs, y,
                outputs);
  }

  // Norm and rotation of a token's q and k, in place, and its way into the cache.
  void cache(const Block& block, int64_t t) {
    const int64_t stride = (d_.heads + 2 * d_.kv_heads) * d_.dim, position = s_.positions[t];
    float* q = b_.qkv + t * stride;
    float* k = q + d_.heads * d_.dim;
    if (block.q_norm != nullptr) {
      const int64_t parts = block.whole_norms ? 1 : d_.heads, size = d_.heads * d_.dim / parts;
      kernels_.rms_norm(q, block.q_norm, d_.eps, q, parts, size, size, size, solo_);
      const int64_t k_parts = block.whole_norms ? 1 : d_.kv_heads;
      const int64_t k_size = d_.kv_heads * d_.dim / k_parts;
      kernels_.rms_norm(k, block.k_norm, d_.eps, k, k_parts, k_size, k_size, k_size, solo_);
    }
    const float *cos = block.cos + position * d_.dim, *sin = block.sin + position * d_.dim;
    kernels_.rope(q, cos, sin, q, 1, d_.heads, d_.dim, stride, stride, solo_);
    kernels_.rope(k, cos, sin, k, 1, d_.kv_heads, d_.dim, stride, stride, solo_);
    if (d_.growth != nullptr)
      for (int64_t i = 0; i < d_.heads * d_.dim; i++) q[i] *= d_.growth[position];
    if (block.turn > 0) {
      kernels_.turn(q, q, 1, d_.heads, d_.dim, block.turn, stride, stride, solo_);
      kernels_.turn(k, k, 1, d_.kv_heads, d_.dim, block.turn, stride, stride, solo_);
    }
    WriteKvArgs args = {};
    args.k = k;
    args.v = k + d_.kv_heads * d_.dim;
    args.k_pool = block.k_pool;
    args.v_pool = block.v_pool;
    args.k_scale = block.k_scale;
    args.v_scale = block.v_scale;
    args.slots = s_.slots + t;
    args.positions = s_.positions + t;
    args.sink_k = block.sink_k;
    args.sink_v = block.sink_v;
    args.sink_tokens = block.sink_k == nullptr ? 0 : d_.sink_tokens;
    args.tokens = 1;
    args.stride = args.v_stride = stride;
    args.kv_heads = d_.kv_heads;
    args.dim = args.v_dim = d_.dim;
    args.k_format = block.k_format;
    args.v_format = block.v_format;
    args.k_offset = block.k_offset;
    args.k_feedback = block.k_feedback;
    args.k_scale_kind = block.k_scale_kind;
    args.v_scale_kind = block.v_scale_kind;
    args.blocks = block.cache_blocks;
    args.problem = s_.problem;
    kernels_.write_kv(args, solo_);
  }

  // Attention of all tokens: all threads together.
  void attend(const Block& block) {
    AttentionArgs args = attention_args(d_, s_, block);
    args.q = b_.qkv;
    args.out = b_.attended;
    team_.barrier();
    kernels_.attention(args, team_);
    team_.barrier();
  }

  // Rows that are wanted, normed by whose they are and put side by side where `linear` reads them.
  void logits() {
    const bool quantized = d_.head.kind != kInputFloat;
    for (int64_t i = 0; i < s_.wanted; i++) {
      const int64_t t = s_.rows[i];
      if (t < tokens_.begin || t >= tokens_.end) continue;
      float* to = quantized ? b_.h + t * d_.hidden : b_.values + i * d_.hidden;
      kernels_.rms_norm(b_.x + t * d_.hidden, d_.norm, d_.eps, to, 1, d_.hidden, 0, 0, solo_);
      if (quantized) quantize(d_.head, d_.head.scale, to, d_.hidden, i, 1);
    }
    linear(d_.head, b_.values, s_.wanted, d_.hidden, s_.logits, d_.vocabulary, false);
    const int64_t count = s_.wanted * d_.vocabulary;
    if (d_.logits_softcap != 0.0f)
      kernels_.softcap(s_.logits, d_.logits_softcap, s_.logits, count, team_);
  }

  const Kernels& kernels_;
  const Decoder& d_;
  const Step& s_;
  const Team& team_;
  const Team solo_;
  const Range tokens_;
  const Buffers b_;
  bool any_sink_ = false;
};

}  // namespace

int64_t decoder_partials(const Kernels& kernels, const Decoder& decoder, const Step& step,
                         int threads) {
  int64_t most = 0;
  for (int64_t i = 0; i < decoder.layers; i++) {
    const AttentionArgs args = attention_args(decoder, step, decoder.blocks[i]);
    const int64_t floats = kernels.attention_floats(args, threads);
    if (floats > most) most = floats;
  }
  return most;
}

int64_t decoder_workspace(const Decoder& decoder, int64_t tokens) {
  return Buffers(decoder, tokens, nullptr).bytes;
}

void decoder_step(const Kernels& kernels, const Decoder& decoder, const Step& step,
                  const Team& team) {
  StepRunner(kernels, decoder, step, team).run();
}

}  // namespace ptq
