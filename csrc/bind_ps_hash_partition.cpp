// Bindings of hash-table partitions: check, release the GIL, call.
// Every array is .noconvert(): nothing is copied behind the caller's back.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>

#include "bind_ps_checks.hpp"
#include "ps/hash_partition.hpp"

namespace ringcomm {
namespace {

using ps::HashPartition;
using ps::RowSpec;
template <class T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A new array, and its memory.
struct Room {
  nb::object array;
  void* data;
};

Room make_room(std::initializer_list<std::size_t> shape, nb::dlpack::dtype dtype) {
  std::size_t nbytes = dtype.bits / 8;
  for (const std::size_t n : shape) nbytes *= n;
  auto memory = std::make_unique<std::uint64_t[]>(nbytes / sizeof(std::uint64_t) + 1);
  void* const data = memory.get();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<std::uint64_t*>(p); });
  (void)memory.release();
  nb::ndarray<nb::numpy> array(data, shape.size(), shape.begin(), owner, nullptr, dtype);
  return {nb::cast(array), data};
}

template <class T>
Room make_column(std::size_t n) {
  return make_room({n}, nb::dtype<T>());
}

nb::dlpack::dtype dlpack_dtype(DType dtype) {
  return dtype == DType::float64 ? nb::dtype<double>() : nb::dtype<float>();
}

nb::object to_array(const std::vector<std::uint64_t>& numbers) {
  const Room room = make_column<std::uint64_t>(numbers.size());
  if (!numbers.empty())
    std::memcpy(room.data, numbers.data(), numbers.size() * sizeof(std::uint64_t));
  return room.array;
}

std::shared_ptr<RowSpec> make_spec(std::size_t dim, int dtype, int code, Hyper hyper, int init_code,
                                   Hyper init_parameters, std::uint64_t seed, std::uint64_t table,
                                   std::uint32_t min_count, double probability,
                                   std::size_t max_candidates, double ttl_s, std::size_t max_rows,
                                   bool is_lfu) {
  if (dim == 0) throw std::invalid_argument("dim: a row has one column at least");
  if (!(probability > 0 && probability <= 1))
    throw std::invalid_argument("probability: in (0, 1]");
  if (!(ttl_s > 0)) throw std::invalid_argument("ttl_s: more than 0");
  if (max_rows == 0) throw std::invalid_argument("max_rows: one at least");
  if (max_candidates == 0) throw std::invalid_argument("max_candidates: one at least");
  auto spec = std::make_shared<RowSpec>();
  spec->dim = dim;
  spec->dtype = value_dtype(dtype);
  spec->rule = rule_of(code, hyper);
  spec->initial = ps::initial_of(init_code, init_parameters.data(), init_parameters.size(), seed,
                                 table);
  spec->admission = {min_count, probability, max_candidates};
  spec->eviction = {ttl_s, max_rows, is_lfu ? ps::Order::lfu : ps::Order::lru};
  return spec;
}

nb::tuple export_rows(const HashPartition& rows) {
  const RowSpec& spec = rows.spec();
  const std::vector<ps::Row> which = rows.all();
  const std::size_t n = which.size();
  const Room keys = make_column<std::uint64_t>(n), counts = make_column<std::uint32_t>(n),
             steps = make_column<std::uint32_t>(n), times = make_column<double>(n);
  const Room values = make_room({n, spec.dim}, dlpack_dtype(spec.dtype));
  const Room slots = make_room({n, spec.slot_width()}, dlpack_dtype(spec.dtype));
  {
    nb::gil_scoped_release unlocked;
    rows.copy(which, {static_cast<std::uint64_t*>(keys.data), values.data, slots.data,
                      static_cast<std::uint32_t*>(counts.data),
                      static_cast<std::uint32_t*>(steps.data), static_cast<double*>(times.data)});
  }
  return nb::make_tuple(keys.array, values.array, slots.array, counts.array, steps.array,
                        times.array);
}

void load(HashPartition& rows, Keys keys, ConstValues values, ConstValues slots,
          Column<std::uint32_t> counts, Column<std::uint32_t> steps, Column<double> times) {
  const RowSpec& spec = rows.spec();
  const std::size_t n = keys.size();
  require_values("values", values, spec.dtype, n * spec.dim);
  require_values("slots", slots, spec.dtype, n * spec.slot_width());
  for (const std::size_t size : {counts.size(), steps.size(), times.size()})
    if (size != n)
      throw std::invalid_argument("load: " + text(n) + " keys, but " + text(size) +
                                  " counts, steps or times");
  nb::gil_scoped_release unlocked;
  rows.load({const_cast<std::uint64_t*>(keys.data()), const_cast<void*>(values.data()),
             const_cast<void*>(slots.data()), const_cast<std::uint32_t*>(counts.data()),
             const_cast<std::uint32_t*>(steps.data()), const_cast<double*>(times.data())},
            n);
}

nb::tuple candidates(const HashPartition& rows) {
  const auto all = rows.candidates();
  std::vector<std::uint64_t> keys, counts;
  for (const auto& [key, count] : all) {
    keys.push_back(key);
    counts.push_back(count);
  }
  return nb::make_tuple(to_array(keys), to_array(counts));
}

void load_candidates(HashPartition& rows, Keys keys, Keys counts) {
  if (keys.size() != counts.size()) throw std::invalid_argument("counts: one per key");
  nb::gil_scoped_release unlocked;
  for (std::size_t i = 0; i < keys.size(); ++i)
    rows.load_candidate(keys.data()[i], counts.data()[i]);
}

}  // namespace

void bind_hash_partition(nb::module_& m) {
  nb::class_<RowSpec>(m, "RowSpec")
      .def(nb::new_(&make_spec), nb::kw_only(), "dim"_a, "dtype"_a, "code"_a,
           "hyper"_a.noconvert(), "init_code"_a, "init_parameters"_a.noconvert(), "seed"_a,
           "table"_a, "min_count"_a = 1, "probability"_a = 1.0, "max_candidates"_a = 1u << 14,
           "ttl_s"_a = std::numeric_limits<double>::infinity(),
           "max_rows"_a = std::numeric_limits<std::uint32_t>::max(), "is_lfu"_a = false);
  nb::class_<HashPartition>(m, "HashPartition")
      .def("__len__", &HashPartition::size)
      .def_prop_ro("n_candidates", &HashPartition::n_candidates)
      .def_prop_rw("stamp", &HashPartition::stamp, &HashPartition::mark)
      .def("export", &export_rows)
      .def("load", &load, "keys"_a.noconvert(), "values"_a.noconvert(), "slots"_a.noconvert(),
           "counts"_a.noconvert(), "steps"_a.noconvert(), "times"_a.noconvert())
      .def("candidates", &candidates)
      .def("load_candidates", &load_candidates, "keys"_a.noconvert(), "counts"_a.noconvert())
      .def("clear", &HashPartition::clear, Unlocked());
}

}  // namespace ringcomm
