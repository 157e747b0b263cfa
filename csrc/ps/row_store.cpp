#include "row_store.hpp"

#include "huge_pages.hpp"

#include <cstdlib>
#include <stdexcept>

namespace ringcomm::ps {

RowStore::RowStore(std::size_t nbytes, MemoryPool* pool)
    : nbytes_(nbytes), pool_(pool), full_bits_(kFirstBits) {
  while (((nbytes_ + sizeof(RowInfo)) << (full_bits_ + 1)) <= kSlabBytes) ++full_bits_;
}

void RowStore::reserve(std::size_t n) {
  if (has_room(n)) return;
  if (end_ + (n - n_free_) > kNone - 8)
    throw std::length_error("a partition is full: it has 2^32 rows");
  while (!has_room(n)) {
    const std::size_t size = rows_of(slabs_.size()) * (sizeof(RowInfo) + nbytes_);
    slabs_.reserve(slabs_.size() + 1);
    void* const memory = pool_ == nullptr ? allocate_pages(size) : pool_->take(size);
    slabs_.push_back(static_cast<std::byte*>(memory));
  }
}

void RowStore::trim() {
  const std::size_t used = end_ == 0 ? 0 : place_of(end_ - 1).slab + 1;
  while (slabs_.size() > used) free_last();
}

Row RowStore::take() {
  if (free_ != kNone) {
    const Row row = free_;
    free_ = static_cast<Row>(info(row).key);
    --n_free_;
    return row;
  }
  if (place_of(end_).slab == slabs_.size()) reserve(1);
  return end_++;
}

RowStore::~RowStore() {
  while (!slabs_.empty()) free_last();
}

void RowStore::free_last() {
  std::byte* const memory = slabs_.back();
  slabs_.pop_back();
  if (pool_ == nullptr)
    std::free(memory);
  else
    pool_->give_back(memory, rows_of(slabs_.size()) * (sizeof(RowInfo) + nbytes_));
}

void RowStore::give_back(Row row) {
  info(row) = {free_, 0, 0, kDead};
  free_ = row;
  ++n_free_;
}

std::size_t RowStore::nbytes() const {
  std::size_t total = slabs_.capacity() * sizeof(slabs_[0]);
  for (std::size_t i = 0; i < slabs_.size(); ++i)
    total += rows_of(i) * (sizeof(RowInfo) + nbytes_);
  return total;
}

}  // namespace ringcomm::ps
