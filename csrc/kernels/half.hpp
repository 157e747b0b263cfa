// float16 and bfloat16 as bit patterns: exact widening, and narrowing that rounds
// to nearest, ties to even (IEEE 754-2019, 4.3.1). Branch-free, so that the loops
// around them vectorise without any instruction-set switch.
#pragma once
#include <cstdint>
#include <cstring>

namespace ringcomm {

inline float float_of_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline std::uint32_t bits_of_float(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

struct Float16 {
  static float widen(std::uint16_t half) {
    const std::uint32_t sign = (half & 0x8000u) << 16;
    const std::uint32_t magnitude = half & 0x7fffu;
    // Normal numbers, inf and NaN: shift, then move the exponent's bias from 15 to 127.
    const std::uint32_t special = magnitude >= 0x7c00u ? 0x38000000u : 0u;
    const std::uint32_t normal = (magnitude << 13) + 0x38000000u + special;
    // Subnormals: magnitude * 2^-24, exact in float32.
    const std::uint32_t subnormal = bits_of_float(static_cast<float>(magnitude) * 0x1p-24f);
    return float_of_bits(sign | (magnitude < 0x0400u ? subnormal : normal));
  }

  static std::uint16_t narrow(float value) {
    const std::uint32_t bits = bits_of_float(value);
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    const std::uint32_t odd = (magnitude >> 13) & 1u;
    const std::uint32_t normal = (magnitude - 0x38000000u + 0x0fffu + odd) >> 13;
    // Below 2^-14: adding 0.5 aligns the value with the subnormal grid, and the FPU rounds it.
    const std::uint32_t subnormal =
        bits_of_float(float_of_bits(magnitude) + 0.5f) - bits_of_float(0.5f);
    const std::uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x03ffu);
    std::uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
    half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // 65520 and above round to inf
    half = magnitude > 0x7f800000u ? nan : half;
    return static_cast<std::uint16_t>(sign | half);
  }
};

struct BFloat16 {
  static float widen(std::uint16_t half) {
    return float_of_bits(static_cast<std::uint32_t>(half) << 16);
  }

  static std::uint16_t narrow(float value) {
    const std::uint32_t bits = bits_of_float(value);
    const std::uint32_t odd = (bits >> 16) & 1u;
    const std::uint32_t rounded = (bits + 0x7fffu + odd) >> 16;
    const std::uint32_t nan = (bits >> 16) | 0x0040u;
    return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
  }
};

}  // namespace ringcomm
