// Weights of 8 bits times 8-bit inputs, as kernels.triton.linear.w8a8 packs them: bytes [inputs / 128,
// outputs, 128]. Sums are exact, and finished as that kernel's are.

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

// Some rows of a product, of which a warp has the blocks that it multiplies: what programs hand on in
// bf16, which is normed, or in fp32.
template <int P, int TOGETHER>
struct SomeRows {
  static constexpr int COUNT = own_blocks(P), EACH = normed(P) ? 2 : 4, NUMBERS = 4 * COUNT;
  const Block& own;
  const int first, warp, lane;
  u32 bits[TOGETHER][COUNT][EACH];
  float y[TOGETHER][NUMBERS], scale[TOGETHER], fault[TOGETHER] = {};

  __device__ __forceinline__ SomeRows(const Block& own, int first, int warp, int lane)
      : own(own), first(first), warp(warp), lane(lane) {}

  __device__ __forceinline__ int row_of(int r) const { return min(first + r, ROWS - 1); }
  __device__ __forceinline__ int block_of(int i) const { return warp + i * WARPS; }
  __device__ __forceinline__ bool real(int r, int i) const {
    return first + r < ROWS && block_of(i) < blocks(P);
  }
  __device__ __forceinline__ bool waiting(int r, int i) const {
    bool found = false;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      found |= normed(P) ? half_blank(bits[r][i][j]) : bits[r][i][j] == BLANK;
    }
    return found;
  }

  // Reads until all is there: what is not is asked for together.
  __device__ __forceinline__ void read(const void* x) {
    bool all = true, more;
    do {
      more = false;
#pragma unroll
      for (int k = 0; k < TOGETHER * COUNT; k++) {
        const int r = k / COUNT, i = k % COUNT;
        if (!real(r, i) || !(all || waiting(r, i))) continue;
        const int at = (first + r) * inputs(P) + block_of(i) * 128 + lane * 4;
        if (normed(P)) read_two_now(bits[r][i], (const u16*)x + at);
        else read_four_now(bits[r][i], (const u32*)x + at);
      }
      all = false;
#pragma unroll
      for (int k = 0; k < TOGETHER * COUNT; k++) {
        more |= real(k / COUNT, k % COUNT) && waiting(k / COUNT, k % COUNT);
      }
    } while (__any_sync(~0u, more));
#pragma unroll
    for (int k = 0; k < TOGETHER * NUMBERS; k++) {
      const int r = k / NUMBERS, i = k / 4 % COUNT, j = k % 4;
      const u32 word = bits[r][i][normed(P) ? j / 2 : j % EACH];
      const float value = !normed(P) ? __uint_as_float(word) : j % 2 ? high(word) : low(word);
      y[r][k % NUMBERS] = real(r, i) ? value : 0.f;
    }
  }

  __device__ __forceinline__ void norm(Memory& memory, const u32 (&weight)[COUNT][2]) {
#pragma unroll
    for (int r = 0; r < TOGETHER; r++) {
      float sum = 0;
#pragma unroll
      for (int k = 0; k < NUMBERS; k++) sum += y[r][k] * y[r][k];
      if (first + r < ROWS) leave_squares(memory, sum, first + r, warp, lane);
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < TOGETHER; r++) {
      const float factor = norm_factor(own, memory, row_of(r));
      fault[r] = 0.f * factor;
      if (factor == 0.f) fault[r] = __int_as_float(0x7fffffff);  // of a sum that is infinite
#pragma unroll
      for (int k = 0; k < NUMBERS; k++) {
        const u32 both = weight[k / 4][k % 4 / 2];
        y[r][k] = y[r][k] * factor * (k % 2 ? high(both) : low(both));
      }
    }
  }

  // What rows count in: a static scale, or one by the largest of a row over all warps.
  __device__ __forceinline__ void find_scales(Memory& memory) {
    if (own.static_scale[P]) {
#pragma unroll
      for (int r = 0; r < TOGETHER; r++) scale[r] = static_scale_of(own, P, row_of(r));
      return;
    }
#pragma unroll
    for (int r = 0; r < TOGETHER; r++) {
      float top = 0;
#pragma unroll
      for (int k = 0; k < NUMBERS; k++) top = fmaxf(top, fabsf(y[r][k]));
      const u32 found = __reduce_max_sync(~0u, __float_as_uint(top));
      if (lane == 0 && first + r < ROWS) memory.tops[first + r][warp] = __uint_as_float(found);
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < TOGETHER; r++) {
      float top = 0;
#pragma unroll
      for (int i = 0; i < WARPS; i++) top = fmaxf(top, memory.tops[row_of(r)][i]);
      scale[r] = fmaxf(__fdiv_rn(top, 127.f), LEAST_SCALE);
    }
  }

  __device__ __forceinline__ void lay(Memory& memory) const {
#pragma unroll
    for (int k = 0; k < TOGETHER * COUNT; k++) {
      const int r = k / COUNT, i = k % COUNT;
      if (first + r >= ROWS) break;
      if (i == 0 && warp == 0 && lane == 0) memory.scale[P & 1][first + r] = scale[r] + fault[r];
      const float times = __fdiv_rn(1.f, scale[r]);
      const float* own_y = y[r] + 4 * i;
      const u32 both = quantized(own_y[0], times) | quantized(own_y[1], times) << 8;
      const u32 rest = quantized(own_y[2], times) | quantized(own_y[3], times) << 8;
      if (real(r, i)) memory.x[block_of(i)][first + r][lane] = both | rest << 16;
    }
  }
};

// Leaves the blocks of rows that this warp multiplies, once they are there, as integers.
template <int P>
__device__ __forceinline__ void lay_rows(const Block& own, Memory& memory, const void* x,
                                         int warp, int lane) {
  constexpr int COUNT = own_blocks(P);
  if (P == O && !KV_HEADS) {
    for (int row = 0; row < ROWS; row++) {
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        const int block = warp + i * WARPS;
        const char* place = (const char*)x + row * inputs(P) + block * 128 + lane * 4;
        if (block < blocks(P)) memory.x[block][row][lane] = read_now(place);
      }
      if (warp == 0 && lane == 0) memory.scale[P & 1][row] = own.x_scale[own.x_scaled * row];
    }
    return;
  }
#if STATIC
  if (!normed(P)) {
    constexpr int TOGETHER = smaller(ROWS, larger(1, 32 / COUNT));
#pragma unroll 1
    for (int row = 0; row < ROWS; row += TOGETHER) {
      lay_integers<P, TOGETHER>(own, memory, x, row, warp, lane);
    }
    return;
  }
#endif
  u32 weight[COUNT][2];
#pragma unroll
  for (int i = 0; i < (normed(P) ? COUNT : 0); i++) {
    const int block = warp + i * WARPS;
    const u32* place = (const u32*)(own.norm[P == NEXT_QKV] + block * 128 + lane * 4);
    weight[i][0] = block < blocks(P) ? __ldg(place) : 0;
    weight[i][1] = block < blocks(P) ? __ldg(place + 1) : 0;
  }
  constexpr int TOGETHER = smaller(ROWS, larger(1, 8 / COUNT));
#pragma unroll 1
  for (int first = 0; first < ROWS; first += TOGETHER) {
    SomeRows<P, TOGETHER> rows(own, first, warp, lane);
    rows.read(x);
    if (normed(P)) rows.norm(memory, weight);
    rows.find_scales(memory);
    rows.lay(memory);
  }
}

// Rows of int8: all are laid before the first block is multiplied.
template <int P>
struct Rows {
  static constexpr bool WHOLE = true;
  const Block& own;
  const void* x;

  __device__ __forceinline__ Rows(const Block& own, const void* x, int, int) : own(own), x(x) {}
  __device__ __forceinline__ static int place(int block, int) { return block; }
  __device__ __forceinline__ void lay(Memory&, Router&, int, int, int) {}
  __device__ __forceinline__ void leave(Memory&, int, int) const {}
  __device__ __forceinline__ void lay_whole(Memory& memory, Router&, int warp, int lane) const {
    lay_rows<P>(own, memory, x, warp, lane);
    __syncwarp();
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
  static constexpr int PAIR = ROWS < 2 ? 1 : 2;  // of rows, that a lane has
  int sum[sides(P) * most(P)][2 * PAIR] = {};

  __device__ __forceinline__ void add(int to, const char* slot, int i, const Inputs& x, int lane) {
    const int row = lane >> 2, t = lane & 3;
    const char* rows = slot + i * 2048 + row * 128;  // this one, and the one 8 further on
    const char *place = rows + swapped(row, t * 16), *next = rows + swapped(row, t * 16 + 64);
    const uint4 a = *(const uint4*)place, b = *(const uint4*)(place + 1024);
    const uint4 c = *(const uint4*)next, d = *(const uint4*)(next + 1024);
    int all[4] = {sum[to][0], PAIR == 1 ? 0 : sum[to][1], sum[to][PAIR], PAIR == 1 ? 0 : sum[to][3]};
    multiply_signed(all, a.x, b.x, a.y, b.y, x.x0.x, x.x0.y);
    multiply_signed(all, a.z, b.z, a.w, b.w, x.x0.z, x.x0.w);
    multiply_signed(all, c.x, d.x, c.y, d.y, x.x1.x, x.x1.y);
    multiply_signed(all, c.z, d.z, c.w, d.w, x.x1.z, x.x1.w);
#pragma unroll
    for (int i = 0; i < 2 * PAIR; i++) sum[to][i] = all[i / PAIR * 2 + i % PAIR];
  }

  __device__ __forceinline__ void leave(Memory& memory, int warp, int lane) const {
    leave_sums<PAIR>(memory, sum, warp, lane);
  }
};
