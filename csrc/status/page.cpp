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
#include <mutex>
#include <stdexcept>
#include <utility>

#include "ring_of_entries.hpp"
#include "run_records.hpp"
#include "text_fields.hpp"

namespace ringcomm {
namespace {

Descriptor open_of(int pid, int fd, int flags) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const auto open_path = [&] { return ::open(path.c_str(), flags | O_CLOEXEC); };
  return Descriptor(uninterrupted(open_path), path.c_str());
}

Page* map(int fd, int protection = PROT_READ | PROT_WRITE) {
  void* address = mmap(nullptr, sizeof(Page), protection, MAP_SHARED, fd, 0);
  return address == MAP_FAILED ? nullptr : static_cast<Page*>(address);
}

bool claim(Page::End& end) {
  std::uint32_t free = 0;
  return end.claimed.compare_exchange_strong(free, 1);
}

// --- what the kernel tells this process about itself ------------------------------------------
Page* recorded_page = nullptr;
bool is_recorded_page_ownerless = false;  // it stays mapped, for the end of the process, until the next
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
void on_signal(int signal, siginfo_t* info, void*) {
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
      end.is_by_parent = info->si_code == SI_USER && info->si_pid == getppid();
      end.kind.store(signal == SIGTERM ? Ending::terminated : Ending::fatal_signal);
      if (signal != SIGTERM) record_exit(128 + signal);  // where no guardian is, nobody else says so
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

// --- the heartbeat -------------------------------------------------------------------------------
constexpr int kBeatMs = 250;

// Held while the heart writes, and while a page is unmapped. Not by forked children: they have no heart.
std::mutex& heart_mutex() {
  static auto* const mutex = new std::mutex;  // the heart beats until the process is gone
  return *mutex;
}
Page* heart_page = nullptr;
pid_t heart_pid = 0;

void* beat(void*) {
  for (;;) {
    {
      const std::lock_guard<std::mutex> lock(heart_mutex());
      if (heart_page != nullptr) heart_page->heartbeat_ns.store(monotonic_ns());
    }
    usleep(kBeatMs * 1000);
  }
  return nullptr;
}

// Without a thread to be had, there is no heartbeat.
void start_heart(Page* page) {
  const std::lock_guard<std::mutex> lock(heart_mutex());
  page->heartbeat_ns.store(monotonic_ns());
  heart_page = page;
  if (heart_pid == getpid()) return;
  heart_pid = getpid();
  sigset_t all, before;
  sigfillset(&all);  // signals are for threads that know what to do
  pthread_sigmask(SIG_BLOCK, &all, &before);
  pthread_t thread;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_create(&thread, &attributes, beat, nullptr);
  pthread_attr_destroy(&attributes);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void stop_heart_of(const Page* page) {
  if (heart_pid != getpid()) return;
  const std::lock_guard<std::mutex> lock(heart_mutex());
  if (heart_page == page) heart_page = nullptr;
}

}  // namespace

MappedPage MappedPage::create(const std::string& job, const std::string& host, int rank, int size,
                              int local_rank, std::uint64_t nonce) {
  const std::string name = "ringcomm-status-" + job;
  Descriptor fd = make_memfd(name.substr(0, 200).c_str(), sizeof(Page));
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

MappedPage MappedPage::look(int pid, int fd) { return found(pid, fd, false); }
MappedPage MappedPage::look_to_ask(int pid, int fd) { return found(pid, fd, true); }

MappedPage MappedPage::found(int pid, int fd, bool writes) {
  Descriptor descriptor = open_of(pid, fd, writes ? O_RDWR : O_RDONLY);
  struct stat facts{};
  if (fstat(descriptor.get(), &facts) != 0) throw_errno("status page: fstat");
  std::uint64_t magic = 0;
  const bool is_page = pread(descriptor.get(), &magic, sizeof magic, 0) == sizeof magic &&
                       (magic & ~std::uint64_t{0xff}) == kPageMagicOfAnyVersion;
  if (!is_page || facts.st_uid != geteuid())
    throw std::runtime_error("status page: that descriptor is no page of this user");
  if (magic != kPageMagic || facts.st_size != static_cast<off_t>(sizeof(Page)))
    throw std::runtime_error("status page: it is of another version of ringcomm");
  Page* page = map(descriptor.get(), writes ? PROT_READ | PROT_WRITE : PROT_READ);
  if (page == nullptr) throw_errno("status page: mmap");
  return MappedPage(page, Descriptor());
}

Descriptor MappedPage::open_lifeline(int pid) const {
  return open_of(pid, page_->lifeline_fd, O_RDONLY | O_NONBLOCK);
}

MappedPage::MappedPage(MappedPage&& other) noexcept
    : page_(std::exchange(other.page_, nullptr)),
      fd_(std::move(other.fd_)),
      lifeline_(std::move(other.lifeline_)) {}

MappedPage::~MappedPage() {
  if (page_ == nullptr) return;
  if (page_ == recorded_page) {
    is_recorded_page_ownerless = true;
    return;
  }
  stop_heart_of(page_);
  munmap(page_, sizeof(Page));
}

void MappedPage::set_state(State state) {
  if (state == State::leaving) page_->leaving_ns.store(monotonic_ns());
  page_->state.store(state);
  if (state == State::left && page_ == recorded_page) record_left();
}

void MappedPage::set_role(const std::string& role) {
  store_text(page_->role, role);
  if (page_ == recorded_page) record_role(role);
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
  append(page_->arrivals, page_->n_arrivals, [&](Page::Arrival& arrival) {
    store_text(arrival.name, name);
    arrival.sequence = sequence;
    arrival.nbytes = nbytes;
    arrival.start_ns = op.start_ns;
    arrival.end_ns.store(0, std::memory_order_relaxed);
  });
}

void MappedPage::end_op(OpState state) {
  const bool was_running = page_->op.state.exchange(state) == OpState::running;
  const std::uint64_t n = page_->n_arrivals.load(std::memory_order_relaxed);
  if (!was_running || state != OpState::idle || n == 0) return;
  const std::int64_t now = monotonic_ns();
  page_->arrivals[(n - 1) % kArrivals].end_ns.store(now, std::memory_order_relaxed);
  count_op(page_->op.nbytes);
  page_->busy_ns.fetch_add(now - page_->op.start_ns, std::memory_order_relaxed);
}

void MappedPage::count_op(std::uint64_t nbytes) {
  page_->n_ended_ops.fetch_add(1, std::memory_order_relaxed);
  page_->ended_nbytes.fetch_add(nbytes, std::memory_order_relaxed);
}

bool MappedPage::log_scalar(const std::string& name, std::int64_t step, double value) {
  const std::uint32_t n = page_->n_scalars.load();
  std::uint32_t i = 0;
  char key[sizeof(Page::Scalar::name)];
  store_text(key, name);
  while (i < n && std::strcmp(page_->scalars[i].name, key) != 0) ++i;
  if (i == kScalars) return false;
  Page::Scalar& scalar = page_->scalars[i];
  scalar.version.fetch_add(1, std::memory_order_acq_rel);
  std::atomic_thread_fence(std::memory_order_release);
  if (i == n) std::memcpy(scalar.name, key, sizeof key);
  scalar.step = step;
  scalar.value = value;
  scalar.time_ns = monotonic_ns();
  scalar.version.fetch_add(1, std::memory_order_release);
  if (i == n) page_->n_scalars.store(n + 1, std::memory_order_release);
  return true;
}

std::vector<ScalarView> MappedPage::scalars() const {
  std::vector<ScalarView> found;
  const std::uint32_t n = std::min<std::uint32_t>(page_->n_scalars.load(), kScalars);
  for (std::uint32_t i = 0; i < n; ++i) {
    const Page::Scalar& scalar = page_->scalars[i];
    ScalarView view;
    for (int attempt = 0; attempt < 1000; ++attempt) {  // a writer killed in mid-write never ends
      const std::uint32_t before = scalar.version.load(std::memory_order_acquire);
      view = {load_text(scalar.name), scalar.step, scalar.time_ns, scalar.value};
      std::atomic_thread_fence(std::memory_order_acquire);
      if (before % 2 == 0 && before == scalar.version.load(std::memory_order_relaxed)) break;
    }
    found.push_back(std::move(view));
  }
  return found;
}

void MappedPage::note_event(const std::string& text) {
  append(page_->events, page_->n_events, [&](Page::Event& event) {
    store_text(event.text, text);
    event.time_ns = monotonic_ns();
  });
}

std::vector<EventView> MappedPage::events() const {
  return entries(page_->events, page_->n_events, [](const Page::Event& event) {
    return EventView{event.time_ns, load_text(event.text)};
  });
}

std::vector<ArrivalView> MappedPage::arrivals() const {
  return entries(page_->arrivals, page_->n_arrivals, [](const Page::Arrival& arrival) {
    return ArrivalView{arrival.sequence, arrival.nbytes, arrival.start_ns, arrival.end_ns.load(),
                       load_text(arrival.name)};
  });
}

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
  return {kind, end.time_ns, end.code, end.is_by_parent != 0, load_text(end.what),
          load_text(end.where), load_text(end.trace)};
}

void wait_for_report(const Page& page, std::int64_t timeout_ns) {
  const std::int64_t deadline = monotonic_ns() + timeout_ns;
  while (page.is_guarded.load() != 0 && page.is_reported.load() == 0 && monotonic_ns() < deadline)
    usleep(1000);
}

void record_this_process(Page* page) {
  const bool first = recorded_page == nullptr;
  Page* const before = std::exchange(recorded_page, page);
  start_heart(page);
  if (std::exchange(is_recorded_page_ownerless, false)) munmap(before, sizeof(Page));
  if (!first) return;
  for (const int signal : kSignals) {
    struct sigaction current{};
    if (sigaction(signal, nullptr, &current) != 0) continue;
    if (signal == SIGTERM && current.sa_handler != SIG_DFL) continue;
    previous[signal] = current;
    struct sigaction ours{};
    ours.sa_sigaction = on_signal;
    ours.sa_flags = SA_ONSTACK | SA_SIGINFO;
    sigemptyset(&ours.sa_mask);
    sigaction(signal, &ours, nullptr);
  }
  on_exit(on_exit_code, nullptr);
}

void note_left() {
  if (recorded_page == nullptr || recorded_page->state.load() == State::left) return;
  recorded_page->state.store(State::left);
  record_left();
}

bool is_recorder(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == on_signal;
}

}  // namespace ringcomm
