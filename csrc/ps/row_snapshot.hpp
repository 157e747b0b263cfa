// Rows as they were at one moment, for ranks that read them later.
//
// Nothing is copied when it is taken: a row that changes afterwards is kept as it was, once. So
// nobody waits for a copy of the table, a push takes longer by the rows that it changes first, and
// memory grows with those.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "key_map.hpp"
#include "row_store.hpp"

namespace ringcomm::ps {

class Snapshot {
 public:
  // `number`: of whoever took it. `nbytes`: of the values of a row.
  Snapshot(std::uint64_t number, std::size_t nbytes)
      : number_(number), nbytes_(nbytes), rows_(nbytes, nullptr) {}

  std::uint64_t number() const { return number_; }

  // How many of the next rows that change need memory here: keys, and values of theirs.
  struct Room {
    std::size_t keys = 0, values = 0;
  };
  void count(std::uint64_t key, bool has_row, Room& room) const {
    if (places_.find(key) != 0) return;
    ++room.keys;
    room.values += has_row;
  }
  void reserve(Room room) {
    places_.reserve(room.keys);
    rows_.reserve(room.values);
  }
  void trim() { rows_.trim(); }

  // A row is about to change. `values`: as they are; null: the key has no row.
  void keep(std::uint64_t key, const std::byte* values) {
    if (places_.find(key) != 0) return;
    if (values == nullptr) return places_.insert(key, kAbsent);
    const Row row = rows_.take();
    std::memcpy(rows_.values<std::byte>(row), values, nbytes_);
    places_.insert(key, std::uint64_t{row} + kFirst);
  }

  struct Then {
    bool is_known;            // false: nothing has changed since
    const std::byte* values;  // null: it had no row
  };
  Then find(std::uint64_t key) const {
    const std::uint64_t place = places_.find(key);
    if (place <= kAbsent) return {place == kAbsent, nullptr};
    return {true, rows_.values<std::byte>(static_cast<Row>(place - kFirst))};
  }
  bool is_empty() const { return places_.size() == 0; }

 private:
  static constexpr std::uint64_t kAbsent = 1, kFirst = 2;

  std::uint64_t number_;
  std::size_t nbytes_;
  KeyMap places_;
  RowStore rows_;
};

}  // namespace ringcomm::ps
