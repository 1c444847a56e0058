// How sums become the outputs of a product, each by a thread, and when their place is free.

// Calls body(i, row, n, output) for each output of one side that the program owns, a thread each.
template <int P, typename Body>
__device__ __forceinline__ void for_outputs(Body body) {
  const int count = owned<P>() * GROUP;
#pragma unroll
  for (int i = 0; i < turns(P); i++) {
    const int k = threadIdx.x + i * THREADS;
    if (k < count * ROWS) {
      const int row = k / count, n = k - row * count;
      body(i, row, n, (int)blockIdx.x * most(P) * GROUP + n);
    }
  }
}

// What a thread's outputs are multiplied by and added to, asked for before they are there.
template <int P>
struct Finish {
  const Block& own;
  float scale[sides(P)][turns(P)], bias[sides(P)][turns(P)];

  __device__ __forceinline__ explicit Finish(const Block& own) : own(own) {
    for_outputs<P>([&](int i, int, int, int output) {
#pragma unroll
      for (int side = 0; side < sides(P); side++) {
        const int at = output + side * INNER;
        scale[side][i] = BITS == 8 ? __ldg((const float*)own.scale[P] + at) : 1.f;
        const void* place = own.bias[P];
        bias[side][i] = !place       ? 0.f
                        : BITS == 16 ? widened(__ldg((const u16*)place + at))
                                     : __ldg((const float*)place + at);
      }
    });
  }

  // An output, rounded to bf16: the sum of the warps' parts in their order.
  __device__ __forceinline__ float operator()(const Memory& memory, int i, int row, int n,
                                              int side = 0) const {
    Part sum = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) {
      sum += memory.part[warp][row][side * most(P) * GROUP + n];
    }
    const float times = BITS == 8   ? memory.scale[P & 1][row] * scale[side][i]
                        : normed(P) ? norm_factor(own, memory, row)
                                    : 1.f;
    return widened(rounded(__fadd_rn(__fmul_rn((float)sum, times), bias[side][i])));
  }
};

// Says that this warp has read the parts of a product, in whose place it leaves those of the next one
// when all have. Only where inputs have that place, too, it waits for all at once.
__device__ __forceinline__ void finish_product(Memory& memory, int lane) {
  if (IN_PLACE) {
    __syncthreads();
    return;
  }
  __syncwarp();
  if (lane == 0) arrive(shared_address(&memory.finished));
}
