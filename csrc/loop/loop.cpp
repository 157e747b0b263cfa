#include "loop.hpp"

#include <sys/epoll.h>

#include <algorithm>
#include <utility>

namespace ringcomm {
namespace {

constexpr std::int64_t kLook = 1'000'000;      // between looks at what rings no bell
constexpr std::int64_t kFirstNap = 20'000;     // of who polls for messages
constexpr std::int64_t kHandOver = 1'000'000;  // after which the thread takes over from who waited
constexpr Patience kBackground = {100, 2};     // the user's thread wants the core
constexpr Patience kPolling = {50, 20};        // a look at messages takes longer than at flags

bool has_events(int descriptor) {
  if (descriptor < 0) return false;
  epoll_event event;
  return epoll_wait(descriptor, &event, 1, 0) > 0;
}

}  // namespace

bool drive(Program& program, Bell& bell, Patience patience, std::int64_t limit_ns) {
  Backoff backoff(patience);
  std::int64_t deadline = 0;
  while (true) {
    const bool has_moved = program.advance() == Program::Step::moved;
    if (program.is_over()) return true;
    if (has_moved) {
      backoff.reset();
      continue;
    }
    if (limit_ns == 0) return false;
    if (backoff.linger()) continue;
    const std::int64_t now = monotonic_ns();
    if (deadline == 0) deadline = now + limit_ns;
    if (now >= deadline) return false;
    bell.sleep(std::min(deadline - now, kLook),
               [&] { return program.advance() == Program::Step::moved; });
    if (program.is_over()) return true;
  }
}

Loop::Loop(Bell* bell, Patience patience, std::shared_ptr<void> keep_alive)
    : bell_(bell != nullptr ? bell : &own_bell_), patience_(patience), keep_alive_(std::move(keep_alive)) {}

Loop::~Loop() { stop(); }

void Loop::start_thread() {
  if (!thread_.joinable() && !is_stopping_) thread_ = std::thread([this] { run(); });
}

void Loop::stop() {
  {
    const std::lock_guard lock(inbox_mutex_);
    is_stopping_ = true;
  }
  has_work_.notify_all();
  bell_->ring();
  if (thread_.joinable()) thread_.join();
}

void Loop::add(std::shared_ptr<Program> program) {
  {
    const std::lock_guard lock(inbox_mutex_);
    inbox_.push_back(std::move(program));
    ++n_programs_;
  }
  has_work_.notify_one();
  bell_->ring();
}

void Loop::wake() {
  is_woken_.store(true);
  bell_->ring();
  done_.ring();
}

void Loop::abandon(Program& program) {
  const std::lock_guard turn(turn_);
  admit();
  const auto at = std::find_if(programs_.begin(), programs_.end(),
                               [&](const auto& each) { return each.get() == &program; });
  if (at == programs_.end()) return;
  program.abandon();
  programs_.erase(at);
  --n_programs_;
}

void Loop::admit() {
  const std::lock_guard lock(inbox_mutex_);
  for (auto& each : inbox_) programs_.push_back(std::move(each));
  inbox_.clear();
}

// The turn must be this thread's.
Loop::Round Loop::advance_all() {
  admit();
  bool has_moved = false, polls = false;
  for (const auto& each : programs_) {
    has_moved |= each->advance() == Program::Step::moved;
    polls |= each->needs_polling();
  }
  needs_polling_.store(polls);
  const auto over = std::remove_if(programs_.begin(), programs_.end(),
                                   [](const auto& each) { return each->is_over(); });
  if (over == programs_.end()) return has_moved ? Round::moved : Round::idle;
  n_programs_ -= static_cast<int>(programs_.end() - over);
  programs_.erase(over, programs_.end());
  ++n_over_;
  return Round::over;
}

void Loop::await_news(double seconds, int descriptor) {
  const std::int64_t deadline = monotonic_ns() + static_cast<std::int64_t>(seconds * 1e9);
  const std::uint32_t before = n_over_.load();
  const auto has_news = [&] { return is_woken_.load() || n_over_.load() != before; };
  while (!has_news() && !has_events(descriptor)) {
    const std::int64_t now = monotonic_ns();
    if (now >= deadline) break;
    done_.sleep(std::min(deadline - now, kLook), has_news);
  }
  is_woken_.store(false);
}

void Loop::park(double seconds, int descriptor) {
  const std::int64_t deadline = monotonic_ns() + static_cast<std::int64_t>(seconds * 1e9);
  const std::uint32_t before = n_over_.load();
  Backoff backoff(needs_polling() ? kPolling : patience_);
  std::int64_t nap = kFirstNap;
  ++n_waiting_;
  const auto has_news = [&] {
    if (is_woken_.load() || n_over_.load() != before) return true;
    const std::unique_lock turn(turn_, std::try_to_lock);
    return turn.owns_lock() && advance_all() != Round::idle;
  };
  while (!is_woken_.exchange(false) && n_over_.load() == before) {
    if (has_news()) {
      backoff.reset();
      nap = kFirstNap;
      continue;
    }
    if (backoff.linger()) continue;
    const std::int64_t now = monotonic_ns();
    if (now >= deadline || has_events(descriptor)) break;
    bell_->sleep(std::min(deadline - now, needs_polling() ? nap : kLook), has_news);
    nap = std::min(nap * 3 / 2, kLook);
  }
  --n_waiting_;
}

void Loop::run() {
  Backoff backoff(kBackground);
  std::int64_t nap = kFirstNap;
  const auto has_news = [&] {
    const std::unique_lock turn(turn_, std::try_to_lock);
    if (!turn.owns_lock()) return false;
    const Round round = advance_all();
    if (round == Round::over) done_.ring();
    return round != Round::idle;
  };
  while (true) {
    {
      std::unique_lock lock(inbox_mutex_);
      has_work_.wait(lock, [&] { return is_stopping_ || n_programs_ != 0; });
      if (is_stopping_) return;
      if (n_waiting_ != 0) {
        has_work_.wait_for(lock, std::chrono::nanoseconds(kHandOver));
        continue;
      }
    }
    if (has_news()) {
      backoff.reset();
      nap = kFirstNap;
      continue;
    }
    if (backoff.linger()) continue;
    bell_->sleep(needs_polling() ? nap : 5 * kLook, has_news);
    nap = std::min(nap * 3 / 2, kLook);
  }
}

}  // namespace ringcomm
