#include "reduce.hpp"

#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <string>

#include "target_clones.hpp"
#include "convert.hpp"
#include "reduce_f16c.hpp"
#include "reduce_half_loops.hpp"
#include "reduce_loops.hpp"
#include "fp_environment.hpp"

// Where there are fused products, GCC 12 makes complex ones of them, in spite of -ffp-contract=off.
#define RINGCOMM_CLONES_UNFUSED RINGCOMM_CLONES_FOR("avx2")

namespace ringcomm {
namespace {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i8 = std::int8_t;
using i16 = std::int16_t;
using i32 = std::int32_t;
using i64 = std::int64_t;
using f32 = float;
using f64 = double;

using Reduction = void (*)(const Job&);
using Division = void (*)(void* data, std::size_t count, std::size_t divisor);

// target_clones cannot stand on a template, so each loop gets a name.
#define RINGCOMM_REDUCTION(name, ...) \
  RINGCOMM_CLONES void name(const Job& job) { __VA_ARGS__(job); }
#define RINGCOMM_COMPLEX_PRODUCT(name, T) \
  RINGCOMM_CLONES_UNFUSED void name(const Job& job) { reduce_range<Complex<T>, Product>(job); }
#define RINGCOMM_DIVISION(T)                                                              \
  RINGCOMM_CLONES void divide_##T(void* data, std::size_t count, std::size_t divisor) {   \
    divide_range<T>(data, count, divisor);                                                \
  }
#define RINGCOMM_ORDERED(T)                         \
  RINGCOMM_REDUCTION(min_##T, reduce_range<T, Min>) \
  RINGCOMM_REDUCTION(max_##T, reduce_range<T, Max>) \
  RINGCOMM_DIVISION(T)
#define RINGCOMM_INTEGER(T) RINGCOMM_ORDERED(T) RINGCOMM_REDUCTION(average_##T, average_range<T>)
#define RINGCOMM_SUMMED(T)                          \
  RINGCOMM_REDUCTION(sum_##T, reduce_range<T, Sum>) \
  RINGCOMM_REDUCTION(product_##T, reduce_range<T, Product>)
#define RINGCOMM_FLOAT(T) RINGCOMM_SUMMED(T) RINGCOMM_ORDERED(T)
#define RINGCOMM_HALF(name, attributes, H)                              \
  attributes void sum_##name(const Job& job) { reduce_halves<H, Sum>(job); }         \
  attributes void product_##name(const Job& job) { reduce_halves<H, Product>(job); } \
  attributes void min_##name(const Job& job) { reduce_halves<H, Min>(job); }         \
  attributes void max_##name(const Job& job) { reduce_halves<H, Max>(job); }

RINGCOMM_FLOAT(f32)
RINGCOMM_FLOAT(f64)
RINGCOMM_SUMMED(u8)
RINGCOMM_SUMMED(u16)
RINGCOMM_SUMMED(u32)
RINGCOMM_SUMMED(u64)
RINGCOMM_INTEGER(u8)
RINGCOMM_INTEGER(u16)
RINGCOMM_INTEGER(u32)
RINGCOMM_INTEGER(u64)
RINGCOMM_INTEGER(i8)  // sums and products are those of the unsigned types
RINGCOMM_INTEGER(i16)
RINGCOMM_INTEGER(i32)
RINGCOMM_INTEGER(i64)
RINGCOMM_COMPLEX_PRODUCT(product_c64, f32)
RINGCOMM_COMPLEX_PRODUCT(product_c128, f64)
RINGCOMM_REDUCTION(both, reduce_range<u8, Both>)
RINGCOMM_REDUCTION(either, reduce_range<u8, Either>)
RINGCOMM_REDUCTION(one, reduce_range<u8, One>)
RINGCOMM_REDUCTION(bytes_and, reduce_range<u8, BitAnd>)
RINGCOMM_REDUCTION(bytes_or, reduce_range<u8, BitOr>)
RINGCOMM_REDUCTION(bytes_xor, reduce_range<u8, BitXor>)
RINGCOMM_HALF(bf16, RINGCOMM_CLONES, BFloat16Pair)
RINGCOMM_HALF(f16, , Float16Pair)

template <Reduction portable, Reduction f16c>
void f16(const Job& job) {
  static const bool is_portable = !has_f16c();
  is_portable ? portable(job) : f16c(job);
}

// Elements that are `n` numbers of a simpler kind.
template <Reduction reduction, std::size_t n>
void in_parts(const Job& job) {
  Job parts = job;
  parts.count *= n;
  reduction(parts);
}

// What there is for a dtype: a null pointer where the operator, or to divide, has no meaning.
struct Row {
  Reduction by_op[n_codes<Op>];
  Division divide;
  Reduction average = nullptr;  // of integers: the sum, divided, in more bits than the dtype's
};
#define RINGCOMM_ROW(S, T) sum_##S, product_##S, min_##T, max_##T
#define RINGCOMM_BITS(n) in_parts<bytes_and, n>, in_parts<bytes_or, n>, in_parts<bytes_xor, n>
constexpr Row kRows[] = {
    {{f16<sum_f16, sum_f16c>, f16<product_f16, product_f16c>, f16<min_f16, min_f16c>,
      f16<max_f16, max_f16c>},
     divide_f32},
    {{RINGCOMM_ROW(bf16, bf16)}, divide_f32},
    {{RINGCOMM_ROW(f32, f32)}, divide_f32},
    {{RINGCOMM_ROW(f64, f64)}, divide_f64},
    {{RINGCOMM_ROW(u8, i8), RINGCOMM_BITS(1)}, divide_i8, average_i8},
    {{RINGCOMM_ROW(u16, i16), RINGCOMM_BITS(2)}, divide_i16, average_i16},
    {{RINGCOMM_ROW(u32, i32), RINGCOMM_BITS(4)}, divide_i32, average_i32},
    {{RINGCOMM_ROW(u64, i64), RINGCOMM_BITS(8)}, divide_i64, average_i64},
    {{RINGCOMM_ROW(u8, u8), RINGCOMM_BITS(1)}, divide_u8, average_u8},
    {{RINGCOMM_ROW(u16, u16), RINGCOMM_BITS(2)}, divide_u16, average_u16},
    {{RINGCOMM_ROW(u32, u32), RINGCOMM_BITS(4)}, divide_u32, average_u32},
    {{RINGCOMM_ROW(u64, u64), RINGCOMM_BITS(8)}, divide_u64, average_u64},
    {{either, both, both, either, both, either, one}, nullptr},
    {{in_parts<sum_f32, 2>, product_c64}, divide_f32},
    {{in_parts<sum_f64, 2>, product_c128}, divide_f64},
};

static_assert(std::size(kRows) == n_codes<DType>, "a row for each dtype, in their order");

bool is_16bit_float(DType dtype) { return dtype == DType::float16 || dtype == DType::bfloat16; }

}  // namespace

std::size_t itemsize(DType dtype) {
  switch (dtype) {
    case DType::int8:
    case DType::uint8:
    case DType::boolean:
      return 1;
    case DType::float16:
    case DType::bfloat16:
    case DType::int16:
    case DType::uint16:
      return 2;
    case DType::float32:
    case DType::int32:
    case DType::uint32:
      return 4;
    case DType::float64:
    case DType::int64:
    case DType::uint64:
    case DType::complex64:
      return 8;
    case DType::complex128:
      return 16;
  }
  throw std::invalid_argument("no kernel for this dtype code");
}

std::size_t alignment(DType dtype) {
  const bool is_complex = dtype == DType::complex64 || dtype == DType::complex128;
  return is_complex ? itemsize(dtype) / 2 : itemsize(dtype);
}

std::size_t require_elements(DType dtype, const void* data, std::size_t nbytes) {
  const std::size_t item = itemsize(dtype);
  if (nbytes % item != 0)
    throw std::invalid_argument(std::to_string(nbytes) + " bytes are no whole number of elements");
  if (nbytes != 0 && reinterpret_cast<std::uintptr_t>(data) % alignment(dtype) != 0)
    throw std::invalid_argument("buffer is not aligned to its element size");
  return nbytes / item;
}

void reduce_many(Op op, DType dtype, void* const* dst, std::size_t n_dst, const void* const* src,
                 std::size_t n_src, std::size_t count, std::size_t divisor) {
  const Row& row = kRows[static_cast<std::size_t>(dtype)];
  if (n_src == 0) throw std::invalid_argument("no source");
  if (n_dst == 0) throw std::invalid_argument("no destination");
  if (divisor == 0) throw std::invalid_argument("divisor is 0");
  const Reduction reduce = row.by_op[static_cast<std::size_t>(op)];
  const Division divide = op < Op::band ? row.divide : nullptr;
  if (reduce == nullptr) throw std::invalid_argument("this operator has no meaning for this dtype");
  if (divisor != 1 && divide == nullptr)
    throw std::invalid_argument("no kernel divides what this operator gives for this dtype");
  const bool is_average = op == Op::sum && n_src > 1 && divisor >= n_src && row.average != nullptr;
  if (is_average && n_src > kMostAveraged)
    throw std::invalid_argument("an average of more than 65536 integers");
  const DefaultFpEnvironment here;
  (is_average ? row.average : reduce)({dst, n_dst, src, n_src, count, divisor, divide});
}

void combine(Op op, DType dtype, void* dst, const void* src, std::size_t count) {
  if (is_16bit_float(dtype))
    throw std::invalid_argument("16-bit floats are combined by reduce_many");
  const void* const sources[] = {dst, src};
  reduce_many(op, dtype, &dst, 1, sources, 2, count, 1);
}

void divide(DType dtype, void* data, std::size_t count, std::size_t divisor) {
  if (is_16bit_float(dtype) || dtype == DType::boolean)
    throw std::invalid_argument("divide: no kernel for this dtype code");
  const void* const source = data;
  reduce_many(Op::sum, dtype, &data, 1, &source, 1, count, divisor);
}

void reduce_to_float32(Op op, DType dtype, float* dst, const void* const* src, std::size_t n_src,
                       std::size_t count) {
  constexpr std::size_t kMost = kBlockBytes / sizeof(float);
  if (!is_16bit_float(dtype))
    throw std::invalid_argument("reduce_to_float32: from float16 or bfloat16");
  if (n_src == 0) throw std::invalid_argument("no source");
  float next[kMost];
  for (std::size_t start = 0, n; start < count; start += n) {
    n = std::min(kMost, count - start);
    convert(dst + start, DType::float32, at<std::uint16_t>(src[0], start), dtype, n);
    for (std::size_t k = 1; k < n_src; ++k) {
      convert(next, DType::float32, at<std::uint16_t>(src[k], start), dtype, n);
      combine(op, DType::float32, dst + start, next, n);
    }
  }
}

void combine_at_once(Op op, DType dtype, void* out, const void* const* sources,
                     std::size_t n_sources, std::size_t count, std::size_t divisor) {
  reduce_many(op, dtype, &out, 1, sources, n_sources, count, divisor);
}

}  // namespace ringcomm
