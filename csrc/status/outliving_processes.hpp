// What a rank has started and outlives it: the workers of a pool, subprocesses. A launcher waits for
// all who hold the job's output, so a job of which a rank was killed might never end.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "processes.hpp"

namespace ringcomm {

// How to know the processes that a rank has started once it is dead, and init is their parent.
struct Parent {
  int rank = 0, pid = 0, session = 0;
  bool leads_group = false;  // launchers give each rank a process group, and its children are in it
  unsigned long long start_ticks = 0;
  int page_fd = -1;  // forks have the rank's descriptors
  dev_t page_device = 0;
  ino_t page = 0;
};

// Of a rank that lives; own_page_fd is this process's descriptor of its status page.
Parent parent_of(int rank, int pid, int page_fd, int own_page_fd);

enum class Descent {
  none,
  attached,
  detached,  // in a session of its own, as a daemon is
};

Descent descent_of(const Process& process, const Parent& parent);

class Orphans {
 public:
  // Ends what these ranks, which are dead, have started, by SIGTERM and, kill_after_ns later, by
  // SIGKILL; what is detached is left alone. Looks at most ten times a second, and no more once nothing
  // is left of a rank. Returns what there is to say of those that were not seen before, in lines of the
  // report.
  std::string end_those_of(const std::vector<Parent>& dead, std::int64_t kill_after_ns);

  // True if some were there at the last look.
  bool remain() const { return !asked_.empty(); }

 private:
  std::map<int, std::int64_t> asked_;  // by pid: when it was asked to end
  std::set<int> detached_;             // pids
  std::set<int> settled_;              // pids of ranks of which nothing is left
  std::int64_t next_look_ns_ = 0;
};

}  // namespace ringcomm
