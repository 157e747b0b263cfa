// ringcomm-guardian: watches the ranks of one node, says which failed first and how, and ends what
// is left of them, so that the launcher's exit code is not 0.
//
// A process of its own, in its own session, because a rank cannot report its own SIGKILL, and
// because a launcher that kills the job must not kill the reporter. It has no MPI and no port.
//
//   ringcomm-guardian GRACE_MS FAULT_TOLERANT(0|1) PID:FD:NONCE ...
//
// Writes one byte to stdout when it watches, and the report to stderr. Goes with the last rank.
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "page.hpp"
#include "report.hpp"

namespace ringcomm {
namespace {

constexpr int kTickMs = 50;
constexpr std::int64_t kMs = 1'000'000;
constexpr std::int64_t kTermToKill = 500 * kMs;
constexpr std::int64_t kReapWait = 200 * kMs;

// linux/pidfd.h of Linux 6.15, which older headers lack: how a process that is not our child ended.
struct PidfdInfo {
  std::uint64_t mask, cgroup;
  std::uint32_t ids[11];
  std::int32_t exit_status;
};
static_assert(sizeof(PidfdInfo) == 64);
constexpr std::uint64_t kInfoExit = 1u << 3;
constexpr unsigned long kGetInfo = _IOWR(0xFF, 11, PidfdInfo);

int pidfd_open(int pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

void pidfd_kill(int pidfd, int signal) {
  syscall(SYS_pidfd_send_signal, pidfd, signal, nullptr, 0);
}

struct Watched {
  MappedPage page;
  int pidfd;
  bool is_gone = false;
  int killed_by = 0;

  void ask_kernel_how() {
    PidfdInfo info{};
    info.mask = kInfoExit;
    if (pidfd < 0 || ioctl(pidfd, kGetInfo, &info) != 0 || (info.mask & kInfoExit) == 0) return;
    if (WIFSIGNALED(info.exit_status)) killed_by = WTERMSIG(info.exit_status);
    if (WIFEXITED(info.exit_status)) {
      int unknown = -1;
      page->exit_code.compare_exchange_strong(unknown, WEXITSTATUS(info.exit_status));
    }
  }

  RankFacts facts() const {
    RankFacts f;
    f.rank = page->rank;
    f.pid = page->pid;
    f.host = page->host;
    f.state = page->state.load();
    f.step = page->step.load();
    f.op = page.op();
    f.end = page.end();
    f.is_gone = is_gone;
    f.gone_ns = page->gone_ns.load();
    f.leaving_ns = page->leaving_ns.load();
    f.exit_code = page->exit_code.load();
    f.killed_by = killed_by;
    return f;
  }
};

class Guardian {
 public:
  Guardian(std::vector<Watched> ranks, std::int64_t grace_ns, bool fault_tolerant)
      : ranks_(std::move(ranks)), grace_ns_(grace_ns), fault_tolerant_(fault_tolerant) {}

  void watch() {
    while (!all_done()) {
      wait_for_news();
      note_fault();
      if (fault_ns_ != 0 && now_ns() > fault_ns_ + grace_ns_) end_the_rest();
    }
    say_how_it_ended();
  }

 private:
  bool all_done() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [](const Watched& w) {
      return w.is_gone || w.page->state.load() == State::left;
    });
  }

  void wait_for_news() {
    std::vector<pollfd> fds;
    std::vector<Watched*> owners;
    for (Watched& w : ranks_) {
      if (w.is_gone) continue;
      fds.push_back({w.pidfd, POLLIN, 0});
      owners.push_back(&w);
    }
    if (poll(fds.data(), fds.size(), kTickMs) < 0 && errno != EINTR) return;
    for (std::size_t i = 0; i < fds.size(); ++i) {
      if (fds[i].revents == 0 && fds[i].fd >= 0) continue;
      owners[i]->is_gone = true;
      owners[i]->page->gone_ns.store(now_ns());
    }
  }

  std::vector<RankFacts> facts() {
    std::vector<RankFacts> all;
    for (Watched& w : ranks_) {
      if (w.is_gone) w.ask_kernel_how();
      all.push_back(w.facts());
    }
    return all;
  }

  // At the first sign of a fault, keep what every rank was doing: soon they will have raised.
  void note_fault() {
    if (fault_ns_ != 0) return;
    const auto now = facts();
    const int first = culprit(now);
    if (first == kNobody) return;
    const RankFacts& f = now[static_cast<std::size_t>(first)];
    fault_ns_ = now_ns();
    fault_time_ns_ = f.end.kind != Ending::none ? f.end.time_ns : std::max(f.gone_ns, f.leaving_ns);
    for (const RankFacts& each : now) ops_.push_back(each.op);
    if (fault_tolerant_ && !all_done()) {
      say(report(now, first, ops_, fault_time_ns_));
      is_reported_ = true;
    }
  }

  // Under fault tolerance only a failed rank that lingers is ended: MPI reports no other death.
  void end_the_rest() {
    const std::int64_t now = now_ns();
    if (term_ns_ == 0) term_ns_ = now;
    const int signal = now < term_ns_ + kTermToKill ? SIGTERM : SIGKILL;
    for (Watched& w : ranks_) {
      if (w.is_gone) continue;
      if (fault_tolerant_ && w.page.end().kind != Ending::exception) continue;
      pidfd_kill(w.pidfd, signal);
      pidfd_kill(w.pidfd, SIGCONT);  // a stopped process dies only when it runs
    }
  }

  void say_how_it_ended() {
    wait_until_reaped();
    const auto now = facts();
    const int first = culprit(now);
    const bool someone_left = std::any_of(now.begin(), now.end(), [](const RankFacts& f) {
      return f.state == State::left;
    });
    if (first != kNobody) {
      if (ops_.empty())
        for (const RankFacts& each : now) ops_.push_back(each.op);
      const RankFacts& f = now[static_cast<std::size_t>(first)];
      if (fault_time_ns_ == 0)
        fault_time_ns_ = f.end.kind != Ending::none ? f.end.time_ns : f.gone_ns;
      // Under fault tolerance it was said when it happened; again only if the job did not go on.
      if (!is_reported_ || !someone_left) say(report(now, first, ops_, fault_time_ns_));
    } else if (was_interrupted(now)) {
      say(interruption(now));
    }
  }

  // The kernel tells how a process ended only once its parent has waited for it.
  void wait_until_reaped() {
    const std::int64_t deadline = now_ns() + kReapWait;
    for (Watched& w : ranks_) {
      if (!w.is_gone || w.page.end().kind != Ending::none) continue;
      while (w.killed_by == 0 && w.page->exit_code.load() < 0 && now_ns() < deadline) {
        w.ask_kernel_how();
        usleep(5000);
      }
    }
  }

  static void say(const std::string& text) {
    const std::string line = "\n" + text;
    std::size_t done = 0;
    while (done < line.size()) {
      const ssize_t n = write(STDERR_FILENO, line.data() + done, line.size() - done);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return;
      done += static_cast<std::size_t>(n);
    }
  }

  std::vector<Watched> ranks_;
  std::int64_t grace_ns_;
  bool fault_tolerant_;
  std::vector<OpView> ops_;
  std::int64_t fault_ns_ = 0, fault_time_ns_ = 0, term_ns_ = 0;
  bool is_reported_ = false;
};

Watched watched(const char* argument) {
  int pid = 0, fd = 0;
  unsigned long long nonce = 0;
  if (std::sscanf(argument, "%d:%d:%llu", &pid, &fd, &nonce) != 3)
    throw std::runtime_error(std::string("not PID:FD:NONCE: ") + argument);
  return {MappedPage::open(pid, fd, nonce), pidfd_open(pid)};
}

int run(int argc, char** argv) {
  if (argc < 4) throw std::runtime_error("usage: GRACE_MS FAULT_TOLERANT PID:FD:NONCE ...");
  for (const int signal : {SIGHUP, SIGINT, SIGTERM, SIGPIPE}) std::signal(signal, SIG_IGN);
  std::vector<Watched> ranks;
  for (int i = 3; i < argc; ++i) ranks.push_back(watched(argv[i]));
  const ssize_t told = write(STDOUT_FILENO, "w", 1);
  close(STDOUT_FILENO);
  if (told != 1) return 1;
  Guardian(std::move(ranks), std::atol(argv[1]) * kMs, std::atol(argv[2]) != 0).watch();
  return 0;
}

}  // namespace
}  // namespace ringcomm

int main(int argc, char** argv) {
  try {
    return ringcomm::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ringcomm-guardian: %s\n", error.what());
    return 1;
  }
}
