#include "memory.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace ringcomm {
namespace {

constexpr std::size_t kUnit = 4096;  // larger pieces are whole ones, so that few gaps are left
constexpr std::size_t kAlignment = 64;
// Free memory beyond what was in use at most goes back to the system, within these bounds: a training
// step that needs as much as the one before finds its pages there.
constexpr std::size_t kLeastKept = 64u << 20, kMostKept = 256u << 20;

std::size_t rounded_up(std::size_t n, std::size_t unit) { return (n + unit - 1) / unit * unit; }

int open_of(int pid, int fd) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const auto open_path = [&] { return ::open(path.c_str(), O_RDWR | O_CLOEXEC); };
  return Descriptor(uninterrupted(open_path), path.c_str()).release();
}

// A core dump allocates every page of a shared mapping that it writes, and an arena is as large as the
// machine's memory: one rank that dies would fill it, and the disk. Advice that is refused changes
// nothing else.
void keep_out_of_core_dumps(void* at, std::size_t nbytes) { madvise(at, nbytes, MADV_DONTDUMP); }

// A fork would share the arena: what a DataLoader worker adds to its copy of a gradient would be in
// the gradient of the rank. So the arenas that a process hands out become private in its forks.
class PrivateInForks {
 public:
  static PrivateInForks& instance() {
    static auto* const made = new PrivateInForks;  // outlives whatever is destroyed at exit
    return *made;
  }

  void add(const Mapping* arena, int fd) {
    const std::lock_guard lock(mutex_);
    arenas_.insert({arena, fd});
  }
  void remove(const Mapping* arena, int fd) {
    const std::lock_guard lock(mutex_);
    arenas_.erase({arena, fd});
  }

 private:
  PrivateInForks() {
    const int error = pthread_atfork([] { instance().mutex_.lock(); },    //
                                     [] { instance().mutex_.unlock(); },  //
                                     [] { instance().in_child(); });
    if (error != 0) throw std::system_error(error, std::generic_category(), "pthread_atfork");
  }

  void in_child() {
    for (const auto& [arena, fd] : arenas_) {
      void* at = mmap(arena->data(), arena->nbytes(), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, fd, 0);
      if (at == MAP_FAILED) _exit(70);  // rather no child than one that writes into its parent
      keep_out_of_core_dumps(at, arena->nbytes());
    }
    mutex_.unlock();
  }

  std::mutex mutex_;
  std::set<std::pair<const Mapping*, int>> arenas_;
};

}  // namespace

Mapping::Mapping(int fd, std::size_t offset, std::size_t nbytes) : nbytes_(nbytes) {
  void* at = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd,
                  static_cast<off_t>(offset));
  if (at == MAP_FAILED) throw_errno("mmap of shared memory");
  keep_out_of_core_dumps(at, nbytes);
  data_ = static_cast<std::byte*>(at);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), nbytes_(other.nbytes_) {}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, nbytes_);
}

std::size_t Allocator::take(std::size_t nbytes) {
  if (getpid() != pid_) throw std::logic_error("a fork of a rank has no shared memory to hand out");
  nbytes = rounded_up(std::max<std::size_t>(nbytes, 1), nbytes < kUnit ? kAlignment : kUnit);
  const std::lock_guard lock(mutex_);
  const auto found = find(nbytes);
  if (found == free_.end()) throw std::bad_alloc();
  const auto [offset, block] = *found;
  free_.erase(found);
  if (block.nbytes > nbytes) free_[offset + nbytes] = {block.nbytes - nbytes, block.has_pages};
  if (block.has_pages) usage_.kept -= nbytes;
  usage_.in_use += nbytes;
  usage_.highest = std::max(usage_.highest, usage_.in_use);
  return offset;
}

// Returns the smallest that fits, of those with pages if there is one.
Allocator::Blocks::iterator Allocator::find(std::size_t nbytes) {
  auto best = free_.end();
  for (auto each = free_.begin(); each != free_.end(); ++each) {
    if (each->second.nbytes < nbytes) continue;
    const auto rank = [](const Free& f) { return std::pair(!f.has_pages, f.nbytes); };
    if (best == free_.end() || rank(each->second) < rank(best->second)) best = each;
  }
  return best;
}

void Allocator::give_back(std::size_t offset, std::size_t nbytes) {
  if (getpid() != pid_) return;  // the parent's arrays live on
  nbytes = rounded_up(std::max<std::size_t>(nbytes, 1), nbytes < kUnit ? kAlignment : kUnit);
  const std::lock_guard lock(mutex_);
  usage_.in_use -= nbytes;
  usage_.kept += nbytes;
  put(offset, {nbytes, true});
  if (usage_.kept > std::clamp(usage_.highest, kLeastKept, kMostKept)) trim();
}

void Allocator::put(std::size_t offset, Free block) {
  auto at = free_.insert_or_assign(offset, block).first;
  const auto next = std::next(at);
  if (next != free_.end() && next->second.has_pages == block.has_pages &&
      offset + block.nbytes == next->first) {
    at->second.nbytes += next->second.nbytes;
    free_.erase(next);
  }
  if (at == free_.begin()) return;
  const auto before = std::prev(at);
  if (before->second.has_pages == block.has_pages &&
      before->first + before->second.nbytes == offset) {
    before->second.nbytes += at->second.nbytes;
    free_.erase(at);
  }
}

// Punches holes where nothing is in use, of whole pages: the rest of a page may be somebody's. They
// vanish from the mappings of all ranks; what is written there later gets new ones.
void Allocator::trim() {
  const Blocks before = std::exchange(free_, {});
  for (const auto& [offset, block] : before) {
    const std::size_t begin = rounded_up(offset, page_nbytes_);
    const std::size_t stop = (offset + block.nbytes) / page_nbytes_ * page_nbytes_;
    if (block.has_pages && stop > begin)
      madvise(arena_.data() + begin, stop - begin, MADV_REMOVE);
    put(offset, {block.nbytes, false});
  }
  usage_.kept = 0;
}

Allocator::Usage Allocator::usage() const {
  const std::lock_guard lock(mutex_);
  return usage_;
}

NodeMemory::NodeMemory(int pid, int board_fd, int arena_fd, std::size_t arena_nbytes,
                       std::size_t page_nbytes)
    : pid_(pid),
      board_fd_(board_fd),
      arena_fd_(arena_fd),
      head_page_(board_fd, 0, kHeadBytes),
      head_(reinterpret_cast<BoardHead*>(head_page_.data())),
      arena_(arena_fd, 0, arena_nbytes),
      allocator_(arena_, page_nbytes) {}

NodeMemory::~NodeMemory() {
  PrivateInForks::instance().remove(&arena_, arena_fd_);
  close(board_fd_);
  if (arena_fd_ >= 0) close(arena_fd_);
}

std::ptrdiff_t read_private(int pid, std::uint64_t place, std::byte* to, std::size_t nbytes) {
  const iovec here{to, nbytes}, there{reinterpret_cast<void*>(place), nbytes};
  const ssize_t got = process_vm_readv(pid, &here, 1, &there, 1, 0);
  return got < 0 ? -errno : got;
}

bool can_be_read(const std::byte* data, std::size_t nbytes) {
  std::byte ends[2];
  auto* const first = const_cast<std::byte*>(data);  // an iovec has no const
  const iovec here{ends, 2}, there[2] = {{first, 1}, {first + nbytes - 1, 1}};
  return process_vm_readv(getpid(), &here, 1, there, 2, 0) == 2;
}

std::size_t page_nbytes() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

std::shared_ptr<NodeMemory> NodeMemory::create(std::uint64_t nonce, std::size_t arena_nbytes,
                                               std::size_t page_nbytes) {
  if (page_nbytes > kLargestPage)
    throw std::runtime_error("pages of " + std::to_string(page_nbytes) +
                             " bytes: shared memory is laid out for at most " +
                             std::to_string(kLargestPage));
  Descriptor board = make_memfd("ringcomm-board", kBoardBytes);
  Descriptor arena = make_memfd("ringcomm-arena", arena_nbytes);
  std::shared_ptr<NodeMemory> made(
      new NodeMemory(getpid(), board.get(), arena.get(), arena_nbytes, page_nbytes));
  board.release();
  arena.release();
  PrivateInForks::instance().add(&made->arena_, made->arena_fd_);
  made->probe_ = nonce;
  made->head_->probe = reinterpret_cast<std::uint64_t>(&made->probe_);
  made->head_->nonce = nonce;
  made->head_->magic = kBoardMagic;
  return made;
}

std::shared_ptr<NodeMemory> NodeMemory::open(int pid, int board_fd, int arena_fd,
                                             std::uint64_t nonce) {
  Descriptor board(open_of(pid, board_fd));
  return adopt(std::move(board), Descriptor(open_of(pid, arena_fd)), nonce, pid);
}

std::shared_ptr<NodeMemory> NodeMemory::adopt(Descriptor board, Descriptor arena,
                                              std::uint64_t nonce, int pid) {
  struct stat state {};
  if (fstat(board.get(), &state) != 0) throw_errno("fstat of shared memory");
  if (static_cast<std::size_t>(state.st_size) != kBoardBytes)
    throw std::runtime_error("that descriptor is no board of this version of ringcomm");
  {
    const Mapping page(board.get(), 0, kHeadBytes);
    const auto* head = reinterpret_cast<const BoardHead*>(page.data());
    if (head->magic != kBoardMagic || head->nonce != nonce)
      throw std::runtime_error("that board belongs to another process");
  }
  if (fstat(arena.get(), &state) != 0) throw_errno("fstat of shared memory");
  std::shared_ptr<NodeMemory> made(
      new NodeMemory(pid, board.get(), arena.get(), static_cast<std::size_t>(state.st_size),
                     page_nbytes()));
  board.release();
  made->arena_fd_ = -1;  // it is mapped whole, and closed here; windows of the board come later
  return made;
}

std::shared_ptr<const Mapping> NodeMemory::window(std::size_t context) const {
  if (context >= kWindows) throw std::out_of_range("no window for that many groups");
  const std::lock_guard lock(windows_mutex_);
  std::weak_ptr<const Mapping>& known = windows_[context];
  std::shared_ptr<const Mapping> window = known.lock();
  if (window == nullptr) {
    window = std::make_shared<const Mapping>(board_fd_, kHeadBytes + context * kWindowBytes,
                                             kWindowBytes);
    known = window;
  }
  return window;
}

void NodeMemory::clear_window(std::size_t context) const {
  if (context >= kWindows) throw std::out_of_range("no window for that many groups");
  const auto begin = static_cast<off_t>(kHeadBytes + context * kWindowBytes);
  constexpr int hole = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  const auto punch = [&] { return fallocate(board_fd_, hole, begin, kWindowBytes); };
  if (uninterrupted(punch) != 0) throw_errno("fallocate of shared memory");
}

bool NodeMemory::holds(const void* data, std::size_t nbytes) const {
  const auto* at = static_cast<const std::byte*>(data);
  return at >= arena_.data() && at + nbytes <= arena_.data() + arena_.nbytes();
}

}  // namespace ringcomm
