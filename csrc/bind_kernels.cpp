// Bindings of the reduction kernels: check, release the GIL, call.
// Every array is .noconvert(): an implicit copy would be summed into and lost.
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bind_arrays.hpp"
#include "kernels/copy_past_caches.hpp"
#include "kernels/reduce.hpp"
#include "kernels/fp_environment.hpp"

namespace ringcomm {
namespace {

void require_same_size(std::size_t dst, std::size_t src) {
  if (dst != src)
    throw std::invalid_argument("destination has " + std::to_string(dst) + " bytes, source " +
                                std::to_string(src));
}

void py_combine(Bytes dst, ConstBytes src, int code, int op) {
  const auto dtype = from_code<DType>("dtype", code);
  require_same_size(dst.nbytes(), src.nbytes());
  const std::size_t count = require_elements(dtype, dst.data(), dst.nbytes());
  require_elements(dtype, src.data(), src.nbytes());
  nb::gil_scoped_release unlocked;
  combine(from_code<Op>("op", op), dtype, dst.data(), src.data(), count);
}

void py_divide(Bytes data, std::size_t divisor, int code) {
  if (divisor == 0) throw std::invalid_argument("divisor is 0");
  const auto dtype = from_code<DType>("dtype", code);
  const std::size_t count = require_elements(dtype, data.data(), data.nbytes());
  nb::gil_scoped_release unlocked;
  divide(dtype, data.data(), count, divisor);
}

// The addresses of arrays, of which each must have `nbytes`.
template <class Pointer, class Array>
std::vector<Pointer> pointers_of(const std::vector<Array>& arrays, std::size_t nbytes,
                                 DType dtype) {
  std::vector<Pointer> pointers;
  pointers.reserve(arrays.size());
  for (const auto& array : arrays) {
    if (array.nbytes() != nbytes)
      throw std::invalid_argument("a buffer has " + std::to_string(array.nbytes()) +
                                  " bytes, the first destination " + std::to_string(nbytes));
    require_elements(dtype, array.data(), nbytes);
    pointers.push_back(array.data());
  }
  return pointers;
}

void py_reduce_many(const std::vector<Bytes>& dsts, const std::vector<ConstBytes>& srcs, int code,
                    int op, std::size_t divisor) {
  if (dsts.empty()) throw std::invalid_argument("no destination");
  const auto dtype = from_code<DType>("dtype", code);
  const std::size_t nbytes = dsts[0].nbytes();
  const auto destinations = pointers_of<void*>(dsts, nbytes, dtype);
  const auto sources = pointers_of<const void*>(srcs, nbytes, dtype);
  nb::gil_scoped_release unlocked;
  reduce_many(from_code<Op>("op", op), dtype, destinations.data(), destinations.size(),
              sources.data(), sources.size(), nbytes / itemsize(dtype), divisor);
}

void py_combine_at_once(Bytes out, const std::vector<ConstBytes>& srcs, int code, int op,
                        std::size_t divisor) {
  const auto dtype = from_code<DType>("dtype", code);
  const std::size_t count = require_elements(dtype, out.data(), out.nbytes());
  const auto sources = pointers_of<const void*>(srcs, out.nbytes(), dtype);
  nb::gil_scoped_release unlocked;
  combine_at_once(from_code<Op>("op", op), dtype, out.data(), sources.data(), sources.size(), count,
                  divisor);
}

// For a `with` block of what numpy computes, in one thread.
class FloatsOfBlock {
 public:
  void enter() { floats_.emplace(); }
  void leave() { floats_.reset(); }

 private:
  std::optional<DefaultFpEnvironment> floats_;
};

// By address, for arrays that are not numpy's; the caller has checked them.
void py_copy_memory(std::uintptr_t out, std::uintptr_t x, std::size_t nbytes) {
  copy_streamed(reinterpret_cast<void*>(out), reinterpret_cast<const void*>(x), nbytes);
}

}  // namespace

void bind_kernels(nb::module_& m) {
  nb::class_<FloatsOfBlock>(m, "DefaultFpEnvironment")
      .def(nb::init<>())
      .def("__enter__", &FloatsOfBlock::enter)
      .def("__exit__", [](FloatsOfBlock& self, nb::args) { self.leave(); });
  m.def("combine", &py_combine, "dst"_a.noconvert(), "src"_a.noconvert(), "dtype"_a, "op"_a);
  m.def("divide", &py_divide, "data"_a.noconvert(), "divisor"_a, "dtype"_a);
  m.def("reduce_many", &py_reduce_many, "dsts"_a.noconvert(), "srcs"_a.noconvert(), "dtype"_a,
        "op"_a, "divisor"_a);
  m.def("combine_at_once", &py_combine_at_once, "out"_a.noconvert(), "sources"_a.noconvert(),
        "dtype"_a, "op"_a, "divisor"_a);
  m.def("copy_memory", &py_copy_memory, "out"_a, "x"_a, "nbytes"_a, Unlocked());
}

}  // namespace ringcomm
