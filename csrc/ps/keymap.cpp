#include "keymap.hpp"

#include <new>
#include <utility>

namespace ringcomm::ps {
namespace {

constexpr unsigned kFirstBits = 4;
constexpr std::size_t kMovedAtOnce = 16;  // with every insertion: done before the next doubling

}  // namespace

void KeyMap::insert(std::uint64_t key, std::uint64_t value) {
  make_room();
  if (old_.entries != nullptr) move_some(kMovedAtOnce);
  now_.put(key, value);
  ++size_;
}

void KeyMap::set(std::uint64_t key, std::uint64_t value) {
  if (value == 0) return erase(key);
  if (now_.entries != nullptr) {
    Entry* entry = now_.find(key);
    if (entry == nullptr && old_.entries != nullptr) entry = old_.find(key);
    if (entry != nullptr) {
      entry->value = value;
      return;
    }
  }
  insert(key, value);
}

void KeyMap::erase(std::uint64_t key) {
  if (now_.entries == nullptr) return;
  if (Entry* const entry = now_.find(key)) {
    now_.take_out(entry);
    --size_;
  } else if (old_.entries != nullptr) {
    if (Entry* const left = old_.find(key)) {
      left->value = kGone;
      --size_;
    }
  }
}

void KeyMap::clear() { *this = KeyMap(); }

// At most 5 of 8 entries are taken: 1.8 are looked at for a key that is there.
void KeyMap::make_room() {
  if (now_.entries != nullptr && (size_ + 1) * 8 <= now_.size() * 5) return;
  move_some(old_.size());
  Table next;
  next.bits = now_.entries == nullptr ? kFirstBits : now_.bits + 1;
  // calloc: a large table is pages that the kernel fills with zeros when they are first touched.
  auto* const entries =
      static_cast<Entry*>(std::calloc(std::size_t{1} << next.bits, sizeof(Entry)));
  if (entries == nullptr) throw std::bad_alloc();
  next.entries.reset(entries);
  old_ = std::exchange(now_, std::move(next));
  moved_ = 0;
}

void KeyMap::move_some(std::size_t n) {
  const std::size_t end = old_.size() - moved_ < n ? old_.size() : moved_ + n;
  for (; moved_ < end; ++moved_) {
    Entry& entry = old_.entries[moved_];
    if (entry.value == 0 || entry.value == kGone) continue;
    now_.put(entry.key, entry.value);
    entry.value = kGone;
  }
  if (moved_ < old_.size()) return;
  old_ = Table();
  moved_ = 0;
}

// Entries that follow move up to fill the gap, so that no mark has to stay.
void KeyMap::Table::take_out(Entry* entry) {
  auto gap = static_cast<std::size_t>(entry - entries.get());
  for (std::size_t i = (gap + 1) & mask(); entries[i].value != 0; i = (i + 1) & mask()) {
    const std::size_t behind_home = (i - home(entries[i].key)) & mask();
    if (behind_home < ((i - gap) & mask())) continue;  // its home lies after the gap
    entries[gap] = entries[i];
    gap = i;
  }
  entries[gap] = {0, 0};
}

}  // namespace ringcomm::ps
