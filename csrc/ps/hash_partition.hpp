// A partition of a hash table: rows by 64-bit key, pushes to them, admission and eviction.
//
// One thread at a time; only all(), copy(), candidates() and what a Shard reads may run beside each
// other. Whoever breaks that gets logic_error, not a torn row. All that happens is a function of the
// calls and their arguments (there is no clock and no random state here): replicas that get the same
// calls in the same order hold the same rows.
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

#include "../kernels/dtype_and_op_codes.hpp"
#include "memory_pool.hpp"
#include "initial_values.hpp"
#include "key_map.hpp"
#include "row_snapshot.hpp"
#include "row_store.hpp"
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
  std::size_t max_rows = std::numeric_limits<std::size_t>::max();  // of the table, on all servers
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

  SlotPlan plan() const { return plan_of(rule); }
  std::size_t slot_width() const { return plan().full * dim + plan().per_row; }
  std::size_t itemsize() const { return dtype == DType::float64 ? 8 : 4; }
  std::size_t row_nbytes() const { return (dim + slot_width()) * itemsize(); }
};

enum class Missing : int { init = 0, zero, raise };

struct MissingKey : std::out_of_range {
  explicit MissingKey(std::uint64_t missing) : std::out_of_range("no row"), key(missing) {}
  std::uint64_t key;
};

// Gradients of the keys from number `first` on to the first of the next part.
struct PushPart {
  std::size_t first;
  DType grad_dtype;
  const void* grads;
  double weight;
  const std::uint32_t* places = nullptr;  // which row of `grads` each key's is; null: in order
};

struct Push {
  const std::uint64_t* keys;  // of all parts, one behind the other
  std::size_t n;
  std::vector<PushPart> parts;
  Rule rule;  // the table's, with the hyper-parameters of now; or assign or add
  double now;
  std::uint64_t stamp;
  double divisor = 1;      // of the weighted sums
  std::uint64_t draw = 0;  // of admission by chance: another number in each push
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
};

struct Expired {
  std::size_t n;
  bool is_done;  // all rows have been looked at
};

class HashPartition {
 public:
  using Users = std::atomic<std::int32_t>;  // readers; less than 0: a writer

  // What the partitions of a shard have in common.
  struct Common {
    Users users{0};  // they are one to those who use them at the same time
    MemoryPool pool;
    std::vector<std::unique_ptr<Snapshot>> snapshots;  // that somebody may be reading
  };

  HashPartition(std::shared_ptr<const RowSpec> spec, std::shared_ptr<Common> common);
  HashPartition(const HashPartition&) = delete;
  HashPartition& operator=(const HashPartition&) = delete;

  const RowSpec& spec() const { return *spec_; }
  std::size_t size() const { return index_.size(); }
  std::size_t nbytes() const;
  // Of the last change of anything here; of what changes by load() or clear(), whoever calls that
  // says it.
  std::uint64_t stamp() const { return stamp_; }
  void mark(std::uint64_t stamp) { stamp_ = stamp; }

  // Looks at no more than `max_work` rows from where the last call stopped, and takes out those that
  // were not pushed for `ttl_s`.
  Expired expire(double now, std::uint64_t stamp, std::size_t max_work);

  void clear();

  std::vector<Row> all() const;  // in the order they lie in
  void copy(const std::vector<Row>& rows, const RowArrays& out) const;
  void load(const RowArrays& rows, std::size_t n);  // replaces what is there

  // Keys that were seen too seldom, and how often.
  std::vector<std::pair<std::uint64_t, std::uint64_t>> candidates() const;
  void load_candidate(std::uint64_t key, std::uint64_t count);
  std::size_t n_candidates() const { return side_ == nullptr ? 0 : side_->candidates.size(); }

 private:
  friend class Shard;
  static constexpr Row kNoRow = 0xffffffffu;

  struct Side {  // what most partitions have none of
    KeyMap candidates;  // key -> count
    KeyMap spare;       // during a push in which the counts may halve: room for those
  };
  // Where each of several keys belongs.
  struct Homes {
    HashPartition* const* each;  // null where the partition holds nothing
    HashPartition* of(std::size_t i) const { return each[i]; }
    void prefetch(std::size_t i) const {
      if (each[i] != nullptr) each[i]->prefetch();
    }
    void prefetch_slabs(std::size_t i) const {
      if (each[i] != nullptr) each[i]->store_.prefetch();
    }
  };
  class Reading;
  class Writing;
  class Reserved;
  template <class T>
  class Pusher;

  static std::size_t gather_from(const RowSpec& spec, Homes homes, const std::uint64_t* keys,
                                 std::size_t n, void* out, const std::uint32_t* places,
                                 Missing missing);
  // `partitions`: of each key.
  static Pushed push_to(const RowSpec& spec, Homes homes, const std::uint32_t* partitions,
                        std::size_t n_partitions, const Push& push);
  bool erase(std::uint64_t key, std::uint64_t stamp);  // false: it had no row

  // What is known of a partition is some lines, and where its slabs are is another behind them.
  void prefetch() const {
    const auto* const here = reinterpret_cast<const std::byte*>(this);
    for (std::size_t k = 0; k < sizeof(HashPartition); k += 64) __builtin_prefetch(here + k);
  }
  Row find(std::uint64_t key) const { return static_cast<Row>(index_.find(key) - 1); }
  Side& side();
  static void fill_missing(const RowSpec& spec, std::uint64_t key, void* out, Missing missing);
  bool is_admitted(std::uint64_t key, std::uint64_t draw);
  Row add(std::uint64_t key);
  void take_out(Row row, std::uint64_t stamp);
  void keep(Row row) {  // for snapshots: it is about to change
    for (const auto& snapshot : common_->snapshots)
      snapshot->keep(store_.info(row).key, store_.values<std::byte>(row));
  }
  void halve_candidates();
  struct Found {
    HashPartition* home;
    Row row;  // kNoRow: the key has none
  };
  // All memory that a push to these keys may need here; `places`: of its distinct keys, which are
  // `found` so.
  void reserve(const std::uint64_t* keys, const std::uint32_t* places, const Found* found,
               std::size_t n, std::uint64_t draw);
  bool is_drawn(std::uint64_t key, std::uint64_t draw) const;
  static void require_rule(const Rule& own, const Rule& rule);
  template <class T>
  void initialise(Row row, std::uint64_t key);

  std::shared_ptr<const RowSpec> spec_;
  const std::shared_ptr<Common> common_;  // before what has its memory
  KeyMap index_;  // key -> row + 1
  RowStore store_;
  std::unique_ptr<Side> side_;
  Row cursor_ = 0;  // of expire()
  std::uint64_t stamp_ = 0;
};

}  // namespace ringcomm::ps
