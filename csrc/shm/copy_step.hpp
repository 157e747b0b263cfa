// The copies that the members of a team carry out in shared memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "node_step.hpp"

namespace ringcomm {

// A range of what another member shows.
struct Pull {
  std::size_t member;
  std::size_t offset;
  std::size_t nbytes;
  std::byte* target;
};

struct NodeCopy {
  const std::byte* shown;  // what this rank lets others read
  std::size_t nbytes;
  std::vector<Pull> pulls;
};

// Every rank shows some bytes and takes what it wants of what the others show: broadcast, allgather,
// gather, scatter, alltoall, and the barrier.
class CopyStep final : public NodeStep {
 public:
  CopyStep(Meeting meeting, NodeCopy copy);

 private:
  void meet() override;
  Step work() override;
  bool show();
  bool pull();
  void pull_segment(std::uint64_t number);
  std::uint64_t segments_of(std::size_t member) const;

  NodeCopy what_;
  Source kind_;
  std::uint64_t n_segments_ = 0;  // of the longest that any rank shows in segments
  std::uint64_t n_shown_ = 0, n_pulled_ = 0;
  std::size_t next_whole_ = 0;    // pull of what needs no segments
  std::size_t whole_offset_ = 0;
  bool is_done_ = false;
  bool is_short_ = false;  // a rank shows fewer bytes than this one was to read
};

}  // namespace ringcomm
