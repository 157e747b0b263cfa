#include "hash_partition.hpp"

#include <algorithm>
#include <cstring>

#include "refuse_concurrent_writes.hpp"

namespace ringcomm::ps {
namespace {

constexpr std::size_t kBatch = 16;  // keys whose rows are fetched from memory at once

}  // namespace

HashPartition::HashPartition(std::shared_ptr<const RowSpec> spec, std::shared_ptr<Common> common)
    : spec_(std::move(spec)),
      common_(std::move(common)),
      index_(&common_->pool),
      store_(spec_->row_nbytes(), &common_->pool) {}

std::size_t HashPartition::nbytes() const {
  const Reading reading(*this);
  const std::size_t side = side_ == nullptr ? 0 : sizeof *side_ + side_->candidates.nbytes();
  return sizeof *this + index_.nbytes() + store_.nbytes() + side;
}

// `places`: which row of `out` each key's is.
std::size_t HashPartition::gather_from(const RowSpec& spec, Homes homes, const std::uint64_t* keys,
                              std::size_t n, void* out, const std::uint32_t* places,
                              Missing missing) {
  const auto prefetch = [&](std::size_t i) {
    const HashPartition* const home = homes.of(i);
    if (home != nullptr) home->index_.prefetch(keys[i]);
  };
  if (missing == Missing::raise)
    for (std::size_t i = 0; i < n; ++i) {
      if (i + kBatch < n) prefetch(i + kBatch);
      const HashPartition* const home = homes.of(i);
      if (home == nullptr || home->index_.find(keys[i]) == 0) throw MissingKey(keys[i]);
    }
  const std::size_t nbytes = spec.dim * spec.itemsize();
  std::size_t found = 0;
  const std::byte* batches[2][kBatch];  // one is copied while the other's rows are fetched
  const auto look_up = [&](std::size_t batch) {
    for (std::size_t i = (batch + 3) * kBatch; i < std::min(n, (batch + 4) * kBatch); ++i)
      homes.prefetch(i);
    for (std::size_t i = (batch + 2) * kBatch; i < std::min(n, (batch + 3) * kBatch); ++i)
      homes.prefetch_slabs(i);
    for (std::size_t i = (batch + 1) * kBatch; i < std::min(n, (batch + 2) * kBatch); ++i)
      prefetch(i);
    for (std::size_t i = batch * kBatch; i < std::min(n, (batch + 1) * kBatch); ++i) {
      const HashPartition* const home = homes.of(i);
      const Row row = home == nullptr ? kNoRow : home->find(keys[i]);
      const std::byte* const data = row == kNoRow ? nullptr : home->store_.values<std::byte>(row);
      if (data != nullptr) prefetch_range(data, nbytes);
      batches[batch % 2][i % kBatch] = data;
    }
  };
  look_up(0);
  for (std::size_t i = 0; i < n; ++i) {
    std::byte* const to = static_cast<std::byte*>(out) + places[i] * nbytes;
    if (i % kBatch == 0) look_up(i / kBatch + 1);
    const std::byte* const data = batches[i / kBatch % 2][i % kBatch];
    if (data == nullptr) {
      fill_missing(spec, keys[i], to, missing);
    } else {
      std::memcpy(to, data, nbytes);
      ++found;
    }
  }
  return found;
}

void HashPartition::fill_missing(const RowSpec& spec, std::uint64_t key, void* out,
                                 Missing missing) {
  if (missing != Missing::init)
    std::memset(out, 0, spec.dim * spec.itemsize());
  else if (spec.dtype == DType::float64)
    fill_row(spec.initial, key, static_cast<double*>(out), spec.dim);
  else
    fill_row(spec.initial, key, static_cast<float*>(out), spec.dim);
}

bool HashPartition::erase(std::uint64_t key, std::uint64_t stamp) {
  if (side_ != nullptr && side_->candidates.find(key) != 0) {
    side_->candidates.erase(key);
    stamp_ = stamp;
  }
  const Row row = find(key);
  if (row == kNoRow) return false;
  take_out(row, stamp);
  return true;
}

void HashPartition::clear() {
  const Writing writing(*this);
  if (!common_->snapshots.empty())
    for (Row row = 0; row < store_.end(); ++row)
      if (store_.is_live(row)) keep(row);
  index_.clear();
  store_ = RowStore(spec_->row_nbytes(), &common_->pool);
  side_.reset();
  cursor_ = 0;
}

Expired HashPartition::expire(double now, std::uint64_t stamp, std::size_t max_work) {
  const Writing writing(*this);
  Expired expired{0, true};
  for (std::size_t work = 0; work < max_work && cursor_ < store_.end(); ++work) {
    const Row row = cursor_++;
    const RowInfo info = store_.info(row);
    if (info.steps == RowStore::kDead || now - info.time < spec_->eviction.ttl_s) continue;
    take_out(row, stamp);
    ++expired.n;
  }
  expired.is_done = cursor_ >= store_.end();
  if (expired.is_done) cursor_ = 0;
  return expired;
}

HashPartition::Side& HashPartition::side() {
  if (side_ == nullptr) side_ = std::make_unique<Side>();
  return *side_;
}

void HashPartition::reserve(const std::uint64_t* keys, const std::uint32_t* places,
                            const Found* found, std::size_t n, std::uint64_t draw) {
  const Admission& policy = spec_->admission;
  if (policy.min_count <= 1 && store_.has_room(n) && index_.has_room(n)) return;
  std::size_t n_rows = 0, n_counts = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint64_t key = keys[places[i]];
    if (found[i].row != kNoRow || !is_drawn(key, draw)) continue;
    const std::uint64_t count = side_ == nullptr ? 0 : side_->candidates.find(key);
    const bool has_enough = count + 1 >= policy.min_count;
    n_rows += has_enough;
    n_counts += !has_enough && count == 0;
  }
  store_.reserve(n_rows);
  index_.reserve(n_rows);
  if (n_counts == 0) return;
  Side& here = side();
  const std::size_t most = policy.max_candidates, size = here.candidates.size();
  here.candidates.reserve(std::min(n_counts, most - std::min(most, size)));
  if (size + n_counts > most) here.spare.reserve(std::max(most, size) + 1);
}

// A row for a key that has none: values as the initializer says, slots as the updater begins.
Row HashPartition::add(std::uint64_t key) {
  for (const auto& snapshot : common_->snapshots) snapshot->keep(key, nullptr);
  const Row row = store_.take();
  try {
    index_.insert(key, std::uint64_t{row} + 1);
  } catch (...) {
    store_.give_back(row);
    throw;
  }
  store_.info(row) = {key, 0, 0, 0};
  spec_->dtype == DType::float64 ? initialise<double>(row, key) : initialise<float>(row, key);
  return row;
}

template <class T>
void HashPartition::initialise(Row row, std::uint64_t key) {
  T* const values = store_.values<T>(row);
  fill_row(spec_->initial, key, values, spec_->dim);
  const SlotPlan plan = spec_->plan();
  T* slot = values + spec_->dim;
  for (std::size_t k = 0; k < plan.count(); ++k) {
    const std::size_t width = k < plan.full ? spec_->dim : 1;
    std::fill_n(slot, width, static_cast<T>(plan.fill[k]));
    slot += width;
  }
}

void HashPartition::take_out(Row row, std::uint64_t stamp) {
  keep(row);
  stamp_ = stamp;
  index_.erase(store_.info(row).key);
  store_.give_back(row);
}

// Whether chance admits a key, in the push with this number.
bool HashPartition::is_drawn(std::uint64_t key, std::uint64_t draw) const {
  const double probability = spec_->admission.probability;
  if (probability >= 1) return true;
  const std::uint64_t table = scatter(spec_->initial.seed) + spec_->initial.table;
  const std::uint64_t bits = scatter(scatter(scatter(table) + key) + draw);
  return static_cast<double>(bits >> 11) * 0x1p-53 < probability;
}

bool HashPartition::is_admitted(std::uint64_t key, std::uint64_t draw) {
  const Admission& policy = spec_->admission;
  if (!is_drawn(key, draw)) return false;
  if (policy.min_count <= 1) return true;
  KeyMap& candidates = side().candidates;
  const std::uint64_t count = candidates.find(key) + 1;
  if (count >= policy.min_count) {
    candidates.erase(key);
    return true;
  }
  if (count == 1 && candidates.size() >= policy.max_candidates) halve_candidates();
  candidates.set(key, count);
  return false;
}

// Makes room by ageing: what was seen once is forgotten, the rest counts half.
void HashPartition::halve_candidates() {
  KeyMap &candidates = side().candidates, &halved = side().spare;
  while (candidates.size() > spec_->admission.max_candidates / 4 * 3) {
    candidates.for_each([&](std::uint64_t key, std::uint64_t count) {
      if (count > 1) halved.insert(key, count / 2);
    });
    std::swap(candidates, halved);
    halved.wipe();
  }
}

}  // namespace ringcomm::ps
