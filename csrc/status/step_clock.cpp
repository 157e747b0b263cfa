#include "step_clock.hpp"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <string>

namespace ringcomm {
namespace {

// glibc has gettid() since 2.30.
pid_t this_thread() { return static_cast<pid_t>(syscall(SYS_gettid)); }

Descriptor open_schedstat(pid_t thread) {
  const std::string path = "/proc/self/task/" + std::to_string(thread) + "/schedstat";
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  return fd < 0 ? Descriptor() : Descriptor(fd);  // a kernel without CONFIG_SCHED_INFO
}

}  // namespace

StepClock::StepClock() : thread_(this_thread()) {
  schedstat_ = open_schedstat(thread_);
  stamp(0);
}

void StepClock::mark(int i) {
  if (i <= 0 || i >= kStepMarks - 1 || marks_[i] != 0) return;
  stamp(i);
}

void StepClock::end(MappedPage* page) {
  stamp(kStepMarks - 1);
  const bool is_whole = std::find(std::begin(marks_), std::end(marks_), 0) == std::end(marks_) &&
                        std::is_sorted(std::begin(marks_), std::end(marks_));
  if (page != nullptr && is_whole) {
    StepView step{};
    std::copy(std::begin(marks_), std::end(marks_), step.marks_ns);
    for (int i = 0; i + 1 < kStepMarks; ++i)
      step.no_core_ns[i] = std::max<std::int64_t>(waited_[i + 1] - waited_[i], 0);
    page->note_step(step);
  }
  const std::int64_t now = marks_[kStepMarks - 1], waited = waited_[kStepMarks - 1];
  std::fill(std::begin(marks_), std::end(marks_), 0);
  marks_[0] = now;
  waited_[0] = waited;
}

void StepClock::stamp(int i) {
  marks_[i] = monotonic_ns();
  waited_[i] = time_without_core();
}

// The second number of schedstat: nanoseconds in the run queue.
std::int64_t StepClock::time_without_core() const {
  char text[80];
  const bool is_mine = schedstat_.get() >= 0 && this_thread() == thread_;
  const ssize_t n = is_mine ? pread(schedstat_.get(), text, sizeof text - 1, 0) : 0;
  if (n <= 0) return 0;
  text[n] = '\0';
  unsigned long long run = 0, waited = 0;
  return std::sscanf(text, "%llu %llu", &run, &waited) == 2 ? static_cast<std::int64_t>(waited) : 0;
}

}  // namespace ringcomm
