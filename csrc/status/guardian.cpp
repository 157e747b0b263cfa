// ringcomm-guardian: watches the ranks of one node, says which failed first and how, and ends what
// is left of them, so that the launcher's exit code is not 0.
//
// A process of its own, in its own session, because a rank cannot report its own SIGKILL, and
// because a launcher that kills the job must not kill the reporter. It has no MPI and no port.
//
//   ringcomm-guardian GRACE_MS FAULT_TOLERANT(0|1) PID:FD:NONCE ...
//
// Writes one byte to stdout when it watches, and the report to stderr. Goes with the last rank.
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "orphans.hpp"
#include "page.hpp"
#include "processes.hpp"
#include "report.hpp"
#include "segments.hpp"

namespace ringcomm {
namespace {

constexpr int kTickMs = 20;
constexpr std::int64_t kMs = 1'000'000;
constexpr std::int64_t kTermToKill = 500 * kMs;
constexpr std::int64_t kReapWait = 20 * kMs;
constexpr std::int64_t kLetReap = 2000 * kMs;
constexpr std::int64_t kLetBury = 30 * kMs;
constexpr std::int64_t kLetSpeak = 100 * kMs;
constexpr std::int64_t kLetEnd = 300 * kMs;
constexpr std::int64_t kLetDie = 2000 * kMs;
constexpr std::int64_t kOrphanGrace = 5000 * kMs;

// linux/pidfd.h of Linux 6.15, which older headers lack: how a process that is not our child ended.
struct PidfdInfo {
  std::uint64_t mask, cgroup;
  std::uint32_t ids[11];
  std::int32_t exit_status;
};
static_assert(sizeof(PidfdInfo) == 64);
constexpr std::uint64_t kInfoExit = 1u << 3;
constexpr unsigned long kGetInfo = _IOWR(0xFF, 11, PidfdInfo);

// -1 if there is no such process; any other trouble is no reason to believe that it is dead.
int pidfd_open(int pid) {
  const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (pidfd < 0 && errno != ESRCH)
    throw std::runtime_error(std::string("pidfd_open: ") + std::strerror(errno));
  return pidfd;
}

void pidfd_kill(int pidfd, int signal) {
  syscall(SYS_pidfd_send_signal, pidfd, signal, nullptr, 0);
}

struct Watched {
  MappedPage page;
  int pidfd;
  Parent parent;
  Descriptor lifeline{};
  std::int64_t closed_ns = 0;
  bool is_gone = false;
  bool is_closing_explained = false;
  std::string replaced_by{};
  int killed_by = 0;
  bool is_reported = false;
  std::int64_t term_ns = 0;  // when it was asked to end

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

  // An exec closes the lifeline, and so does a rank that closes all its descriptors, or dies.
  void see_exec() {
    if (closed_ns == 0 || is_gone || is_closing_explained || now_ns() < closed_ns + kLetBury) return;
    const Image image = image_of(page->pid);
    const auto process = process_of(page->pid);
    is_closing_explained = image != Image::none && process;
    if (is_closing_explained && image == Image::without_page) replaced_by = process->name;
  }

  bool was_waited_for() const {
    return syscall(SYS_pidfd_send_signal, pidfd, 0, nullptr, 0) != 0 && errno == ESRCH;
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
    f.replaced_by = replaced_by;
    f.gone_ns = page->gone_ns.load();
    f.closed_ns = closed_ns;
    f.leaving_ns = page->leaving_ns.load();
    f.exit_code = page->exit_code.load();
    f.killed_by = killed_by;
    return f;
  }
};

class Guardian {
 public:
  Guardian(std::vector<Watched> ranks, std::int64_t grace_ns, bool fault_tolerant)
      : ranks_(std::move(ranks)), grace_ns_(grace_ns), fault_tolerant_(fault_tolerant) {
    if (epoll_ < 0) throw std::runtime_error(std::string("epoll: ") + std::strerror(errno));
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      Watched& w = ranks_[i];
      segments_.merge(mpi_segments_of(w.page->pid));
      w.page->is_guarded.store(1);
      epoll_event event{};
      event.events = EPOLLIN;
      event.data.u64 = i;
      if (w.pidfd < 0)
        note_gone(w);
      else if (epoll_ctl(epoll_, EPOLL_CTL_ADD, w.pidfd, &event) != 0)
        throw std::runtime_error(std::string("epoll_ctl: ") + std::strerror(errno));
      event.events = 0;  // a hang-up is told all the same
      event.data.u64 = i + ranks_.size();
      try {
        w.lifeline = w.page.open_lifeline(w.page->pid);
        epoll_ctl(epoll_, EPOLL_CTL_ADD, w.lifeline.get(), &event);
      } catch (const std::system_error&) {
        continue;  // it has died, and its pidfd tells
      }
    }
  }

  void watch() {
    while (!all_done()) {
      wait_for_news();
      report_faults();
      if (fault_ns_ != 0 && now_ns() > fault_ns_ + grace_ns_) end_the_rest();
      end_orphans();
    }
    wait_until_reaped();
    report_faults();
    remove_segments();
    end_all_orphans();
    hold_output_open();
  }

 private:
  bool all_done() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [](const Watched& w) {
      return w.is_gone || w.page->state.load() == State::left;
    });
  }

  // epoll, not poll: it hands deaths over in the order in which they happened, also when a launcher
  // has killed the others before this process had its turn.
  void wait_for_news() {
    std::vector<epoll_event> events(2 * ranks_.size());
    const int n = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), kTickMs);
    for (int i = 0; i < n; ++i) {
      const std::size_t which = events[static_cast<std::size_t>(i)].data.u64;
      if (which < ranks_.size())
        note_gone(ranks_[which]);
      else
        note_closed(ranks_[which - ranks_.size()]);
    }
  }

  void note_closed(Watched& w) {
    last_gone_ns_ = std::max(now_ns(), last_gone_ns_ + 1);
    w.closed_ns = last_gone_ns_;
    epoll_ctl(epoll_, EPOLL_CTL_DEL, w.lifeline.get(), nullptr);
  }

  void note_gone(Watched& w) {
    w.is_gone = true;
    last_gone_ns_ = std::max(now_ns(), last_gone_ns_ + 1);
    w.page->gone_ns.store(last_gone_ns_);
    if (w.pidfd >= 0) epoll_ctl(epoll_, EPOLL_CTL_DEL, w.pidfd, nullptr);
  }

  std::vector<RankFacts> facts() {
    std::vector<RankFacts> all;
    for (Watched& w : ranks_) {
      if (w.is_gone) w.ask_kernel_how();
      w.see_exec();
      all.push_back(w.facts());
    }
    return all;
  }

  // The first fault is the job's; under fault tolerance the job goes on, and each fault is news.
  void report_faults() {
    if (is_reported_ && !fault_tolerant_) return;
    auto now = facts();
    for (std::size_t i = 0; i < now.size(); ++i)
      if (is_reported_ && ranks_[i].is_reported) now[i] = RankFacts{};
    const int first = culprit(now);
    if (first == kNobody && (is_reported_ || !was_interrupted(now))) return;
    note_fault(now);
    if (first == kNobody) {
      if (others_have_spoken(now)) tell(interruption(now));
      return;
    }
    RankFacts& failed = now[static_cast<std::size_t>(first)];
    if (failed.end.kind == Ending::terminated && !others_have_ended(now)) return;
    if (!failed.is_gone && !others_have_spoken(now)) return;
    if (may_follow(now, first) && now_ns() < news_ns_ + kLetBury) return;
    if (failed.is_gone && failed.end.kind == Ending::none) learn_how(first, failed);
    const auto time = failed.end.kind != Ending::none ? failed.end.time_ns
                                                      : std::max(failed.gone_ns, failed.leaving_ns);
    ranks_[static_cast<std::size_t>(first)].is_reported = true;
    tell(report(now, first, ops_, time));
    ops_.clear();
  }

  void tell(const std::string& text) {
    write_out("\n" + text);
    for (Watched& w : ranks_) w.page->is_reported.store(1);
    is_reported_ = true;
  }

  // At the first sign of a fault, keep what every rank was doing: soon they will have raised.
  void note_fault(const std::vector<RankFacts>& now) {
    if (fault_ns_ == 0) fault_ns_ = now_ns();
    if (!ops_.empty()) return;
    news_ns_ = now_ns();
    for (const RankFacts& each : now) ops_.push_back(each.op);
  }

  // A failed rank that still runs waits for the report, so there is time to let the others say
  // their line first. When a process has died, the launcher closes the output in a moment.
  bool others_have_spoken(const std::vector<RankFacts>& now) const {
    return now_ns() > news_ns_ + kLetSpeak ||
           std::all_of(now.begin(), now.end(), [](const RankFacts& f) {
             return f.is_gone || f.end.kind != Ending::none || f.op.state != OpState::running;
           });
  }

  // Who terminates one rank mostly terminates them all, and each takes a moment to hear of it.
  bool others_have_ended(const std::vector<RankFacts>& now) const {
    return now_ns() > news_ns_ + std::min(kLetEnd, grace_ns_ / 2) ||
           std::all_of(now.begin(), now.end(), [](const RankFacts& f) {
             return f.is_gone || f.end.kind != Ending::none || f.state == State::left;
           });
  }

  // The kernel says how a process ended only after its parent has waited for it, which is soon.
  void learn_how(int index, RankFacts& failed) {
    Watched& w = ranks_[static_cast<std::size_t>(index)];
    const std::int64_t deadline = now_ns() + kReapWait;
    while (w.killed_by == 0 && w.page->exit_code.load() < 0 && now_ns() < deadline) {
      w.ask_kernel_how();
      usleep(500);
    }
    failed.killed_by = w.killed_by;
    failed.exit_code = w.page->exit_code.load();
  }

  // Under fault tolerance only a failed rank that lingers is ended, for MPI reports no other death;
  // and a stopped one when no other is left.
  void end_the_rest() {
    const std::int64_t now = now_ns();
    for (Watched& w : ranks_) {
      if (w.is_gone) continue;
      const EndView end = w.page.end();
      const bool has_failed = end.kind == Ending::exception || !w.replaced_by.empty();
      const bool lingers = has_failed && now >= std::max(end.time_ns, w.closed_ns) + grace_ns_;
      if (fault_tolerant_ && !lingers && !(is_last(w) && is_stopped(w))) continue;
      if (w.term_ns == 0) {
        w.term_ns = now;
        pidfd_kill(w.pidfd, SIGTERM);
        pidfd_kill(w.pidfd, SIGCONT);  // a stopped process dies only when it runs
      } else if (now > w.term_ns + kTermToKill) {
        pidfd_kill(w.pidfd, SIGKILL);
      }
    }
  }

  // What a rank that ended well has left running is there on purpose.
  void end_orphans() {
    if (!is_reported_) return;
    std::vector<Parent> dead;
    for (const Watched& w : ranks_)
      if (w.is_gone && (w.is_reported || !ended_well(w.facts()))) dead.push_back(w.parent);
    const std::string said = orphans_.end_those_of(dead, orphan_grace_ns());
    if (!said.empty()) write_out(said);
  }

  std::int64_t orphan_grace_ns() const { return std::min(grace_ns_, kOrphanGrace); }

  void end_all_orphans() {
    const std::int64_t deadline = now_ns() + orphan_grace_ns() + kLetDie;
    for (end_orphans(); orphans_.remain() && now_ns() < deadline; end_orphans())
      usleep(kTickMs * 1000);
  }

  bool is_last(const Watched& w) const {
    return now_ns() > last_gone_ns_ + grace_ns_ &&
           std::all_of(ranks_.begin(), ranks_.end(),
                       [&](const Watched& other) { return &other == &w || other.is_gone; });
  }

  static bool is_stopped(const Watched& w) {
    const auto process = process_of(w.page->pid);
    return process && process->state == 'T';
  }

  void wait_until_reaped() {
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      RankFacts unused;
      if (ranks_[i].is_gone && ranks_[i].page.end().kind == Ending::none && !is_reported_)
        learn_how(static_cast<int>(i), unused);
    }
  }

  // The launcher of MPICH takes the codes of the ranks that it has killed for 0, but for those that it
  // waits for while output of the job is open: one for each time that there is something to read. So
  // where the first that failed may have ended with 0, it is given empty lines until it has waited
  // for another.
  void hold_output_open() const {
    const auto is_culprit_with_0 = [](const Watched& w) {
      return w.is_reported && w.killed_by == 0 && w.page->exit_code.load() <= 0;
    };
    if (std::none_of(ranks_.begin(), ranks_.end(), is_culprit_with_0)) return;
    const auto has_bad_code = [](const Watched& w) {
      return w.is_gone && !w.is_reported && w.page->exit_code.load() != 0 && w.was_waited_for();
    };
    const std::int64_t deadline = now_ns() + kLetReap;
    unsigned pause_us = 2000;
    while (now_ns() < deadline && std::none_of(ranks_.begin(), ranks_.end(), has_bad_code)) {
      write_out("\n");
      usleep(pause_us = std::min(2 * pause_us, 100'000u));
    }
  }

  void remove_segments() const {
    const bool all_gone = std::all_of(ranks_.begin(), ranks_.end(),
                                      [](const Watched& w) { return w.is_gone; });
    if (!all_gone) return;  // they left in order, and MPI_Finalize does this
    remove_files(segments_);
  }

  static void write_out(const std::string& text) {
    std::size_t done = 0;
    while (done < text.size()) {
      const ssize_t n = write(STDERR_FILENO, text.data() + done, text.size() - done);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return;
      done += static_cast<std::size_t>(n);
    }
  }

  std::vector<Watched> ranks_;
  std::int64_t grace_ns_;
  bool fault_tolerant_;
  std::vector<OpView> ops_;
  int epoll_ = epoll_create1(EPOLL_CLOEXEC);
  std::int64_t fault_ns_ = 0, news_ns_ = 0, last_gone_ns_ = 0;
  bool is_reported_ = false;
  std::set<std::string> segments_;
  Orphans orphans_;
};

Watched watched(const char* argument) {
  int pid = 0, fd = 0;
  unsigned long long nonce = 0;
  if (std::sscanf(argument, "%d:%d:%llu", &pid, &fd, &nonce) != 3)
    throw std::runtime_error(std::string("not PID:FD:NONCE: ") + argument);
  const int pidfd = pidfd_open(pid);  // before the page, whose nonce then proves whose it is
  MappedPage page = MappedPage::open(pid, fd, nonce);
  const Parent parent = parent_of(page->rank, pid, fd, page.fd());
  return {std::move(page), pidfd, parent};
}

int run(int argc, char** argv) {
  if (argc < 4) throw std::runtime_error("usage: GRACE_MS FAULT_TOLERANT PID:FD:NONCE ...");
  for (const int signal : {SIGHUP, SIGINT, SIGTERM, SIGPIPE}) std::signal(signal, SIG_IGN);
  std::vector<Watched> ranks;
  for (int i = 3; i < argc; ++i) ranks.push_back(watched(argv[i]));
  Guardian guardian(std::move(ranks), std::atol(argv[1]) * kMs, std::atol(argv[2]) != 0);
  const ssize_t told = write(STDOUT_FILENO, "w", 1);
  close(STDOUT_FILENO);
  if (told != 1) return 1;
  guardian.watch();
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
