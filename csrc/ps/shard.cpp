#include "shard.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "refuse_concurrent_writes.hpp"

namespace ringcomm::ps {

Shard::Shard(std::shared_ptr<const RowSpec> spec, const std::vector<std::uint32_t>& owners,
             std::uint32_t me)
    : spec_(std::move(spec)),
      common_(std::make_shared<HashPartition::Common>()),
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

std::shared_ptr<HashPartition> Shard::own(std::uint32_t partition) {
  is_owned_.at(partition) = true;
  victims_.clear();  // what comes may be older
  return made(partition);
}

const std::shared_ptr<HashPartition>& Shard::made(std::uint32_t partition) {
  auto& part = parts_[partition];
  if (part == nullptr) part = std::make_shared<HashPartition>(spec_, common_);
  return part;
}

std::shared_ptr<HashPartition> Shard::disown(std::uint32_t partition) {
  is_owned_.at(partition) = false;
  n_keys_[partition].value = 0;
  return std::exchange(parts_.at(partition), nullptr);
}

std::shared_ptr<HashPartition> Shard::find(std::uint32_t partition) const {
  return parts_.at(partition);
}

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
  const HashPartition::Reading reading(common_->users);
  const std::vector<std::uint32_t> partitions = this->partitions(keys, n);
  std::vector<std::uint32_t> at(parts_.size() + 1), to(n);
  for (const std::uint32_t partition : partitions) ++at[partition + 1];
  std::partial_sum(at.begin(), at.end(), at.begin());
  std::vector<HashPartition*> homes(n);
  std::vector<std::uint64_t> sorted(n);
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t k = at[partitions[i]]++;
    sorted[k] = keys[i];
    homes[k] = parts_[partitions[i]].get();
    to[k] = places == nullptr ? static_cast<std::uint32_t>(i) : places[i];
  }
  return HashPartition::gather_from(*spec_, {homes.data()}, sorted.data(), n, out, to.data(),
                           missing);
}

Pushed Shard::push(const Push& push) {
  HashPartition::require_rule(spec_->rule, push.rule);
  const HashPartition::Writing writing(common_->users);
  const std::vector<std::uint32_t> partitions = this->partitions(push.keys, push.n);
  std::vector<HashPartition*> homes(push.n);
  for (std::size_t i = 0; i < push.n; ++i) {
    HashPartition* const part = parts_[partitions[i]].get();
    homes[i] = part != nullptr ? part : made(partitions[i]).get();
  }
  return HashPartition::push_to(*spec_, {homes.data()}, partitions.data(), parts_.size(), push);
}

std::size_t Shard::erase(const std::uint64_t* keys, std::size_t n, std::uint64_t stamp) {
  const HashPartition::Writing writing(common_->users);
  for (std::size_t i = 0; i < n; ++i) partition(keys[i]);  // or throw
  std::size_t erased = 0;
  for (std::size_t i = 0; i < n; ++i)
    if (HashPartition* const part = home(keys[i])) erased += part->erase(keys[i], stamp);
  return erased;
}

void Shard::metadata(const std::uint64_t* keys, std::size_t n, std::uint32_t* counts,
                     std::uint32_t* steps, double* times) const {
  const HashPartition::Reading reading(common_->users);
  for (std::size_t i = 0; i < n; ++i) {
    const HashPartition* const part = home(keys[i]);
    const Row row = part == nullptr ? HashPartition::kNoRow : part->find(keys[i]);
    const bool is_there = row != HashPartition::kNoRow;
    const RowInfo info = is_there ? part->store_.info(row) : RowInfo{keys[i], std::nan(""), 0, 0};
    counts[i] = info.count;
    steps[i] = info.steps;
    times[i] = info.time;
  }
}

void Shard::hold(std::uint64_t number) {
  const HashPartition::Writing writing(common_->users);
  common_->snapshots.push_back(
      std::make_unique<Snapshot>(number, spec_->dim * spec_->itemsize()));
}

void Shard::release(std::uint64_t number) {
  const HashPartition::Writing writing(common_->users);
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
  const HashPartition::Reading reading(common_->users);
  const Snapshot& held = snapshot(number);
  for (std::size_t i = 0; missing == Missing::raise && i < n; ++i) {
    const Snapshot::Then then = held.find(keys[i]);
    const HashPartition* const part = home(keys[i]);
    const bool is_there = part != nullptr && part->find(keys[i]) != HashPartition::kNoRow;
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
    const HashPartition* const part = home(keys[i]);
    found -= part != nullptr && part->find(keys[i]) != HashPartition::kNoRow;
    found += then.values != nullptr;
    if (then.values == nullptr)
      HashPartition::fill_missing(*spec_, keys[i], to, missing);
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
  const bool can_expire = spec_->eviction.ttl_s != std::numeric_limits<double>::infinity();
  return (can_expire ? expire(now, stamp, max_work) : 0) + shrink(stamp);
}

std::size_t Shard::expire(double now, std::uint64_t stamp, std::size_t max_work) {
  std::size_t n = 0, n_left = parts_.size();
  while (max_work != 0 && n_left != 0) {
    HashPartition* const part = parts_[cursor_].get();
    bool is_done = true;
    std::size_t work = 1;
    if (part != nullptr && part->size() != 0) {
      work = std::min(max_work, part->size());
      const Expired some = part->expire(now, stamp, max_work);
      n += some.n;
      is_done = some.is_done;
    }
    max_work -= work;
    if (!is_done) continue;
    cursor_ = (cursor_ + 1) % parts_.size();
    --n_left;
  }
  return n;
}

std::size_t Shard::max_rows() const {
  const std::size_t all = spec_->eviction.max_rows, n = parts_.size();
  const auto owned = static_cast<std::size_t>(std::count(is_owned_.begin(), is_owned_.end(), true));
  return std::max<std::size_t>(1, all / n * owned + all % n * owned / n);
}

std::size_t Shard::shrink(std::uint64_t stamp) {
  if (spec_->eviction.max_rows == std::numeric_limits<std::size_t>::max()) return 0;
  const HashPartition::Writing writing(common_->users);
  const std::size_t most = max_rows(), before = size();
  if (before <= most) return 0;
  const bool is_lru = spec_->eviction.order == Order::lru;
  const std::size_t target = is_lru || most <= kExactRows ? most : most - most / kSlack;
  std::size_t n = before;
  while (n > target) {
    if (victims_.empty()) find_victims(is_lru ? std::max(n - target, n / kAhead) : n - target);
    const Victim victim = victims_.back();
    victims_.pop_back();
    HashPartition* const part = parts_[victim.partition].get();
    if (part == nullptr || victim.row >= part->store_.end()) continue;
    const RowInfo& info = part->store_.info(victim.row);
    const bool is_as_seen =
        info.steps != RowStore::kDead && info.key == victim.key && info.time == victim.time;
    if (!is_as_seen) continue;  // pushed since, or gone
    part->take_out(victim.row, stamp);
    --n;
  }
  if (!is_lru) victims_.clear();
  return before - n;
}

void Shard::find_victims(std::size_t n) {
  const bool is_lfu = spec_->eviction.order == Order::lfu;
  victims_.reserve(n);  // a heap, the last of them on top
  for (std::uint32_t partition = 0; partition < parts_.size(); ++partition) {
    if (parts_[partition] == nullptr) continue;
    const RowStore& store = parts_[partition]->store_;
    for (Row row = 0; row < store.end(); ++row) {
      const RowInfo& info = store.info(row);
      if (info.steps == RowStore::kDead) continue;
      const double rank = is_lfu ? info.count : info.time;
      const Victim victim{rank, info.time, info.key, partition, row};
      if (victims_.size() == n) {
        if (!(victim < victims_.front())) continue;
        std::pop_heap(victims_.begin(), victims_.end());
        victims_.pop_back();
      }
      victims_.push_back(victim);
      std::push_heap(victims_.begin(), victims_.end());
    }
  }
  std::sort_heap(victims_.begin(), victims_.end());
  std::reverse(victims_.begin(), victims_.end());
}

}  // namespace ringcomm::ps
