// Rings of entries in the status page, which a process writes and others read meanwhile.
#pragma once
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

namespace ringcomm {

// Writes entry number n_written of a ring, and counts it.
template <class Entry, std::size_t N, class Fill>
void append(Entry (&ring)[N], std::atomic<std::uint64_t>& n_written, Fill fill) {
  const std::uint64_t turn = n_written.load(std::memory_order_relaxed);
  Entry& entry = ring[turn % N];
  entry.turn.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  fill(entry);
  entry.turn.store(turn + 1, std::memory_order_release);
  n_written.store(turn + 1, std::memory_order_release);
}

// Returns read(entry) of the entries that are whole, the oldest first.
template <class Entry, std::size_t N, class Read>
auto entries(const Entry (&ring)[N], const std::atomic<std::uint64_t>& n_written, Read read) {
  std::vector<decltype(read(ring[0]))> found;
  const std::uint64_t n = n_written.load(std::memory_order_acquire);
  for (std::uint64_t turn = n > N ? n - N : 0; turn < n; ++turn) {
    const Entry& entry = ring[turn % N];
    if (entry.turn.load(std::memory_order_acquire) != turn + 1) continue;
    auto view = read(entry);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (entry.turn.load(std::memory_order_relaxed) == turn + 1) found.push_back(std::move(view));
  }
  return found;
}

}  // namespace ringcomm
