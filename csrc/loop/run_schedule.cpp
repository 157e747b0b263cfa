#include "run_schedule.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "clock.hpp"
#include "grave.hpp"
#include "kernels/reduce.hpp"

namespace ringcomm {
namespace {

// Idle workspaces: as many as operations of a training step are in flight, and little memory.
constexpr std::size_t kIdleMax = 256;
constexpr std::size_t kIdleNbytesMax = std::size_t{64} << 20;
constexpr std::size_t kMessageNbytes = 1024;  // with its persistent request, about

std::byte* allocate(std::size_t nbytes) {
  return static_cast<std::byte*>(::operator new(nbytes, std::align_val_t{kScratchAlignment}));
}

}  // namespace

void Workspace::Free::operator()(std::byte* memory) const {
  ::operator delete(memory, std::align_val_t{kScratchAlignment});
}

Workspace::Workspace(std::shared_ptr<const Schedule> schedule)
    : schedule_(std::move(schedule)), scratch_(allocate(schedule_->scratch_nbytes())) {}

void Workspace::bind(Bindings bindings, Wire& wire) {
  if (!messages_.empty() && is_bound_to(bindings)) return;
  messages_.clear();
  bindings_ = std::move(bindings);
  buffers_ = bindings_.arguments;
  std::byte* next = scratch_.get();
  for (std::size_t i = schedule_->n_arguments(); i < schedule_->buffers().size(); ++i) {
    buffers_.push_back(next);
    next += aligned(schedule_->buffers()[i]);
  }
  for (const MessageSpec& spec : schedule_->messages()) {
    const int peer = bindings_.members.at(static_cast<std::size_t>(spec.peer));
    messages_.push_back(spec.is_receive
                            ? wire.receive(at(spec.span), spec.span.nbytes, peer, bindings_.tag)
                            : wire.send(at(spec.span), spec.span.nbytes, peer, bindings_.tag));
  }
}

std::size_t Workspace::nbytes() const {
  return schedule_->scratch_nbytes() + schedule_->messages().size() * kMessageNbytes;
}

void Workspace::cancel_receives() {
  for (const auto& message : messages_) message->cancel();
}

std::shared_ptr<Run> Runner::run(std::shared_ptr<const Schedule> schedule, Bindings bindings,
                                 bool keeps_time) {
  if (bindings.arguments.size() != schedule->n_arguments())
    throw std::invalid_argument("the schedule has " + std::to_string(schedule->n_arguments()) +
                                " arguments, not " + std::to_string(bindings.arguments.size()));
  auto workspace = take(schedule, bindings);
  workspace->bind(std::move(bindings), *wire_);
  return std::make_shared<Run>(shared_from_this(), std::move(workspace), keeps_time);
}

std::unique_ptr<Workspace> Runner::take(const std::shared_ptr<const Schedule>& schedule,
                                        const Bindings& bindings) {
  std::lock_guard lock(mutex_);
  if (is_closed_) throw WireFault("the wire is closed");
  auto best = idle_.end();
  for (auto each = idle_.begin(); each != idle_.end(); ++each) {
    if (&(*each)->schedule() != schedule.get()) continue;
    best = each;  // at the end the one that has waited longest: the others may be wanted as they are
    if ((*each)->is_bound_to(bindings)) break;
  }
  if (best == idle_.end()) return std::make_unique<Workspace>(schedule);
  std::unique_ptr<Workspace> found = std::move(*best);
  idle_.erase(best);
  idle_nbytes_ -= found->nbytes();
  return found;
}

void Runner::give_back(std::unique_ptr<Workspace> workspace) {
  std::list<std::unique_ptr<Workspace>> surplus;  // freed without the lock
  std::lock_guard lock(mutex_);
  idle_nbytes_ += workspace->nbytes();
  idle_.push_front(std::move(workspace));
  while (!idle_.empty() &&
         (is_closed_ || idle_.size() > kIdleMax || idle_nbytes_ > kIdleNbytesMax)) {
    idle_nbytes_ -= idle_.back()->nbytes();
    surplus.splice(surplus.begin(), idle_, std::prev(idle_.end()));
  }
}

void Runner::close() {
  std::list<std::unique_ptr<Workspace>> surplus;
  {
    std::lock_guard lock(mutex_);
    is_closed_ = true;
    surplus.swap(idle_);
    idle_nbytes_ = 0;
  }
  surplus.clear();
  wire_->close();
}

std::size_t Runner::idle_nbytes() const {
  std::lock_guard lock(mutex_);
  return idle_nbytes_;
}

std::size_t Runner::n_idle() const {
  std::lock_guard lock(mutex_);
  return idle_.size();
}

Run::Run(std::shared_ptr<Runner> runner, std::unique_ptr<Workspace> workspace, bool keeps_time)
    : runner_(std::move(runner)), keeps_time_(keeps_time), workspace_(std::move(workspace)) {}

Run::~Run() {
  if (workspace_ != nullptr) abandon();
}

Program::Step Run::advance() {
  if (workspace_ == nullptr) return Step::waiting;
  const auto& actions = workspace_->schedule().actions();
  const std::uint64_t before = moves_.load(std::memory_order_relaxed);
  try {
    while (next_ < actions.size() && carry_out(actions[next_])) {
      ++next_;
      note_move();
    }
  } catch (const std::exception& problem) {
    abandon();
    end(problem.what());
    return Step::moved;
  }
  if (next_ == actions.size()) {
    runner_->give_back(std::move(workspace_));
    end();
    return Step::moved;
  }
  return moves_.load(std::memory_order_relaxed) > before ? Step::moved : Step::waiting;
}

void Run::abandon() {
  if (workspace_ == nullptr) return;
  workspace_->cancel_receives();
  bury(std::move(workspace_));
}

bool Run::carry_out(const Action& action) {
  const bool is_timed = keeps_time_ && !std::holds_alternative<Start>(action);
  if (is_timed && begin_ns_ == 0) begin_ns_ = monotonic_ns();
  if (!std::visit([this](const auto& each) { return carry_out(each); }, action)) return false;
  const auto name = [](const auto& each) { return each.kPhase; };
  if (is_timed) phases_.push_back({std::visit(name, action), begin_ns_, monotonic_ns()});
  begin_ns_ = 0;
  return true;
}

bool Run::carry_out(const Start& start) {
  workspace_->message(start.message).start();
  return true;
}

bool Run::carry_out(const Wait& wait) {
  for (; n_complete_ < wait.messages.size(); ++n_complete_) {
    if (!workspace_->message(wait.messages[n_complete_]).test()) return false;
    note_move();
  }
  n_complete_ = 0;
  return true;
}

bool Run::carry_out(const Combine& combine) {
  ringcomm::combine(combine.op, combine.dtype, workspace_->at(combine.total),
                    workspace_->at(combine.x), combine.total.nbytes / itemsize(combine.dtype));
  return true;
}

bool Run::carry_out(const CombineAtOnce& combine) {
  std::vector<const void*> sources;
  sources.reserve(combine.sources.size());
  for (const Span& source : combine.sources) sources.push_back(workspace_->at(source));
  ringcomm::combine_at_once(combine.op, combine.dtype, workspace_->at(combine.out), sources.data(),
                            sources.size(), combine.out.nbytes / itemsize(combine.dtype),
                            combine.divisor);
  return true;
}

bool Run::carry_out(const Divide& divide) {
  ringcomm::divide(divide.dtype, workspace_->at(divide.total),
                   divide.total.nbytes / itemsize(divide.dtype), divide.divisor);
  return true;
}

bool Run::carry_out(const Copy& copy) {
  std::memmove(workspace_->at(copy.out), workspace_->at(copy.x), copy.out.nbytes);
  return true;
}

}  // namespace ringcomm
