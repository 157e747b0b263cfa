// The one clock of deadlines, of the status page and of what is measured: CLOCK_MONOTONIC.
#pragma once
#include <time.h>

#include <cstdint>

namespace ringcomm {

// Nanoseconds; comparable between the processes of a host.
inline std::int64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

inline std::int64_t nanoseconds(double seconds) { return static_cast<std::int64_t>(seconds * 1e9); }

}  // namespace ringcomm
