// The reductions and the copies that the members of a team carry out in shared memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "../kernels/dtype.hpp"
#include "node_step.hpp"

namespace ringcomm {

// Who gets the result of a reduction.
enum class Target { all, owner, root };

struct Reduction {
  const std::byte* source;          // this rank's values: bounds.back() bytes
  std::byte* target;                // all, root: as large as source, and may be the same; owner: its
                                    // slice alone. May be null where nothing is due.
  std::vector<std::size_t> bounds;  // member r reduces [bounds[r], bounds[r + 1])
  Target to;
  std::size_t root;
  Op op;
  DType dtype;
  std::size_t divisor;
};

// Reduces in member order, ((0 op 1) op 2) ..., whoever does the work and whatever the buffers: the
// same bits on all ranks, always.
//
// Small: each rank reads what all have brought, one meeting and no further flag. Registered: one
// pass; who is free reduces the next piece of all buffers and writes it to all. Else: segments pass
// through lanes; a rank copies in what others own and sums its own slice straight from its buffer.
class ReduceStep final : public NodeStep {
 public:
  ReduceStep(Meeting meeting, Reduction reduction);

 private:
  void meet() override;
  Step work() override;
  Step work_inline();
  Step work_registered();
  Step work_own_slice();
  Step work_staged();
  bool copy_in();
  bool reduce_segment();
  bool fetch();

  struct Range {
    std::size_t begin, end;
  };
  Range slice(std::size_t owner) const;
  Range segment(std::size_t owner, std::uint64_t number) const;
  std::size_t pieces(std::size_t owner) const;
  std::optional<Range> claim();
  std::optional<Range> claim_of(std::size_t owner);
  void note_finished(std::size_t owner);
  bool is_all_finished() const;
  bool is_due(std::size_t member) const;
  bool is_inline() const;
  std::byte* staged(std::size_t member, std::size_t owner, std::uint64_t number) const;
  void reduce(const std::vector<const void*>& sources, const std::vector<void*>& targets,
              std::size_t nbytes) const;

  enum class Mode { inlined, registered, staged };

  Reduction what_;
  Mode mode_ = Mode::inlined;
  bool is_registered_;  // this rank's source
  std::uint64_t n_segments_ = 0, n_copied_ = 0, n_reduced_ = 0, n_fetched_ = 0;
  std::size_t segment_ = 0;  // bytes of each slice in a segment
  std::size_t piece_ = 0;    // own slice only: the next piece
  std::size_t claimed_ = 0;  // owner of the piece claimed last
  std::vector<const void*> sources_;
  std::vector<void*> targets_;
};

// A range of what another member shows.
struct Pull {
  std::size_t member;
  std::size_t offset;
  std::size_t nbytes;
  std::byte* target;
};

struct Copy {
  const std::byte* shown;  // what this rank lets others read
  std::size_t nbytes;
  std::vector<Pull> pulls;
};

// Every rank shows some bytes and takes what it wants of what the others show: broadcast, allgather,
// gather, scatter, alltoall, and the barrier.
class CopyStep final : public NodeStep {
 public:
  CopyStep(Meeting meeting, Copy copy);

 private:
  void meet() override;
  Step work() override;
  bool show();
  bool pull();
  void pull_segment(std::uint64_t number);
  std::uint64_t segments_of(std::size_t member) const;

  Copy what_;
  Source kind_;
  std::uint64_t n_segments_ = 0;  // of the longest that any rank shows in segments
  std::uint64_t n_shown_ = 0, n_pulled_ = 0;
  std::size_t next_whole_ = 0;    // pull of what needs no segments
  std::size_t whole_offset_ = 0;
  bool is_done_ = false;
  bool is_short_ = false;  // a rank shows fewer bytes than this one was to read
};

}  // namespace ringcomm
