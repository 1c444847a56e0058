// From one attention to the next in one persistent kernel: see fused_block.py, which defines
//
//   ATTENTION, HIDDEN, INNER, QKV   inputs of o, channels, inputs of down, outputs of q/k/v
//   EXPERTS, CHOSEN                 of a mixture, INNER being that of one; else 0 and 1
//   ROWS                            tokens, 1 or 2; of a mixture 1
//   ZEROS                           1 where the last four bits of a scale are a zero point
//   PROGRAMS, WARPS                 programs of the grid, one for each SM, and warps of each
//   DEPTH, CHUNK                    slots of a warp's ring, and groups of outputs in a slot
//
// Of a mixture the outputs of gate and up are those of the chosen experts, one after the other, and
// so are the inputs of down. A "group" is 16 outputs, a "block" 128 inputs; a program owns whole groups of each product, and
// warp w of it multiplies blocks w, w + WARPS, ... of all of them.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

enum Product { O, GATE_UP, DOWN, NEXT_QKV, PRODUCTS };

struct Block {
  const uint4* weight[PRODUCTS];  // [inputs / 128, outputs / 64, 1024 words]: linear/operands.py
  const u32* scale[PRODUCTS];     // fp32 [inputs / 128, outputs]
  const float* bias[PRODUCTS];    // fp32 [outputs], or null
  const u16* x;                   // bf16 [ROWS, ATTENTION]: what attention gives
  const u16* residual;            // bf16 [ROWS, HIDDEN]
  const u16* norm[2];             // bf16 [HIDDEN]: before gate and up, and before q, k and v
  u16* total;                     // bf16 [ROWS, HIDDEN]: the residual after the block
  u16* qkv;                       // bf16 [ROWS, QKV]
  u16* exchanged;                 // two sets of what programs hand on
  u32* launches;                  // how many there were
  const u16* router;  // bf16 [EXPERTS, HIDDEN], or null
  float eps;
  float factor;    // of the chosen experts' weights
  int normalized;  // whether these are divided by their sum
};

constexpr int GROUP = 16, SLOT = CHUNK * (1024 + 64);  // bytes: weights, then scales
constexpr u16 BLANK = 0xffff;                          // a NaN that no conversion to bf16 gives
constexpr int THREADS = WARPS * 32;

__host__ __device__ constexpr int outputs(int p) {
  return p == GATE_UP ? 2 * INNER : p == NEXT_QKV ? QKV : HIDDEN;
}
__host__ __device__ constexpr int inputs(int p) {
  return p == O ? ATTENTION : p == DOWN ? CHOSEN * INNER : HIDDEN;
}
__host__ __device__ constexpr int blocks(int p) { return inputs(p) / 128; }
__host__ __device__ constexpr int sides(int p) { return p == GATE_UP ? 2 : 1; }
__host__ __device__ constexpr int groups(int p) {
  return outputs(p) / sides(p) / GROUP * (p == GATE_UP ? CHOSEN : 1);
}
__host__ __device__ constexpr int most(int p) { return (groups(p) + PROGRAMS - 1) / PROGRAMS; }
__host__ __device__ constexpr int chunks(int p) { return (most(p) + CHUNK - 1) / CHUNK; }
__host__ __device__ constexpr int chunk_start(int p, int i) { return most(p) * i / chunks(p); }
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int WIDEST = GROUP * larger(larger(most(O), 2 * most(GATE_UP)), most(NEXT_QKV));
constexpr int LONGEST = larger(larger(blocks(O), blocks(DOWN)), blocks(GATE_UP));

// Shared memory of a program.
struct Memory {
  char ring[WARPS][DEPTH][SLOT];
  u32 x[LONGEST][2 * ROWS][32];  // inputs as integers of 16 bits: high bytes, low bytes
  float2 unit[LONGEST][ROWS];    // what they count in, and (as bits) their sum
  u64 barrier[WARPS][DEPTH];
  float part[WARPS][ROWS][WIDEST];
  float squares[WARPS];
  float score[EXPERTS / PROGRAMS + 1][WARPS];  // parts of the router's outputs
  int expert[WARPS][CHOSEN];                   // as each warp has chosen them
  float share[WARPS][CHOSEN];
};

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float widened(u16 bits) { return __uint_as_float((u32)bits << 16); }
__device__ __forceinline__ u16 rounded(float value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
__device__ __forceinline__ u32 rounded_pair(float first, float second) {
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}
__device__ __forceinline__ u32 shared_address(const void* place) {
  return (u32)__cvta_generic_to_shared(place);
}
__device__ __forceinline__ u32 read_now(const void* place) {
  u32 bits;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(bits) : "l"(place));
  return bits;
}
__device__ __forceinline__ void write_now(u16* place, u16 bits) {
  asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(place), "h"(bits) : "memory");
}
__device__ __forceinline__ void write_now(u32* place, u32 bits) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(place), "r"(bits) : "memory");
}
__device__ __forceinline__ bool blank(u32 pair) {
  return (pair & 0xffffu) == BLANK || (pair >> 16) == BLANK;
}
__device__ __forceinline__ bool elected() {
  u32 own;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(own));
  return own;
}
__device__ __forceinline__ void copy(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void wait_for(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
        "selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } while (!done);
}
// d = a b + c of 16 outputs, 32 inputs and 8 columns
__device__ __forceinline__ void multiply_add(int* d, const int* c, u32 a0, u32 a1, u32 a2, u32 a3,
                                             u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]),
        "r"(c[3]));
}

// Groups that this program owns of a product, of one side.
template <int P>
__device__ __forceinline__ int owned() {
  if (groups(P) % PROGRAMS == 0) return most(P);
  return max(0, min(groups(P) - (int)blockIdx.x * most(P), most(P)));
}

// A warp's ring of weights: slots are asked for and taken in one order, over all products.
struct Ring {
  u32 slots, barriers;     // in shared memory
  int take, give;          // the slot that is taken, or asked for, next
  u32 parity;              // of the barrier of `take`
  int room;                // slots that nothing was asked into
  int product, block, chunk;  // what is asked for next
  int known;               // the first product of which it is not known which weights it takes
  u64 policy;
};

template <int P>
__device__ __forceinline__ void ask_for(const Block& own, const Memory& memory, Ring& ring,
                                        int warp) {
  const int side = ring.chunk / chunks(P), part = ring.chunk - side * chunks(P);
  const int start = most(P) * part / chunks(P), end = most(P) * (part + 1) / chunks(P);
  const int count = min(end, owned<P>()) - start;
  int group = blockIdx.x * most(P) + start, block = ring.block;
  const uint4* weight = own.weight[P];
  const u32* scale = own.scale[P];
  if (EXPERTS && (P == GATE_UP || P == DOWN)) {
    constexpr int EACH = P == DOWN ? INNER / 128 : INNER / GROUP;
    int& at = P == DOWN ? block : group;
    const int place = at / EACH;
    at -= place * EACH;
    constexpr long long SIZE = (long long)(P == DOWN ? INNER : HIDDEN) * outputs(P);
    weight += memory.expert[warp][place] * (SIZE / 32);
    scale += memory.expert[warp][place] * (SIZE / 128);
  }
  group += side * (outputs(P) / 2 / GROUP);
  const u32 slot = ring.slots + ring.give * SLOT, barrier = ring.barriers + ring.give * 8;
  // A tile of 64 outputs: the first 8 of each of its 4 groups, 512 bytes a group, then the others.
  const uint4* tile = weight + (block * (outputs(P) / 64) + (group >> 2)) * 256;
  const uint4* first = tile + (group & 3) * 32;
  const int in_tile = min(count, 4 - (group & 3)), in_next = count - in_tile;
  if (elected()) {
    if (groups(P) % PROGRAMS == 0 || count > 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                   "r"(count * (1024 + 64)) : "memory");
      copy(slot, first, in_tile * 512, barrier, ring.policy);
      copy(slot + CHUNK * 512, first + 128, in_tile * 512, barrier, ring.policy);
      if (in_next > 0) {
        const u32 after = slot + in_tile * 512;
        copy(after, tile + 256, in_next * 512, barrier, ring.policy);
        copy(after + CHUNK * 512, tile + 256 + 128, in_next * 512, barrier, ring.policy);
      }
      scale += block * outputs(P) + group * GROUP;
      copy(slot + CHUNK * 1024, scale, count * 64, barrier, ring.policy);
    } else {
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
    }
  }
  if (++ring.chunk == chunks(P) * sides(P)) {
    ring.chunk = 0;
    ring.block += WARPS;
    if (ring.block >= blocks(P)) ring.block = warp, ring.product = P + 1;
  }
}

// Asks for weights as long as there is room, and it is known which.
__device__ __forceinline__ void fill(const Block& own, const Memory& memory, Ring& ring,
                                     int warp) {
#pragma unroll 1
  for (; ring.room > 0 && ring.product < ring.known; ring.room--) {
    if (ring.product == GATE_UP) ask_for<GATE_UP>(own, memory, ring, warp);
    else if (ring.product == DOWN) ask_for<DOWN>(own, memory, ring, warp);
    else if (ring.product == O) ask_for<O>(own, memory, ring, warp);
    else ask_for<NEXT_QKV>(own, memory, ring, warp);
    if (++ring.give == DEPTH) ring.give = 0;
  }
}

// Leaves a block of a row as integers v of 16 bits, x = v unit: bytes of v are columns of a product.
//
// Lane t + 4 w + 16 e has the pairs of inputs from 32 e + 8 w + 2 t and from 64 inputs later on;
// packed weights hold these four in the bits 4 e, 4 e + 8 and 16 more of word t + 4 w.
__device__ __forceinline__ void lay_block(Memory& memory, u32 v0, u32 v1, int block, int row,
                                          int lane, float share) {
  const u32 largest = max(max(v0 & 0x7fffu, (v0 >> 16) & 0x7fffu),
                          max(v1 & 0x7fffu, (v1 >> 16) & 0x7fffu));
  const float top = __uint_as_float(__reduce_max_sync(~0u, largest) << 16);
  const float times = top > 1e-30f ? __fdividef(32512.f, top) : 0.f;
  const float integer = 12582912.f;  // 1.5 * 2^23: the last bits of a sum with it are an integer
  const u32 a = __float_as_uint(fmaf(low(v0), times, integer));
  const u32 b = __float_as_uint(fmaf(high(v0), times, integer));
  const u32 c = __float_as_uint(fmaf(low(v1), times, integer));
  const u32 d = __float_as_uint(fmaf(high(v1), times, integer));
  const int sum = __reduce_add_sync(~0u, (int)(a + b + c + d - 4u * 0x4B400000u));
  const u32 lows = __byte_perm(__byte_perm(a, c, 0x0040), __byte_perm(b, d, 0x0040), 0x5410);
  const u32 highs = __byte_perm(__byte_perm(a + 128, c + 128, 0x0051),
                                __byte_perm(b + 128, d + 128, 0x0051), 0x5410);
  const int word = (lane & 3) * 8 + ((lane >> 2) & 3) * 2 + (lane >> 4);
  memory.x[block][2 * row][word] = highs;
  memory.x[block][2 * row + 1][word] = lows;
  if (lane == 0) {  // inputs that are not finite make the unit NaN, and all that is summed with it
    const float unit = top > 1e-30f ? top * (1.f / 32512.f) : 0.f;
    const float sound = top < 3.4e38f ? unit : __int_as_float(0x7fffffff);
    memory.unit[block][row] = make_float2(sound * share, __int_as_float(sum));
  }
}

// Leaves this warp's parts of the router's outputs that the program computes.
template <int COUNT>
__device__ __forceinline__ void score(const Block& own, Memory& memory, const u32 (*v)[2], int pair,
                                      int warp, int lane) {
#pragma unroll
  for (int k = 0; k < EXPERTS / PROGRAMS + 1; k++) {
    const int expert = blockIdx.x + k * PROGRAMS;
    if (expert >= EXPERTS) break;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const u16* place = own.router + expert * HIDDEN + (warp + i * WARPS) * 128 + pair;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        if (warp + i * WARPS >= HIDDEN / 128) break;
        const u32 weight = __ldg((const u32*)(place + 64 * j));
        sum += low(v[i][j]) * low(weight) + high(v[i][j]) * high(weight);
      }
    }
#pragma unroll
    for (int far = 16; far; far /= 2) sum += __shfl_xor_sync(~0u, sum, far);
    if (lane == 0) memory.score[k][warp] = sum;
  }
}

// Chooses experts by the router's outputs, which all programs hand on; each warp does for itself.
__device__ __forceinline__ void choose(const Block& own, Memory& memory, const u32* logits,
                                       int warp, int lane) {
  constexpr int EACH = EXPERTS / 32 + 1;
  float logit[EACH];
  u32 key[EACH];  // in the order of logits; 0 for none
  bool waiting;
  do {
    waiting = false;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int expert = lane + 32 * i;
      const u32 bits = expert < EXPERTS ? read_now(logits + expert) : 0xff800000u;
      waiting |= bits == ~0u;
      logit[i] = __uint_as_float(bits);
      key[i] = bits >> 31 ? ~bits : bits | 0x80000000u;
    }
  } while (__any_sync(~0u, waiting));
  float first = 0, sum = 0, own_share = 0;
#pragma unroll 1
  for (int k = 0; k < CHOSEN; k++) {
    u32 best = 0, expert = ~0u;
#pragma unroll
    for (int i = 0; i < EACH; i++) best = max(best, key[i]);
    best = __reduce_max_sync(~0u, best);
#pragma unroll
    for (int i = EACH - 1; i >= 0; i--) expert = key[i] == best ? lane + 32 * i : expert;
    expert = __reduce_min_sync(~0u, expert);  // of equals the first
#pragma unroll
    for (int i = 0; i < EACH; i++) key[i] = expert == lane + 32 * i ? 0 : key[i];
    const float value = __uint_as_float(best >> 31 ? best & 0x7fffffffu : ~best);
    if (k == 0) first = value;
    const float share = __expf(value - first);
    sum += share;
    if (lane == k) {
      own_share = share;
      memory.expert[warp][k] = min(expert, EXPERTS - 1);
    }
  }
  if (!own.normalized) {
    sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) sum += __expf(logit[i] - first);
#pragma unroll
    for (int far = 16; far; far /= 2) sum += __shfl_xor_sync(~0u, sum, far);
  }
  if (lane < CHOSEN) memory.share[warp][lane] = own_share / sum * own.factor;
  __syncwarp();
}

// Leaves the blocks of rows that this warp multiplies; with a norm, rows are normed by all warps.
template <int P>
__device__ __forceinline__ void lay_rows(const Block& own, Memory& memory, const u16* x, int warp,
                                         int lane) {
  constexpr int COUNT = (blocks(P) + WARPS - 1) / WARPS;
  constexpr bool NORM = P == GATE_UP || P == NEXT_QKV, WAIT = P != O;
  const int pair = 32 * (lane >> 4) + 8 * ((lane >> 2) & 3) + 2 * (lane & 3);
  u32 w[NORM ? COUNT : 1][2];
  if (NORM) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const int block = warp + i * WARPS;
      const u16* place = own.norm[P == NEXT_QKV] + block * 128 + pair;
      w[i][0] = block < blocks(P) ? *(const u32*)place : 0;
      w[i][1] = block < blocks(P) ? *(const u32*)(place + 64) : 0;
    }
  }
#pragma unroll 1
  for (int row = 0; row < ROWS; row++) {
    u32 v[COUNT][2];
    bool waiting;
    do {
      waiting = false;
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        const int block = warp + i * WARPS;
        const u16* place = x + row * inputs(P) + block * 128 + pair;
        v[i][0] = block < blocks(P) ? read_now(place) : 0;
        v[i][1] = block < blocks(P) ? read_now(place + 64) : 0;
      }
#pragma unroll
      for (int i = 0; i < COUNT; i++) waiting |= blank(v[i][0]) || blank(v[i][1]);
    } while (WAIT && __any_sync(~0u, waiting));
    if (NORM) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
          sum += low(v[i][j]) * low(v[i][j]) + high(v[i][j]) * high(v[i][j]);
        }
      }
#pragma unroll
      for (int far = 16; far; far /= 2) sum += __shfl_xor_sync(~0u, sum, far);
      if (lane == 0) memory.squares[warp] = sum;
      __syncthreads();
      sum = 0;
#pragma unroll
      for (int i = 0; i < WARPS; i++) sum += memory.squares[i];
      if (ROWS > 1) __syncthreads();
      const float factor = rsqrtf(sum / HIDDEN + own.eps);
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const u32 weight = w[NORM ? i : 0][j];
          v[i][j] = rounded_pair(low(v[i][j]) * factor * low(weight),
                                 high(v[i][j]) * factor * high(weight));
        }
      }
      if (EXPERTS && P == GATE_UP) score<COUNT>(own, memory, v, pair, warp, lane);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const int block = warp + i * WARPS;
      const bool expert = EXPERTS && P == DOWN;
      const float share = expert ? memory.share[warp][min(block / (INNER / 128), CHOSEN - 1)] : 1.f;
      if (block < blocks(P)) lay_block(memory, v[i][0], v[i][1], block, row, lane, share);
    }
  }
  __syncwarp();
}

// Leaves this warp's part of all outputs that the program owns, both sides of gate and up.
template <int P>
__device__ __forceinline__ void multiply(const Block& own, Memory& memory, Ring& ring, int warp,
                                         int lane) {
  float part[sides(P) * most(P)][2];
#pragma unroll
  for (int i = 0; i < sides(P) * most(P); i++) part[i][0] = part[i][1] = 0;
  const int output = lane >> 2, t = lane & 3, row = t < ROWS ? t : 0;
#pragma unroll 1
  for (int block = warp; block < blocks(P); block += WARPS) {
    uint4 x0 = make_uint4(0, 0, 0, 0), x1 = x0;  // columns after 2 ROWS are zero
    if (output < 2 * ROWS) {
      const uint4* own_x = (const uint4*)&memory.x[block][output][t * 8];
      x0 = own_x[0], x1 = own_x[1];
    }
    const float2 unit = memory.unit[block][row];
    const int sum = __float_as_int(unit.y);
    const int start[4] = {0, ZEROS ? 0 : -8 * sum, 0, ZEROS ? 0 : -8 * sum};
#pragma unroll
    for (int chunk = 0; chunk < sides(P) * chunks(P); chunk++) {
      wait_for(ring.barriers + ring.take * 8, ring.parity);
      const char* slot = memory.ring[warp][ring.take];
      const int first = chunk_start(P, chunk % chunks(P));
#pragma unroll
      for (int i = 0; i < chunk_start(P, chunk % chunks(P) + 1) - first; i++) {
        const uint4 a = *(const uint4*)(slot + i * 512 + lane * 16);
        const uint4 b = *(const uint4*)(slot + (CHUNK + i) * 512 + lane * 16);
        const u32* scale = (const u32*)(slot + CHUNK * 1024 + i * 64);
        const u32 s0 = scale[output], s1 = scale[output + 8], mask = 0x0f0f0f0fu;
        int d[4];
        multiply_add(d, start, a.x & mask, b.x & mask, (a.x >> 4) & mask, (b.x >> 4) & mask,
                     x0.x, x0.y);
        multiply_add(d, d, a.y & mask, b.y & mask, (a.y >> 4) & mask, (b.y >> 4) & mask,
                     x0.z, x0.w);
        multiply_add(d, d, a.z & mask, b.z & mask, (a.z >> 4) & mask, (b.z >> 4) & mask,
                     x1.x, x1.y);
        multiply_add(d, d, a.w & mask, b.w & mask, (a.w >> 4) & mask, (b.w >> 4) & mask,
                     x1.z, x1.w);
        int y0 = d[0] * 256 + d[1], y1 = d[2] * 256 + d[3];
        if (ZEROS) y0 -= (int)(s0 & 15) * sum, y1 -= (int)(s1 & 15) * sum;
        const u32 bits = ZEROS ? ~15u : ~0u;
        float* to = part[(chunk / chunks(P)) * most(P) + first + i];
        to[0] += (float)y0 * (__uint_as_float(s0 & bits) * unit.x);
        to[1] += (float)y1 * (__uint_as_float(s1 & bits) * unit.x);
      }
      __syncwarp();
      ring.room++;
      fill(own, memory, ring, warp);
      if (++ring.take == DEPTH) ring.take = 0, ring.parity ^= 1;
    }
  }
  if (t < ROWS) {
#pragma unroll
    for (int i = 0; i < sides(P) * most(P); i++) {
      memory.part[warp][t][i * GROUP + output] = part[i][0];
      memory.part[warp][t][i * GROUP + output + 8] = part[i][1];
    }
  }
  __syncthreads();
}

// An output of a product, rounded to bf16: the sum of the warps' parts in their order.
template <int P>
__device__ __forceinline__ float result(const Block& own, const Memory& memory, int row, int n,
                                        int output) {
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) sum += memory.part[warp][row][n];
  if (own.bias[P]) sum += own.bias[P][output];
  return widened(rounded(sum));
}

// Calls body(i, row, n, output) for each output of one side that the program owns, a thread each.
template <int P, typename Body>
__device__ __forceinline__ void for_outputs(Body body) {
  const int count = owned<P>() * GROUP;
#pragma unroll
  for (int i = 0; i < (most(P) * GROUP * ROWS + THREADS - 1) / THREADS; i++) {
    const int k = threadIdx.x + i * THREADS;
    if (k < count * ROWS) {
      const int row = k / count, n = k - row * count;
      body(i, row, n, (int)blockIdx.x * most(P) * GROUP + n);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    fused_block(const __grid_constant__ Block own) {
  extern __shared__ __align__(128) char bytes[];
  Memory& memory = *(Memory*)bytes;
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  Ring ring;
  ring.slots = shared_address(memory.ring[warp]);
  ring.barriers = shared_address(memory.barrier[warp]);
  ring.take = ring.give = ring.parity = ring.product = ring.chunk = 0;
  ring.block = warp;
  ring.room = DEPTH;
  ring.known = EXPERTS ? GATE_UP : PRODUCTS;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(ring.policy));
  if (lane == 0) {
    for (int i = 0; i < DEPTH; i++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(ring.barriers + i * 8)
                   : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  fill(own, memory, ring, warp);

  // Weights were asked for; all else is what kernels ahead wrote.
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");

  // Programs hand results on by values that are not blank. Launches take turns with two sets of
  // places, and each makes its own places in the other set blank.
  const int odd = read_now(own.launches) & 1;
  constexpr int SET = ROWS * (HIDDEN + CHOSEN * INNER + HIDDEN) + 2 * EXPERTS;
  u16* middle = own.exchanged + odd * SET;
  u16* product = middle + ROWS * HIDDEN;
  u16* sum = product + ROWS * CHOSEN * INNER;
  u32* logits = (u32*)(sum + ROWS * HIDDEN);
  const int other = odd ? -SET : SET;
  const auto hand_on = [&](u16* place, u16 bits) {
    write_now(place, bits);
    write_now(place + other, BLANK);
  };

  float residual[(most(O) * GROUP * ROWS + THREADS - 1) / THREADS];
  for_outputs<O>([&](int i, int row, int, int output) {
    residual[i] = widened(own.residual[row * HIDDEN + output]);
  });
  lay_rows<O>(own, memory, own.x, warp, lane);
  multiply<O>(own, memory, ring, warp, lane);
  for_outputs<O>([&](int i, int row, int n, int output) {
    const u16 bits = rounded(result<O>(own, memory, row, n, output) + residual[i]);
    residual[i] = widened(bits);
    hand_on(middle + row * HIDDEN + output, bits);
  });

  lay_rows<GATE_UP>(own, memory, middle, warp, lane);
  if (EXPERTS) {
    __syncthreads();
    const int expert = blockIdx.x + threadIdx.x * PROGRAMS;
    if (expert < EXPERTS) {
      float logit = 0;
#pragma unroll
      for (int i = 0; i < WARPS; i++) logit += memory.score[threadIdx.x][i];
      write_now(logits + expert, __float_as_uint(logit));
      write_now(logits + expert + other / 2, ~0u);
    }
    choose(own, memory, logits, warp, lane);
    ring.known = PRODUCTS;
    fill(own, memory, ring, warp);
  }
  multiply<GATE_UP>(own, memory, ring, warp, lane);
  for_outputs<GATE_UP>([&](int, int row, int n, int output) {
    const float gate = result<GATE_UP>(own, memory, row, n, output);
    const int other_side = most(GATE_UP) * GROUP + n;
    const float up = result<GATE_UP>(own, memory, row, other_side, INNER + output);
    hand_on(product + row * CHOSEN * INNER + output, rounded(gate / (1.f + __expf(-gate)) * up));
  });

  lay_rows<DOWN>(own, memory, product, warp, lane);
  __syncthreads();  // the parts of gate and up have been read
  multiply<DOWN>(own, memory, ring, warp, lane);
  for_outputs<DOWN>([&](int i, int row, int n, int output) {
    const u16 bits = rounded(result<DOWN>(own, memory, row, n, output) + residual[i]);
    own.total[row * HIDDEN + output] = bits;
    hand_on(sum + row * HIDDEN + output, bits);
  });

  lay_rows<NEXT_QKV>(own, memory, sum, warp, lane);
  multiply<NEXT_QKV>(own, memory, ring, warp, lane);
  for_outputs<NEXT_QKV>([&](int, int row, int n, int output) {
    own.qkv[row * QKV + output] = rounded(result<NEXT_QKV>(own, memory, row, n, output));
  });
  if (blockIdx.x == 0 && threadIdx.x == 0) *own.launches += 1;  // all programs have read it
}
