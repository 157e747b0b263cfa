// A map from any 64-bit key to a number that is not 0, in open addressing. The unit of probing is a
// cache line of four entries, which are compared without a branch: the first line is almost always
// the last. An entry that is not in the line of its hash has only full lines before it.
//
// It grows by doubling. The entries of the old table move a few with every insertion, so that no
// insertion takes as long as moving all (100 M of them would be seconds); until then a lookup may
// visit both. Lookups change nothing: any number of threads may look up while nobody writes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

#include "memory_pool.hpp"

namespace ringcomm::ps {

// A bijection that spreads neighbouring keys over all 64 bits (fmix64 of MurmurHash3, A. Appleby).
// Not the function that gives a key its partition: within one partition, all bits are still free.
inline std::uint64_t scatter(std::uint64_t key) {
  key ^= key >> 33;
  key *= 0xff51afd7ed558ccdull;
  key ^= key >> 33;
  key *= 0xc4ceb9fe1a85ec53ull;
  return key ^ (key >> 33);
}

// Which of n partitions a key belongs to: small integers spread as well as any (the finalizer of
// SplitMix64, then a multiplication in place of a division).
inline std::uint32_t partition_of(std::uint64_t key, std::uint32_t n) {
  key += 0x9e3779b97f4a7c15ull;
  key = (key ^ (key >> 30)) * 0xbf58476d1ce4e5b9ull;
  key = (key ^ (key >> 27)) * 0x94d049bb133111ebull;
  return static_cast<std::uint32_t>(((key ^ (key >> 31)) >> 32) * n >> 32);
}

class KeyMap {
 public:
  // `pool`: where its memory comes from, and outlives this; null: the system.
  explicit KeyMap(MemoryPool* pool = nullptr) : pool_(pool) {}

  // Returns the number of a key, 0 where it has none.
  std::uint64_t find(std::uint64_t key) const {
    if (now_.lines == nullptr) return 0;
    const std::uint64_t value = now_.find(key);
    if (value != 0 || old_.lines == nullptr) return value;
    const std::uint64_t left = old_.find(key);
    return left == kGone ? 0 : left;
  }
  void prefetch(std::uint64_t key) const {
    if (now_.lines != nullptr) __builtin_prefetch(&now_.lines[now_.home(key)]);
  }
  // The next n insertions need no memory. Throws bad_alloc: nothing has changed.
  void reserve(std::size_t n);
  bool has_room(std::size_t n) const { return (size_ + n) * 8 <= now_.size() * kPerLine * 5; }
  void insert(std::uint64_t key, std::uint64_t value);  // of a key that is not in the map
  void set(std::uint64_t key, std::uint64_t value);     // of any key; 0 takes it out
  void erase(std::uint64_t key);                        // nothing happens where it is not
  void clear();
  void wipe();  // as clear(), but keeps the memory
  std::size_t size() const { return size_; }
  std::size_t nbytes() const { return (now_.size() + old_.size()) * sizeof(Line); }

  template <class F>
  void for_each(F f) const {  // f(key, value), in no order
    for (const Table* table : {&now_, &old_})
      for (std::size_t i = 0; i < table->size(); ++i)
        for (std::size_t k = 0; k < kPerLine; ++k) {
          const std::uint64_t value = table->lines[i].values[k];
          if (value != 0 && value != kGone) f(table->lines[i].keys[k], value);
        }
  }

 private:
  static constexpr std::size_t kPerLine = 4;
  // In the old table: moved or erased. Those that were behind it are still found.
  static constexpr std::uint64_t kGone = ~std::uint64_t{0};

  struct alignas(64) Line {
    std::uint64_t keys[kPerLine], values[kPerLine];  // value 0: free

    std::uint64_t find(std::uint64_t key) const {
      std::uint64_t value = 0;
      for (std::size_t k = 0; k < kPerLine; ++k)
        value |= values[k] & -static_cast<std::uint64_t>(keys[k] == key);
      return value;
    }
    bool is_full() const { return values[0] && values[1] && values[2] && values[3]; }
  };
  struct Free {
    MemoryPool* pool;
    std::size_t nbytes;
    void operator()(Line* lines) const;
  };
  struct Slot {
    Line* line;  // null: nowhere
    std::size_t place;
    std::uint64_t& value() const { return line->values[place]; }
  };

  struct Table {
    std::unique_ptr<Line[], Free> lines;
    unsigned bits = 0;  // 2^bits lines

    std::size_t size() const { return lines == nullptr ? 0 : std::size_t{1} << bits; }
    std::size_t mask() const { return size() - 1; }
    std::size_t home(std::uint64_t key) const { return scatter(key) >> (64 - bits); }
    std::uint64_t find(std::uint64_t key) const {
      for (std::size_t i = home(key);; i = (i + 1) & mask()) {
        const std::uint64_t value = lines[i].find(key);
        if (value != 0 || !lines[i].is_full()) return value;
      }
    }
    Slot locate(std::uint64_t key) const;
    void put(std::uint64_t key, std::uint64_t value);
    void take_out(Slot slot);
  };

  Slot locate(std::uint64_t key) const;
  Line* new_lines(std::size_t nbytes) const;
  void move_some(std::size_t n);

  MemoryPool* pool_;
  Table now_, old_;
  std::size_t size_ = 0, moved_ = 0;  // lines of the old table that have been looked at
};

}  // namespace ringcomm::ps
