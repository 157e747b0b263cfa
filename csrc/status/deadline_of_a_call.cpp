#include "deadline_of_a_call.hpp"

#include <unistd.h>

#include <chrono>
#include <utility>

#include "mpi_shm_files.hpp"

namespace ringcomm {

Watchdog::Watchdog(double seconds, std::string message)
    : message_(std::move(message)), thread_([this, seconds] { wait(seconds); }) {}

void Watchdog::cancel() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_cancelled_ = true;
  }
  news_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Watchdog::wait(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (news_.wait_for(lock, std::chrono::duration<double>(seconds),
                     [this] { return is_cancelled_; }))
    return;
  const ssize_t ignored = write(STDERR_FILENO, message_.data(), message_.size());
  static_cast<void>(ignored);
  remove_files(mpi_segments_of(getpid()));
  _exit(1);
}

}  // namespace ringcomm
