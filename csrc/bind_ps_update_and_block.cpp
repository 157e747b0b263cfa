// Bindings of updates and dense blocks: check, release the GIL, call.
// Every array is .noconvert(): an implicit copy would be updated and lost.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>

#include <cstring>
#include <utility>

#include "bind_ps_checks.hpp"
#include "ps/block.hpp"
#include "ps/block_updater.hpp"
#include "ps/key_map.hpp"

namespace ringcomm {
namespace {

// Fills in what an update does beside the values and the gradient.
ps::DenseUpdate dense_update(int code, const Hyper& hyper, std::int64_t step, DType dtype,
                             const std::vector<Values>& slots, std::size_t count) {
  if (step < 1) throw std::invalid_argument("step: updates are counted from 1");
  ps::DenseUpdate update{};
  update.rule = rule_of(code, hyper);
  const ps::SlotPlan plan = ps::plan_of(update.rule);
  if (slots.size() < plan.count())
    throw std::invalid_argument("slots: this updater has " + text(plan.count()) + ", got " +
                                text(slots.size()));
  update.rows = 1;
  for (std::size_t k = 0; k < plan.count(); ++k) {
    const std::size_t n = k < plan.full ? count : 1;
    const bool is_per_row = k >= plan.full && ps::is_rowwise(update.rule.updater);
    if (is_per_row) update.rows = slots[k].size();
    require_values("slot", slots[k], dtype, is_per_row ? update.rows : n);
    update.slots[k] = slots[k].data();
  }
  if (count != 0 && (update.rows == 0 || count % update.rows != 0))
    throw std::invalid_argument("slots: " + text(count) + " values are no whole number of " +
                                text(update.rows) + " rows");
  update.step = step;
  update.dtype = dtype;
  update.count = count;
  return update;
}

ps::DenseUpdate dense_update(int code, const Hyper& hyper, std::int64_t step, DType dtype,
                             const std::vector<Values>& slots, const ConstValues& grad,
                             std::size_t count) {
  ps::DenseUpdate update = dense_update(code, hyper, step, dtype, slots, count);
  update.grad_dtype = grad_dtype(grad, dtype, count);
  update.grad = grad.data();
  return update;
}

void py_apply_update(int code, Hyper hyper, std::int64_t step, ConstValues in, Values out,
                     const std::vector<Values>& slots, ConstValues grad) {
  const DType dtype = value_dtype(static_cast<int>(dtype_of("value_in", in)));
  require_values("value_in", in, dtype, in.size());
  require_values("value_out", out, dtype, in.size());
  const auto* const from = static_cast<const std::byte*>(in.data());
  const auto* const to = static_cast<const std::byte*>(out.data());
  if (from != to && from < to + out.nbytes() && to < from + in.nbytes())
    throw std::invalid_argument("value_out overlaps value_in without being the same");
  ps::DenseUpdate update = dense_update(code, hyper, step, dtype, slots, grad, in.size());
  update.in = in.data();
  update.out = out.data();
  nb::gil_scoped_release unlocked;
  ps::apply(update);
}

// (slots with a number per value, slots with one per row, what each starts with)
nb::tuple py_slot_plan(int code, Hyper hyper) {
  const ps::SlotPlan plan = ps::plan_of(rule_of(code, hyper));
  nb::list fill;
  for (std::size_t k = 0; k < plan.count(); ++k) fill.append(plan.fill[k]);
  return nb::make_tuple(plan.full, plan.per_row, nb::tuple(fill));
}

void require_block_memory(std::size_t have, const void* data, std::size_t nbytes) {
  if (have < ps::block_nbytes(nbytes))
    throw std::invalid_argument("a block of " + text(nbytes) + " bytes needs " +
                                text(ps::block_nbytes(nbytes)) + " of memory, got " + text(have));
  if (reinterpret_cast<std::uintptr_t>(data) % ps::kBlockLine != 0)
    throw std::invalid_argument("the memory of a block begins at a multiple of 64");
}

// Keeps its memory alive.
class DenseBlock {
 public:
  DenseBlock(Bytes memory, std::size_t count, int dtype, std::uint64_t version)
      : memory_(std::move(memory)),
        dtype_(value_dtype(dtype)),
        count_(count),
        updater_(std::make_shared<ps::BlockUpdater>(make(version), count, dtype_)) {}

  std::uint64_t apply(int code, Hyper hyper, std::int64_t step, const std::vector<Values>& slots,
                      ConstValues grad, std::int64_t clock) {
    const ps::DenseUpdate update = dense_update(code, hyper, step, dtype_, slots, grad, count_);
    nb::gil_scoped_release unlocked;
    return block().apply(update, clock);
  }
  // weights: of each gradient; empty: all 1.
  std::uint64_t apply_mean(int code, Hyper hyper, std::int64_t step, const std::vector<Values>& slots,
                           const std::vector<ConstValues>& grads, const std::vector<double>& weights,
                           double divisor, std::int64_t clock) {
    if (!weights.empty() && weights.size() != grads.size())
      throw std::invalid_argument("weights: one per gradient, or none");
    ps::DenseUpdate update = dense_update(code, hyper, step, dtype_, slots, count_);
    ps::GradMean mean{{}, !weights.empty(), divisor};
    for (std::size_t k = 0; k < grads.size(); ++k)
      mean.parts.push_back({grad_dtype(grads[k], dtype_, count_), grads[k].data(),
                            weights.empty() ? 1 : weights[k]});
    update.mean = &mean;
    nb::gil_scoped_release unlocked;
    return block().apply(update, clock);
  }
  // The state of the updater, from now on; kept alive by the caller.
  void attach(int code, Hyper hyper, const std::vector<Values>& slots) {
    std::array<void*, ps::kMaxSlots> pointers{};
    const ps::SlotPlan plan = ps::plan_of(rule_of(code, hyper));
    if (slots.size() != plan.count())
      throw std::invalid_argument("slots: this updater has " + text(plan.count()) + ", got " +
                                  text(slots.size()));
    std::size_t rows = 1;
    for (std::size_t k = 0; k < plan.count(); ++k) {
      const bool is_per_row = k >= plan.full && ps::is_rowwise(static_cast<ps::Updater>(code));
      if (is_per_row) rows = slots[k].size();
      require_values("slot", slots[k], dtype_, k < plan.full ? count_ : is_per_row ? rows : 1);
      pointers[k] = slots[k].data();
    }
    const bool fits = count_ == 0 || (rows != 0 && count_ % rows == 0);
    updater_->attach(fits ? code : -1, hyper.size(), pointers, plan.count(), rows);
  }
  const std::shared_ptr<ps::BlockUpdater>& block_updater() const { return updater_; }

  std::uint64_t write(ConstValues values, std::int64_t clock) {
    require_values("values", values, dtype_, count_);
    nb::gil_scoped_release unlocked;
    return block().write(values.data(), clock);
  }
  ps::Block& block() const { return updater_->block(); }
  std::uint64_t version() const { return block().version(); }
  std::size_t offset() const {
    return static_cast<std::size_t>(block().values() -
                                    reinterpret_cast<const std::byte*>(memory_.data()));
  }

 private:
  ps::Block make(std::uint64_t version) {
    const std::size_t nbytes = count_ * itemsize(dtype_);
    require_block_memory(memory_.nbytes(), memory_.data(), nbytes);
    return ps::Block(reinterpret_cast<std::byte*>(memory_.data()), nbytes, version);
  }

  Bytes memory_;
  DType dtype_;
  std::size_t count_;
  std::shared_ptr<ps::BlockUpdater> updater_;
};

std::uint64_t py_last(const DenseBlock& self, std::uint32_t rank) {
  const auto& applied = self.block_updater()->applied;
  const auto at = applied.find(rank);
  return at == applied.end() ? 0 : at->second;
}

nb::dict py_applied(const DenseBlock& self) {
  nb::dict pushes;
  for (const auto& [rank, last] : self.block_updater()->applied) pushes[nb::int_(rank)] = last;
  return pushes;
}

// (pushes, their bytes, pulls, seconds of updates, {missed updates: how often}) since the last call.
nb::tuple py_take_traffic(const DenseBlock& self) {
  const ps::Traffic taken = std::exchange(self.block_updater()->traffic, {});
  nb::dict staleness;
  for (const auto& [missed, n] : taken.staleness) staleness[nb::int_(missed)] = n;
  return nb::make_tuple(taken.pushes, taken.nbytes, self.block().take_reads(),
                        static_cast<double>(taken.apply_ns) * 1e-9, staleness);
}

constexpr std::size_t kWorthUnlocking = 16384;  // bytes: a copy takes longer than giving up the GIL

template <class Memory>
const std::byte* require_block(const Memory& memory, std::size_t offset, std::size_t n) {
  const auto* const data = reinterpret_cast<const std::byte*>(memory.data());
  if (memory.nbytes() < sizeof(ps::BlockHeader)) throw std::invalid_argument("this is no block");
  const std::size_t nbytes = reinterpret_cast<const ps::BlockHeader*>(data)->nbytes;
  require_block_memory(memory.nbytes(), data, nbytes);
  if (offset > nbytes || n > nbytes - offset)
    throw std::invalid_argument("this block has no bytes " + text(offset) + " to " + text(offset + n) +
                                " of " + text(nbytes));
  return data;
}

std::int64_t py_read_block(ConstBytes memory, Bytes out, std::size_t offset, unsigned tries) {
  const auto* const data = require_block(memory, offset, out.nbytes());
  nb::gil_scoped_release unlocked;
  return ps::read_block(data, out.data(), offset, out.nbytes(), tries);
}

std::int64_t py_read_open_block(const NodeMemory& server, Bytes memory, Bytes out, std::size_t offset,
                                std::int64_t clock, unsigned tries) {
  require_block(memory, offset, out.nbytes());
  auto* const data = reinterpret_cast<std::byte*>(memory.data());
  if (out.nbytes() < kWorthUnlocking)
    return ps::read_open_block(server, data, out.data(), offset, out.nbytes(), clock, tries);
  nb::gil_scoped_release unlocked;
  return ps::read_open_block(server, data, out.data(), offset, out.nbytes(), clock, tries);
}

void py_partition_of(Keys keys, std::uint32_t n,
                     nb::ndarray<std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> out) {
  if (n == 0) throw std::invalid_argument("no partitions");
  if (out.size() != keys.size()) throw std::invalid_argument("out: one number per key");
  nb::gil_scoped_release unlocked;
  for (std::size_t i = 0; i < keys.size(); ++i) out.data()[i] = ps::partition_of(keys.data()[i], n);
}

}  // namespace

void bind_ps(nb::module_& m) {
  m.def("apply_update", &py_apply_update, "code"_a, "hyper"_a.noconvert(), "step"_a,
        "value_in"_a.noconvert(), "value_out"_a.noconvert(), "slots"_a.noconvert(),
        "grad"_a.noconvert());
  m.def("slot_plan", &py_slot_plan, "code"_a, "hyper"_a.noconvert());
  m.def("block_nbytes", &ps::block_nbytes, "nbytes"_a);
  m.def("read_block", &py_read_block, "memory"_a.noconvert(), "out"_a.noconvert(), "offset"_a = 0,
        "tries"_a = 16);
  m.def("read_open_block", &py_read_open_block, "server"_a, "memory"_a.noconvert(),
        "out"_a.noconvert(), "offset"_a, "clock"_a, "tries"_a = 16);
  m.def("partition_of", &py_partition_of, "keys"_a.noconvert(), "n"_a, "out"_a.noconvert());
  nb::class_<ps::BlockUpdater>(m, "BlockUpdater");
  nb::class_<DenseBlock>(m, "DenseBlock")
      .def(nb::init<Bytes, std::size_t, int, std::uint64_t>(), "memory"_a.noconvert(), "count"_a,
           "dtype"_a, "version"_a = 0)
      .def("apply", &DenseBlock::apply, "code"_a, "hyper"_a.noconvert(), "step"_a,
           "slots"_a.noconvert(), "grad"_a.noconvert(), "clock"_a = ps::Block::kSame)
      .def("apply_mean", &DenseBlock::apply_mean, "code"_a, "hyper"_a.noconvert(), "step"_a,
           "slots"_a.noconvert(), "grads"_a.noconvert(), "weights"_a, "divisor"_a, "clock"_a)
      .def("write", &DenseBlock::write, "values"_a.noconvert(), "clock"_a = ps::Block::kSame)
      .def("attach", &DenseBlock::attach, "code"_a, "hyper"_a.noconvert(), "slots"_a.noconvert())
      .def_prop_ro("block_updater", &DenseBlock::block_updater)
      .def("last", &py_last, "rank"_a)
      .def("note_last",
           [](DenseBlock& self, std::uint32_t rank, std::uint64_t sequence) {
             self.block_updater()->applied[rank] = sequence;
           },
           "rank"_a, "sequence"_a)
      .def("forget",
           [](DenseBlock& self, std::uint32_t rank) { self.block_updater()->applied.erase(rank); },
           "rank"_a)
      .def("applied", &py_applied)
      .def("take_traffic", &py_take_traffic)
      .def_prop_rw("steps", [](const DenseBlock& self) { return self.block_updater()->steps; },
                   [](DenseBlock& self, std::uint64_t steps) { self.block_updater()->steps = steps; })
      .def_prop_rw("clock", [](const DenseBlock& self) { return self.block().clock(); },
                   [](DenseBlock& self, std::int64_t clock) { self.block().set_clock(clock); })
      .def_prop_rw("may_read", [](const DenseBlock& self) { return self.block().may_read(); },
                   [](DenseBlock& self, bool may_read) { self.block().set_may_read(may_read); })
      .def_prop_rw("may_ack", [](const DenseBlock& self) { return self.block_updater()->may_ack; },
                   [](DenseBlock& self, bool may_ack) { self.block_updater()->may_ack = may_ack; })
      .def_prop_ro("version", &DenseBlock::version)
      .def_prop_ro("offset", &DenseBlock::offset);
}

}  // namespace ringcomm
