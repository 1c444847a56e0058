// Weights of 8 bits times 8-bit inputs, as kernels.triton.linear.w8a8 packs them: bytes [inputs / 128,
// outputs, 128]. Sums are exact, and finished as that kernel's are.

constexpr bool AHEAD = ROWS > 2;         // a row is asked for before the one ahead is laid
constexpr float LEAST_SCALE = 0x1p-60f;  // of a row of zeros, as kernels.numerics has it

// Where 16 bytes of a row of 128 are in a slot: rows in turns, so that lanes read from all banks.
__device__ __forceinline__ int swapped(int row, int place) { return place ^ (row & 1) * 64; }

template <int P>
__device__ __forceinline__ void copy_chunk(const Block& own, const Ring& ring, u32, u32 block,
                                           u32 group, int count, int lane) {
  const u32 at = (block * outputs(P) + group * GROUP) * 128 + lane * 16;
  const char* first = (const char*)own.weight[P] + at;
  const u32 to = ring.slot() + lane / 8 * 128 + swapped(lane / 8, lane % 8 * 16);
#pragma unroll
  for (int i = 0; i < CHUNK * 4; i++) {
    if (i < count * 4) copy(to + i * 512, first + i * 512, ring.policy);
  }
  arrive_when_copied(ring.barrier());
}

// The largest of a row's numbers that are not negative, over all warps.
__device__ __forceinline__ float largest(Memory& memory, float value, int row, int warp, int lane) {
  const u32 bits = __reduce_max_sync(~0u, __float_as_uint(value));
  if (lane == 0) memory.tops[row][warp] = __uint_as_float(bits);
  __syncthreads();
  float found = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) found = fmaxf(found, memory.tops[row][i]);
  return found;
}

#if STATIC
// Leaves what programs have handed on as integers, block by block of so many rows.
template <int P, int TOGETHER>
__device__ __forceinline__ void lay_integers(const Block& own, Memory& memory, const void* x,
                                             int first, int warp, int lane) {
  constexpr int COUNT = own_blocks(P);
  static_assert(TOGETHER * COUNT <= 32, "blocks of rows are bits of a word");
  const u32 all = own_bits<P>(warp);
  u32 left = all, bits[TOGETHER * COUNT];
#pragma unroll
  for (int r = 0; r < TOGETHER; r++) {
    if (ROWS % TOGETHER && first + r >= ROWS) break;
    left |= all << r * COUNT;
    if (warp == 0 && lane == 0) memory.scale[P & 1][first + r] = static_scale_of(own, P, first + r);
  }
  while (left) {
#pragma unroll
    for (int k = 0; k < TOGETHER * COUNT; k++) {
      const int row = first + k / COUNT, block = warp + k % COUNT * WARPS;
      const int at = row * inputs(P) + block * 128 + lane * 4;
      if (left >> k & 1) bits[k] = read_now((const char*)x + at);
    }
#pragma unroll
    for (int k = 0; k < TOGETHER * COUNT; k++) {
      if (!(left >> k & 1) || __any_sync(~0u, byte_blank(bits[k]))) continue;
      left ^= 1u << k;
      memory.x[warp + k % COUNT * WARPS][first + k / COUNT][lane] = bits[k] ^ TURNED;
    }
  }
}
#endif

// Leaves the blocks of rows that this warp multiplies, once they are there, quantized by a static
// scale or by the largest of a row; that and norms are of all warps.
template <int P>
__device__ __forceinline__ void lay_rows(const Block& own, Memory& memory, const void* x,
                                         int warp, int lane) {
  constexpr int COUNT = own_blocks(P);
  u32 norm[COUNT][2];
  if (normed(P)) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const int block = warp + i * WARPS;
      const u32* place = (const u32*)(own.norm[P == NEXT_QKV] + block * 128 + lane * 4);
      norm[i][0] = block < blocks(P) ? __ldg(place) : 0;
      norm[i][1] = block < blocks(P) ? __ldg(place + 1) : 0;
    }
  }
#if STATIC
  if (!normed(P) && (P != O || KV_HEADS)) {
    constexpr int TOGETHER = AHEAD && COUNT <= 16 ? 2 : 1;
#pragma unroll 1
    for (int row = 0; row < ROWS; row += TOGETHER) {
      lay_integers<P, TOGETHER>(own, memory, x, row, warp, lane);
    }
    __syncwarp();
    return;
  }
#endif
  u32 bits[COUNT][4];
#pragma unroll
  for (int i = 0; i < COUNT * 4; i++) bits[i / 4][i % 4] = BLANK;
  const auto ask = [&](int row) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const int block = warp + i * WARPS, at = row * inputs(P) + block * 128 + lane * 4;
      bits[i][0] = bits[i][1] = bits[i][2] = bits[i][3] = 0;
      if (block >= blocks(P)) continue;
      if (normed(P)) read_two_now(bits[i], (const u16*)x + at);
      else read_four_now(bits[i], (const u32*)x + at);
    }
  };
#pragma unroll 1
  for (int row = 0; row < ROWS; row++) {
    if (P == O && !KV_HEADS) {
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        const int block = warp + i * WARPS;
        const char* place = (const char*)x + row * inputs(P) + block * 128 + lane * 4;
        if (block < blocks(P)) memory.x[block][row][lane] = read_now(place);
      }
      if (warp == 0 && lane == 0) memory.scale[P & 1][row] = own.x_scale[own.x_scaled * row];
      continue;
    }
    float y[COUNT][4], top = 0, fault = 0;
    bool waiting;
    do {
      if (!AHEAD) ask(row);
      waiting = false;
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
          waiting |= normed(P) ? half_blank(bits[i][j]) : bits[i][j] == BLANK;
        }
      }
      waiting = __any_sync(~0u, waiting);
      if (AHEAD && waiting) ask(row);
    } while (waiting);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const u32 word = bits[i][normed(P) ? j / 2 : j];
        y[i][j] = !normed(P) ? __uint_as_float(word) : j % 2 ? high(word) : low(word);
      }
    }
    if (AHEAD && row + 1 < ROWS) ask(row + 1);
    if (normed(P)) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) sum += y[i][j] * y[i][j];
      }
      leave_squares(memory, sum, row, warp, lane);
      __syncthreads();
      const float factor = norm_factor(own, memory, row);
      fault = 0.f * factor;
      if (factor == 0.f) fault = __int_as_float(0x7fffffff);  // of a sum that is infinite
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
          y[i][j] = y[i][j] * factor * (j % 2 ? high(norm[i][j / 2]) : low(norm[i][j / 2]));
        }
      }
    }
    float scale;
    if (own.static_scale[P]) {
      scale = static_scale_of(own, P, row);
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) top = fmaxf(top, fabsf(y[i][j]));
      }
      scale = fmaxf(__fdiv_rn(largest(memory, top, row, warp, lane), 127.f), LEAST_SCALE);
    }
    if (warp == 0 && lane == 0) memory.scale[P & 1][row] = scale + fault;
    const float times = __fdiv_rn(1.f, scale);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const int block = warp + i * WARPS;
      const u32 both = quantized(y[i][0], times) | quantized(y[i][1], times) << 8;
      const u32 rest = quantized(y[i][2], times) | quantized(y[i][3], times) << 8;
      if (block < blocks(P)) memory.x[block][row][lane] = both | rest << 16;
    }
  }
  __syncwarp();
}

// Rows of int8: all are laid before the first block is multiplied.
template <int P>
struct Rows {
  static constexpr bool WHOLE = true;
  const Block& own;
  const void* x;

  __device__ __forceinline__ Rows(const Block& own, const void* x, int, int) : own(own), x(x) {}
  __device__ __forceinline__ void lay(Memory&, Router&, int, int, int) {}
  __device__ __forceinline__ void leave(Memory&, int, int) const {}
  __device__ __forceinline__ void lay_whole(Memory& memory, Router&, int warp, int lane) const {
    lay_rows<P>(own, memory, x, warp, lane);
  }
};

// What a lane multiplies weights of a block by: inputs 16 t and 64 + 16 t on, of a row.
struct Inputs {
  uint4 x0, x1;

  __device__ __forceinline__ Inputs(const Memory& memory, int block, int lane) {
    const int column = lane >> 2, t = lane & 3;
    x0 = x1 = make_uint4(0, 0, 0, 0);
    if (column < COLUMNS) {
      const uint4* place = (const uint4*)memory.x[block][column];
      x0 = place[t], x1 = place[4 + t];
    }
  }
};

// Of each group outputs `lane / 4` and 8 further on, of rows 2 (lane % 4) and the next.
template <int P>
struct Sums {
  int sum[sides(P) * most(P)][4] = {};

  __device__ __forceinline__ void add(int to, const char* slot, int i, const Inputs& x, int lane) {
    const int row = lane >> 2, t = lane & 3;
    const char* rows = slot + i * 2048 + row * 128;  // this one, and the one 8 further on
    const char *place = rows + swapped(row, t * 16), *next = rows + swapped(row, t * 16 + 64);
    const uint4 a = *(const uint4*)place, b = *(const uint4*)(place + 1024);
    const uint4 c = *(const uint4*)next, d = *(const uint4*)(next + 1024);
    multiply_signed(sum[to], a.x, b.x, a.y, b.y, x.x0.x, x.x0.y);
    multiply_signed(sum[to], a.z, b.z, a.w, b.w, x.x0.z, x.x0.w);
    multiply_signed(sum[to], c.x, d.x, c.y, d.y, x.x1.x, x.x1.y);
    multiply_signed(sum[to], c.z, d.z, c.w, d.w, x.x1.z, x.x1.w);
  }

  __device__ __forceinline__ void leave(Memory& memory, int warp, int lane) const {
    leave_sums<2>(memory, sum, warp, lane);
  }
};
