// One operation of a node, alike on all ranks but for where its arrays are, and what it must give.
#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ranks_as_threads.hpp"

namespace ringcomm::stress {

enum class Kind { allreduce, scatter, gather, to_root, mismatch };  // mismatch: its calls differ

class CheckedOperation {
 public:
  // Of `count` elements, in a slot of the team. is_registered: whether source and target are.
  // places: those that this rank gives if it is the first one. chooses: a gather is told what to pull
  // once all are here, by choose_if_due().
  CheckedOperation(unsigned round, std::size_t slot, Kind kind, std::size_t count,
                   const std::shared_ptr<Team>& team, NodeMemory& memory,
                   std::pair<bool, bool> is_registered, const std::shared_ptr<Places>& places,
                   bool chooses = false)
      : round_(round), rank_(team->index()), size_(team->size()), kind_(kind) {
    source = std::make_unique<Array>(memory, count, is_registered.first);
    for (std::size_t i = 0; i < count; ++i) source->data()[i] = value(round, rank_, i);
    std::vector<std::size_t> bounds;
    for (std::size_t r = 0; r <= size_; ++r) bounds.push_back(count * r / size_ * sizeof(float));
    const std::size_t due = kind == Kind::scatter  ? (bounds[rank_ + 1] - bounds[rank_]) / sizeof(float)
                            : kind == Kind::gather ? count * size_
                                                   : count;
    target = std::make_unique<Array>(memory, due, is_registered.second);
    std::byte* const out = has_result() ? target->bytes() : nullptr;
    const Meeting meeting{team, slot, kind == Kind::mismatch ? rank_ % 2 : 42};
    if (kind == Kind::gather || kind == Kind::mismatch) {
      NodeCopy copy{source->bytes(), source->nbytes(), header_of(rank_), std::nullopt, nullptr, places};
      if (!chooses || kind == Kind::mismatch) copy.pulls = pulls();
      step = std::make_shared<CopyStep>(meeting, std::move(copy));
    } else {
      const Target to = kind == Kind::allreduce ? Target::all
                        : kind == Kind::scatter ? Target::owner
                                                : Target::root;
      step = std::make_shared<ReduceStep>(
          meeting,
          NodeReduction{source->bytes(), out, bounds, to, size_ - 1, Op::sum, DType::float32, 1});
    }
  }

  // Ends the program if what the ranks show is not what they have shown.
  void choose_if_due() {
    auto* const copy = dynamic_cast<CopyStep*>(step.get());
    if (copy == nullptr || !copy->is_to_choose()) return;
    for (std::size_t r = 0; r < size_; ++r)
      if (copy->shown()[r].header != header_of(r) || copy->shown()[r].nbytes != source->nbytes())
        fail("a header is wrong", rank_, round_);
    copy->choose(pulls());
  }

  // All end the program if the step, which is over, has not come to what it must.
  void check_agreement() const {
    if (step->agrees() != (kind_ != Kind::mismatch || size_ == 1))
      fail("agreement is wrong", rank_, round_);
  }
  void check_place(PlacesTold& told) const {
    const bool is_copy = kind_ == Kind::gather || kind_ == Kind::mismatch;
    if (is_copy && step->agrees())
      told.note(round_, rank_, static_cast<const CopyStep&>(*step).place());
  }
  void check_values() const {
    if (!has_result()) return;
    const std::size_t count = source->count(), first = count * rank_ / size_;
    for (std::size_t i = 0; i < target->count(); ++i) {
      const float expected = kind_ == Kind::gather    ? value(round_, i / count, i % count)
                             : kind_ == Kind::scatter ? sum(round_, size_, first + i)
                                                      : sum(round_, size_, i);
      if (target->data()[i] != expected) fail("a value is wrong", rank_, round_);
    }
  }

  std::unique_ptr<Array> source, target;
  std::shared_ptr<NodeStep> step;

 private:
  std::string header_of(std::size_t rank) const {
    return std::string((round_ + rank) % 40, static_cast<char>('a' + rank));
  }
  std::vector<Pull> pulls() const {
    std::vector<Pull> all;
    for (std::size_t r = 0; r < size_ && kind_ == Kind::gather; ++r)
      all.push_back({r, 0, source->nbytes(), target->bytes() + r * source->nbytes()});
    return all;
  }
  bool has_result() const {
    return kind_ != Kind::mismatch && (kind_ != Kind::to_root || rank_ == size_ - 1);
  }

  unsigned round_;
  std::size_t rank_, size_;
  Kind kind_;
};

}  // namespace ringcomm::stress
