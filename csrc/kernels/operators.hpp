// What the operators mean for two elements.
#pragma once
#include <cstdint>
#include <limits>
#include <type_traits>

namespace ringcomm {
namespace {

template <class T>
struct Complex {
  T re, im;
};

template <class T>
Complex<T> operator+(Complex<T> a, Complex<T> b) {
  return {a.re + b.re, a.im + b.im};
}

// numpy's formula; C's own product has other rules for infinities (C11 annex G) and is slow.
template <class T>
Complex<T> operator*(Complex<T> a, Complex<T> b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}

// Signed overflow is undefined in C++ (also of the int that small types become) and wraps in numpy:
// signed integers are summed and multiplied as unsigned ones of at least 32 bits.
struct Sum {
  template <class T>
  static T of(T a, T b) {
    static_assert(!std::is_integral_v<T> || std::is_unsigned_v<T>);
    return static_cast<T>(a + b);
  }
};

struct Product {
  template <class T>
  static T of(T a, T b) {
    static_assert(!std::is_integral_v<T> || std::is_unsigned_v<T>);
    if constexpr (std::is_integral_v<T>) return static_cast<T>(1u * a * b);
    if constexpr (!std::is_integral_v<T>) return a * b;
  }
};

// NaN, which is unequal to itself, wins. T may be a vector: no short circuit.
struct Min {
  template <class T>
  static T of(T a, T b) {
    return ((a < b) | (a != a)) ? a : b;
  }
};

struct Max {
  template <class T>
  static T of(T a, T b) {
    return ((a > b) | (a != a)) ? a : b;
  }
};

struct BitAnd {
  static std::uint8_t of(std::uint8_t a, std::uint8_t b) { return a & b; }
};
struct BitOr {
  static std::uint8_t of(std::uint8_t a, std::uint8_t b) { return a | b; }
};
struct BitXor {
  static std::uint8_t of(std::uint8_t a, std::uint8_t b) { return a ^ b; }
};

// bool: any byte but 0 is true, and 1 is what comes out.
struct Both {
  static std::uint8_t of(std::uint8_t a, std::uint8_t b) { return (a != 0) & (b != 0); }
};
struct Either {
  static std::uint8_t of(std::uint8_t a, std::uint8_t b) { return (a != 0) | (b != 0); }
};
struct One {
  static std::uint8_t of(std::uint8_t a, std::uint8_t b) { return (a != 0) ^ (b != 0); }
};

// Of two NaN the sum keeps either, as the compiler happened to order the operands: every NaN that
// was computed becomes this one, so that the bits are the same in all loops.
template <class T>
T canonical(T x) {
  return x != x ? std::numeric_limits<T>::quiet_NaN() : x;
}
template <class T>
Complex<T> canonical(Complex<T> x) {
  return {canonical(x.re), canonical(x.im)};
}

}  // namespace
}  // namespace ringcomm
