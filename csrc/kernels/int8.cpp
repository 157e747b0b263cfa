#include "int8.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "target_clones.hpp"
#include "convert.hpp"
#include "fp_environment.hpp"
#include "threefry.hpp"

namespace ringcomm {
namespace {

constexpr std::size_t kPiece = kRandomRun;

// The bits of a magnitude are ordered as magnitudes are, with inf and then NaN on top.
template <class Bits>
Bits largest_magnitude(const void* x, std::size_t count) {
  constexpr Bits kMagnitude = std::numeric_limits<Bits>::max() / 2;
  Bits largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, static_cast<const char*>(x) + i * sizeof bits, sizeof bits);
    largest = std::max(largest, static_cast<Bits>(bits & kMagnitude));
  }
  return largest;
}

// 24 bits behind the point and 7 before it: adding 24 random bits and cutting them off rounds up as
// often as the fraction says. 127 plus the largest fraction is INT32_MAX. The conversion cuts off
// what is less than 2^-24 of the scale.
template <class T>
void quantise(std::int8_t* codes, const T* x, const std::uint32_t* random, T scale,
              std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const T parts = std::min(std::max(x[i] / scale, T{-127}), T{127});  // 127 may have been rounded
    const auto fixed = static_cast<std::int32_t>(parts * T{1 << 24});
    codes[i] = static_cast<std::int8_t>((fixed + static_cast<std::int32_t>(random[i] >> 8)) >> 24);
  }
}

template <class T>
void dequantise(T* x, const std::int8_t* codes, T scale, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) x[i] = static_cast<T>(codes[i]) * scale;
}

// How a dtype is read and written: as the Number in which it is computed.
struct Float16 {
  using Number = float;
  using Bits = std::uint16_t;
  static const float* read(const void* x, float* piece, std::size_t count) {
    float16_to_float32(piece, x, count);
    return piece;
  }
  static void write(void* x, const std::int8_t* codes, float scale, std::size_t count) {
    float piece[kPiece];
    dequantise(piece, codes, scale, count);
    float32_to_float16(x, piece, count);
  }
};

template <class T, class B>
struct Wide {
  using Number = T;
  using Bits = B;
  static const T* read(const void* x, T*, std::size_t) { return static_cast<const T*>(x); }
  static void write(void* x, const std::int8_t* codes, T scale, std::size_t count) {
    dequantise(static_cast<T*>(x), codes, scale, count);
  }
};

using Float32 = Wide<float, std::uint32_t>;
using Float64 = Wide<double, std::uint64_t>;

template <class T>
T magnitude_of(std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t> bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class F>
typename F::Number scale_of(const void* x, std::size_t count) {
  using Number = typename F::Number;
  using Limits = std::numeric_limits<Number>;
  const auto bits = largest_magnitude<typename F::Bits>(x, count);
  Number largest;
  if constexpr (sizeof bits == sizeof largest) largest = magnitude_of<Number>(bits);
  else float16_to_float32(&largest, &bits, 1);
  if (!(largest <= Limits::max())) return Limits::quiet_NaN();
  // Not below the normal numbers: scales of few bits would be too small for what they are to hold.
  const Number scale = std::max(largest / 127, Limits::min());
  return scale * 127 <= Limits::max() ? scale : std::nextafter(scale, Number{0});
}

// The pieces of a block between multiples of kPiece, the length of a run of random numbers.
template <class Body>
void for_pieces(std::size_t start, std::size_t stop, Body body) {
  for (std::size_t n; start < stop; start += n) {
    n = std::min(stop, (start / kPiece + 1) * kPiece) - start;
    body(start, n);
  }
}

template <class F>
void encode_blocks(char* scales, std::int8_t* codes, const char* x, std::size_t count,
                   std::size_t block, Stream stream) {
  using Number = typename F::Number;
  std::uint32_t random[kPiece];
  Number piece[kPiece];
  for (std::size_t start = 0, n; start < count; start += n, scales += sizeof(Number)) {
    n = std::min(block, count - start);
    const Number scale = scale_of<F>(x + start * sizeof(typename F::Bits), n);
    std::memcpy(scales, &scale, sizeof scale);
    for_pieces(start, start + n, [&](std::size_t at, std::size_t length) {
      const std::size_t within = at % kPiece;
      if (within == 0) random_run(random, stream, at / kPiece);
      const auto* numbers = F::read(x + at * sizeof(typename F::Bits), piece, length);
      if (scale == scale) quantise(codes + at, numbers, random + within, scale, length);
      else std::memset(codes + at, 0, length);
    });
  }
}

template <class F>
void decode_blocks(char* x, const char* scales, const std::int8_t* codes, std::size_t count,
                   std::size_t block) {
  typename F::Number scale;
  for (std::size_t start = 0, n; start < count; start += n, scales += sizeof scale) {
    n = std::min(block, count - start);
    std::memcpy(&scale, scales, sizeof scale);
    for_pieces(start, start + n, [&](std::size_t at, std::size_t length) {
      F::write(x + at * sizeof(typename F::Bits), codes + at, scale, length);
    });
  }
}

using Encode = void (*)(char* scales, std::int8_t* codes, const char* x, std::size_t count,
                        std::size_t block, Stream stream);
using Decode = void (*)(char* x, const char* scales, const std::int8_t* codes, std::size_t count,
                        std::size_t block);

#define RINGCOMM_INT8(F)                                                                        \
  RINGCOMM_CLONES void encode_##F(char* scales, std::int8_t* codes, const char* x,              \
                                  std::size_t count, std::size_t block, Stream stream) {        \
    encode_blocks<F>(scales, codes, x, count, block, stream);                                   \
  }                                                                                             \
  RINGCOMM_CLONES void decode_##F(char* x, const char* scales, const std::int8_t* codes,        \
                                  std::size_t count, std::size_t block) {                       \
    decode_blocks<F>(x, scales, codes, count, block);                                           \
  }
RINGCOMM_INT8(Float16)
RINGCOMM_INT8(Float32)
RINGCOMM_INT8(Float64)

struct Kernels {
  Encode encode;
  Decode decode;
  std::size_t scale_nbytes;
};

Kernels kernels_of(DType dtype) {
  if (dtype == DType::float16) return {encode_Float16, decode_Float16, sizeof(float)};
  if (dtype == DType::float32) return {encode_Float32, decode_Float32, sizeof(float)};
  if (dtype == DType::float64) return {encode_Float64, decode_Float64, sizeof(double)};
  throw std::invalid_argument("int8: float16, float32 and float64 only");
}

}  // namespace

std::size_t scale_nbytes(DType dtype) { return kernels_of(dtype).scale_nbytes; }

void encode_int8(void* scales, std::int8_t* codes, const void* x, DType dtype, std::size_t count,
                 std::size_t block, std::uint64_t seed, std::uint64_t draw) {
  const DefaultFpEnvironment here;
  kernels_of(dtype).encode(static_cast<char*>(scales), codes, static_cast<const char*>(x), count,
                           block, {seed, draw});
}

void decode_int8(void* x, DType dtype, const void* scales, const std::int8_t* codes,
                 std::size_t count, std::size_t block) {
  const DefaultFpEnvironment here;
  kernels_of(dtype).decode(static_cast<char*>(x), static_cast<const char*>(scales), codes, count,
                           block);
}

}  // namespace ringcomm
