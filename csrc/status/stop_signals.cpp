#include "stop_signals.hpp"

#include <signal.h>
#include <unistd.h>

#include <atomic>

#include "page.hpp"

namespace ringcomm {
namespace {

struct Caught {
  int signal;
  struct sigaction before = {};
  bool is_ours = false;
};

Caught caught[] = {{SIGTERM}, {SIGUSR1}};
std::atomic<int> first{0};
std::atomic<pid_t> catching{0};

// Async-signal-safe.
void note(int signal) {
  if (getpid() == catching.load()) {
    int none = 0;
    first.compare_exchange_strong(none, signal);
    return;
  }
  for (const Caught& each : caught)  // a forked child, such as a worker of a DataLoader
    if (each.signal == signal) sigaction(signal, &each.before, nullptr);
  raise(signal);
}

bool is_free(const struct sigaction& action) {
  if ((action.sa_flags & SA_SIGINFO) != 0) return false;
  return action.sa_handler == SIG_DFL || is_recorder(action.sa_handler);
}

}  // namespace

void catch_stop_signals() {
  catching.store(getpid());
  for (Caught& each : caught) {
    struct sigaction now = {};
    if (sigaction(each.signal, nullptr, &now) != 0 || !is_free(now)) continue;
    each.before = now;
    each.is_ours = true;
    struct sigaction ours = {};
    ours.sa_handler = note;
    ours.sa_flags = SA_ONSTACK | SA_RESTART;
    sigemptyset(&ours.sa_mask);
    sigaction(each.signal, &ours, nullptr);
  }
}

int stop_signal() { return first.load(); }

void release_stop_signals() {
  for (Caught& each : caught) {
    struct sigaction now = {};
    const bool is_there = each.is_ours && sigaction(each.signal, nullptr, &now) == 0;
    if (is_there && now.sa_handler == note) sigaction(each.signal, &each.before, nullptr);
    each.is_ours = false;
  }
  first.store(0);
}

}  // namespace ringcomm
