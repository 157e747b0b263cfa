// Rows as arrays, out and in: for checkpoints, deltas, subscribers and partitions that move.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "rows.hpp"
#include "use.hpp"

namespace ringcomm::ps {
Scan Rows::scan(std::uint64_t cursor, std::size_t limit) const {
  const Reading reading(*this);
  Scan found{{}, cursor, false};
  while (found.cursor < store_.end() && found.rows.size() < limit) {
    const auto row = static_cast<Row>(found.cursor++);
    if (store_.is_live(row)) found.rows.push_back(row);
  }
  found.is_done = found.cursor >= store_.end();
  return found;
}

Scan Rows::scan_changed(std::uint64_t since, std::uint64_t cursor, std::size_t limit) const {
  const Reading reading(*this);
  Scan found{{}, cursor, false};
  while (found.cursor < store_.end() && found.rows.size() < limit) {
    if (found.cursor % kGroup == 0 && newest_[found.cursor / kGroup] <= since) {
      found.cursor += kGroup;
      continue;
    }
    const auto row = static_cast<Row>(found.cursor++);
    if (store_.is_live(row) && store_.info(row).stamp > since) found.rows.push_back(row);
  }
  found.is_done = found.cursor >= store_.end();
  return found;
}

void Rows::copy(const std::vector<Row>& rows, const RowArrays& out) const {
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
    out.stamps[i] = info.stamp;
  }
}

void Rows::load(const RowArrays& in, std::size_t n) {
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
    store_.info(row) = {in.keys[i], in.stamps[i], in.times[i], in.counts[i], steps};
    touch(row, in.stamps[i]);
  }
}

void Rows::metadata(const std::uint64_t* keys, std::size_t n, const RowArrays& out) const {
  const Reading reading(*this);
  for (std::size_t i = 0; i < n; ++i) {
    const Row row = find(keys[i]);
    const RowInfo info = row == kNoRow ? RowInfo{keys[i], 0, std::nan(""), 0, 0} : store_.info(row);
    out.counts[i] = info.count;
    out.steps[i] = info.steps;
    out.times[i] = info.time;
    out.stamps[i] = info.stamp;
  }
}

std::vector<std::uint64_t> Rows::erased_since(std::uint64_t since) const {
  const Reading reading(*this);
  std::vector<std::uint64_t> keys;
  if (side_ != nullptr)
    side_->erased.for_each([&](std::uint64_t key, std::uint64_t value) {
      if (value - 1 > since) keys.push_back(key);
    });
  std::sort(keys.begin(), keys.end());
  return keys;
}

void Rows::forget_erased(std::uint64_t until) {
  const Writing writing(*this);
  Side& side = this->side();
  KeyMap kept;
  side.erased.for_each([&](std::uint64_t key, std::uint64_t value) {
    if (value - 1 > until) kept.insert(key, value);
  });
  side.erased = std::move(kept);
  side.known_since = std::max(side.known_since, until);
}

std::vector<std::pair<std::uint64_t, std::uint64_t>> Rows::candidates() const {
  const Reading reading(*this);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> all;
  if (side_ != nullptr)
    side_->candidates.for_each(
        [&](std::uint64_t key, std::uint64_t count) { all.emplace_back(key, count); });
  std::sort(all.begin(), all.end());
  return all;
}

void Rows::load_candidate(std::uint64_t key, std::uint64_t count) {
  const Writing writing(*this);
  if (count != 0 && find(key) == kNoRow) side().candidates.set(key, count);
}

}  // namespace ringcomm::ps
