// Schedules carried out over a wire, without Python.
#pragma once
#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "program.hpp"
#include "schedule.hpp"
#include "wire/wire.hpp"

namespace ringcomm {

// What a schedule is run for.
struct Bindings {
  std::vector<std::byte*> arguments;
  std::vector<int> members;  // the group's ranks of the job
  int tag;

  bool operator==(const Bindings& other) const {
    return tag == other.tag && arguments == other.arguments && members == other.members;
  }
};

// Scratch memory and messages of one schedule. If it is used for the same bindings again, as the
// named operations of a training step do, its messages are started again instead of made.
class Workspace {
 public:
  explicit Workspace(std::shared_ptr<const Schedule> schedule);

  void bind(Bindings bindings, Wire& wire);
  std::byte* at(const Span& span) const { return buffers_[span.buffer] + span.offset; }
  Message& message(std::size_t number) const { return *messages_[number]; }
  void cancel_receives();

  const Schedule& schedule() const { return *schedule_; }
  bool is_bound_to(const Bindings& bindings) const { return bindings_ == bindings; }
  std::size_t nbytes() const;  // about what it takes while it is kept

 private:
  struct Free { void operator()(std::byte* memory) const; };

  const std::shared_ptr<const Schedule> schedule_;
  const std::unique_ptr<std::byte[], Free> scratch_;
  Bindings bindings_;
  std::vector<std::byte*> buffers_;
  std::vector<std::unique_ptr<Message>> messages_;
};

class Run;

// Makes runs over one wire and keeps workspaces for the next ones. Thread-safe.
class Runner : public std::enable_shared_from_this<Runner> {
 public:
  explicit Runner(std::shared_ptr<Wire> wire) : wire_(std::move(wire)) {}

  // Throws std::invalid_argument if there are not as many arguments as the schedule has.
  std::shared_ptr<Run> run(std::shared_ptr<const Schedule> schedule, Bindings bindings,
                           bool keeps_time = false);

  // Lets go of everything that is idle, and of the wire; nothing is run any more.
  void close();

  const std::shared_ptr<Wire>& wire() const { return wire_; }
  std::size_t idle_nbytes() const;  // what the idle workspaces take
  std::size_t n_idle() const;

 private:
  friend class Run;

  std::unique_ptr<Workspace> take(const std::shared_ptr<const Schedule>& schedule,
                                  const Bindings& bindings);
  void give_back(std::unique_ptr<Workspace> workspace);

  const std::shared_ptr<Wire> wire_;
  mutable std::mutex mutex_;
  std::list<std::unique_ptr<Workspace>> idle_;  // the last used one first
  std::size_t idle_nbytes_ = 0;
  bool is_closed_ = false;
};

// The time that a run spent with an action other than Start, by monotonic_ns().
struct Phase {
  const char* name;  // the action's kPhase
  std::int64_t begin_ns, end_ns;
};

// One execution of a schedule.
class Run final : public Program {
 public:
  Run(std::shared_ptr<Runner> runner, std::unique_ptr<Workspace> workspace, bool keeps_time);
  ~Run() override;
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  Step advance() override;
  bool needs_polling() const override { return true; }

  // Workspace and messages stay alive for ever: peers may still write. So must the arguments.
  void abandon() override;

  // Grows with every step and every message that completes; any thread may look.
  std::uint64_t moves() const { return moves_.load(std::memory_order_acquire); }

  // In the order of time, if it keeps it; to be read once it is over.
  const std::vector<Phase>& phases() const { return phases_; }

 private:
  bool carry_out(const Action& action);
  bool carry_out(const Start& start);
  bool carry_out(const Wait& wait);
  bool carry_out(const Combine& combine);
  bool carry_out(const CombineAtOnce& combine);
  bool carry_out(const Divide& divide);
  bool carry_out(const Copy& copy);
  void note_move() { moves_.fetch_add(1, std::memory_order_release); }

  const std::shared_ptr<Runner> runner_;
  const bool keeps_time_;
  std::unique_ptr<Workspace> workspace_;  // empty once it is over
  std::size_t next_ = 0;                  // action
  std::size_t n_complete_ = 0;            // messages of the wait at hand
  std::atomic<std::uint64_t> moves_{0};
  std::int64_t begin_ns_ = 0;  // of the action at hand, 0 before it has begun
  std::vector<Phase> phases_;
};

}  // namespace ringcomm
