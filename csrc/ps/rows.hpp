// A partition of a hash table: rows by 64-bit key, what a push does to them, and who may stay.
//
// One thread at a time; only gather(), metadata() and the scans may run beside each other. Whoever
// breaks that gets logic_error, not a torn row. All that happens is a function of the calls and
// their arguments (there is no clock and no random state here): replicas that get the same calls in
// the same order hold the same rows.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "../kernels/dtype.hpp"
#include "arena.hpp"
#include "initial.hpp"
#include "keymap.hpp"
#include "snapshot.hpp"
#include "store.hpp"
#include "update.hpp"

namespace ringcomm::ps {

// Which keys are given a row: those pushed `min_count` times, or by chance at each push. A push
// counts a key once, however often it stands in it, so that it does not matter who sums duplicates.
struct Admission {
  std::uint32_t min_count = 1;
  double probability = 1;
  std::size_t max_candidates = 1u << 14;  // keys that are counted; at the bound all counts halve
};

enum class Order : int { lru = 0, lfu };

struct Eviction {
  double ttl_s = std::numeric_limits<double>::infinity();
  std::size_t max_rows = std::numeric_limits<std::size_t>::max();
  Order order = Order::lru;
};

// What all partitions of a table have in common.
struct RowSpec {
  std::size_t dim;
  DType dtype;  // of values and slots: float32 or float64
  Rule rule;
  Initial initial;
  Admission admission;
  Eviction eviction;
  std::size_t max_tombstones;

  SlotPlan plan() const { return plan_of(rule); }
  std::size_t slot_width() const { return plan().full * dim + plan().per_row; }
  std::size_t itemsize() const { return dtype == DType::float64 ? 8 : 4; }
  std::size_t row_nbytes() const { return (dim + slot_width()) * itemsize(); }
};

enum class Missing : int { init = 0, zero, raise };

struct MissingKey : std::out_of_range {
  MissingKey(std::uint64_t missing, std::size_t where)
      : std::out_of_range("no row"), key(missing), position(where) {}
  std::uint64_t key;
  std::size_t position;
};

// Gradients of the keys from number `first` on to the first of the next part.
struct PushPart {
  std::size_t first;
  DType grad_dtype;
  const void* grads;
  double weight;
};

struct Push {
  const std::uint64_t* keys;  // of all parts, one behind the other
  std::size_t n;
  std::vector<PushPart> parts;
  Rule rule;  // the table's, with the hyper-parameters of now; or assign or add
  double now;
  std::uint64_t stamp;
  double divisor = 1;  // of the weighted sums
};

struct Pushed {  // distinct keys
  std::size_t applied = 0, rejected = 0, admitted = 0;
};

// Rows as arrays, a row of `values` and `slots` after the other.
struct RowArrays {
  std::uint64_t* keys;
  void* values;
  void* slots;
  std::uint32_t* counts;
  std::uint32_t* steps;
  double* times;
  std::uint64_t* stamps;
};

struct Scan {
  std::vector<Row> rows;
  std::uint64_t cursor;  // to go on from
  bool is_done;
};

struct Evicted {
  std::vector<std::uint64_t> keys;
  bool is_done;  // nothing is left to be evicted now
};

class Rows {
 public:
  using Users = std::atomic<std::int32_t>;  // readers; less than 0: a writer

  // What the partitions of a shard have in common.
  struct Common {
    Users users{0};  // they are one to those who use them at the same time
    Arena arena;
    std::vector<std::unique_ptr<Snapshot>> snapshots;  // that somebody may be reading
  };

  explicit Rows(std::shared_ptr<const RowSpec> spec,
                std::shared_ptr<Common> common = std::make_shared<Common>());
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;

  const RowSpec& spec() const { return *spec_; }
  std::size_t size() const { return index_.size(); }
  std::size_t nbytes() const;
  // Of the last change of anything here; of what changes by load() or clear(), whoever calls that
  // says it.
  std::uint64_t stamp() const { return stamp_; }
  void mark(std::uint64_t stamp) { stamp_ = stamp; }

  // Copies rows to `out`; returns how many of the keys have one. Throws MissingKey if told to, with
  // `out` as it was.
  std::size_t gather(const std::uint64_t* keys, std::size_t n, void* out, Missing missing) const;

  // One update of each distinct key that has a row or is given one, with the weighted sum of its
  // gradients by `divisor`, in float64, in the order they come, rounded once.
  Pushed push(const Push& push);

  // Takes rows out; returns how many there were. Also forgets how often their keys were seen.
  std::size_t erase(const std::uint64_t* keys, std::size_t n, std::uint64_t stamp);

  // Looks at no more than `max_work` rows from where the last call stopped, takes out those that
  // were not pushed for `ttl_s` and, at the end of a round, the last in order above `max_rows`.
  Evicted evict(double now, std::uint64_t stamp, std::size_t max_work);

  void clear();

  // Rows in the order they lie in, from `cursor` on, at most `limit`; of the second kind those whose
  // stamp is greater than `since`. A row that is pushed while a scan goes on has a later stamp than
  // the scan began with: the next scan has it if this one has not.
  Scan scan(std::uint64_t cursor, std::size_t limit) const;
  Scan scan_changed(std::uint64_t since, std::uint64_t cursor, std::size_t limit) const;
  void copy(const std::vector<Row>& rows, const RowArrays& out) const;
  void load(const RowArrays& rows, std::size_t n);  // replaces what is there
  void metadata(const std::uint64_t* keys, std::size_t n, const RowArrays& out) const;

  // Keys that were taken out after `since`. Not all of them if `since` is less than known_since().
  std::vector<std::uint64_t> erased_since(std::uint64_t since) const;
  std::uint64_t known_since() const { return side_ == nullptr ? 0 : side_->known_since; }
  void forget_erased(std::uint64_t until);

  // Keys that were seen too seldom, and how often.
  std::vector<std::pair<std::uint64_t, std::uint64_t>> candidates() const;
  void load_candidate(std::uint64_t key, std::uint64_t count);
  std::size_t n_candidates() const { return side_ == nullptr ? 0 : side_->candidates.size(); }

 private:
  friend class Shard;
  static constexpr std::size_t kGroup = 64;  // rows that share an entry of newest_
  static constexpr Row kNoRow = 0xffffffffu;

  // Who may be evicted: the least is first.
  struct Victim {
    double rank, time;
    std::uint64_t key;
    Row row;
    std::uint32_t count;

    bool operator<(const Victim& other) const {
      return std::tie(rank, time, key) < std::tie(other.rank, other.time, other.key);
    }
  };
  struct Side {  // what most partitions have none of
    KeyMap candidates, erased;  // key -> count; key -> stamp + 1
    std::uint64_t known_since = 0;
    std::vector<Victim> round;  // a heap of those who would be evicted, the last of them on top
  };
  // Where each of several keys belongs: all to one partition, or each to its own.
  struct Homes {
    Rows* only;
    Rows* const* each;  // null where the partition holds nothing
    const std::uint32_t* partitions = nullptr;  // with `each`: of each key
    std::size_t n_partitions = 0;
    Rows* of(std::size_t i) const { return each == nullptr ? only : each[i]; }
    // What is known of a partition is some lines, and where its slabs are is another behind them.
    void prefetch(std::size_t i) const {
      if (each == nullptr || each[i] == nullptr) return;
      const auto* const home = reinterpret_cast<const std::byte*>(each[i]);
      for (std::size_t k = 0; k < sizeof(Rows); k += 64) __builtin_prefetch(home + k);
    }
    void prefetch_slabs(std::size_t i) const {
      if (each != nullptr && each[i] != nullptr) each[i]->store_.prefetch();
    }
  };
  class Reading;
  class Writing;
  template <class T>
  class Pusher;

  static std::size_t gather_from(const RowSpec& spec, Homes homes, const std::uint64_t* keys,
                                 std::size_t n, void* out, const std::uint32_t* places,
                                 Missing missing);
  static Pushed push_to(const RowSpec& spec, Homes homes, const Push& push);

  Row find(std::uint64_t key) const { return static_cast<Row>(index_.find(key) - 1); }
  Side& side();
  static void fill_missing(const RowSpec& spec, std::uint64_t key, void* out, Missing missing);
  bool is_admitted(std::uint64_t key, std::uint64_t stamp);
  Row add(std::uint64_t key);
  void touch(Row row, std::uint64_t stamp) {
    std::uint64_t& newest = newest_[row / kGroup];
    newest = newest < stamp ? stamp : newest;
  }
  void take_out(Row row, std::uint64_t stamp);
  void note_erased(std::uint64_t key, std::uint64_t stamp);
  void keep(Row row) {  // for snapshots: it is about to change
    for (const auto& snapshot : common_->snapshots)
      snapshot->keep(store_.info(row).key, store_.values<std::byte>(row));
  }
  void halve_candidates();
  void finish_round(std::uint64_t stamp, std::vector<std::uint64_t>& keys);
  static void require_rule(const Rule& own, const Rule& rule);
  template <class T>
  void initialise(Row row, std::uint64_t key);

  std::shared_ptr<const RowSpec> spec_;
  const std::shared_ptr<Common> common_;  // before what has its memory
  KeyMap index_;  // key -> row + 1
  RowStore store_;
  std::vector<std::uint64_t> newest_;  // stamp among kGroup neighbouring rows
  std::unique_ptr<Side> side_;
  Row cursor_ = 0;  // of evict()
  std::uint64_t stamp_ = 0;
};

}  // namespace ringcomm::ps
