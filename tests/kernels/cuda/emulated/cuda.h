// What kernels/cuda needs of CUDA C++ and of its primitives.cuh, in plain C++: one thread of the host
// runs all threads of all programs in turns.
//
// A thread runs until it waits for others. Who is next is drawn, and programs sleep now and then; so do
// warps, or some of their lanes, after barriers and exchanges, at the start above all.
// Writes that others are to read, and bulk copies, take effect later, in any order but for those to
// one place; those that make a place blank take longer than a whole launch, where no fence follows.
// So what relies on luck of timing fails here.

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

struct float2 { float x, y; };
struct uint2 { u32 x, y; };
struct __align__(16) uint4 { u32 x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) { return a < b ? b : a; }
template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) { return b < a ? b : a; }

namespace emulation {

constexpr int LANES = 32, EACH = WARPS * LANES, COUNT = PROGRAMS * EACH, STACK = 1 << 18;

struct Warp {
  u32 given[2][LANES][6];
  int arrived = 0;
  u32 turn = 0, lanes = 0;
  long wakes = 0;  // the round in which these lanes wake
};
struct Program {
  char* memory;
  int arrived = 0, asleep = 0;
  u32 turn = 0;
};
struct Write { void* place; u32 bits; int size, delay; };
struct Copy { char* to; const char* from; int bytes, delay, *asked; };
struct Arrival { u32* barrier; int* asked; };  // a barrier: bytes to come, and arrivals
struct Thread {
  ucontext_t start;
  jmp_buf at;  // where it waits
  std::vector<Write> writes;
  int asked = 0;  // bytes that are not there
  bool started = false, done = false;
};
struct Place { int x; };

// Not inline: then kernels that a process has loaded, each with its own sizes, would share these.
static Warp warps[COUNT / LANES];
static Program programs[PROGRAMS];
static Thread threads[COUNT];
static std::vector<Copy> copies;
static std::vector<Arrival> arrivals;
static jmp_buf scheduler;
static int now;        // the thread that runs
static char* arena;    // shared memory of all programs
static u64 state = 1;  // of what is drawn
static u32 phase = 1;  // arrivals of a phase of a barrier
static long round = 0;  // turns of all threads so far

inline u32 drawn() {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return (u32)(state >> 32);
}
inline void wait() {
  if (!_setjmp(threads[now].at)) _longjmp(scheduler, 1);
}
// Lets the thread run until it waits or has ended.
inline void resume() {
  Thread& own = threads[now];
  if (_setjmp(scheduler)) return;
  if (own.started) _longjmp(own.at, 1);
  own.started = true;
  setcontext(&own.start);
}

// Lets a warp, or some of its lanes, sleep for long, once in so many calls.
inline void doze(Warp& own, u32 rarity) {
  if (drawn() % rarity) return;
  own.wakes = round + drawn() % 600, own.lanes = drawn() % 2 ? ~0u : drawn();
}

// Words of all lanes of the warp, when all have given theirs.
template <typename... Words>
const u32 (*exchanged(Words... words))[6] {
  Warp& own = warps[now / LANES];
  const u32 turn = own.turn;
  u32(*place)[6] = own.given[turn & 1];
  u32* to = place[now % LANES];
  ((*to++ = (u32)words), ...);
  if (++own.arrived == LANES) own.arrived = 0, own.turn++, doze(own, round ? 2000 : 8);
  while (own.turn == turn) wait();
  return place;
}

// Lets what is due of a thread's writes take effect, or all.
inline void settle(Thread& own, bool all) {
  auto& writes = own.writes;
  size_t kept = 0;
  for (size_t i = 0; i < writes.size(); i++) {
    bool later = !all && writes[i].delay-- > 0;
    for (size_t j = 0; j < kept && !all; j++) later |= writes[j].place == writes[i].place;
    if (later) writes[kept++] = writes[i];
    else std::memcpy(writes[i].place, &writes[i].bits, writes[i].size);
  }
  writes.resize(kept);
}

inline void settle_copies() {
  size_t kept = 0;
  for (Copy& own : copies) {
    if (own.delay-- > 0) {
      copies[kept++] = own;
      continue;
    }
    std::memcpy(own.to, own.from, own.bytes);
    *own.asked -= own.bytes;
  }
  copies.resize(kept);
  kept = 0;
  for (Arrival& own : arrivals) {
    if (*own.asked) arrivals[kept++] = own;
    else own.barrier[1]++;
  }
  arrivals.resize(kept);
}

// Runs a kernel whose programs share so many bytes each; gives whether it ends within some rounds.
inline bool run(void (*body)(), size_t shared, u64 seed, long rounds) {
  state = seed | 1;
  const size_t own = (shared + 127) / 128 * 128, all = own * PROGRAMS;
  const int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  arena = (char*)mmap(nullptr, all, PROT_READ | PROT_WRITE, how, -1, 0);
  char* stacks = (char*)mmap(nullptr, (size_t)COUNT * STACK, PROT_READ | PROT_WRITE, how, -1, 0);
  std::memset(arena, 0xa5, all);
  for (int i = 0; i < PROGRAMS; i++) programs[i] = {arena + i * own};
  for (Warp& warp : warps) warp = Warp();
  copies.clear(), arrivals.clear();
  for (int i = 0; i < COUNT; i++) {
    Thread& thread = threads[i];
    getcontext(&thread.start);
    thread.start.uc_stack.ss_sp = stacks + (size_t)i * STACK;
    thread.start.uc_stack.ss_size = STACK;
    thread.started = thread.done = false, thread.asked = 0;
    makecontext(&thread.start, body, 0);
  }
  int left = COUNT;
  for (round = 0; left && round < rounds; round++) {
    const u32 first = drawn();
    for (u32 i = 0; i < PROGRAMS; i++) {
      Program& program = programs[(first + i) % PROGRAMS];
      const int start = (int)((first + i) % PROGRAMS) * EACH;
      for (int k = 0; k < EACH; k++) settle(threads[start + k], false);
      if (program.asleep-- > 0) continue;
      program.asleep = drawn() % 500 ? 0 : (int)(drawn() % 300);
      const u32 turned = drawn();
      for (int k = 0; k < EACH; k++) {
        now = start + (int)((turned + k) % EACH);
        const Warp& warp = warps[now / LANES];
        if (threads[now].done || round < warp.wakes && warp.lanes >> now % LANES & 1) continue;
        resume();
        left -= threads[now].done;
      }
    }
    settle_copies();
  }
  for (Thread& thread : threads) settle(thread, true);
  munmap(arena, all);
  munmap(stacks, (size_t)COUNT * STACK);
  return left == 0;
}

}  // namespace emulation

#define blockIdx (emulation::Place{emulation::now / emulation::EACH})
#define threadIdx (emulation::Place{emulation::now % emulation::EACH})

inline float as_float(u32 bits) { float value; std::memcpy(&value, &bits, 4); return value; }
inline u32 as_bits(float value) { u32 bits; std::memcpy(&bits, &value, 4); return bits; }
inline float __uint_as_float(u32 bits) { return as_float(bits); }
inline float __int_as_float(int bits) { return as_float((u32)bits); }
inline u32 __float_as_uint(float value) { return as_bits(value); }
inline int __float_as_int(float value) { return (int)as_bits(value); }
inline int __float2int_rn(float value) { return (int)std::nearbyintf(value); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __frcp_rn(float a) { return 1.f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float rsqrtf(float a) { return 1.f / std::sqrt(a); }
inline float __expf(float a) { return std::exp(a); }
template <typename T> T __ldg(const T* place) { return *place; }
inline u32 __byte_perm(u32 a, u32 b, u32 which) {
  const u64 both = (u64)b << 32 | a;
  u32 found = 0;
  for (int i = 0; i < 4; i++) found |= (u32)(both >> (which >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return found;
}

inline void __syncthreads() {
  emulation::Program& own = emulation::programs[blockIdx.x];
  const u32 turn = own.turn;
  if (++own.arrived == emulation::EACH) {
    own.arrived = 0, own.turn++;
    emulation::doze(emulation::warps[blockIdx.x * WARPS + emulation::drawn() % WARPS], 4);
  }
  while (own.turn == turn) emulation::wait();
}
inline void __syncwarp() { emulation::exchanged(0); }
inline void __threadfence() { emulation::settle(emulation::threads[emulation::now], true); }
inline u32 __shfl_bits(u32 bits, int from) { return emulation::exchanged(bits)[from][0]; }
inline int __shfl_sync(u32, int value, int from) { return (int)__shfl_bits((u32)value, from); }
inline float __shfl_xor_sync(u32, float value, int far) {
  return as_float(__shfl_bits(as_bits(value), (emulation::now % 32) ^ far));
}
inline bool __any_sync(u32, bool value) {
  const auto all = emulation::exchanged(value);
  for (int i = 0; i < 32; i++) if (all[i][0]) return true;
  return false;
}
inline u32 __reduce_max_sync(u32, u32 value) {
  const auto all = emulation::exchanged(value);
  u32 found = 0;
  for (int i = 0; i < 32; i++) found = max(found, all[i][0]);
  return found;
}
inline u32 __reduce_min_sync(u32, u32 value) {
  const auto all = emulation::exchanged(value);
  u32 found = ~0u;
  for (int i = 0; i < 32; i++) found = min(found, all[i][0]);
  return found;
}
inline int __reduce_add_sync(u32, int value) {
  const auto all = emulation::exchanged(value);
  u32 found = 0;
  for (int i = 0; i < 32; i++) found += all[i][0];
  return (int)found;
}

// From here on what the kernels' primitives.cuh has.

constexpr float INTEGER = 12582912.f;
constexpr u32 INTEGER_BITS = 0x4B400000u;

inline float low(u32 pair) { return as_float(pair << 16); }
inline float high(u32 pair) { return as_float(pair & 0xffff0000u); }
inline float widened(u16 bits) { return as_float((u32)bits << 16); }
inline u16 rounded(float value) {
  const u32 bits = as_bits(value);
  if (value != value) return 0x7fff;
  return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline u32 rounded_pair(float first, float second) {
  return rounded(first) | (u32)rounded(second) << 16;
}
inline u32 half_bits(float value) {
  const _Float16 half = (_Float16)value;
  u16 bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
inline float of_half(u32 bits) {
  const u16 own = (u16)bits;
  _Float16 half;
  std::memcpy(&half, &own, 2);
  return (float)half;
}
inline u32 half_pair(float first, float second) {
  return half_bits(first) | half_bits(second) << 16;
}
inline u32 half_difference(u32 a, u32 b) {
  return half_pair(of_half(a) - of_half(b), of_half(a >> 16) - of_half(b >> 16));
}
inline u32 shared_address(const void* place) {
  return (u32)((const char*)place - emulation::arena);
}
inline bool byte_blank(u32 word) {
  for (int i = 0; i < 4; i++) if ((word >> 8 * i & 0xff) == 0xff) return true;
  return false;
}
inline bool half_blank(u32 pair) { return (pair & 0xffffu) == 0xffffu || pair >> 16 == 0xffffu; }
inline u32 read_now(const void* place) {
  u32 bits;
  std::memcpy(&bits, place, 4);
  if (half_blank(bits)) emulation::wait();  // it will be read again
  return bits;
}
inline void read_two_now(u32* bits, const void* place) { std::memcpy(bits, place, 8); }
inline void read_four_now(u32* bits, const void* place) { std::memcpy(bits, place, 16); }
inline uint4 read_once(const void* place) {
  uint4 found;
  std::memcpy(&found, place, 16);
  return found;
}
template <typename T>
void write_now(T* place, T bits) {
  auto& writes = emulation::threads[emulation::now].writes;
  // That a place is blank again is seen very late, if the thread does not see to it.
  const int most = bits == (T)~0u ? 1 << 20 : 4;
  writes.push_back({place, (u32)bits, (int)sizeof(T), (int)(emulation::drawn() % most)});
}
template <typename T>
T& shared_memory() { return *(T*)emulation::programs[blockIdx.x].memory; }
inline void wait_for_kernels_ahead() {}
inline u64 evicted_first() { return 0; }
inline bool elected() { return emulation::now % 32 == 0; }
template <int ARRIVALS>
void start_barriers(u32 first, int count) {
  emulation::phase = ARRIVALS;
  for (int i = 0; i < count; i++) ((u64*)(emulation::arena + first))[i] = 0;
}
inline void start_barrier_of_warps(u32 barrier) { *(u64*)(emulation::arena + barrier) = 0; }
inline void arrive(u32 barrier) {
  u32* own = (u32*)(emulation::arena + barrier);
  if (++own[0] == WARPS) own[0] = 0, own[1] += emulation::phase;
}
inline void copy_later(u32 to, const void* from, int bytes, int* asked) {
  const int delay = (int)(emulation::drawn() % 16);
  emulation::copies.push_back({emulation::arena + to, (const char*)from, bytes, delay, asked});
}
inline void copy(u32 to, const void* from, u64) {
  int* asked = &emulation::threads[emulation::now].asked;
  *asked += 16;
  copy_later(to, from, 16, asked);
}
inline void arrive_when_copied(u32 barrier) {
  int* asked = &emulation::threads[emulation::now].asked;
  emulation::arrivals.push_back({(u32*)(emulation::arena + barrier), asked});
}
inline void expect(u32 barrier, u32 bytes) {
  int* asked = (int*)(emulation::arena + barrier);
  *asked += (int)bytes;
  emulation::arrivals.push_back({(u32*)asked, asked});
}
// A tensor map here: where [outputs, inputs] in bf16 begin, and inputs.
inline void copy_box(u32 to, const void* map, int, int output, int run, u32 barrier, u64) {
  const u64* own = (const u64*)map;
  for (int i = 0; i < 4; i++) {
    for (int row = 0; row < 16; row++) {
      const u16* from = (const u16*)own[0] + (output + row) * own[1] + (run + i) * 32;
      copy_later(to + i * 1024 + row * 64, from, 64, (int*)(emulation::arena + barrier));
    }
  }
}
inline void wait_for(u32 barrier, u32 parity) {
  const volatile u32* own = (u32*)(emulation::arena + barrier);
  while ((own[1] / emulation::phase & 1) == parity) emulation::wait();
}
inline float warp_sum(float value) {
  for (int far = 16; far; far /= 2) value += __shfl_xor_sync(~0u, value, far);
  return value;
}

// Products of a warp: rows `lane / 4` and 8 further on of a, columns 2 (lane % 4) and the next of b;
// `element(word, i)` is the i-th of a word.
template <typename Sum, int EACH, typename A, typename B>
void multiply_words(Sum* d, const Sum* c, const u32 (*all)[6], A of_a, B of_b) {
  const int g = emulation::now % 32 / 4, t = emulation::now % 4;
  for (int i = 0; i < 4; i++) {
    Sum sum = 0;
    for (int half = 0; half < 2; half++) {
      for (int k = 0; k < 4; k++) {
        const u32 a = all[4 * g + k][2 * half + i / 2], b = all[4 * (2 * t + i % 2) + k][4 + half];
        for (int j = 0; j < EACH; j++) sum += of_a(a, j) * of_b(b, j);
      }
    }
    d[i] = c[i] + sum;
  }
}
inline int signed_byte(u32 word, int i) { return (signed char)(word >> 8 * i); }
inline int unsigned_byte(u32 word, int i) { return (int)(word >> 8 * i & 0xff); }
inline float of_half_pair(u32 word, int i) { return of_half(word >> 16 * i); }
inline float of_bf16_pair(u32 word, int i) { return i ? high(word) : low(word); }
inline void multiply_unsigned(int* d, const int* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const auto all = emulation::exchanged(a0, a1, a2, a3, b0, b1);
  multiply_words<int, 4>(d, c, all, unsigned_byte, signed_byte);
}
inline void multiply_signed(int* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const auto all = emulation::exchanged(a0, a1, a2, a3, b0, b1);
  multiply_words<int, 4>(d, d, all, signed_byte, signed_byte);
}
inline void multiply_fp16(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const auto all = emulation::exchanged(a0, a1, a2, a3, b0, b1);
  multiply_words<float, 2>(d, d, all, of_half_pair, of_half_pair);
}
inline void multiply_bf16(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const auto all = emulation::exchanged(a0, a1, a2, a3, b0, b1);
  multiply_words<float, 2>(d, d, all, of_bf16_pair, of_bf16_pair);
}
