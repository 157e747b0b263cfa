// Large collectives between hosts: a step in which the ranks agree, and then a schedule that moves the data.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "collective_step.hpp"
#include "run_schedule.hpp"

namespace ringcomm {

class ScheduledStep final : public CollectiveStep {
 public:
  // agreement: a step of which nothing is brought. The buffers of `bindings` stay the caller's.
  ScheduledStep(std::shared_ptr<CollectiveStep> agreement, std::shared_ptr<Runner> runner,
                std::shared_ptr<const Schedule> schedule, Bindings bindings);
  ~ScheduledStep() override;

  Step advance() override;
  bool needs_polling() const override { return true; }
  // Peers may still write to the buffers: they must stay alive for ever.
  void abandon() override;

  bool drive(std::int64_t limit_ns) override;
  bool agrees() const override { return agreement_->agrees(); }
  // False if others have told something else than was expected: no array was touched.
  bool is_whole() const override { return is_as_known_; }
  bool has_arrived(std::size_t member) const override { return agreement_->has_arrived(member); }
  std::size_t size() const override { return agreement_->size(); }
  std::uint64_t moves() const override;
  bool is_to_choose() const override { return agreement_->is_to_choose(); }
  const std::vector<Shown>& shown() const override { return agreement_->shown(); }
  void choose(std::vector<Pull> pulls) override;

 private:
  Step go_on();

  const std::shared_ptr<CollectiveStep> agreement_;
  const std::shared_ptr<Runner> runner_;
  const std::shared_ptr<const Schedule> schedule_;
  Bindings bindings_;
  std::shared_ptr<Run> run_;  // of whoever advances this
  std::atomic<Run*> under_way_{nullptr};  // the same
  bool is_as_known_ = true;
};

}  // namespace ringcomm
