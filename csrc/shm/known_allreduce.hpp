// An allreduce in place whose arguments have been agreed on before: begun and waited for in one call.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

#include "reduce_step.hpp"

namespace ringcomm {

class KnownAllreduce {
 public:
  // moment_ns: how long run() stays with it.
  KnownAllreduce(std::shared_ptr<Team> team, std::uint64_t fingerprint, std::size_t nbytes, Op op,
                 DType dtype, std::size_t divisor, std::int64_t moment_ns);

  // Begins it and stays with it for a moment; returns what is left to do, if anything. Throws
  // std::invalid_argument if data is not aligned for its elements, or there is no such slot.
  std::shared_ptr<NodeStep> run(std::size_t slot, std::byte* data) const;

  std::size_t nbytes() const { return nbytes_; }

 private:
  std::shared_ptr<Team> team_;
  std::uint64_t fingerprint_;
  std::size_t nbytes_;
  Op op_;
  DType dtype_;
  std::size_t divisor_;
  std::int64_t moment_ns_;
};

}  // namespace ringcomm
