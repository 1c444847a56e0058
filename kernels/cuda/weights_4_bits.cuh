// Weights of 4 bits times bf16 inputs, as kernels.triton.linear.weight_only packs them: words
// [inputs / 128, outputs / 64, 1024], of a tile the first 8 outputs of each of its 4 groups, then the
// others.

template <int P>
__device__ __forceinline__ void copy_chunk(const Block& own, const Ring& ring, u32 expert,
                                           u32 block, u32 group, int count, int lane) {
  constexpr u64 SIZE = (u64)(P == DOWN ? INNER : inputs(P)) * outputs(P);
  const char* tiles = (const char*)own.weight[P] + expert * (SIZE / 2);
  const char* scales = (const char*)own.scale[P] + expert * (SIZE / 32);
  const u32 to = ring.slot() + lane * 16;
#pragma unroll
  for (int i = 0; i < CHUNK; i++) {
    const u32 at = (group + i) / 4 * 4096 + (group + i) % 4 * 512;
    const char* first = tiles + (block * (outputs(P) * 64) + at + lane * 16);
    if (i < count) {
      copy(to + i * 512, first, ring.policy);
      copy(to + (CHUNK + i) * 512, first + 2048, ring.policy);
    }
  }
  if (lane < 4 * count) {
    const char* first = scales + ((block * outputs(P) + group * GROUP) * 4 + lane * 16);
    copy(to + CHUNK * 1024, first, ring.policy);
  }
  arrive_when_copied(ring.barrier());
}

// Leaves a block of a row as integers v of 16 bits, x = v unit: bytes of v are columns of a product.
//
// Lane t + 4 w + 16 e has the pairs of inputs from 32 e + 8 w + 2 t and from 64 inputs later on;
// packed weights hold these four in the bits 4 e, 4 e + 8 and 16 more of word t + 4 w.
__device__ __forceinline__ void lay_block(Memory& memory, const float* x, int at, int row,
                                          int lane, float share) {
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
  const float top = __uint_as_float(__reduce_max_sync(~0u, largest));
  const float times = top > 1e-30f ? __fdividef(32512.f, top) : 0.f;
  const u32 a = __float_as_uint(fmaf(x[0], times, INTEGER));
  const u32 b = __float_as_uint(fmaf(x[1], times, INTEGER));
  const u32 c = __float_as_uint(fmaf(x[2], times, INTEGER));
  const u32 d = __float_as_uint(fmaf(x[3], times, INTEGER));
  const int sum = __reduce_add_sync(~0u, (int)(a + b + c + d - 4u * INTEGER_BITS));
  const u32 lows = __byte_perm(__byte_perm(a, c, 0x0040), __byte_perm(b, d, 0x0040), 0x5410);
  const u32 highs = __byte_perm(__byte_perm(a + 128, c + 128, 0x0051),
                                __byte_perm(b + 128, d + 128, 0x0051), 0x5410);
  const int word = (lane & 3) * 8 + ((lane >> 2) & 3) * 2 + (lane >> 4);
  memory.x[at][2 * row][word] = highs;
  memory.x[at][2 * row + 1][word] = lows;
  if (lane == 0) {  // inputs that are not finite make the unit NaN, and all that is summed with it
    const float unit = top > 1e-30f ? top * (1.f / 32512.f) : 0.f;
    const float sound = top < 3.4e38f ? unit : __int_as_float(0x7fffffff);
    memory.unit[at][row] = make_float2(sound * share, __int_as_float(sum));
  }
}

#include "float_rows.cuh"

// What a lane multiplies weights of a block by.
struct Inputs {
  uint4 x0, x1;
  float unit;
  int sum, start[4];

  __device__ __forceinline__ Inputs(const Memory& memory, int at, int lane) {
    const int column = lane >> 2, t = lane & 3;
    x0 = x1 = make_uint4(0, 0, 0, 0);
    if (column < COLUMNS) {
      const uint4* place = (const uint4*)&memory.x[at][column][t * 8];
      x0 = place[0], x1 = place[1];
    }
    const float2 both = memory.unit[at][t < ROWS ? t : 0];
    unit = both.x, sum = __float_as_int(both.y);
    start[0] = start[2] = 0;
    start[1] = start[3] = ZEROS ? 0 : -8 * sum;
  }
};

// Of each group outputs `lane / 4` and 8 further on, of row `lane % 4`.
template <int P>
struct Sums {
  float sum[sides(P) * most(P)][2] = {};

  __device__ __forceinline__ void add(int to, const char* slot, int i, const Inputs& x, int lane) {
    const uint4 a = *(const uint4*)(slot + i * 512 + lane * 16);
    const uint4 b = *(const uint4*)(slot + (CHUNK + i) * 512 + lane * 16);
    const u32* scale = (const u32*)(slot + CHUNK * 1024 + i * 64);
    const u32 s0 = scale[lane >> 2], s1 = scale[(lane >> 2) + 8], m = 0x0f0f0f0fu;
    int d[4];
    multiply_unsigned(d, x.start, a.x & m, b.x & m, (a.x >> 4) & m, (b.x >> 4) & m, x.x0.x, x.x0.y);
    multiply_unsigned(d, d, a.y & m, b.y & m, (a.y >> 4) & m, (b.y >> 4) & m, x.x0.z, x.x0.w);
    multiply_unsigned(d, d, a.z & m, b.z & m, (a.z >> 4) & m, (b.z >> 4) & m, x.x1.x, x.x1.y);
    multiply_unsigned(d, d, a.w & m, b.w & m, (a.w >> 4) & m, (b.w >> 4) & m, x.x1.z, x.x1.w);
    int y0 = d[0] * 256 + d[1], y1 = d[2] * 256 + d[3];
    if (ZEROS) y0 -= (int)(s0 & 15) * x.sum, y1 -= (int)(s1 & 15) * x.sum;
    const u32 bits = ZEROS ? ~15u : ~0u;
    sum[to][0] += (float)y0 * (__uint_as_float(s0 & bits) * x.unit);
    sum[to][1] += (float)y1 * (__uint_as_float(s1 & bits) * x.unit);
  }

  __device__ __forceinline__ void leave(Memory& memory, int warp, int lane) const {
    const int output = lane >> 2, row = lane & 3;
    if (row >= ROWS) return;
#pragma unroll
    for (int i = 0; i < sides(P) * most(P); i++) {
      memory.part[warp][row][i * GROUP + output] = sum[i][0];
      memory.part[warp][row][i * GROUP + output + 8] = sum[i][1];
    }
  }
};
