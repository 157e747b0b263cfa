#include "block_updater.hpp"

#include "../kernels/reduce.hpp"
#include "../shm/bell.hpp"

namespace ringcomm::ps {

void BlockUpdater::attach(int code, std::size_t n_hyper, const std::array<void*, kMaxSlots>& slots,
                          std::size_t n_slots, std::size_t rows) {
  code_ = code;
  n_hyper_ = n_hyper;
  slots_ = slots;
  n_slots_ = n_slots;
  rows_ = rows;
}

std::optional<Rule> BlockUpdater::rule_for(const FrameHeader& header, const PushMeta& meta,
                                           const std::byte* body) const {
  const bool is_16bit = meta.dtype == DType::float16 || meta.dtype == DType::bfloat16;
  if (code_ < 0 || !may_ack || meta.flags != 0 || meta.start != 0 || meta.n != count_ ||
      (meta.dtype != dtype_ && !is_16bit) || meta.n_hyper != n_hyper_ ||
      header.n_body != count_ * itemsize(meta.dtype) ||
      reinterpret_cast<std::uintptr_t>(body) % alignment(meta.dtype) != 0)
    return std::nullopt;
  const Rule rule = rule_of(code_, meta.hyper.data(), meta.n_hyper);
  if (plan_of(rule).count() > n_slots_) return std::nullopt;
  return rule;
}

bool BlockUpdater::push(const FrameHeader& header, const PushMeta& meta, const std::byte* body) {
  const auto rule = rule_for(header, meta, body);
  if (!rule) return false;
  DenseUpdate update{};
  update.rule = *rule;
  std::uint64_t& last = applied[header.origin];  // numbers begin with 1
  if (header.sequence <= last) return true;  // it came twice
  for (std::size_t k = 0; k < kMaxSlots; ++k) update.slots[k] = slots_[k];
  update.step = static_cast<std::int64_t>(steps) + 1;
  update.dtype = dtype_;
  update.rows = rows_;
  update.grad_dtype = meta.dtype;
  update.grad = body;
  update.count = count_;
  const std::int64_t began_at = monotonic_ns();
  const std::int64_t clock = block_.clock();
  block_.apply(update, clock + 1);
  ++steps;
  last = header.sequence;
  const std::int64_t missed = clock - header.clock;
  ++traffic.staleness[missed > 0 ? static_cast<std::uint64_t>(missed) : 0];
  ++traffic.pushes;
  traffic.nbytes += header.n_body;
  traffic.apply_ns += monotonic_ns() - began_at;
  return true;
}

}  // namespace ringcomm::ps
