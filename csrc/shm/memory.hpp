// The memory that one rank shares with the ranks of its node: a board of flags and an arena of data.
// Both are memfds, handed over by descriptor: nothing is left when the ranks are killed, and
// /dev/shm, which is small in containers, is not used. Both are sparse: a page costs memory once it
// is written.
#pragma once
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "../descriptor.hpp"
#include "board.hpp"

namespace ringcomm {

// Returns the size of this system's pages.
std::size_t page_nbytes();

// Copies from the private memory of a process, which may be this one. Returns how many bytes were
// copied, or -errno.
std::ptrdiff_t read_private(int pid, std::uint64_t place, std::byte* to, std::size_t nbytes);

// True if others that may read this process's memory can read these bytes: a driver may have mapped
// them in a way that does not let them.
bool can_be_read(const std::byte* data, std::size_t nbytes);

// A part of a memfd in this process's address space; no part of its core dumps.
class Mapping {
 public:
  // Throws std::system_error if it cannot be mapped.
  Mapping(int fd, std::size_t offset, std::size_t nbytes);
  Mapping(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  Mapping& operator=(Mapping&&) = delete;
  ~Mapping();

  std::byte* data() const { return data_; }
  std::size_t nbytes() const { return nbytes_; }

 private:
  std::byte* data_;
  std::size_t nbytes_;
};

// Hands out pieces of an arena. Any thread.
class Allocator {
 public:
  Allocator(const Mapping& arena, std::size_t page_nbytes)
      : arena_(arena), page_nbytes_(page_nbytes), pid_(getpid()) {
    free_[0] = {arena.nbytes(), false};
  }

  struct Usage {
    std::size_t in_use = 0;   // bytes handed out
    std::size_t kept = 0;     // bytes given back that keep their pages, for the next ones
    std::size_t highest = 0;  // the most that was handed out at a time
  };

  // Returns the offset of nbytes at a multiple of 64, of undefined content.
  // Throws std::bad_alloc when the arena is full, std::logic_error in a fork of the process.
  std::size_t take(std::size_t nbytes);
  void give_back(std::size_t offset, std::size_t nbytes);  // no effect in a fork
  Usage usage() const;

 private:
  struct Free {
    std::size_t nbytes;
    bool has_pages;  // some of it was used; neighbours are merged if they are alike in this
  };
  using Blocks = std::map<std::size_t, Free>;  // by offset

  Blocks::iterator find(std::size_t nbytes);
  void put(std::size_t offset, Free block);
  void trim();

  const Mapping& arena_;
  const std::size_t page_nbytes_;
  const pid_t pid_;
  mutable std::mutex mutex_;
  Blocks free_;
  Usage usage_;
};

class NodeMemory : public std::enable_shared_from_this<NodeMemory> {
 public:
  // Makes this rank's. arena_nbytes is address space, not memory. A fork of this process has the arena
  // at the same address, but what it writes there is its own. Throws std::system_error, and
  // std::runtime_error where pages are too large.
  static std::shared_ptr<NodeMemory> create(std::uint64_t nonce, std::size_t arena_nbytes,
                                            std::size_t page_nbytes = ringcomm::page_nbytes());

  // Maps that of another process. Throws std::system_error, or std::runtime_error if it is not the
  // one with this nonce.
  static std::shared_ptr<NodeMemory> open(int pid, int board_fd, int arena_fd, std::uint64_t nonce);
  // The same, by descriptors that were handed over. pid: 0 if it is not known here.
  static std::shared_ptr<NodeMemory> adopt(Descriptor board, Descriptor arena, std::uint64_t nonce,
                                           int pid = 0);

  int pid() const { return pid_; }  // of the rank whose it is; 0: not known
  bool is_of_this_process() const { return getpid() == pid_; }  // and not of a fork of it, either

  NodeMemory(const NodeMemory&) = delete;
  NodeMemory& operator=(const NodeMemory&) = delete;
  ~NodeMemory();

  int board_fd() const { return board_fd_; }
  int arena_fd() const { return arena_fd_; }  // -1: of another process's
  Bell& bell() const { return head_->bell; }
  BoardHead& head() const { return *head_; }
  std::byte* arena() const { return arena_.data(); }
  Allocator& allocator() { return allocator_; }

  // Maps the window of a group, a number below kWindows: once for all who hold it, as do the teams of
  // views that are over until Python drops them.
  std::shared_ptr<const Mapping> window(std::size_t context) const;
  // Sets it to 0 and frees its memory. No rank uses it any more.
  void clear_window(std::size_t context) const;

  // Its rank died: values in its arena are not to be taken for the present ones any more. For good.
  void withdraw() const { head_->is_withdrawn.store(1, std::memory_order_seq_cst); }
  bool is_withdrawn() const { return head_->is_withdrawn.load(std::memory_order_acquire) != 0; }

  // True if the whole range is in the arena.
  bool holds(const void* data, std::size_t nbytes) const;

 private:
  NodeMemory(int pid, int board_fd, int arena_fd, std::size_t arena_nbytes,
             std::size_t page_nbytes);

  const int pid_;
  std::uint64_t probe_ = 0;  // of this process's own memory: the nonce
  int board_fd_, arena_fd_;
  Mapping head_page_;
  BoardHead* head_;
  Mapping arena_;
  Allocator allocator_;
  mutable std::mutex windows_mutex_;
  mutable std::map<std::size_t, std::weak_ptr<const Mapping>> windows_;  // by context
};

}  // namespace ringcomm
