// Rows of bf16, laid for weights block by block, by `lay_block` of the file of the weights.
//
// A warp lays a block, once all of it is there, when it is about to multiply it, and has asked for the
// next ones. Of normed rows blocks are without the factor that all inputs have in common: products,
// and a router's outputs, are multiplied by it. So no warp waits for what others read.
template <int P>
struct Rows {
  static constexpr bool WHOLE = EXPERTS && P == GATE_UP;  // before experts are chosen
  static constexpr int ASKED = smaller(own_blocks(P), 2);
  const Block& own;
  const u16* x;
  u32 v[ASKED][ROWS][2], norm[ASKED][2];
  float squares[ROWS] = {};

  __device__ __forceinline__ Rows(const Block& own, const void* x, int warp, int lane)
      : own(own), x((const u16*)x) {
#pragma unroll
    for (int i = 0; i < ASKED; i++) ask(i, warp + i * WARPS, lane);
  }

  // Where a block is laid.
  __device__ __forceinline__ static int place(int block, int warp) { return WHOLE ? block : warp; }
  __device__ __forceinline__ void ask_row(int i, int row, int block, int lane) {
    const u16* place = x + row * inputs(P) + block * 128 + first_pair(lane);
    v[i][row][0] = read_now(place), v[i][row][1] = read_now(place + 64);
  }
  __device__ __forceinline__ void ask(int i, int block, int lane) {
    if (block >= blocks(P)) return;
    if (normed(P)) {
      const u16* place = own.norm[P == NEXT_QKV] + block * 128 + first_pair(lane);
      norm[i][0] = __ldg((const u32*)place), norm[i][1] = __ldg((const u32*)(place + 64));
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++) ask_row(i, row, block, lane);
  }
  __device__ __forceinline__ bool waiting(int i, int row) const {
    return half_blank(v[i][row][0]) || half_blank(v[i][row][1]);
  }
  // Asks once more for all that was not there, from a row of a block on. If it asked for that row alone,
  // the next ones would be old, too: each would take as long again.
  __device__ __forceinline__ void ask_again(int row, int block, int lane) {
#pragma unroll
    for (int i = 0; i < ASKED; i++) {
      if (block + i * WARPS >= blocks(P)) break;
#pragma unroll
      for (int r = i ? 0 : row; r < ROWS; r++) {
        if (waiting(i, r)) ask_row(i, r, block + i * WARPS, lane);
      }
    }
  }

  // Lays the warp's i-th block, and asks for another one.
  __device__ __forceinline__ void lay(Memory& memory, Router& router, int i, int warp, int lane) {
    const int block = warp + i * WARPS;
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
      const u32* bits = v[0][row];
      while ((P != O || KV_HEADS) && __any_sync(~0u, waiting(0, row))) ask_again(row, block, lane);
      float y[4] = {low(bits[0]), high(bits[0]), low(bits[1]), high(bits[1])};
      if (normed(P)) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
          squares[row] += y[j] * y[j];
          y[j] *= j % 2 ? high(norm[0][j / 2]) : low(norm[0][j / 2]);
        }
      }
      if constexpr (WHOLE) router.add(i, y);
      const bool expert = EXPERTS && P == DOWN;
      const float share = expert ? memory.share[warp][min(block / (INNER / 128), CHOSEN - 1)] : 1.f;
      lay_block(memory, y, place(block, warp), row, lane, share);
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < ASKED - 1; k++) {
      norm[k][0] = norm[k + 1][0], norm[k][1] = norm[k + 1][1];
#pragma unroll
      for (int row = 0; row < ROWS; row++) {
        v[k][row][0] = v[k + 1][row][0], v[k][row][1] = v[k + 1][row][1];
      }
    }
    if (own_blocks(P) > ASKED) ask(ASKED - 1, block + ASKED * WARPS, lane);
  }

  // Lays all blocks, where experts are to be chosen by them.
  __device__ __forceinline__ void lay_whole(Memory& memory, Router& router, int warp, int lane) {
    if (!WHOLE) return;
#pragma unroll
    for (int i = 0; i < own_blocks(P); i++) {
      if (warp + i * WARPS < blocks(P)) lay(memory, router, i, warp, lane);
    }
    leave(memory, warp, lane);
    router.leave(memory, warp, lane);
  }

  // Leaves this warp's sums of the squares.
  __device__ __forceinline__ void leave(Memory& memory, int warp, int lane) const {
#pragma unroll
    for (int row = 0; row < (normed(P) ? ROWS : 0); row++) {
      leave_squares(memory, squares[row], row, warp, lane);
    }
  }
};
