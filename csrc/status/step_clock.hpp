// Measures the phases of training steps, by the clock and by what the kernel says of the thread.
#pragma once
#include <sys/types.h>

#include "page.hpp"

namespace ringcomm {

// The thread that makes it marks where phases begin; see Page::Step. Another thread, such as one of
// autograd, may do so, too; then it is not known how long this one had no core.
class StepClock {
 public:
  StepClock();
  // Phase i begins, for i from 1 to kStepMarks - 2, unless it was marked in this step.
  void mark(int i);
  // Ends the step, writes it to `page` if all phases were marked, and begins the next one. nullptr:
  // it does not count.
  void end(MappedPage* page);

 private:
  void stamp(int i);
  std::int64_t time_without_core() const;

  Descriptor schedstat_;
  pid_t thread_;
  std::int64_t marks_[kStepMarks]{}, waited_[kStepMarks]{};  // 0: not marked
};

}  // namespace ringcomm
