// What /proc says of the processes of this host.
#pragma once
#include <optional>
#include <string>
#include <vector>

namespace ringcomm {

struct Process {
  int pid = 0, group = 0, session = 0;
  char state = '?';  // 'T': stopped, 'Z': dead, and its parent has not waited for it
  unsigned long long start_ticks = 0;
  std::string name;
};

std::optional<Process> process_of(int pid);

std::vector<Process> all_processes();

// True if it was started with a variable of this beginning ("NAME=value "). Not what it has set since.
bool was_started_with(int pid, const std::string& beginning);

enum class Image { none, with_page, without_page };

// Whether a process has mapped status pages: an exec takes them away. None: it is dying, or not ours.
Image image_of(int pid);

}  // namespace ringcomm
