#include "shard.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "use_guard.hpp"

namespace ringcomm::ps {

Shard::Shard(std::shared_ptr<const RowSpec> spec, const std::vector<std::uint32_t>& owners,
             std::uint32_t me)
    : spec_(std::move(spec)),
      common_(std::make_shared<Rows::Common>()),
      parts_(owners.size()),
      is_owned_(owners.size()),
      n_keys_(owners.size()) {
  if (owners.empty()) throw std::invalid_argument("owners: one partition at least");
  for (std::size_t i = 0; i < owners.size(); ++i) is_owned_[i] = owners[i] == me;
}

std::size_t Shard::size() const {
  std::size_t total = 0;
  for (const auto& part : parts_) total += part == nullptr ? 0 : part->size();
  return total;
}

std::size_t Shard::nbytes() const {
  std::size_t total = sizeof *this + parts_.size() * sizeof parts_[0];
  for (const auto& part : parts_) total += part == nullptr ? 0 : part->nbytes();
  return total;
}

std::shared_ptr<Rows> Shard::own(std::uint32_t partition) {
  auto& part = parts_.at(partition);
  is_owned_[partition] = true;
  if (part == nullptr) part = std::make_shared<Rows>(spec_, common_);
  return part;
}

std::shared_ptr<Rows> Shard::disown(std::uint32_t partition) {
  is_owned_.at(partition) = false;
  n_keys_[partition].value = 0;
  return std::exchange(parts_.at(partition), nullptr);
}

std::shared_ptr<Rows> Shard::find(std::uint32_t partition) const { return parts_.at(partition); }

std::uint32_t Shard::partition(std::uint64_t key) const {
  const std::uint32_t found = partition_of(key, static_cast<std::uint32_t>(parts_.size()));
  if (!is_owned_[found])
    throw std::invalid_argument("key " + std::to_string(key) + " is of partition " +
                                std::to_string(found) + ", which another server owns");
  return found;
}

std::vector<std::uint32_t> Shard::partitions(const std::uint64_t* keys, std::size_t n) const {
  std::vector<std::uint32_t> found(n);
  for (std::size_t i = 0; i < n; ++i) found[i] = partition(keys[i]);
  for (const std::uint32_t partition : found) n_keys_[partition].add(1);
  return found;
}

// One partition after the other: what is known of it, and its pages, are met together.
std::size_t Shard::gather(const std::uint64_t* keys, std::size_t n, void* out,
                          const std::uint32_t* places, Missing missing) const {
  const Rows::Reading reading(common_->users);
  const std::vector<std::uint32_t> partitions = this->partitions(keys, n);
  std::vector<std::uint32_t> at(parts_.size() + 1), to(n);
  for (const std::uint32_t partition : partitions) ++at[partition + 1];
  std::partial_sum(at.begin(), at.end(), at.begin());
  std::vector<Rows*> homes(n);
  std::vector<std::uint64_t> sorted(n);
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t k = at[partitions[i]]++;
    sorted[k] = keys[i];
    homes[k] = parts_[partitions[i]].get();
    to[k] = places == nullptr ? static_cast<std::uint32_t>(i) : places[i];
  }
  return Rows::gather_from(*spec_, {homes.data()}, sorted.data(), n, out, to.data(),
                           missing);
}

Pushed Shard::push(const Push& push) {
  Rows::require_rule(spec_->rule, push.rule);
  const Rows::Writing writing(common_->users);
  const std::vector<std::uint32_t> partitions = this->partitions(push.keys, push.n);
  std::vector<Rows*> homes(push.n);
  for (std::size_t i = 0; i < push.n; ++i) {
    Rows* const part = parts_[partitions[i]].get();
    homes[i] = part != nullptr ? part : own(partitions[i]).get();
  }
  return Rows::push_to(*spec_, {homes.data()}, partitions.data(), parts_.size(), push);
}

std::size_t Shard::erase(const std::uint64_t* keys, std::size_t n, std::uint64_t stamp) {
  const Rows::Writing writing(common_->users);
  for (std::size_t i = 0; i < n; ++i) partition(keys[i]);  // or throw
  std::size_t erased = 0;
  for (std::size_t i = 0; i < n; ++i)
    if (Rows* const part = home(keys[i])) erased += part->erase(keys[i], stamp);
  return erased;
}

void Shard::metadata(const std::uint64_t* keys, std::size_t n, std::uint32_t* counts,
                     std::uint32_t* steps, double* times) const {
  const Rows::Reading reading(common_->users);
  for (std::size_t i = 0; i < n; ++i) {
    const Rows* const part = home(keys[i]);
    const Row row = part == nullptr ? Rows::kNoRow : part->find(keys[i]);
    const bool is_there = row != Rows::kNoRow;
    const RowInfo info = is_there ? part->store_.info(row) : RowInfo{keys[i], std::nan(""), 0, 0};
    counts[i] = info.count;
    steps[i] = info.steps;
    times[i] = info.time;
  }
}

void Shard::hold(std::uint64_t number) {
  const Rows::Writing writing(common_->users);
  common_->snapshots.push_back(
      std::make_unique<Snapshot>(number, spec_->dim * spec_->itemsize()));
}

void Shard::release(std::uint64_t number) {
  const Rows::Writing writing(common_->users);
  auto& all = common_->snapshots;
  all.erase(std::remove_if(all.begin(), all.end(),
                           [&](const auto& each) { return each->number() == number; }),
            all.end());
}

const Snapshot& Shard::snapshot(std::uint64_t number) const {
  for (const auto& each : common_->snapshots)
    if (each->number() == number) return *each;
  throw std::invalid_argument("no snapshot " + std::to_string(number) + " is held here");
}

// The rows of now, and over them those that have changed since.
std::size_t Shard::gather_held(std::uint64_t number, const std::uint64_t* keys, std::size_t n,
                               void* out, const std::uint32_t* places, Missing missing) const {
  const Rows::Reading reading(common_->users);
  const Snapshot& held = snapshot(number);
  for (std::size_t i = 0; missing == Missing::raise && i < n; ++i) {
    const Snapshot::Then then = held.find(keys[i]);
    const Rows* const part = home(keys[i]);
    const bool is_there = part != nullptr && part->find(keys[i]) != Rows::kNoRow;
    if (then.is_known ? then.values == nullptr : !is_there) throw MissingKey(keys[i]);
  }
  const Missing filled = missing == Missing::raise ? Missing::zero : missing;
  std::size_t found = gather(keys, n, out, places, filled);
  const std::size_t nbytes = spec_->dim * spec_->itemsize();
  for (std::size_t i = 0; !held.is_empty() && i < n; ++i) {
    const Snapshot::Then then = held.find(keys[i]);
    if (!then.is_known) continue;
    const std::size_t place = places == nullptr ? i : places[i];
    std::byte* const to = static_cast<std::byte*>(out) + place * nbytes;
    const Rows* const part = home(keys[i]);
    found -= part != nullptr && part->find(keys[i]) != Rows::kNoRow;
    found += then.values != nullptr;
    if (then.values == nullptr)
      Rows::fill_missing(*spec_, keys[i], to, missing);
    else
      std::memcpy(to, then.values, nbytes);
  }
  return found;
}

std::vector<std::uint64_t> Shard::n_keys() const {
  std::vector<std::uint64_t> all;
  for (const Count& each : n_keys_) all.push_back(each.value);
  return all;
}

void Shard::add_keys(std::uint32_t partition, std::uint64_t n) { n_keys_.at(partition).add(n); }

std::size_t Shard::evict(double now, std::uint64_t stamp, std::size_t max_work) {
  std::size_t evicted = 0, n_left = parts_.size();
  while (max_work != 0 && n_left != 0) {
    Rows* const part = parts_[cursor_].get();
    bool is_done = true;
    std::size_t work = 1;
    if (part != nullptr && part->size() != 0) {
      work = std::min(max_work, part->size());
      const Evicted some = part->evict(now, stamp, max_work);
      evicted += some.n;
      is_done = some.is_done;
    }
    max_work -= work;
    if (!is_done) continue;
    cursor_ = (cursor_ + 1) % parts_.size();
    --n_left;
  }
  return evicted;
}

}  // namespace ringcomm::ps
