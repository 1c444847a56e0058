// Decode attention of a block, in front of its o: q and k normed and rotated, the new token's K and
// V put into the cache, and attention over pages. Defined beside what fused_block.cu says are
//
//   DIM, QUERIES                    channels of a head, 64 or 128, and queries of a KV head, 1 to 8
//   CACHE                           bits of K and V: 8, int8 with a scale for each head, or 16, bf16
//   SPLITS                          programs that share a KV head of a token, a power of two
//
// Pages hold 64 tokens, K token by token and V channel by channel. A program takes pages in turns of
// 16 tokens a warp. Scores: K q^T of 16 tokens a warp. Results: V^T P^T of 16 channels and a part of
// the turn's tokens a warp. Both sum in an order in which 16 bytes of a lane are the operand of the
// tensor cores as they stand. Programs of a head hand on what they have, and each adds up some
// outputs, which it hands on to all.

constexpr int TILES = DIM / 16;         // of channels
constexpr int PARTS = WARPS / TILES;    // warps that share the tokens of a turn
constexpr int PAGES = WARPS / 4;        // of a turn
constexpr int OWN_PAGES = PAGES / PARTS;
constexpr int TOKENS = 64 * PAGES, BYTES = CACHE / 8;
constexpr int EACH = 16 / BYTES;        // elements of 16 bytes
constexpr int K_PIECES = DIM * BYTES / 64, V_PIECES = BYTES;  // of 64 bytes, of a row
constexpr int RESULTS = QUERIES * DIM;  // of a KV head
constexpr int MERGED = RESULTS / SPLITS;
constexpr int HANDED = RESULTS + 2 * QUERIES;  // sums, then maxima and totals
constexpr int HEAD_PROGRAMS = ROWS * KV_HEADS * SPLITS;
constexpr int HANDED_IN = 4 * HEAD_PROGRAMS * HANDED + ROWS * ATTENTION * sizeof(Inner);  // bytes
constexpr float NOTHING = -1e30f;       // a maximum of nothing; finite, so that differences are

static_assert(PARTS * TILES == WARPS && OWN_PAGES * PARTS == PAGES && MERGED * SPLITS == RESULTS, "");

struct Attending {
  union {
    struct {
      u16 q[8][DIM + 4];           // fp16 beside int8, else bf16
      u16 weight[8][TOKENS + 4];
    };
    float merged[3][RESULTS];      // what programs of a head have handed on
  };
  float result[PARTS][QUERIES][DIM];
  __align__(16) u32 fresh[ROWS][2][DIM * BYTES / 4];  // K and V of new tokens, as they are cached
  float top[WARPS][8], sum[WARPS][8], highest[8];
};

// Four numbers of the cache, from a word of int8 or two of bf16, as two words of an operand.
__device__ __forceinline__ void widen(u32* to, const uint4& piece, int i) {
  const u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
  if (CACHE == 16) {
    to[0] = words[2 * i], to[1] = words[2 * i + 1];
    return;
  }
  const u32 bytes = words[i] ^ 0x80808080u;
  to[0] = __byte_perm(bytes, 0x64646464u, 0x4140);  // 1024 + 128 + n
  to[1] = __byte_perm(bytes, 0x64646464u, 0x4342);
  to[0] = half_difference(to[0], 0x64806480u), to[1] = half_difference(to[1], 0x64806480u);
}

// d += a b of 16 rows, 16 of what is summed and 8 columns; `first` and `second` are rows 8 apart.
__device__ __forceinline__ void multiply_halves(float* d, const u32* first, const u32* second,
                                                uint2 b) {
  if (CACHE == 8) multiply_fp16(d, first[0], second[0], first[1], second[1], b.x, b.y);
  else multiply_bf16(d, first[0], second[0], first[1], second[1], b.x, b.y);
}

#include "new_tokens.cuh"

// Attention of a program: a KV head of a token, and some of its pages.
struct Attention : NewTokens {
  int split;
  int length, first, end;  // tokens, pages
  uint4 k[2][K_PIECES], v[OWN_PAGES][2][V_PIECES];

  __device__ __forceinline__ Attention(const Cache& own, float eps, Attending& memory, int warp,
                                       int lane)
      : NewTokens(own, eps, memory, warp, lane) {
    const int item = blockIdx.x / SPLITS;
    split = blockIdx.x % SPLITS, row = item / KV_HEADS, head = item % KV_HEADS;
    length = first = end = 0;
    if (!takes()) return;
    length = __ldg(own.lengths + row), position = __ldg(own.positions + row_of(warp));
    find(length);
    of_k = CACHE == 8 ? __ldg(own.scale[0] + head) : 1.f;
    of_v = CACHE == 8 ? __ldg(own.scale[1] + head) : 1.f;
  }

  // Asks for what the kernel ahead wrote, then for pages; each of these waits for a number only.
  __device__ __forceinline__ void ask() {
    fresh = ask_head(warp);
    const int pages = (length + 63) / 64, share = (pages + SPLITS - 1) / SPLITS;
    first = min(split * share, pages), end = min(first + share, pages);
    keep_within(first, end, is_last());
    load_keys(first);
    load_values(first);
    ask_angles();
  }

  __device__ __forceinline__ bool takes() const { return row < ROWS; }
  __device__ __forceinline__ bool is_last() const { return first < end && end * 64 >= length; }

  // Asks for K of a turn that begins with a page. The new token's is not there yet.
  __device__ __forceinline__ void load_keys(int page) {
    const int g = lane >> 2, t = lane & 3, own_page = page + (warp >> 2);
    const uint4 none = make_uint4(0, 0, 0, 0);
    const char* place = nullptr;
    if (own_page < end) {
      place = page_at(0, own_page) + (16 * (warp & 3) + g) * (DIM * BYTES) + t * 16;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int i = 0; i < K_PIECES; i++) {
        k[half][i] = place ? read_once(place + 8 * half * (DIM * BYTES) + 64 * i) : none;
      }
    }
  }

  // The same of V.
  __device__ __forceinline__ void load_values(int page) {
    const int g = lane >> 2, t = lane & 3;
    const uint4 none = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < OWN_PAGES; j++) {
      const int own_page = page + warp / TILES * OWN_PAGES + j;
      const char* place = nullptr;
      if (own_page < end) {
        place = page_at(1, own_page) + (16 * (warp % TILES) + g) * (64 * BYTES) + t * 16;
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < V_PIECES; i++) {
          v[j][half][i] = place ? read_once(place + 8 * half * (64 * BYTES) + 64 * i) : none;
        }
      }
    }
  }

  __device__ __forceinline__ char* page_at(int which, int page) const {
    const long long number = __ldg(own.tables + row * own.width + page);
    return own.pages[which] + (number * KV_HEADS + head) * (64 * DIM * BYTES);
  }

  // Puts new tokens into what was asked for of a turn, which begins with a page.
  __device__ __forceinline__ void renew(int page) {
    if (ROWS == 1) renew_one(memory.fresh[0], page, (length - 1) & 63, end - 1);
#pragma unroll 1
    for (int i = 0; i < (ROWS > 1 ? ROWS : 0); i++) {
      if (!(seen >> i & 1)) continue;
      const int token = __ldg(own.lengths + i) - 1;
      renew_one(memory.fresh[i], page, token & 63, token >> 6);
    }
  }

  __device__ __forceinline__ void renew_one(const u32 (*kept)[DIM * BYTES / 4], int page, int at,
                                            int last) {
    const int g = lane >> 2, t = lane & 3;
    if (page + (warp >> 2) == last && at >> 4 == (warp & 3) && (at & 7) == g) {
#pragma unroll
      for (int i = 0; i < K_PIECES; i++) {
        const uint4 fresh = *(const uint4*)((const char*)kept[0] + 64 * i + 16 * t);
        if (at & 8) k[1][i] = fresh;
        else k[0][i] = fresh;
      }
    }
    const int piece = at * BYTES / 64, of_lane = at * BYTES % 64 / 16, word = at * BYTES % 16 / 4;
#pragma unroll
    for (int j = 0; j < OWN_PAGES; j++) {
      if (page + warp / TILES * OWN_PAGES + j != last || t != of_lane) continue;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int channel = 16 * (warp % TILES) + g + 8 * half;
        const u32 shift = at * BYTES % 4 * 8, mask = (CACHE == 8 ? 0xffu : 0xffffu) << shift;
        const u32 bits = CACHE == 8 ? ((const unsigned char*)kept[1])[channel]
                                    : ((const u16*)kept[1])[channel];
#pragma unroll
        for (int i = 0; i < V_PIECES; i++) {
          u32* words = (u32*)&v[j][half][i];
#pragma unroll
          for (int w = 0; w < 4; w++) {
            if (i == piece && w == word) words[w] = (words[w] & ~mask) | bits << shift;
          }
        }
      }
    }
  }

  // Attends to all pages of the program, and hands on the sums of its queries.
  __device__ __forceinline__ void run(u32* parts, int other) {
    const int g = lane >> 2, t = lane & 3;
    prepare(is_last());
    __syncthreads();
    const float factor = own.softmax_scale * 1.4426950408889634f * of_k;
    float top[2] = {NOTHING, NOTHING}, sum[2] = {}, d[4] = {};  // of queries 2 t and the next
#pragma unroll 1
    for (int page = first; page < end; page += PAGES) {
      if (ROWS > 1 ? seen != 0 : page + PAGES >= end && is_last()) renew(page);
      float s[4] = {};
#pragma unroll
      for (int i = 0; i < K_PIECES; i++) {
#pragma unroll
        for (int j = 0; j < EACH / 4; j++) {
          u32 a[2], b[2];
          widen(a, k[0][i], j), widen(b, k[1][i], j);
          const u16* place = &memory.q[g][(4 * i + t) * EACH + 4 * j];
          multiply_halves(s, a, b, *(const uint2*)place);
        }
      }
      if (page + PAGES < end) load_keys(page + PAGES);
      const int token = 16 * warp + g;
      const int left = min(end * 64, length) - page * 64;
      const bool seen[2] = {token < left, token + 8 < left};
#pragma unroll
      for (int j = 0; j < 4; j++) s[j] = seen[j >> 1] ? s[j] * factor : NOTHING;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float most = fmaxf(s[j], s[j + 2]);
#pragma unroll
        for (int far = 4; far < 32; far *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, far));
        if (g == 0) memory.top[warp][2 * t + j] = most;
      }
      __syncthreads();
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float most = top[j];
#pragma unroll
        for (int i = 0; i < WARPS; i++) most = fmaxf(most, memory.top[i][2 * t + j]);
        const float shrink = exp2f(top[j] - most);
        top[j] = most;
        const float one = seen[0] ? exp2f(s[j] - most) : 0.f;
        const float two = seen[1] ? exp2f(s[j + 2] - most) : 0.f;
        sum[j] = sum[j] * shrink + one + two;
        d[j] *= shrink, d[j + 2] *= shrink;
        const u32 both = CACHE == 8 ? half_pair(one, two) : rounded_pair(one, two);
        memory.weight[2 * t + j][token] = both & 0xffff;
        memory.weight[2 * t + j][token + 8] = both >> 16;
      }
      __syncthreads();
#pragma unroll
      for (int n = 0; n < OWN_PAGES; n++) {
        const int start = (warp / TILES * OWN_PAGES + n) * 64;
#pragma unroll
        for (int i = 0; i < V_PIECES; i++) {
#pragma unroll
          for (int j = 0; j < EACH / 4; j++) {
            u32 a[2], b[2];
            widen(a, v[n][0][i], j), widen(b, v[n][1][i], j);
            const u16* place = &memory.weight[g][start + (4 * i + t) * EACH + 4 * j];
            multiply_halves(d, a, b, *(const uint2*)place);
          }
        }
      }
      if (page + PAGES < end) load_values(page + PAGES);
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int query = 2 * t + j, channel = 16 * (warp % TILES) + g;
#pragma unroll
      for (int far = 4; far < 32; far *= 2) sum[j] += __shfl_xor_sync(~0u, sum[j], far);
      if (g == 0) memory.sum[warp][query] = sum[j];
      if (g == 0 && warp == 0) memory.highest[query] = top[j];
      if (query < QUERIES) {
        memory.result[warp / TILES][query][channel] = d[j];
        memory.result[warp / TILES][query][channel + 8] = d[j + 2];
      }
    }
    __syncthreads();
    u32* place = parts + (long long)blockIdx.x * HANDED;
#pragma unroll
    for (int i = threadIdx.x; i < RESULTS; i += THREADS) {
      float value = 0;
#pragma unroll
      for (int part = 0; part < PARTS; part++) value += (&memory.result[part][0][0])[i];
      hand_on(place + i, __float_as_uint(value), other);
    }
    if (threadIdx.x < QUERIES) {
      float total = 0;
#pragma unroll
      for (int i = 0; i < WARPS; i++) total += memory.sum[i][threadIdx.x];
      hand_on(place + RESULTS + threadIdx.x, __float_as_uint(memory.highest[threadIdx.x]), other);
      hand_on(place + RESULTS + QUERIES + threadIdx.x, __float_as_uint(total), other);
    }
  }

  // Adds up some outputs of what the programs of the head have handed on, and hands these on.
  __device__ __forceinline__ void merge(const u32* parts, Inner* out, float times, int other) {
    const u32* place = parts + (long long)(blockIdx.x - split) * HANDED;
#pragma unroll
    for (int i = threadIdx.x; i < RESULTS; i += THREADS) {
      const int from = i / MERGED, output = split * MERGED + i % MERGED;
      const u32* own_part = place + from * HANDED;
      const u32* of_query = own_part + RESULTS + output / DIM;
      u32 bits[3];
      do {
        bits[0] = read_now(own_part + output);
        bits[1] = read_now(of_query), bits[2] = read_now(of_query + QUERIES);
      } while (bits[0] == BLANK || bits[1] == BLANK || bits[2] == BLANK);
#pragma unroll
      for (int j = 0; j < 3; j++) memory.merged[j][i] = __uint_as_float(bits[j]);
    }
    __syncthreads();
    for (int n = threadIdx.x; n < MERGED; n += THREADS) {
      float top = NOTHING, sum = 0, value = 0;
#pragma unroll
      for (int i = 0; i < SPLITS; i++) top = fmaxf(top, memory.merged[1][i * MERGED + n]);
#pragma unroll
      for (int i = 0; i < SPLITS; i++) {
        const int at = i * MERGED + n;
        const float weight = exp2f(memory.merged[1][at] - top);
        value += memory.merged[0][at] * weight;
        sum += memory.merged[2][at] * weight;
      }
      const float y = sum > 0 ? value * of_v / sum : sum;  // NaN stays, nothing is 0
      const int output = split * MERGED + n;
      hand_on(out + row * ATTENTION + head * RESULTS + output, inner_bits(y, times), other);
    }
  }
};
