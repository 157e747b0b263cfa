#include "reduce.hpp"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "half.hpp"

// One loop, compiled for several instruction sets, chosen when the library is loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(RINGCOMM_NO_CLONES)
#define RINGCOMM_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define RINGCOMM_CLONES
#endif

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

// dst[i] = `result` of a = dst[i] and b = src[i]. (target_clones cannot stand on a template.)
#define RINGCOMM_LOOP(name, T, result)                                             \
  RINGCOMM_CLONES void name##_##T(T* dst, const T* src, std::size_t count) {       \
    for (std::size_t i = 0; i < count; ++i) {                                      \
      const T a = dst[i], b = src[i];                                              \
      dst[i] = static_cast<T>(result);                                             \
    }                                                                              \
  }
#define RINGCOMM_FLOATS(name, result) \
  RINGCOMM_LOOP(name, f32, result)    \
  RINGCOMM_LOOP(name, f64, result)
#define RINGCOMM_UNSIGNED(name, result) \
  RINGCOMM_LOOP(name, u8, result)       \
  RINGCOMM_LOOP(name, u16, result)      \
  RINGCOMM_LOOP(name, u32, result)      \
  RINGCOMM_LOOP(name, u64, result)
#define RINGCOMM_SIGNED(name, result) \
  RINGCOMM_LOOP(name, i8, result)     \
  RINGCOMM_LOOP(name, i16, result)    \
  RINGCOMM_LOOP(name, i32, result)    \
  RINGCOMM_LOOP(name, i64, result)

RINGCOMM_FLOATS(sum, a + b)
RINGCOMM_FLOATS(product, a * b)
RINGCOMM_FLOATS(min, a < b || a != a ? a : b)  // NaN is unequal to itself
RINGCOMM_FLOATS(max, a > b || a != a ? a : b)
// Signed overflow is undefined in C++ (also of the int that small types become) and wraps in numpy:
// signed integers are summed and multiplied as unsigned ones of at least 32 bits.
RINGCOMM_UNSIGNED(sum, a + b)
RINGCOMM_UNSIGNED(product, 1u * a * b)
RINGCOMM_UNSIGNED(min, a < b ? a : b)
RINGCOMM_UNSIGNED(max, a > b ? a : b)
RINGCOMM_SIGNED(min, a < b ? a : b)
RINGCOMM_SIGNED(max, a > b ? a : b)
RINGCOMM_UNSIGNED(band, a & b)
RINGCOMM_UNSIGNED(bor, a | b)
RINGCOMM_UNSIGNED(bxor, a ^ b)
RINGCOMM_LOOP(both, u8, (a != 0) & (b != 0))
RINGCOMM_LOOP(either, u8, (a != 0) | (b != 0))
RINGCOMM_LOOP(one, u8, (a != 0) ^ (b != 0))

// numpy's formula; C's own product has other rules for infinities (C11 annex G) and is slow.
#define RINGCOMM_COMPLEX_PRODUCT(T)                                                \
  RINGCOMM_CLONES void complex_product_##T(T* dst, const T* src, std::size_t n) {  \
    for (std::size_t i = 0; i + 1 < n; i += 2) {                                   \
      const T re = dst[i] * src[i] - dst[i + 1] * src[i + 1];                      \
      dst[i + 1] = dst[i] * src[i + 1] + dst[i + 1] * src[i];                      \
      dst[i] = re;                                                                 \
    }                                                                              \
  }
RINGCOMM_COMPLEX_PRODUCT(f32)
RINGCOMM_COMPLEX_PRODUCT(f64)

template <class T>
using Loop = void (*)(T*, const T*, std::size_t);

template <class T>
void run(Loop<T> loop, void* dst, const void* src, std::size_t count) {
  if (loop == nullptr) throw std::invalid_argument("this operator has no meaning for this dtype");
  loop(static_cast<T*>(dst), static_cast<const T*>(src), count);
}

// The loops of one type in the order of Op; a null pointer where the operator has no meaning.
template <class T>
using Row = const Loop<T>[7];
constexpr Row<f32> kF32 = {sum_f32, product_f32, min_f32, max_f32, nullptr, nullptr, nullptr};
constexpr Row<f64> kF64 = {sum_f64, product_f64, min_f64, max_f64, nullptr, nullptr, nullptr};
constexpr Row<u8> kU8 = {sum_u8, product_u8, min_u8, max_u8, band_u8, bor_u8, bxor_u8};
constexpr Row<u16> kU16 = {sum_u16, product_u16, min_u16, max_u16, band_u16, bor_u16, bxor_u16};
constexpr Row<u32> kU32 = {sum_u32, product_u32, min_u32, max_u32, band_u32, bor_u32, bxor_u32};
constexpr Row<u64> kU64 = {sum_u64, product_u64, min_u64, max_u64, band_u64, bor_u64, bxor_u64};
constexpr Row<u8> kBool = {either_u8, both_u8, both_u8, either_u8, both_u8, either_u8, one_u8};
constexpr Row<f32> kC64 = {sum_f32, complex_product_f32, nullptr, nullptr, nullptr, nullptr, nullptr};
constexpr Row<f64> kC128 = {sum_f64, complex_product_f64, nullptr, nullptr, nullptr, nullptr, nullptr};

template <class Signed, class Unsigned>
void run_signed(Op op, Loop<Signed> min, Loop<Signed> max, Row<Unsigned>& row, void* dst,
                const void* src, std::size_t count) {
  if (op == Op::min || op == Op::max) return run(op == Op::min ? min : max, dst, src, count);
  run(row[static_cast<std::size_t>(op)], dst, src, count);
}

template <class T>
void divide_by(void* data, std::size_t count, std::size_t divisor) {
  T* values = static_cast<T*>(data);
  using Wide = std::conditional_t<std::is_floating_point_v<T>, T,
                                  std::conditional_t<std::is_signed_v<T>, i64, u64>>;
  const Wide by = static_cast<Wide>(divisor);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<T>(values[i] / by);
}

constexpr std::size_t kBlock = 2048;  // float32 accumulators of one block stay in the L1 cache

RINGCOMM_CLONES void widen_f16(float* wide, const u16* src, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) wide[i] = Float16::widen(src[i]);
}
RINGCOMM_CLONES void widen_add_f16(float* acc, const u16* src, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) acc[i] += Float16::widen(src[i]);
}
RINGCOMM_CLONES void narrow_f16(u16* out, const float* acc, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = Float16::narrow(acc[i]);
}
RINGCOMM_CLONES void widen_bf16(float* wide, const u16* src, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) wide[i] = BFloat16::widen(src[i]);
}
RINGCOMM_CLONES void widen_add_bf16(float* acc, const u16* src, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) acc[i] += BFloat16::widen(src[i]);
}
RINGCOMM_CLONES void narrow_bf16(u16* out, const float* acc, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = BFloat16::narrow(acc[i]);
}

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

void combine(Op op, DType dtype, void* dst, const void* src, std::size_t count) {
  const auto which = static_cast<std::size_t>(op);
  if (which > static_cast<std::size_t>(Op::bxor)) throw std::invalid_argument("no such operator");
  switch (dtype) {
    case DType::float16:
    case DType::bfloat16:
      throw std::invalid_argument("16-bit floats are combined by combine_rounded");
    case DType::float32:
      return run(kF32[which], dst, src, count);
    case DType::float64:
      return run(kF64[which], dst, src, count);
    case DType::int8:
      return run_signed<i8>(op, min_i8, max_i8, kU8, dst, src, count);
    case DType::int16:
      return run_signed<i16>(op, min_i16, max_i16, kU16, dst, src, count);
    case DType::int32:
      return run_signed<i32>(op, min_i32, max_i32, kU32, dst, src, count);
    case DType::int64:
      return run_signed<i64>(op, min_i64, max_i64, kU64, dst, src, count);
    case DType::uint8:
      return run(kU8[which], dst, src, count);
    case DType::uint16:
      return run(kU16[which], dst, src, count);
    case DType::uint32:
      return run(kU32[which], dst, src, count);
    case DType::uint64:
      return run(kU64[which], dst, src, count);
    case DType::boolean:
      return run(kBool[which], dst, src, count);
    case DType::complex64:
      return run(kC64[which], dst, src, 2 * count);
    case DType::complex128:
      return run(kC128[which], dst, src, 2 * count);
  }
  throw std::invalid_argument("no kernel for this dtype code");
}

void divide(DType dtype, void* data, std::size_t count, std::size_t divisor) {
  switch (dtype) {
    case DType::float32:
      return divide_by<f32>(data, count, divisor);
    case DType::float64:
      return divide_by<f64>(data, count, divisor);
    case DType::int8:
      return divide_by<i8>(data, count, divisor);
    case DType::int16:
      return divide_by<i16>(data, count, divisor);
    case DType::int32:
      return divide_by<i32>(data, count, divisor);
    case DType::int64:
      return divide_by<i64>(data, count, divisor);
    case DType::uint8:
      return divide_by<u8>(data, count, divisor);
    case DType::uint16:
      return divide_by<u16>(data, count, divisor);
    case DType::uint32:
      return divide_by<u32>(data, count, divisor);
    case DType::uint64:
      return divide_by<u64>(data, count, divisor);
    case DType::complex64:
      return divide_by<f32>(data, 2 * count, divisor);
    case DType::complex128:
      return divide_by<f64>(data, 2 * count, divisor);
    case DType::boolean:
    case DType::float16:
    case DType::bfloat16:
      break;
  }
  throw std::invalid_argument("divide: no kernel for this dtype code");
}

void combine_rounded(Op op, DType dtype, void* out, const void* const* sources,
                     std::size_t n_sources, std::size_t count, std::size_t divisor) {
  if (dtype != DType::float16 && dtype != DType::bfloat16)
    throw std::invalid_argument("combine_rounded: float16 and bfloat16 only");
  if (n_sources == 0) throw std::invalid_argument("combine_rounded: no source");
  const auto which = static_cast<std::size_t>(op);
  if (which > static_cast<std::size_t>(Op::max))
    throw std::invalid_argument("this operator has no meaning for this dtype");
  const bool is_bf16 = dtype == DType::bfloat16;
  const auto widen = is_bf16 ? widen_bf16 : widen_f16;
  const auto widen_add = is_bf16 ? widen_add_bf16 : widen_add_f16;
  const auto narrow = is_bf16 ? narrow_bf16 : narrow_f16;
  float acc[kBlock];
  float wide[kBlock];
  for (std::size_t start = 0; start < count; start += kBlock) {
    const std::size_t n = std::min(kBlock, count - start);
    for (std::size_t k = 0; k < n_sources; ++k) {
      const u16* source = static_cast<const u16*>(sources[k]) + start;
      if (k == 0) {
        widen(acc, source, n);
      } else if (op == Op::sum) {
        widen_add(acc, source, n);
      } else {
        widen(wide, source, n);
        kF32[which](acc, wide, n);
      }
    }
    if (divisor != 1) divide_by<f32>(acc, n, divisor);
    narrow(static_cast<u16*>(out) + start, acc, n);
  }
}

void reduce_many(Op op, DType dtype, void* const* dst, std::size_t n_dst, const void* const* src,
                 std::size_t n_src, std::size_t count, std::size_t divisor) {
  const std::size_t item = itemsize(dtype);
  alignas(64) char block[8192];
  const std::size_t per = sizeof block / item;
  for (std::size_t at = 0; at < count; at += per) {
    const std::size_t n = std::min(per, count - at);
    if (dtype == DType::float16 || dtype == DType::bfloat16) {
      const void* from[64];
      for (std::size_t k = 0; k < n_src; ++k) from[k] = static_cast<const char*>(src[k]) + at * item;
      combine_rounded(op, dtype, block, from, n_src, n, divisor);
    } else {
      __builtin_memcpy(block, static_cast<const char*>(src[0]) + at * item, n * item);
      for (std::size_t k = 1; k < n_src; ++k)
        combine(op, dtype, block, static_cast<const char*>(src[k]) + at * item, n);
      if (divisor != 1) divide(dtype, block, n, divisor);
    }
    for (std::size_t k = 0; k < n_dst; ++k)
      __builtin_memcpy(static_cast<char*>(dst[k]) + at * item, block, n * item);
  }
}

}  // namespace ringcomm
