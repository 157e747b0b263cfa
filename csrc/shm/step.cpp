#include "step.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "../kernels/reduce.hpp"

namespace ringcomm {
namespace {

constexpr std::size_t kInlineTotal = 64u << 10;  // what a rank may have to read to do it all itself
constexpr std::size_t kPiece = 256u << 10;       // of each buffer, before other work gets its turn
constexpr std::size_t kSegment = 256u << 10;     // of each buffer, on its way through the lanes
constexpr std::size_t kLine = 64;

std::size_t n_parts(std::size_t nbytes, std::size_t part) { return (nbytes + part - 1) / part; }

}  // namespace

// --- reductions ----------------------------------------------------------------------------------

ReduceStep::ReduceStep(Meeting meeting, Reduction reduction)
    : NodeStep(std::move(meeting)), what_(std::move(reduction)) {
  const std::size_t nbytes = what_.bounds.back();
  const NodeMemory& memory = team().memory();
  Arrival& mine = arrival(index());
  mine.nbytes = nbytes;
  mine.has_target = 0;
  is_registered_ = !is_inline() && memory.holds(what_.source, nbytes);
  if (is_inline()) {
    mine.kind = Source::inlined;
    if (nbytes != 0) std::memcpy(payload(index()), what_.source, nbytes);
  } else if (is_registered_) {
    mine.kind = Source::registered;
    mine.source = static_cast<std::uint64_t>(what_.source - memory.arena());
  } else {
    mine.kind = Source::staged;
  }
  if (!is_inline() && is_due(index()) && memory.holds(what_.target, nbytes)) {
    mine.has_target = 1;
    mine.target = static_cast<std::uint64_t>(what_.target - memory.arena());
  }
  arrive();
}

bool ReduceStep::is_inline() const {
  const std::size_t nbytes = what_.bounds.back();
  return nbytes <= kInline && nbytes * size() <= kInlineTotal;
}

// Whether a member gets the whole result.
bool ReduceStep::is_due(std::size_t member) const {
  return what_.to == Target::all || (what_.to == Target::root && member == what_.root);
}

ReduceStep::Range ReduceStep::slice(std::size_t owner) const {
  return {what_.bounds[owner], what_.bounds[owner + 1]};
}

ReduceStep::Range ReduceStep::segment(std::size_t owner, std::uint64_t number) const {
  const auto [begin, end] = slice(owner);
  const std::size_t from = std::min(begin + number * segment_, end);
  return {from, std::min(from + segment_, end)};
}

std::size_t ReduceStep::pieces(std::size_t owner) const {
  const auto [begin, end] = slice(owner);
  return n_parts(end - begin, kPiece);
}

void ReduceStep::meet() {
  sources_.resize(size());
  targets_.clear();
  if (is_inline()) {
    mode_ = Mode::inlined;
    return;
  }
  bool is_all_registered = true;
  for (std::size_t member = 0; member < size(); ++member) {
    const Arrival& each = arrival(member);
    is_all_registered = is_all_registered && each.kind == Source::registered &&
                        (each.has_target != 0 || !is_due(member));
  }
  mode_ = is_all_registered ? Mode::registered : Mode::staged;
  if (mode_ == Mode::registered) return;
  segment_ = std::max(kSegment / size() / kLine, std::size_t{1}) * kLine;
  for (std::size_t owner = 0; owner < size(); ++owner) {
    const auto [begin, end] = slice(owner);
    n_segments_ = std::max<std::uint64_t>(n_segments_, n_parts(end - begin, segment_));
  }
  take_lane_for(what_.source);
}

Program::Step ReduceStep::work() {
  switch (mode_) {
    case Mode::inlined:
      return work_inline();
    case Mode::registered:
      return what_.to == Target::owner ? work_own_slice() : work_registered();
    case Mode::staged:
      return work_staged();
  }
  return Step::waiting;
}

void ReduceStep::reduce(const std::vector<const void*>& sources, const std::vector<void*>& targets,
                        std::size_t nbytes) const {
  if (nbytes == 0 || targets.empty()) return;
  reduce_many(what_.op, what_.dtype, targets.data(), targets.size(), sources.data(), sources.size(),
              nbytes / itemsize(what_.dtype), what_.divisor);
}

Program::Step ReduceStep::work_inline() {
  const Range range = what_.to == Target::owner ? slice(index()) : Range{0, what_.bounds.back()};
  if (what_.to == Target::owner || is_due(index())) {
    for (std::size_t member = 0; member < size(); ++member)
      sources_[member] = payload(member) + range.begin;
    targets_ = {what_.target};
    reduce(sources_, targets_, range.end - range.begin);
  }
  finish();
  return Step::moved;
}

Program::Step ReduceStep::work_registered() {
  if (const auto piece = claim()) {
    targets_.clear();
    for (std::size_t member = 0; member < size(); ++member) {
      const Arrival& each = arrival(member);
      std::byte* arena = team().mate(member).arena;
      sources_[member] = arena + each.source + piece->begin;
      if (is_due(member)) targets_.push_back(arena + each.target + piece->begin);
    }
    reduce(sources_, targets_, piece->end - piece->begin);
    note_finished(claimed_);
    return Step::moved;
  }
  if (!is_all_finished()) return Step::waiting;
  finish();
  return Step::moved;
}

// The next piece: of this rank's slice, then of those of the others that are late.
std::optional<ReduceStep::Range> ReduceStep::claim() {
  for (std::size_t shift = 0; shift < size(); ++shift) {
    claimed_ = (index() + shift) % size();
    if (const auto piece = claim_of(claimed_)) return piece;
  }
  return {};
}

std::optional<ReduceStep::Range> ReduceStep::claim_of(std::size_t owner) {
  std::atomic<std::uint64_t>& taken = team().slot(owner, slot()).claims.taken;
  const std::size_t n_pieces = pieces(owner);
  std::uint64_t now = taken.load(std::memory_order_seq_cst);
  while (true) {
    const std::uint64_t before = std::max(now, at(0));  // what stands there is of an earlier step
    if (before >= at(n_pieces)) return {};
    if (!taken.compare_exchange_weak(now, before + 1, std::memory_order_seq_cst)) continue;
    const auto [begin, end] = slice(owner);
    const std::size_t from = begin + (before - at(0)) * kPiece;
    return Range{from, std::min(from + kPiece, end)};
  }
}

void ReduceStep::note_finished(std::size_t owner) {
  std::atomic<std::uint64_t>& finished = team().slot(owner, slot()).claims.finished;
  std::uint64_t now = finished.load(std::memory_order_seq_cst);
  while (!finished.compare_exchange_weak(now, std::max(now, at(0)) + 1, std::memory_order_seq_cst)) {
  }
  if (is_all_finished()) team().ring();
}

bool ReduceStep::is_all_finished() const {
  for (std::size_t owner = 0; owner < size(); ++owner) {
    const Slot& each = team().slot(owner, slot());
    const std::size_t n_pieces = pieces(owner);
    if (n_pieces != 0 && each.claims.finished.load(std::memory_order_seq_cst) < at(n_pieces))
      return false;
  }
  return true;
}

Program::Step ReduceStep::work_own_slice() {
  if (piece_ < pieces(index())) {
    const auto [begin, end] = slice(index());
    const std::size_t from = begin + piece_ * kPiece, to = std::min(from + kPiece, end);
    for (std::size_t member = 0; member < size(); ++member)
      sources_[member] = team().mate(member).arena + arrival(member).source + from;
    targets_ = {what_.target + (from - begin)};
    reduce(sources_, targets_, to - from);
    ++piece_;
    if (piece_ == pieces(index())) signal(&Progress::done, kAllDone);
    return Step::moved;
  }
  if (pieces(index()) == 0 && n_reduced_++ == 0) signal(&Progress::done, kAllDone);
  if (!all_at(&Progress::done, kAllDone)) return Step::waiting;  // they read what is this rank's
  finish();
  return Step::moved;
}

Program::Step ReduceStep::work_staged() {
  bool has_moved = copy_in();
  has_moved = reduce_segment() || has_moved;
  has_moved = fetch() || has_moved;
  if (n_fetched_ < n_segments_) return has_moved ? Step::moved : Step::waiting;
  const bool is_read = is_registered_ && !is_due(index());  // if it is due, all have read already
  if (is_read && !all_at(&Progress::done, n_segments_))
    return has_moved ? Step::moved : Step::waiting;
  signal(&Progress::done, kAllDone);
  finish();
  return Step::moved;
}

std::byte* ReduceStep::staged(std::size_t member, std::size_t owner, std::uint64_t number) const {
  const std::size_t place = number % (kLane / (segment_ * size()));
  return lane_of(member) + (place * size() + owner) * segment_;
}

bool ReduceStep::copy_in() {
  const std::uint64_t n_places = kLane / (segment_ * size());
  if (n_copied_ == n_segments_) return false;
  if (n_copied_ >= n_places && !all_at(&Progress::done, n_copied_ - n_places + 1)) return false;
  for (std::size_t owner = 0; owner < size() && !is_registered_; ++owner) {
    const auto [begin, end] = segment(owner, n_copied_);
    if (owner != index() && end > begin)
      std::memcpy(staged(index(), owner, n_copied_), what_.source + begin, end - begin);
  }
  signal(&Progress::ready, ++n_copied_);
  return true;
}

bool ReduceStep::reduce_segment() {
  if (n_reduced_ == n_copied_ || !all_at(&Progress::ready, n_reduced_ + 1)) return false;
  const auto [begin, end] = segment(index(), n_reduced_);
  for (std::size_t member = 0; member < size(); ++member) {
    const Arrival& each = arrival(member);
    sources_[member] = member == index() ? what_.source + begin
                       : each.kind == Source::registered
                           ? team().mate(member).arena + each.source + begin
                           : staged(member, index(), n_reduced_);
  }
  targets_.clear();
  if (what_.to == Target::owner) {
    targets_.push_back(what_.target + (begin - what_.bounds[index()]));
  } else {
    const bool is_fetched = what_.to == Target::all ? size() > 1 : !is_due(index());
    if (is_fetched) targets_.push_back(staged(index(), index(), n_reduced_));
    if (is_due(index())) targets_.push_back(what_.target + begin);
  }
  reduce(sources_, targets_, end - begin);
  signal(&Progress::reduced, ++n_reduced_);
  return true;
}

bool ReduceStep::fetch() {
  if (n_fetched_ == n_reduced_) return false;
  if (is_due(index())) {
    if (!all_at(&Progress::reduced, n_fetched_ + 1)) return false;
    for (std::size_t shift = 1; shift < size(); ++shift) {
      const std::size_t owner = (index() + shift) % size();
      const auto [begin, end] = segment(owner, n_fetched_);
      if (end > begin)
        std::memcpy(what_.target + begin, staged(owner, owner, n_fetched_), end - begin);
    }
  }
  signal(&Progress::done, ++n_fetched_);
  return true;
}

// --- copies --------------------------------------------------------------------------------------

CopyStep::CopyStep(Meeting meeting, Copy copy) : NodeStep(std::move(meeting)), what_(std::move(copy)) {
  const NodeMemory& memory = team().memory();
  Arrival& mine = arrival(index());
  mine.nbytes = what_.nbytes;
  mine.has_target = 0;
  if (what_.nbytes <= kInline) {
    kind_ = Source::inlined;
    if (what_.nbytes != 0) std::memcpy(payload(index()), what_.shown, what_.nbytes);
  } else if (memory.holds(what_.shown, what_.nbytes)) {
    kind_ = Source::registered;
    mine.source = static_cast<std::uint64_t>(what_.shown - memory.arena());
  } else {
    kind_ = Source::staged;
  }
  mine.kind = kind_;
  arrive();
}

std::uint64_t CopyStep::segments_of(std::size_t member) const {
  const Arrival& each = arrival(member);
  return each.kind == Source::staged ? n_parts(each.nbytes, kSegment) : 0;
}

void CopyStep::meet() {
  for (const Pull& each : what_.pulls)
    is_short_ = is_short_ || each.offset + each.nbytes > arrival(each.member).nbytes;
  for (std::size_t member = 0; member < size(); ++member)
    n_segments_ = std::max(n_segments_, segments_of(member));
  if (kind_ == Source::staged)
    take_lane_for(what_.shown);
  else if (n_segments_ != 0)
    signal(&Progress::ready, kAllDone);  // nobody waits for this rank
}

Program::Step CopyStep::work() {
  if (is_short_) throw std::runtime_error("a rank shows fewer bytes than another was to read");
  bool has_moved = show();
  has_moved = pull() || has_moved;
  const bool has_all = next_whole_ == what_.pulls.size() && n_pulled_ == n_segments_;
  if (!has_all || n_shown_ < segments_of(index())) return has_moved ? Step::moved : Step::waiting;
  if (!is_done_) {
    is_done_ = true;
    signal(&Progress::done, kAllDone);
  }
  if (kind_ == Source::registered && !all_at(&Progress::done, kAllDone))
    return has_moved ? Step::moved : Step::waiting;
  finish();
  return Step::moved;
}

bool CopyStep::show() {
  constexpr std::uint64_t n_places = kLane / kSegment;
  const std::uint64_t n_own = segments_of(index());
  if (n_shown_ == n_own) return false;
  if (n_shown_ >= n_places && !all_at(&Progress::done, n_shown_ - n_places + 1)) return false;
  const std::size_t begin = n_shown_ * kSegment;
  std::memcpy(lane_of(index()) + n_shown_ % n_places * kSegment, what_.shown + begin,
              std::min(kSegment, what_.nbytes - begin));
  ++n_shown_;
  signal(&Progress::ready, n_shown_ == n_own ? kAllDone : n_shown_);
  return true;
}

// Takes a piece of what is there as a whole, then segment after segment from all that show them.
bool CopyStep::pull() {
  while (next_whole_ < what_.pulls.size()) {
    const Pull& each = what_.pulls[next_whole_];
    const Arrival& from = arrival(each.member);
    if (from.kind == Source::staged || whole_offset_ == each.nbytes) {
      ++next_whole_;
      whole_offset_ = 0;
      continue;
    }
    const std::byte* whole = from.kind == Source::inlined
                                 ? payload(each.member)
                                 : team().mate(each.member).arena + from.source;
    const std::size_t n = std::min(kPiece, each.nbytes - whole_offset_);
    std::memcpy(each.target + whole_offset_, whole + each.offset + whole_offset_, n);
    whole_offset_ += n;
    return true;
  }
  if (n_pulled_ == n_segments_ || !all_at(&Progress::ready, n_pulled_ + 1)) return false;
  pull_segment(n_pulled_);
  signal(&Progress::done, ++n_pulled_);
  return true;
}

void CopyStep::pull_segment(std::uint64_t number) {
  const std::size_t place = number % (kLane / kSegment);
  const std::size_t begin = number * kSegment, end = begin + kSegment;
  for (const Pull& each : what_.pulls) {
    if (arrival(each.member).kind != Source::staged) continue;
    const std::size_t from = std::max(begin, each.offset);
    const std::size_t to = std::min(end, each.offset + each.nbytes);
    if (to <= from) continue;
    const std::byte* shown = lane_of(each.member) + place * kSegment;
    std::memcpy(each.target + (from - each.offset), shown + (from - begin), to - from);
  }
}

}  // namespace ringcomm
