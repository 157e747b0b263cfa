#include "copy_step.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "step_sizes.hpp"

namespace ringcomm {
namespace {

// Where inlined bytes begin behind a header.
constexpr std::size_t behind(std::size_t header_nbytes) { return (header_nbytes + 15) / 16 * 16; }

}  // namespace

CopyStep::CopyStep(Meeting meeting, NodeCopy copy)
    : NodeStep(std::move(meeting)), what_(std::move(copy)) {
  if (what_.header.size() > kInline) throw std::invalid_argument("the header is too long");
  const NodeMemory& memory = team().memory();
  Arrival& mine = arrival(index());
  mine.header_nbytes = what_.header.size();
  mine.nbytes = what_.nbytes;
  mine.has_target = 0;
  std::byte* const here = payload(index());
  if (!what_.header.empty()) std::memcpy(here, what_.header.data(), what_.header.size());
  if (behind(what_.header.size()) + what_.nbytes <= kInline) {
    kind_ = Source::inlined;
    if (what_.nbytes != 0) std::memcpy(here + behind(what_.header.size()), what_.shown, what_.nbytes);
  } else if (memory.holds(what_.shown, what_.nbytes)) {
    kind_ = Source::registered;
    mine.source = static_cast<std::uint64_t>(what_.shown - memory.arena());
  } else {
    kind_ = Source::staged;
  }
  mine.kind = kind_;
  arrive();
}

void CopyStep::choose(std::vector<Pull> pulls) {
  if (!is_to_choose()) throw std::logic_error("this step is not to be told what to pull");
  what_.pulls = std::move(pulls);
  is_to_choose_.store(false, std::memory_order_release);
  team().me().bell->ring();  // whoever advances it may sleep
}

std::uint64_t CopyStep::segments_of(std::size_t member) const {
  const Arrival& each = arrival(member);
  return each.kind == Source::staged ? n_parts(each.nbytes, kSegment) : 0;
}

const std::byte* CopyStep::inlined(std::size_t member) const {
  return payload(member) + behind(arrival(member).header_nbytes);
}

Shown CopyStep::shown_by(std::size_t member) const {
  const Arrival& each = arrival(member);
  const auto* const header = reinterpret_cast<const char*>(payload(member));
  return {std::string(header, each.header_nbytes), each.nbytes};
}

bool CopyStep::is_as_expected() const {
  for (std::size_t member = 0; member < size(); ++member) {
    const Shown& due = (*what_.expected)[member];
    const Arrival& each = arrival(member);
    if (each.nbytes != due.nbytes || each.header_nbytes != due.header.size() ||
        std::memcmp(payload(member), due.header.data(), due.header.size()) != 0)
      return false;
  }
  return true;
}

void CopyStep::meet() {
  for (std::size_t member = 0; member < size(); ++member) {
    n_segments_ = std::max(n_segments_, segments_of(member));
    is_read_in_place_ = is_read_in_place_ || arrival(member).kind == Source::registered;
  }
  if (kind_ == Source::staged)
    take_lane_for(what_.shown);
  else if (n_segments_ != 0)
    signal(&StepProgress::ready, kAllDone);  // nobody waits for this rank
  if (what_.places && index() == 0) give_place(what_.places->take());
  if (what_.pulls && (!what_.expected || is_as_expected())) return;
  for (std::size_t member = 0; member < size(); ++member) shown_.push_back(shown_by(member));
  is_to_choose_.store(true, std::memory_order_release);
}

void CopyStep::require_shown() const {
  for (const Pull& each : *what_.pulls)
    if (each.offset + each.nbytes > arrival(each.member).nbytes)
      throw std::runtime_error("a rank shows fewer bytes than another was to read");
}

Program::Step CopyStep::work() {
  bool has_moved = show();
  if (is_to_choose()) {
    if (!std::exchange(has_told_, true)) return Step::news;
    return has_moved ? Step::moved : Step::waiting;
  }
  if (!std::exchange(has_begun_, true)) require_shown();
  has_moved = pull() || has_moved;
  const bool has_all = next_whole_ == what_.pulls->size() && n_pulled_ == n_segments_;
  if (!has_all || n_shown_ < segments_of(index())) return has_moved ? Step::moved : Step::waiting;
  if (!std::exchange(is_done_, true) && (n_segments_ != 0 || is_read_in_place_))
    signal(&StepProgress::done, kAllDone);
  if (!has_place() || (kind_ == Source::registered && !all_at(&StepProgress::done, kAllDone)))
    return has_moved ? Step::moved : Step::waiting;
  finish();
  return Step::moved;
}

bool CopyStep::show() {
  constexpr std::uint64_t n_places = kLane / kSegment;
  const std::uint64_t n_own = segments_of(index());
  if (n_shown_ == n_own) return false;
  if (n_shown_ >= n_places && !all_at(&StepProgress::done, n_shown_ - n_places + 1)) return false;
  const std::size_t begin = n_shown_ * kSegment;
  std::memcpy(lane_of(index()) + n_shown_ % n_places * kSegment, what_.shown + begin,
              std::min(kSegment, what_.nbytes - begin));
  ++n_shown_;
  signal(&StepProgress::ready, n_shown_ == n_own ? kAllDone : n_shown_);
  return true;
}

// Takes a piece of what is there as a whole, then segment after segment from all that show them.
bool CopyStep::pull() {
  while (next_whole_ < what_.pulls->size()) {
    const Pull& each = (*what_.pulls)[next_whole_];
    const Arrival& from = arrival(each.member);
    const bool is_own = each.member == index();
    if ((from.kind == Source::staged && !is_own) || whole_offset_ == each.nbytes) {
      ++next_whole_;
      whole_offset_ = 0;
      continue;
    }
    const std::byte* whole = is_own                           ? what_.shown
                             : from.kind == Source::inlined ? inlined(each.member)
                                                            : team().mate(each.member).arena + from.source;
    const std::size_t n = std::min(kPiece, each.nbytes - whole_offset_);
    std::memcpy(each.target + whole_offset_, whole + each.offset + whole_offset_, n);
    whole_offset_ += n;
    return true;
  }
  if (n_pulled_ == n_segments_ || !all_at(&StepProgress::ready, n_pulled_ + 1)) return false;
  pull_segment(n_pulled_);
  signal(&StepProgress::done, ++n_pulled_);
  return true;
}

bool CopyStep::has_place() {
  if (!what_.places || is_placed_) return true;
  is_placed_ = find_place(place_);
  return is_placed_;
}

void CopyStep::pull_segment(std::uint64_t number) {
  const std::size_t place = number % (kLane / kSegment);
  const std::size_t begin = number * kSegment, end = begin + kSegment;
  for (const Pull& each : *what_.pulls) {
    if (arrival(each.member).kind != Source::staged || each.member == index()) continue;
    const std::size_t from = std::max(begin, each.offset);
    const std::size_t to = std::min(end, each.offset + each.nbytes);
    if (to <= from) continue;
    const std::byte* shown = lane_of(each.member) + place * kSegment;
    std::memcpy(each.target + (from - each.offset), shown + (from - begin), to - from);
  }
}

}  // namespace ringcomm
