// Rows as arrays, out and in: for checkpoints and partitions that move.
#include <algorithm>
#include <cstring>

#include "hash_partition.hpp"
#include "refuse_concurrent_writes.hpp"

namespace ringcomm::ps {
std::vector<Row> HashPartition::all() const {
  const Reading reading(*this);
  std::vector<Row> found;
  found.reserve(size());
  for (Row row = 0; row < store_.end(); ++row)
    if (store_.is_live(row)) found.push_back(row);
  return found;
}

void HashPartition::copy(const std::vector<Row>& rows, const RowArrays& out) const {
  const Reading reading(*this);
  const std::size_t width = spec_->dim * spec_->itemsize();
  const std::size_t slot_width = spec_->slot_width() * spec_->itemsize();
  auto *values = static_cast<std::byte*>(out.values), *slots = static_cast<std::byte*>(out.slots);
  for (std::size_t i = 0; i < rows.size(); ++i, values += width, slots += slot_width) {
    const RowInfo info = store_.info(rows[i]);
    const auto* const data = store_.values<std::byte>(rows[i]);
    std::memcpy(values, data, width);
    if (slot_width != 0) std::memcpy(slots, data + width, slot_width);
    out.keys[i] = info.key;
    out.counts[i] = info.count;
    out.steps[i] = info.steps;
    out.times[i] = info.time;
  }
}

void HashPartition::load(const RowArrays& in, std::size_t n) {
  const Writing writing(*this);
  const std::size_t width = spec_->dim * spec_->itemsize();
  const std::size_t slot_width = spec_->slot_width() * spec_->itemsize();
  const auto* values = static_cast<const std::byte*>(in.values);
  const auto* slots = static_cast<const std::byte*>(in.slots);
  for (std::size_t i = 0; i < n; ++i, values += width, slots += slot_width) {
    Row row = find(in.keys[i]);
    if (row == kNoRow) {
      row = add(in.keys[i]);
      if (side_ != nullptr) side_->candidates.erase(in.keys[i]);
    } else {
      keep(row);
    }
    auto* const data = store_.values<std::byte>(row);
    std::memcpy(data, values, width);
    if (slot_width != 0) std::memcpy(data + width, slots, slot_width);
    const std::uint32_t steps = std::min(in.steps[i], RowStore::kDead - 1);
    store_.info(row) = {in.keys[i], in.times[i], in.counts[i], steps};
  }
}

std::vector<std::pair<std::uint64_t, std::uint64_t>> HashPartition::candidates() const {
  const Reading reading(*this);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> all;
  if (side_ != nullptr)
    side_->candidates.for_each(
        [&](std::uint64_t key, std::uint64_t count) { all.emplace_back(key, count); });
  std::sort(all.begin(), all.end());
  return all;
}

void HashPartition::load_candidate(std::uint64_t key, std::uint64_t count) {
  const Writing writing(*this);
  if (count != 0 && find(key) == kNoRow) side().candidates.set(key, count);
}

}  // namespace ringcomm::ps
