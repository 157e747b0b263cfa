// What a push does to the rows of its keys.
#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>

#include "../kernels/job.hpp"
#include "rows.hpp"
#include "use.hpp"

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

template <class T>
class Rows::Pusher {
 public:
  Pusher(Rows& rows, const Push& push)
      : rows_(rows),
        push_(push),
        plan_(rows.spec_->plan()),
        method_(method_of<T>(push.rule)),
        dim_(rows.spec_->dim),
        nbytes_(rows.spec_->row_nbytes()),
        places_(push.keys, push.n),
        room_(kBatch * dim_) {
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
    for (std::size_t i = start + kBatch; i < std::min(n, start + 2 * kBatch); ++i)
      rows_.index_.prefetch(push_.keys[firsts[i]]);
    for (std::size_t i = start; i < std::min(n, start + kBatch); ++i) {
      const Row row = row_for(push_.keys[firsts[i]]);
      found_[i % kFound] = row;
      if (row == kNoRow) continue;
      __builtin_prefetch(&rows_.store_.info(row), 1);
      prefetch_range(rows_.store_.values<std::byte>(row), nbytes_);
    }
  }

  void update(std::size_t start, std::size_t end) {
    for (std::size_t i = start; i < end; ++i) {
      const Row row = found_[i % kFound];
      if (row != kNoRow) plan_update(row, gradient(places_.firsts()[i], i % kBatch));
    }
    carry_out();
  }

  Row row_for(std::uint64_t key) {
    Row row = rows_.find(key);
    if (row == kNoRow && rows_.is_admitted(key, push_.stamp)) {
      row = rows_.add(key);
      ++pushed_.admitted;
    }
    ++(row == kNoRow ? pushed_.rejected : pushed_.applied);
    return row;
  }

  const T* gradient(std::uint32_t place, std::size_t k) {
    T* const room = room_.data() + k * dim_;
    if (places_.after(place) == kEnd) return at_place(place, room);
    sum_.assign(dim_, 0);
    for (; place != kEnd; place = places_.after(place)) {
      const T* const grad = at_place(place, room);
      for (std::size_t j = 0; j < dim_; ++j) sum_[j] += static_cast<double>(grad[j]);
    }
    for (std::size_t j = 0; j < dim_; ++j) room[j] = static_cast<T>(sum_[j]);
    return room;
  }

  const T* at_place(std::uint32_t place, T* room) const {
    const bool is_whole = push_.grad_dtype == DType::float64 || push_.grad_dtype == DType::float32;
    const std::size_t item = is_whole ? sizeof(T) : sizeof(std::uint16_t);
    const auto* const raw = at<std::byte>(push_.grads, place * dim_ * item);
    if (item == sizeof(T)) return reinterpret_cast<const T*>(raw);
    return as_values<T>(push_.grad_dtype, raw, room, dim_);
  }

  void plan_update(Row row, const T* grad) {
    RowInfo& info = rows_.store_.info(row);
    info.time = push_.now;
    info.stamp = push_.stamp;
    if (info.count != 0xffffffffu) ++info.count;
    const bool is_step = !is_stateless(push_.rule.updater) ||
                         push_.rule.updater == rows_.spec_->rule.updater;
    if (is_step && info.steps < RowStore::kDead - 1) ++info.steps;
    rows_.touch(row, push_.stamp);
    const Coefs& coefs = coefs_at(step_that_matters(push_.rule, info.steps));
    T* slot = rows_.store_.values<T>(row);
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

  Rows& rows_;
  const Push& push_;
  const SlotPlan plan_;
  const Method<T> method_;
  const std::size_t dim_, nbytes_;
  const Places places_;
  std::vector<T> room_;
  std::vector<double> sum_;
  std::array<Known, kKnown> coefs_;
  std::array<Piece<T>, kBatch> pieces_;
  static constexpr std::size_t kFound = 2 * kBatch;
  std::array<Row, kFound> found_;
  std::size_t n_pieces_ = 0;
  Pushed pushed_;
};

void Rows::require_rule(const Rule& rule) const {
  const Rule& own = spec_->rule;
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

Pushed Rows::push(const Push& push) {
  require_rule(push.rule);
  if (push.n >= kEnd) throw std::invalid_argument("push: 2^32 keys and more at once");
  const Writing writing(*this);
  return spec_->dtype == DType::float64 ? Pusher<double>(*this, push).run()
                                        : Pusher<float>(*this, push).run();
}

}  // namespace ringcomm::ps
