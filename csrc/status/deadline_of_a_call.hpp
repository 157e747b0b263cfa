// A deadline for calls that block inside C with the GIL held, such as MPI_Init.
#pragma once
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace ringcomm {

// Ends this process with exit code 1 and `message` on stderr unless it is destroyed in time. Its
// thread needs no Python.
class Watchdog {
 public:
  Watchdog(double seconds, std::string message);
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  ~Watchdog() { cancel(); }

  void cancel();

 private:
  void wait(double seconds);

  std::string message_;
  std::mutex mutex_;
  std::condition_variable news_;
  bool is_cancelled_ = false;
  std::thread thread_;
};

}  // namespace ringcomm
