#include "block.hpp"

#include <cstring>
#include <new>

#if defined(__SANITIZE_THREAD__)
#define RINGCOMM_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define RINGCOMM_TSAN 1
#endif
#endif

namespace ringcomm::ps {
namespace {

// A copy that may run into a writer, who is found out afterwards: the race is the design, and its
// outcome is thrown away. C++17 has no word for it short of an atomic load per word, in the kernels
// of the writer too (H.-J. Boehm 2012, doi:10.1145/2247684.2247688), which would not vectorise. So
// ThreadSanitizer skips this function and no other.
#if defined(RINGCOMM_TSAN)
__attribute__((no_sanitize("thread"), noinline)) void copy_racing(void* out, const void* x,
                                                                  std::size_t n) {
  auto* to = static_cast<volatile char*>(out);
  const auto* from = static_cast<const volatile char*>(x);
  for (std::size_t i = 0; i < n; ++i) to[i] = from[i];
}
#else
void copy_racing(void* out, const void* x, std::size_t n) {
  if (n != 0) std::memcpy(out, x, n);
}
#endif

}  // namespace

Block::Block(std::byte* memory, std::size_t nbytes, std::uint64_t version) : memory_(memory) {
  auto* const header = new (memory) BlockHeader{};
  std::memset(memory + sizeof(BlockHeader), 0, block_nbytes(nbytes) - sizeof(BlockHeader));
  header->nbytes = nbytes;
  header->begun.store(version, std::memory_order_relaxed);
  header->done.store(version, std::memory_order_release);
}

std::uint64_t Block::apply(DenseUpdate update, std::int64_t clock) {
  require_doable(update);
  update.in = values();
  update.out = begin();
  ringcomm::ps::apply(update);
  return end(clock);
}

std::uint64_t Block::write(const void* values, std::int64_t clock) {
  std::byte* const out = begin();
  if (nbytes() != 0) std::memcpy(out, values, nbytes());
  return end(clock);
}

// Where the next version goes. Nothing is written there before readers can see that it has begun.
std::byte* Block::begin() const {
  const std::uint64_t next = version() + 1;
  header().begun.store(next, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  return memory_ + buffer_offset(nbytes(), next);
}

std::uint64_t Block::end(std::int64_t clock) const {
  const std::uint64_t next = version() + 1;
  header().clocks[next % 2].store(clock == kSame ? this->clock() : clock, std::memory_order_relaxed);
  header().done.store(next, std::memory_order_release);
  return next;
}

namespace {

struct Read {
  std::int64_t version, clock;
};

Read read_versioned(const std::byte* memory, void* out, std::size_t offset, std::size_t n,
                    unsigned tries) {
  const auto& header = *reinterpret_cast<const BlockHeader*>(memory);
  for (unsigned k = 0; k < tries; ++k) {
    const std::uint64_t version = header.done.load(std::memory_order_acquire);
    copy_racing(out, memory + buffer_offset(header.nbytes, version) + offset, n);
    const std::int64_t clock = header.clocks[version % 2].load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (header.begun.load(std::memory_order_relaxed) < version + 2)
      return {static_cast<std::int64_t>(version), clock};
  }
  return {-1, -1};
}

}  // namespace

std::int64_t read_block(const std::byte* memory, void* out, std::size_t offset, std::size_t n,
                        unsigned tries) {
  return read_versioned(memory, out, offset, n, tries).version;
}

std::int64_t read_open_block(const NodeMemory& server, std::byte* memory, void* out,
                             std::size_t offset, std::size_t n, std::int64_t clock, unsigned tries) {
  auto& header = *reinterpret_cast<BlockHeader*>(memory);
  const auto may_read = [&] { return header.may_read.load(std::memory_order_acquire) != 0; };
  if (!may_read()) return -1;
  const std::uint64_t newest = header.done.load(std::memory_order_acquire);
  if (header.clocks[newest % 2].load(std::memory_order_acquire) < clock) return -1;
  const Read read = read_versioned(memory, out, offset, n, tries);
  std::atomic_thread_fence(std::memory_order_acquire);
  // A successor withdraws the memory before it acknowledges anything: if it has not by now, all that
  // was acknowledged is in the copy.
  if (!may_read() || server.is_withdrawn()) return -1;
  header.n_reads.fetch_add(1, std::memory_order_relaxed);
  return read.clock;
}

}  // namespace ringcomm::ps
