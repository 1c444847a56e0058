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
__device__ __forceinline__ void write_now(u16* place, u16 bits) {
  asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(place), "h"(bits) : "memory");
}
__device__ __forceinline__ void write_now(u32* place, u32 bits) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(place), "r"(bits) : "memory");
}
__device__ __forceinline__ bool half_blank(u32 pair) {
  return (pair & 0xffffu) == 0xffffu || pair >> 16 == 0xffffu;
}
__device__ __forceinline__ bool elected() {
  u32 own;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(own));
  return own;
}
__device__ __forceinline__ void copy(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
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
