// Ranks that give up a step at any moment, under a sanitizer: whoever's step is over without a fault
// has the right result, and nobody's memory is read or written once its step is over. `ci/sanitize`
// builds and runs it.
#include <atomic>
#include <chrono>
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

constexpr float kMine = 777;  // what a rank writes once its memory is its own again
constexpr double kParkS = 0.01;

// Waits until all ranks are here.
class Rendezvous {
 public:
  explicit Rendezvous(std::size_t size) : size_(size) {}

  void meet() {
    const std::size_t place = n_here_.fetch_add(1);
    const std::size_t all = (place / size_ + 1) * size_;
    while (n_here_.load() < all) std::this_thread::yield();
  }

 private:
  const std::size_t size_;
  std::atomic<std::size_t> n_here_{0};
};

enum class Way { waits, abandons, loop_abandons, team_abandons, drops };

CheckedOperation random_part(unsigned round, const std::shared_ptr<Team>& team, NodeMemory& memory,
                             std::mt19937& shared, std::mt19937& own) {
  static constexpr std::size_t kCounts[] = {1, 1000, 5000, 70001, 300000};
  const std::size_t count = kCounts[shared() % 5];
  const auto kind = static_cast<Kind>(shared() % 3);  // those that give each rank something
  const bool is_registered = shared() % 2 == 0 || own() % 2 == 0;
  return {round, round, kind, count, team, memory, {is_registered, is_registered},
          std::make_shared<Places>()};
}

void take_memory_back(CheckedOperation& part) {
  for (const auto& array : {part.source.get(), part.target.get()})
    for (std::size_t i = 0; i < array->count(); ++i) array->data()[i] = kMine;
}

void check_memory(const CheckedOperation& part, std::size_t rank, unsigned round) {
  for (const auto& array : {part.source.get(), part.target.get()})
    for (std::size_t i = 0; i < array->count(); ++i)
      if (array->data()[i] != kMine) fail("memory was written after its step", rank, round);
}

// Returns true if the step was completed.
bool carry_out(CheckedOperation& part, Way way, std::int64_t patience_ns, Team& team,
               NodeMemory& memory, Loop& loop) {
  NodeStep& step = *part.step;
  const bool is_in_loop = way == Way::loop_abandons || way == Way::team_abandons;
  if (is_in_loop) {
    loop.add(part.step);
    std::this_thread::sleep_for(std::chrono::nanoseconds(patience_ns));
  } else if (way == Way::waits) {
    loop.add(part.step);
    while (!step.is_over()) loop.park(kParkS);
  } else {
    drive(step, memory.bell(), team.patience(), patience_ns);
  }
  if (way == Way::loop_abandons) loop.abandon(step);
  if (way == Way::team_abandons) team.abandon();
  if (way == Way::abandons) step.abandon();
  const bool is_completed = step.is_over() && step.fault().empty();
  if (way == Way::drops) part.step.reset();
  return is_completed;
}

struct Counts {
  std::atomic<unsigned> completed{0}, failed{0};
};

void run_rank(const Node& node, std::size_t rank, unsigned n_rounds, unsigned seed,
              Rendezvous& rendezvous, Counts& counts) {
  NodeMemory& memory = *node.memories[rank];
  const auto team = std::make_shared<Team>(rank, node.mates, node.memories[rank], true, nullptr,
                                           node.mates.size() % 2 == 0);
  Loop loop(&memory.bell(), team->patience(), node.memories[rank]);
  loop.start_thread();
  std::mt19937 shared(seed), own(seed + 1 + static_cast<unsigned>(rank));
  for (unsigned round = 0; round < n_rounds; ++round) {
    // One in three gives up, so that often all complete, and sometimes several give up at once. At
    // first nobody does, then one does before the others come, so that both are met for certain.
    Way way = own() % 3 != 0 ? Way::waits : static_cast<Way>(1 + own() % 4);
    std::int64_t patience_ns = own() % 2 == 0 ? own() % 20'000 : own() % 500'000;
    const bool is_first_to_give_up = round == 1 && rank == 0;
    if (round <= 1) way = is_first_to_give_up ? Way::abandons : Way::waits;
    if (round <= 1) patience_ns = 0;
    rendezvous.meet();
    if (round == 1 && rank != 0) rendezvous.meet();
    std::this_thread::sleep_for(std::chrono::nanoseconds(own() % 3 == 0 ? own() % 300'000 : 0));
    CheckedOperation part = random_part(round, team, memory, shared, own);
    const bool is_completed = carry_out(part, way, patience_ns, *team, memory, loop);
    if (is_first_to_give_up) rendezvous.meet();
    if (is_completed) part.check_values();
    ++(is_completed ? counts.completed : counts.failed);
    take_memory_back(part);
    rendezvous.meet();
    check_memory(part, rank, round);
    if (part.step) loop.abandon(*part.step);
  }
  loop.stop();
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned n_rounds = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 200;
  const unsigned seed = argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1;
  for (const std::size_t size : {2u, 3u, 4u}) {
    const Node node(size);
    Rendezvous rendezvous(size);
    Counts counts;
    std::vector<std::thread> ranks;
    for (std::size_t rank = 0; rank < size; ++rank)
      ranks.emplace_back([&, rank] { run_rank(node, rank, n_rounds, seed, rendezvous, counts); });
    for (auto& each : ranks) each.join();
    std::printf("%zu ranks: %u parts completed, %u given up\n", size, counts.completed.load(),
                counts.failed.load());
    if (counts.completed == 0 || counts.failed == 0) fail("only one of the two was tried", 0, 0);
  }
}
