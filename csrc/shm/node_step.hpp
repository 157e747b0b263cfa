// One meeting of a team in a slot: all arrive, compare what they are about to do, and do it; unless one
// of them gives up.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "../loop/collective_step.hpp"
#include "team.hpp"

namespace ringcomm {

// Where a step takes place, and what all members must agree on. Throws std::invalid_argument if there
// is no such slot.
struct Meeting {
  Meeting(std::shared_ptr<Team> team, std::size_t slot, std::uint64_t fingerprint);

  std::shared_ptr<Team> team;
  std::size_t slot;
  std::uint64_t fingerprint;
};

class NodeStep : public CollectiveStep {
 public:
  ~NodeStep() override;  // as abandon(), if it is not over
  Step advance() final;
  bool needs_polling() const final { return false; }
  bool drive(std::int64_t limit_ns) final;

  // Completes it if all have arrived and nobody need be waited for. Else gives it up: no member that
  // looks at it later touches anything, and one that does so now is waited for. One that lives and
  // needs longer than kStuckNs, for it was stopped, may still write once it goes on.
  void abandon() final;

  bool agrees() const final { return agrees_; }
  bool has_arrived(std::size_t member) const final;
  std::optional<std::size_t> quitter() const final { return quitter_; }
  std::size_t size() const final { return meeting_.team->size(); }
  Team& team() const { return *meeting_.team; }

 protected:
  explicit NodeStep(Meeting meeting);

  // The derived class has written its arrival: lets the others see it.
  void arrive();
  Arrival& arrival(std::size_t member) const;
  StepProgress& progress(std::size_t member) const;
  std::byte* payload(std::size_t member) const;
  std::uint64_t at(std::uint64_t n) const { return progress_of(seq_, n); }
  void signal(std::atomic<std::uint64_t> StepProgress::* counter, std::uint64_t n);
  bool all_at(std::atomic<std::uint64_t> StepProgress::* counter, std::uint64_t n) const;
  // Member 0 gives the step its place; false as long as it has not.
  void give_place(std::uint64_t place);
  bool find_place(std::uint64_t& place) const;
  // Takes a lane through which `buffer`, private memory of this rank, passes; given back at the end.
  // If the step is abandoned, others may read it until the team is retired.
  void take_lane_for(const void* buffer);
  std::byte* lane_of(std::size_t member) const;
  std::size_t index() const { return meeting_.team->index(); }
  std::size_t slot() const { return meeting_.slot; }
  void finish();

  virtual void meet() = 0;   // all are here, and agree
  virtual Step work() = 0;   // goes on by a piece; calls finish() at the end

 private:
  bool all_here();
  void require_nobody_gave_up();
  bool has_given_up(std::size_t member) const;
  Step go_on();
  void fail(const char* why);
  void give_up();

  Meeting meeting_;
  std::uint64_t seq_;
  std::size_t n_here_ = 0;
  std::optional<std::size_t> quitter_;
  bool has_met_ = false;
  bool agrees_ = true;
  std::optional<Lane> lane_;
};

}  // namespace ringcomm
