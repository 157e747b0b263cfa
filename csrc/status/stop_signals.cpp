#include "stop_signals.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <string>
#include <system_error>

#include "../descriptor.hpp"
#include "page.hpp"

namespace ringcomm {
namespace {

constexpr char kName[] = "ringcomm-stop-signals";
constexpr int kMostHolders = 1000;

// What a rank and the processes that it has started share, as long as one of them lives.
struct Shared {
  std::atomic<int> is_caught[2];             // by the rank, as `caught` below
  std::atomic<pid_t> holders[kMostHolders];  // who holds a signal; 0: free
};
static_assert(std::atomic<pid_t>::is_always_lock_free);

struct Caught {
  int signal;
  struct sigaction before = {};
  bool is_ours = false;
};

Caught caught[] = {{SIGTERM}, {SIGUSR1}};
std::atomic<int> first{0};
std::atomic<pid_t> catching{0};  // the process that has called catch_stop_signals()
pid_t shared_rank = 0;           // whose Shared it is
Shared* shared = nullptr;        // stays mapped: handlers of forks read it

// --- async-signal-safe ----------------------------------------------------------------------------
// 0 if there is none, or if it cannot be seen.
pid_t parent_of(pid_t pid) {
  if (pid == getpid()) return getppid();
  char path[32] = "/proc/", digits[16], text[512];
  int n = 0;
  for (pid_t rest = pid; rest > 0; rest /= 10) digits[n++] = static_cast<char>('0' + rest % 10);
  char* end = path + std::strlen(path);
  while (n > 0) *end++ = digits[--n];
  std::memcpy(end, "/stat", sizeof "/stat");
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  const ssize_t length = read(fd, text, sizeof text - 1);
  close(fd);
  if (length <= 0) return 0;
  text[length] = '\0';
  const char* name_end = std::strrchr(text, ')');  // "PID (NAME) STATE PARENT ..."
  pid_t parent = 0;
  if (name_end == nullptr || name_end + 4 >= text + length) return 0;
  for (const char* c = name_end + 4; *c >= '0' && *c <= '9'; ++c) parent = parent * 10 + (*c - '0');
  return parent;
}

bool is_of_the_rank(pid_t pid) {
  for (int n = 0; pid > 0 && n < 100; ++n) {
    if (pid == shared_rank) return true;
    pid = parent_of(pid);
  }
  return false;
}

// False if there is no room.
bool note_holder() {
  const pid_t me = getpid();
  for (std::atomic<pid_t>& holder : shared->holders) {
    pid_t there = 0;
    if (holder.compare_exchange_strong(there, me) || there == me) return true;
  }
  return false;
}

// Launchers and schedulers are no descendants of the rank. One outside of this pid namespace shows as 0.
bool holds(std::size_t i, const siginfo_t& info) {
  const bool is_sent = info.si_code == SI_USER || info.si_code == SI_TKILL || info.si_code == SI_QUEUE;
  return shared != nullptr && is_sent && shared->is_caught[i].load() != 0 &&
         is_of_the_rank(getpid()) && !is_of_the_rank(info.si_pid) && note_holder();
}

void take_signal(const Caught& each, siginfo_t* info, void* context) {
  const struct sigaction& before = each.before;
  if ((before.sa_flags & SA_SIGINFO) != 0) return before.sa_sigaction(each.signal, info, context);
  if (before.sa_handler == SIG_IGN) return;
  if (before.sa_handler != SIG_DFL) return before.sa_handler(each.signal);
  sigaction(each.signal, &before, nullptr);
  raise(each.signal);
}

void on_stop_signal(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  if (getpid() == catching.load()) {
    int none = 0;
    first.compare_exchange_strong(none, signal);
  } else {
    for (std::size_t i = 0; i < std::size(caught); ++i)
      if (caught[i].signal == signal && !holds(i, *info)) take_signal(caught[i], info, context);
  }
  errno = error;
}

bool is_ours(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == on_stop_signal;
}

bool is_free(const struct sigaction& action) {
  if ((action.sa_flags & SA_SIGINFO) != 0) return is_recorder(action);
  return action.sa_handler == SIG_DFL;
}

// False if it was ours before, or is not to be taken from the program.
bool install(Caught& each, bool takes_from_others) {
  struct sigaction now = {};
  if (sigaction(each.signal, nullptr, &now) != 0 || is_ours(now)) return false;
  if (!takes_from_others && !is_free(now)) return false;
  each.before = now;
  struct sigaction ours = {};
  ours.sa_sigaction = on_stop_signal;
  ours.sa_flags = SA_ONSTACK | SA_RESTART | SA_SIGINFO;
  sigemptyset(&ours.sa_mask);
  return sigaction(each.signal, &ours, nullptr) == 0;
}

void hold_in_fork() {
  for (Caught& each : caught) install(each, false);
}

// --------------------------------------------------------------------------------------------------
void hold_in_forks() {
  static const int error = pthread_atfork(nullptr, nullptr, hold_in_fork);
  if (error != 0) throw std::system_error(error, std::generic_category(), "pthread_atfork");
}

Shared* map_shared(int fd) {
  void* address = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) throw_errno("mmap of stop signals");
  return static_cast<Shared*>(address);
}

// None if that process has no such memory, or has ended.
Descriptor memory_of(pid_t pid) {
  const std::string folder = "/proc/" + std::to_string(pid) + "/fd";
  std::error_code error;
  for (std::filesystem::directory_iterator each(folder, error), end; !error && each != end;
       each.increment(error)) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(each->path(), gone).string();
    if (target.find(kName) != std::string::npos)
      return Descriptor(open(each->path().c_str(), O_RDWR | O_CLOEXEC));
  }
  return Descriptor();
}

}  // namespace

void catch_stop_signals() {
  catching.store(getpid());
  for (std::size_t i = 0; i < std::size(caught); ++i) {
    if (!install(caught[i], false)) continue;
    caught[i].is_ours = true;
    if (shared != nullptr) shared->is_caught[i].store(1);
  }
}

int stop_signal() { return first.load(); }

void release_stop_signals() {
  for (std::size_t i = 0; i < std::size(caught); ++i) {
    Caught& each = caught[i];
    struct sigaction now = {};
    if (each.is_ours && shared != nullptr) shared->is_caught[i].store(0);
    const bool is_there = each.is_ours && sigaction(each.signal, nullptr, &now) == 0;
    if (is_there && is_ours(now)) sigaction(each.signal, &each.before, nullptr);
    each.is_ours = false;
  }
  first.store(0);
}

void let_forks_hold_stop_signals() {
  if (shared != nullptr) return;
  Descriptor memory = make_memfd(kName, sizeof(Shared));
  hold_in_forks();
  shared = map_shared(memory.get());
  shared_rank = getpid();
  (void)memory.release();  // stays open: hold_stop_signals_of() finds the memory by it
}

void hold_stop_signals_of(pid_t rank) {
  if (shared != nullptr) return;
  const Descriptor memory = memory_of(rank);
  if (memory.get() < 0) return;
  hold_in_forks();
  shared_rank = rank;
  shared = map_shared(memory.get());
  hold_in_fork();
}

void hold_stop_signals_again() {
  if (shared == nullptr || shared_rank == getpid()) return;
  for (Caught& each : caught) install(each, true);
}

void pass_stop_signals_on() {
  if (shared == nullptr || shared_rank != getpid()) return;
  for (std::atomic<pid_t>& holder : shared->holders) {
    const pid_t pid = holder.exchange(0);
    if (pid != 0 && is_of_the_rank(pid)) kill(pid, SIGTERM);
  }
}

}  // namespace ringcomm
