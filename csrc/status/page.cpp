#include "page.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "run_records.hpp"

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

Descriptor open_of(int pid, int fd, int flags) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const auto open_path = [&] { return ::open(path.c_str(), flags | O_CLOEXEC); };
  return Descriptor(uninterrupted(open_path), path.c_str());
}

Page* map(int fd) {
  void* address = mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return address == MAP_FAILED ? nullptr : static_cast<Page*>(address);
}

bool claim(Page::End& end) {
  std::uint32_t free = 0;
  return end.claimed.compare_exchange_strong(free, 1);
}

// --- what the kernel tells this process about itself ------------------------------------------
Page* recorded_page = nullptr;
constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTERM};
struct sigaction previous[NSIG];

// The code of a rank that has failed, has said how, and is on its way out; 0 if it is not.
int code_at_end(const Page& page) {
  const Ending kind = page.end.kind.load();
  if (page.state.load() != State::leaving) return 0;
  if (kind == Ending::sys_exit && (page.end.code & 0xff) != 0) return page.end.code;
  return kind == Ending::exception || kind == Ending::peer_failed || kind == Ending::sys_exit;
}

// Async-signal-safe: plain stores, sigaction, raise. Then the handler that was there before has
// its turn: the signal is blocked until this one returns. A rank that is ended on its way out, for
// that takes too long, ends with its own code: a launcher may take that of any rank for the job's.
void on_signal(int signal) {
  if (recorded_page != nullptr && recorded_page->pid == getpid()) {
    const int code = signal == SIGTERM ? code_at_end(*recorded_page) : 0;
    if (code != 0) {
      record_exit(code);
      _exit(code);
    }
    Page::End& end = recorded_page->end;
    if (claim(end)) {
      end.time_ns = monotonic_ns();
      end.code = signal;
      end.kind.store(signal == SIGTERM ? Ending::terminated : Ending::fatal_signal);
    }
  }
  sigaction(signal, &previous[signal], nullptr);
  raise(signal);
}

// What is no good end of a rank although its code is 0: a thread has failed, or C code has called exit
// in the middle of the job, which MPICH's mpiexec may take for a good job (measured).
bool is_bad_end(const Page& page) {
  return page.end.kind.load() == Ending::exception || page.state.load() == State::running;
}

void on_exit_code(int code, void*) {
  if (recorded_page == nullptr || recorded_page->pid != getpid()) return;
  const bool has_failed = recorded_page->end.kind.load() == Ending::exception;
  recorded_page->exit_code.store(code == 0 && has_failed ? 1 : code);
  const bool is_bad = code == 0 && is_bad_end(*recorded_page);
  record_exit(is_bad ? 1 : code);
  if (!is_bad) return;
  std::fflush(nullptr);
  _exit(1);
}

}  // namespace

MappedPage MappedPage::create(const std::string& job, const std::string& host, int rank, int size,
                              int local_rank, std::uint64_t nonce) {
  const std::string name = "ringcomm-status-" + job;
  Descriptor fd(memfd_create(name.substr(0, 200).c_str(), MFD_CLOEXEC), "status page: memfd_create");
  if (uninterrupted([&] { return ftruncate(fd.get(), sizeof(Page)); }) != 0)
    throw_errno("status page: ftruncate");
  Page* page = map(fd.get());  // zeros: every enum starts at its 0
  if (page == nullptr) throw_errno("status page: mmap");
  page->magic = kPageMagic;
  page->nonce = nonce;
  store_text(page->job, job);
  store_text(page->host, host);
  page->pid = getpid();
  page->rank = rank;
  page->size = size;
  page->local_rank = local_rank;
  page->exit_code.store(-1);
  MappedPage made(page, std::move(fd));
  made.lifeline_ = Lifeline::create();
  page->lifeline_fd = made.lifeline_.fd();
  return made;
}

MappedPage MappedPage::open(int pid, int fd, std::uint64_t nonce) {
  return adopt(open_of(pid, fd, O_RDWR), nonce);
}

MappedPage MappedPage::adopt(Descriptor fd, std::uint64_t nonce) {
  struct stat facts{};
  const bool is_whole = fstat(fd.get(), &facts) == 0 &&
                        facts.st_size == static_cast<off_t>(sizeof(Page));
  Page* page = is_whole ? map(fd.get()) : nullptr;
  if (is_whole && page == nullptr) throw_errno("status page: mmap");
  if (page == nullptr || page->magic != kPageMagic || page->nonce != nonce) {
    if (page != nullptr) munmap(page, sizeof(Page));
    throw std::runtime_error("status page: that descriptor belongs to another process");
  }
  return MappedPage(page, std::move(fd));
}

Descriptor MappedPage::open_lifeline(int pid) const {
  return open_of(pid, page_->lifeline_fd, O_RDONLY | O_NONBLOCK);
}

MappedPage::MappedPage(MappedPage&& other) noexcept
    : page_(std::exchange(other.page_, nullptr)),
      fd_(std::move(other.fd_)),
      lifeline_(std::move(other.lifeline_)) {}

MappedPage::~MappedPage() {
  if (page_ != nullptr && page_ != recorded_page) munmap(page_, sizeof(Page));
}

void MappedPage::set_state(State state) {
  if (state == State::leaving) page_->leaving_ns.store(monotonic_ns());
  page_->state.store(state);
  if (state == State::left && page_ == recorded_page) record_left();
}

void MappedPage::begin_op(const std::string& name, std::uint64_t sequence, std::uint64_t nbytes) {
  Page::Op& op = page_->op;
  op.version.fetch_add(1, std::memory_order_acq_rel);
  std::atomic_thread_fence(std::memory_order_release);
  store_text(op.name, name);
  op.sequence = sequence;
  op.nbytes = nbytes;
  op.start_ns = monotonic_ns();
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
  end.time_ns = monotonic_ns();
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
  const std::int64_t deadline = monotonic_ns() + timeout_ns;
  while (page.is_guarded.load() != 0 && page.is_reported.load() == 0 && monotonic_ns() < deadline)
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
