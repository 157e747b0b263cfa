// Ranks as threads that share one mapping of every board and arena, for the stress programs.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "../shm/copy_step.hpp"
#include "../shm/reduce_step.hpp"

namespace ringcomm::stress {

constexpr std::size_t kArena = 256u << 20;

[[noreturn]] inline void fail(const char* what, std::size_t rank, unsigned round) {
  std::fprintf(stderr, "rank %zu, round %u: %s\n", rank, round, what);
  std::_Exit(1);
}

// The places that the ranks have been told for their rounds; ends the program if they differ.
class PlacesTold {
 public:
  explicit PlacesTold(unsigned n_rounds) : told_(n_rounds) {}

  void note(unsigned round, std::size_t rank, std::uint64_t place) {
    std::uint64_t before = 0;
    if (!told_[round].compare_exchange_strong(before, place + 1) && before != place + 1)
      fail("another rank was told another place", rank, round);
  }
  // Each place from 0 on was given once.
  void check() const {
    std::vector<std::uint64_t> given;
    for (const auto& each : told_)
      if (each != 0) given.push_back(each - 1);
    std::sort(given.begin(), given.end());
    for (std::size_t i = 0; i < given.size(); ++i)
      if (given[i] != i) fail("a place was left out, or given twice", 0, static_cast<unsigned>(i));
  }

 private:
  std::vector<std::atomic<std::uint64_t>> told_;
};

struct Node {
  std::vector<std::shared_ptr<NodeMemory>> memories;
  std::vector<std::shared_ptr<const Mapping>> windows;
  std::vector<Mate> mates;

  explicit Node(std::size_t size) {
    for (std::size_t rank = 0; rank < size; ++rank) {
      memories.push_back(NodeMemory::create(rank + 1, kArena));
      windows.push_back(memories.back()->window(0));
      mates.push_back({reinterpret_cast<Window*>(windows.back()->data()), &memories.back()->bell(),
                       memories.back()->arena(), memories.back()->pid(), &memories.back()->head()});
    }
  }
};

// An array, private or registered.
class Array {
 public:
  Array(NodeMemory& memory, std::size_t count, bool is_registered)
      : memory_(memory), count_(count), is_registered_(is_registered) {
    if (is_registered) {
      offset_ = memory.allocator().take(nbytes());
      data_ = reinterpret_cast<float*>(memory.arena() + offset_);
    } else {
      own_.resize(count);
      data_ = own_.data();
    }
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() {
    if (is_registered_) memory_.allocator().give_back(offset_, nbytes());
  }

  float* data() { return data_; }
  std::byte* bytes() { return reinterpret_cast<std::byte*>(data_); }
  std::size_t count() const { return count_; }
  std::size_t nbytes() const { return count_ * sizeof(float); }

 private:
  NodeMemory& memory_;
  std::size_t count_;
  bool is_registered_;
  std::size_t offset_ = 0;
  std::vector<float> own_;
  float* data_;
};

// What the rank with this seed brings; small integers, so that sums are exact.
inline float value(unsigned round, std::size_t rank, std::size_t i) {
  return static_cast<float>((round * 7 + rank * 3 + i) % 61);
}

inline float sum(unsigned round, std::size_t size, std::size_t i) {
  float total = 0;
  for (std::size_t rank = 0; rank < size; ++rank) total += value(round, rank, i);
  return total;
}

}  // namespace ringcomm::stress
