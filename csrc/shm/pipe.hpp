// Messages from one process to another of its node: a ring of bytes in memory that both map.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>

namespace ringcomm {

// A part of a message, which its pieces make up one behind the other.
struct Chunk {
  const void* data;
  std::size_t nbytes;
};

// One writer, one reader. Memory: a Head, then the ring. A message lies in one piece, behind its
// length, at a multiple of 8; where the rest of the ring is too short for it, it begins anew.
class Pipe {
 public:
  struct Head {
    alignas(64) std::atomic<std::uint64_t> written;  // bytes since the beginning
    alignas(64) std::atomic<std::uint64_t> read;
  };
  struct Message {
    const std::byte* data;  // null: there is none
    std::size_t nbytes;
  };

  Pipe() = default;
  // nbytes: of the memory, a multiple of 8; at a multiple of 64.
  Pipe(std::byte* memory, std::size_t nbytes)
      : head_(reinterpret_cast<Head*>(memory)),
        ring_(memory + sizeof(Head)),
        capacity_(nbytes - sizeof(Head)) {}

  // For the one who made the memory, before the other hears of it.
  void clear() const { new (head_) Head{}; }

  std::size_t longest() const { return capacity_ / 2 - sizeof(std::uint64_t); }

  // False if there is no room now. A message that has been put is seen by who looks after a bell that
  // was rung after it.
  bool put(const Chunk* chunks, std::size_t n) const {
    std::size_t nbytes = 0;
    for (std::size_t i = 0; i < n; ++i) nbytes += chunks[i].nbytes;
    if (nbytes > longest()) throw std::length_error("a message is longer than its pipe");
    std::uint64_t end = head_->written.load(std::memory_order_relaxed);
    const std::size_t taken = static_cast<std::size_t>(end - head_->read.load(std::memory_order_acquire));
    const std::size_t rest = capacity_ - end % capacity_;
    const bool wraps = rest < size_of(nbytes);
    if (taken + (wraps ? rest : 0) + size_of(nbytes) > capacity_) return false;
    if (wraps) {
      put_length(end, kSkip);
      end += rest;
    }
    put_length(end, nbytes);
    std::byte* out = ring_ + end % capacity_ + sizeof(std::uint64_t);
    for (std::size_t i = 0; i < n; ++i) {
      if (chunks[i].nbytes != 0) std::memcpy(out, chunks[i].data, chunks[i].nbytes);
      out += chunks[i].nbytes;
    }
    head_->written.store(end + size_of(nbytes), std::memory_order_seq_cst);
    return true;
  }

  // The oldest message, until pop(). Throws if the writer has written nonsense.
  Message peek() const {
    while (true) {
      const std::uint64_t begin = head_->read.load(std::memory_order_relaxed);
      if (begin == head_->written.load(std::memory_order_seq_cst)) return {nullptr, 0};
      const std::size_t at = begin % capacity_;
      const std::uint64_t nbytes = length_at(at);
      if (nbytes == kSkip) {
        head_->read.store(begin + capacity_ - at, std::memory_order_release);
        continue;
      }
      if (nbytes > longest() || at + size_of(nbytes) > capacity_)
        throw std::runtime_error("a pipe holds a message that does not fit it");
      return {ring_ + at + sizeof(std::uint64_t), static_cast<std::size_t>(nbytes)};
    }
  }

  // For the reader: bytes that it has not let go of.
  std::size_t n_unread() const {
    return static_cast<std::size_t>(head_->written.load(std::memory_order_relaxed) -
                                    head_->read.load(std::memory_order_relaxed));
  }

  // Lets go of what peek() has returned.
  void pop() const {
    const std::uint64_t begin = head_->read.load(std::memory_order_relaxed);
    head_->read.store(begin + size_of(length_at(begin % capacity_)), std::memory_order_release);
  }

 private:
  static constexpr std::uint64_t kSkip = ~std::uint64_t{0};

  static std::size_t size_of(std::uint64_t nbytes) {
    return static_cast<std::size_t>(sizeof(std::uint64_t) + (nbytes + 7) / 8 * 8);
  }
  std::uint64_t length_at(std::size_t at) const {
    std::uint64_t nbytes;
    std::memcpy(&nbytes, ring_ + at, sizeof nbytes);
    return nbytes;
  }
  void put_length(std::uint64_t position, std::uint64_t nbytes) const {
    std::memcpy(ring_ + position % capacity_, &nbytes, sizeof nbytes);
  }

  Head* head_ = nullptr;
  std::byte* ring_ = nullptr;
  std::size_t capacity_ = 0;
};

}  // namespace ringcomm
