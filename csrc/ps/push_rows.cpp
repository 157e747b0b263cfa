// Applies a push to the rows of its keys.
#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "../kernels/reduction_job.hpp"
#include "../kernels/fp_environment.hpp"
#include "hash_partition.hpp"
#include "refuse_concurrent_writes.hpp"

namespace ringcomm::ps {
namespace {

constexpr std::uint32_t kEnd = 0xffffffffu;

// The places of each distinct key in a push: its first place, and from every place the next one.
class Places {
 public:
  Places(const std::uint64_t* keys, std::size_t n) : firsts_(n), next_(n, kEnd) {
    std::iota(firsts_.begin(), firsts_.end(), 0u);
    if (std::adjacent_find(keys, keys + n, std::greater_equal<>()) == keys + n) return;  // distinct
    unsigned bits = 4;
    while ((std::size_t{1} << bits) < n * 2) ++bits;
    std::vector<std::uint32_t> table(std::size_t{1} << bits, kEnd);  // last place of a key
    firsts_.clear();
    const std::size_t mask = table.size() - 1;
    for (std::uint32_t i = 0; i < n; ++i) {
      std::size_t at = scatter(keys[i]) & mask;
      while (table[at] != kEnd && keys[table[at]] != keys[i]) at = (at + 1) & mask;
      if (table[at] == kEnd)
        firsts_.push_back(i);
      else
        next_[table[at]] = i;
      table[at] = i;
    }
  }
  const std::vector<std::uint32_t>& firsts() const { return firsts_; }

  // One partition after the other: what is known of it, and its pages, are met together.
  void sort_by(const std::uint32_t* partitions, std::size_t n_partitions) {
    std::vector<std::uint32_t> at(n_partitions + 1), sorted(firsts_.size());
    for (const std::uint32_t place : firsts_) ++at[partitions[place] + 1];
    std::partial_sum(at.begin(), at.end(), at.begin());
    for (const std::uint32_t place : firsts_) sorted[at[partitions[place]]++] = place;
    firsts_ = std::move(sorted);
  }
  std::uint32_t after(std::uint32_t place) const { return next_[place]; }

 private:
  std::vector<std::uint32_t> firsts_, next_;
};

bool is_stateless(Updater updater) {
  return updater == Updater::assign || updater == Updater::add;
}

// The step as far as the formula depends on it, so that rows at different steps share a Coefs.
std::int64_t step_that_matters(const Rule& rule, std::int64_t step) {
  switch (rule.updater) {
    case Updater::adam: case Updater::nadam: case Updater::radam: return step;
    case Updater::adagrad: return rule.hyper[1] != 0 ? step : 1;
    case Updater::sgd: case Updater::ftrl: return std::min<std::int64_t>(step, 2);
    default: return 1;
  }
}

}  // namespace

// The rows of the keys that have one, and the memory that a push needs for the others, taken before
// it changes anything: a push fails as a whole.
class HashPartition::Reserved {
 public:
  Reserved(const RowSpec& spec, Homes homes, const Places& places, const Push& push)
      : firsts_(places.firsts()), found_(firsts_.size()), counts_(spec.admission.min_count > 1) {
    const bool has_new = find_rows(homes, push.keys);
    const auto& snapshots = found_.front().home->common_->snapshots;
    if (!has_new && snapshots.empty()) return;
    try {
      if (has_new)
        each([&](HashPartition& home, std::size_t i, std::size_t n) {
          home.reserve(push.keys, firsts_.data() + i, found_.data() + i, n, push.draw);
        });
      for (const auto& snapshot : snapshots) {
        Snapshot::Room room;
        for (std::size_t i = 0; i < found_.size(); ++i)
          snapshot->count(push.keys[firsts_[i]], found_[i].row != kNoRow, room);
        snapshot->reserve(room);
      }
    } catch (...) {
      each([](HashPartition& home, std::size_t, std::size_t) { home.store_.trim(); });
      for (const auto& snapshot : snapshots) snapshot->trim();
      drop_spares();
      throw;
    }
  }
  ~Reserved() { drop_spares(); }
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;

  std::vector<Found>& found() { return found_; }  // in the order of firsts()

 private:
  // Partitions, then lines of their indices, are fetched from memory before they are needed.
  bool find_rows(Homes homes, const std::uint64_t* keys) {
    constexpr std::size_t kAhead = 16;
    const std::size_t n = firsts_.size();
    bool has_new = false;
    for (std::size_t i = 0; i < n + 2 * kAhead; ++i) {
      if (i < n) {
        found_[i].home = homes.of(firsts_[i]);
        if (i == 0 || found_[i].home != found_[i - 1].home) homes.prefetch(firsts_[i]);
      }
      if (i >= kAhead && i - kAhead < n)
        found_[i - kAhead].home->index_.prefetch(keys[firsts_[i - kAhead]]);
      if (i < 2 * kAhead) continue;
      Found& now = found_[i - 2 * kAhead];
      now.row = now.home->find(keys[firsts_[i - 2 * kAhead]]);
      has_new |= now.row == kNoRow;
    }
    return has_new;
  }
  // f(partition, i, n): it has the n places from i on.
  template <class F>
  void each(F f) const {
    for (std::size_t i = 0, end = 0; i < found_.size(); i = end) {
      while (end < found_.size() && found_[end].home == found_[i].home) ++end;
      f(*found_[i].home, i, end - i);
    }
  }
  void drop_spares() const {
    if (!counts_) return;
    each([](HashPartition& home, std::size_t, std::size_t) {
      if (home.side_ != nullptr) home.side_->spare.clear();
    });
  }

  const std::vector<std::uint32_t>& firsts_;
  std::vector<Found> found_;
  const bool counts_;
};

template <class T>
class HashPartition::Pusher {
 public:
  // `found`: for each of the first places of `places`.
  Pusher(const RowSpec& spec, const Places& places, std::vector<Found>& found, const Push& push)
      : spec_(spec),
        push_(push),
        plan_(spec.plan()),
        method_(method_of<T>(push.rule)),
        dim_(spec.dim),
        nbytes_(spec.row_nbytes()),
        places_(places),
        found_(found),
        room_(kBatch * dim_),
        sum_(dim_) {
    for (auto& known : coefs_) known.step = 0;
  }

  // The rows of a batch are fetched from memory while the one before is updated.
  Pushed run() {
    const std::size_t n = places_.firsts().size();
    look_up(0);
    for (std::size_t start = 0; start < n; start += kBatch) {
      look_up(start + kBatch);
      update(start, std::min(n, start + kBatch));
    }
    return pushed_;
  }

 private:
  static constexpr std::size_t kBatch = 16, kKnown = 64;

  struct Known {
    std::int64_t step;
    Coefs coefs;
  };
  void look_up(std::size_t start) {
    const auto& firsts = places_.firsts();
    const std::size_t n = firsts.size();
    for (std::size_t i = start + 3 * kBatch; i < std::min(n, start + 4 * kBatch); ++i)
      if (found_[i].home != found_[i - 1].home) found_[i].home->prefetch();
    for (std::size_t i = start + 2 * kBatch; i < std::min(n, start + 3 * kBatch); ++i)
      found_[i].home->store_.prefetch();
    for (std::size_t i = start + kBatch; i < std::min(n, start + 2 * kBatch); ++i)
      if (found_[i].row == kNoRow) found_[i].home->index_.prefetch(push_.keys[firsts[i]]);
    for (std::size_t i = start; i < std::min(n, start + kBatch); ++i) {
      HashPartition& home = *found_[i].home;
      const Row row = found_[i].row = row_for(home, push_.keys[firsts[i]], found_[i].row);
      if (row == kNoRow) continue;
      prefetch_grad(firsts[i]);
      __builtin_prefetch(&home.store_.info(row), 1);
      prefetch_range(home.store_.values<std::byte>(row), nbytes_);
    }
  }

  void update(std::size_t start, std::size_t end) {
    for (std::size_t i = start; i < end; ++i) {
      const auto [home, row] = found_[i];
      if (row != kNoRow) plan_update(*home, row, gradient(places_.firsts()[i], i % kBatch));
    }
    carry_out();
  }

  Row row_for(HashPartition& home, std::uint64_t key, Row row) {
    home.stamp_ = push_.stamp;
    if (row == kNoRow && home.is_admitted(key, push_.draw)) {
      row = home.add(key);
      ++pushed_.admitted;
    }
    ++(row == kNoRow ? pushed_.rejected : pushed_.applied);
    return row;
  }

  const T* gradient(std::uint32_t place, std::size_t k) {
    T* const room = room_.data() + k * dim_;
    const PushPart* part = &part_of(place);
    if (places_.after(place) == kEnd && part->weight == 1 && push_.divisor == 1)
      return at_place(*part, place, room);
    std::fill(sum_.begin(), sum_.end(), 0);
    for (; place != kEnd; place = places_.after(place)) {
      part = &part_of(place);
      const T* const grad = at_place(*part, place, room);
      for (std::size_t j = 0; j < dim_; ++j)
        sum_[j] += part->weight * static_cast<double>(grad[j]);
    }
    for (std::size_t j = 0; j < dim_; ++j) room[j] = static_cast<T>(sum_[j] / push_.divisor);
    return room;
  }

  const PushPart& part_of(std::uint32_t place) const {
    auto part = push_.parts.end() - 1;
    while (part->first > place) --part;
    return *part;
  }

  static std::size_t itemsize(const PushPart& part) {
    const bool is_whole = part.grad_dtype == DType::float64 || part.grad_dtype == DType::float32;
    return is_whole ? sizeof(T) : sizeof(std::uint16_t);
  }

  const std::byte* raw_at(const PushPart& part, std::uint32_t place) const {
    const std::size_t i = place - part.first;
    const std::size_t row = part.places == nullptr ? i : part.places[i];
    return at<std::byte>(part.grads, row * dim_ * itemsize(part));
  }

  void prefetch_grad(std::uint32_t place) const {
    const PushPart& part = part_of(place);
    prefetch_range(raw_at(part, place), dim_ * itemsize(part));
  }

  const T* at_place(const PushPart& part, std::uint32_t place, T* room) const {
    const std::byte* const raw = raw_at(part, place);
    if (itemsize(part) == sizeof(T)) return reinterpret_cast<const T*>(raw);
    return as_values<T>(part.grad_dtype, raw, room, dim_);
  }

  void plan_update(HashPartition& home, Row row, const T* grad) {
    home.keep(row);
    RowInfo& info = home.store_.info(row);
    info.time = push_.now;
    if (info.count != 0xffffffffu) ++info.count;
    const bool is_step = !is_stateless(push_.rule.updater) ||
                         push_.rule.updater == spec_.rule.updater;
    if (is_step && info.steps < RowStore::kDead - 1) ++info.steps;
    const Coefs& coefs = coefs_at(step_that_matters(push_.rule, info.steps));
    T* slot = home.store_.values<T>(row);
    Piece<T>& piece = pieces_[n_pieces_++];
    piece = {&coefs, slot, slot, grad, {}};
    slot += dim_;
    for (std::size_t k = 0; k < plan_.count(); ++k) {
      piece.slots[k] = slot;
      slot += k < plan_.full ? dim_ : 1;
    }
  }

  const Coefs& coefs_at(std::int64_t step) {
    Known& known = coefs_[static_cast<std::size_t>(step) % kKnown];
    if (known.step == step) return known.coefs;
    carry_out();  // what was planned may point to what is known
    method_.prepare(push_.rule.hyper.data(), step, known.coefs);
    known.step = step;
    return known.coefs;
  }

  void carry_out() {
    method_.run(pieces_.data(), n_pieces_, dim_);
    n_pieces_ = 0;
  }

  const RowSpec& spec_;
  const Push& push_;
  const SlotPlan plan_;
  const Method<T> method_;
  const std::size_t dim_, nbytes_;
  const Places& places_;
  std::vector<Found>& found_;
  std::vector<T> room_;
  std::vector<double> sum_;
  std::array<Known, kKnown> coefs_;
  std::array<Piece<T>, kBatch> pieces_;
  std::size_t n_pieces_ = 0;
  Pushed pushed_;
};

void HashPartition::require_rule(const Rule& own, const Rule& rule) {
  if (is_stateless(rule.updater)) return;
  if (rule.updater != own.updater)
    throw std::invalid_argument(
        "push: the table was made for updater " + std::to_string(static_cast<int>(own.updater)) +
        ", got " + std::to_string(static_cast<int>(rule.updater)) + " (assign and add always work)");
  const bool is_same_state =
      rule.updater != Updater::rmsprop || (rule.hyper[5] != 0) == (own.hyper[5] != 0);
  if (!is_same_state || plan_of(rule).full > plan_of(own).full)
    throw std::invalid_argument(
        "push: these hyper-parameters need state that the table was made without (momentum, "
        "amsgrad, centered); make the table with them on");
}

Pushed HashPartition::push_to(const RowSpec& spec, Homes homes, const std::uint32_t* partitions,
                     std::size_t n_partitions, const Push& push) {
  if (push.n >= kEnd) throw std::invalid_argument("push: 2^32 keys and more at once");
  if (push.n == 0) return {};
  Places places(push.keys, push.n);
  places.sort_by(partitions, n_partitions);
  Reserved reserved(spec, homes, places, push);
  const DefaultFpEnvironment here;
  return spec.dtype == DType::float64
             ? Pusher<double>(spec, places, reserved.found(), push).run()
             : Pusher<float>(spec, places, reserved.found(), push).run();
}

}  // namespace ringcomm::ps
