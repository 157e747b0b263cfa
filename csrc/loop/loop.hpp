// Advances programs without the GIL: in the thread that waits for one, else in one of its own.
#pragma once
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "../descriptor.hpp"
#include "../shm/bell.hpp"
#include "program.hpp"

namespace ringcomm {

// Advances `program` alone, in this thread. Returns true once it is over, false after limit_ns, or when
// it has news.
// Sleeps on `bell` when lingering does not help.
bool drive(Program& program, Bell& bell, Patience patience, std::int64_t limit_ns);

// The same for a program that nobody rings for: naps instead of sleeping on a bell.
bool drive_polling(Program& program, std::int64_t limit_ns);

// Invariants
// - A program is in inbox_ or in programs_, in at most one of them; n_programs_ and n_alone_ count
//   both lists. One that is over or abandoned is in neither.
// - Only who holds turn_ touches programs_, and advances or abandons what is in it. So a program of
//   the loop is advanced by one thread at a time, and by none once abandon() has returned. Whoever
//   drives a program itself does so before add().
// - needs_polling_ is of the last round; moved_at_ is when anything last went on or was added.
// - n_over_ and n_wakes_ only grow, and are stored before a bell is rung for them. park() and
//   await_news() return when one of them has passed what their last call had seen, so news that
//   comes between two calls is not lost.
// - Each of park() and await_news() has one thread in it at most; their seen_... belong to it.
//
// Order of locks, outermost first
//   turn_ > inbox_mutex_
//   turn_ > whatever a program locks in advance() or abandon(): Team's, Allocator's, Runner's,
//           LoopbackHub's, the MPI library's
// - While the thread of start_thread(), or one in park(), holds a turn it waits for nothing else;
//   both only try to lock turn_. abandon() and settle() wait for it.
// - Nobody takes the GIL while holding either mutex, and whoever calls what waits (stop, park,
//   await_news, settle, abandon) has released the GIL. add(), wake() and yield_turn() may be
//   called with it: none of them waits for a turn.
// - Bells are rung without inbox_mutex_.
class Loop {
 public:
  // bell: of this process; who has news for one of the programs rings it. Null: nobody else does.
  // keep_alive: its owner.
  Loop(Bell* bell, Patience patience, std::shared_ptr<void> keep_alive);
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;
  ~Loop();

  // From now on programs advance while nobody waits.
  void start_thread();
  void stop();

  // Any thread; returns at once.
  void add(std::shared_ptr<Program> program);
  bool has_programs() const { return n_programs_.load() != 0; }

  // Advances programs until one is over or has news, wake() is called, or seconds have passed. One thread at a
  // time.
  void park(double seconds);

  // The same, but leaves advancing to the thread. One thread at a time, beside one in park().
  void await_news(double seconds);
  void wake();

  // Calls wake() as soon as, and as long as, `descriptor` has events; -1: never. Throws
  // std::system_error if there are no descriptors or threads left.
  void watch(int descriptor);

  // Advances programs until none goes on: what the others had done before this call is in them then.
  void settle();

  // Who was in park() does not come again soon: the thread takes over.
  void yield_turn();

  // Abandons a program, and forgets it: nobody advances it after this returns.
  void abandon(Program& program);

 private:
  enum class Round { idle, busy, moved, over };  // busy: nothing went on, but bytes may have moved

  Round advance_all();
  void admit();
  bool needs_polling() const { return needs_polling_.load(); }
  std::int64_t nap() const;
  void run();
  void watch_until_told(int descriptor);

  const pid_t pid_ = getpid();
  Bell own_bell_{};
  Bell* bell_;
  Patience patience_;
  std::shared_ptr<void> keep_alive_;
  Bell done_{};  // a program is over
  std::mutex turn_;  // whose turn it is to advance
  std::vector<std::shared_ptr<Program>> programs_;
  std::mutex inbox_mutex_;
  std::vector<std::shared_ptr<Program>> inbox_;
  // In a fork it is never deleted: that would wait for a thread of the parent's to let go of it.
  std::condition_variable* const has_work_ = new std::condition_variable;
  std::atomic<int> n_programs_{0};
  std::atomic<int> n_alone_{0};    // of those: that go on while nobody waits
  std::atomic<int> looks_{-1};     // of the others, see Program
  std::atomic<int> n_waiting_{0};  // threads in park()
  std::atomic<std::uint32_t> n_over_{0};
  std::atomic<std::uint32_t> n_wakes_{0};
  std::uint32_t seen_by_park_ = 0, seen_by_await_ = 0;  // of them, by who was in there last
  std::uint32_t over_seen_by_park_ = 0, over_seen_by_await_ = 0;
  std::atomic<bool> is_idle_{false};  // the thread sleeps until it is told of work
  std::atomic<bool> needs_polling_{false};
  std::atomic<std::int64_t> moved_at_{0};
  bool is_stopping_ = false;
  std::thread thread_, watcher_;
  Descriptor end_of_watch_;
};

}  // namespace ringcomm
