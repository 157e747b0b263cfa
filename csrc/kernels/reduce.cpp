#include "reduce.hpp"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "half.hpp"

// One loop, compiled for several instruction sets, chosen when the library is loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define RINGCOMM_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define RINGCOMM_CLONES
#endif

namespace ringcomm {
namespace {

// Signed overflow is undefined in C++ and wraps in numpy: integers are summed as unsigned.
RINGCOMM_CLONES void add_f32(float* dst, const float* src, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) dst[i] += src[i];
}
RINGCOMM_CLONES void add_f64(double* dst, const double* src, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) dst[i] += src[i];
}
RINGCOMM_CLONES void add_u32(std::uint32_t* dst, const std::uint32_t* src, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) dst[i] += src[i];
}
RINGCOMM_CLONES void add_u64(std::uint64_t* dst, const std::uint64_t* src, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) dst[i] += src[i];
}

template <class T>
void divide_by(T* data, std::size_t count, std::size_t divisor) {
  const T by = static_cast<T>(divisor);
  for (std::size_t i = 0; i < count; ++i) data[i] /= by;
}

constexpr std::size_t kBlock = 2048;  // float32 accumulators of one block stay in the L1 cache

RINGCOMM_CLONES void widen_first_f16(float* acc, const std::uint16_t* src, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) acc[i] = Float16::widen(src[i]);
}
RINGCOMM_CLONES void widen_add_f16(float* acc, const std::uint16_t* src, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) acc[i] += Float16::widen(src[i]);
}
RINGCOMM_CLONES void narrow_f16(std::uint16_t* out, const float* acc, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = Float16::narrow(acc[i]);
}
RINGCOMM_CLONES void widen_first_bf16(float* acc, const std::uint16_t* src, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) acc[i] = BFloat16::widen(src[i]);
}
RINGCOMM_CLONES void widen_add_bf16(float* acc, const std::uint16_t* src, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) acc[i] += BFloat16::widen(src[i]);
}
RINGCOMM_CLONES void narrow_bf16(std::uint16_t* out, const float* acc, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = BFloat16::narrow(acc[i]);
}

}  // namespace

std::size_t itemsize(DType dtype) {
  switch (dtype) {
    case DType::float16:
    case DType::bfloat16:
      return 2;
    case DType::float32:
    case DType::int32:
      return 4;
    case DType::float64:
    case DType::int64:
      return 8;
  }
  throw std::invalid_argument("no kernel for this dtype code");
}

void add(DType dtype, void* dst, const void* src, std::size_t count) {
  switch (dtype) {
    case DType::float32:
      return add_f32(static_cast<float*>(dst), static_cast<const float*>(src), count);
    case DType::float64:
      return add_f64(static_cast<double*>(dst), static_cast<const double*>(src), count);
    case DType::int32:
      return add_u32(static_cast<std::uint32_t*>(dst), static_cast<const std::uint32_t*>(src),
                     count);
    case DType::int64:
      return add_u64(static_cast<std::uint64_t*>(dst), static_cast<const std::uint64_t*>(src),
                     count);
    case DType::float16:
    case DType::bfloat16:
      break;  // one rounding per addition is what sum_rounded exists to avoid
  }
  throw std::invalid_argument("add: no kernel for this dtype code");
}

void divide(DType dtype, void* data, std::size_t count, std::size_t divisor) {
  switch (dtype) {
    case DType::float32:
      return divide_by(static_cast<float*>(data), count, divisor);
    case DType::float64:
      return divide_by(static_cast<double*>(data), count, divisor);
    case DType::int32:
      return divide_by(static_cast<std::int32_t*>(data), count, divisor);
    case DType::int64:
      return divide_by(static_cast<std::int64_t*>(data), count, divisor);
    case DType::float16:
    case DType::bfloat16:
      break;
  }
  throw std::invalid_argument("divide: no kernel for this dtype code");
}

void sum_rounded(DType dtype, void* out, const void* const* sources, std::size_t n_sources,
                 std::size_t count, std::size_t divisor) {
  if (dtype != DType::float16 && dtype != DType::bfloat16)
    throw std::invalid_argument("sum_rounded: float16 and bfloat16 only");
  if (n_sources == 0) throw std::invalid_argument("sum_rounded: no source");
  const bool is_bf16 = dtype == DType::bfloat16;
  const auto widen_first = is_bf16 ? widen_first_bf16 : widen_first_f16;
  const auto widen_add = is_bf16 ? widen_add_bf16 : widen_add_f16;
  const auto narrow = is_bf16 ? narrow_bf16 : narrow_f16;
  float acc[kBlock];
  for (std::size_t start = 0; start < count; start += kBlock) {
    const std::size_t n = std::min(kBlock, count - start);
    for (std::size_t k = 0; k < n_sources; ++k)
      (k == 0 ? widen_first : widen_add)(
          acc, static_cast<const std::uint16_t*>(sources[k]) + start, n);
    if (divisor != 1) divide_by(acc, n, divisor);
    narrow(static_cast<std::uint16_t*>(out) + start, acc, n);
  }
}

}  // namespace ringcomm
