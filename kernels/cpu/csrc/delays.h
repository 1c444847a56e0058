// Threads that are late at random: compiled with PTQ_DELAYS, as a test does, each sleeps now and then
// where it may meet others and where it begins its share, as on a machine whose cores are shared.
#pragma once

#ifdef PTQ_DELAYS
#include <time.h>

#include <cstdint>
#endif

namespace ptq {

#ifdef PTQ_DELAYS
static inline void late() {
  static thread_local uint64_t state = 0;
  if (state == 0) state = (uint64_t)&state | 1;  // another one for each thread
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  if (state >> 59 != 0) return;  // 31 of 32 times
  const timespec pause = {0, (long)(state >> 32 & 0x3fff)};  // at most 16 us, and what it takes
  nanosleep(&pause, nullptr);
}
#else
static inline void late() {}
#endif

}  // namespace ptq
