// How a mixture of experts chooses: each program computes some of the router's outputs, and all
// choose by all of them.

// The router's weights that a program multiplies rows by, asked for before there are rows.
struct Router {
  u32 weight[SCORES][own_blocks(GATE_UP)][2];
  float sum[SCORES] = {};

  __device__ __forceinline__ Router(const Block& own, int warp, int lane) {
#pragma unroll
    for (int k = 0; k < SCORES; k++) {
#pragma unroll
      for (int i = 0; i < own_blocks(GATE_UP); i++) {
        const int block = warp + i * WARPS, expert = blockIdx.x + k * PROGRAMS;
        const bool real = expert < EXPERTS && block < blocks(GATE_UP);
        const u16* place = own.router + (long long)expert * HIDDEN + block * 128 + first_pair(lane);
#pragma unroll
        for (int j = 0; j < 2; j++) {
          weight[k][i][j] = real ? __ldg((const u32*)(place + 64 * j)) : 0;
        }
      }
    }
  }

  // Adds what the warp's i-th block of a row gives.
  __device__ __forceinline__ void add(int i, const float* x) {
#pragma unroll
    for (int k = 0; k < SCORES; k++) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        sum[k] += x[2 * j] * low(weight[k][i][j]) + x[2 * j + 1] * high(weight[k][i][j]);
      }
    }
  }

  // Leaves this warp's parts of the outputs that the program computes.
  __device__ __forceinline__ void leave(Memory& memory, int warp, int lane) const {
#pragma unroll
    for (int k = 0; k < SCORES; k++) {
      const float own_sum = warp_sum(sum[k]);
      if (lane == 0) memory.score[k][warp] = own_sum;
    }
  }
};

// Chooses experts by the router's outputs, which all programs hand on. Each warp chooses for itself,
// but reads some of them only: if all read all, these few lines of memory are what is waited for.
__device__ __forceinline__ void choose(const Block& own, Memory& memory, const u32* logits,
                                       int warp, int lane) {
  constexpr int EACH = EXPERTS / 32 + 1;
  float logit[EACH];
  u32 key[EACH];  // in the order of logits; 0 for none
  for (int expert = 32 * warp + lane; expert < EXPERTS; expert += THREADS) {
    u32 bits;
    do bits = read_now(logits + expert);
    while (bits == BLANK);
    memory.logit[expert] = bits;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int expert = lane + 32 * i;
    const u32 bits = expert < EXPERTS ? memory.logit[expert] : 0xff800000u;
    logit[i] = __uint_as_float(bits);
    key[i] = bits >> 31 ? ~bits : bits | 0x80000000u;
  }
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
    sum = warp_sum(sum);
  }
  if (lane < CHOSEN) memory.share[warp][lane] = own_share / sum * own.factor;
  __syncwarp();
}
