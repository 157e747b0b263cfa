#include "known_allreduce.hpp"

#include <stdexcept>
#include <utility>

#include "../kernels/reduce.hpp"
#include "../loop/loop.hpp"

namespace ringcomm {

KnownAllreduce::KnownAllreduce(std::shared_ptr<Team> team, std::uint64_t fingerprint,
                               std::size_t nbytes, Op op, DType dtype, std::size_t divisor,
                               std::int64_t moment_ns)
    : team_(std::move(team)),
      fingerprint_(fingerprint),
      nbytes_(nbytes),
      op_(op),
      dtype_(dtype),
      divisor_(divisor),
      moment_ns_(moment_ns) {
  if (divisor == 0) throw std::invalid_argument("divisor is 0");
}

std::shared_ptr<NodeStep> KnownAllreduce::run(std::size_t slot, std::byte* data) const {
  require_elements(dtype_, data, nbytes_);
  const auto step = std::make_shared<ReduceStep>(
      Meeting(team_, slot, fingerprint_),
      NodeReduction{data, data, equal_bounds(nbytes_, team_->size()), Target::all, 0, op_, dtype_,
                    divisor_});
  const bool is_over = drive(*step, *team_->me().bell, team_->patience(), moment_ns_);
  if (is_over && step->agrees() && step->fault().empty()) return nullptr;
  return step;
}

}  // namespace ringcomm
