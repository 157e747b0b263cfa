// Schedules over messages between ranks as threads, under a sanitizer: rings that are given up in the
// middle now and then, while others go on, and that take the workspaces of those before.
// `ci/sanitize` builds and runs it.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "../loop/run_schedule.hpp"
#include "../wire/loopback.hpp"

using namespace ringcomm;

namespace {

constexpr std::size_t kSizes[] = {1, 100, 5000};

[[noreturn]] void fail(const char* what, int rank, unsigned round) {
  std::fprintf(stderr, "rank %d, round %u: %s\n", rank, round, what);
  std::_Exit(1);
}

// Each rank sends its bytes to the next one; what arrives goes through scratch memory.
std::shared_ptr<Schedule> ring(std::size_t nbytes, int rank, int size) {
  auto schedule = std::make_shared<Schedule>(std::vector<std::size_t>{nbytes, nbytes});
  const std::size_t scratch = schedule->add_scratch(nbytes);
  const std::size_t received = schedule->receive({scratch, 0, nbytes}, (rank + size - 1) % size);
  schedule->wait({received, schedule->send({0, 0, nbytes}, (rank + 1) % size)});
  schedule->copy({1, 0, nbytes}, {scratch, 0, nbytes});
  schedule->finish();
  return schedule;
}

std::byte value(unsigned round, int rank, std::size_t i) {
  return static_cast<std::byte>((round * 7 + static_cast<unsigned>(rank) * 3 + i) % 61);
}

void run_rank(const std::shared_ptr<LoopbackHub>& hub, int rank, int size, unsigned n_rounds,
              std::vector<std::vector<std::byte>>& given_up) {
  const auto runner = std::make_shared<Runner>(hub->wire(rank));
  std::vector<int> members;
  for (int r = 0; r < size; ++r) members.push_back(r);
  std::vector<std::shared_ptr<Schedule>> schedules;
  for (const std::size_t nbytes : kSizes) schedules.push_back(ring(nbytes, rank, size));
  std::mt19937 shared(1);  // alike on all ranks
  for (unsigned round = 0; round < n_rounds; ++round) {
    const std::size_t which = shared() % 3, nbytes = kSizes[which];
    const bool is_given_up = shared() % 8 == 0;
    std::vector<std::byte> x(nbytes), out(nbytes);
    for (std::size_t i = 0; i < nbytes; ++i) x[i] = value(round, rank, i);
    const int tag = is_given_up ? static_cast<int>(round) + 1 : 0;  // nobody takes what is left over
    const auto run = runner->run(schedules[which], {{x.data(), out.data()}, members, tag});
    run->advance();
    if (is_given_up) {
      run->abandon();
      given_up.push_back(std::move(x));
      given_up.push_back(std::move(out));
      continue;
    }
    while (!run->is_over())
      if (run->advance() == Program::Step::waiting) hub->sleep(rank, 0.01);
    if (!run->fault().empty()) fail(run->fault().c_str(), rank, round);
    for (std::size_t i = 0; i < nbytes; ++i)
      if (out[i] != value(round, (rank + size - 1) % size, i)) fail("a value is wrong", rank, round);
  }
  runner->close();
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned n_rounds = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 200;
  for (const int size : {1, 2, 3, 7}) {
    const auto hub = std::make_shared<LoopbackHub>(size);
    // By rank, what others may still read until all are done.
    std::vector<std::vector<std::vector<std::byte>>> given_up(static_cast<std::size_t>(size));
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < size; ++rank)
      ranks.emplace_back([&, rank] {
        run_rank(hub, rank, size, n_rounds, given_up[static_cast<std::size_t>(rank)]);
      });
    for (auto& each : ranks) each.join();
    std::printf("%d rank(s): %u rings agree\n", size, n_rounds);
  }
}
