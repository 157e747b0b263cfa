// float16 with the conversions of x86's F16C, sixteen elements in a word. A file of its own because
// it is compiled for that instruction set (GCC 12 does not vectorise loops over _Float16, and its
// integer form takes five times as long on AVX2). The bits are those of half.hpp.
#include "reduce_f16c.hpp"

#ifdef __F16C__

#include <immintrin.h>

#include <limits>

#include "reduce_half_loops.hpp"

namespace ringcomm {
namespace {

// The same values as of any T. (Clang 22 makes code of that which takes twice as long.)
template <>
__m256 Min::of(__m256 a, __m256 b) {
  return _mm256_blendv_ps(_mm256_min_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
template <>
__m256 Max::of(__m256 a, __m256 b) {
  return _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}

struct Float16x16 {
  struct Word {  // loaded apart: taking a 256-bit register to pieces takes twice as long
    __m128i low, high;
  };
  using Part = __m256;
  using Noted = __m256;
  static constexpr std::uint16_t kInf = 0x7c00, kNaN = 0x7e00;

  static Part low(Word word) { return _mm256_cvtph_ps(word.low); }
  static Part high(Word word) { return _mm256_cvtph_ps(word.high); }
  static Word join(Part low, Part high) {
    return {_mm256_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT),
            _mm256_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT)};
  }
  static Noted note_nan(Noted noted, Part a, Part b) {
    return _mm256_or_ps(noted, _mm256_cmp_ps(a, b, _CMP_UNORD_Q));
  }
  static bool is_any(Noted noted) { return _mm256_movemask_ps(noted) != 0; }

  static Word load(const void* base, std::size_t i) {
    const auto* words = static_cast<const __m128i*>(base) + 2 * i;
    return {_mm_loadu_si128(words), _mm_loadu_si128(words + 1)};
  }
  static void store(void* base, std::size_t i, Word word) {
    auto* words = static_cast<__m128i*>(base) + 2 * i;
    _mm_storeu_si128(words, word.low);
    _mm_storeu_si128(words + 1, word.high);
  }
  static Part load_part(const float* parts, std::size_t i) {
    return _mm256_loadu_ps(parts + 8 * i);
  }
  static void store_part(float* parts, std::size_t i, Part part) {
    _mm256_storeu_ps(parts + 8 * i, part);
  }
};

constexpr std::size_t kLanes = 8;

__m128i narrow_lanes(const float* src) {
  const __m256 value = _mm256_loadu_ps(src);
  const __m256 quiet = _mm256_set1_ps(std::numeric_limits<float>::quiet_NaN());
  const __m256 is_nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
  return _mm256_cvtps_ph(_mm256_blendv_ps(value, quiet, is_nan), _MM_FROUND_TO_NEAREST_INT);
}

}  // namespace

bool has_f16c() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }

void sum_f16c(const Job& job) { reduce_halves<Float16x16, Sum>(job); }
void product_f16c(const Job& job) { reduce_halves<Float16x16, Product>(job); }
void min_f16c(const Job& job) { reduce_halves<Float16x16, Min>(job); }
void max_f16c(const Job& job) { reduce_halves<Float16x16, Max>(job); }

void widen_f16c(float* dst, const void* src, std::size_t count) {
  const auto* from = static_cast<const char*>(src);
  const std::size_t whole = count / kLanes * kLanes;
  for (std::size_t i = 0; i < whole; i += kLanes) {
    const auto* halves = reinterpret_cast<const __m128i*>(from + 2 * i);
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128(halves)));
  }
  std::uint16_t rest[kLanes] = {};
  float wide[kLanes];
  std::memcpy(rest, from + 2 * whole, 2 * (count - whole));
  _mm256_storeu_ps(wide, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<__m128i*>(rest))));
  std::copy_n(wide, count - whole, dst + whole);
}

void narrow_f16c(void* dst, const float* src, std::size_t count) {
  auto* to = static_cast<char*>(dst);
  const std::size_t whole = count / kLanes * kLanes;
  for (std::size_t i = 0; i < whole; i += kLanes)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * i), narrow_lanes(src + i));
  float rest[kLanes] = {};
  std::copy_n(src + whole, count - whole, rest);
  const __m128i halves = narrow_lanes(rest);
  std::memcpy(to + 2 * whole, &halves, 2 * (count - whole));
}

}  // namespace ringcomm

#else

namespace ringcomm {

bool has_f16c() { return false; }
void sum_f16c(const Job&) {}
void product_f16c(const Job&) {}
void min_f16c(const Job&) {}
void max_f16c(const Job&) {}
void widen_f16c(float*, const void*, std::size_t) {}
void narrow_f16c(void*, const float*, std::size_t) {}

}  // namespace ringcomm

#endif
