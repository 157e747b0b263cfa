// Calls whose arguments have been agreed on before: each is begun and waited for in one call of C++.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "copy_step.hpp"
#include "reduce_step.hpp"

namespace ringcomm {

// Everything about a call but its slot and its buffers. A call may be made many times.
class KnownCall {
 public:
  KnownCall(std::shared_ptr<MeetingPlace> place, std::uint64_t fingerprint, std::int64_t moment_ns)
      : place_(std::move(place)), fingerprint_(fingerprint), moment_ns_(moment_ns) {}
  virtual ~KnownCall() = default;
  KnownCall(const KnownCall&) = delete;
  KnownCall& operator=(const KnownCall&) = delete;

  // Begins it and stays with it for a moment; returns what is left to do, if anything. The buffers
  // have source_nbytes() and target_nbytes(). Throws std::invalid_argument, before anything has
  // begun, if one is not aligned for its elements, or there is no such slot.
  std::shared_ptr<CollectiveStep> run(std::size_t slot, const std::byte* source, std::byte* target) const;

  virtual std::size_t source_nbytes() const = 0;
  virtual std::size_t target_nbytes() const = 0;

 protected:
  virtual std::shared_ptr<CollectiveStep> begin(std::size_t slot, const std::byte* source,
                                                std::byte* target) const = 0;
  MeetingPlace& place() const { return *place_; }
  std::uint64_t fingerprint() const { return fingerprint_; }

 private:
  std::shared_ptr<MeetingPlace> place_;
  std::uint64_t fingerprint_;
  std::int64_t moment_ns_;  // how long run() stays with it
};

class KnownReduction final : public KnownCall {
 public:
  // what: without buffers. Throws std::invalid_argument.
  KnownReduction(std::shared_ptr<MeetingPlace> place, std::uint64_t fingerprint, NodeReduction what,
                 std::int64_t moment_ns);

  std::size_t source_nbytes() const override { return what_.bounds.back(); }
  std::size_t target_nbytes() const override { return what_.due_nbytes(place().own_index()); }

 private:
  std::shared_ptr<CollectiveStep> begin(std::size_t slot, const std::byte* source,
                                        std::byte* target) const override;

  const NodeReduction what_;
};

class KnownCopy final : public KnownCall {
 public:
  // Where a pull goes in the target.
  struct Part {
    std::size_t member, offset, nbytes, at;
  };

  // expected: by member, what the parts are for; empty if nothing else can be shown. If something
  // else is shown, run() returns a step that is to choose(). Throws std::invalid_argument.
  KnownCopy(std::shared_ptr<MeetingPlace> place, std::uint64_t fingerprint, Shown mine,
            std::vector<Part> parts, std::vector<Shown> expected, std::int64_t moment_ns);

  std::size_t source_nbytes() const override { return mine_.nbytes; }
  std::size_t target_nbytes() const override { return target_nbytes_; }

 private:
  std::shared_ptr<CollectiveStep> begin(std::size_t slot, const std::byte* source,
                                        std::byte* target) const override;

  const Shown mine_;
  const std::vector<Part> parts_;
  const std::shared_ptr<const std::vector<Shown>> expected_;
  std::size_t target_nbytes_ = 0;
};

}  // namespace ringcomm
