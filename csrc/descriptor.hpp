// File descriptors that are closed once, and errors of system calls that say what to do next.
#pragma once
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

namespace ringcomm {

// Throws std::system_error, which Python sees as OSError: `what`, errno, and the limit that was met.
[[noreturn]] inline void throw_errno(std::string what) {
  const int error = errno;
  rlimit limit{};
  if (error == EMFILE && getrlimit(RLIMIT_NOFILE, &limit) == 0)
    what += ", while `ulimit -n` allows " + std::to_string(limit.rlim_cur) + " (raise it)";
  throw std::system_error(error, std::generic_category(), what);
}

// Calls again what a signal has interrupted.
template <class Call>
auto uninterrupted(Call call) {
  decltype(call()) result;
  do result = call();
  while (result < 0 && errno == EINTR);
  return result;
}

class Descriptor {
 public:
  Descriptor() = default;
  // Takes what a system call has returned; throws if it failed.
  Descriptor(int fd, const char* what) : fd_(fd) {
    if (fd < 0) throw_errno(what);
  }
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    reset(other.release());
    return *this;
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { reset(); }

  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }
  void reset(int fd = -1) {
    if (fd_ >= 0) close(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

}  // namespace ringcomm
