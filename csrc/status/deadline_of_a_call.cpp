#include "deadline_of_a_call.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iterator>
#include <utility>

#include "mpi_shm_files.hpp"

namespace ringcomm {

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;
constexpr Seconds kLook{1.0};  // nobody tells of a new file on every file system

void say(const std::string& text) {
  const ssize_t ignored = write(STDERR_FILENO, text.data(), text.size());
  static_cast<void>(ignored);
}

}  // namespace

Watchdog::Watchdog(double seconds, std::string message, std::string news, double notice_s,
                   std::string notice)
    : message_(std::move(message)),
      news_file_(std::move(news)),
      thread_([this, seconds, notice_s, notice = std::move(notice)] {
        wait(seconds, notice_s, notice);
      }) {}

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
  std::ifstream file(news_file_);
  if (!file) return false;
  message_.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  return true;
}

}  // namespace ringcomm
