// A collective, or a part of one, that advances without Python.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <utility>

namespace ringcomm {

// Shared with Python by enable_shared_from_this: otherwise whoever drops the last reference, a thread
// of ours too, would have to wait for the GIL.
class Program : public std::enable_shared_from_this<Program> {
 public:
  enum class Step { waiting, moved, news };  // what advance() achieved; news: Python is to look

  virtual ~Program() = default;

  // Goes on as far as possible and never blocks; sets is_over at the end. One thread at a time;
  // which one may change.
  virtual Step advance() = 0;

  // True if nobody rings when it can go on, as for messages: then it must be looked at often.
  virtual bool needs_polling() const = 0;

  // True if it is to go on also while nobody waits for anything.
  virtual bool goes_on_alone() const { return true; }

  // How often to look again before going to sleep while nothing else is under way; -1: as for others.
  virtual int looks() const { return -1; }

  // Nothing may touch the caller's buffers after this returns, as far as this rank decides. Called
  // when an operation has failed; advance() is not called any more.
  virtual void abandon() = 0;

  // Why it cannot complete; to be read once it is over. Empty: it did.
  const std::string& fault() const { return fault_; }
  bool is_over() const { return is_over_.load(std::memory_order_acquire); }

 protected:
  void end(std::string fault = {}) {
    fault_ = std::move(fault);
    is_over_.store(true, std::memory_order_release);
  }

 private:
  std::string fault_;
  std::atomic<bool> is_over_{false};
};

}  // namespace ringcomm
