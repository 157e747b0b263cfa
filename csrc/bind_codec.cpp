// Bindings of what compresses: check, release the GIL, call. Every array is .noconvert().
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "bind_arrays.hpp"
#include "kernels/convert.hpp"
#include "kernels/int8.hpp"
#include "kernels/reduce.hpp"
#include "kernels/top_k.hpp"

namespace ringcomm {
namespace {

using Indices = nb::ndarray<std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::size_t count_of(std::size_t item, std::size_t nbytes) {
  if (nbytes % item != 0)
    throw std::invalid_argument(std::to_string(nbytes) + " bytes are no whole number of elements");
  return nbytes / item;
}

void require_aligned(const void* data, std::size_t item) {
  if (reinterpret_cast<std::uintptr_t>(data) % item != 0)
    throw std::invalid_argument("buffer is not aligned to its element size");
}

void require_nbytes(const char* what, std::size_t nbytes, std::size_t wanted) {
  if (nbytes != wanted)
    throw std::invalid_argument(std::string(what) + " has " + std::to_string(nbytes) +
                                " bytes, wanted " + std::to_string(wanted));
}

void py_convert(Bytes dst, ConstBytes src, int to_code, int code) {
  const auto to = from_code<DType>("dtype", to_code), from = from_code<DType>("dtype", code);
  const std::size_t count = count_of(itemsize(from), src.nbytes());
  require_nbytes("destination", dst.nbytes(), count * itemsize(to));
  if (itemsize(to) > 2) require_aligned(dst.data(), itemsize(to));
  if (itemsize(from) > 2) require_aligned(src.data(), itemsize(from));
  nb::gil_scoped_release unlocked;
  convert(dst.data(), to, src.data(), from, count);
}

// The scales and codes of `count` elements, which fill a buffer.
std::size_t scales_nbytes(std::size_t nbytes, DType dtype, std::size_t count, std::size_t block) {
  if (block == 0) throw std::invalid_argument("block is 0");
  const std::size_t scales = (count / block + (count % block != 0)) * scale_nbytes(dtype);
  require_nbytes("buffer", nbytes, scales + count);
  return scales;
}

void py_encode_int8(Bytes out, ConstBytes x, int code, std::size_t block, std::uint64_t seed,
                    std::uint64_t draw) {
  const auto dtype = from_code<DType>("dtype", code);
  const std::size_t count = count_of(itemsize(dtype), x.nbytes());
  const std::size_t scales = scales_nbytes(out.nbytes(), dtype, count, block);
  require_aligned(x.data(), itemsize(dtype));
  nb::gil_scoped_release unlocked;
  auto* codes = reinterpret_cast<std::int8_t*>(out.data() + scales);
  encode_int8(out.data(), codes, x.data(), dtype, count, block, seed, draw);
}

void py_decode_int8(Bytes x, ConstBytes buffer, int code, std::size_t block) {
  const auto dtype = from_code<DType>("dtype", code);
  const std::size_t count = count_of(itemsize(dtype), x.nbytes());
  const std::size_t scales = scales_nbytes(buffer.nbytes(), dtype, count, block);
  require_aligned(x.data(), itemsize(dtype));
  nb::gil_scoped_release unlocked;
  const auto* codes = reinterpret_cast<const std::int8_t*>(buffer.data() + scales);
  decode_int8(x.data(), dtype, buffer.data(), codes, count, block);
}

void py_top_k(Indices indices, ConstBytes x, std::size_t item) {
  if (item == 0) throw std::invalid_argument("itemsize is 0");
  const std::size_t count = count_of(item, x.nbytes()), k = indices.size();
  require_aligned(x.data(), item);
  if (k > count || count > std::numeric_limits<std::uint32_t>::max())
    throw std::invalid_argument("top_k: k is " + std::to_string(k) + " of " +
                                std::to_string(count) + " elements");
  nb::gil_scoped_release unlocked;
  top_k(indices.data(), k, x.data(), item, count);
}

}  // namespace

void bind_codec(nb::module_& m) {
  m.def("convert", &py_convert, "dst"_a.noconvert(), "src"_a.noconvert(), "to"_a, "from_"_a);
  m.def("encode_int8", &py_encode_int8, "out"_a.noconvert(), "x"_a.noconvert(), "dtype"_a,
        "block"_a, "seed"_a, "draw"_a);
  m.def("decode_int8", &py_decode_int8, "x"_a.noconvert(), "buffer"_a.noconvert(), "dtype"_a,
        "block"_a);
  m.def("top_k", &py_top_k, "indices"_a.noconvert(), "x"_a.noconvert(), "itemsize"_a);
}

}  // namespace ringcomm
