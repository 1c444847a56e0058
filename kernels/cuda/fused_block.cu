// From one attention to the next in one persistent kernel, which may begin with the attention: see
// fused_block.py, which defines
//
//   BITS                            of weights: 4 or 16 (bf16 inputs), or 8 (int8 inputs)
//   ATTENTION, HIDDEN, INNER, QKV   inputs of o, channels, inputs of down, outputs of q/k/v, or 0
//   ZEROS                           1 where the last four bits of a scale are a zero point
//   STATIC                          1 where inputs of o and of down are int8 by static scales
//   KV_HEADS                        of the attention that it begins with, see attention.cuh, or 0
//   EXPERTS, CHOSEN                 of a mixture, INNER being that of one; else 0 and 1
//   ROWS                            tokens, 1 to 4; of a mixture 1
//   PROGRAMS, WARPS                 programs of the grid, one for each SM, and warps of each
//   DEPTH, CHUNK                    slots of a warp's ring, and groups of outputs in a slot
//   SHARED                          bytes of shared memory
//
// Of a mixture the outputs of gate and up are those of the chosen experts, one after the other, and
// so are the inputs of down. A "group" is 16 outputs, a "block" 128 inputs; a program owns whole
// groups of each product, and warp w of it multiplies blocks w, w + WARPS, ... of all of them.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

enum Product { O, GATE_UP, DOWN, NEXT_QKV, PRODUCTS };

#include "arguments.cuh"

constexpr int GROUP = 16;
constexpr int STEPS = QKV ? PRODUCTS : NEXT_QKV;  // products that there are
constexpr u32 BLANK = ~0u;  // a NaN that no operation gives: what is not handed on yet
constexpr int THREADS = WARPS * 32;

__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int outputs(int p) {
  return p == GATE_UP ? 2 * INNER : p == NEXT_QKV ? QKV : HIDDEN;
}
__host__ __device__ constexpr int inputs(int p) {
  return p == O ? ATTENTION : p == DOWN ? CHOSEN * INNER : HIDDEN;
}
__host__ __device__ constexpr int blocks(int p) { return inputs(p) / 128; }
__host__ __device__ constexpr int own_blocks(int p) { return (blocks(p) + WARPS - 1) / WARPS; }
__host__ __device__ constexpr bool normed(int p) { return p == GATE_UP || p == NEXT_QKV; }
__host__ __device__ constexpr int sides(int p) { return p == GATE_UP ? 2 : 1; }
__host__ __device__ constexpr int groups(int p) {
  return outputs(p) / sides(p) / GROUP * (p == GATE_UP ? CHOSEN : 1);
}
__host__ __device__ constexpr int most(int p) { return (groups(p) + PROGRAMS - 1) / PROGRAMS; }
__host__ __device__ constexpr int chunks(int p) { return (most(p) + CHUNK - 1) / CHUNK; }
__host__ __device__ constexpr int chunk_start(int p, int i) {
  return i < chunks(p) ? CHUNK * i : most(p);
}
__host__ __device__ constexpr int turns(int p) {  // of all threads, over a side's outputs
  return (most(p) * GROUP * ROWS + THREADS - 1) / THREADS;
}
constexpr int WIDEST = GROUP * larger(larger(most(O), 2 * most(GATE_UP)), most(NEXT_QKV));
constexpr bool IN_PLACE = BITS == 8 && ROWS > 2;  // parts of sums take the place of inputs
constexpr int APART = ROWS > 2 ? 8 : 0;       // words, so that rows of parts are in other banks
constexpr int LONGEST = larger(larger(blocks(O), blocks(DOWN)), blocks(GATE_UP));
// Blocks of inputs that are laid at once: of int8 all, else a warp's when it multiplies it.
constexpr int LAID = BITS == 8 ? LONGEST : EXPERTS ? larger(WARPS, blocks(GATE_UP)) : WARPS;
constexpr int SCORES = larger(1, (EXPERTS + PROGRAMS - 1) / PROGRAMS);  // of a program

#include "primitives.cuh"

// What differs by the weights' bits: how large a slot is, what inputs and sums are.
#if BITS != 8
constexpr int SLOT = CHUNK * (BITS == 4 ? 1024 + 64 : 4096);  // bytes: weights, then scales
constexpr int COLUMNS = BITS == 4 ? 2 * ROWS : ROWS;  // of inputs in a product: of 4 bits two bytes
typedef float Part;
typedef u16 Inner;              // bf16, of gate times up, and of attention
constexpr int FIRST = DEPTH;    // slots that are asked for before attention
__device__ __forceinline__ Inner inner_bits(float value, float) { return rounded(value); }
#else
constexpr int SLOT = CHUNK * 2048;
constexpr int COLUMNS = ROWS;
typedef int Part;
constexpr int FIRST = 2;
// A number times a factor, as an int8 in the last byte.
__device__ __forceinline__ u32 quantized(float value, float times) {
  const float near = fminf(fmaxf(value * times, -127.f), 127.f);
  return __float_as_uint(near + INTEGER) & 0xffu;
}
#if STATIC
typedef unsigned char Inner;  // int8, its bits turned so that none of -127 to 127 is blank
constexpr u32 TURNED = 0x7f7f7f7fu;
__device__ __forceinline__ Inner inner_bits(float value, float times) {
  return quantized(value, times) ^ (TURNED & 0xff);
}
#else
typedef u32 Inner;  // fp32, as it is quantized
__device__ __forceinline__ Inner inner_bits(float value, float) { return __float_as_uint(value); }
#endif
#endif

constexpr int WORDS = BITS == 16 ? 64 : 32;  // of a block of a column

// Hands a value on to all programs; its place in the other set, so many bytes from it, becomes blank.
template <typename Bits>
__device__ __forceinline__ void hand_on(Bits* place, Bits bits, int other) {
  write_now(place, bits);
  write_now((Bits*)((char*)place + other), (Bits)BLANK);
}

#if KV_HEADS
#include "attention.cuh"
#else
constexpr int HANDED_IN = 0;
#endif

// Shared memory of a program.
struct Memory {
  char ring[WARPS][DEPTH][SLOT];
#if BITS == 8 && ROWS > 2
  union {
#else
  struct {
#endif
    union {
      u32 x[LAID][COLUMNS][WORDS];
#if KV_HEADS
      Attending attending;
#endif
    };
    Part part[WARPS][ROWS][WIDEST + APART];
  };
  float2 unit[LAID][ROWS];     // of 4 bits: what inputs count in, and (as bits) their sum
  float scale[2][ROWS];        // of 8 bits: what inputs of this product and of the next count in
  u64 barrier[WARPS][DEPTH];
  u64 finished;                // a barrier: all warps have read the parts of a product
  float squares[ROWS][WARPS], tops[ROWS][WARPS];
  float score[SCORES][WARPS];  // parts of the router's outputs
  u32 logit[larger(1, EXPERTS)];
  int expert[WARPS][CHOSEN];   // as each warp has chosen them
  float share[WARPS][CHOSEN];
};

static_assert(sizeof(Memory) <= SHARED, "fused_block.py counts shared memory");

// The first of the inputs of a block that a lane takes as pairs: the others are 1 and 64 further on.
__device__ __forceinline__ int first_pair(int lane) {
  return 32 * (lane >> 4) + 8 * ((lane >> 2) & 3) + 2 * (lane & 3);
}

// Groups that this program owns of a product, of one side.
template <int P>
__device__ __forceinline__ int owned() {
  if (groups(P) % PROGRAMS == 0) return most(P);
  return max(0, min(groups(P) - (int)blockIdx.x * most(P), most(P)));
}

// A warp's ring of weights: slots are asked for and taken in one order, over all products.
struct Ring {
  u32 slots, barriers;        // in shared memory
  u32 take, give;             // the slot that is taken, or asked for, next
  u32 parity;                 // of the barrier of `take`
  int room;                   // slots that nothing was asked into
  u32 product, block, chunk;  // what is asked for next
  u32 known;                  // the first product of which it is not known which weights it takes
  u64 policy;

  __device__ __forceinline__ u32 slot() const { return slots + give * SLOT; }
  __device__ __forceinline__ u32 barrier() const { return barriers + give * 8; }
};

// The static scale of a row of int8 inputs; and by what the row is multiplied where all have one.
__device__ __forceinline__ float static_scale_of(const Block& own, int product, int row) {
  return own.static_scale[product][own.sinks[product] ? own.sinks[product][row] : 0];
}
__device__ __forceinline__ float static_times_of(const Block& own, int product, int row) {
  return STATIC ? __fdiv_rn(1.f, static_scale_of(own, product, row)) : 1.f;
}

// The blocks of a row that a warp multiplies, a bit each.
template <int P>
__device__ __forceinline__ u32 own_bits(int warp) {
  static_assert(own_blocks(P) < 32, "blocks of a warp are bits of a word");
  return (1u << (blocks(P) - warp + WARPS - 1) / WARPS) - 1;
}

// Leaves this warp's sum of a row's squares, of which this thread has some.
__device__ __forceinline__ void leave_squares(Memory& memory, float sum, int row, int warp,
                                              int lane) {
  sum = warp_sum(sum);
  if (lane == 0) memory.squares[row][warp] = sum;
}
// What a normed row is multiplied by, when all warps have left these.
__device__ __forceinline__ float norm_factor(const Block& own, const Memory& memory, int row) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) sum += memory.squares[row][i];
  return rsqrtf(sum / HIDDEN + own.eps);
}

// Leaves a warp's sums of bf16 or int8 inputs: of each group a lane has outputs `lane / 4` and 8 further
// on, and of these PAIR rows from 2 (lane % 4) on.
template <int PAIR, int GROUPS>
__device__ __forceinline__ void leave_sums(Memory& memory, const Part (&sum)[GROUPS][2 * PAIR],
                                           int warp, int lane) {
  const int output = lane >> 2, first = lane % 4 * 2;
  if (first >= ROWS) return;
#pragma unroll
  for (int i = 0; i < GROUPS; i++) {
#pragma unroll
    for (int j = 0; j < PAIR; j++) {
      if (first + j >= ROWS) continue;
      memory.part[warp][first + j][i * GROUP + output] = sum[i][j];
      memory.part[warp][first + j][i * GROUP + output + 8] = sum[i][j + PAIR];
    }
  }
}

// Gate and up take turns in one place of sums, so that there is one code for both.
template <typename Sum, int GROUPS, int EACH>
__device__ __forceinline__ void swap_sides(Sum (&sum)[GROUPS][EACH]) {
#pragma unroll
  for (int i = 0; i < GROUPS / 2 * EACH; i++) {
    Sum &one = sum[i / EACH][i % EACH], &other = sum[i / EACH + GROUPS / 2][i % EACH];
    const Sum kept = one;
    one = other, other = kept;
  }
}

#include "mixture.cuh"
#if BITS == 4
#include "weights_4_bits.cuh"
#elif BITS == 16
#include "weights_16_bits.cuh"
#else
#include "weights_8_bits.cuh"
#endif

#include "ring.cuh"

// Leaves this warp's part of all outputs that the program owns, both sides of gate and up.
template <int P>
__device__ __forceinline__ void multiply(const Block& own, Memory& memory, Ring& ring, Rows<P>& rows,
                                         Router& router, int warp, int lane) {
  Sums<P> sums;
#pragma unroll 1
  for (int block = warp, i = 0; block < blocks(P); block += WARPS, i++) {
    if (!Rows<P>::WHOLE) rows.lay(memory, router, i, warp, lane);
    const Inputs x(memory, Rows<P>::place(block, warp), lane);
#pragma unroll(BITS == 16 ? sides(P) : 1)
    for (int side = 0; side < sides(P); side++) {
#pragma unroll
      for (int chunk = 0; chunk < chunks(P); chunk++) {
        wait_for(ring.barriers + ring.take * 8, ring.parity);
        const char* slot = memory.ring[warp][ring.take];
        const int first = chunk_start(P, chunk);
#pragma unroll
        for (int k = 0; k < chunk_start(P, chunk + 1) - first; k++) {
          sums.add(first + k, slot, k, x, lane);
        }
        __syncwarp();
        ring.room++;
        fill<P>(own, memory, ring, warp, lane);
        if (++ring.take == DEPTH) ring.take = 0, ring.parity ^= 1;
      }
      if (sides(P) == 2) swap_sides(sums.sum);
    }
  }
  if (IN_PLACE) __syncthreads();  // all warps have multiplied
  else if (P != O) wait_for(shared_address(&memory.finished), (P - 1) & 1);
  sums.leave(memory, warp, lane);
  if (!Rows<P>::WHOLE) rows.leave(memory, warp, lane);
  __syncthreads();
}

#include "finish.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    fused_block(const __grid_constant__ Block own) {
  Memory& memory = shared_memory<Memory>();
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  Ring ring;
  ring.slots = shared_address(memory.ring[warp]);
  ring.barriers = shared_address(memory.barrier[warp]);
  ring.take = ring.give = ring.parity = ring.product = ring.chunk = 0;
  ring.block = warp;
  ring.room = DEPTH;
  ring.known = EXPERTS ? (int)GATE_UP : STEPS;
  ring.policy = evicted_first();
  if (lane == 0) start_barriers<BITS == 16 ? 1 : 32>(ring.barriers, DEPTH);
  if (threadIdx.x == 0) start_barrier_of_warps(shared_address(&memory.finished));
  __syncwarp();
#if KV_HEADS
  Attention attention(own.cache, own.eps, memory.attending, warp, lane);
#else
  fill<O>(own, memory, ring, warp, lane);
#endif
  Router router(own, warp, lane);

  // Weights were asked for, but where attention waits for more; all else kernels ahead wrote.
  wait_for_kernels_ahead();
#if KV_HEADS
  if (attention.takes()) attention.ask();
  fill<O>(own, memory, ring, warp, lane, attention.takes() ? DEPTH - FIRST : 0);
#endif

  // Programs hand results on by values that are not blank. Launches take turns with two sets of
  // places, and each makes its own places in the other set blank.
  const int odd = read_now(own.launches) & 1;
  constexpr int MIDDLE = ROWS * HIDDEN * 2, PRODUCT = ROWS * CHOSEN * INNER * sizeof(Inner);
  constexpr int SET = 2 * MIDDLE + PRODUCT + 4 * EXPERTS + HANDED_IN;  // bytes
  char* set = (char*)own.exchanged + odd * SET;
  u16 *middle = (u16*)set, *sum = (u16*)(set + MIDDLE);
  Inner* product = (Inner*)(set + 2 * MIDDLE);
  u32* logits = (u32*)(set + 2 * MIDDLE + PRODUCT);
  const int other = odd ? -SET : SET;

  float residual[turns(O)];
  for_outputs<O>([&](int i, int row, int, int output) {
    residual[i] = widened(own.residual[row * HIDDEN + output]);
  });
  {
    const Finish<O> finish(own);
    const void* x = own.x;
#if KV_HEADS
    u32* parts = (u32*)(set + SET - HANDED_IN);
    x = parts + HEAD_PROGRAMS * HANDED;
    if (attention.takes()) {
      const float times = static_times_of(own, O, attention.row);
      attention.run(parts, other);
      attention.merge(parts, (Inner*)x, times, other);
    }
    fill<O>(own, memory, ring, warp, lane);
    __syncthreads();  // rows are laid where it had its sums
#endif
    Rows<O> rows(own, x, warp, lane);
    rows.lay_whole(memory, router, warp, lane);
    multiply<O>(own, memory, ring, rows, router, warp, lane);
    for_outputs<O>([&](int i, int row, int n, int output) {
      const u16 bits = rounded(finish(memory, i, row, n) + residual[i]);
      residual[i] = widened(bits);
      hand_on(middle + row * HIDDEN + output, bits, other);
    });
    finish_product(memory, lane);
  }
  {
    const Finish<GATE_UP> finish(own);
    float times[ROWS];
#pragma unroll
    for (int row = 0; row < ROWS; row++) times[row] = static_times_of(own, DOWN, row);
    Rows<GATE_UP> rows(own, middle, warp, lane);
    rows.lay_whole(memory, router, warp, lane);
    if (EXPERTS) {
      __syncthreads();
      const int expert = blockIdx.x + threadIdx.x * PROGRAMS;
      if (threadIdx.x < SCORES && expert < EXPERTS) {
        float logit = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) logit += memory.score[threadIdx.x][i];
        logit *= norm_factor(own, memory, 0);
        hand_on(logits + expert, __float_as_uint(logit), other);
      }
      choose(own, memory, logits, warp, lane);
      ring.known = STEPS;
      fill<GATE_UP>(own, memory, ring, warp, lane);
    }
    multiply<GATE_UP>(own, memory, ring, rows, router, warp, lane);
    for_outputs<GATE_UP>([&](int i, int row, int n, int output) {
      const float gate = finish(memory, i, row, n), up = finish(memory, i, row, n, 1);
      const float inner = gate / (1.f + __expf(-gate)) * up;
      hand_on(product + row * CHOSEN * INNER + output, inner_bits(inner, times[row]), other);
    });
    finish_product(memory, lane);
    fill<DOWN>(own, memory, ring, warp, lane);  // of down: asked for while others are waited for
  }
  {
    const Finish<DOWN> finish(own);
    Rows<DOWN> rows(own, product, warp, lane);
    rows.lay_whole(memory, router, warp, lane);
    multiply<DOWN>(own, memory, ring, rows, router, warp, lane);
    for_outputs<DOWN>([&](int i, int row, int n, int output) {
      const u16 bits = rounded(finish(memory, i, row, n) + residual[i]);
      own.total[row * HIDDEN + output] = bits;
      if (QKV) hand_on(sum + row * HIDDEN + output, bits, other);
    });
    finish_product(memory, lane);
  }
#if QKV
  const Finish<NEXT_QKV> finish(own);
  Rows<NEXT_QKV> rows(own, sum, warp, lane);
  rows.lay_whole(memory, router, warp, lane);
  multiply<NEXT_QKV>(own, memory, ring, rows, router, warp, lane);
  for_outputs<NEXT_QKV>([&](int i, int row, int n, int output) {
    own.qkv[row * QKV + output] = rounded(finish(memory, i, row, n));
  });
#endif
  if (blockIdx.x == 0 && threadIdx.x == 0) *own.launches += 1;  // all programs have read it
}
