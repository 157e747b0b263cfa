// Reductions of which a buffer is private: segment after segment passes through lanes.
#include <algorithm>
#include <cstring>

#include "reduce_step.hpp"
#include "step_sizes.hpp"

namespace ringcomm {
namespace {

std::size_t segment_nbytes(std::size_t size) {
  return std::max(kSegment / size / kLine, std::size_t{1}) * kLine;
}

}  // namespace

ReduceStep::Staged::Staged(ReduceStep& step)
    : step_(step),
      is_registered_(step.arrival(step.index()).kind == Source::registered),
      segment_(segment_nbytes(step.size())) {
  for (std::size_t owner = 0; owner < step_.size(); ++owner) {
    const auto [begin, end] = step_.slice(owner);
    n_segments_ = std::max<std::uint64_t>(n_segments_, n_parts(end - begin, segment_));
  }
  step_.take_lane_for(step_.what_.source);
}

Program::Step ReduceStep::Staged::work() {
  bool has_moved = copy_in();
  has_moved = reduce_segment() || has_moved;
  has_moved = fetch() || has_moved;
  const Step so_far = has_moved ? Step::moved : Step::waiting;
  if (n_fetched_ < n_segments_) return so_far;
  // Who gets the result has seen that all have read.
  const bool is_read = is_registered_ && !step_.is_due(step_.index());
  if (is_read && !step_.all_at(&StepProgress::done, n_segments_)) return so_far;
  step_.signal(&StepProgress::done, kAllDone);
  step_.finish();
  return Step::moved;
}

ReduceStep::Range ReduceStep::Staged::segment(std::size_t owner, std::uint64_t number) const {
  const auto [begin, end] = step_.slice(owner);
  const std::size_t from = std::min(begin + number * segment_, end);
  return {from, std::min(from + segment_, end)};
}

// Segments that a lane holds at a time.
std::size_t ReduceStep::Staged::n_places() const { return kLane / (segment_ * step_.size()); }

std::byte* ReduceStep::Staged::place(std::size_t member, std::size_t owner,
                                     std::uint64_t number) const {
  const std::size_t at = number % n_places();
  return step_.lane_of(member) + (at * step_.size() + owner) * segment_;
}

bool ReduceStep::Staged::copy_in() {
  if (n_copied_ == n_segments_) return false;
  if (n_copied_ >= n_places() && !step_.all_at(&StepProgress::done, n_copied_ - n_places() + 1))
    return false;
  const std::size_t me = step_.index();
  for (std::size_t owner = 0; owner < step_.size() && !is_registered_; ++owner) {
    const auto [begin, end] = segment(owner, n_copied_);
    if (owner != me && end > begin)
      std::memcpy(place(me, owner, n_copied_), step_.what_.source + begin, end - begin);
  }
  step_.signal(&StepProgress::ready, ++n_copied_);
  return true;
}

bool ReduceStep::Staged::reduce_segment() {
  if (n_reduced_ == n_copied_ || !step_.all_at(&StepProgress::ready, n_reduced_ + 1)) return false;
  const NodeReduction& what = step_.what_;
  const std::size_t me = step_.index();
  const auto [begin, end] = segment(me, n_reduced_);
  for (std::size_t member = 0; member < step_.size(); ++member)
    step_.sources_[member] =
        member == me                                       ? what.source + begin
        : step_.arrival(member).kind == Source::registered ? step_.source_of(member, begin)
                                                           : place(member, me, n_reduced_);
  step_.targets_.clear();
  if (what.to == Target::owner) {
    step_.targets_.push_back(step_.own_target(begin));
  } else {
    const bool is_due = step_.is_due(me);
    const bool is_fetched = what.to == Target::all ? step_.size() > 1 : !is_due;
    if (is_fetched) step_.targets_.push_back(place(me, me, n_reduced_));
    if (is_due) step_.targets_.push_back(what.target + begin);
  }
  step_.reduce(end - begin);
  step_.signal(&StepProgress::reduced, ++n_reduced_);
  return true;
}

bool ReduceStep::Staged::fetch() {
  if (n_fetched_ == n_reduced_) return false;
  const std::size_t me = step_.index();
  if (step_.is_due(me)) {
    if (!step_.all_at(&StepProgress::reduced, n_fetched_ + 1)) return false;
    for (std::size_t shift = 1; shift < step_.size(); ++shift) {
      const std::size_t owner = (me + shift) % step_.size();
      const auto [begin, end] = segment(owner, n_fetched_);
      if (end > begin)
        std::memcpy(step_.what_.target + begin, place(owner, owner, n_fetched_), end - begin);
    }
  }
  step_.signal(&StepProgress::done, ++n_fetched_);
  return true;
}

}  // namespace ringcomm
