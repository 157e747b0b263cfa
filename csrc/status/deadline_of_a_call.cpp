#include "deadline_of_a_call.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "../descriptor.hpp"
#include "mpi_shm_files.hpp"
#include "run_records.hpp"

namespace ringcomm {

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;
constexpr std::size_t kMostNews = 4096;
constexpr Seconds kLook{1.0};  // nobody tells of a new file on every file system

void say(const std::string& text) {
  const ssize_t ignored = write(STDERR_FILENO, text.data(), text.size());
  static_cast<void>(ignored);
}

}  // namespace

Watchdog::Watchdog(double seconds, std::string message, std::string news, double notice_s,
                   std::string notice)
    : message_(std::move(message)), news_file_(std::move(news)) {
  learn_run_folder();  // here: no other thread may read the environment while MPI sets variables
  thread_ = std::thread([this, seconds, notice_s, notice = std::move(notice)] {
    wait(seconds, notice_s, notice);
  });
}

void Watchdog::cancel() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_cancelled_ = true;
  }
  news_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Watchdog::wait(double seconds, double notice_s, const std::string& notice) {
  const auto began = Clock::now();
  bool is_noticed = notice.empty();
  std::unique_lock<std::mutex> lock(mutex_);
  for (bool is_over = false; !is_over;) {
    const Seconds waited = Clock::now() - began;
    const Seconds left = Seconds(seconds) - waited;
    Seconds nap = news_file_.empty() ? left : std::min(left, kLook);
    if (!is_noticed) nap = std::min(nap, std::max(Seconds(notice_s) - waited, Seconds(0)));
    if (news_.wait_for(lock, nap, [this] { return is_cancelled_; })) return;
    is_over = left <= nap || has_news();
    if (is_over || is_noticed || Clock::now() - began < Seconds(notice_s)) continue;
    say(notice);
    is_noticed = true;
  }
  say(message_);
  remove_files(mpi_segments_of(getpid()));
  _exit(1);
}

// True if the file is there; its text is the message then.
bool Watchdog::has_news() {
  if (news_file_.empty()) return false;
  const Descriptor file(open_in_run_folder(news_file_.c_str(), O_RDONLY | O_NONBLOCK));
  struct stat facts {};
  if (file.get() < 0 || fstat(file.get(), &facts) != 0 || !S_ISREG(facts.st_mode)) return false;
  if (facts.st_uid != geteuid() && facts.st_uid != 0) return false;
  char text[kMostNews];
  const ssize_t n = read(file.get(), text, sizeof text);
  if (n < 0) return false;
  message_.assign(text, static_cast<std::size_t>(n));
  return true;
}

}  // namespace ringcomm
