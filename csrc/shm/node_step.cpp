#include "node_step.hpp"

#include "../loop/loop.hpp"

#include <atomic>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

namespace ringcomm {
namespace {

class Touch {
 public:
  Touch(std::atomic<std::uint64_t>& flag, std::uint64_t seq) : flag_(flag) {
    flag_.store(seq, std::memory_order_seq_cst);
  }
  Touch(const Touch&) = delete;
  Touch& operator=(const Touch&) = delete;
  ~Touch() { flag_.store(0, std::memory_order_release); }

 private:
  std::atomic<std::uint64_t>& flag_;
};

}  // namespace

Meeting::Meeting(std::shared_ptr<Team> team_, std::size_t slot_, std::uint64_t fingerprint_)
    : team(std::move(team_)), slot(slot_), fingerprint(fingerprint_) {
  if (slot >= kSlots) throw std::invalid_argument("no slot " + std::to_string(slot));
}

NodeStep::NodeStep(Meeting meeting)
    : meeting_(std::move(meeting)),
      seq_(meeting_.team->next_step(meeting_.slot)) {}

bool NodeStep::drive(std::int64_t limit_ns) {
  return ringcomm::drive(*this, *team().me().bell, team().patience(), limit_ns);
}

NodeStep::~NodeStep() {
  if ((is_over() && !lane_) || !meeting_.team->memory().is_of_this_process()) return;
  if (!is_over()) give_up();
  if (lane_ && meeting_.team->is_retired()) meeting_.team->give_back({lane_->offset, slot(), 0});
}

Arrival& NodeStep::arrival(std::size_t member) const {
  return meeting_.team->slot(member, slot()).arrival[seq_ % 2];
}

StepProgress& NodeStep::progress(std::size_t member) const {
  return meeting_.team->slot(member, slot()).progress;
}

std::byte* NodeStep::payload(std::size_t member) const {
  return meeting_.team->mate(member).window->payload[slot()][seq_ % 2];
}

void NodeStep::signal(std::atomic<std::uint64_t> StepProgress::* counter, std::uint64_t n) {
  meeting_.team->signal(slot(), counter, at(n));
}

bool NodeStep::all_at(std::atomic<std::uint64_t> StepProgress::* counter, std::uint64_t n) const {
  return meeting_.team->all_at(slot(), counter, at(n));
}

// The place is overwritten in the next step of the slot, once all have arrived there, and so have read it.
void NodeStep::give_place(std::uint64_t place) {
  progress(index()).place = place;
  progress(index()).placed.store(seq_, std::memory_order_seq_cst);
  meeting_.team->ring();
}

bool NodeStep::find_place(std::uint64_t& place) const {
  if (progress(0).placed.load(std::memory_order_seq_cst) != seq_) return false;
  place = progress(0).place;
  return true;
}

void NodeStep::take_lane_for(const void* buffer) {
  lane_ = meeting_.team->take_lane();
  progress(index()).lane = lane_->offset + skew_from(buffer);
}

std::byte* NodeStep::lane_of(std::size_t member) const {
  return meeting_.team->mate(member).arena + progress(member).lane;
}

void NodeStep::arrive() {
  Arrival& mine = arrival(index());
  mine.fingerprint = meeting_.fingerprint;
  mine.seq.store(seq_, std::memory_order_seq_cst);
  if (all_here()) meeting_.team->ring();
}

bool NodeStep::has_arrived(std::size_t member) const {
  return arrival(member).seq.load(std::memory_order_seq_cst) >= seq_;
}

bool NodeStep::all_here() {
  while (n_here_ < size() && has_arrived(n_here_)) ++n_here_;
  return n_here_ == size();
}

// To be asked while this rank is `touching`, so after it has arrived: a member that gives up before all
// have arrived is seen by whoever comes later.
void NodeStep::require_nobody_gave_up() {
  for (std::size_t member = 0; member < size(); ++member)
    if (has_given_up(member)) {
      quitter_ = member;
      throw std::runtime_error("a rank has given this operation up");
    }
}

bool NodeStep::has_given_up(std::size_t member) const {
  return arrival(member).abandoned.load(std::memory_order_seq_cst) == seq_;
}

Program::Step NodeStep::advance() {
  if (is_over()) return Step::waiting;
  if (meeting_.team->is_retired()) {
    fail("the ranks of this operation have ended their work together");
    return Step::moved;
  }
  try {
    return go_on();
  } catch (const std::exception& error) {  // or no room for a lane: this rank alone cannot go on
    fail(error.what());
    return Step::moved;
  }
}

Program::Step NodeStep::go_on() {
  // A thread of this rank may have given it up, see Team::abandon().
  if (!has_met_ && !all_here() && !has_given_up(index())) return Step::waiting;
  const Touch here(meeting_.team->slot(index(), slot()).presence.touching, seq_);
  require_nobody_gave_up();
  if (!has_met_) {
    has_met_ = true;
    for (std::size_t member = 0; member < size(); ++member)
      agrees_ = agrees_ && arrival(member).fingerprint == meeting_.fingerprint;
    if (!agrees_) {
      finish();
      return Step::moved;
    }
    meet();
  }
  return work();
}

void NodeStep::finish() {
  if (lane_) {
    lane_->slot = slot();
    lane_->until = at(kAllDone);
    meeting_.team->give_back(*lane_);
    lane_.reset();
  }
  meeting_.team->close_step(slot());
  end();
}

void NodeStep::fail(const char* why) {
  give_up();
  end(why);
}

void NodeStep::abandon() {
  while (advance() == Step::moved) {
  }
  if (!is_over()) fail("this rank has given it up");
}

void NodeStep::give_up() {
  if (meeting_.team->is_retired()) return;  // another team may use the windows already
  arrival(index()).abandoned.store(seq_, std::memory_order_seq_cst);
  meeting_.team->ring();
  meeting_.team->await_untouched(slot(), seq_, monotonic_ns() + kStuckNs);
  meeting_.team->close_step(slot());
}

}  // namespace ringcomm
