#include "page.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <utility>

namespace ringcomm {
namespace {

bool is_continuation(char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; }

// Texts are UTF-8 and are cut between characters, never within one.
template <std::size_t N>
void store_text(char (&field)[N], const std::string& text) {
  std::size_t n = std::min(text.size(), N - 1);
  while (n > 0 && n < text.size() && is_continuation(text[n])) --n;
  std::memcpy(field, text.data(), n);
  field[n] = '\0';
}

template <std::size_t N>
void store_tail(char (&field)[N], const std::string& text) {
  std::size_t start = text.size() < N ? 0 : text.size() - (N - 1);
  while (start < text.size() && is_continuation(text[start])) ++start;
  store_text(field, text.substr(start));
}

template <std::size_t N>
std::string load_text(const char (&field)[N]) {
  return std::string(field, strnlen(field, N));
}

Page* map(int fd) {
  void* address = mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return address == MAP_FAILED ? nullptr : static_cast<Page*>(address);
}

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error("status page: " + what + ": " + std::strerror(errno));
}

// A forked child must not keep its parent's lifeline open, or the parent would seem to live on.
std::atomic<int> lifelines[64];  // descriptor + 1; 0: free

void close_lifelines_of_parent() {
  for (std::atomic<int>& each : lifelines)
    if (const int taken = each.exchange(0); taken != 0) close(taken - 1);
}

void keep_from_children(int fd) {
  static const int registered = pthread_atfork(nullptr, nullptr, close_lifelines_of_parent);
  if (registered != 0) return;
  for (std::atomic<int>& each : lifelines) {
    int free = 0;
    if (each.compare_exchange_strong(free, fd + 1)) return;
  }
}

void forget_lifeline(int fd) {
  for (std::atomic<int>& each : lifelines) {
    int mine = fd + 1;
    if (each.compare_exchange_strong(mine, 0)) return;
  }
}

bool claim(Page::End& end) {
  std::uint32_t free = 0;
  return end.claimed.compare_exchange_strong(free, 1);
}

// --- what the kernel tells this process about itself ------------------------------------------
Page* recorded_page = nullptr;
constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTERM};
struct sigaction previous[NSIG];

// Async-signal-safe: plain stores, sigaction, raise. Then the handler that was there before has
// its turn: the signal is blocked until this one returns.
void on_signal(int signal) {
  if (recorded_page != nullptr && recorded_page->pid == getpid()) {
    Page::End& end = recorded_page->end;
    if (claim(end)) {
      end.time_ns = now_ns();
      end.code = signal;
      end.kind.store(signal == SIGTERM ? Ending::terminated : Ending::fatal_signal);
    }
  }
  sigaction(signal, &previous[signal], nullptr);
  raise(signal);
}

// A thread may have failed although the main thread ends well: that is no good end of a rank.
void on_exit_code(int code, void*) {
  if (recorded_page == nullptr || recorded_page->pid != getpid()) return;
  const bool has_failed = recorded_page->end.kind.load() == Ending::exception;
  recorded_page->exit_code.store(code == 0 && has_failed ? 1 : code);
  if (code == 0 && has_failed) {
    std::fflush(nullptr);
    _exit(1);
  }
}

}  // namespace

std::int64_t now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<std::int64_t>(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

MappedPage MappedPage::create(const std::string& job, const std::string& host, int rank, int size,
                              int local_rank, std::uint64_t nonce) {
  const std::string name = "ringcomm-status-" + job;
  const int fd = memfd_create(name.substr(0, 200).c_str(), MFD_CLOEXEC);
  if (fd < 0) fail("memfd_create");
  if (ftruncate(fd, sizeof(Page)) != 0) {
    close(fd);
    fail("ftruncate");
  }
  Page* page = map(fd);  // zeros: every enum starts at its 0
  if (page == nullptr) {
    close(fd);
    fail("mmap");
  }
  page->magic = kPageMagic;
  page->nonce = nonce;
  store_text(page->job, job);
  store_text(page->host, host);
  page->pid = getpid();
  page->rank = rank;
  page->size = size;
  page->local_rank = local_rank;
  page->exit_code.store(-1);
  MappedPage made(page, fd);
  if (pipe2(made.lifeline_, O_CLOEXEC) != 0) fail("pipe2");
  page->lifeline_fd = made.lifeline_[0];
  keep_from_children(made.lifeline_[1]);
  return made;
}

MappedPage MappedPage::open(int pid, int fd, std::uint64_t nonce) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const int own = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (own < 0) fail(path);
  struct stat facts{};
  const bool is_whole = fstat(own, &facts) == 0 &&
                        facts.st_size == static_cast<off_t>(sizeof(Page));
  Page* page = is_whole ? map(own) : nullptr;
  if (page == nullptr || page->magic != kPageMagic || page->nonce != nonce) {
    if (page != nullptr) munmap(page, sizeof(Page));
    close(own);
    throw std::runtime_error("status page: " + path + " belongs to another process");
  }
  return MappedPage(page, own);
}

int MappedPage::open_lifeline(int pid) const {
  const std::string path =
      "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(page_->lifeline_fd);
  return ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
}

MappedPage::MappedPage(MappedPage&& other) noexcept : page_(other.page_), fd_(other.fd_) {
  other.page_ = nullptr;
  other.fd_ = -1;
  for (int i = 0; i < 2; ++i) lifeline_[i] = std::exchange(other.lifeline_[i], -1);
}

MappedPage::~MappedPage() {
  if (page_ != nullptr && page_ != recorded_page) munmap(page_, sizeof(Page));
  if (fd_ >= 0) close(fd_);
  if (lifeline_[1] >= 0) forget_lifeline(lifeline_[1]);
  for (const int each : lifeline_)
    if (each >= 0) close(each);
}

void MappedPage::begin_op(const std::string& name, std::uint64_t sequence, std::uint64_t nbytes) {
  Page::Op& op = page_->op;
  op.version.fetch_add(1, std::memory_order_acq_rel);
  std::atomic_thread_fence(std::memory_order_release);
  store_text(op.name, name);
  op.sequence = sequence;
  op.nbytes = nbytes;
  op.start_ns = now_ns();
  op.state.store(OpState::running, std::memory_order_relaxed);
  op.version.fetch_add(1, std::memory_order_release);
}

void MappedPage::end_op(OpState state) { page_->op.state.store(state); }

OpView MappedPage::op() const {
  const Page::Op& op = page_->op;
  OpView view;
  for (int attempt = 0; attempt < 1000; ++attempt) {  // a writer killed in mid-write never ends
    const std::uint32_t before = op.version.load(std::memory_order_acquire);
    view = {op.state.load(), op.sequence, op.nbytes, op.start_ns, load_text(op.name)};
    std::atomic_thread_fence(std::memory_order_acquire);
    if (before % 2 == 0 && before == op.version.load(std::memory_order_relaxed)) break;
  }
  return view;
}

bool MappedPage::record_end(Ending kind, int code, const std::string& what,
                            const std::string& where, const std::string& trace) {
  Page::End& end = page_->end;
  if (!claim(end)) return false;
  end.time_ns = now_ns();
  end.code = code;
  store_text(end.what, what);
  store_text(end.where, where);
  store_tail(end.trace, trace);
  end.kind.store(kind);
  return true;
}

EndView MappedPage::end() const {
  const Page::End& end = page_->end;
  const Ending kind = end.kind.load();
  if (kind == Ending::none) return {};
  return {kind,  end.time_ns, end.code, load_text(end.what), load_text(end.where),
          load_text(end.trace)};
}

void wait_for_report(const Page& page, std::int64_t timeout_ns) {
  const std::int64_t deadline = now_ns() + timeout_ns;
  while (page.is_guarded.load() != 0 && page.is_reported.load() == 0 && now_ns() < deadline)
    usleep(1000);
}

void record_this_process(Page* page) {
  const bool first = recorded_page == nullptr;
  recorded_page = page;
  if (!first) return;
  for (const int signal : kSignals) {
    struct sigaction current{};
    if (sigaction(signal, nullptr, &current) != 0) continue;
    if (signal == SIGTERM && current.sa_handler != SIG_DFL) continue;
    previous[signal] = current;
    struct sigaction ours{};
    ours.sa_handler = on_signal;
    ours.sa_flags = SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    sigaction(signal, &ours, nullptr);
  }
  on_exit(on_exit_code, nullptr);
}

}  // namespace ringcomm
