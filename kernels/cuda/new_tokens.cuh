// What is new for an attention: q of a program's row, and K and V of new tokens, which are normed and
// rotated here, and kept.
//
// Rows may be tokens of one sequence, its last one and drafts after that. While a program reads the
// cache others write these: so it computes K and V of all new tokens in its pages for itself.

struct NewTokens {
  const Cache& own;
  float eps;
  Attending& memory;
  int row, head, warp, lane;
  u32 seen = 0;         // bits: the rows whose new tokens are in these pages; of one row unused
  long long position;   // of what `ask_head` gives of this warp's
  uint2 fresh;          // that
  float2 cosine, sine;  // of channels 2 lane and the next, and of those half a head further on
  float of_k, of_v;     // scales

  __device__ __forceinline__ NewTokens(const Cache& own, float eps, Attending& memory, int warp,
                                       int lane)
      : own(own), eps(eps), memory(memory), warp(warp), lane(lane) {}

  // Finds the new tokens of other rows that a row of so many tokens sees.
  __device__ __forceinline__ void find(int length) {
#pragma unroll
    for (int i = 0; i < (ROWS > 1 ? ROWS : 0); i++) {
      const int at = __ldg(own.lengths + i) - 1;
      const long long slot = __ldg(own.slots + i);
      if (i == row || at < 0 || at >= length || slot < 0) continue;
      if (__ldg(own.tables + row * own.width + (at >> 6)) == slot >> 6) seen |= 1u << i;
    }
  }

  // Keeps those in some pages, and the row's own if it is `last` in these.
  __device__ __forceinline__ void keep_within(int first, int end, bool last) {
#pragma unroll
    for (int i = 0; i < (ROWS > 1 ? ROWS : 0); i++) {
      if (!(seen >> i & 1)) continue;
      const int page = (__ldg(own.lengths + i) - 1) >> 6;
      if (page < first || page >= end) seen ^= 1u << i;
    }
    if (last) seen |= 1u << row;
  }

  __device__ __forceinline__ void ask_angles() {
    const long long at = position * DIM + min(2 * lane, DIM / 2 - 2);
    cosine = __ldg((const float2*)(own.turn[0] + at));
    sine = __ldg((const float2*)(own.turn[1] + at));
  }

  // What warps compute: q of the row's queries, then K and V of the new token of each row.
  __device__ __forceinline__ int kind_of(int i) const {  // 0 q, 1 K, 2 V
    return i < QUERIES ? 0 : 1 + (i - QUERIES) % 2;
  }
  __device__ __forceinline__ int row_of(int i) const {
    return ROWS == 1 || i < QUERIES ? row : min((i - QUERIES) / 2, ROWS - 1);
  }

  // Channels 2 lane and the next of it, and those half a head further on.
  __device__ __forceinline__ uint2 ask_head(int i) const {
    const int kind = kind_of(i);
    const int start = kind == 0 ? head * QUERIES + i : (QUERIES + kind - 1) * KV_HEADS + head;
    const bool inside = lane < DIM / 4 && i < QUERIES + 2 * ROWS;
    const u16* place = own.read + (row_of(i) * (QUERIES + 2) * KV_HEADS + start) * DIM + 2 * lane;
    return make_uint2(inside ? read_now(place) : 0, inside ? read_now(place + DIM / 2) : 0);
  }

  // Leaves q, normed and rotated, and K and V of the new tokens in these pages.
  __device__ __forceinline__ void prepare(bool last) {
    for (int i = QUERIES * (DIM / 2) + threadIdx.x; i < 8 * (DIM / 2); i += THREADS) {
      *(u32*)&memory.q[i / (DIM / 2)][i % (DIM / 2) * 2] = 0;
    }
#pragma unroll 1
    for (int i = warp; i < QUERIES + (ROWS > 1 ? 2 * ROWS : last ? 2 : 0); i += WARPS) {
      const int kind = kind_of(i), whose = row_of(i);
      const int c = 2 * lane;
      const bool inside = c < DIM / 2;
      if (ROWS > 1 && kind > 0 && !(seen >> whose & 1)) continue;
      if (ROWS > 1 && i > warp) position = __ldg(own.positions + whose), ask_angles();
      const uint2 bits = i == warp ? fresh : ask_head(i);
      float x[4] = {low(bits.x), high(bits.x), low(bits.y), high(bits.y)};
      if (kind < 2) turn(x, own.norm[kind], c, inside);
      if (kind > 0) keep(x, kind - 1, whose, c, inside);
      else if (inside) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const u32 both = rounded_pair(x[2 * j], x[2 * j + 1]);
          *(u32*)&memory.q[i][c + j * (DIM / 2)] =
              CACHE == 8 ? half_pair(low(both), high(both)) : both;
        }
      }
    }
  }

  // Norms and rotates channels c, c + 1 and those half a head further on.
  __device__ __forceinline__ void turn(float* x, const u16* norm, int c, bool inside) const {
    if (norm) {
      const float mean = warp_sum(x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3]) / DIM;
      const float factor = __frcp_rn(__fsqrt_rn(mean + eps));
      const u32 a = inside ? __ldg((const u32*)(norm + c)) : 0;
      const u32 b = inside ? __ldg((const u32*)(norm + c + DIM / 2)) : 0;
      x[0] *= factor, x[1] *= factor, x[2] *= factor, x[3] *= factor;
      x[0] *= low(a), x[1] *= high(a), x[2] *= low(b), x[3] *= high(b);
    }
    if (!inside) return;
    const float a0 = x[0], a1 = x[1], b0 = x[2], b1 = x[3];
    x[0] = __fsub_rn(__fmul_rn(a0, cosine.x), __fmul_rn(b0, sine.x));
    x[1] = __fsub_rn(__fmul_rn(a1, cosine.y), __fmul_rn(b1, sine.y));
    x[2] = __fadd_rn(__fmul_rn(b0, cosine.x), __fmul_rn(a0, sine.x));
    x[3] = __fadd_rn(__fmul_rn(b1, cosine.y), __fmul_rn(a1, sine.y));
  }

  // Stores four channels of K or V of a row's new token: here, and the row's own in the cache.
  __device__ __forceinline__ void keep(const float* x, int which, int whose, int c, bool inside) {
    if (!inside) return;
    const long long slot = whose == row ? own.slots[row] : -1;
    u32* kept = memory.fresh[ROWS > 1 ? whose : 0][which];
    char* page = own.pages[which] + ((slot >> 6) * KV_HEADS + head) * (64ll * DIM * BYTES);
    const int offset = slot & 63;
    const float scale = which ? of_v : of_k;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int channel = c + (j & 1) + (j >> 1) * (DIM / 2);
      const int at = which ? channel * 64 + offset : offset * DIM + channel;
      float value = x[j];
      if (which == 0 && own.offset) value -= __ldg(own.offset + head * DIM + channel);
      if (CACHE == 8) {
        const char bits = __float2int_rn(fminf(fmaxf(__fdiv_rn(value, scale), -127.f), 127.f));
        ((char*)kept)[channel] = bits;
        if (slot >= 0) page[at] = bits;
      } else {
        const u16 bits = rounded(value);
        ((u16*)kept)[channel] = bits;
        if (slot >= 0) ((u16*)page)[at] = bits;
      }
    }
  }
};
