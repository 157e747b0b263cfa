// A deadline for calls that block inside C with the GIL held, such as MPI_Init.
#pragma once
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace ringcomm {

// Ends this process with exit code 1 and `message` on stderr unless it is destroyed in time. So it does,
// with the text of the file `news`, soon after that file is there; "": there is none. After notice_s it
// writes `notice` to stderr, and waits on. Its thread needs no Python.
class Watchdog {
 public:
  Watchdog(double seconds, std::string message, std::string news, double notice_s, std::string notice);
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  ~Watchdog() { cancel(); }

  void cancel();

 private:
  void wait(double seconds, double notice_s, const std::string& notice);
  bool has_news();

  std::string message_;
  const std::string news_file_;
  std::mutex mutex_;
  std::condition_variable news_;
  bool is_cancelled_ = false;
  std::thread thread_;
};

}  // namespace ringcomm
