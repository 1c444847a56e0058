// One step of a whole decoder: structures that Python fills in once for each model, and
// for each step. See decoder.cpp for what is done with them.
#pragma once
#include "api.h"

namespace ptq {

constexpr int32_t kPackedRows = -1;  // an embedding's format: rows of a packed weight
enum InputKind : int32_t { kInputFloat = 0, kInputI8 = 1, kInputF8 = 2 };

// The linear layers of a block that adapters add to, in this order.
enum Adapted : int64_t { kQkv = 0, kO = 1, kGateUp = 2, kDown = 3, kAdapted = 4 };

// A linear layer and how its input is quantized (scale: a static one, or null; sink_scale: of rows
// of sink tokens, or null where they have the same; group as in QuantizeArgs).
struct Layer {
  const Packed* weight;
  const float *scale, *sink_scale;
  int64_t group;
  int32_t kind, unused;
};

struct Block {
  Layer qkv, o, gate_up, down;
  const float *cos, *sin;              // [positions, dim], the two halves equal
  const float *before_attention, *after_attention;        // norms [hidden], or null
  const float *before_feed_forward, *after_feed_forward;  // likewise
  const float *q_norm, *k_norm;  // [dim], or of the whole projection, or null
  const float* sinks;            // [heads] or null
  void *k_pool, *v_pool;         // as in AttentionArgs
  float *k_scale, *v_scale;
  const float *k_offset, *k_feedback;  // as in WriteKvArgs
  uint16_t *sink_k, *sink_v;     // likewise
  int64_t window, cache_blocks;
  int64_t turn;  // channels of q and k that are turned together, or 0
  int32_t k_format, v_format, k_scale_kind, v_scale_kind;
  int32_t whole_norms;  // q_norm and k_norm are of the whole projection
  int32_t unused;
};

struct Decoder {
  const Block* blocks;
  const void* embedding;    // [vocabulary, hidden], fp32, bf16 or fp16; or a packed weight
  const float* norm;        // [hidden]
  const float* growth;      // [positions], factor of q, or null
  Layer head;
  int64_t layers, hidden, heads, kv_heads, dim, intermediate, vocabulary;
  int32_t embedding_format, activation;
  float embedding_scale, eps, softmax_scale;
  float softcap, logits_softcap;  // 0 for none
  int32_t sink_tokens;            // first positions whose tokens have scales of their own
};

struct Step {
  const int64_t *ids, *positions, *slots;  // [tokens]
  const int64_t *block_tables;             // [sequences, table_stride]
  const int64_t *query_start, *context_len;
  const int64_t* rows;  // [wanted]: tokens whose logits are wanted
  int64_t tokens, sequences, table_stride, wanted;
  float* logits;    // [wanted, vocabulary]
  char* workspace;  // of decoder_workspace() bytes, aligned to 64
  int32_t* problem;
  float* partials;  // decoder_partials() of them
  const int64_t* taps;  // [tapped]: blocks whose input is returned; `layers` for the last one's output
  float* hidden;        // [tokens, tapped, hidden]
  int64_t tapped;
  const int64_t* adapters;  // [tokens]: slot of each token's adapter, negative for none; or null
  const Lora* loras;        // [slots, layers, kAdapted]
};

int64_t decoder_partials(const Kernels& kernels, const Decoder& decoder, const Step& step,
                         int threads);
int64_t decoder_workspace(const Decoder& decoder, int64_t tokens);
void decoder_step(const Kernels& kernels, const Decoder& decoder, const Step& step,
                  const Team& team);

}  // namespace ptq
