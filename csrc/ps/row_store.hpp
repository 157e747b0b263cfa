// Memory of rows: slabs that never move, with the values and slots of a row together.
//
// The first slab has 8 rows, each has twice as many as the one before, up to about 2 MiB: a
// partition with ten rows is small, one with millions has few slabs. Rows that were freed are used
// again, the last first; their memory goes back to the pool when all is cleared.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "memory_pool.hpp"

namespace ringcomm::ps {

using Row = std::uint32_t;  // its number: stays the same as long as the row lives

struct RowInfo {
  std::uint64_t key;
  double time;           // of the last push or load
  std::uint32_t count;   // pushes
  std::uint32_t steps;   // of them, those by the updater of the table; kDead: no row
};

// The processor follows neighbouring lines by itself after the first few.
inline void prefetch_range(const std::byte* data, std::size_t nbytes) {
  constexpr std::size_t kLine = 64, kMost = 1024;
  for (std::size_t i = 0; i < nbytes && i < kMost; i += kLine) __builtin_prefetch(data + i);
}

class RowStore {
 public:
  static constexpr std::uint32_t kDead = 0xffffffffu;

  // `nbytes`: of a row. `pool`: where slabs come from, and outlives this; null: the system.
  RowStore(std::size_t nbytes, MemoryPool* pool);
  RowStore(RowStore&& other) noexcept : RowStore(other.nbytes_, other.pool_) { swap(other); }
  RowStore& operator=(RowStore&& other) noexcept {
    swap(other);
    return *this;
  }
  ~RowStore();

  // The next n calls of take() need no memory. Throws bad_alloc, or length_error.
  void reserve(std::size_t n);
  bool has_room(std::size_t n) const { return n <= n_free_ + (capacity() - end_); }
  void trim();  // gives memory back that was reserved, and not taken
  Row take();   // its info and its values are yet to be written
  void give_back(Row row);
  std::size_t end() const { return end_; }  // all rows are less
  bool is_live(Row row) const { return info(row).steps != kDead; }

  RowInfo& info(Row row) const {
    const Place place = place_of(row);
    std::byte* const infos = slabs_[place.slab] + rows_of(place.slab) * nbytes_;
    return reinterpret_cast<RowInfo*>(infos)[place.index];
  }
  template <class T>
  T* values(Row row) const {
    const Place place = place_of(row);
    return reinterpret_cast<T*>(slabs_[place.slab] + place.index * nbytes_);
  }
  std::size_t nbytes() const;
  void prefetch() const { __builtin_prefetch(slabs_.data()); }  // where slabs are

 private:
  static constexpr unsigned kFirstBits = 3;
  static constexpr std::size_t kSlabBytes = 2u << 20;
  static constexpr Row kNone = 0xffffffffu;

  struct Place {
    std::size_t slab, index;
  };
  void swap(RowStore& other) noexcept {
    std::swap(nbytes_, other.nbytes_);
    std::swap(pool_, other.pool_);
    std::swap(slabs_, other.slabs_);
    std::swap(end_, other.end_);
    std::swap(free_, other.free_);
    std::swap(n_free_, other.n_free_);
    std::swap(full_bits_, other.full_bits_);
  }

  void free_last();
  std::size_t rows_of(std::size_t slab) const {
    const std::size_t bits = slab + kFirstBits;
    return std::size_t{1} << (bits < full_bits_ ? bits : full_bits_);
  }
  // Rows of all slabs.
  std::size_t capacity() const {
    const std::size_t n = slabs_.size(), doubling = full_bits_ - kFirstBits;
    const std::size_t end = n <= doubling ? std::size_t{1} << (n + kFirstBits)
                                          : (n - doubling + 1) << full_bits_;
    return end - (std::size_t{1} << kFirstBits);
  }
  // With 8 added, the slabs that double begin at powers of two.
  Place place_of(Row row) const {
    const std::size_t n = std::size_t{row} + (std::size_t{1} << kFirstBits);
    const auto log = static_cast<unsigned>(63 - __builtin_clzll(n));
    if (log <= full_bits_) return {log - kFirstBits, n - (std::size_t{1} << log)};
    const std::size_t full = n >> full_bits_;  // 2 and more
    return {full_bits_ - kFirstBits + full - 1, n & ((std::size_t{1} << full_bits_) - 1)};
  }

  std::size_t nbytes_;
  MemoryPool* pool_;
  std::vector<std::byte*> slabs_;  // bare: those of a small partition share a line of the cache
  Row end_ = 0, free_ = kNone;  // the key of a free row's info is the next free one
  Row n_free_ = 0;
  unsigned full_bits_;          // log2 of the rows in the largest slabs
};

}  // namespace ringcomm::ps
