#include "memory_pool.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "huge_pages.hpp"

namespace ringcomm::ps {
namespace {

constexpr std::size_t kLine = 64, kLarge = 1u << 20;
constexpr std::size_t kFirstChunk = 64u << 10, kLastChunk = 32u << 20;

std::size_t lines(std::size_t nbytes) { return (nbytes + kLine - 1) / kLine * kLine; }

}  // namespace

void MemoryPool::Free::operator()(std::byte* chunk) const { std::free(chunk); }

void* MemoryPool::take(std::size_t nbytes) {
  const std::size_t size = lines(nbytes);
  if (size >= kLarge) return allocate_pages(size);
  void*& first = free_[size];  // now: give_back() cannot throw
  if (first != nullptr) {
    void* const memory = first;
    std::memcpy(&first, memory, sizeof first);
    return memory;
  }
  if (static_cast<std::size_t>(end_ - at_) < size) add_chunk(size);
  void* const memory = at_;
  at_ += size;
  return memory;
}

void MemoryPool::give_back(void* memory, std::size_t nbytes) noexcept {
  const std::size_t size = lines(nbytes);
  if (size >= kLarge) return std::free(memory);
  void*& first = free_.find(size)->second;
  std::memcpy(memory, &first, sizeof first);
  first = memory;
}

// Each as large as all before: a table of ten rows takes little, one of millions few chunks.
void MemoryPool::add_chunk(std::size_t nbytes) {
  const std::size_t size = std::max(nbytes, std::clamp(total_, kFirstChunk, kLastChunk));
  std::unique_ptr<std::byte, Free> chunk(static_cast<std::byte*>(allocate_pages(size)));
  chunks_.push_back(std::move(chunk));
  at_ = chunks_.back().get();
  end_ = at_ + size;
  total_ += size;
}

}  // namespace ringcomm::ps
