// The reductions that the members of a team carry out in shared memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "../kernels/dtype_and_op_codes.hpp"
#include "node_step.hpp"

namespace ringcomm {

// Who gets the result of a reduction.
enum class Target : int { all = 0, owner, root };
constexpr Target last(Target) { return Target::root; }

struct NodeReduction {
  const std::byte* source;          // this rank's values: bounds.back() bytes
  std::byte* target;                // due_nbytes(); may be the source, but for Target::owner. May be
                                    // null where nothing is due. See is_widened.
  std::vector<std::size_t> bounds;  // member r reduces [bounds[r], bounds[r + 1])
  Target to;
  std::size_t root;
  Op op;
  DType dtype;
  std::size_t divisor;
  bool is_widened = false;  // 16-bit floats, Target::owner, divisor 1: the target is float32

  // Bytes of the result that a member gets.
  std::size_t due_nbytes(std::size_t member) const;
};

// Bounds of about equal slices for n members: whole cache lines as far as possible.
std::vector<std::size_t> equal_bounds(std::size_t nbytes, std::size_t n);

// Throws std::invalid_argument unless the bounds cut the source into whole elements for n members, and
// root, divisor and is_widened have a meaning.
void require_cut(const NodeReduction& what, std::size_t n);

// Reduces what is due to a member. sources: by member, what it brings; they are moved on to what is due.
void reduce_what_is_due(const NodeReduction& what, std::size_t member, std::vector<const void*>& sources);

// Reduces in member order, ((0 op 1) op 2) ..., whoever does the work and whatever the buffers: the
// same bits on all ranks, always. One of the four algorithms below does it; all members take the
// same one, which follows from their arrivals.
class ReduceStep final : public NodeStep {
 public:
  ReduceStep(Meeting meeting, NodeReduction reduction);

 private:
  struct Range {
    std::size_t begin, end;
  };

  // Small: each rank reads what all have brought. One meeting, and no further flag.
  class Inlined {
   public:
    explicit Inlined(ReduceStep& step) : step_(step) {}
    Step work();

   private:
    ReduceStep& step_;
  };

  // All buffers in the arenas: one pass; who is free reduces the next piece of all sources and writes
  // it to all targets.
  class Registered {
   public:
    explicit Registered(ReduceStep& step) : step_(step) {}
    Step work();

   private:
    std::optional<Range> claim();
    std::optional<Range> claim_of(std::size_t owner);
    void note_finished(std::size_t owner);
    bool is_all_finished() const;

    ReduceStep& step_;
    std::size_t claimed_ = 0;  // owner of the piece claimed last
  };

  // All sources in the arenas, each rank gets its slice: it reduces that straight from all sources.
  class OwnSlice {
   public:
    explicit OwnSlice(ReduceStep& step) : step_(step) {}
    Step work();

   private:
    void reduce_piece(std::size_t piece);

    ReduceStep& step_;
    std::size_t n_reduced_ = 0;  // pieces
    bool is_done_ = false;
  };

  // Any buffer: segments pass through lanes. A rank copies in what others own, sums its own slice
  // straight from its buffer, and fetches what others have summed.
  class Staged {
   public:
    explicit Staged(ReduceStep& step);
    Step work();

   private:
    bool copy_in();
    bool reduce_segment();
    bool fetch();
    Range segment(std::size_t owner, std::uint64_t number) const;
    std::size_t n_places() const;
    std::byte* place(std::size_t member, std::size_t owner, std::uint64_t number) const;

    ReduceStep& step_;
    const bool is_registered_;   // this rank's source
    const std::size_t segment_;  // bytes of each slice in a segment
    std::uint64_t n_segments_ = 0, n_copied_ = 0, n_reduced_ = 0, n_fetched_ = 0;
  };

  void meet() override;
  Step work() override;

  Range slice(std::size_t owner) const { return {what_.bounds[owner], what_.bounds[owner + 1]}; }
  std::size_t pieces(std::size_t owner) const;
  // Where a member's registered source is, from the byte `begin` of it on.
  const std::byte* source_of(std::size_t member, std::size_t begin) const;
  bool is_due(std::size_t member) const;  // the whole result
  bool is_inline() const;
  // Where the result of this rank's slice lies in its target, from the byte `begin` of the source on.
  std::byte* own_target(std::size_t begin) const;
  // Reduces sources_ to targets_.
  void reduce(std::size_t nbytes) const;

  const NodeReduction what_;
  std::vector<const void*> sources_;  // by member
  std::vector<void*> targets_;
  std::variant<std::monostate, Inlined, Registered, OwnSlice, Staged> algorithm_;  // since meet()
};

}  // namespace ringcomm
