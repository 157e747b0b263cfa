// File descriptors that are closed once, and errors of system calls that say what to do next.
#pragma once
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
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

// Returns new memory of `nbytes` zeros, which other processes map by its descriptor.
inline Descriptor make_memfd(const char* name, std::size_t nbytes) {
  Descriptor fd(memfd_create(name, MFD_CLOEXEC));
  if (fd.get() < 0 && (errno == EPERM || errno == EACCES || errno == ENOSYS))
    throw_errno("ringcomm needs the system call memfd_create, for what the processes of a host share, "
                "and a sandbox refuses it (allow it, in Docker by a seccomp profile), or Linux is older "
                "than 3.17");
  if (fd.get() < 0) throw_errno("memfd_create");
  if (uninterrupted([&] { return ftruncate(fd.get(), static_cast<off_t>(nbytes)); }) != 0)
    throw_errno("ftruncate of shared memory");
  return fd;
}

}  // namespace ringcomm
