#include "known_call.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "../kernels/reduce.hpp"
#include "../loop/loop.hpp"

namespace ringcomm {

std::shared_ptr<CollectiveStep> KnownCall::run(std::size_t slot, const std::byte* source,
                                               std::byte* target) const {
  const std::shared_ptr<CollectiveStep> step = begin(slot, source, target);
  const bool is_over = step->drive(moment_ns_);
  if (is_over && step->agrees() && step->is_whole() && step->fault().empty()) return nullptr;
  return step;
}

KnownReduction::KnownReduction(std::shared_ptr<MeetingPlace> place, std::uint64_t fingerprint,
                               NodeReduction what, std::int64_t moment_ns)
    : KnownCall(std::move(place), fingerprint, moment_ns), what_(std::move(what)) {
  require_cut(what_, this->place().n_members());
}

std::shared_ptr<CollectiveStep> KnownReduction::begin(std::size_t slot, const std::byte* source,
                                                      std::byte* target) const {
  require_elements(what_.dtype, source, source_nbytes());
  if (target != nullptr) require_elements(what_.dtype, target, target_nbytes());
  NodeReduction what = what_;
  what.source = source;
  what.target = target;
  return place().begin(slot, fingerprint(), std::move(what));
}

KnownCopy::KnownCopy(std::shared_ptr<MeetingPlace> place, std::uint64_t fingerprint, Shown mine,
                     std::vector<Part> parts, std::vector<Shown> expected, std::int64_t moment_ns)
    : KnownCall(std::move(place), fingerprint, moment_ns),
      mine_(std::move(mine)),
      parts_(std::move(parts)),
      expected_(std::make_shared<const std::vector<Shown>>(std::move(expected))) {
  const std::size_t n = this->place().n_members();
  if (!expected_->empty() && expected_->size() != n)
    throw std::invalid_argument("what is expected must be told for each member");
  if (mine_.header.size() > kInline) throw std::invalid_argument("the header is too long");
  for (const Part& part : parts_) {
    if (part.member >= n) throw std::invalid_argument("no such member");
    target_nbytes_ = std::max(target_nbytes_, part.at + part.nbytes);
  }
}

std::shared_ptr<CollectiveStep> KnownCopy::begin(std::size_t slot, const std::byte* source,
                                                 std::byte* target) const {
  std::vector<Pull> pulls;
  pulls.reserve(parts_.size());
  for (const Part& part : parts_)
    pulls.push_back({part.member, part.offset, part.nbytes, target + part.at});
  NodeCopy what{source, mine_.nbytes, mine_.header, std::move(pulls), nullptr, nullptr};
  if (!expected_->empty()) what.expected = expected_;
  return place().begin(slot, fingerprint(), std::move(what));
}

}  // namespace ringcomm
