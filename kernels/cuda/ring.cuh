// How a warp's ring of slots is filled with weights, in the order in which products take them.

template <int P>
__device__ __forceinline__ void ask_for(const Block& own, const Memory& memory, Ring& ring,
                                        int warp, int lane) {
  const u32 side = sides(P) == 2 && ring.chunk >= chunks(P);
  const u32 start = (ring.chunk - side * chunks(P)) * CHUNK;
  const bool whole = groups(P) % PROGRAMS == 0 && most(P) % CHUNK == 0;
  const int count = whole ? CHUNK : min(CHUNK, owned<P>() - (int)start);
  u32 group = blockIdx.x * most(P) + start, block = ring.block, expert = 0;
  if (EXPERTS && (P == GATE_UP || P == DOWN)) {
    constexpr u32 EACH = P == DOWN ? INNER / 128 : INNER / GROUP;
    u32& at = P == DOWN ? block : group;
    const u32 place = at / EACH;
    at -= place * EACH;
    expert = memory.expert[warp][place];
  }
  group += side * (outputs(P) / 2 / GROUP);
  copy_chunk<P>(own, ring, expert, block, group, count, lane);
  if (++ring.chunk == chunks(P) * sides(P)) {
    ring.chunk = 0;
    ring.block += WARPS;
    if (ring.block >= blocks(P)) ring.block = warp, ring.product = P + 1;
  }
  if (++ring.give == DEPTH) ring.give = 0;
  ring.room--;
}

// Asks for weights of a product and of what follows it, as long as there is room beyond some slots and it
// is known which. With weights of down under way, handing on gate times up would take longer: within
// gate and up, none are asked for.
template <int P>
__device__ __forceinline__ void fill(const Block& own, const Memory& memory, Ring& ring, int warp,
                                     int lane, int kept = 0) {
  constexpr int NEXT = P == GATE_UP || P == STEPS - 1 ? P : P + 1;
#pragma unroll 1
  while (ring.room > kept && ring.product < ring.known) {
    if (ring.product == P) ask_for<P>(own, memory, ring, warp, lane);
    else if (ring.product == NEXT) ask_for<NEXT>(own, memory, ring, warp, lane);
    else break;
  }
}
