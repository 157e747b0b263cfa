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

}  // namespace ringcomm
