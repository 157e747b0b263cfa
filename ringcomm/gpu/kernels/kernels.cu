// All CUDA kernels, in one file without any #include. NVRTC, which compiles it at run time, has no
// standard headers, and CuPy's wheels lack CUDA's headers for 16-bit floats. g++ also compiles the
// file, after tests/gpu_emulation.hpp: the tests run this source on the CPU.
//
// Macros select one kernel, which is always named rc_entry. The Python modules beside this file
// list the kernels and their arguments. The compiler options in base.py keep the bits: no product is
// fused with a sum.
#define REDUCE 1  // RC_TYPE, RC_RESULT, RC_OP, RC_SOURCES, RC_TARGETS
#define PACK 2    // RC_TYPE, RC_TENSORS
#define UNPACK 3  // as PACK
#define WRITE 4   // no others
#define SCALE 5   // RC_TYPE, a real float

#define RC_INLINE __device__ __forceinline__
// 2 blocks per processor leave a thread up to 128 registers. Without this bound, ptxas of CUDA 13
// spills a few registers to run more blocks, and waits for some loads before it issues the others.
#define RC_GLOBAL extern "C" __global__ void __launch_bounds__(256, 2)

namespace ringcomm {

template <class T>
struct Complex {
  T re, im;
};
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// The values of RC_TYPE and RC_RESULT: a dtype's name and _t, or Averaged<> of an integer's.
struct float16_t {
  u16 bits;
};
struct bfloat16_t {
  u16 bits;
};
using float32_t = float;
using float64_t = double;
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = i64;
using uint8_t = u8;
using uint16_t = u16;
using uint32_t = u32;
using uint64_t = u64;
using bool_t = u8;
using complex64_t = Complex<float>;
using complex128_t = Complex<double>;

// An integer of which the average is computed: the sum has more bits, and does not wrap.
template <class T>
struct Averaged {
  T value;
};
// A sum of integers of 64 bits, in two's complement.
struct Sum128 {
  u64 low;
  i64 high;
};

template <class T>
constexpr bool kIsFloat = false;
template <>
constexpr bool kIsFloat<float> = true;
template <>
constexpr bool kIsFloat<double> = true;

template <class A, class B>
constexpr bool kIsSame = false;
template <class A>
constexpr bool kIsSame<A, A> = true;

// --- conversions ---------------------------------------------------------------------------------

#ifndef RC_EMULATED
// Of a NaN, both instructions lose sign and payload: they return 0x7fffffff and 0x7fff.
RC_INLINE float widen_float16(u16 half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}
RC_INLINE u16 narrow_float16(float value) {
  u16 half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}
#endif

// To nearest, ties to even (IEEE 754-2019, 4.3.1).
RC_INLINE u16 narrow_bfloat16(float value) {
  const u32 bits = __float_as_uint(value);
  return static_cast<u16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Which NaN an operation returns depends on the hardware. So every computed NaN becomes this one,
// as on the CPU.
RC_INLINE float canonical(float x) { return x != x ? __uint_as_float(0x7fc00000u) : x; }
RC_INLINE double canonical(double x) {
  return x != x ? __longlong_as_double(0x7ff8000000000000ll) : x;
}
template <class T>
RC_INLINE Complex<T> canonical(Complex<T> x) {
  return {canonical(x.re), canonical(x.im)};
}
template <class T>
RC_INLINE T canonical(T x) {
  return x;
}

// Converts an element to the type in which it is computed.
template <class T>
RC_INLINE T widen(T x) {
  return x;
}
RC_INLINE float widen(float16_t x) { return widen_float16(x.bits); }
RC_INLINE float widen(bfloat16_t x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }

template <class T>
RC_INLINE i64 widen(Averaged<T> x) {
  return x.value;
}
RC_INLINE Sum128 widen(Averaged<i64> x) { return {static_cast<u64>(x.value), x.value < 0 ? -1 : 0}; }
RC_INLINE Sum128 widen(Averaged<u64> x) { return {x.value, 0}; }

template <class T>
using Wide = decltype(widen(T()));

// Converts a computed number to an element: rounds once, and makes a NaN canonical.
template <class T>
struct To {
  static RC_INLINE T from(T x) { return canonical(x); }
};
template <>
struct To<float16_t> {
  static RC_INLINE float16_t from(float x) {
    return {static_cast<u16>(x != x ? 0x7e00u : narrow_float16(x))};
  }
};
template <>
struct To<bfloat16_t> {
  static RC_INLINE bfloat16_t from(float x) {
    return {static_cast<u16>(x != x ? 0x7fc0u : narrow_bfloat16(x))};
  }
};

template <class T>
struct To<Averaged<T>> {
  static RC_INLINE Averaged<T> from(i64 x) { return {static_cast<T>(x)}; }
  static RC_INLINE Averaged<T> from(Sum128 x) { return {static_cast<T>(x.low)}; }
};

// --- memory --------------------------------------------------------------------------------------

// Addresses of N arrays. Two arrays may be the same memory: a thread loads an element from one, and
// later stores it in the other. So no load may go through the non-coherent cache.
template <int N>
struct Pointers {
  void* at[N];
};

// kWidth elements, which a thread loads or stores at once, in vectors of 16 bytes.
template <class T, int kWidth, bool kIsVector>
struct Piece {
  static constexpr int kPerVector = 16 / sizeof(T);
  static constexpr int kVectors = kWidth / kPerVector;
  union Vector {
    uint4 bytes;
    T element[kPerVector];
  };
  Vector vector[kVectors];

  RC_INLINE T& operator[](int i) { return vector[i / kPerVector].element[i % kPerVector]; }
  RC_INLINE void load(const void* base, u64 i) {
    const auto* from = reinterpret_cast<const uint4*>(static_cast<const T*>(base) + i);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) vector[v].bytes = __ldcs(from + v);
  }
  RC_INLINE void store(void* base, u64 i) const {
    auto* to = reinterpret_cast<uint4*>(static_cast<T*>(base) + i);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) __stcs(to + v, vector[v].bytes);
  }
};

// One element at any address.
template <class T>
struct Piece<T, 1, false> {
  T element;

  RC_INLINE T& operator[](int) { return element; }
  RC_INLINE void load(const void* base, u64 i) { element = static_cast<const T*>(base)[i]; }
  RC_INLINE void store(void* base, u64 i) const { static_cast<T*>(base)[i] = element; }
};

// The addresses of some arrays modulo 16.
struct Alignment {
  u32 any = 0, all = 15;

  RC_INLINE void add(const void* base) {
    const u32 phase = static_cast<u32>(reinterpret_cast<u64>(base)) & 15u;
    any |= phase;
    all &= phase;
  }
  template <int N>
  RC_INLINE void add(const Pointers<N>& arrays) {
#pragma unroll(N <= 16 ? N : 1)
    for (int k = 0; k < N; ++k) add(arrays.at[k]);
  }
  // Returns true if `nbytes` after the beginning of each array is a multiple of 16.
  RC_INLINE bool is_aligned(u64 nbytes) const {
    return any == all && ((any + static_cast<u32>(nbytes)) & 15u) == 0;
  }
};

// The elements [begin, end) of [0, count) that can be moved in vectors; none if vectors cannot be
// aligned.
struct Body {
  u64 begin, end;
};
template <int kWidth, class IsAligned>
RC_INLINE Body body_of(u64 count, IsAligned is_aligned) {
#pragma unroll 1
  for (u64 begin = 0; begin < kWidth && begin <= count; ++begin)
    if (is_aligned(begin)) return {begin, begin + (count - begin) / kWidth * kWidth};
  return {count, count};
}

// The blocks of threads that share a loop: their number, and the index of the calling block.
struct Blocks {
  u64 index, size;
};
RC_INLINE Blocks whole_grid() { return {blockIdx.x, gridDim.x}; }
RC_INLINE Blocks one_block() { return {0, 1}; }

// Calls visit(i, step) in every thread for pieces of kWidth elements. Together, the positions
// i + u * step with 0 <= u < kPositions are where the pieces of [begin, end) begin, each once.
// Positions from `end` on have no meaning.
template <int kWidth, int kPositions, class Visit>
RC_INLINE void sweep(Blocks blocks, u64 begin, u64 end, Visit visit) {
  const u64 step = static_cast<u64>(blockDim.x) * kWidth;
#pragma unroll 1
  for (u64 i = begin + blocks.index * step * kPositions + threadIdx.x * kWidth; i < end;
       i += blocks.size * step * kPositions)
    visit(i, step);
}

// Sweeps elements [0, count): the body in vectors, then the elements before and behind it one by
// one. Calls visit(i, step, end, is_vector), where `end` is the end of the part.
template <bool kIs>
struct IsVector {
  static constexpr bool value = kIs;
};
template <int kWidth, int kPositions, class Visit>
RC_INLINE void sweep_all(Blocks blocks, u64 count, Body body, Visit visit) {
  sweep<kWidth, kPositions>(blocks, body.begin, body.end,
                            [&](u64 i, u64 step) { visit(i, step, body.end, IsVector<true>()); });
#pragma unroll 1
  for (int side = 0; side < 2; ++side) {
    const u64 end = side == 0 ? body.begin : count;
    sweep<1, kPositions>(blocks, side == 0 ? 0 : body.end, end,
                         [&](u64 i, u64 step) { visit(i, step, end, IsVector<false>()); });
  }
}

// --- operators -----------------------------------------------------------------------------------

// The operators of csrc/kernels/operators.hpp. Integers are combined as unsigned ones, which wrap.
struct Sum {
  static constexpr bool kIsNumber = true;
  template <class T>
  static RC_INLINE T of(T a, T b) {
    if constexpr (kIsFloat<T>) return a + b;
    else return static_cast<T>(static_cast<u64>(a) + static_cast<u64>(b));
  }
  template <class T>
  static RC_INLINE Complex<T> of(Complex<T> a, Complex<T> b) {
    return {a.re + b.re, a.im + b.im};
  }
  static RC_INLINE Sum128 of(Sum128 a, Sum128 b) {
    const u64 low = a.low + b.low;
    return {low, a.high + b.high + (low < a.low)};
  }
};

struct Product {
  static constexpr bool kIsNumber = true;
  template <class T>
  static RC_INLINE T of(T a, T b) {
    if constexpr (kIsFloat<T>) return a * b;
    else return static_cast<T>(static_cast<u64>(a) * static_cast<u64>(b));
  }
  template <class T>
  static RC_INLINE Complex<T> of(Complex<T> a, Complex<T> b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  }
};

// If a or b is a NaN, which is unequal to itself, the result is a NaN.
struct Min {
  static constexpr bool kIsNumber = true;
  template <class T>
  static RC_INLINE T of(T a, T b) {
    return a < b || a != a ? a : b;
  }
};
struct Max {
  static constexpr bool kIsNumber = true;
  template <class T>
  static RC_INLINE T of(T a, T b) {
    return a > b || a != a ? a : b;
  }
};

struct BitAnd {
  static constexpr bool kIsNumber = false;
  template <class T>
  static RC_INLINE T of(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct BitOr {
  static constexpr bool kIsNumber = false;
  template <class T>
  static RC_INLINE T of(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct BitXor {
  static constexpr bool kIsNumber = false;
  template <class T>
  static RC_INLINE T of(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

// bool: any byte but 0 is true, and the result is 0 or 1.
struct Both {
  static constexpr bool kIsNumber = false;
  static RC_INLINE bool_t of(bool_t a, bool_t b) { return a != 0 && b != 0; }
};
struct Either {
  static constexpr bool kIsNumber = false;
  static RC_INLINE bool_t of(bool_t a, bool_t b) { return a != 0 || b != 0; }
};
struct One {
  static constexpr bool kIsNumber = false;
  static RC_INLINE bool_t of(bool_t a, bool_t b) { return (a != 0) != (b != 0); }
};

// Divides a combination of elements. Quotients of integers are truncated toward zero.
template <class T>
struct Division {
  i64 divisor;

  explicit RC_INLINE Division(i64 by) : divisor(by) {}
  RC_INLINE T of(T x) const {
    if (divisor == 1) return x;
    if constexpr (sizeof(T) == 8) return x / static_cast<T>(divisor);
    else return static_cast<T>(static_cast<i64>(x) / divisor);
  }
};

template <>
struct Division<Sum128> {
  u64 divisor;  // less than 2^32; the quotient has 64 bits

  explicit RC_INLINE Division(i64 by) : divisor(static_cast<u64>(by)) {}
  RC_INLINE Sum128 of(Sum128 x) const {
    if (divisor == 1) return x;
    const bool is_negative = x.high < 0;
    const u64 low = is_negative ? u64{0} - x.low : x.low;
    const u64 high = is_negative ? ~static_cast<u64>(x.high) + (x.low == 0) : u64(x.high);
    const u64 upper = high % divisor << 32 | low >> 32;
    const u64 lower = upper % divisor << 32 | (low & 0xffffffffu);
    const u64 quotient = upper / divisor << 32 | lower / divisor;
    return {is_negative ? u64{0} - quotient : quotient, 0};
  }
};

// Keeps the payload of a NaN, as x86 does: a GPU would not.
RC_INLINE float quiet(float nan) { return __uint_as_float(__float_as_uint(nan) | 0x00400000u); }
RC_INLINE double quiet(double nan) {
  return __longlong_as_double(__double_as_longlong(nan) | 0x0008000000000000ll);
}

// Multiplying by 1 / 2^n gives the bits of dividing by 2^n, with a tenth of the instructions.
template <class T>
struct RealDivision {
  T by, factor;
  bool is_none, is_product;

  explicit RC_INLINE RealDivision(i64 divisor)
      : by(static_cast<T>(divisor)),
        factor(T{1} / by),
        is_none(divisor == 1),
        is_product((divisor & (divisor - 1)) == 0) {}
  RC_INLINE T of(T x) const {
    if (is_none) return x;
    if (x != x) return quiet(x);
    return is_product ? x * factor : x / by;
  }
};
template <>
struct Division<float> : RealDivision<float> {
  using RealDivision<float>::RealDivision;
};
template <>
struct Division<double> : RealDivision<double> {
  using RealDivision<double>::RealDivision;
};
template <class T>
struct Division<Complex<T>> {
  Division<T> parts;

  explicit RC_INLINE Division(i64 divisor) : parts(divisor) {}
  RC_INLINE Complex<T> of(Complex<T> x) const { return {parts.of(x.re), parts.of(x.im)}; }
};

// --- REDUCE: k sources -> m targets --------------------------------------------------------------

constexpr int kInFlight = 8;  // vectors that a thread loads before it computes

RC_INLINE constexpr int at_most(int most, int n) { return n < most ? n : most; }

// The number of pieces that a thread combines at once.
template <int kSources>
constexpr int kPositionsOf = at_most(4, kInFlight / at_most(kInFlight, kSources));

// total[u] = the elements at i + u * step of all sources, combined in the order of the sources.
// From `end` on, total[u] has no meaning.
template <class T, class O, bool kIsVector, int kWidth, int kPositions, int kSources>
RC_INLINE void combine(Wide<T> (&total)[kPositions][kWidth], const Pointers<kSources>& sources,
                       u64 i, u64 step, u64 end) {
  // More than kInFlight sources are loaded in groups of kInFlight / 2, by a loop that is not
  // unrolled: else registers would spill.
  constexpr int kGroup = kSources <= kInFlight ? kSources : kInFlight / 2;
#pragma unroll 1
  for (int first = 0; first < kSources; first += kGroup) {
    Piece<T, kWidth, kIsVector> pieces[kPositions][kGroup];
#pragma unroll
    for (int u = 0; u < kPositions; ++u)
#pragma unroll
      for (int k = 0; k < kGroup; ++k)
        if (first + k < kSources)
          pieces[u][k].load(sources.at[first + k], i + u * step < end ? i + u * step : i);
#pragma unroll
    for (int u = 0; u < kPositions; ++u)
#pragma unroll
      for (int k = 0; k < kGroup; ++k)
#pragma unroll
        for (int e = 0; e < kWidth; ++e)
          if (first + k < kSources) {
            const Wide<T> next = widen(pieces[u][k][e]);
            total[u][e] = first + k == 0 ? next : O::of(total[u][e], next);
          }
  }
}

template <class T, bool kIsVector, int kWidth, int kTargets>
RC_INLINE void store_in_all(const Piece<T, kWidth, kIsVector>& piece,
                            const Pointers<kTargets>& targets, u64 i) {
#pragma unroll(kTargets <= 16 ? kTargets : 1)
  for (int k = 0; k < kTargets; ++k) piece.store(targets.at[k], i);
}

// Returns the element to store. An element of a single source keeps its bits.
template <class R, bool kIsSingle>
RC_INLINE R rounded(Wide<R> x) {
  if constexpr (kIsSingle && kIsSame<R, Wide<R>>) return x;
  else return To<R>::from(x);
}

// The number of elements that fill whole vectors of both types.
template <class T, class R>
constexpr int kWidthOf = 16 / (sizeof(T) < sizeof(R) ? sizeof(T) : sizeof(R));

template <class T, class R, class O, bool kIsVector, int kSources, int kTargets>
RC_INLINE void reduce_pieces(const Pointers<kSources>& sources, const Pointers<kTargets>& targets,
                             const Division<Wide<T>>& division, u64 i, u64 step, u64 end) {
  constexpr int kWidth = kIsVector ? kWidthOf<T, R> : 1;
  constexpr int kPositions = kPositionsOf<kSources>;
  Wide<T> total[kPositions][kWidth] = {};
  combine<T, O, kIsVector>(total, sources, i, step, end);
#pragma unroll
  for (int u = 0; u < kPositions; ++u)
    if (i + u * step < end) {
      Piece<R, kWidth, kIsVector> piece;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        if constexpr (O::kIsNumber) total[u][e] = division.of(total[u][e]);
        piece[e] = rounded<R, kSources == 1>(total[u][e]);
      }
      store_in_all(piece, targets, i + u * step);
    }
}

#if RC_KERNEL == REDUCE
// targets[*][i] = (sources[0][i] op sources[1][i] ...) / divisor for i in [0, count), rounded once.
// A target may be a source.
RC_GLOBAL rc_entry(const __grid_constant__ Pointers<RC_SOURCES> sources,
                   const __grid_constant__ Pointers<RC_TARGETS> targets, u64 count, i64 divisor) {
  using T = RC_TYPE;
  using R = RC_RESULT;
  Alignment from, to;
  from.add(sources);
  to.add(targets);
  constexpr int kWidth = kWidthOf<T, R>;
  const Body body = body_of<kWidth>(count, [&](u64 i) {
    return from.is_aligned(i * sizeof(T)) && to.is_aligned(i * sizeof(R));
  });
  const Division<Wide<T>> division(divisor);
  sweep_all<kWidth, kPositionsOf<RC_SOURCES>>(
      whole_grid(), count, body, [&](u64 i, u64 step, u64 end, auto is_vector) {
        reduce_pieces<T, R, RC_OP, decltype(is_vector)::value>(sources, targets, division, i, step,
                                                            end);
      });
}
#endif

// --- SCALE: x -> x * factor ------------------------------------------------------------------------

// As x86 multiplies: a NaN keeps its payload, and a new one is negative.
RC_INLINE float product(float x, float by) {
  const float y = x * by;
  if (y == y) return y;
  return x != x ? quiet(x) : by != by ? quiet(by) : __uint_as_float(0xffc00000u);
}
RC_INLINE double product(double x, double by) {
  const double y = x * by;
  if (y == y) return y;
  const double fresh = __longlong_as_double(static_cast<i64>(0xfff8000000000000ull));
  return x != x ? quiet(x) : by != by ? quiet(by) : fresh;
}

RC_INLINE float scaled(float x, float by) { return product(x, by); }
RC_INLINE double scaled(double x, double by) { return product(x, by); }
RC_INLINE bfloat16_t scaled(bfloat16_t x, float by) {
  return To<bfloat16_t>::from(product(widen(x), by));
}
RC_INLINE float16_t scaled(float16_t x, float by) {
  if ((x.bits & 0x7fffu) > 0x7c00u) return {static_cast<u16>(x.bits | 0x0200u)};  // quiet
  const float y = product(widen(x), by);
  if (y == y) return To<float16_t>::from(y);
  const u32 bits = __float_as_uint(y);
  return {static_cast<u16>((bits >> 16 & 0x8000u) | 0x7e00u | (bits >> 13 & 0x1ffu))};
}

#if RC_KERNEL == SCALE
// x[i] *= factor for i in [0, count); 16-bit floats are multiplied in float32 and rounded once.
RC_GLOBAL rc_entry(void* x, u64 count, double factor) {
  using T = RC_TYPE;
  constexpr int kWidth = 16 / sizeof(T), kPositions = kInFlight / 2;
  const Wide<T> by = static_cast<Wide<T>>(factor);
  Alignment alignment;
  alignment.add(x);
  const Body body =
      body_of<kWidth>(count, [&](u64 i) { return alignment.is_aligned(i * sizeof(T)); });
  sweep_all<kWidth, kPositions>(
      whole_grid(), count, body, [&](u64 i, u64 step, u64 end, auto is_vector) {
        constexpr bool kIsVector = decltype(is_vector)::value;
        constexpr int kItems = kIsVector ? kWidth : 1;
        Piece<T, kItems, kIsVector> pieces[kPositions];
#pragma unroll
        for (int u = 0; u < kPositions; ++u) pieces[u].load(x, i + u * step < end ? i + u * step : i);
#pragma unroll
        for (int u = 0; u < kPositions; ++u) {
          if (i + u * step >= end) continue;
#pragma unroll
          for (int e = 0; e < kItems; ++e) pieces[u][e] = scaled(pieces[u][e], by);
          pieces[u].store(x, i + u * step);
        }
      });
}
#endif

// --- PACK and UNPACK: many tensors <-> one buffer ------------------------------------------------

// Elements of a tensor that one block copies at a time. The table of chunks stays on the GPU as
// long as the tensors keep their sizes. Their addresses may change at every step, so they are
// parameters of the kernel.
struct Chunk {
  u32 tensor, count;
  u64 start, place;  // in elements of the tensor, and of the buffer
};

// target[0, count) = source[0, count), by one block.
template <class T>
RC_INLINE void copy_all(const T* source, T* target, u64 count) {
  constexpr int kWidth = 16 / sizeof(T), kPositions = kInFlight / 2;
  Alignment alignment;
  alignment.add(source);
  alignment.add(target);
  const Body body =
      body_of<kWidth>(count, [&](u64 i) { return alignment.is_aligned(i * sizeof(T)); });
  sweep_all<kWidth, kPositions>(
      one_block(), count, body, [&](u64 i, u64 step, u64 end, auto is_vector) {
        constexpr bool kIsVector = decltype(is_vector)::value;
        Piece<T, kIsVector ? kWidth : 1, kIsVector> pieces[kPositions];
#pragma unroll
        for (int u = 0; u < kPositions; ++u)
          pieces[u].load(source, i + u * step < end ? i + u * step : i);
#pragma unroll
        for (int u = 0; u < kPositions; ++u)
          if (i + u * step < end) pieces[u].store(target, i + u * step);
      });
}

#if RC_KERNEL == PACK || RC_KERNEL == UNPACK
// For each chunk, buffer[place...] = tensors[tensor][start...]; UNPACK copies the other way. The
// buffer and the tensors do not overlap.
RC_GLOBAL rc_entry(const __grid_constant__ Pointers<RC_TENSORS> tensors, const Chunk* chunks,
                   u32 n_chunks, void* buffer) {
#pragma unroll 1
  for (u32 c = blockIdx.x; c < n_chunks; c += gridDim.x) {
    const Chunk chunk = chunks[c];
    auto* packed = static_cast<RC_TYPE*>(buffer) + chunk.place;
    auto* tensor = static_cast<RC_TYPE*>(tensors.at[chunk.tensor]) + chunk.start;
#if RC_KERNEL == PACK
    copy_all(tensor, packed, chunk.count);
#else
    copy_all(packed, tensor, chunk.count);
#endif
  }
}
#endif

// --- WRITE: one number ---------------------------------------------------------------------------

#if RC_KERNEL == WRITE
RC_GLOBAL rc_entry(u64 target, u32 value) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *reinterpret_cast<volatile u32*>(target) = value;
}
#endif

}  // namespace ringcomm
