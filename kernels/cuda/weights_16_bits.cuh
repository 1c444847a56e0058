// Weights in bf16 times bf16 inputs, as kernels.triton.linear.w16a16 has them: [outputs, inputs].
// TMA brings a slot: 4 runs of 32 inputs, each of 16 outputs, of which 16 bytes of a lane
// are operands of two products as they stand. (Copied by lanes, blocks take longer than in single
// kernels.)

template <int P>
__device__ __forceinline__ void copy_chunk(const Block& own, const Ring& ring, u32, u32 block,
                                           u32 group, int count, int) {
  if (!elected()) return;
  expect(ring.barrier(), count > 0 ? SLOT : 0);
  if (count <= 0) return;
  copy_box(ring.slot(), &own.map[P], 0, group * GROUP, block * 4, ring.barrier(), ring.policy);
}

__device__ __forceinline__ void lay_block(Memory& memory, const float* x, int at, int row,
                                          int lane, float) {
  u32* place = &memory.x[at][row][first_pair(lane) / 2];
  place[0] = rounded_pair(x[0], x[1]), place[32] = rounded_pair(x[2], x[3]);
}

#include "float_rows.cuh"

// What a lane multiplies weights of a block by: of each run of 32 inputs 8 t on, of a row.
struct Inputs {
  uint4 x[4];

  __device__ __forceinline__ Inputs(const Memory& memory, int at, int lane) {
    const int column = lane >> 2, t = lane & 3;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[i] = make_uint4(0, 0, 0, 0);
      if (column < COLUMNS) x[i] = ((const uint4*)memory.x[at][column])[4 * i + t];
    }
  }
};

// Of each group outputs `lane / 4` and 8 further on, of rows 2 (lane % 4) and the next.
template <int P>
struct Sums {
  static constexpr int PAIR = ROWS < 2 ? 1 : 2;  // of rows, that a lane has
  float sum[sides(P) * most(P)][2 * PAIR] = {};

  __device__ __forceinline__ void add(int to, const char* slot, int, const Inputs& x, int lane) {
    const char* place = slot + (lane >> 2) * 64 + (lane & 3) * 16;
    float d[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint4 a = *(const uint4*)(place + i * 1024);
      const uint4 b = *(const uint4*)(place + i * 1024 + 512);
      multiply_bf16(d, a.x, b.x, a.y, b.y, x.x[i].x, x.x[i].y);
      multiply_bf16(d, a.z, b.z, a.w, b.w, x.x[i].z, x.x[i].w);
    }
#pragma unroll
    for (int i = 0; i < 2 * PAIR; i++) sum[to][i] += d[i / PAIR * 2 + i % PAIR];
  }

  __device__ __forceinline__ void leave(Memory& memory, int warp, int lane) const {
    leave_sums<PAIR>(memory, sum, warp, lane);
  }
};
