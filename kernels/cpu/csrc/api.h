// What every kernel of the CPU shares: the packed weight, the team of threads, and the table of
// functions that each instruction set fills in. No torch headers; compiled in seconds.
#pragma once
#include <sched.h>

#ifdef PTQ_DELAYS
#include <time.h>
#endif

#include <cstddef>
#include <cstdint>

namespace ptq {

// Threads that are late at random: compiled with PTQ_DELAYS, as a test does, each sleeps now and
// then where it may meet others and where it begins its share, as on a machine whose cores are shared.
#ifdef PTQ_DELAYS
static inline void late() {
  static thread_local uint64_t state = 0;
  if (state == 0) state = (uint64_t)&state | 1;  // another one for each thread
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  if (state >> 59 != 0) return;  // 31 of 32 times
  const timespec pause = {0, (long)(state >> 32 & 0x3fff)};  // at most 16 us, and what it takes
  nanosleep(&pause, nullptr);
}
#else
static inline void late() {}
#endif

enum Isa : int32_t { kPortable = 0, kAvx2 = 1, kAvx512Vnni = 2 };
// F8 is e4m3 (fn).
enum Format : int32_t { kF32 = 0, kBF16 = 1, kF8 = 2, kI8 = 3, kI4 = 4, kF16 = 5 };
enum ScaleType : int32_t { kNoScale = 0, kScaleF32 = 1, kScaleBF16 = 2, kScaleF16 = 3 };
enum ZeroType : int32_t { kNoZero = 0, kZeroI8 = 1, kZeroF32 = 2 };

// A packed weight: this header, then panels of `panel` outputs each, then the bias. Outputs are
// padded with zeros to whole panels, inputs to whole groups of `step` (kI8: 4, kI4: 8 inputs).
//
// kI8 and kI4: a panel is a run of groups; a group of g inputs (g = `group`, the last may be
// shorter; g = `inputs` where there is one scale an output) is
//     kI8: [ceil(g / 4)][panel][4]   int8
//     kI4: [ceil(g / 8)][panel][4]   bytes; byte j of a lane holds input j in its low nibble and
//                                    input 4 + j in its high one, as q + 8 (0 to 15)
//     scale [panel] fp32, or bf16 or fp16 where these lose nothing
//     zero point [panel] int8        only if zero_type; q's zero, so that x' = (q - zero) scale;
//                                    fp32 ones, for float products alone, are before all of these
// and starts at a multiple of 64 bytes. Layouts of the float formats are described in gemm_float.h.
// Weights are packed for the instruction set that packs them and stay in memory only.
struct Packed {
  uint64_t magic;  // kMagic
  int32_t isa, format;
  int64_t outputs, inputs, group;
  int32_t scale_type, zero_type, has_bias, panel;
  int64_t panel_bytes, group_bytes;  // group_bytes: of each group but the last
  int64_t data_offset, bias_offset;  // from the header's start; bias is fp32 [outputs padded]
  int64_t bytes;                     // of all
};
// Bytes of a group before its lanes: zero points in fp32, so that all is read in order.
static inline int64_t lead_of(int32_t zero_type, int64_t panel) {
  return zero_type == kZeroF32 ? panel * 4 : 0;
}
// Bytes of a scale.
static inline int64_t scale_bytes(int32_t scale_type) {
  return scale_type == kScaleF32 ? 4 : scale_type == kNoScale ? 0 : 2;
}
constexpr uint64_t kMagic = 0x5051543157454947;
constexpr int64_t kAlign = 64;

// Where a weight comes from, row-major as in the checkpoint.
struct Source {
  const void* q;        // [outputs, inputs]: fp32, bf16, e4m3 or int8 (kI4: int8 in [-8, 7])
  const void* scale;    // [outputs, groups], fp32, of kScaleF16 fp16; or null without scales
  const void* zero;     // [outputs, groups] int8 or fp32, or null if symmetric
  const float* bias;    // [outputs] or null
  int32_t format, scale_type, zero_type;
  int64_t outputs, inputs, group;
};

// What the threads of a team share, each in a cache line of its own.
struct Shared {
  alignas(64) long ticket = 0;
  void* data = nullptr;
  alignas(64) int arrived = 0;
  alignas(64) int generation = 0;
};

// One thread of a parallel region that runs a kernel together with the others.
struct Team {
  int id, size;
  Shared* shared;
  long take() const {
    late();
    return __atomic_fetch_add(&shared->ticket, 1L, __ATOMIC_RELAXED);
  }
  // Waits for all. It spins for some microseconds, as a wait is short where each thread has a core,
  // and then lets others run: where cores are shared, whom it waits for may be among them.
  void barrier() const {
    if (size == 1) return;
    wait();
    late();
  }
  void restart() const {  // all tickets taken, or none: begin again
    barrier();
    if (id == 0) __atomic_store_n(&shared->ticket, 0L, __ATOMIC_RELAXED);
    barrier();
  }
  // A pointer of the first thread's, given to all; nobody uses the last one's data any more.
  template <class T>
  T* of_first(T* own) const {
    barrier();
    if (id == 0) shared->data = own;
    barrier();
    return (T*)shared->data;
  }

 private:
  static constexpr int kSpins = 4000;
  void wait() const {
    const int generation = __atomic_load_n(&shared->generation, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&shared->arrived, 1, __ATOMIC_ACQ_REL) == size) {
      __atomic_store_n(&shared->arrived, 0, __ATOMIC_RELAXED);
      __atomic_store_n(&shared->generation, generation + 1, __ATOMIC_RELEASE);
      return;
    }
    for (int i = 0; __atomic_load_n(&shared->generation, __ATOMIC_ACQUIRE) == generation; i++) {
      if (i < kSpins) {
        pause();
      } else {
        sched_yield();
      }
    }
  }
  static void pause() {
#ifdef PTQ_X86
    __builtin_ia32_pause();
#endif
  }
};

struct Range {
  int64_t begin, end;
};
static inline Range share(int64_t items, const Team& team) {
  late();
  return {items * team.id / team.size, items * (team.id + 1) / team.size};
}

// y[rows, outputs] = x w^T + bias, added to y instead of written where `accumulate` is set.
struct LinearArgs {
  const Packed* weight;
  const void* x;         // int8 [rows, x_stride] (integer products) or fp32 (float products)
  const float* x_scale;  // int8: one for all, or one a row; float products: null
  int32_t x_is_int8, x_scale_per_row, accumulate;
  int64_t rows, x_stride, y_stride;  // strides in elements
  float* y;
};

struct AttentionArgs {
  const float* q;  // [T, q_stride], head h at h * dim
  float* out;      // [T, out_stride], head h at h * v_dim
  const void *k_pool, *v_pool;            // [blocks, kv_heads, 64, dim], [..., v_dim]; of kI4 half
  const float *k_scale, *v_scale;         // see scale kinds
  const uint16_t *sink_k, *sink_v;        // as in WriteKvArgs
  const int64_t *block_tables, *query_start, *context_len;
  int64_t sequences, table_stride, q_stride, out_stride;
  const float *sinks, *alibi;             // [heads], or null
  int64_t heads, kv_heads, dim, v_dim, window;  // window: 0 for all
  int32_t k_format, v_format;             // kF32, kBF16, kI8, kF8, kI4: see kv_write.h
  int32_t k_scale_kind, v_scale_kind;     // ScaleKind
  float softmax_scale, softcap;  // softcap: bound of the logits, 0 for none
  int64_t blocks;    // of the pools; a table's entry beyond them is a problem
  int64_t sink_tokens;  // 0 for none
  int32_t* problem;  // gets a Problem
  float* partials;   // as many floats as attention_floats() says for the team; shared by it
};
enum ScaleKind : int32_t {
  kScaleNone = 0,
  kScaleHead = 1,
  kScaleChannel = 2,
  kScaleToken = 3,
  kScaleTokenF16 = 4,  // the pointer is one to fp16
};

struct WriteKvArgs {
  const float *k, *v;  // [T, stride], head h at h * dim; [T, v_stride], at h * v_dim
  void *k_pool, *v_pool;
  float *k_scale, *v_scale;  // of tokens: written
  const float* k_offset;     // [kv_heads, dim], subtracted from k, or null
  const float* k_feedback;   // [kv_heads, dim, dim] of int4 keys: see kv_write.h; or null
  // bf16 of tokens at the first positions of a sequence, by its first block: [blocks, kv_heads,
  // sink_tokens, dim], [..., v_dim]; or null.
  uint16_t *sink_k, *sink_v;
  const int64_t *slots, *positions;  // positions: read where there are sink tokens
  int64_t tokens, stride, v_stride, kv_heads, dim, v_dim;
  int32_t k_format, v_format, k_scale_kind, v_scale_kind;
  int64_t blocks;    // of the pools
  int64_t sink_tokens;
  int32_t* problem;  // a token with one is not written
};

// What kernels find wrong with the data, for the caller to report.
enum Problem : int32_t { kNonfinite = 1, kNoSuchBlock = 2 };

// How the input of a linear layer is quantized.
struct QuantizeArgs {
  const float* x;      // [rows, x_stride]
  int64_t rows, columns, x_stride, group;  // group: inputs that share a dynamic scale
  const float* scale;  // one static scale, or null where scales come from the data
  int32_t format;      // kI8: integers and scales; kF8: values as they stand for (q * scale)
  int8_t* q;           // kI8: [rows, columns]
  float* values;       // kF8: [rows, columns]
  float* scales;       // dynamic: [rows, groups], or null if they are not wanted
  int32_t* problem;    // kNonfinite where a scale cannot be had, or null
};

// A tile of a weight that is rounded with feedback, columns apart by `stride` and their rows adjacent;
// see feedback.h.
constexpr int kFeedbackRows = 64;  // at most
struct FeedbackTile {
  float* x;             // what is rounded, or the gradients that `values` are moved by; spent
  float* values;        // null, or values of the grid that are moved
  const float *scale, *zero;                // of each element; zero: null if symmetric
  const float *row_factor, *column_factor;  // [rows, row_stride], [columns, column_stride]
  float *q, *errors;    // found: of the grid, with the zero point; errors, or moves of `values`
  int64_t rows, columns, stride, row_stride, column_stride;
  float low, high;      // of the grid
  int32_t mantissa, exponent;  // bits, and of the smallest normal one; mantissa -1: whole numbers
};

// An adapter of a linear layer, y += B (A x); layers that were merged have a part each. See
// elementwise.h.
// A is held as [rank / 4, inputs / 16, 4, 16], filled up with zeros, and B, transposed, likewise.
struct LoraPart {
  const void *a, *b;
  int64_t rank, first, outputs;  // first: of the merged layer's outputs
  int64_t format;                // kF32 or kBF16, of both
};
struct Lora {
  const LoraPart* parts;
  int64_t count, inputs;
};
constexpr int64_t kLoraRanks = 4, kLoraRun = 16;
constexpr int kLoraRows = 16;  // that go through one together

enum Activation : int32_t { kSilu = 0, kGeluTanh = 1, kGelu = 2 };

// The functions of one instruction set. Each is called by all threads of a team; the caller puts
// barriers between calls. What they need of scratch they keep per thread.
struct Kernels {
  Isa isa;
  int64_t (*pack_bytes)(const Source&);
  void (*pack)(const Source&, void* out, const Team&);
  void (*linear)(const LinearArgs&, const Team&);
  void (*quantize)(const QuantizeArgs&, const Team&);
  void (*rms_norm)(const float* x, const float* weight, float eps, float* y, int64_t rows,
                   int64_t columns, int64_t x_stride, int64_t y_stride, const Team&);
  void (*gated_product)(const float* gate, const float* up, float* y, int64_t rows,
                        int64_t columns, int64_t in_stride, int64_t y_stride, Activation, const Team&);
  // Rows with the same adapter, at most kLoraRows of them, by one thread.
  void (*lora)(const Lora&, const float* const* x, float* const* y, int rows);
  void (*softcap)(const float* x, float bound, float* y, int64_t count, const Team&);
  void (*rope)(const float* x, const float* cos, const float* sin, float* y, int64_t rows,
               int64_t heads, int64_t dim, int64_t x_stride, int64_t y_stride, const Team&);
  void (*turn)(const float* x, float* y, int64_t rows, int64_t heads, int64_t dim, int64_t size,
               int64_t x_stride, int64_t y_stride, const Team&);
  void (*write_kv)(const WriteKvArgs&, const Team&);
  void (*attention)(const AttentionArgs&, const Team&);
  int64_t (*attention_floats)(const AttentionArgs&, int threads);
  int64_t (*read_all)(const void* data, int64_t bytes, const Team&);  // limits.h
  double (*multiply_add)(int32_t format, int64_t rounds);
  void (*feedback)(const FeedbackTile&);  // by one thread
  // Gives [5, rows]: see compare.h.
  void (*compare)(const float* p, const float* q, const int64_t* targets, double* out,
                  int64_t rows, int64_t columns, const Team&);
};

extern const Kernels kKernelsPortable;
#ifdef PTQ_X86
extern const Kernels kKernelsAvx2;
extern const Kernels kKernelsAvx512;
#endif

}  // namespace ptq
