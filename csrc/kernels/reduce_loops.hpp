// Reductions of all that is not a 16-bit float.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "reduction_job.hpp"
#include "operators.hpp"

namespace ringcomm {
namespace {

template <class T>
struct PartOf {
  using type = T;
};
template <class T>
struct PartOf<Complex<T>> {
  using type = T;
};
// The real type of a complex one.
template <class T>
using Real = typename PartOf<T>::type;

// The type to divide T in. Quotients of small integers, truncated, are exact in floats, which are
// divided many at a time: a quotient is an integer or further from the next one than they round.
template <class T>
auto dividend() {
  if constexpr (std::is_floating_point_v<T>) return T{};
  else if constexpr (sizeof(T) <= 2) return float{};
  else if constexpr (sizeof(T) == 4) return double{};
  else if constexpr (std::is_signed_v<T>) return std::int64_t{};
  else return std::uint64_t{};
}

template <class T>
void divide_range(void* data, std::size_t count, std::size_t divisor) {
  using Dividend = decltype(dividend<T>());
  T* const values = static_cast<T*>(data);
  const auto by = static_cast<Dividend>(divisor);
  for (std::size_t i = 0; i < count; ++i)
    values[i] = static_cast<T>(static_cast<Dividend>(values[i]) / by);
}

// Stores the reduction of src[0] and the sources after it, numbered kNext, in the places kPlace.
// (Inner loops over these would have to be unrolled before the outer one can be vectorised, which
// GCC 12 did for some operators only.)
template <class T, class O, std::size_t... kNext, std::size_t... kPlace>
void combine_block(T* const* places, const T* const* sources, Real<T> scale, std::size_t count,
                   std::index_sequence<kNext...>, std::index_sequence<kPlace...>) {
  const T* const src[] = {sources[0], sources[kNext + 1]...};
  T* const dst[] = {places[kPlace]...};
  RINGCOMM_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i) {
    T x = src[0][i];
    ((x = O::of(x, src[kNext + 1][i])), ...);
    if constexpr (std::is_floating_point_v<T> && std::is_same_v<O, Sum>) x = x * scale;
    if constexpr (std::is_floating_point_v<Real<T>>) x = canonical(x);
    ((dst[kPlace][i] = x), ...);
  }
}

// Returns in how many places the block is.
template <class T, class O, std::size_t kSources>
std::size_t combine_sources(const Places<T>& places, const T* const* src, Real<T> scale,
                            std::size_t count) {
  using Next = std::make_index_sequence<kSources - 1>;
  if constexpr (std::is_same_v<O, Sum> && kSources > 2)
    if (places.count >= kSources) {
      combine_block<T, O>(places.at, src, scale, count, Next(),
                          std::make_index_sequence<kSources>());
      return kSources;
    }
  combine_block<T, O>(places.at, src, scale, count, Next(), std::make_index_sequence<2>());
  return std::min<std::size_t>(places.count, 2);
}

// Sources that one loop reads. More than two only where training waits for it: these loops are most
// of what takes the compiler long.
template <class T, class O>
constexpr std::size_t kFused =
    std::is_same_v<O, Sum> || std::is_floating_point_v<T> ? kMostFused : 2;

template <class T, class O>
std::size_t combine_group(const Places<T>& places, const T* const* src, std::size_t n_src,
                          Real<T> scale, std::size_t count) {
  if constexpr (kFused<T, O> > 2) {
    if (n_src == 3) return combine_sources<T, O, 3>(places, src, scale, count);
    if (n_src == 4) return combine_sources<T, O, 4>(places, src, scale, count);
  }
  return combine_sources<T, O, 2>(places, src, scale, count);
}

// As combine_sources(), of all sources, which are two or more. (The loops stand here once, for the
// partial results and for the last: twice as many take the compiler twice as long.)
template <class T, class O>
std::size_t reduce_block(const Places<T>& places, const Job& job, std::size_t start, Real<T> scale,
                         std::size_t count) {
  T partial[kBlockBytes / sizeof(T)];
  const T* group[kFused<T, O>];
  std::size_t n = 0, done = 0;
  const std::size_t n_first = 2 + (job.n_src - 2) % (kFused<T, O> - 1);  // the other groups are full
  for (std::size_t k = 0; k < job.n_src; ++k) {
    group[n++] = at<T>(job.src[k], start);
    const bool is_first = k + 1 == n_first, is_last = k + 1 == job.n_src;
    if (is_first || is_last || n == kFused<T, O>) {
      const Places<T> here = is_last ? places : Places<T>(partial);
      done = combine_group<T, O>(here, group, n, is_last ? scale : Real<T>{1}, count);
      group[0] = partial;
      n = 1;
    }
  }
  return done;
}

template <class T, class O>
void reduce_range(const Job& job) {
  constexpr std::size_t kBlock = kBlockBytes / sizeof(T);
  const bool is_scaled = std::is_floating_point_v<T> && std::is_same_v<O, Sum> &&
                         is_power_of_two(job.divisor) && job.n_src > 1;
  const bool is_divided = job.divisor != 1 && !is_scaled;
  const auto scale = is_scaled ? Real<T>{1} / static_cast<Real<T>>(job.divisor) : Real<T>{1};
  std::size_t n = 0;
  for (std::size_t start = 0; start < job.count; start += n) {
    n = std::min(kBlock, job.count - start);
    const Places<T> places(job, start, is_divided ? 1 : job.n_dst);
    T* const first = places.at[0];
    std::size_t done = 1;
    if (job.n_src > 1)
      done = reduce_block<T, O>(places, job, start, scale, n);
    else if (job.src[0] != job.dst[0])
      std::memcpy(first, at<T>(job.src[0], start), n * sizeof(T));
    if (is_divided) job.divide(first, n * sizeof(T) / sizeof(Real<T>), job.divisor);
    copy_on<T>(job, done, start, n);
  }
}

// A type that holds the sum of up to kMostAveraged integers of type T. Floats and doubles are added
// and divided many at a time: the sum is exact, and so is the truncated quotient, see dividend().
__extension__ using Int128 = __int128;
template <class T>
using SumOf = std::conditional_t<sizeof(T) == 1, float,
                                 std::conditional_t<sizeof(T) <= 4, double, Int128>>;

template <class T>
T quotient(SumOf<T> sum, SumOf<T> by) {
  using Integer = std::conditional_t<std::is_same_v<T, std::uint32_t>, std::int64_t, std::int32_t>;
  if constexpr (sizeof(T) <= 4) {
    return static_cast<T>(static_cast<Integer>(sum / by));
  } else {
    const auto narrow = static_cast<std::int64_t>(sum);  // a division of 128 bits is a call
    if (narrow == sum) return static_cast<T>(narrow / static_cast<std::int64_t>(by));
    return static_cast<T>(sum / by);
  }
}

// dst[*][i] = (src[0][i] + src[1][i] + ...) / divisor, of integers: the sum does not wrap. The
// divisor is at least the number of sources.
template <class T>
void average_range(const Job& job) {
  using Sum = SumOf<T>;
  constexpr std::size_t kBlock = kBlockBytes / sizeof(Sum);
  const auto by = static_cast<Sum>(job.divisor);
  Sum sums[kBlock];
  std::size_t n = 0;
  for (std::size_t start = 0; start < job.count; start += n) {
    n = std::min(kBlock, job.count - start);
    const T* const first = at<T>(job.src[0], start);
    for (std::size_t i = 0; i < n; ++i) sums[i] = static_cast<Sum>(first[i]);
    for (std::size_t k = 1; k < job.n_src; ++k) {
      const T* const next = at<T>(job.src[k], start);
      for (std::size_t i = 0; i < n; ++i) sums[i] += static_cast<Sum>(next[i]);
    }
    T* const out = at<T>(job.dst[0], start);
    for (std::size_t i = 0; i < n; ++i) out[i] = quotient<T>(sums[i], by);
    copy_on<T>(job, 1, start, n);
  }
}

}  // namespace
}  // namespace ringcomm
