// Arrays of values as the bindings of the parameter server take them.
#pragma once
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "bind_arrays.hpp"
#include "kernels/reduce.hpp"
#include "ps/update.hpp"

namespace ringcomm {

using Values = nb::ndarray<nb::c_contig, nb::device::cpu>;
using ConstValues = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Keys = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Hyper = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
using Numpy = nb::ndarray<nb::numpy, T>;

inline std::string text(std::size_t n) { return std::to_string(n); }

// float16, float32 and float64; uint16 stands for the bits of bfloat16, which numpy has no type for.
template <class Array>
DType dtype_of(const char* what, const Array& x) {
  const nb::dlpack::dtype dtype = x.dtype();
  const bool is_float = dtype.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float);
  const bool is_uint = dtype.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::UInt);
  if (is_float && dtype.bits == 64) return DType::float64;
  if (is_float && dtype.bits == 32) return DType::float32;
  if (is_float && dtype.bits == 16) return DType::float16;
  if (is_uint && dtype.bits == 16) return DType::bfloat16;
  throw nb::type_error((std::string(what) +
                        ": float32, float64, float16 or uint16 (the bits of bfloat16) only")
                           .c_str());
}

template <class Array>
void require_aligned(const char* what, const Array& x) {
  const std::size_t item = x.itemsize();
  if (x.size() != 0 && reinterpret_cast<std::uintptr_t>(x.data()) % item != 0)
    throw std::invalid_argument(std::string(what) + " is not aligned to its element size");
}

// Values or slots: in the dtype of the table or block.
template <class Array>
void require_values(const char* what, const Array& x, DType dtype, std::size_t count) {
  if (dtype_of(what, x) != dtype)
    throw nb::type_error((std::string(what) + ": not of the dtype of the values").c_str());
  if (x.size() != count)
    throw std::invalid_argument(std::string(what) + " has " + text(x.size()) + " elements, not " +
                                text(count));
  require_aligned(what, x);
}

inline DType value_dtype(int code) {
  const auto dtype = from_code<DType>("dtype", code);
  if (dtype != DType::float32 && dtype != DType::float64)
    throw std::invalid_argument("values are float32 or float64");
  return dtype;
}

inline DType grad_dtype(const ConstValues& grad, DType values, std::size_t count) {
  const DType dtype = dtype_of("grad", grad);
  const bool is_16bit = dtype == DType::float16 || dtype == DType::bfloat16;
  if (dtype != values && !is_16bit)
    throw nb::type_error("grad: the dtype of the values, float16 or bfloat16 (as uint16) only");
  if (grad.size() != count)
    throw std::invalid_argument("grad has " + text(grad.size()) + " elements, not " + text(count));
  require_aligned("grad", grad);
  return dtype;
}

inline ps::Rule rule_of(int code, const Hyper& hyper) {
  return ps::rule_of(code, hyper.data(), hyper.size());
}

}  // namespace ringcomm
