#include "scheduled_step.hpp"

#include <stdexcept>
#include <utility>

#include "loop.hpp"

namespace ringcomm {

ScheduledStep::ScheduledStep(std::shared_ptr<CollectiveStep> agreement, std::shared_ptr<Runner> runner,
                             std::shared_ptr<const Schedule> schedule, Bindings bindings)
    : agreement_(std::move(agreement)),
      runner_(std::move(runner)),
      schedule_(std::move(schedule)),
      bindings_(std::move(bindings)) {}

ScheduledStep::~ScheduledStep() {
  if (!is_over()) abandon();
}

std::uint64_t ScheduledStep::moves() const {
  const Run* const run = under_way_.load(std::memory_order_acquire);
  return run == nullptr ? 0 : 1 + run->moves();
}

// What is chosen differs from what the schedule is for.
void ScheduledStep::choose(std::vector<Pull> pulls) {
  is_as_known_ = false;
  agreement_->choose(std::move(pulls));
}

Program::Step ScheduledStep::advance() {
  if (is_over()) return Step::waiting;
  try {
    return go_on();
  } catch (const std::exception& problem) {
    abandon();
    end(problem.what());
    return Step::moved;
  }
}

Program::Step ScheduledStep::go_on() {
  if (!agreement_->is_over()) {
    const Step step = agreement_->advance();
    if (!agreement_->is_over()) return step;
  }
  if (!agreement_->fault().empty() || !agreement_->agrees() || !is_as_known_) {
    end(agreement_->fault());
    return Step::moved;
  }
  if (run_ == nullptr) {
    run_ = runner_->run(schedule_, std::move(bindings_));
    under_way_.store(run_.get(), std::memory_order_release);
  }
  const Step step = run_->advance();
  if (run_->is_over()) end(run_->fault());
  return step;
}

void ScheduledStep::abandon() {
  if (is_over()) return;
  agreement_->abandon();
  if (run_ != nullptr) run_->abandon();
}

bool ScheduledStep::drive(std::int64_t limit_ns) { return drive_polling(*this, limit_ns); }

KnownSchedule::KnownSchedule(std::shared_ptr<MeetingPlace> place, std::uint64_t fingerprint, Shown mine,
                             std::vector<Shown> expected, std::shared_ptr<Runner> runner,
                             std::shared_ptr<const Schedule> schedule, std::vector<int> members, int first_tag,
                             int tag_stride, std::int64_t moment_ns)
    : KnownCall(std::move(place), fingerprint, moment_ns),
      mine_(std::move(mine)),
      expected_(std::make_shared<const std::vector<Shown>>(std::move(expected))),
      runner_(std::move(runner)),
      schedule_(std::move(schedule)),
      members_(std::move(members)),
      first_tag_(first_tag),
      tag_stride_(tag_stride) {
  if (!expected_->empty() && expected_->size() != this->place().n_members())
    throw std::invalid_argument("what is expected must be told for each member");
  if (schedule_->n_arguments() != 2) throw std::invalid_argument("a known schedule has a source and a target");
  for (const MessageSpec& each : schedule_->messages())
    if (static_cast<std::size_t>(each.peer) >= members_.size())
      throw std::invalid_argument("the schedule speaks to more ranks than there are");
}

std::shared_ptr<CollectiveStep> KnownSchedule::begin(std::size_t slot, const std::byte* source,
                                                     std::byte* target) const {
  NodeCopy what{source, mine_.nbytes, mine_.header, std::vector<Pull>{}, nullptr, nullptr, true, true};
  if (!expected_->empty()) what.expected = expected_;
  auto agreement = place().begin(slot, fingerprint(), std::move(what));
  Bindings bindings{{const_cast<std::byte*>(source), target},
                    members_,
                    first_tag_ + static_cast<int>(slot) * tag_stride_};
  return std::make_shared<ScheduledStep>(std::move(agreement), runner_, schedule_, std::move(bindings));
}

}  // namespace ringcomm
