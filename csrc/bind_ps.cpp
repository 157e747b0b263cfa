// Bindings of updates and dense blocks: check, release the GIL, call.
// Every array is .noconvert(): an implicit copy would be updated and lost.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <cstring>
#include <utility>

#include "bind_ps.hpp"
#include "ps/block.hpp"
#include "ps/keymap.hpp"

namespace ringcomm {
namespace {

// Fills in what an update does beside the values: state and gradient.
ps::DenseUpdate dense_update(int code, const Hyper& hyper, std::int64_t step, DType dtype,
                             const std::vector<Values>& slots, const ConstValues& grad,
                             std::size_t count) {
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
  update.grad_dtype = grad_dtype(grad, dtype, count);
  update.grad = grad.data();
  update.count = count;
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
      : memory_(std::move(memory)), dtype_(value_dtype(dtype)), count_(count), block_(make(version)) {}

  std::uint64_t apply(int code, Hyper hyper, std::int64_t step, const std::vector<Values>& slots,
                      ConstValues grad) {
    const ps::DenseUpdate update = dense_update(code, hyper, step, dtype_, slots, grad, count_);
    nb::gil_scoped_release unlocked;
    return block_.apply(update);
  }
  std::uint64_t write(ConstValues values) {
    require_values("values", values, dtype_, count_);
    nb::gil_scoped_release unlocked;
    return block_.write(values.data());
  }
  std::uint64_t version() const { return block_.version(); }
  std::size_t offset() const {
    return static_cast<std::size_t>(block_.values() -
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
  ps::Block block_;
};

std::int64_t py_read_block(ConstBytes memory, Bytes out, std::size_t offset, unsigned tries) {
  const auto* const data = reinterpret_cast<const std::byte*>(memory.data());
  if (memory.nbytes() < sizeof(ps::BlockHeader)) throw std::invalid_argument("this is no block");
  const std::size_t nbytes = reinterpret_cast<const ps::BlockHeader*>(data)->nbytes;
  require_block_memory(memory.nbytes(), data, nbytes);
  if (offset > nbytes || out.nbytes() > nbytes - offset)
    throw std::invalid_argument("read_block: bytes " + text(offset) + " to " +
                                text(offset + out.nbytes()) + " of " + text(nbytes));
  nb::gil_scoped_release unlocked;
  return ps::read_block(data, out.data(), offset, out.nbytes(), tries);
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
  m.def("partition_of", &py_partition_of, "keys"_a.noconvert(), "n"_a, "out"_a.noconvert());
  nb::class_<DenseBlock>(m, "DenseBlock")
      .def(nb::init<Bytes, std::size_t, int, std::uint64_t>(), "memory"_a.noconvert(), "count"_a,
           "dtype"_a, "version"_a = 0)
      .def("apply", &DenseBlock::apply, "code"_a, "hyper"_a.noconvert(), "step"_a,
           "slots"_a.noconvert(), "grad"_a.noconvert())
      .def("write", &DenseBlock::write, "values"_a.noconvert())
      .def_prop_ro("version", &DenseBlock::version)
      .def_prop_ro("offset", &DenseBlock::offset);
}

}  // namespace ringcomm
