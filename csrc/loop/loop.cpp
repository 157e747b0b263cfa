#include "loop.hpp"

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace ringcomm {
namespace {

constexpr std::int64_t kLook = 1'000'000;      // the longest nap of who polls for messages, at first
constexpr std::int64_t kLongLook = 5'000'000;  // the longest at last
constexpr std::int64_t kLongest = 20'000'000;  // of any other: a bell may have been missed
constexpr std::int64_t kFirstNap = 20'000;     // of who polls for messages
constexpr std::int64_t kLinger = 200'000;      // between looks for new work after the last
constexpr int kLingers = 25;
constexpr int kUnheardMs = 5;                  // until Python takes note of a death
constexpr Patience kBackground = {100, 2};     // the user's thread wants the core
constexpr Patience kNone = {0, 0};
constexpr std::int64_t kFresh = 300'000;       // after something has moved
constexpr Patience kPolling = {50, 20};        // a look at messages takes longer than at flags
constexpr std::int64_t kBusy = 5'000;          // a look at messages that takes so long has moved bytes

}  // namespace

bool drive(Program& program, Bell& bell, Patience patience, std::int64_t limit_ns) {
  Backoff backoff(patience);
  std::int64_t deadline = 0;
  while (true) {
    const Program::Step step = program.advance();
    if (program.is_over()) return true;
    if (step == Program::Step::moved) {
      backoff.reset();
      continue;
    }
    if (step == Program::Step::news || limit_ns == 0) return false;
    const bool lingers = backoff.linger();
    if (lingers && !backoff.is_time_to_look()) continue;
    const std::int64_t now = monotonic_ns();
    if (deadline == 0) deadline = now + limit_ns;
    if (now >= deadline) return false;
    if (lingers) continue;
    Program::Step last = Program::Step::waiting;
    bell.sleep(std::min(deadline - now, kLook), [&] {
      last = program.advance();
      return last != Program::Step::waiting;
    });
    if (program.is_over()) return true;
    if (last == Program::Step::news) return false;
  }
}

bool drive_polling(Program& program, std::int64_t limit_ns) {
  constexpr int kSpins = 100;
  constexpr useconds_t kNapUs = 20;
  const std::int64_t deadline = monotonic_ns() + limit_ns;
  std::int64_t begin = monotonic_ns();
  for (int idle = 0; !program.is_over(); ++idle) {
    const Program::Step step = program.advance();
    const std::int64_t now = monotonic_ns();
    if (step == Program::Step::moved || now - begin > kBusy) idle = 0;
    if (step == Program::Step::news || now >= deadline) break;
    if (idle > kSpins)
      usleep(kNapUs);
    else if (idle > 0)
      sched_yield();
    begin = idle == 0 ? now : monotonic_ns();
  }
  return program.is_over();
}

Loop::Loop(Bell* bell, Patience patience, std::shared_ptr<void> keep_alive)
    : bell_(bell != nullptr ? bell : &own_bell_), patience_(patience), keep_alive_(std::move(keep_alive)) {}

Loop::~Loop() {
  stop();
  if (getpid() == pid_) delete has_work_;
}

void Loop::start_thread() {
  if (!thread_.joinable() && !is_stopping_) thread_ = std::thread([this] { run(); });
}

void Loop::watch(int descriptor) {
  if (descriptor < 0 || watcher_.joinable()) return;
  end_of_watch_ = Descriptor(eventfd(0, EFD_CLOEXEC), "eventfd");
  watcher_ = std::thread([this, descriptor] { watch_until_told(descriptor); });
}

// A signal may be delivered to any thread, this one among them: the deaths must be watched on.
void Loop::watch_until_told(int descriptor) {
  pollfd watched[] = {{descriptor, POLLIN, 0}, {end_of_watch_.get(), POLLIN, 0}};
  while (true) {
    if (poll(watched, 2, -1) < 0) {
      if (errno != EINTR) usleep(kUnheardMs * 1000);  // ENOMEM: it may pass
      continue;
    }
    if (watched[1].revents != 0) return;
    wake();
    if (poll(watched + 1, 1, kUnheardMs) > 0) return;
  }
}

void Loop::yield_turn() {
  if (n_alone_ != 0) has_work_->notify_one();
}

void Loop::stop() {
  if (getpid() != pid_) {  // a fork: the threads, and the descriptor of the watch, are the parent's
    if (thread_.joinable()) thread_.detach();
    if (watcher_.joinable()) watcher_.detach();
    return;
  }
  if (watcher_.joinable()) {
    const std::uint64_t one = 1;
    uninterrupted([&] { return write(end_of_watch_.get(), &one, sizeof one); });
    watcher_.join();
    end_of_watch_.reset();
  }
  {
    const std::lock_guard lock(inbox_mutex_);
    is_stopping_ = true;
  }
  has_work_->notify_all();
  bell_->ring();
  if (thread_.joinable()) thread_.join();
}

void Loop::add(std::shared_ptr<Program> program) {
  {
    const std::lock_guard lock(inbox_mutex_);
    n_alone_ += program->goes_on_alone();
    if (program->looks() >= 0) looks_ = program->looks();
    inbox_.push_back(std::move(program));
    moved_at_.store(monotonic_ns());
    ++n_programs_;
  }
  if (is_idle_.load()) has_work_->notify_one();
  bell_->ring();  // a peer may have rung before the program was here
}

void Loop::wake() {
  ++n_wakes_;
  bell_->ring();
  done_.ring();
}

void Loop::abandon(Program& program) {
  const std::lock_guard turn(turn_);
  admit();
  const auto at = std::find_if(programs_.begin(), programs_.end(),
                               [&](const auto& each) { return each.get() == &program; });
  program.abandon();  // one that was never added, too: nobody else advances it
  if (at == programs_.end()) return;
  n_alone_ -= program.goes_on_alone();
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
  bool has_moved = false, has_news = false, polls = false;
  std::int64_t begin = 0;  // of the looks at messages
  for (const auto& each : programs_) {
    if (each->needs_polling() && !std::exchange(polls, true)) begin = monotonic_ns();
    const Program::Step step = each->advance();
    has_moved |= step != Program::Step::waiting;
    has_news |= step == Program::Step::news;
  }
  const auto n_programs = static_cast<std::int64_t>(programs_.size());
  const bool is_busy = polls && monotonic_ns() - begin > kBusy * n_programs;
  needs_polling_.store(polls);
  const auto over = std::stable_partition(programs_.begin(), programs_.end(),
                                          [](const auto& each) { return !each->is_over(); });
  if (has_moved) moved_at_.store(monotonic_ns());
  if (over == programs_.end() && !has_news)
    return has_moved ? Round::moved : is_busy ? Round::busy : Round::idle;
  n_programs_ -= static_cast<int>(programs_.end() - over);
  for (auto each = over; each != programs_.end(); ++each) n_alone_ -= (*each)->goes_on_alone();
  programs_.erase(over, programs_.end());
  ++n_over_;
  return Round::over;
}

// The longer nothing has gone on, the longer: with naps of 1 ms for ever, a core would be busy for a
// twentieth of the time.
std::int64_t Loop::nap() const {
  if (!needs_polling()) return kLongest;
  const std::int64_t waited = monotonic_ns() - moved_at_.load();
  return std::clamp(waited / 8, kFirstNap, std::clamp(waited / 200, kLook, kLongLook));
}

void Loop::await_news(double seconds) {
  const std::int64_t deadline = monotonic_ns() + nanoseconds(seconds);
  const auto has_news = [&] {
    return n_wakes_ != seen_by_await_ || n_over_ != over_seen_by_await_;
  };
  while (!has_news()) {
    const std::int64_t now = monotonic_ns();
    if (now >= deadline) break;
    done_.sleep(deadline - now, has_news);
  }
  seen_by_await_ = n_wakes_;
  over_seen_by_await_ = n_over_;
}

void Loop::settle() {
  const std::lock_guard turn(turn_);
  Round round;
  do {
    round = advance_all();
    if (round == Round::over) done_.ring();
  } while (round == Round::moved || round == Round::over);
}

void Loop::park(double seconds) {
  const std::int64_t begin = monotonic_ns();
  const std::int64_t deadline = begin + nanoseconds(seconds);
  const bool is_fresh = begin - moved_at_.load() < kFresh;  // else it was lingered for in vain
  const int looks = n_alone_ == 0 ? looks_.load() : -1;
  const Patience usual = looks >= 0 ? Patience{looks, 0} : patience_;
  Backoff backoff(!is_fresh ? kNone : needs_polling() ? kPolling : usual);
  ++n_waiting_;
  Round round = Round::idle;
  const auto has_news = [&] {
    if (n_wakes_ != seen_by_park_ || n_over_ != over_seen_by_park_) return true;
    const std::unique_lock turn(turn_, std::try_to_lock);
    round = turn.owns_lock() ? advance_all() : Round::idle;
    return round != Round::idle;
  };
  while (n_wakes_ == seen_by_park_ && n_over_ == over_seen_by_park_) {
    if (has_news()) {
      if (round != Round::busy) backoff.reset();
      continue;
    }
    const bool lingers = backoff.linger();
    if (lingers && !backoff.is_time_to_look()) continue;
    const std::int64_t now = monotonic_ns();
    if (now >= deadline) break;
    if (lingers) continue;
    bell_->sleep(std::min(deadline - now, nap()), has_news);
  }
  seen_by_park_ = n_wakes_;
  over_seen_by_park_ = n_over_;
  --n_waiting_;
}

void Loop::run() {
  Backoff backoff(kBackground);
  Round round = Round::idle;
  const auto has_news = [&] {
    const std::unique_lock turn(turn_, std::try_to_lock);
    if (!turn.owns_lock()) return false;
    round = advance_all();
    if (round == Round::over) done_.ring();
    return round != Round::idle;
  };
  while (true) {
    {
      std::unique_lock lock(inbox_mutex_);
      // Whoever adds something mostly waits for it at once, and is not to pay for waking this.
      for (int i = 0; i < kLingers && !is_stopping_ && n_alone_ == 0; ++i)
        has_work_->wait_for(lock, std::chrono::nanoseconds(kLinger));
      is_idle_ = true;
      has_work_->wait(lock, [&] { return is_stopping_ || n_alone_ != 0; });
      is_idle_ = false;
      if (is_stopping_) return;
      if (n_waiting_ != 0) {
        has_work_->wait_for(lock, std::chrono::nanoseconds(kLongest));
        continue;
      }
    }
    if (has_news()) {
      if (round != Round::busy) backoff.reset();
      continue;
    }
    if (backoff.linger()) continue;
    bell_->sleep(nap(), has_news);
  }
}

}  // namespace ringcomm
