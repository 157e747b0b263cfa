// The node engine under a sanitizer: ranks as threads that share one mapping of every board and
// arena, random operations of random sizes, all of them checked. `ci/sanitize` builds and runs it.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "../loop/loop.hpp"
#include "ranks_as_threads.hpp"

using namespace ringcomm;
using namespace ringcomm::stress;

namespace {

constexpr std::size_t kInFlight = 4;

// One operation, alike on all ranks but for where its arrays are.
struct Operation {
  unsigned round;
  std::size_t rank, size;
  enum Kind { allreduce, scatter, to_root, gather, mismatch } kind;
  std::unique_ptr<Array> source, target;
  std::shared_ptr<NodeStep> step;

  Operation(unsigned round, const std::shared_ptr<Team>& team, NodeMemory& memory,
            std::mt19937& shared, std::mt19937& own)
      : round(round), rank(team->index()), size(team->size()) {
    static constexpr std::size_t kCounts[] = {0, 1, 255, 2048, 5000, 70001, 600000};
    const std::size_t count = kCounts[shared() % 7];
    kind = static_cast<Kind>(shared() % 5);
    const bool is_registered = shared() % 3 == 0 || own() % 2 == 0;
    source = std::make_unique<Array>(memory, count, is_registered);
    for (std::size_t i = 0; i < count; ++i) source->data()[i] = value(round, rank, i);
    std::vector<std::size_t> bounds;
    for (std::size_t r = 0; r <= size; ++r) bounds.push_back(count * r / size * sizeof(float));
    const std::size_t slot = round % kInFlight;
    const Meeting meeting{team, slot, kind == mismatch ? rank % 2 : 42};
    const bool is_mine = kind != to_root || rank == size - 1;
    const std::size_t due = kind == scatter  ? (bounds[rank + 1] - bounds[rank]) / sizeof(float)
                            : kind == gather ? count * size
                                             : count;
    target = std::make_unique<Array>(memory, due, own() % 2 == 0);
    std::byte* out = is_mine ? target->bytes() : nullptr;
    if (kind == gather || kind == mismatch) {
      NodeCopy copy{source->bytes(), source->nbytes(), {}};
      for (std::size_t r = 0; r < size && kind == gather; ++r)
        copy.pulls.push_back({r, 0, source->nbytes(), out + r * source->nbytes()});
      step = std::make_shared<CopyStep>(meeting, std::move(copy));
    } else {
      const Target to = kind == allreduce ? Target::all
                        : kind == scatter ? Target::owner
                                          : Target::root;
      step = std::make_shared<ReduceStep>(
          meeting, NodeReduction{source->bytes(), out, bounds, to, size - 1, Op::sum, DType::float32, 1});
    }
  }

  void check() {
    if (step->agrees() != (kind != mismatch || size == 1)) fail("agreement is wrong", rank, round);
    const std::size_t count = source->count();
    const std::size_t first = count * rank / size;
    if (kind == mismatch || (kind == to_root && rank != size - 1)) return;
    for (std::size_t i = 0; i < target->count(); ++i) {
      const float expected = kind == gather    ? value(round, i / count, i % count)
                             : kind == scatter ? sum(round, size, first + i)
                                               : sum(round, size, i);
      if (target->data()[i] != expected) fail("a value is wrong", rank, round);
    }
  }
};

void run_rank(const Node& node, std::size_t rank, unsigned n_rounds, unsigned seed) {
  NodeMemory& memory = *node.memories[rank];
  const auto team = std::make_shared<Team>(rank, node.mates, node.memories[rank],
                                           node.mates.size() > 2, nullptr);
  Loop loop(&memory.bell(), team->patience(), node.memories[rank]);
  loop.start_thread();
  std::mt19937 shared(seed), own(seed + 1 + static_cast<unsigned>(rank));
  std::vector<std::unique_ptr<Operation>> flight;
  for (unsigned round = 0; round < n_rounds + kInFlight; ++round) {
    if (flight.size() == kInFlight || round >= n_rounds) {
      if (flight.empty()) break;
      Operation& oldest = *flight.front();
      while (!oldest.step->is_over()) loop.park(0.01);
      oldest.check();
      flight.erase(flight.begin());
    }
    if (round >= n_rounds) continue;
    flight.push_back(std::make_unique<Operation>(round, team, memory, shared, own));
    const auto& step = flight.back()->step;
    if (own() % 2 == 0 || !drive(*step, memory.bell(), team->patience(), 50'000)) loop.add(step);
  }
  loop.stop();
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned n_rounds = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 200;
  const unsigned seed = argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1;
  for (const std::size_t size : {1u, 2u, 3u, 4u, 7u}) {
    const Node node(size);
    std::vector<std::thread> ranks;
    for (std::size_t rank = 0; rank < size; ++rank)
      ranks.emplace_back([&, rank] { run_rank(node, rank, n_rounds, seed); });
    for (auto& each : ranks) each.join();
    std::printf("%zu rank(s): %u operations agree\n", size, n_rounds);
  }
}
