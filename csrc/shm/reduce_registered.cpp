// Reductions whose buffers lie in the arenas of their ranks.
#include <algorithm>
#include <atomic>

#include "reduce_step.hpp"
#include "step_sizes.hpp"

namespace ringcomm {

Program::Step ReduceStep::Registered::work() {
  if (const auto piece = claim()) {
    step_.targets_.clear();
    for (std::size_t member = 0; member < step_.size(); ++member) {
      step_.sources_[member] = step_.source_of(member, piece->begin);
      if (!step_.is_due(member)) continue;
      std::byte* const target = step_.team().mate(member).arena + step_.arrival(member).target;
      step_.targets_.push_back(target + piece->begin);
    }
    step_.reduce(piece->end - piece->begin);
    note_finished(claimed_);
    return Step::moved;
  }
  if (!is_all_finished()) return Step::waiting;
  step_.finish();
  return Step::moved;
}

// The next piece: of this rank's slice, then of those of the others that are late.
std::optional<ReduceStep::Range> ReduceStep::Registered::claim() {
  for (std::size_t shift = 0; shift < step_.size(); ++shift) {
    claimed_ = (step_.index() + shift) % step_.size();
    if (const auto piece = claim_of(claimed_)) return piece;
  }
  return {};
}

std::optional<ReduceStep::Range> ReduceStep::Registered::claim_of(std::size_t owner) {
  std::atomic<std::uint64_t>& taken = step_.team().slot(owner, step_.slot()).claims.taken;
  const std::size_t n_pieces = step_.pieces(owner);
  std::uint64_t now = taken.load(std::memory_order_seq_cst);
  while (true) {
    const std::uint64_t before = std::max(now, step_.at(0));  // it may be of an earlier step
    if (before >= step_.at(n_pieces)) return {};
    if (!taken.compare_exchange_weak(now, before + 1, std::memory_order_seq_cst)) continue;
    const auto [begin, end] = step_.slice(owner);
    const std::size_t from = begin + (before - step_.at(0)) * kPiece;
    return Range{from, std::min(from + kPiece, end)};
  }
}

void ReduceStep::Registered::note_finished(std::size_t owner) {
  std::atomic<std::uint64_t>& finished = step_.team().slot(owner, step_.slot()).claims.finished;
  const std::uint64_t none = step_.at(0);
  std::uint64_t now = finished.load(std::memory_order_seq_cst);
  while (!finished.compare_exchange_weak(now, std::max(now, none) + 1, std::memory_order_seq_cst)) {
  }
  if (is_all_finished()) step_.team().ring();
}

bool ReduceStep::Registered::is_all_finished() const {
  for (std::size_t owner = 0; owner < step_.size(); ++owner) {
    const Slot& each = step_.team().slot(owner, step_.slot());
    const std::size_t n_pieces = step_.pieces(owner);
    if (n_pieces != 0 && each.claims.finished.load(std::memory_order_seq_cst) < step_.at(n_pieces))
      return false;
  }
  return true;
}

Program::Step ReduceStep::OwnSlice::work() {
  const std::size_t n_pieces = step_.pieces(step_.index());
  const bool has_piece = n_reduced_ < n_pieces;
  if (has_piece) reduce_piece(n_reduced_++);
  if (n_reduced_ == n_pieces && !is_done_) {
    is_done_ = true;
    step_.signal(&StepProgress::done, kAllDone);
  }
  if (has_piece) return Step::moved;
  // Until then the others read this rank's source.
  if (!step_.all_at(&StepProgress::done, kAllDone)) return Step::waiting;
  step_.finish();
  return Step::moved;
}

void ReduceStep::OwnSlice::reduce_piece(std::size_t piece) {
  const auto [begin, end] = step_.slice(step_.index());
  const std::size_t from = begin + piece * kPiece, to = std::min(from + kPiece, end);
  for (std::size_t member = 0; member < step_.size(); ++member)
    step_.sources_[member] = step_.source_of(member, from);
  step_.targets_ = {step_.own_target(from)};
  step_.reduce(to - from);
}

}  // namespace ringcomm
