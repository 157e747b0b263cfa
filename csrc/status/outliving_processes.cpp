#include "outliving_processes.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <utility>

#include "page.hpp"

namespace ringcomm {
namespace {

constexpr std::int64_t kLookEvery = 100'000'000;
constexpr std::size_t kMostNamed = 4;

// Forks have it under the rank's own number; other ranks, which have opened it, under another.
bool has_page_of(int pid, const Parent& parent) {
  const std::string path =
      "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(parent.page_fd);
  struct stat facts {};
  return stat(path.c_str(), &facts) == 0 && facts.st_ino == parent.page &&
         facts.st_dev == parent.page_device;
}

std::string names_of(const std::vector<Process>& processes) {
  std::string out;
  for (std::size_t i = 0; i < processes.size(); ++i) {
    if (i == kMostNamed) return out + ", ... (" + std::to_string(processes.size()) + " in all)";
    out += (i == 0 ? "" : ", ") + processes[i].name + " " + std::to_string(processes[i].pid);
  }
  return out;
}

std::string line(const char* what, const Parent& parent, const std::vector<Process>& processes) {
  if (processes.empty()) return "";
  return "  rank " + std::to_string(parent.rank) + " had started, " + what + ": " +
         names_of(processes) + "\n";
}

void end(int pid, bool is_new, bool is_late) {
  if (is_new) kill(pid, SIGTERM);
  if (is_new) kill(pid, SIGCONT);  // a stopped process dies only when it runs
  if (is_late) kill(pid, SIGKILL);
}

}  // namespace

Parent parent_of(int rank, int pid, int page_fd, int own_page_fd) {
  Parent parent;
  parent.rank = rank;
  parent.pid = pid;
  parent.page_fd = page_fd;
  struct stat facts {};
  if (fstat(own_page_fd, &facts) == 0) {
    parent.page_device = facts.st_dev;
    parent.page = facts.st_ino;
  }
  if (const auto process = process_of(pid)) {
    parent.session = process->session;
    parent.leads_group = process->group == pid;
    parent.start_ticks = process->start_ticks;
  }
  return parent;
}

Descent descent_of(const Process& process, const Parent& parent) {
  if (process.pid == parent.pid || process.start_ticks < parent.start_ticks) return Descent::none;
  const bool is_attached = process.session == parent.session;
  if (is_attached && parent.leads_group && process.group == parent.pid) return Descent::attached;
  // Set by launched/child_marks.py for what a rank starts.
  const std::string mark = "RINGCOMM_RANK_PROCESS=" + std::to_string(parent.pid) + " ";
  if (!has_page_of(process.pid, parent) && !was_started_with(process.pid, mark))
    return Descent::none;
  return is_attached ? Descent::attached : Descent::detached;
}

std::string Orphans::end_those_of(const std::vector<Parent>& dead, std::int64_t kill_after_ns) {
  const auto is_settled = [this](const Parent& each) { return settled_.count(each.pid) != 0; };
  if (monotonic_ns() < next_look_ns_ || std::all_of(dead.begin(), dead.end(), is_settled)) return "";
  next_look_ns_ = monotonic_ns() + kLookEvery;
  const auto asked_before = std::exchange(asked_, {});
  const auto processes = all_processes();
  std::string said;
  for (const Parent& parent : dead) {
    if (is_settled(parent)) continue;
    bool is_left_alone = true;
    std::vector<Process> ended, left;
    for (const Process& each : processes) {
      if (each.pid == getpid() || each.state == 'Z' || each.state == 'X') continue;
      const Descent descent = descent_of(each, parent);
      const auto before = asked_before.find(each.pid);
      const bool is_new = before == asked_before.end();
      if (descent == Descent::detached && detached_.insert(each.pid).second) left.push_back(each);
      if (descent != Descent::attached) continue;
      is_left_alone = false;
      asked_[each.pid] = is_new ? monotonic_ns() : before->second;
      if (is_new) ended.push_back(each);
      end(each.pid, is_new, monotonic_ns() - asked_[each.pid] > kill_after_ns);
    }
    if (is_left_alone) settled_.insert(parent.pid);
    said += line("and is ended with it", parent, ended) +
            line("in a session of its own, and runs on", parent, left);
  }
  return said;
}

}  // namespace ringcomm
