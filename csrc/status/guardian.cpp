// ringcomm-guardian: watches the ranks of one node, says which failed first and how, and ends what
// is left of them, so that the launcher's exit code is not 0.
//
// A process of its own, in its own session, because a rank cannot report its own SIGKILL, and
// because a launcher that kills the job must not kill the reporter. It has no MPI and no port.
//
//   ringcomm-guardian GRACE_MS FAULT_TOLERANT(0|1) HYDRA(0|1) RECORD PID:FD:NONCE[:PAGE:LIFELINE] ...
//
// RECORD is the file for `ringcomm run` (run_records.hpp), which then prints the report; "": none.
// FD is of that process; PAGE and LIFELINE are descriptors that this one was given.
// Writes one byte to stdout when it watches, and the report to stderr. Goes with the last rank.
#include <poll.h>
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

#include "outliving_processes.hpp"
#include "page.hpp"
#include "pidfd.hpp"
#include "processes.hpp"
#include "report.hpp"
#include "run_records.hpp"
#include "mpi_shm_files.hpp"

namespace ringcomm {
namespace {

constexpr int kTickMs = 20;
constexpr std::int64_t kMs = 1'000'000;
constexpr std::int64_t kTermToKill = 500 * kMs;
constexpr std::int64_t kReapWait = 500 * kMs;
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

bool has_hung_up(int fd) {
  pollfd end{fd, 0, 0};
  return poll(&end, 1, 0) > 0;
}

struct Watched {
  MappedPage page;
  int pidfd;            // -1 if it is gone, or the kernel has none
  Descriptor lifeline;  // none if it is gone
  Parent parent;
  bool is_gone;
  std::int64_t closed_ns = 0;
  bool is_closing_explained = false;
  std::string replaced_by{};
  int killed_by = 0;
  bool is_reported = false;
  std::int64_t term_ns = 0;  // when it was asked to end

  // What /proc says, for want of a pidfd.
  bool lives() const {
    const auto process = process_of(page->pid);
    return process && process->start_ticks == parent.start_ticks && process->state != 'Z' &&
           process->state != 'X';
  }

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
    if (closed_ns == 0 || is_gone || is_closing_explained || monotonic_ns() < closed_ns + kLetBury) return;
    const Image image = image_of(page->pid);
    const auto process = process_of(page->pid);
    is_closing_explained = image != Image::none && process;
    if (is_closing_explained && image == Image::without_page) replaced_by = process->name;
  }

  bool was_waited_for() const {
    if (pidfd < 0) return !process_of(page->pid);
    return syscall(SYS_pidfd_send_signal, pidfd, 0, nullptr, 0) != 0 && errno == ESRCH;
  }

  RankFacts facts() const {
    RankFacts f;
    f.rank = page->rank;
    f.pid = page->pid;
    f.host = page->host;
    f.role = page->role;
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
  Guardian(std::vector<Watched> ranks, std::int64_t grace_ns, bool fault_tolerant,
           bool is_hydra, GuardianRecord record)
      : ranks_(std::move(ranks)),
        grace_ns_(grace_ns),
        fault_tolerant_(fault_tolerant),
        is_hydra_(is_hydra),
        record_(std::move(record)) {
    if (epoll_ < 0) throw std::runtime_error(std::string("epoll: ") + std::strerror(errno));
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      Watched& w = ranks_[i];
      segments_.merge(mpi_segments_of(w.page->pid));
      w.page->is_guarded.store(1);
      epoll_event event{};
      event.events = EPOLLIN;
      event.data.u64 = i;
      if (w.is_gone) note_gone(w);
      if (w.pidfd >= 0) await(w.pidfd, event);
      event.events = 0;  // a hang-up is told all the same
      event.data.u64 = i + ranks_.size();
      if (w.lifeline.get() >= 0) await(w.lifeline.get(), event);
    }
  }

  void watch() {
    while (!all_done()) {
      wait_for_news();
      report_fault();
      if (is_reported_) release_the_reported();
      if (fault_ns_ != 0 && monotonic_ns() > fault_ns_ + grace_ns_) end_the_rest();
      end_orphans();
    }
    wait_until_reaped();
    while (report_fault()) continue;  // `ringcomm run` judges by how each rank ended
    remove_segments();
    end_all_orphans();
    if (is_hydra_) hold_output_open();
    record_.end();
  }

 private:
  void await(int fd, epoll_event& event) {
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) throw_errno("epoll_ctl");
  }

  // Where the job goes on after a death, nobody calls MPI_Finalize, so this process stays until all
  // are gone, and removes MPI's files then.
  bool all_done() const {
    const auto has_left = [](const Watched& w) { return w.page->state.load() == State::left; };
    const bool goes_on = fault_tolerant_ && std::any_of(ranks_.begin(), ranks_.end(), [&](const Watched& w) {
      return w.is_gone && !has_left(w);
    });
    return std::all_of(ranks_.begin(), ranks_.end(), [&](const Watched& w) {
      return w.is_gone || (!goes_on && has_left(w));
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
    for (Watched& w : ranks_)
      if (w.pidfd < 0 && w.closed_ns != 0 && !w.is_gone && !w.lives()) note_gone(w);
  }

  void note_closed(Watched& w) {
    last_gone_ns_ = std::max(monotonic_ns(), last_gone_ns_ + 1);
    w.closed_ns = last_gone_ns_;
    epoll_ctl(epoll_, EPOLL_CTL_DEL, w.lifeline.get(), nullptr);
  }

  void note_gone(Watched& w) {
    w.is_gone = true;
    last_gone_ns_ = std::max(monotonic_ns(), last_gone_ns_ + 1);
    w.page->gone_ns.store(last_gone_ns_);
    if (w.pidfd >= 0) epoll_ctl(epoll_, EPOLL_CTL_DEL, w.pidfd, nullptr);
  }

  std::vector<RankFacts> facts() {
    std::vector<RankFacts> all;
    for (Watched& w : ranks_) {
      if (w.is_gone) w.ask_kernel_how();
      w.see_exec();
      all.push_back(w.facts());
      // Hydra kills the others as soon as it sees that one has followed its SIGTERM. Who starts ranks
      // by other means may well stop one of them alone.
      all.back().end.is_by_parent &= is_hydra_;
    }
    return all;
  }

  // The first fault is the job's; under fault tolerance the job goes on, and each fault is news. False if
  // there is none to report now.
  bool report_fault() {
    if (is_reported_ && !fault_tolerant_) return false;
    auto now = facts();
    for (std::size_t i = 0; i < now.size(); ++i)
      if (is_reported_ && ranks_[i].is_reported) now[i] = RankFacts{};
    const int first = culprit(now);
    if (first == kNobody && !was_interrupted(now)) return false;
    note_fault(now);
    if (first == kNobody) {
      if (!others_have_spoken(now)) return false;
      tell(interruption(now), now[static_cast<std::size_t>(interrupted(now).front())], kNobody);
      record_too(now, interrupted(now));
      ops_.clear();
      return true;
    }
    RankFacts& failed = now[static_cast<std::size_t>(first)];
    if (failed.end.kind == Ending::terminated && !others_have_ended(now)) return false;
    if (!failed.is_gone && !others_have_spoken(now)) return false;
    if (may_follow(now, first) && monotonic_ns() < news_ns_ + kLetBury) return false;
    if (failed.is_gone && failed.end.kind == Ending::none) learn_how(first, failed, monotonic_ns() + kReapWait);
    const auto time = failed.end.kind != Ending::none ? failed.end.time_ns
                                                      : std::max(failed.gone_ns, failed.leaving_ns);
    ranks_[static_cast<std::size_t>(first)].is_reported = true;
    tell(report(now, first, ops_, time), failed, failed.rank);
    record_too(now, alike(now, first));
    ops_.clear();
    return true;
  }

  // Where the job goes on, how these ended counts, too, and what was told names them.
  void record_too(const std::vector<RankFacts>& now, const std::vector<int>& others) {
    if (!fault_tolerant_) return;
    for (const int i : others) {
      const RankFacts& each = now[static_cast<std::size_t>(i)];
      ranks_[static_cast<std::size_t>(i)].is_reported = true;
      record_.report(each.rank, code_of(each), evidence_of(each), time_of_failure(each), "");
    }
    release_the_reported();
  }

  void tell(const std::string& text, const RankFacts& failed, int rank) {
    const bool is_recorded = record_.report(rank, code_of(failed), evidence_of(failed),
                                            time_of_failure(failed), text);
    if (!is_recorded) write_out("\n" + text);
    is_reported_ = true;
    release_the_reported();
  }

  // Lets the ranks go whose failure is reported, or that only followed or were stopped. Where the job
  // goes on, one that fails later waits for a report of its own.
  void release_the_reported() {
    for (Watched& w : ranks_) {
      const Ending kind = w.page.end().kind;
      const bool is_secondary = kind == Ending::peer_failed || kind == Ending::interrupted ||
                                kind == Ending::terminated;
      if (!fault_tolerant_ || w.is_reported || is_secondary) w.page->is_reported.store(1);
    }
  }

  // At the first sign of a fault, keep what every rank was doing: soon they will have raised.
  void note_fault(const std::vector<RankFacts>& now) {
    if (fault_ns_ == 0) fault_ns_ = monotonic_ns();
    if (!ops_.empty()) return;
    news_ns_ = monotonic_ns();
    for (const RankFacts& each : now) ops_.push_back(each.op);
  }

  // A failed rank that still runs waits for the report, so there is time to let the others say
  // their line first, or fail alike. When a process has died, the launcher closes the output in a moment.
  bool others_have_spoken(const std::vector<RankFacts>& now) const {
    return monotonic_ns() > news_ns_ + kLetSpeak ||
           all_others(now, [](const RankFacts& f) { return f.is_gone || f.end.kind != Ending::none; });
  }

  // Who terminates one rank mostly terminates them all, and each takes a moment to hear of it.
  bool others_have_ended(const std::vector<RankFacts>& now) const {
    return monotonic_ns() > news_ns_ + std::min(kLetEnd, grace_ns_ / 2) ||
           all_others(now, [](const RankFacts& f) {
             return f.is_gone || f.end.kind != Ending::none || f.state == State::left;
           });
  }

  // True if all ranks are so of which nothing is reported yet.
  template <class Is>
  bool all_others(const std::vector<RankFacts>& now, Is is_so) const {
    for (std::size_t i = 0; i < now.size(); ++i)
      if (!ranks_[i].is_reported && !is_so(now[i])) return false;
    return true;
  }

  // The kernel says how a process ended only after its parent has waited for it, which is soon, unless
  // the host is busy. Before Linux 6.15 it never says.
  void learn_how(int index, RankFacts& failed, std::int64_t deadline) {
    Watched& w = ranks_[static_cast<std::size_t>(index)];
    bool is_waited_for = false;
    while (w.killed_by == 0 && w.page->exit_code.load() < 0 && !is_waited_for && monotonic_ns() < deadline) {
      is_waited_for = w.was_waited_for();
      w.ask_kernel_how();
      usleep(500);
    }
    failed.killed_by = w.killed_by;
    failed.exit_code = w.page->exit_code.load();
  }

  // Under fault tolerance only a failed rank that lingers is ended, for MPI reports no other death;
  // and a stopped one when no other is at work.
  void end_the_rest() {
    const std::int64_t now = monotonic_ns();
    for (Watched& w : ranks_) {
      if (w.is_gone) continue;
      const EndView end = w.page.end();
      const bool has_failed = end.kind == Ending::exception || !w.replaced_by.empty();
      const bool lingers = has_failed && now >= std::max(end.time_ns, w.closed_ns) + grace_ns_;
      if (fault_tolerant_ && !lingers && !(is_last(w) && is_stopped(w))) continue;
      if (w.term_ns == 0) {
        w.term_ns = now;
        send_signal(w, SIGTERM);
        send_signal(w, SIGCONT);  // a stopped process dies only when it runs
      } else if (now > w.term_ns + kTermToKill) {
        send_signal(w, SIGKILL);
      }
    }
  }

  // Without pidfds: an exec closes the lifeline, too, and the number may be another's by now.
  static void send_signal(const Watched& w, int signal) {
    if (w.pidfd >= 0)
      syscall(SYS_pidfd_send_signal, w.pidfd, signal, nullptr, 0);
    else if (w.lives())
      kill(w.page->pid, signal);
  }

  // What a rank that ended well has left running is there on purpose.
  void end_orphans() {
    if (!is_reported_) return;
    std::vector<Parent> dead;
    for (const Watched& w : ranks_)
      if (w.is_gone && (w.is_reported || !ended_well(w.facts()))) dead.push_back(w.parent);
    const std::string said = orphans_.end_those_of(dead, orphan_grace_ns());
    if (!said.empty() && !record_.note(said)) write_out(said);
  }

  std::int64_t orphan_grace_ns() const { return std::min(grace_ns_, kOrphanGrace); }

  void end_all_orphans() {
    const std::int64_t deadline = monotonic_ns() + orphan_grace_ns() + kLetDie;
    for (end_orphans(); orphans_.remain() && monotonic_ns() < deadline; end_orphans())
      usleep(kTickMs * 1000);
  }

  // True if no other rank works: each is gone, is stopped, or is a spare that waits for a place.
  bool is_last(const Watched& w) const {
    const auto is_idle = [&](const Watched& other) {
      const bool is_spare = other.page->state.load() == State::starting;
      return &other == &w || other.is_gone || is_spare || is_stopped(other);
    };
    return monotonic_ns() > last_gone_ns_ + grace_ns_ && last_gone_ns_ != 0 &&
           std::all_of(ranks_.begin(), ranks_.end(), is_idle);
  }

  static bool is_stopped(const Watched& w) {
    const auto process = process_of(w.page->pid);
    return process && process->state == 'T';
  }

  void wait_until_reaped() {
    const std::int64_t deadline = monotonic_ns() + kReapWait;
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      RankFacts unused;
      if (ranks_[i].is_gone && ranks_[i].page.end().kind == Ending::none && !is_reported_)
        learn_how(static_cast<int>(i), unused, deadline);
    }
  }

  // Hydra, the launcher of MPICH, takes the codes of the ranks that it has killed for 0, but for those that it
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
    const std::int64_t deadline = monotonic_ns() + kLetReap;
    unsigned pause_us = 2000;
    while (monotonic_ns() < deadline && std::none_of(ranks_.begin(), ranks_.end(), has_bad_code)) {
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
  bool is_hydra_;
  GuardianRecord record_;
  std::vector<OpView> ops_;
  int epoll_ = epoll_create1(EPOLL_CLOEXEC);
  std::int64_t fault_ns_ = 0, news_ns_ = 0, last_gone_ns_ = 0;
  bool is_reported_ = false;
  std::set<std::string> segments_;
  Orphans orphans_;
};

// None if there is no such process, or no pidfds. Other trouble is no reason to believe that it is dead.
Descriptor pidfd_or_none(int pid) {
  try {
    return open_pidfd(pid);
  } catch (const std::system_error& error) {
    const int why = error.code().value();
    if (why != ESRCH && why != ENOSYS && why != EPERM) throw;
    return Descriptor();
  }
}

Descriptor lifeline_or_none(const MappedPage& page, int pid) {
  try {
    return page.open_lifeline(pid);
  } catch (const std::system_error&) {  // it has died since
    return Descriptor();
  }
}

// Whose number it is, is proved after the pidfd is there: by the nonce of a page that was opened by the
// number, or by a lifeline that was handed over and is still open.
Watched watched(const char* argument) {
  int pid = 0, fd = 0, page_fd = -1, lifeline_fd = -1;
  unsigned long long nonce = 0;
  if (std::sscanf(argument, "%d:%d:%llu:%d:%d", &pid, &fd, &nonce, &page_fd, &lifeline_fd) < 3)
    throw std::runtime_error(std::string("not PID:FD:NONCE[:PAGE:LIFELINE]: ") + argument);
  Descriptor pidfd = pidfd_or_none(pid);
  const bool is_handed = lifeline_fd >= 0;
  MappedPage page = is_handed ? MappedPage::adopt(Descriptor(page_fd), nonce)
                              : MappedPage::open(pid, fd, nonce);
  Descriptor lifeline = is_handed ? Descriptor(lifeline_fd) : lifeline_or_none(page, pid);
  const bool has_end = lifeline.get() >= 0 && !has_hung_up(lifeline.get());
  const bool is_gone = !has_end && (is_handed || pidfd.get() < 0);
  if (is_gone) pidfd.reset();
  const Parent parent = parent_of(page->rank, pid, fd, page.fd());
  return {std::move(page), pidfd.release(), std::move(lifeline), parent, is_gone};
}

int run(int argc, char** argv) {
  if (argc < 6)
    throw std::runtime_error(
        "usage: GRACE_MS FAULT_TOLERANT HYDRA RECORD PID:FD:NONCE[:PAGE:LIFELINE] ...");
  // Slurm sends what a user chooses to all processes of a step.
  for (const int signal : {SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGPIPE, SIGALRM, SIGTERM})
    std::signal(signal, SIG_IGN);
  std::vector<Watched> ranks;
  for (int i = 5; i < argc; ++i) ranks.push_back(watched(argv[i]));
  Guardian guardian(std::move(ranks), std::atol(argv[1]) * kMs, std::atol(argv[2]) != 0,
                    std::atol(argv[3]) != 0, GuardianRecord(argv[4]));
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
