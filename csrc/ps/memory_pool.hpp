// Memory that many small things share: cut from large chunks, which are in huge pages where the
// system has them. Rows of a thousand partitions, met at random, then need tens of entries of the
// TLB and not tens of thousands.
//
// One thread at a time. What is given back is used again for what has the same size; a chunk goes
// when all do. What is large has memory of its own, which goes back to the system at once.
#pragma once
#include <cstddef>
#include <map>
#include <memory>
#include <vector>

namespace ringcomm::ps {

class MemoryPool {
 public:
  MemoryPool() = default;
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  // Whole lines of the cache, not zeroed. Throws bad_alloc.
  void* take(std::size_t nbytes);
  void give_back(void* memory, std::size_t nbytes) noexcept;

 private:
  struct Free {
    void operator()(std::byte* chunk) const;
  };

  void add_chunk(std::size_t nbytes);

  std::vector<std::unique_ptr<std::byte, Free>> chunks_;
  std::size_t total_ = 0;             // bytes of all chunks
  std::byte *at_ = nullptr, *end_ = nullptr;  // what is left of the last one
  std::map<std::size_t, void*> free_;  // by size: the first; each begins with where the next is
};

}  // namespace ringcomm::ps
