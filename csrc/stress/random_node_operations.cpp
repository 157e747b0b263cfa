// The node engine under a sanitizer: ranks as threads that share one mapping of every board and
// arena, random operations of random sizes, all of them checked. `ci/sanitize` builds and runs it.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "../loop/loop.hpp"
#include "checked_operation.hpp"

using namespace ringcomm;
using namespace ringcomm::stress;

namespace {

constexpr std::size_t kInFlight = 4;

std::unique_ptr<CheckedOperation> random_operation(unsigned round, const std::shared_ptr<Team>& team,
                                                   NodeMemory& memory,
                                                   const std::shared_ptr<Places>& places,
                                                   std::mt19937& shared, std::mt19937& own) {
  static constexpr std::size_t kCounts[] = {0, 1, 255, 2048, 5000, 70001, 600000};
  const std::size_t count = kCounts[shared() % 7];
  const auto kind = static_cast<Kind>(shared() % 5);
  const bool is_registered = shared() % 3 == 0 || own() % 2 == 0;
  return std::make_unique<CheckedOperation>(round, round % kInFlight, kind, count, team, memory,
                                            std::pair{is_registered, own() % 2 == 0}, places,
                                            own() % 2 == 0);
}

void run_rank(const Node& node, std::size_t rank, unsigned n_rounds, unsigned seed, PlacesTold& told) {
  NodeMemory& memory = *node.memories[rank];
  const auto team = std::make_shared<Team>(rank, node.mates, node.memories[rank],
                                           node.mates.size() > 2, nullptr,
                                           node.mates.size() % 2 == 0);
  Loop loop(&memory.bell(), team->patience(), node.memories[rank]);
  loop.start_thread();
  std::mt19937 shared(seed), own(seed + 1 + static_cast<unsigned>(rank));
  const auto places = std::make_shared<Places>();
  std::vector<std::unique_ptr<CheckedOperation>> flight;
  for (unsigned round = 0; round < n_rounds + kInFlight; ++round) {
    if (flight.size() == kInFlight || round >= n_rounds) {
      if (flight.empty()) break;
      const CheckedOperation& oldest = *flight.front();
      while (!oldest.step->is_over()) {
        for (const auto& each : flight) each->choose_if_due();
        loop.park(0.01);
      }
      oldest.check_agreement();
      oldest.check_place(told);
      oldest.check_values();
      flight.erase(flight.begin());
    }
    if (round >= n_rounds) continue;
    if (own() % 4 == 0) team->let_read(own() % 2 == 0);
    flight.push_back(random_operation(round, team, memory, places, shared, own));
    const auto& step = flight.back()->step;
    if (own() % 2 == 0 || !drive(*step, memory.bell(), team->patience(), 50'000)) loop.add(step);
    flight.back()->choose_if_due();
  }
  loop.stop();
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned n_rounds = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 200;
  const unsigned seed = argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1;
  for (const std::size_t size : {1u, 2u, 3u, 4u, 7u}) {
    const Node node(size);
    PlacesTold told(n_rounds);
    std::vector<std::thread> ranks;
    for (std::size_t rank = 0; rank < size; ++rank)
      ranks.emplace_back([&, rank] { run_rank(node, rank, n_rounds, seed, told); });
    for (auto& each : ranks) each.join();
    told.check();
    std::printf("%zu rank(s): %u operations agree\n", size, n_rounds);
  }
}
