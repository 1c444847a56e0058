// How rows of bf16 are laid for weights, block by block, by `lay_block` of the file of the weights.

// Leaves the blocks of rows that this warp multiplies, once they are there; a norm, and what a
// router makes of it, are of all warps.
template <int P>
__device__ __forceinline__ void lay_rows(const Block& own, Memory& memory, const void* x,
                                         const Router& router, int warp, int lane) {
  constexpr int COUNT = own_blocks(P);
  const int pair = first_pair(lane);
  u32 norm[COUNT][2];
  if (normed(P)) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const int block = warp + i * WARPS;
      const u16* place = own.norm[P == NEXT_QKV] + block * 128 + pair;
      norm[i][0] = block < blocks(P) ? __ldg((const u32*)place) : 0;
      norm[i][1] = block < blocks(P) ? __ldg((const u32*)(place + 64)) : 0;
    }
  }
  const u32 all = own_bits<P>(warp);
  u32 next[COUNT][2] = {};  // of a row that is asked for ahead
  const auto ask = [&](u32 (*to)[2], int row, u32 which) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      if (!(which >> i & 1)) continue;
      const u16* place = (const u16*)x + row * inputs(P) + (warp + i * WARPS) * 128 + pair;
      to[i][0] = read_now(place), to[i][1] = read_now(place + 64);
    }
  };
  if (AHEAD) ask(next, 0, all);
#pragma unroll 1
  for (int row = 0; row < ROWS; row++) {
    u32 v[COUNT][2] = {}, left = all;
    const auto lay = [&](int i) {
      const int block = warp + i * WARPS;
      const bool expert = EXPERTS && P == DOWN;
      const float share = expert ? memory.share[warp][min(block / (INNER / 128), CHOSEN - 1)] : 1.f;
      lay_block(memory, v[i][0], v[i][1], block, row, lane, share);
    };
    if (AHEAD) {
#pragma unroll
      for (int i = 0; i < COUNT; i++) v[i][0] = next[i][0], v[i][1] = next[i][1];
    }
    while (left) {
      if (!AHEAD) ask(v, row, left);
      u32 there = 0;
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        const bool blank = half_blank(v[i][0]) || half_blank(v[i][1]);
        if (!(left >> i & 1) || (P != O || KV_HEADS) && __any_sync(~0u, blank)) continue;
        left ^= 1u << i;
        if (normed(P)) continue;
        if (AHEAD) there |= 1u << i;
        else lay(i);
      }
      if (!AHEAD) continue;
      if (left) ask(v, row, left);
      else if (row + 1 < ROWS) ask(next, row + 1, all);
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        if (there >> i & 1) lay(i);
      }
    }
    if (!normed(P)) continue;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        sum += low(v[i][j]) * low(v[i][j]) + high(v[i][j]) * high(v[i][j]);
      }
    }
    const float factor = norm_factor(own, memory, sum, row, warp, lane);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        v[i][j] = rounded_pair(low(v[i][j]) * factor * low(norm[i][j]),
                               high(v[i][j]) * factor * high(norm[i][j]));
      }
    }
    if constexpr (EXPERTS > 0 && P == GATE_UP) router.score(memory, v, warp, lane);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const int block = warp + i * WARPS;
      if (block < blocks(P)) lay_block(memory, v[i][0], v[i][1], block, row, lane, 1.f);
    }
  }
  __syncwarp();
}
