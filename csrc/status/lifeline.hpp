// A pipe that the kernel closes when its process dies. Who holds the other end sees the hang-up
// before the death itself can be seen, and where the kernel has no pidfds.
#pragma once
#include "../descriptor.hpp"

namespace ringcomm {

class Lifeline {
 public:
  // Of this process, until it is destroyed. A fork does not keep it open: its parent would seem to
  // live on. Throws std::system_error.
  static Lifeline create();

  Lifeline() = default;
  Lifeline(Lifeline&& other) noexcept;
  Lifeline(const Lifeline&) = delete;
  Lifeline& operator=(const Lifeline&) = delete;
  Lifeline& operator=(Lifeline&& other) noexcept;
  ~Lifeline();

  // The end that hangs up.
  int fd() const { return end_.get(); }

 private:
  Descriptor end_;
  int place_ = -1;     // in the table of what forks close
  Descriptor untold_;  // the held end, if that table is full
};

}  // namespace ringcomm
