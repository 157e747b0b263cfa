// No wake-up is lost: two ranks tell each other of a number at about the moment at which the other
// goes to sleep. Who sleeps in spite of news would wake after kLost alone.
//
//     stress_bell 200000    # so many meetings, or as many as there is time for
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "../shm/team.hpp"

using namespace ringcomm;

namespace {

constexpr std::int64_t kLost = 10'000'000'000, kLongest = 60'000'000'000;
constexpr std::size_t kSlot = 3;
constexpr unsigned kSpins = 100'000;  // who yields comes back later than who looks

struct Pair {
  std::vector<std::shared_ptr<NodeMemory>> memories;
  std::vector<std::shared_ptr<const Mapping>> windows;
  std::vector<Mate> mates;

  Pair() {
    for (std::size_t rank = 0; rank < 2; ++rank) {
      memories.push_back(NodeMemory::create(rank + 1, 1u << 20));
      windows.push_back(memories.back()->window(0));
      mates.push_back({reinterpret_cast<Window*>(windows.back()->data()), &memories.back()->bell(),
                       memories.back()->arena(), memories.back()->pid()});
    }
  }
};

void linger(std::uint_fast32_t n) {
  for (std::uint_fast32_t i = 0; i < n; ++i) cpu_pause();
}

struct Start {
  std::atomic<unsigned> n_ready{0}, n_rounds;

  // Returns at about the same time for both; false once it was the last meeting.
  bool of(unsigned round) {
    ++n_ready;
    for (unsigned looks = 0; n_ready.load() < 2 * round; ++looks) {
      if (looks < kSpins)
        cpu_pause();
      else
        sched_yield();  // there may be no core for both now
    }
    return round <= n_rounds.load();
  }
};

// Says a number, and sleeps until the other has said it, too.
void meet_again_and_again(const Pair& pair, std::size_t rank, Start& start) {
  const auto team = std::make_shared<Team>(rank, pair.mates, pair.memories[rank], false, nullptr);
  Bell& bell = pair.memories[rank]->bell();
  std::mt19937 random(static_cast<unsigned>(rank) + 1);
  const std::int64_t end = monotonic_ns() + kLongest;
  for (unsigned round = 1; start.of(round); ++round) {
    if (rank == 0 && monotonic_ns() > end) start.n_rounds.store(round);
    linger(random() % 24);
    team->signal(kSlot, &StepProgress::ready, round);
    linger(random() % 24);
    const auto is_here = [&] { return team->all_at(kSlot, &StepProgress::ready, round); };
    while (!is_here()) {
      const std::int64_t began_at = monotonic_ns();
      bell.sleep(kLost, is_here);
      if (monotonic_ns() - began_at < kLost) continue;
      std::fprintf(stderr, "rank %zu slept through meeting %u\n", rank, round);
      std::_Exit(1);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const Pair pair;
  Start start;
  start.n_rounds = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 100'000;
  std::thread other([&] { meet_again_and_again(pair, 1, start); });
  meet_again_and_again(pair, 0, start);
  other.join();
  std::printf("%u meetings, no wake-up was lost\n", start.n_rounds.load());
}
