// Bindings of a server's part of a hash table: check, release the GIL, call.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>
#include <utility>

#include "bind_ps_checks.hpp"
#include "ps/shard.hpp"
#include "ps/sort_rows_by_server.hpp"

namespace ringcomm {
namespace {

using ps::Shard;
using Numbers = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Order = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// Keys, their gradients, the weight of these, and which gradient each key's is, unless in order.
using Contribution = std::tuple<Keys, ConstValues, double, std::optional<Numbers>>;

ps::Missing missing_of(int number) {
  if (number < 0 || number > 2) throw std::invalid_argument("missing: no such choice");
  return static_cast<ps::Missing>(number);
}

void require_places(const Numbers& places, std::size_t n_keys, std::size_t n_rows) {
  if (places.size() != n_keys)
    throw std::invalid_argument("places: " + text(places.size()) + " for " + text(n_keys) + " keys");
  for (std::size_t i = 0; i < n_keys; ++i)
    if (places.data()[i] >= n_rows)
      throw std::invalid_argument("places: " + text(places.data()[i]) + " of " + text(n_rows) +
                                  " rows");
}

std::size_t gather(const Shard& shard, Keys keys, Values out, int missing,
                   std::optional<Numbers> places, std::optional<std::uint64_t> held) {
  const ps::RowSpec& spec = shard.spec();
  if (!places) {
    require_values("out", out, spec.dtype, keys.size() * spec.dim);
  } else {
    require_values("out", out, spec.dtype, out.size());
    require_places(*places, keys.size(), out.size() / spec.dim);
  }
  const ps::Missing what = missing_of(missing);
  try {
    nb::gil_scoped_release unlocked;
    const std::uint32_t* const at = places ? places->data() : nullptr;
    if (held) return shard.gather_held(*held, keys.data(), keys.size(), out.data(), at, what);
    return shard.gather(keys.data(), keys.size(), out.data(), at, what);
  } catch (const ps::MissingKey& e) {
    throw nb::key_error(("key " + std::to_string(e.key) + " has no row: push it first, or ask with "
                         "missing=\"init\" or \"zero\"").c_str());
  }
}

std::tuple<std::size_t, std::size_t, std::size_t> push(
    Shard& shard, const std::vector<Contribution>& contributions, int code, Hyper hyper,
    double divisor, double now, std::uint64_t stamp, std::uint64_t draw) {
  if (!(divisor > 0)) throw std::invalid_argument("divisor: more than 0");
  const ps::RowSpec& spec = shard.spec();
  ps::Push push{nullptr, 0, {}, rule_of(code, hyper), now, stamp, divisor, draw};
  for (const auto& [keys, grads, weight, places] : contributions) {
    const std::size_t n_rows = places ? grads.size() / spec.dim : keys.size();
    const DType dtype = grad_dtype(grads, spec.dtype, n_rows * spec.dim);
    if (places) require_places(*places, keys.size(), n_rows);
    const std::uint32_t* const at = places ? places->data() : nullptr;
    push.parts.push_back({push.n, dtype, grads.data(), weight, at});
    push.n += keys.size();
  }
  nb::gil_scoped_release unlocked;
  std::vector<std::uint64_t> all;
  if (contributions.size() == 1) {
    push.keys = std::get<0>(contributions[0]).data();
  } else {
    all.reserve(push.n);
    for (const auto& [keys, grads, weight, places] : contributions)
      all.insert(all.end(), keys.data(), keys.data() + keys.size());
    push.keys = all.data();
  }
  const ps::Pushed pushed = shard.push(push);
  return {pushed.applied, pushed.rejected, pushed.admitted};
}

std::size_t erase(Shard& shard, Keys keys, std::uint64_t stamp) {
  nb::gil_scoped_release unlocked;
  return shard.erase(keys.data(), keys.size(), stamp);
}

using Column32 = nb::ndarray<std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ColumnF = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void metadata(const Shard& shard, Keys keys, Column32 counts, Column32 steps, ColumnF times) {
  const std::size_t n = keys.size();
  for (const std::size_t size : {counts.size(), steps.size(), times.size()})
    if (size != n) throw std::invalid_argument("metadata: one number per key");
  nb::gil_scoped_release unlocked;
  shard.metadata(keys.data(), n, counts.data(), steps.data(), times.data());
}

Numpy<std::uint64_t> n_keys(const Shard& shard) {
  auto* const all = new std::vector<std::uint64_t>(shard.n_keys());
  nb::capsule owner(all, [](void* p) noexcept {
    delete static_cast<std::vector<std::uint64_t>*>(p);
  });
  return Numpy<std::uint64_t>(all->data(), {all->size()}, owner);
}

bool stage_rows(Bytes out, ConstValues rows, std::size_t dim, std::optional<Order> order) {
  const DType dtype = dtype_of("rows", rows);
  if (dim == 0 || rows.size() % dim != 0) throw std::invalid_argument("dim: rows have another");
  const std::size_t n_rows = rows.size() / dim;
  const std::size_t n = order ? order->size() : n_rows;
  if (out.nbytes() != n * dim * rows.itemsize())
    throw std::invalid_argument("stage_rows: out has " + text(out.nbytes()) + " bytes, not " +
                                text(n * dim * rows.itemsize()));
  for (std::size_t i = 0; order && i < n; ++i)
    if (order->data()[i] < 0 || static_cast<std::size_t>(order->data()[i]) >= n_rows)
      throw std::invalid_argument("order: there are not so many rows");
  nb::gil_scoped_release unlocked;
  return ps::stage_rows(out.data(), rows.data(), order ? order->data() : nullptr, n, dim, dtype);
}

bool all_finite(ConstValues x) {
  const DType dtype = dtype_of("x", x);
  nb::gil_scoped_release unlocked;
  return ps::all_finite(x.data(), x.size(), dtype);
}

using KeysOut = nb::ndarray<std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OrderOut = nb::ndarray<std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using CountsOut = nb::ndarray<std::int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void deal_keys(const std::vector<std::tuple<Keys, Numbers>>& calls, KeysOut keys, OrderOut order,
               CountsOut counts) {
  std::vector<ps::CallKeys> all;
  std::size_t n = 0, n_parts = 0;
  for (const auto& [mine, owners] : calls) {
    if (owners.size() == 0 || (n_parts != 0 && owners.size() != n_parts))
      throw std::invalid_argument("owners: as many for each call, and one at least");
    n_parts = owners.size();
    n += mine.size();
    all.push_back({mine.data(), mine.size(), owners.data()});
  }
  if (keys.size() != n || order.size() != n)
    throw std::invalid_argument("deal_keys: room for " + text(n) + " keys and their order");
  if (counts.shape(1) != all.size())
    throw std::invalid_argument("counts: a column for each of " + text(all.size()) + " calls");
  nb::gil_scoped_release unlocked;
  ps::deal_keys(all, static_cast<std::uint32_t>(n_parts), counts.shape(0), keys.data(),
                order.data(), counts.data());
}

}  // namespace

void bind_shard(nb::module_& m) {
  m.def("stage_rows", &stage_rows, "out"_a.noconvert(), "rows"_a.noconvert(), "dim"_a,
        "order"_a.noconvert() = nb::none());
  m.def("deal_keys", &deal_keys, "calls"_a.noconvert(), "keys"_a.noconvert(),
        "order"_a.noconvert(), "counts"_a.noconvert());
  m.def("all_finite", &all_finite, "x"_a.noconvert());
  nb::class_<Shard>(m, "Shard")
      .def("__init__",
           [](Shard* at, std::shared_ptr<ps::RowSpec> spec, Numbers owners, std::uint32_t me) {
             new (at) Shard(spec, {owners.data(), owners.data() + owners.size()}, me);
           },
           "spec"_a, "owners"_a.noconvert(), "me"_a)
      .def("__len__", &Shard::size)
      .def_prop_ro("nbytes", &Shard::nbytes)
      .def("own", &Shard::own, "partition"_a)
      .def("disown", &Shard::disown, "partition"_a)
      .def("find", &Shard::find, "partition"_a)
      .def("gather", &gather, "keys"_a.noconvert(), "out"_a.noconvert(), "missing"_a,
           "places"_a.noconvert() = nb::none(), "held"_a = nb::none())
      .def("hold", &Shard::hold, "number"_a)
      .def("release", &Shard::release, "number"_a, Unlocked())
      .def("n_keys", &n_keys)
      .def("add_keys", &Shard::add_keys, "partition"_a, "n"_a)
      .def("push", &push, "contributions"_a.noconvert(), "code"_a, "hyper"_a.noconvert(),
           "divisor"_a, "now"_a, "stamp"_a, "draw"_a)
      .def("erase", &erase, "keys"_a.noconvert(), "stamp"_a)
      .def("metadata", &metadata, "keys"_a.noconvert(), "counts"_a.noconvert(),
           "steps"_a.noconvert(), "times"_a.noconvert())
      .def_prop_ro("max_rows", &Shard::max_rows)
      .def("evict", &Shard::evict, "now"_a, "stamp"_a, "max_work"_a, Unlocked());
}

}  // namespace ringcomm
