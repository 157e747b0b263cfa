#include "reduce_step.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "../kernels/reduce.hpp"
#include "step_sizes.hpp"

namespace ringcomm {
namespace {

constexpr std::size_t kInlineTotal = 64u << 10;  // the most that a rank reads to do it all itself

void reduce_to(const NodeReduction& what, std::size_t nbytes, const std::vector<const void*>& sources,
               void* const* targets, std::size_t n_targets) {
  if (nbytes == 0) return;
  const std::size_t count = nbytes / itemsize(what.dtype);
  if (what.is_widened)
    reduce_to_float32(what.op, what.dtype, static_cast<float*>(targets[0]), sources.data(), sources.size(),
                      count);
  else
    reduce_many(what.op, what.dtype, targets, n_targets, sources.data(), sources.size(), count, what.divisor);
}

}  // namespace

std::size_t NodeReduction::due_nbytes(std::size_t member) const {
  if (to == Target::owner)
    return (bounds[member + 1] - bounds[member]) * (is_widened ? sizeof(float) / 2 : 1);
  return to == Target::all || member == root ? bounds.back() : 0;
}

std::vector<std::size_t> equal_bounds(std::size_t nbytes, std::size_t n) {
  std::vector<std::size_t> bounds(n + 1, nbytes);
  for (std::size_t r = 0; r < n; ++r) bounds[r] = nbytes / kLine * r / n * kLine;
  return bounds;
}

void require_cut(const NodeReduction& what, std::size_t n) {
  const std::vector<std::size_t>& bounds = what.bounds;
  if (bounds.size() != n + 1 || bounds.front() != 0)
    throw std::invalid_argument("bounds must cut the source into a part per member");
  for (std::size_t r = 0; r < n; ++r)
    if (bounds[r] > bounds[r + 1] || bounds[r] % itemsize(what.dtype) != 0)
      throw std::invalid_argument("bounds must ascend, by whole elements");
  if (what.root >= n || what.divisor == 0)
    throw std::invalid_argument("no such root, or divisor is 0");
  const bool is_16bit = what.dtype == DType::float16 || what.dtype == DType::bfloat16;
  if (what.is_widened && (!is_16bit || what.to != Target::owner || what.divisor != 1))
    throw std::invalid_argument("only 16-bit sums for their owners are widened, and not divided");
}

void reduce_what_is_due(const NodeReduction& what, std::size_t member, std::vector<const void*>& sources) {
  if (what.due_nbytes(member) == 0) return;
  const bool is_owner = what.to == Target::owner;
  const std::size_t begin = is_owner ? what.bounds[member] : 0;
  const std::size_t end = is_owner ? what.bounds[member + 1] : what.bounds.back();
  for (const void*& source : sources) source = static_cast<const std::byte*>(source) + begin;
  void* const target = what.target;
  reduce_to(what, end - begin, sources, &target, 1);
}

ReduceStep::ReduceStep(Meeting meeting, NodeReduction reduction)
    : NodeStep(std::move(meeting)), what_(std::move(reduction)) {
  const std::size_t nbytes = what_.bounds.back();
  const NodeMemory& memory = team().memory();
  Arrival& mine = arrival(index());
  mine.nbytes = nbytes;
  mine.has_target = 0;
  if (is_inline()) {
    mine.kind = Source::inlined;
    if (nbytes != 0) std::memcpy(payload(index()), what_.source, nbytes);
  } else if (memory.holds(what_.source, nbytes)) {
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

void ReduceStep::meet() {
  sources_.resize(size());
  if (is_inline()) {
    algorithm_.emplace<Inlined>(*this);
    return;
  }
  bool is_all_registered = true;
  for (std::size_t member = 0; member < size(); ++member) {
    const Arrival& each = arrival(member);
    is_all_registered = is_all_registered && each.kind == Source::registered &&
                        (each.has_target != 0 || !is_due(member));
  }
  if (!is_all_registered)
    algorithm_.emplace<Staged>(*this);
  else if (what_.to == Target::owner)
    algorithm_.emplace<OwnSlice>(*this);
  else
    algorithm_.emplace<Registered>(*this);
}

Program::Step ReduceStep::work() {
  return std::visit(
      [](auto& algorithm) {
        if constexpr (std::is_same_v<decltype(algorithm), std::monostate&>)
          return Step::waiting;  // meet() comes first
        else
          return algorithm.work();
      },
      algorithm_);
}

bool ReduceStep::is_inline() const {
  const std::size_t nbytes = what_.bounds.back();
  return nbytes <= kInline && nbytes * size() <= kInlineTotal;
}

bool ReduceStep::is_due(std::size_t member) const {
  return what_.to == Target::all || (what_.to == Target::root && member == what_.root);
}

std::size_t ReduceStep::pieces(std::size_t owner) const {
  const auto [begin, end] = slice(owner);
  return n_parts(end - begin, kPiece);
}

const std::byte* ReduceStep::source_of(std::size_t member, std::size_t begin) const {
  return team().mate(member).arena + arrival(member).source + begin;
}

std::byte* ReduceStep::own_target(std::size_t begin) const {
  return what_.target + (begin - what_.bounds[index()]) * (what_.is_widened ? sizeof(float) / 2 : 1);
}

void ReduceStep::reduce(std::size_t nbytes) const {
  if (!targets_.empty()) reduce_to(what_, nbytes, sources_, targets_.data(), targets_.size());
}

Program::Step ReduceStep::Inlined::work() {
  for (std::size_t member = 0; member < step_.size(); ++member) step_.sources_[member] = step_.payload(member);
  reduce_what_is_due(step_.what_, step_.index(), step_.sources_);
  step_.finish();
  return Step::moved;
}

}  // namespace ringcomm
