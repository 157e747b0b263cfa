// One reduction, k sources -> m destinations, and what its loops have in common.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstring>

// The iterations of the next loop do not depend on each other. The compiler cannot know: a
// destination may be a source (the very same elements), which would make it choose a scalar loop.
#if defined(__clang__)
#define RINGCOMM_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define RINGCOMM_INDEPENDENT _Pragma("GCC ivdep")
#else
#define RINGCOMM_INDEPENDENT
#endif

namespace ringcomm {

struct Job {
  void* const* dst;
  std::size_t n_dst;
  const void* const* src;
  std::size_t n_src;
  std::size_t count;
  std::size_t divisor;
  void (*divide)(void* data, std::size_t count, std::size_t divisor);  // as the dtype's numbers do
};

// What follows is compiled for several instruction sets: it must not be shared between them.
namespace {

// Ranges are worked on in blocks: partial sums, and what is copied on to further destinations, stay
// in the L1 cache. (With 2 and 8 KiB it takes within 15 % as long.)
constexpr std::size_t kBlockBytes = 4096;
constexpr std::size_t kMostFused = 4;  // sources that one loop reads, destinations it writes

template <class T>
T* at(void* base, std::size_t i) {
  return static_cast<T*>(base) + i;
}

template <class T>
const T* at(const void* base, std::size_t i) {
  return static_cast<const T*>(base) + i;
}

// Where a loop stores a block: it writes to two places, sums also to as many as it has sources, so
// that one destination, two, and all sources in place are fast. (4 -> 4 in the cache: 1.4 times as
// fast as two places and two copies.) A place that is not needed is the first again.
template <class T>
struct Places {
  std::size_t count;
  T* at[kMostFused];

  Places(const Job& job, std::size_t start, std::size_t n_dst)
      : count(std::min(n_dst, kMostFused)) {
    for (std::size_t j = 0; j < kMostFused; ++j)
      at[j] = ringcomm::at<T>(job.dst[j < count ? j : 0], start);
  }
  explicit Places(T* only) : count(1), at{only, only, only, only} {}
};

// Stores a block that is done in the destinations from `next` on.
template <class T>
void copy_on(const Job& job, std::size_t next, std::size_t start, std::size_t count) {
  const T* const done = at<T>(job.dst[0], start);
  for (std::size_t j = next; j < job.n_dst; ++j)
    if (job.dst[j] != job.dst[0]) std::memcpy(at<T>(job.dst[j], start), done, count * sizeof(T));
}

// Multiplying by 1 / 2^n has the bits of dividing by 2^n, and costs no pass of its own.
inline bool is_power_of_two(std::size_t n) { return (n & (n - 1)) == 0; }

}  // namespace
}  // namespace ringcomm
