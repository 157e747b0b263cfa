// Large collectives between hosts: a step in which the ranks agree, and then a schedule that moves the data.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "../shm/known_call.hpp"
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

// A collective by messages that are too long to go along with the agreement.
class KnownSchedule final : public KnownCall {
 public:
  // place: of ranks that take steps by messages.
  // mine: of which the header goes along with the agreement.
  // expected: as of KnownCopy.
  // schedule: has two arguments, the source and the target, which may be written to both.
  // members: the ranks of the job that the schedule speaks to.
  // first_tag, tag_stride: of its messages, by slot.
  // Throws std::invalid_argument.
  KnownSchedule(std::shared_ptr<MeetingPlace> place, std::uint64_t fingerprint, Shown mine,
                std::vector<Shown> expected, std::shared_ptr<Runner> runner,
                std::shared_ptr<const Schedule> schedule, std::vector<int> members, int first_tag, int tag_stride,
                std::int64_t moment_ns);

  std::size_t source_nbytes() const override { return schedule_->buffers()[0]; }
  std::size_t target_nbytes() const override { return schedule_->buffers()[1]; }

 private:
  std::shared_ptr<CollectiveStep> begin(std::size_t slot, const std::byte* source,
                                        std::byte* target) const override;

  const Shown mine_;
  const std::shared_ptr<const std::vector<Shown>> expected_;
  const std::shared_ptr<Runner> runner_;
  const std::shared_ptr<const Schedule> schedule_;
  const std::vector<int> members_;
  const int first_tag_, tag_stride_;
};

}  // namespace ringcomm
