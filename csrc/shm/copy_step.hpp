// The copies that the members of a team carry out in shared memory.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
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

// The places that member 0 gives to operations, in the order in which all members have agreed on them.
class Places {
 public:
  std::uint64_t take() { return n_taken_.fetch_add(1); }

 private:
  std::atomic<std::uint64_t> n_taken_{0};
};

struct NodeCopy {
  const std::byte* shown;  // what this rank lets others read
  std::size_t nbytes;
  std::vector<Pull> pulls;
  std::shared_ptr<Places> places;  // null: the step gets no place; alike on all members
};

// Every rank shows some bytes and takes what it wants of what the others show: broadcast, allgather,
// gather, scatter, alltoall, and the barrier.
class CopyStep final : public NodeStep {
 public:
  CopyStep(Meeting meeting, NodeCopy copy);

  // To be read once it is over and agrees().
  std::uint64_t place() const { return place_; }

 private:
  void meet() override;
  Step work() override;
  bool show();
  bool pull();
  bool has_place();
  void pull_segment(std::uint64_t number);
  std::uint64_t segments_of(std::size_t member) const;

  NodeCopy what_;
  Source kind_;
  std::uint64_t n_segments_ = 0;  // of the longest that any rank shows in segments
  std::uint64_t n_shown_ = 0, n_pulled_ = 0;
  std::size_t next_whole_ = 0;    // pull of what needs no segments
  std::size_t whole_offset_ = 0;
  std::uint64_t place_ = 0;
  bool is_placed_ = false;
  bool is_done_ = false;
  bool is_short_ = false;  // a rank shows fewer bytes than this one was to read
};

}  // namespace ringcomm
