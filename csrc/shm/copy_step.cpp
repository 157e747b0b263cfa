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

// True if the others read it until they are done, where it is.
constexpr bool is_in_place(Source kind) { return kind == Source::registered || kind == Source::readable; }

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
  } else if (what_.nbytes >= kReadable && team().all_read() && can_be_read(what_.shown, what_.nbytes)) {
    kind_ = Source::readable;
    mine.source = reinterpret_cast<std::uint64_t>(what_.shown);
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

// In which it is shown to this rank, or by it.
std::uint64_t CopyStep::segments_of(std::size_t member) const {
  const bool is_staged = member == index() ? kind_ == Source::staged || is_readable_staged_
                                           : comes_in_segments(member);
  return is_staged ? n_parts(arrival(member).nbytes, kSegment) : 0;
}

bool CopyStep::comes_in_segments(std::size_t member) const {
  const Source kind = arrival(member).kind;
  return kind == Source::staged || (kind == Source::readable && !may_read_);
}

bool CopyStep::has_segment(std::uint64_t number) const {
  for (std::size_t member = 0; member < size(); ++member)
    if (number < segments_of(member) &&
        progress(member).ready.load(std::memory_order_seq_cst) < at(number + 1))
      return false;
  return true;
}

void CopyStep::ask_for_segments() {
  may_read_ = false;
  for (std::size_t member = 0; member < size(); ++member)
    n_segments_ = std::max(n_segments_, segments_of(member));
  progress(index()).reduced.store(at(1), std::memory_order_seq_cst);
  team().ring();
}

bool CopyStep::is_asked_for_segments() const {
  for (std::size_t member = 0; member < size(); ++member)
    if (member != index() && progress(member).reduced.load(std::memory_order_seq_cst) >= at(1)) return true;
  return false;
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
    is_read_in_place_ = is_read_in_place_ || is_in_place(arrival(member).kind);
    is_any_readable_ = is_any_readable_ || arrival(member).kind == Source::readable;
  }
  if (n_segments_ != 0) team().try_reading();
  if (kind_ == Source::staged)
    take_lane_for(what_.shown);
  else if (n_segments_ != 0 && kind_ != Source::readable)
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
  if (!has_place() || (is_in_place(kind_) && !all_at(&StepProgress::done, kAllDone)))
    return has_moved ? Step::moved : Step::waiting;
  finish();
  return Step::moved;
}

bool CopyStep::show() {
  constexpr std::uint64_t n_places = kLane / kSegment;
  if (kind_ == Source::readable && !is_readable_staged_ && is_asked_for_segments()) {
    take_lane_for(what_.shown);
    is_readable_staged_ = true;
    n_segments_ = std::max(n_segments_, segments_of(index()));
    if (is_done_) n_pulled_ = n_segments_;  // it has told so, and reads none of them
  }
  const std::uint64_t n_own = segments_of(index());
  if (n_shown_ == n_own) return false;
  if (n_shown_ >= n_places && !all_at(&StepProgress::done, n_shown_ - n_places + 1)) return false;
  const std::size_t begin = n_shown_ * kSegment;
  std::memcpy(lane_of(index()) + n_shown_ % n_places * kSegment, what_.shown + begin,
              std::min(kSegment, what_.nbytes - begin));
  ++n_shown_;
  signal(&StepProgress::ready, n_shown_ == n_own ? kAllDone : n_shown_);
  if (is_any_readable_) team().ring();  // these ranks do not tell that they are ready
  return true;
}

// Takes a piece of what is there as a whole, then segment after segment from all that show them.
bool CopyStep::pull() {
  while (next_whole_ < what_.pulls->size()) {
    const Pull& each = (*what_.pulls)[next_whole_];
    const bool is_own = each.member == index();
    if ((!is_own && comes_in_segments(each.member)) || whole_offset_ == each.nbytes) {
      ++next_whole_;
      whole_offset_ = 0;
      continue;
    }
    const std::ptrdiff_t n =
        copy_piece(each, whole_offset_, std::min(kPiece, each.nbytes - whole_offset_));
    if (n < 0) ask_for_segments();
    if (n > 0) whole_offset_ += static_cast<std::size_t>(n);
    return n != 0;
  }
  if (n_pulled_ == n_segments_ || !has_segment(n_pulled_)) return false;
  pull_segment(n_pulled_);
  signal(&StepProgress::done, ++n_pulled_);
  return true;
}

// Returns how many bytes it has copied: 0 if the rank whose they are has ended, which others notice; less
// if this rank may not read them any more.
std::ptrdiff_t CopyStep::copy_piece(const Pull& pull, std::size_t offset, std::size_t nbytes) {
  const Arrival& from = arrival(pull.member);
  std::byte* const to = pull.target + offset;
  const std::size_t at = pull.offset + offset;
  if (pull.member == index()) {
    std::memcpy(to, what_.shown + at, nbytes);
  } else if (from.kind == Source::readable) {
    return team().read(pull.member, from.source + at, to, nbytes);
  } else if (from.kind == Source::inlined) {
    std::memcpy(to, inlined(pull.member) + at, nbytes);
  } else {
    std::memcpy(to, team().mate(pull.member).arena + from.source + at, nbytes);
  }
  return static_cast<std::ptrdiff_t>(nbytes);
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
    if (each.member == index() || !comes_in_segments(each.member)) continue;
    const std::size_t from = std::max(begin, each.offset);
    const std::size_t to = std::min(end, each.offset + each.nbytes);
    if (to <= from) continue;
    const std::byte* shown = lane_of(each.member) + place * kSegment;
    std::memcpy(each.target + (from - each.offset), shown + (from - begin), to - from);
  }
}

}  // namespace ringcomm
