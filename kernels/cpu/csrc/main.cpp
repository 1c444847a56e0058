// What Python calls: the choice of an instruction set, and each kernel in a parallel region of its
// own. Plain C functions, for ctypes.
#include <stdlib.h>
#include <string.h>

#if defined(__SANITIZE_THREAD__)
#include <thread>
#include <vector>
#elif defined(_OPENMP)
#include <omp.h>
#endif

#include "decoder.h"
#include "lora_rows.h"
#include "rows.h"

#define PTQ_EXPORT extern "C" __attribute__((visibility("default")))

namespace ptq {
namespace {

bool supported(Isa isa) {
  if (isa == kPortable) return true;
#ifdef PTQ_X86
  __builtin_cpu_init();
  if (isa == kAvx2)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
  if (isa == kAvx512Vnni)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
#endif
  return false;
}

const Kernels* table_of(Isa isa) {
#ifdef PTQ_X86
  if (isa == kAvx512Vnni) return &kKernelsAvx512;
  if (isa == kAvx2) return &kKernelsAvx2;
#endif
  return &kKernelsPortable;
}

const Kernels* best() {
  return table_of(supported(kAvx512Vnni) ? kAvx512Vnni : supported(kAvx2) ? kAvx2 : kPortable);
}

const Kernels* chosen = best();

// Runs `body` on a team; each learns which thread it is. The sanitizer of threads does not see when
// OpenMP's begin and end.
template <class Body>
void together(int threads, const Body& body) {
  Shared shared;
#if defined(__SANITIZE_THREAD__)
  std::vector<std::thread> others;
  for (int id = 1; id < threads; id++)
    others.emplace_back([&, id] { body(Team{id, threads, &shared}); });
  body(Team{0, threads, &shared});
  for (std::thread& other : others) other.join();
#elif defined(_OPENMP)
#pragma omp parallel num_threads(threads)
  body(Team{omp_get_thread_num(), omp_get_num_threads(), &shared});
#else
  (void)threads;
  body(Team{0, 1, &shared});
#endif
}

// Memory of the calling thread, kept between calls; null if there is none.
float* kept_floats(int64_t count) {
  static thread_local float* data = nullptr;
  static thread_local int64_t size = 0;
  if (count > size) {
    free(data);
    data = (float*)malloc(count * sizeof(float));
    size = data == nullptr ? 0 : count;
  }
  return data;
}

}  // namespace
}  // namespace ptq

using namespace ptq;

// 1 if the processor runs an instruction set, 0 if not.
PTQ_EXPORT int ptq_supports(int isa) { return supported((Isa)isa); }
PTQ_EXPORT int ptq_isa() { return chosen->isa; }
// For tests: use another instruction set from now on; weights packed before are refused.
PTQ_EXPORT void ptq_force(int isa) { chosen = table_of((Isa)isa); }

PTQ_EXPORT int64_t ptq_pack_bytes(const Source* source) { return chosen->pack_bytes(*source); }
PTQ_EXPORT void ptq_pack(const Source* source, void* out, int threads) {
  together(threads, [&](const Team& team) { chosen->pack(*source, out, team); });
}
PTQ_EXPORT int ptq_linear(const LinearArgs* args, int threads) {
  if (args->weight->magic != kMagic || args->weight->isa != chosen->isa) return 1;
  together(threads, [&](const Team& team) { chosen->linear(*args, team); });
  return 0;
}
PTQ_EXPORT void ptq_rows(const Packed* weight, const int64_t* rows, float* out, int64_t count,
                         int threads) {
  together(threads, [&](const Team& team) {
    const Range own = share(count, team);
    for (int64_t i = own.begin; i < own.end; i++)
      unpack_row(*weight, rows[i], out + i * weight->inputs);
  });
}
PTQ_EXPORT void ptq_quantize(const QuantizeArgs* args, int threads) {
  together(threads, [&](const Team& team) { chosen->quantize(*args, team); });
}
PTQ_EXPORT void ptq_rms_norm(const float* x, const float* weight, float eps, float* y, int64_t rows,
                             int64_t columns, int64_t x_stride, int threads) {
  together(threads, [&](const Team& team) {
    chosen->rms_norm(x, weight, eps, y, rows, columns, x_stride, columns, team);
  });
}
PTQ_EXPORT void ptq_gated_product(const float* gate, const float* up, float* y, int64_t rows,
                                  int64_t columns, int64_t stride, int activation, int threads) {
  together(threads, [&](const Team& team) {
    chosen->gated_product(gate, up, y, rows, columns, stride, columns, (Activation)activation,
                          team);
  });
}
// Adds to rows y what adapters make of rows x: that of row i is loras[slots[i] * apart]; none where the
// slot is negative.
PTQ_EXPORT void ptq_lora(const Lora* loras, int64_t apart, const int64_t* slots, const float* x,
                         float* y, int64_t rows, int64_t x_stride, int64_t y_stride, int threads) {
  together(threads, [&](const Team& team) {
    add_loras(*chosen, loras, apart, slots, share(rows, team), x, x_stride, y, y_stride);
  });
}
PTQ_EXPORT void ptq_softcap(const float* x, float bound, float* y, int64_t count, int threads) {
  together(threads, [&](const Team& team) { chosen->softcap(x, bound, y, count, team); });
}
PTQ_EXPORT void ptq_rope(const float* x, const float* cos, const float* sin, float* y, int64_t rows,
                         int64_t heads, int64_t dim, int64_t stride, int threads) {
  together(threads, [&](const Team& team) {
    chosen->rope(x, cos, sin, y, rows, heads, dim, stride, heads * dim, team);
  });
}
PTQ_EXPORT void ptq_turn(const float* x, float* y, int64_t rows, int64_t heads, int64_t dim,
                         int64_t stride, int64_t size, int threads) {
  together(threads, [&](const Team& team) {
    chosen->turn(x, y, rows, heads, dim, size, stride, heads * dim, team);
  });
}
PTQ_EXPORT void ptq_write_kv(const WriteKvArgs* args, int threads) {
  together(threads, [&](const Team& team) { chosen->write_kv(*args, team); });
}
// Returns -1 where there is no memory for what threads share, else 0.
PTQ_EXPORT int ptq_attention(const AttentionArgs* args, int threads) {
  AttentionArgs own = *args;
  const int64_t floats = chosen->attention_floats(own, threads);
  own.partials = kept_floats(floats);
  if (floats > 0 && own.partials == nullptr) return -1;
  together(threads, [&](const Team& team) { chosen->attention(own, team); });
  return 0;
}
PTQ_EXPORT void ptq_feedback(const FeedbackTile* tile) { chosen->feedback(*tile); }
PTQ_EXPORT void ptq_compare(const float* p, const float* q, const int64_t* targets, double* out,
                            int64_t rows, int64_t columns, int threads) {
  together(threads, [&](const Team& team) {
    chosen->compare(p, q, targets, out, rows, columns, team);
  });
}
PTQ_EXPORT int64_t ptq_decoder_workspace(const Decoder* decoder, int64_t tokens) {
  return decoder_workspace(*decoder, tokens);
}
// Returns -1 where there is no memory for what threads share, else 0.
PTQ_EXPORT int ptq_decoder_step(const Decoder* decoder, const Step* step, int threads) {
  Step own = *step;
  const int64_t floats = decoder_partials(*chosen, *decoder, own, threads);
  own.partials = kept_floats(floats);
  if (floats > 0 && own.partials == nullptr) return -1;
  together(threads, [&](const Team& team) { decoder_step(*chosen, *decoder, own, team); });
  return 0;
}

// The machine's limits, see limits.h.
PTQ_EXPORT int64_t ptq_read(const void* data, int64_t bytes, int threads) {
  int64_t sum = 0;
  together(threads, [&](const Team& team) {
    __atomic_fetch_add(&sum, chosen->read_all(data, bytes, team), __ATOMIC_RELAXED);
  });
  return sum;
}
// Operations done by all threads together.
PTQ_EXPORT double ptq_multiply_add(int format, int64_t rounds, int threads) {
  int64_t done = 0;
  together(threads, [&](const Team&) {
    const double mine = chosen->multiply_add(format, rounds);
    __atomic_fetch_add(&done, (int64_t)mine, __ATOMIC_RELAXED);
  });
  return (double)done;
}
