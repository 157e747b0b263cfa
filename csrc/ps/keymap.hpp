// A map from any 64-bit key to a number that is not 0, in open addressing with linear probing.
//
// It grows by doubling. The entries of the old table move a few with every insertion, so that no
// insertion takes as long as moving all (100 M of them would be seconds); until then a lookup may
// visit both. Lookups change nothing: any number of threads may look up while nobody writes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

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
  // Returns the number of a key, 0 where it has none.
  std::uint64_t find(std::uint64_t key) const {
    if (now_.entries == nullptr) return 0;
    const Entry* entry = now_.find(key);
    if (entry == nullptr && old_.entries != nullptr) entry = old_.find(key);
    return entry == nullptr ? 0 : entry->value;
  }
  void prefetch(std::uint64_t key) const {
    if (now_.entries != nullptr) __builtin_prefetch(&now_.entries[now_.home(key)]);
  }
  void insert(std::uint64_t key, std::uint64_t value);  // of a key that is not in the map
  void set(std::uint64_t key, std::uint64_t value);     // of any key; 0 takes it out
  void erase(std::uint64_t key);                        // nothing happens where it is not
  void clear();
  std::size_t size() const { return size_; }
  std::size_t nbytes() const { return (now_.size() + old_.size()) * sizeof(Entry); }

  template <class F>
  void for_each(F f) const {  // f(key, value), in no order
    for (const Table* table : {&now_, &old_})
      for (std::size_t i = 0; i < table->size(); ++i) {
        const Entry& entry = table->entries[i];
        if (entry.value != 0 && entry.value != kGone) f(entry.key, entry.value);
      }
  }

 private:
  struct Entry {
    std::uint64_t key, value;  // value 0: free
  };
  struct Free {
    void operator()(Entry* entries) const { std::free(entries); }
  };
  // In the old table: moved or erased. Those that were behind it are still found.
  static constexpr std::uint64_t kGone = ~std::uint64_t{0};

  struct Table {
    std::unique_ptr<Entry[], Free> entries;
    unsigned bits = 0;  // 2^bits entries

    std::size_t size() const { return entries == nullptr ? 0 : std::size_t{1} << bits; }
    std::size_t mask() const { return size() - 1; }
    std::size_t home(std::uint64_t key) const { return scatter(key) >> (64 - bits); }
    Entry* find(std::uint64_t key) const {
      for (std::size_t i = home(key); entries[i].value != 0; i = (i + 1) & mask())
        if (entries[i].key == key && entries[i].value != kGone) return &entries[i];
      return nullptr;
    }
    void put(std::uint64_t key, std::uint64_t value) {
      std::size_t i = home(key);
      while (entries[i].value != 0) i = (i + 1) & mask();
      entries[i] = {key, value};
    }
    void take_out(Entry* entry);
  };

  void make_room();
  void move_some(std::size_t n);

  Table now_, old_;
  std::size_t size_ = 0, moved_ = 0;  // entries of the old table that have been looked at
};

}  // namespace ringcomm::ps
