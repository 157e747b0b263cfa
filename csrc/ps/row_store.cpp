#include "row_store.hpp"

#include "huge_pages.hpp"

#include <cstdlib>
#include <stdexcept>

namespace ringcomm::ps {

RowStore::RowStore(std::size_t nbytes, MemoryPool* pool)
    : nbytes_(nbytes), pool_(pool), full_bits_(kFirstBits) {
  while (((nbytes_ + sizeof(RowInfo)) << (full_bits_ + 1)) <= kSlabBytes) ++full_bits_;
}

Row RowStore::take() {
  if (free_ != kNone) {
    const Row row = free_;
    free_ = static_cast<Row>(info(row).key);
    return row;
  }
  if (end_ >= kNone - 8) throw std::length_error("a partition is full: it has 2^32 rows");
  const std::size_t slab = place_of(end_).slab;
  if (slab == slabs_.size()) {
    const std::size_t size = rows_of(slab) * (sizeof(RowInfo) + nbytes_);
    slabs_.reserve(slab + 1);
    void* const memory = pool_ == nullptr ? allocate_pages(size) : pool_->take(size);
    slabs_.push_back(static_cast<std::byte*>(memory));
  }
  return end_++;
}

RowStore::~RowStore() {
  for (std::size_t i = 0; i < slabs_.size(); ++i) {
    if (pool_ == nullptr)
      std::free(slabs_[i]);
    else
      pool_->give_back(slabs_[i], rows_of(i) * (sizeof(RowInfo) + nbytes_));
  }
}

void RowStore::give_back(Row row) {
  info(row) = {free_, 0, 0, kDead};
  free_ = row;
}

std::size_t RowStore::nbytes() const {
  std::size_t total = slabs_.capacity() * sizeof(slabs_[0]);
  for (std::size_t i = 0; i < slabs_.size(); ++i)
    total += rows_of(i) * (sizeof(RowInfo) + nbytes_);
  return total;
}

}  // namespace ringcomm::ps
