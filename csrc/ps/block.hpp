// A slice of a dense tensor that is read, also by other processes, while it is updated: no lock, no
// torn value.
//
// Memory, given by the caller: a Header, then two buffers of `nbytes`, each at a multiple of 64. The
// values of version v lie in buffer v % 2. An update reads that one and writes the other, so a copy
// of version v is whole unless an update of the version after the next had begun when it ended.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "../shm/memory.hpp"
#include "update.hpp"

namespace ringcomm::ps {

struct BlockHeader {
  std::atomic<std::uint64_t> begun, done;  // versions
  std::uint64_t nbytes;                    // of a buffer
  std::atomic<std::int64_t> clocks[2];     // updates, or rounds, that are in each buffer's values
  std::atomic<std::uint64_t> may_read;     // 1: whoever maps it may read; 0: the server is to be asked
  std::atomic<std::uint64_t> n_reads;      // by read_open_block()
  std::uint64_t reserved;
};
static_assert(sizeof(BlockHeader) == 64 && std::atomic<std::uint64_t>::is_always_lock_free);

constexpr std::size_t kBlockLine = 64;
constexpr std::size_t buffer_offset(std::size_t nbytes, std::uint64_t version) {
  const std::size_t padded = (nbytes + kBlockLine - 1) / kBlockLine * kBlockLine;
  return sizeof(BlockHeader) + (version % 2 == 0 ? 0 : padded);
}
constexpr std::size_t block_nbytes(std::size_t nbytes) {
  return buffer_offset(nbytes, 1) + buffer_offset(nbytes, 1) - sizeof(BlockHeader);
}

// The one that writes.
class Block {
 public:
  // Takes over memory of block_nbytes(nbytes) at a multiple of 64. A new block has values of 0.
  Block(std::byte* memory, std::size_t nbytes, std::uint64_t version);

  std::uint64_t version() const { return header().done.load(std::memory_order_relaxed); }
  std::size_t nbytes() const { return header().nbytes; }
  std::int64_t clock() const { return header().clocks[version() % 2].load(std::memory_order_relaxed); }
  void set_clock(std::int64_t clock) const {
    header().clocks[version() % 2].store(clock, std::memory_order_release);
  }
  std::uint64_t take_reads() const { return header().n_reads.exchange(0, std::memory_order_relaxed); }
  bool may_read() const { return header().may_read.load(std::memory_order_relaxed) != 0; }
  void set_may_read(bool may_read) const { header().may_read.store(may_read, std::memory_order_release); }
  const std::byte* values() const { return memory_ + buffer_offset(nbytes(), version()); }

  // The next version: `update` with this block's values. Returns its number. clock: of that version;
  // kSame: that of the one before.
  static constexpr std::int64_t kSame = -1;
  std::uint64_t apply(DenseUpdate update, std::int64_t clock = kSame);
  std::uint64_t write(const void* values, std::int64_t clock = kSame);

 private:
  BlockHeader& header() const { return *reinterpret_cast<BlockHeader*>(memory_); }
  std::byte* begin() const;
  std::uint64_t end(std::int64_t clock) const;

  std::byte* memory_;
};

// Copies bytes [offset, offset + n) of the newest version to `out`; returns its number. After
// `tries` copies that were overtaken, -1, and what is in `out` is of no version.
std::int64_t read_block(const std::byte* memory, void* out, std::size_t offset, std::size_t n,
                        unsigned tries);

// The same of a block in the memory of `server` that is open, and whose clock is at least `clock`.
// Returns the clock of what was copied; -1 if it is not open, not so far, or was overtaken, or if
// another server goes on in the place of a dead one: then what is in `out` is not to be used.
std::int64_t read_open_block(const NodeMemory& server, std::byte* memory, void* out,
                             std::size_t offset, std::size_t n, std::int64_t clock, unsigned tries);

}  // namespace ringcomm::ps
