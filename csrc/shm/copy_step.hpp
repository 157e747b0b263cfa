// The copies that the members of a team carry out in shared memory.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "node_step.hpp"

namespace ringcomm {

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
  std::string header;
  // Null: they depend on what the others show, so choose() tells them once all are here.
  std::optional<std::vector<Pull>> pulls;
  // With pulls: what the pulls are for, by member. If anything else is shown, choose() is to tell others.
  std::shared_ptr<const std::vector<Shown>> expected;
  std::shared_ptr<Places> places;  // null: the step gets no place; alike on all members
  bool is_whole = true;  // false: the ranks of a WireStep only agree
  bool stays_here = false;  // a WireStep tells the header and the size of what is shown, but does not bring it
};

// Every rank shows some bytes and takes what it wants of what the others show: broadcast, allgather,
// gather, scatter, alltoall, and the barrier.
class CopyStep final : public NodeStep {
 public:
  CopyStep(Meeting meeting, NodeCopy copy);

  bool is_to_choose() const override { return is_to_choose_.load(std::memory_order_acquire); }
  const std::vector<Shown>& shown() const override { return shown_; }
  void choose(std::vector<Pull> pulls) override;

  // To be read once it is over and agrees().
  std::uint64_t place() const { return place_; }

 private:
  void meet() override;
  Step work() override;
  bool is_as_expected() const;
  Shown shown_by(std::size_t member) const;
  void require_shown() const;
  bool show();
  bool pull();
  bool has_place();
  void pull_segment(std::uint64_t number);
  std::uint64_t segments_of(std::size_t member) const;
  const std::byte* inlined(std::size_t member) const;
  std::ptrdiff_t copy_piece(const Pull& pull, std::size_t offset, std::size_t nbytes);
  bool comes_in_segments(std::size_t member) const;
  bool has_segment(std::uint64_t number) const;
  void ask_for_segments();
  bool is_asked_for_segments() const;

  NodeCopy what_;
  Source kind_;
  std::vector<Shown> shown_;  // if this rank is to choose
  std::atomic<bool> is_to_choose_{false};
  bool has_told_ = false;  // that it is
  bool has_begun_ = false;
  std::uint64_t n_segments_ = 0;  // of the longest that any rank shows to this one in segments
  std::uint64_t n_shown_ = 0, n_pulled_ = 0;
  std::size_t next_whole_ = 0;    // pull of what needs no segments
  std::size_t whole_offset_ = 0;
  std::uint64_t place_ = 0;
  bool is_placed_ = false;
  bool is_done_ = false;
  bool is_read_in_place_ = false;  // what any member shows
  bool is_any_readable_ = false;   // what any member shows
  bool may_read_ = true;           // what is readable
  bool is_readable_staged_ = false;  // what this rank shows; it is read where it is, too
};

}  // namespace ringcomm
