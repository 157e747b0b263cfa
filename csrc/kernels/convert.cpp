#include "convert.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "target_clones.hpp"
#include "reduce_f16c.hpp"
#include "half.hpp"
#include "fp_environment.hpp"

namespace ringcomm {
namespace {

constexpr std::size_t kPiece = 512;  // floats between two conversions: 2 KiB, in the L1 cache

template <class T>
T load(const void* base, std::size_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(base) + i * sizeof value, sizeof value);
  return value;
}

template <class T>
void store(void* base, std::size_t i, T value) {
  std::memcpy(static_cast<char*>(base) + i * sizeof value, &value, sizeof value);
}

std::uint32_t narrow_bfloat16(float value) {
  const std::uint32_t bits = round_bfloat16(value) >> 16;
  return value != value ? BFloat16Pair::kNaN : bits;
}

// Rounded so that to round it again, to fewer bits, gives what rounding once would have: toward
// zero, with the last bit set if anything was lost (Boldo and Melquiond 2008,
// doi:10.1109/TC.2007.70819).
float round_to_odd(double value) {
  const auto nearest = static_cast<float>(value);
  const double back = nearest;
  std::uint32_t bits = bits_of_float(nearest);
  bits -= std::fabs(back) > std::fabs(value) ? 1u : 0u;
  bits |= back != value ? 1u : 0u;
  return value != value ? nearest : float_of_bits(bits);
}

RINGCOMM_CLONES void widen_f16(float* dst, const void* src, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) dst[i] = widen_float16(load<std::uint16_t>(src, i));
}

RINGCOMM_CLONES void narrow_f16(void* dst, const float* src, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t half = src[i] != src[i] ? Float16Pair::kNaN : narrow_float16(src[i]);
    store(dst, i, static_cast<std::uint16_t>(half));
  }
}

RINGCOMM_CLONES void widen_bf16(float* dst, const void* src, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i)
    dst[i] = float_of_bits(static_cast<std::uint32_t>(load<std::uint16_t>(src, i)) << 16);
}

RINGCOMM_CLONES void narrow_bf16(void* dst, const float* src, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i)
    store(dst, i, static_cast<std::uint16_t>(narrow_bfloat16(src[i])));
}

RINGCOMM_CLONES void to_float64(double* dst, const float* src, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) dst[i] = src[i];
}

RINGCOMM_CLONES void to_float32(float* dst, const double* src, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) dst[i] = round_to_odd(src[i]);
}

void widen(float* dst, const void* src, std::size_t count, DType from) {
  from == DType::float16 ? float16_to_float32(dst, src, count) : widen_bf16(dst, src, count);
}

void narrow(void* dst, const float* src, std::size_t count, DType to) {
  to == DType::float16 ? float32_to_float16(dst, src, count) : narrow_bf16(dst, src, count);
}

void widen_to_float64(double* dst, const void* src, std::size_t count, DType from) {
  float piece[kPiece];
  for (std::size_t start = 0, n; start < count; start += n) {
    n = std::min(kPiece, count - start);
    widen(piece, static_cast<const char*>(src) + 2 * start, n, from);
    to_float64(dst + start, piece, n);
  }
}

void narrow_float64(void* dst, const double* src, std::size_t count, DType to) {
  float piece[kPiece];
  for (std::size_t start = 0, n; start < count; start += n) {
    n = std::min(kPiece, count - start);
    to_float32(piece, src + start, n);
    narrow(static_cast<char*>(dst) + 2 * start, piece, n, to);
  }
}

bool is_half(DType dtype) { return dtype == DType::float16 || dtype == DType::bfloat16; }

}  // namespace

void float16_to_float32(float* dst, const void* src, std::size_t count) {
  static const auto best = has_f16c() ? widen_f16c : widen_f16;
  best(dst, src, count);
}

void float32_to_float16(void* dst, const float* src, std::size_t count) {
  static const auto best = has_f16c() ? narrow_f16c : narrow_f16;
  best(dst, src, count);
}

void convert(void* dst, DType to, const void* src, DType from, std::size_t count) {
  const DefaultFpEnvironment here;
  if (to == DType::float32 && is_half(from))
    return widen(static_cast<float*>(dst), src, count, from);
  if (to == DType::float64 && is_half(from))
    return widen_to_float64(static_cast<double*>(dst), src, count, from);
  if (from == DType::float32 && is_half(to))
    return narrow(dst, static_cast<const float*>(src), count, to);
  if (from == DType::float64 && is_half(to))
    return narrow_float64(dst, static_cast<const double*>(src), count, to);
  throw std::invalid_argument("convert: from float32 or float64 to 16 bits, or back");
}

}  // namespace ringcomm
