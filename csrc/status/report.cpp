#include "report.hpp"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <utility>

namespace ringcomm {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
constexpr std::size_t kMaxWhereLines = 4;
constexpr std::size_t kMaxWaiting = 3;

bool is_primary(Ending kind) {
  return kind == Ending::exception || kind == Ending::sys_exit || kind == Ending::os_exit ||
         kind == Ending::fatal_signal || kind == Ending::mpi_abort;
}

bool left_in_order(const RankFacts& r) { return r.state == State::left && r.exit_code <= 0; }

// A launcher hears of the first death by a closed socket, and kills the others before the kernel has
// buried it: so the order in which descriptors were closed counts.
std::int64_t death_time(const RankFacts& r) { return r.closed_ns != 0 ? r.closed_ns : r.gone_ns; }

// When this rank failed of its own accord; kNever if it did not.
std::int64_t failure_time(const RankFacts& r) {
  if (is_primary(r.end.kind)) return r.end.time_ns;
  const bool is_lost = r.is_gone || !r.replaced_by.empty();
  if (!is_lost || left_in_order(r)) return kNever;
  if (r.end.kind != Ending::none) return kNever;
  if (r.exit_code > 0) return r.leaving_ns != 0 ? r.leaving_ns : death_time(r);
  return r.exit_code == 0 && r.leaving_ns != 0 ? kNever : death_time(r);
}

// When this rank was told to end by SIGTERM or Ctrl-C; kNever if it was not.
std::int64_t interruption_time(const RankFacts& r) {
  const bool was = r.end.kind == Ending::interrupted || r.end.kind == Ending::terminated;
  return was ? r.end.time_ns : kNever;
}

// True if others had given up waiting for this rank, which was at its end, before it died: a launcher
// kills it as soon as one of them has ended.
bool was_given_up(const std::vector<RankFacts>& ranks, const RankFacts& r) {
  if (r.leaving_ns == 0 || r.end.kind != Ending::none) return false;
  return std::any_of(ranks.begin(), ranks.end(), [&](const RankFacts& other) {
    return other.end.kind == Ending::peer_failed && other.end.code == r.rank &&
           r.leaving_ns < other.end.time_ns && other.end.time_ns < death_time(r);
  });
}

// True if this rank died without a record, and before each that was told to end: a launcher that
// stops a job may kill, in the end, one that had no time to record SIGTERM.
bool died_before_the_stopped(const std::vector<RankFacts>& ranks, int index) {
  const RankFacts& r = ranks[static_cast<std::size_t>(index)];
  if (r.end.kind != Ending::none) return false;
  return std::none_of(ranks.begin(), ranks.end(), [&](const RankFacts& other) {
    const bool is_dead = other.closed_ns != 0 || other.gone_ns != 0;
    return interruption_time(other) != kNever && is_dead && death_time(other) < death_time(r);
  });
}

struct Earliest {
  int index = kNobody;
  std::int64_t time_ns = kNever;
  std::size_t count = 0;
};

template <class Time>
Earliest earliest(const std::vector<RankFacts>& ranks, Time time) {
  Earliest first;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const std::int64_t t = time(ranks[i]);
    if (t == kNever) continue;
    ++first.count;
    if (t < first.time_ns) {
      first.index = static_cast<int>(i);
      first.time_ns = t;
    }
  }
  return first;
}

int index_of(const std::vector<RankFacts>& ranks, int rank) {
  for (std::size_t i = 0; i < ranks.size(); ++i)
    if (ranks[i].rank == rank) return static_cast<int>(i);
  return kNobody;
}

// Nobody failed outright: the one that left while others still waited for it.
int blamed(const std::vector<RankFacts>& ranks) {
  for (const RankFacts& r : ranks) {
    if (r.end.kind != Ending::peer_failed) continue;
    const int i = index_of(ranks, r.end.code);
    if (i == kNobody) continue;
    const RankFacts& left = ranks[static_cast<std::size_t>(i)];
    if (left.leaving_ns != 0 && left.end.kind == Ending::none) return i;
  }
  return kNobody;
}

// glibc names them from 2.32 on (sigabbrev_np), and wheels are made for 2.28.
constexpr std::pair<int, const char*> kSignalNames[] = {
    {SIGHUP, "SIGHUP"}, {SIGINT, "SIGINT"}, {SIGQUIT, "SIGQUIT"}, {SIGILL, "SIGILL"},
    {SIGTRAP, "SIGTRAP"}, {SIGABRT, "SIGABRT"}, {SIGBUS, "SIGBUS"}, {SIGFPE, "SIGFPE"},
    {SIGKILL, "SIGKILL"}, {SIGUSR1, "SIGUSR1"}, {SIGSEGV, "SIGSEGV"}, {SIGUSR2, "SIGUSR2"},
    {SIGPIPE, "SIGPIPE"}, {SIGALRM, "SIGALRM"}, {SIGTERM, "SIGTERM"}, {SIGCHLD, "SIGCHLD"},
    {SIGCONT, "SIGCONT"}, {SIGSTOP, "SIGSTOP"}, {SIGTSTP, "SIGTSTP"}, {SIGTTIN, "SIGTTIN"},
    {SIGTTOU, "SIGTTOU"}, {SIGURG, "SIGURG"}, {SIGXCPU, "SIGXCPU"}, {SIGXFSZ, "SIGXFSZ"},
    {SIGVTALRM, "SIGVTALRM"}, {SIGPROF, "SIGPROF"}, {SIGWINCH, "SIGWINCH"}, {SIGIO, "SIGIO"},
    {SIGPWR, "SIGPWR"}, {SIGSYS, "SIGSYS"}};

std::string name_of(int signal) {
  for (const auto& [number, name] : kSignalNames)
    if (number == signal) return name;
  return "signal " + std::to_string(signal);
}

std::string amount(std::uint64_t nbytes) {
  static const char* const units[] = {"B", "kB", "MB", "GB", "TB"};
  double value = static_cast<double>(nbytes);
  int unit = 0;
  while (value >= 1000 && unit < 4) {
    value /= 1000;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
  return text;
}

std::string who(const RankFacts& r) {
  // "rank 3" is the place in the job that another process has taken.
  const bool is_told = !r.role.empty() && r.role.rfind("rank ", 0) != 0;
  return "rank " + std::to_string(r.rank) + " (host " + r.host + ", pid " + std::to_string(r.pid) +
         ")" + (is_told ? ", " + r.role + "," : "");
}

std::string after_step(const RankFacts& r) {
  return r.step == 0 ? "" : " after step " + std::to_string(r.step);
}

std::string left_early(const RankFacts& r) {
  return "left the job" + after_step(r) + " while others waited for it";
}

std::string deed(const RankFacts& r) {
  const std::string code = std::to_string(r.end.code);
  switch (r.end.kind) {
    case Ending::exception:
      return "raised " + r.end.what + after_step(r) + " - exit " + code;
    case Ending::sys_exit:
      return "called sys.exit" + after_step(r) + " - exit " + code;
    case Ending::os_exit:
      return "called os._exit(" + code + ") before ringcomm.shutdown()" + after_step(r);
    case Ending::mpi_abort:
      return "called MPI_Abort(" + code + ")" + after_step(r);
    case Ending::terminated:
      return "was ended by SIGTERM" + after_step(r);
    case Ending::fatal_signal:
      return "died of " + name_of(r.end.code) + after_step(r);
    default:
      break;
  }
  if (!r.replaced_by.empty())
    return "became another program (exec of " + r.replaced_by + ")" + after_step(r);
  if (r.killed_by == SIGKILL)
    return "was killed by SIGKILL (out of memory?)" + after_step(r);
  if (r.killed_by != 0) return "was killed by " + name_of(r.killed_by) + after_step(r);
  const std::string exit = " - exit " + std::to_string(r.exit_code);
  if (r.exit_code > 0 && r.leaving_ns != 0) return "ended" + after_step(r) + exit;
  if (r.exit_code > 0)
    return "was ended inside C code" + after_step(r) + exit +
           " (MPI does so when another host fails: see that host's report)";
  if (r.exit_code == 0 && r.leaving_ns == 0)
    return "ended in its middle" + after_step(r) + " - exit 0 (exit, _exit or exec in C code)";
  if (r.leaving_ns != 0) return left_early(r);
  return "ended without a word (SIGKILL, out of memory, _exit or exec in C code)" + after_step(r);
}

std::string where_lines(const std::string& where) {
  std::string out;
  std::size_t start = 0;
  for (std::size_t n = 0; n < kMaxWhereLines && start < where.size(); ++n) {
    const std::size_t stop = std::min(where.find('\n', start), where.size());
    out += "    " + where.substr(start, stop - start) + "\n";
    start = stop + 1;
  }
  return out;
}

std::string rank_list(const std::vector<int>& ranks) {
  std::string out = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i == 16) return out + ",... (" + std::to_string(ranks.size()) + " in all)";
    out += (i == 0 ? "" : ",") + std::to_string(ranks[i]);
  }
  return out;
}

std::string likewise_line(const std::vector<RankFacts>& ranks, int culprit) {
  std::vector<int> others;
  for (const int i : alike(ranks, culprit)) others.push_back(ranks[static_cast<std::size_t>(i)].rank);
  return others.empty() ? "" : "  likewise: " + rank_list(others) + "\n";
}

std::string waiting_lines(const std::vector<RankFacts>& ranks, int culprit,
                          const std::vector<OpView>& ops, std::int64_t fault_ns) {
  struct Group {
    std::vector<int> ranks;
    std::int64_t start_ns = kNever;
  };
  std::map<std::pair<std::string, std::uint64_t>, Group> groups;
  const std::vector<int> likewise = alike(ranks, culprit);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const int index = static_cast<int>(i);
    if (index == culprit || ops[i].state == OpState::idle) continue;
    if (std::find(likewise.begin(), likewise.end(), index) != likewise.end()) continue;
    Group& group = groups[{ops[i].name, ops[i].nbytes}];
    group.ranks.push_back(ranks[i].rank);
    group.start_ns = std::min(group.start_ns, ops[i].start_ns);
  }
  std::string out;
  std::size_t n = 0;
  for (const auto& [op, group] : groups) {
    if (n++ == kMaxWaiting) return out + "  and in " + std::to_string(groups.size() - n + 1) +
                                   " other operations\n";
    char time[32];
    const auto waited = std::max<std::int64_t>(fault_ns - group.start_ns, 0);
    std::snprintf(time, sizeof time, "%.2f s", static_cast<double>(waited) * 1e-9);
    out += (n == 1 ? "  waiting at that moment: " : "                          ") +
           rank_list(group.ranks) + " in " + op.first +
           (op.second == 0 ? "" : " (" + amount(op.second) + ")") + " for " + time + "\n";
  }
  return out;
}

}  // namespace

bool ended_well(const RankFacts& r) {
  return left_in_order(r) || (r.exit_code == 0 && r.leaving_ns != 0);
}

bool may_follow(const std::vector<RankFacts>& ranks, int index) {
  const RankFacts& r = ranks[static_cast<std::size_t>(index)];
  if (!r.is_gone || r.end.kind != Ending::none) return false;
  return std::any_of(ranks.begin(), ranks.end(), [&](const RankFacts& other) {
    return !other.is_gone && other.closed_ns != 0 && other.closed_ns < death_time(r);
  });
}

int culprit(const std::vector<RankFacts>& ranks) {
  const Earliest failed = earliest(ranks, [&](const RankFacts& r) {
    return was_given_up(ranks, r) ? kNever : failure_time(r);
  });
  const Earliest stopped = earliest(ranks, interruption_time);
  if (stopped.index == kNobody)
    return failed.index != kNobody ? failed.index : blamed(ranks);
  if (failed.time_ns < stopped.time_ns) return failed.index;
  // A launcher stops all ranks at once; a person who stops one rank is followed by the launcher
  // with another signal. And a death without a record is seen a moment after it happened.
  const EndView& end = ranks[static_cast<std::size_t>(stopped.index)].end;
  const bool is_by_key = end.kind == Ending::interrupted;
  if (stopped.count == 1 && ranks.size() > 1 && !is_by_key && !end.is_by_parent)
    return stopped.index;
  const bool is_odd_one_out = failed.count == 1 && failed.index != kNobody &&
                              died_before_the_stopped(ranks, failed.index);
  return is_odd_one_out ? failed.index : kNobody;
}

std::vector<int> interrupted(const std::vector<RankFacts>& ranks) {
  std::vector<int> found;
  for (std::size_t i = 0; i < ranks.size(); ++i)
    if (interruption_time(ranks[i]) != kNever) found.push_back(static_cast<int>(i));
  return found;
}

bool was_interrupted(const std::vector<RankFacts>& ranks) {
  return culprit(ranks) == kNobody && !interrupted(ranks).empty();
}

std::vector<int> alike(const std::vector<RankFacts>& ranks, int culprit) {
  const RankFacts& first = ranks[static_cast<std::size_t>(culprit)];
  std::vector<int> found;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const RankFacts& r = ranks[i];
    if (static_cast<int>(i) != culprit && is_primary(r.end.kind) && r.end.kind == first.end.kind &&
        r.end.code == first.end.code && r.end.what == first.end.what && r.end.where == first.end.where)
      found.push_back(static_cast<int>(i));
  }
  return found;
}

std::string report(const std::vector<RankFacts>& ranks, int culprit,
                   const std::vector<OpView>& ops, std::int64_t fault_ns) {
  const RankFacts& first = ranks[static_cast<std::size_t>(culprit)];
  const std::string what = was_given_up(ranks, first) ? left_early(first) : deed(first);
  return "x " + who(first) + " " + what + "\n" + where_lines(first.end.where) +
         likewise_line(ranks, culprit) + waiting_lines(ranks, culprit, ops, fault_ns);
}

int code_of(const RankFacts& r) {
  const int own = r.end.code & 0xff;
  switch (r.end.kind) {
    case Ending::exception:
    case Ending::peer_failed:
      return 1;
    case Ending::sys_exit:
    case Ending::os_exit:
    case Ending::mpi_abort:
      return own != 0 ? own : 1;
    case Ending::fatal_signal:
    case Ending::terminated:
      return 128 + r.end.code;
    case Ending::interrupted:
      return 128 + SIGINT;
    case Ending::none:
      break;
  }
  if (r.killed_by != 0) return 128 + r.killed_by;
  if (r.exit_code > 0) return r.exit_code & 0xff;
  return r.exit_code < 0 && r.leaving_ns == 0 && r.replaced_by.empty() ? 0 : 1;
}

Evidence evidence_of(const RankFacts& r) {
  if (r.end.kind == Ending::mpi_abort) return Evidence::abort;
  if (r.end.kind == Ending::terminated || r.end.kind == Ending::interrupted) return Evidence::asked;
  if (r.end.kind != Ending::none || !r.replaced_by.empty()) return Evidence::own;
  if (r.killed_by == SIGKILL) return Evidence::killed;
  if (r.killed_by == SIGTERM || r.killed_by == SIGINT || r.killed_by == SIGHUP)
    return Evidence::asked;
  if (r.killed_by != 0 || r.leaving_ns != 0 || r.exit_code == 0) return Evidence::own;
  return r.exit_code > 0 ? Evidence::mpi : Evidence::silent;
}

std::int64_t time_of_failure(const RankFacts& r) {
  if (r.end.kind != Ending::none) return r.end.time_ns;
  const std::int64_t t = failure_time(r);
  return t == kNever ? r.leaving_ns : t;
}

std::string interruption(const std::vector<RankFacts>& ranks) {
  std::uint64_t step = 0;
  bool by_key = false, are_all = true;
  std::vector<int> ended;
  for (const RankFacts& r : ranks) {
    const bool is_one = interruption_time(r) != kNever;
    if (is_one) ended.push_back(r.rank);
    are_all = are_all && (is_one || r.is_gone || r.state == State::left);
    step = std::max(step, r.step);
    by_key = by_key || r.end.kind == Ending::interrupted;
  }
  const std::string who = are_all ? "the job was" : rank_list(ended) + (ended.size() > 1 ? " were" : " was");
  return "x " + who + " ended from outside (" + (by_key ? "SIGINT" : "SIGTERM") + ")" +
         (step == 0 ? "" : " after step " + std::to_string(step)) + "\n";
}

}  // namespace ringcomm
