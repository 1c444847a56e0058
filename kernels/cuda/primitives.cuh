// Instructions that C++ has no words for, and conversions of bf16.

constexpr float INTEGER = 12582912.f;  // 1.5 * 2^23: the last bits of a sum with it are an integer
constexpr u32 INTEGER_BITS = 0x4B400000u;

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float widened(u16 bits) { return __uint_as_float((u32)bits << 16); }
__device__ __forceinline__ u16 rounded(float value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
__device__ __forceinline__ u32 rounded_pair(float first, float second) {
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}
__device__ __forceinline__ u32 half_pair(float first, float second) {
  u32 bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}
// a - b, of two fp16 each.
__device__ __forceinline__ u32 half_difference(u32 a, u32 b) {
  asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
__device__ __forceinline__ u32 shared_address(const void* place) {
  return (u32)__cvta_generic_to_shared(place);
}
__device__ __forceinline__ u32 read_now(const void* place) {
  u32 bits;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(bits) : "l"(place));
  return bits;
}
__device__ __forceinline__ void read_two_now(u32* bits, const void* place) {
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(bits[0]), "=r"(bits[1]) : "l"(place));
}
__device__ __forceinline__ void read_four_now(u32* bits, const void* place) {
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3]) : "l"(place));
}
__device__ __forceinline__ uint4 read_once(const void* place) {
  uint4 found;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w) : "l"(place));
  return found;
}
__device__ __forceinline__ void write_now(u16* place, u16 bits) {
  asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(place), "h"(bits) : "memory");
}
__device__ __forceinline__ void write_now(u32* place, u32 bits) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(place), "r"(bits) : "memory");
}
__device__ __forceinline__ void write_now(unsigned char* place, unsigned char bits) {
  asm volatile("st.relaxed.gpu.global.u8 [%0], %1;" ::"l"(place), "r"((u32)bits) : "memory");
}
// Whether a byte of a word, or a half of it, is blank.
__device__ __forceinline__ bool byte_blank(u32 word) {
  return (~word - 0x01010101u) & word & 0x80808080u;
}
__device__ __forceinline__ bool half_blank(u32 pair) {
  return (pair & 0xffffu) == 0xffffu || pair >> 16 == 0xffffu;
}
// Memory of a program that its threads share, all that there is.
template <typename T>
__device__ __forceinline__ T& shared_memory() {
  extern __shared__ __align__(128) char bytes[];
  return *(T*)bytes;
}
// Until kernels ahead have ended, and all that they wrote can be read; then those behind may start.
__device__ __forceinline__ void wait_for_kernels_ahead() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
}
// What is read once.
__device__ __forceinline__ u64 evicted_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// One lane of a warp, by an instruction from which the compiler knows that it is one.
__device__ __forceinline__ bool elected() {
  u32 own;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(own));
  return own;
}
// Barriers of what all lanes of a warp copy, or of what one asks TMA for.
template <int ARRIVALS>
__device__ __forceinline__ void start_barriers(u32 first, int count) {
  for (int i = 0; i < count; i++) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(first + i * 8), "n"(ARRIVALS)
                 : "memory");
  }
  if (ARRIVALS == 1) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// A barrier at which each warp of a program arrives once.
__device__ __forceinline__ void start_barrier_of_warps(u32 barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "n"(WARPS) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives at a barrier that so many bytes are to reach.
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Asks TMA for a box of what a tensor map describes, from three coordinates on.
__device__ __forceinline__ void copy_box(u32 to, const void* map, int x, int y, int z, u32 barrier,
                                         u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;"
      :: "r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy) : "memory");
}
// Asks for 16 bytes.
__device__ __forceinline__ void copy(u32 to, const void* from, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "l"(policy) : "memory");
}
// Arrives at a barrier when all that the thread has asked for is there.
__device__ __forceinline__ void arrive_when_copied(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_for(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
        "selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } while (!done);
}
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int far = 16; far; far /= 2) value += __shfl_xor_sync(~0u, value, far);
  return value;
}

// d = a b + c of 16 outputs, 32 inputs and 8 columns: bytes of a are unsigned, those of b are signed.
__device__ __forceinline__ void multiply_unsigned(int* d, const int* c, u32 a0, u32 a1, u32 a2,
                                                  u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]),
        "r"(c[3]));
}
// d += a b, likewise, with signed bytes.
__device__ __forceinline__ void multiply_signed(int* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                                u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// d += a b of 16 rows, 16 of what is summed and 8 columns, in fp16 or bf16.
#define MULTIPLY(NAME, TYPE)                                                                       \
  __device__ __forceinline__ void NAME(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, "           \
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                            \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                           \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                                   \
  }
MULTIPLY(multiply_fp16, "f16")
MULTIPLY(multiply_bf16, "bf16")
#undef MULTIPLY
