// What wakes the threads of one process when a rank of its node, or another thread, has news.
#pragma once
#include <sched.h>

#include <atomic>
#include <cstdint>

#include "../clock.hpp"
#include "futex.hpp"

namespace ringcomm {

// In shared memory: any process of the node rings, the threads of one process sleep.
struct Bell {
  std::atomic<std::uint32_t> rings;
  std::atomic<std::uint32_t> sleepers;

  // Costs a load while nobody sleeps. What is rung for must have been stored with seq_cst: either
  // the sleeper sees it, or this sees the sleeper.
  void ring() {
    if (sleepers.load(std::memory_order_seq_cst) == 0) return;
    rings.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(rings);
  }

  // Sleeps until rung, at most limit_ns, not at all if has_news() once this thread counts as asleep.
  template <class HasNews>
  void sleep(std::int64_t limit_ns, HasNews has_news) {
    const std::uint32_t before = rings.load(std::memory_order_seq_cst);
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (!has_news()) futex_wait(rings, before, limit_ns);
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
};

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// How long to look again and again before going to sleep: a wake-up takes longer than most waits,
// and a core that spins is missing elsewhere.
struct Patience {
  int spins;   // looks with a pause between them
  int yields;  // then looks with the core offered to others between them
};

// A core for each rank: a look takes 20-100 ns, a wake-up 5-50 us. With fewer, who spins keeps another
// from what this one waits for, and offering the core beats going to sleep: 1 KiB on 4 ranks and 2
// cores took 21 us with these yields, 51 with 300 and 88 with 4 (measured).
constexpr Patience kRoomy = {4000, 50};
constexpr Patience kCrowded = {0, 1500};

class Backoff {
 public:
  explicit Backoff(Patience patience) : patience_(patience) {}

  void reset() { looks_ = 0; }

  // Now and then: a core that was offered may come back after a whole time slice.
  bool is_time_to_look() const { return looks_ % 32 == 0; }

  // Lets a moment pass; false once it is time to sleep.
  bool linger() {
    if (looks_ >= patience_.spins + patience_.yields) return false;
    if (looks_++ < patience_.spins)
      cpu_pause();
    else
      sched_yield();
    return true;
  }

 private:
  Patience patience_;
  int looks_ = 0;
};

}  // namespace ringcomm
