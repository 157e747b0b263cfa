// float16 and bfloat16 as bit patterns: exact widening, and narrowing that rounds
// to nearest, ties to even (IEEE 754-2019, 4.3.1). Branch-free, so that the loops
// around them vectorise without any instruction-set switch.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ringcomm {
namespace {

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

inline float widen_float16(std::uint32_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16;
  const std::uint32_t magnitude = half & 0x7fffu;
  // Normal numbers, inf and NaN: shift, then move the exponent's bias from 15 to 127.
  const std::uint32_t special = magnitude >= 0x7c00u ? 0x38000000u : 0u;
  const std::uint32_t normal = (magnitude << 13) + 0x38000000u + special;
  // Subnormals: magnitude * 2^-24, exact in float32.
  const float value = static_cast<float>(static_cast<std::int32_t>(magnitude));
  const std::uint32_t subnormal = bits_of_float(value * 0x1p-24f);
  return float_of_bits(sign | (magnitude < 0x0400u ? subnormal : normal));
}

inline std::uint32_t narrow_float16(float value) {
  const std::uint32_t bits = bits_of_float(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t odd = (magnitude >> 13) & 1u;
  const std::uint32_t normal = (magnitude - 0x38000000u + 0x0fffu + odd) >> 13;
  // Below 2^-14: adding 0.5 aligns the value with the subnormal grid, and the FPU rounds it.
  const std::uint32_t subnormal =
      bits_of_float(float_of_bits(magnitude) + 0.5f) - bits_of_float(0.5f);
  std::uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // 65520 and above round to inf
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  return sign | half;
}

// The upper 16 bits are the bfloat16. A NaN stays one: its payload comes from a bfloat16, so that
// its lower 16 bits are 0 and nothing is carried.
inline std::uint32_t round_bfloat16(float value) {
  const std::uint32_t bits = bits_of_float(value);
  return bits + 0x7fffu + ((bits >> 16) & 1u);
}

// Two elements in a word of memory, without unpacking: "low" and "high" are halves of the word, and
// which element is which does not matter. (bfloat16 on AVX2: twice as fast as loops over elements.)
struct Pair {
  using Word = std::uint32_t;
  using Part = float;
#ifdef __clang__  // each compiler vectorises loops with its own form alone: the other's take 9 times as long
  using Noted = std::uint32_t;
  static Noted note_nan(Noted noted, Part a, Part b) {
    return noted | static_cast<std::uint32_t>(__builtin_isunordered(a, b));
  }
#else
  using Noted = float;
  static Noted note_nan(Noted noted, Part a, Part b) {
    return __builtin_isunordered(a, b) ? 1.0f : noted;
  }
#endif
  static bool is_any(Noted noted) { return noted != 0; }
  // Words may lie at any address: an element's alignment is less than theirs.
  static Word load(const void* base, std::size_t i) {
    Word word;
    std::memcpy(&word, static_cast<const char*>(base) + i * sizeof word, sizeof word);
    return word;
  }
  static void store(void* base, std::size_t i, Word word) {
    std::memcpy(static_cast<char*>(base) + i * sizeof word, &word, sizeof word);
  }
  static Part load_part(const float* parts, std::size_t i) { return parts[i]; }
  static void store_part(float* parts, std::size_t i, Part part) { parts[i] = part; }
};

struct BFloat16Pair : Pair {
  static constexpr std::uint16_t kInf = 0x7f80, kNaN = 0x7fc0;
  static Part low(Word word) { return float_of_bits(word << 16); }
  static Part high(Word word) { return float_of_bits(word & 0xffff0000u); }
  static Word join(Part low, Part high) {
    return (round_bfloat16(low) >> 16) | (round_bfloat16(high) & 0xffff0000u);
  }
};

struct Float16Pair : Pair {
  static constexpr std::uint16_t kInf = 0x7c00, kNaN = 0x7e00;
  static Part low(Word word) { return widen_float16(word & 0xffffu); }
  static Part high(Word word) { return widen_float16(word >> 16); }
  static Word join(Part low, Part high) { return narrow_float16(low) | narrow_float16(high) << 16; }
};

}  // namespace
}  // namespace ringcomm
