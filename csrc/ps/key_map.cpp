#include "key_map.hpp"

#include <cstring>
#include <utility>

#include "huge_pages.hpp"

namespace ringcomm::ps {
namespace {

constexpr unsigned kFirstBits = 2;
constexpr std::size_t kMovedAtOnce = 4;  // lines, with every insertion: done before the next doubling

}  // namespace

void KeyMap::insert(std::uint64_t key, std::uint64_t value) {
  reserve(1);
  if (old_.lines != nullptr) move_some(kMovedAtOnce);
  now_.put(key, value);
  ++size_;
}

void KeyMap::set(std::uint64_t key, std::uint64_t value) {
  if (value == 0) return erase(key);
  const Slot slot = locate(key);
  if (slot.line == nullptr)
    insert(key, value);
  else
    slot.value() = value;
}

void KeyMap::erase(std::uint64_t key) {
  const Slot slot = locate(key);
  if (slot.line == nullptr) return;
  const bool is_in_old = old_.lines != nullptr && slot.line >= old_.lines.get() &&
                         slot.line < old_.lines.get() + old_.size();
  if (is_in_old)
    slot.value() = kGone;
  else
    now_.take_out(slot);
  --size_;
}

void KeyMap::clear() { *this = KeyMap(pool_); }

void KeyMap::wipe() {
  old_ = Table();
  if (now_.lines != nullptr) std::memset(now_.lines.get(), 0, now_.size() * sizeof(Line));
  size_ = moved_ = 0;
}

KeyMap::Slot KeyMap::locate(std::uint64_t key) const {
  if (now_.lines == nullptr) return {};
  const Slot slot = now_.locate(key);
  if (slot.line != nullptr || old_.lines == nullptr) return slot;
  const Slot left = old_.locate(key);
  return left.line == nullptr || left.value() == kGone ? Slot{} : left;
}

// At most 5 of 8 entries are taken: few lines are full.
void KeyMap::reserve(std::size_t n) {
  if (n == 0 || has_room(n)) return;
  move_some(old_.size());
  Table next;
  next.bits = now_.lines == nullptr ? kFirstBits : now_.bits + 1;
  while ((size_ + n) * 8 > (std::size_t{1} << next.bits) * kPerLine * 5) ++next.bits;
  const std::size_t nbytes = (std::size_t{1} << next.bits) * sizeof(Line);
  next.lines = {new_lines(nbytes), Free{pool_, nbytes}};
  old_ = std::exchange(now_, std::move(next));
  moved_ = 0;
}

KeyMap::Line* KeyMap::new_lines(std::size_t nbytes) const {
  if (pool_ == nullptr || nbytes >= kMapped) return static_cast<Line*>(allocate_zeros(nbytes));
  return static_cast<Line*>(std::memset(pool_->take(nbytes), 0, nbytes));
}

void KeyMap::Free::operator()(Line* lines) const {
  if (pool == nullptr || nbytes >= kMapped)
    free_zeros(lines, nbytes);
  else
    pool->give_back(lines, nbytes);
}

void KeyMap::move_some(std::size_t n) {
  const std::size_t end = old_.size() - moved_ < n ? old_.size() : moved_ + n;
  for (; moved_ < end; ++moved_) {
    Line& line = old_.lines[moved_];
    for (std::size_t k = 0; k < kPerLine; ++k) {
      if (line.values[k] == 0 || line.values[k] == kGone) continue;
      now_.put(line.keys[k], line.values[k]);
      line.values[k] = kGone;
    }
  }
  if (moved_ < old_.size()) return;
  if (old_.lines != nullptr) prefer_huge(now_.lines.get(), now_.size() * sizeof(Line));
  old_ = Table();
  moved_ = 0;
}

KeyMap::Slot KeyMap::Table::locate(std::uint64_t key) const {
  for (std::size_t i = home(key);; i = (i + 1) & mask()) {
    for (std::size_t k = 0; k < kPerLine; ++k)
      if (lines[i].keys[k] == key && lines[i].values[k] != 0) return {&lines[i], k};
    if (!lines[i].is_full()) return {};
  }
}

void KeyMap::Table::put(std::uint64_t key, std::uint64_t value) {
  for (std::size_t i = home(key);; i = (i + 1) & mask())
    for (std::size_t k = 0; k < kPerLine; ++k)
      if (lines[i].values[k] == 0) {
        lines[i].keys[k] = key;
        lines[i].values[k] = value;
        return;
      }
}

// Where a full line gets a gap, an entry that had to go on beyond it comes back to fill it, and so
// on: no mark has to stay.
void KeyMap::Table::take_out(Slot slot) {
  auto gap = static_cast<std::size_t>(slot.line - lines.get());
  bool was_full = lines[gap].is_full();
  slot.value() = 0;
  for (std::size_t i = (gap + 1) & mask(); was_full; i = (i + 1) & mask()) {
    Line& line = lines[i];
    const bool is_last = !line.is_full();
    for (std::size_t k = 0; k < kPerLine; ++k) {
      const std::size_t from_home = (i - home(line.keys[k])) & mask();
      if (line.values[k] == 0 || from_home < ((i - gap) & mask())) continue;
      slot.line->keys[slot.place] = line.keys[k];
      slot.value() = line.values[k];
      line.values[k] = 0;
      slot = {&line, k};
      gap = i;
      break;
    }
    if (is_last) return;
  }
}

}  // namespace ringcomm::ps
