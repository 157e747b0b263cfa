// All partitions of one hash table that one server owns: keys of any of them in one call.
//
// A partition takes no memory until a key of it is pushed. The partitions share one guard: what
// HashPartition says of calls beside each other holds for a shard as a whole.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include "hash_partition.hpp"

namespace ringcomm::ps {

class Shard {
 public:
  // `owners[i]`: who owns partition i; those of `me` are here.
  Shard(std::shared_ptr<const RowSpec> spec, const std::vector<std::uint32_t>& owners,
        std::uint32_t me);
  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;

  const RowSpec& spec() const { return *spec_; }
  std::size_t size() const;
  std::size_t nbytes() const;

  // The rows of a partition, which is made if it is not there; takes it over from now on.
  std::shared_ptr<HashPartition> own(std::uint32_t partition);
  // Another owns it from now on; returns what was here, or null.
  std::shared_ptr<HashPartition> disown(std::uint32_t partition);
  // Null: nothing was pushed to it, or another owns it.
  std::shared_ptr<HashPartition> find(std::uint32_t partition) const;

  // A key of a partition that is not owned: invalid_argument, nothing is changed.

  // Copies rows to `out`; returns how many of the keys have one. Throws MissingKey if asked to, with
  // `out` as it was. `places`: which row of `out` each key's is; null: one behind the other.
  std::size_t gather(const std::uint64_t* keys, std::size_t n, void* out,
                     const std::uint32_t* places, Missing missing) const;
  // One update of each distinct key that has a row or is given one, with the weighted sum of its
  // gradients by `divisor`, in float64, in the order they come, rounded once.
  Pushed push(const Push& push);
  // Takes rows out; returns how many there were. Also forgets how often their keys were seen.
  std::size_t erase(const std::uint64_t* keys, std::size_t n, std::uint64_t stamp);
  // Of a key without a row: 0, 0 and NaN.
  void metadata(const std::uint64_t* keys, std::size_t n, std::uint32_t* counts,
                std::uint32_t* steps, double* times) const;

  // Keeps what is there now for gather_held(), until release(). Metadata are not kept.
  void hold(std::uint64_t number);
  void release(std::uint64_t number);
  // As gather(), of the rows as they were when hold(number) was called.
  std::size_t gather_held(std::uint64_t number, const std::uint64_t* keys, std::size_t n, void* out,
                          const std::uint32_t* places, Missing missing) const;

  // How many keys of each partition were pushed and gathered so far, of those that are here.
  std::vector<std::uint64_t> n_keys() const;
  // Counts those that were, where the partition was before.
  void add_keys(std::uint32_t partition, std::uint64_t n);

  // Takes out rows that have expired: goes on where the last call stopped, about `max_work` rows and
  // partitions far, once around at most. Then takes out the first in order until there are no more
  // than max_rows(). Returns how many rows were evicted.
  std::size_t evict(double now, std::uint64_t stamp, std::size_t max_work);
  // This shard's share of the table's max_rows: in proportion to the partitions that it owns.
  std::size_t max_rows() const;

 private:
  // To find rows to take out, all are looked at. So for lru the next ones are found, too, one of
  // kAhead of all: rows that are pushed later are behind them. For lfu a new row may come before
  // them; there, above kExactRows, one of kSlack more is taken out than must be.
  static constexpr std::size_t kAhead = 16, kExactRows = 8192, kSlack = 100;

  // Who is evicted: the least is first.
  struct Victim {
    double rank, time;
    std::uint64_t key;
    std::uint32_t partition;
    Row row;

    bool operator<(const Victim& other) const {
      return std::tie(rank, time, key) < std::tie(other.rank, other.time, other.key);
    }
  };

  // Approximate if several threads gather: what is measured decides where partitions lie, no more.
  struct Count {
    std::atomic<std::uint64_t> value{0};
    void add(std::uint64_t n) {
      value.store(value.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
    }
  };

  std::vector<std::uint32_t> partitions(const std::uint64_t* keys, std::size_t n) const;
  HashPartition* home(std::uint64_t key) const { return parts_[partition(key)].get(); }
  std::uint32_t partition(std::uint64_t key) const;
  const Snapshot& snapshot(std::uint64_t number) const;
  std::size_t expire(double now, std::uint64_t stamp, std::size_t max_work);
  std::size_t shrink(std::uint64_t stamp);
  void find_victims(std::size_t n);
  const std::shared_ptr<HashPartition>& made(std::uint32_t partition);

  std::shared_ptr<const RowSpec> spec_;
  std::shared_ptr<HashPartition::Common> common_;
  std::vector<std::shared_ptr<HashPartition>> parts_;
  std::vector<bool> is_owned_;
  mutable std::vector<Count> n_keys_;
  std::size_t cursor_ = 0;  // of expire()
  std::vector<Victim> victims_;  // the next one last
};

}  // namespace ringcomm::ps
