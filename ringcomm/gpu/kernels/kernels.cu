// All that runs on a GPU, in one file without any #include: NVRTC, which compiles it at run time,
// has no standard headers, and CuPy's wheels lack those of CUDA for 16-bit floats. g++ compiles it,
// too, behind tests/gpu_emulation.hpp: the tests run this very source on the CPU.
//
// Macros select one kernel, whose name is always rc_entry. kernel.py beside it knows which
// there are, what to pass them, and the options that keep the bits: no product is fused with a sum
// but where fmaf() says so.
#define REDUCE 1      // RC_TYPE, RC_OP, RC_SOURCES, RC_TARGETS
#define PACK 2        // RC_SOURCE and RC_TARGET, types; RC_TENSORS
#define UNPACK 3      // as PACK
#define UPDATE 4      // RC_TYPE of gradients, RC_TARGET of weights; RC_RULE, RC_SOURCES, RC_TARGETS
#define QUANTISE 5    // RC_TYPE, RC_CODE, RC_BLOCK
#define DEQUANTISE 6  // RC_TYPE, RC_CODE, RC_BLOCK, RC_ACCUMULATE

#define RC_INLINE __device__ __forceinline__
// 2 blocks per processor: up to 128 registers. Left to itself, ptxas of CUDA 13 spills a few to run
// more blocks, and waits for some loads before it issues the others.
#define RC_GLOBAL extern "C" __global__ void __launch_bounds__(256, 2)

namespace ringcomm {

template <class T>
struct Complex {
  T re, im;
};
struct f16 {
  unsigned short bits;
};
struct bf16 {
  unsigned short bits;
};
using f32 = float;
using f64 = double;
using i8 = signed char;
using i16 = short;
using i32 = int;
using i64 = long long;
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using b1 = u8;
using c64 = Complex<float>;
using c128 = Complex<double>;

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

// Rounded so that to round it again, to fewer bits, gives what rounding once would have: toward
// zero, with the last bit set if anything was lost (Boldo and Melquiond 2008,
// doi:10.1109/TC.2007.70819).
RC_INLINE float round_to_odd(double value) {
  const float nearest = static_cast<float>(value);
  const double back = nearest;
  u32 bits = __float_as_uint(nearest);
  bits -= fabs(back) > fabs(value) ? 1u : 0u;
  bits |= back != value ? 1u : 0u;
  return value != value ? nearest : __uint_as_float(bits);
}

// Of several NaN hardware keeps one or another, or makes its own. Every NaN that was computed
// becomes this one, as on the CPU.
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

// The number in which elements are computed.
template <class T>
RC_INLINE T widen(T x) {
  return x;
}
RC_INLINE float widen(f16 x) { return widen_float16(x.bits); }
RC_INLINE float widen(bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }

template <class T>
using Wide = decltype(widen(T()));

// An element of a number: rounded once, also from float64 to 16 bits; NaN is made canonical.
template <class T>
struct To {
  static RC_INLINE T from(T x) { return canonical(x); }
};
template <>
struct To<float> {
  static RC_INLINE float from(float x) { return canonical(x); }
  static RC_INLINE float from(double x) { return canonical(static_cast<float>(x)); }
};
template <>
struct To<f16> {
  static RC_INLINE f16 from(float x) {
    return {static_cast<u16>(x != x ? 0x7e00u : narrow_float16(x))};
  }
  static RC_INLINE f16 from(double x) { return from(round_to_odd(x)); }
};
template <>
struct To<bf16> {
  static RC_INLINE bf16 from(float x) {
    return {static_cast<u16>(x != x ? 0x7fc0u : narrow_bfloat16(x))};
  }
  static RC_INLINE bf16 from(double x) { return from(round_to_odd(x)); }
};

// --- memory --------------------------------------------------------------------------------------

// Addresses of N arrays, by value. A thread may load elements of an array and store to those of
// another that is the same memory, so no load may go through the non-coherent cache.
template <int N>
struct Pointers {
  void* at[N];
};

// What one thread loads or stores at a time: kWidth elements, in vectors of 16 bytes.
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

// One element, wherever it lies.
template <class T>
struct Piece<T, 1, false> {
  T element;

  RC_INLINE T& operator[](int) { return element; }
  RC_INLINE void load(const void* base, u64 i) { element = static_cast<const T*>(base)[i]; }
  RC_INLINE void store(void* base, u64 i) const { static_cast<T*>(base)[i] = element; }
};

// Where arrays of elements of one size stand between multiples of 16 bytes.
struct Phase {
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
  // That many bytes on, all of them are at multiples of 16.
  RC_INLINE bool is_aligned(u64 nbytes) const {
    return any == all && ((any + static_cast<u32>(nbytes)) & 15u) == 0;
  }
};

// Elements [begin, end) of [lo, hi), which can be moved in vectors; none if there is no such place.
struct Body {
  u64 begin, end;
};
template <int kWidth, class IsAligned>
RC_INLINE Body body_of(u64 lo, u64 hi, IsAligned is_aligned) {
#pragma unroll 1
  for (u64 begin = lo; begin < lo + kWidth && begin <= hi; ++begin)
    if (is_aligned(begin)) return {begin, begin + (hi - begin) / kWidth * kWidth};
  return {hi, hi};
}

// Whose work a loop shares out: that of a whole grid, or of one block.
struct Crew {
  u64 index, size;
};
RC_INLINE Crew whole_grid() { return {blockIdx.x, gridDim.x}; }
RC_INLINE Crew one_block() { return {0, 1}; }

// Calls visit(i, step) so that i, i + step, ... (kPositions of them, where they are below end) are
// the beginnings of all pieces of [begin, end), each once.
template <int kWidth, int kPositions, class Visit>
RC_INLINE void sweep(Crew crew, u64 begin, u64 end, Visit visit) {
  const u64 step = static_cast<u64>(blockDim.x) * kWidth;
#pragma unroll 1
  for (u64 i = begin + crew.index * step * kPositions + threadIdx.x * kWidth; i < end;
       i += crew.size * step * kPositions)
    visit(i, step);
}

// Elements [lo, hi): in vectors where that is possible, one by one around them. visit() is told
// which in the type of its last argument, and before that where that part of the elements ends.
template <bool kIs>
struct IsVector {
  static constexpr bool value = kIs;
};
template <int kWidth, int kPositions, class Visit>
RC_INLINE void sweep_all(Crew crew, u64 lo, u64 hi, Body body, Visit visit) {
  sweep<kWidth, kPositions>(crew, body.begin, body.end,
                            [&](u64 i, u64 step) { visit(i, step, body.end, IsVector<true>()); });
#pragma unroll 1
  for (int side = 0; side < 2; ++side) {
    const u64 end = side == 0 ? body.begin : hi;
    sweep<1, kPositions>(crew, side == 0 ? lo : body.end, end,
                         [&](u64 i, u64 step) { visit(i, step, end, IsVector<false>()); });
  }
}

// --- operators -----------------------------------------------------------------------------------

// As csrc/kernels/operators.hpp has them. Integers wrap, so they are combined as unsigned ones.
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

// NaN, which is unequal to itself, wins.
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

// bool: any byte but 0 is true, and 1 is what comes out.
struct Both {
  static constexpr bool kIsNumber = false;
  static RC_INLINE b1 of(b1 a, b1 b) { return a != 0 && b != 0; }
};
struct Either {
  static constexpr bool kIsNumber = false;
  static RC_INLINE b1 of(b1 a, b1 b) { return a != 0 || b != 0; }
};
struct One {
  static constexpr bool kIsNumber = false;
  static RC_INLINE b1 of(b1 a, b1 b) { return (a != 0) != (b != 0); }
};

// Division of what was combined. Integers are truncated toward zero.
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

// x86 keeps a NaN's payload, a GPU does not.
RC_INLINE float quiet(float nan) { return __uint_as_float(__float_as_uint(nan) | 0x00400000u); }
RC_INLINE double quiet(double nan) {
  return __longlong_as_double(__double_as_longlong(nan) | 0x0008000000000000ll);
}

// To multiply by 1 / 2^n has the bits of dividing by 2^n, and takes a tenth of the instructions.
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

// How many pieces a thread combines at once.
template <int kSources>
constexpr int kPositionsOf = at_most(4, kInFlight / at_most(kInFlight, kSources));

// total[u] = the elements at i + u * step of all sources, combined in their order. Where that is
// not below end, it is of no meaning.
template <class T, class O, bool kIsVector, int kWidth, int kPositions, int kSources>
RC_INLINE void combine(Wide<T> (&total)[kPositions][kWidth], const Pointers<kSources>& sources,
                       u64 i, u64 step, u64 end) {
  // More sources than are loaded at once are a loop over half as many: unrolled, it spills.
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

// Stores one piece in all targets.
template <class T, bool kIsVector, int kWidth, int kTargets>
RC_INLINE void store_in_all(const Piece<T, kWidth, kIsVector>& piece,
                            const Pointers<kTargets>& targets, u64 i) {
#pragma unroll(kTargets <= 16 ? kTargets : 1)
  for (int k = 0; k < kTargets; ++k) piece.store(targets.at[k], i);
}

// The element that is stored of a combination: the bits of a single source are kept.
template <class T, bool kIsSingle>
RC_INLINE T rounded(Wide<T> x) {
  if constexpr (kIsSingle && kIsSame<T, Wide<T>>) return x;
  else return To<T>::from(x);
}

template <class T, class O, bool kIsVector, int kSources, int kTargets>
RC_INLINE void reduce_pieces(const Pointers<kSources>& sources, const Pointers<kTargets>& targets,
                             const Division<Wide<T>>& division, u64 i, u64 step, u64 end) {
  constexpr int kWidth = kIsVector ? 16 / sizeof(T) : 1;
  constexpr int kPositions = kPositionsOf<kSources>;
  Wide<T> total[kPositions][kWidth] = {};
  combine<T, O, kIsVector>(total, sources, i, step, end);
#pragma unroll
  for (int u = 0; u < kPositions; ++u)
    if (i + u * step < end) {
      Piece<T, kWidth, kIsVector> piece;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        if constexpr (O::kIsNumber) total[u][e] = division.of(total[u][e]);
        piece[e] = rounded<T, kSources == 1>(total[u][e]);
      }
      store_in_all(piece, targets, i + u * step);
    }
}

#if RC_KERNEL == REDUCE
// targets[*][i] = (sources[0][i] op sources[1][i] ...) / divisor for i in [lo, hi), rounded once.
// A target may be the same memory as a source, from the same element on.
RC_GLOBAL rc_entry(const __grid_constant__ Pointers<RC_SOURCES> sources,
                   const __grid_constant__ Pointers<RC_TARGETS> targets, u64 lo, u64 hi,
                   i64 divisor) {
  using T = RC_TYPE;
  Phase phase;
  phase.add(sources);
  phase.add(targets);
  constexpr int kWidth = 16 / sizeof(T);
  const Body body =
      body_of<kWidth>(lo, hi, [&](u64 i) { return phase.is_aligned(i * sizeof(T)); });
  const Division<Wide<T>> division(divisor);
  sweep_all<kWidth, kPositionsOf<RC_SOURCES>>(
      whole_grid(), lo, hi, body, [&](u64 i, u64 step, u64 end, auto is_vector) {
        reduce_pieces<T, RC_OP, decltype(is_vector)::value>(sources, targets, division, i, step,
                                                            end);
      });
}
#endif

// --- PACK and UNPACK: many tensors <-> one buffer ------------------------------------------------

// What one block moves at a time. The table of chunks stays on the GPU, as long as the tensors keep
// their sizes; their addresses, which may be others at every step, are parameters of the kernel.
struct Chunk {
  u32 tensor, count;
  u64 start, place;  // in elements of the tensor, and of the buffer
};

// Scaled in float32, or in float64 if either type is; rounded once. Without a scale and a cast, the
// very bits.
template <class T, class S>
RC_INLINE T cast(S x, float scale) {
  const bool is_scaled = scale != 1.0f;
  if constexpr (kIsSame<T, S>) {
    if (!is_scaled) return x;
  }
  if constexpr (kIsSame<T, f64> || kIsSame<S, f64>) {
    const f64 wide = static_cast<f64>(widen(x));
    return To<T>::from(is_scaled ? wide * static_cast<f64>(scale) : wide);
  } else {
    return To<T>::from(is_scaled ? widen(x) * scale : widen(x));
  }
}

template <class S, class T>
constexpr int kWidthOf = 16 / (sizeof(S) < sizeof(T) ? sizeof(S) : sizeof(T));

// target[0, count) = source[0, count), by one block.
template <class S, class T>
RC_INLINE void cast_all(const void* source, void* target, u64 count, float scale) {
  constexpr int kWidth = kWidthOf<S, T>;
  constexpr int kPositions = kInFlight / 2 * 16 / (kWidth * static_cast<int>(sizeof(S)));
  Phase from, to;
  from.add(source);
  to.add(target);
  const Body body = body_of<kWidth>(0, count, [&](u64 i) {
    return from.is_aligned(i * sizeof(S)) && to.is_aligned(i * sizeof(T));
  });
  sweep_all<kWidth, kPositions>(
      one_block(), 0, count, body, [&](u64 i, u64 step, u64 end, auto is_vector) {
        constexpr bool kIsVector = decltype(is_vector)::value;
        constexpr int kCount = kIsVector ? kWidth : 1;
        Piece<S, kCount, kIsVector> in[kPositions];
#pragma unroll
        for (int u = 0; u < kPositions; ++u)
          in[u].load(source, i + u * step < end ? i + u * step : i);
#pragma unroll
        for (int u = 0; u < kPositions; ++u)
          if (i + u * step < end) {
            Piece<T, kCount, kIsVector> out;
#pragma unroll
            for (int e = 0; e < kCount; ++e) out[e] = cast<T>(in[u][e], scale);
            out.store(target, i + u * step);
          }
      });
}

#if RC_KERNEL == PACK || RC_KERNEL == UNPACK
// buffer[chunk.place...] = tensors[chunk.tensor][chunk.start...] * scale for all chunks; UNPACK the
// other way. The buffer is apart from the tensors.
RC_GLOBAL rc_entry(const __grid_constant__ Pointers<RC_TENSORS> tensors, const Chunk* chunks,
                   u32 n_chunks, void* buffer, float scale) {
#pragma unroll 1
  for (u32 c = blockIdx.x; c < n_chunks; c += gridDim.x) {
    const Chunk chunk = chunks[c];
#if RC_KERNEL == PACK
    const void* source = static_cast<const RC_SOURCE*>(tensors.at[chunk.tensor]) + chunk.start;
    void* target = static_cast<RC_TARGET*>(buffer) + chunk.place;
#else
    const void* source = static_cast<const RC_SOURCE*>(buffer) + chunk.place;
    void* target = static_cast<RC_TARGET*>(tensors.at[chunk.tensor]) + chunk.start;
#endif
    cast_all<RC_SOURCE, RC_TARGET>(source, target, chunk.count, scale);
  }
}
#endif

// --- UPDATE: sum of gradients -> optimizer -> weights on all ranks -------------------------------

// The rules of torch.optim, with its operations in its order. Where its loops fuse a product with a
// sum, on CPUs with AVX2 and on GPUs, stands fmaf(). Numbers are rounded to float32 on the host.
constexpr u32 kMaximizes = 1, kDecays = 2, kIsNesterov = 4, kIsFirst = 8;

RC_INLINE float pulled(float grad, float weight, float decay, u32 flags) {
  const float signed_grad = flags & kMaximizes ? -grad : grad;
  return flags & kDecays ? fmaf(decay, weight, signed_grad) : signed_grad;
}

struct Sgd {
  static constexpr int kStates = 0;
  struct Numbers {
    float decay, step;  // step is -lr
    u32 flags;
  };
  static RC_INLINE float of(float weight, float grad, float*, const Numbers& n) {
    return fmaf(n.step, pulled(grad, weight, n.decay, n.flags), weight);
  }
};

struct Momentum {
  static constexpr int kStates = 1;
  struct Numbers {
    float decay, momentum, fresh, step;  // fresh is 1 - dampening
    u32 flags;
  };
  static RC_INLINE float of(float weight, float grad, float* state, const Numbers& n) {
    const float g = pulled(grad, weight, n.decay, n.flags);
    state[0] = n.flags & kIsFirst ? g : fmaf(n.fresh, g, state[0] * n.momentum);
    return fmaf(n.step, n.flags & kIsNesterov ? fmaf(n.momentum, state[0], g) : state[0], weight);
  }
};

struct Adam {  // and AdamW: decay is 0 then, shrink 1 - lr * weight_decay
  static constexpr int kStates = 2;
  struct Numbers {
    float decay, shrink, weight, keep, fresh, step, root, eps;
    u32 flags;
  };
  static RC_INLINE float lerp(float start, float end, float weight) {
    const bool is_small = weight < 0.5f;
    return fmaf(is_small ? weight : weight - 1.0f, end - start, is_small ? start : end);
  }
  static RC_INLINE float of(float weight, float grad, float* state, const Numbers& n) {
    const float shrunk = weight * n.shrink;
    const float g = pulled(grad, shrunk, n.decay, n.flags);
    state[0] = lerp(state[0], g, n.weight);
    state[1] = fmaf(n.fresh * g, g, state[1] * n.keep);
    return shrunk + n.step * state[0] / (sqrtf(state[1]) / n.root + n.eps);
  }
};

// Arrays of the owner, whose element 0 belongs to element lo of the sources and targets.
struct Owned {
  float* weights;
  float* states[2];
};

template <class G, class W, class Rule, bool kIsVector, int kSources, int kTargets>
RC_INLINE void update_pieces(const Pointers<kSources>& grads, const Pointers<kTargets>& weights,
                             const Owned& owned, const typename Rule::Numbers& numbers,
                             float scale, u64 lo, u64 i, u64 step, u64 end) {
  constexpr int kWidth = kIsVector ? kWidthOf<G, W> : 1;
  constexpr int kStates = Rule::kStates;
  float total[1][kWidth] = {};
  Piece<float, kWidth, kIsVector> master, states[kStates + 1];
  Piece<W, kWidth, kIsVector> pushed;
  master.load(owned.weights, i - lo);
#pragma unroll
  for (int k = 0; k < kStates; ++k) states[k].load(owned.states[k], i - lo);
  combine<G, Sum, kIsVector>(total, grads, i, step, end);
#pragma unroll
  for (int e = 0; e < kWidth; ++e) {
    float state[kStates + 1];
#pragma unroll
    for (int k = 0; k < kStates; ++k) state[k] = states[k][e];
    master[e] = Rule::of(master[e], total[0][e] * scale, state, numbers);
#pragma unroll
    for (int k = 0; k < kStates; ++k) states[k][e] = state[k];
    pushed[e] = To<W>::from(master[e]);
  }
  master.store(owned.weights, i - lo);
#pragma unroll
  for (int k = 0; k < kStates; ++k) states[k].store(owned.states[k], i - lo);
  store_in_all(pushed, weights, i);
}

#if RC_KERNEL == UPDATE
// For i in [lo, hi): one step of the rule with scale * (grads[0][i] + grads[1][i] + ...), summed in
// float32; its new weights go to weights[*][i]. owned.weights may be one of these.
RC_GLOBAL rc_entry(const __grid_constant__ Pointers<RC_SOURCES> grads,
                   const __grid_constant__ Pointers<RC_TARGETS> weights,
                   const __grid_constant__ Owned owned, u64 lo, u64 hi, float scale,
                   const __grid_constant__ RC_RULE::Numbers numbers) {
  using G = RC_TYPE;
  using W = RC_TARGET;
  constexpr int kWidth = kWidthOf<G, W>;
  Phase of_grads, of_weights, of_owned;
  of_grads.add(grads);
  of_weights.add(weights);
  of_owned.add(owned.weights);
  for (int k = 0; k < RC_RULE::kStates; ++k) of_owned.add(owned.states[k]);
  const Body body = body_of<kWidth>(lo, hi, [&](u64 i) {
    return of_grads.is_aligned(i * sizeof(G)) && of_weights.is_aligned(i * sizeof(W)) &&
           of_owned.is_aligned((i - lo) * sizeof(float));
  });
  sweep_all<kWidth, 1>(
      whole_grid(), lo, hi, body, [&](u64 i, u64 step, u64 end, auto is_vector) {
        update_pieces<G, W, RC_RULE, decltype(is_vector)::value>(grads, weights, owned, numbers,
                                                                 scale, lo, i, step, end);
      });
}
#endif

// --- QUANTISE and DEQUANTISE: blocks of a byte per element and a scale ---------------------------

// As csrc/kernels/int8.cpp: `parts` of a scale, rounded up with the probability of their fraction.
struct Int8 {
  static constexpr float kMost = 127;
  static constexpr bool kIsRandom = true;
  static RC_INLINE u8 of(float parts, u32 random) {
    const float within = parts < -kMost ? -kMost : kMost < parts ? kMost : parts;
    const i32 fixed = static_cast<i32>(within * static_cast<float>(1 << 24));
    return static_cast<u8>((fixed + static_cast<i32>(random >> 8)) >> 24);
  }
  static RC_INLINE float value(u8 code) { return static_cast<float>(static_cast<i8>(code)); }
};

// 4 bits of exponent, 3 of fraction (Micikevicius et al. 2022, arXiv:2209.05433), to nearest, ties
// to even. In software: what GPUs have for it does not assemble below sm_89.
struct E4M3 {
  static constexpr float kMost = 448;
  static constexpr bool kIsRandom = false;
  static RC_INLINE u8 of(float parts, u32) {
    const u32 bits = __float_as_uint(parts), sign = bits >> 24 & 0x80u;
    u32 magnitude = bits & 0x7fffffffu;
    const u32 most = __float_as_uint(kMost);
    magnitude = magnitude < most ? magnitude : most;
    const u32 normal = (magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
    // Below 2^-6: adding 2^14 aligns the value with multiples of 2^-9, and rounds it.
    const u32 subnormal =
        __float_as_uint(__uint_as_float(magnitude) + 16384.0f) - __float_as_uint(16384.0f);
    return static_cast<u8>(sign | (magnitude < 0x3c800000u ? subnormal : normal - (120u << 3)));
  }
  static RC_INLINE float value(u8 code) {
    const u32 magnitude = code & 0x7fu;
    const float subnormal = static_cast<float>(magnitude) * 0.001953125f;
    const float normal = __uint_as_float((magnitude << 20) + (120u << 23));
    const float x = magnitude < 8 ? subnormal : normal;
    return code & 0x80u ? -x : x;
  }
};

#if RC_KERNEL == QUANTISE
// Random numbers as csrc/kernels/threefry.hpp has them: Threefry4x32-20 (Salmon et al. 2011,
// doi:10.1145/2063384.2063405). A counter gives four, 64 elements from each other. What is there is
// repeated here, for nothing may be included.
RC_INLINE void mix(u32& a, u32& b, int rotation) {
  a += b;
  b = (b << rotation | b >> (32 - rotation)) ^ a;
}

template <int kTurn>
RC_INLINE void four_rounds(u32 (&x)[4], const u32 (&key)[5]) {
  constexpr bool kIsOdd = kTurn % 2 != 0;
  mix(x[0], x[1], kIsOdd ? 10 : 6);
  mix(x[2], x[3], kIsOdd ? 26 : 20);
  mix(x[0], x[3], kIsOdd ? 11 : 17);
  mix(x[2], x[1], kIsOdd ? 21 : 11);
  mix(x[0], x[1], kIsOdd ? 13 : 25);
  mix(x[2], x[3], kIsOdd ? 27 : 10);
  mix(x[0], x[3], kIsOdd ? 23 : 18);
  mix(x[2], x[1], kIsOdd ? 5 : 20);
#pragma unroll
  for (int j = 0; j < 4; ++j) x[j] += key[(kTurn + j) % 5];
  x[3] += kTurn;
}

RC_INLINE void random_numbers(u32 (&x)[4], u64 counter, u64 seed, u64 draw) {
  const u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
  const u32 key[5] = {k0, k1, 0, 0, 0x1BD11BDAu ^ k0 ^ k1};
  x[0] = static_cast<u32>(counter) + k0;
  x[1] = static_cast<u32>(counter >> 32) + k1;
  x[2] = static_cast<u32>(draw);
  x[3] = static_cast<u32>(draw >> 32);
  four_rounds<1>(x, key);
  four_rounds<2>(x, key);
  four_rounds<3>(x, key);
  four_rounds<4>(x, key);
  four_rounds<5>(x, key);
}

// The scale of a block from the bits of its largest magnitude, which are ordered as magnitudes are,
// with inf and then NaN on top. Not below the normal numbers, and not so large that kMost of it
// overflow.
template <class Code>
RC_INLINE float scale_of(u32 largest_bits) {
  constexpr u32 kInf = 0x7f800000u, kNaN = 0x7fc00000u, kSmallest = 0x00800000u;
  if (largest_bits >= kInf) return __uint_as_float(kNaN);
  const float share = __uint_as_float(largest_bits) / Code::kMost;
  const float smallest = __uint_as_float(kSmallest);
  const float scale = share < smallest ? smallest : share;
  const bool fits = __float_as_uint(scale * Code::kMost) < kInf;
  return fits ? scale : __uint_as_float(__float_as_uint(scale) - 1);
}

RC_INLINE u32 largest_of_warp(u32 x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const u32 other = __shfl_xor_sync(0xffffffffu, x, distance);
    x = x < other ? other : x;
  }
  return x;
}

constexpr int kWarp = 32, kRun = 256;  // threads; elements that get their random numbers together

// Elements that a warp encodes at a time: whole blocks, whole runs. Lane l has l, l + 32 and so on.
template <int kBlock>
constexpr int kTileOf = kBlock < kRun ? kRun : kBlock;

template <class T, int kSlots>
RC_INLINE void load_sums(float (&sums)[kSlots], const T* x, const float* residual, u64 first,
                         u64 count) {
#pragma unroll
  for (int k = 0; k < kSlots; ++k) {
    const u64 i = first + k * kWarp;
    sums[k] = i < count ? widen(x[i]) : 0.0f;
  }
  if (residual == nullptr) return;
#pragma unroll
  for (int k = 0; k < kSlots; ++k) {
    const u64 i = first + k * kWarp;
    if (i < count) sums[k] = residual[i] + sums[k];
  }
}

// The scale of the block of each of a lane's elements; lane 0 stores them.
template <class Code, int kBlock, int kSlots>
RC_INLINE void find_scales(float (&scale)[kSlots], const float (&sums)[kSlots], float* scales,
                           u64 first_block, u64 n_blocks, int lane) {
  constexpr int kShare = kBlock / kWarp;  // elements of a block that one lane has
#pragma unroll
  for (int b = 0; b < kSlots / kShare; ++b) {
    u32 largest = 0;
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      const u32 magnitude = __float_as_uint(sums[b * kShare + k]) & 0x7fffffffu;
      largest = largest < magnitude ? magnitude : largest;
    }
    const float found = scale_of<Code>(largest_of_warp(largest));
    if (lane == 0 && first_block + b < n_blocks) scales[first_block + b] = found;
#pragma unroll
    for (int k = 0; k < kShare; ++k) scale[b * kShare + k] = found;
  }
}

// A block that holds NaN or inf has the scale NaN: its codes are 0, and its residual stays.
template <class Code>
RC_INLINE void encode(float sum, float scale, u32 random, u64 i, u64 count, u8* codes,
                      float* residual) {
  if (i >= count) return;
  const bool is_number = scale == scale;
  const u8 code = is_number ? Code::of(sum / scale, random) : u8{0};
  codes[i] = code;
  if (residual != nullptr && is_number) residual[i] = sum - Code::value(code) * scale;
}

template <class Code, int kSlots>
RC_INLINE void encode_all(const float (&sums)[kSlots], const float (&scale)[kSlots], u64 tile,
                          int lane, u64 count, u8* codes, float* residual, u64 seed, u64 draw) {
#pragma unroll
  for (int part = 0; part < kSlots / 4; ++part) {
    const int run = part / 2, half = part % 2;
    u32 random[4] = {};
    if constexpr (Code::kIsRandom)
      random_numbers(random, (tile + run * kRun) / 4 + half * kWarp + lane, seed, draw);
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      const int k = run * 8 + quarter * 2 + half;
      encode<Code>(sums[k], scale[k], random[quarter], tile + k * kWarp + lane, count, codes,
                   residual);
    }
  }
}

// Encodes x + residual, computed in float32, and leaves in residual what was dropped; without one
// (nullptr) it encodes x. A launch has whole warps.
RC_GLOBAL rc_entry(const RC_TYPE* x, float* residual, float* scales, u8* codes, u64 count, u64 seed,
                   u64 draw) {
  constexpr int kTile = kTileOf<RC_BLOCK>, kSlots = kTile / kWarp;
  const int lane = threadIdx.x % kWarp;
  const u64 warps_per_block = blockDim.x / kWarp, n_blocks = (count + RC_BLOCK - 1) / RC_BLOCK;
  const u64 stride = gridDim.x * warps_per_block * kTile;
#pragma unroll 1
  for (u64 tile = (blockIdx.x * warps_per_block + threadIdx.x / kWarp) * kTile; tile < count;
       tile += stride) {
    float sums[kSlots], scale[kSlots];
    load_sums(sums, x, residual, tile + lane, count);
    find_scales<RC_CODE, RC_BLOCK>(scale, sums, scales, tile / RC_BLOCK, n_blocks, lane);
    encode_all<RC_CODE>(sums, scale, tile, lane, count, codes, residual, seed, draw);
  }
}
#endif

#if RC_KERNEL == DEQUANTISE
// out[i] = decoded, or out[i] + decoded, computed in float32 and rounded once.
RC_GLOBAL rc_entry(const float* scales, const u8* codes, RC_TYPE* out, u64 count) {
  constexpr int kPositions = 4;
  sweep<1, kPositions>(whole_grid(), 0, count, [&](u64 i, u64 step) {
    float value[kPositions];
#pragma unroll
    for (int u = 0; u < kPositions; ++u) {
      const u64 at = i + u * step < count ? i + u * step : i;
      value[u] = RC_CODE::value(codes[at]) * scales[at / RC_BLOCK];
      if constexpr (RC_ACCUMULATE) value[u] = widen(out[at]) + value[u];
    }
#pragma unroll
    for (int u = 0; u < kPositions; ++u)
      if (i + u * step < count) out[i + u * step] = To<RC_TYPE>::from(value[u]);
  });
}
#endif

}  // namespace ringcomm
