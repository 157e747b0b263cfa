// Reductions of 16-bit floats: in float32, rounded once.
//
// H says how elements lie in a Word of memory and become two Parts, which are floats or vectors of
// floats: Pair in half.hpp, Float16x16 in reduce_f16c.cpp.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "half.hpp"
#include "reduction_job.hpp"
#include "operators.hpp"

namespace ringcomm {
namespace {

constexpr std::size_t kHalvesPerBlock = kBlockBytes / sizeof(std::uint16_t);

// A block of all sources of a job. Where less than a Word is left, copies filled up with zeros.
template <class H>
class Sources {
 public:
  static constexpr std::size_t kPerWord = sizeof(typename H::Word) / sizeof(std::uint16_t);

  Sources(const Job& job, std::size_t start, std::size_t count)
      : job_(job), start_(start), count_(count) {}

  const void* operator[](std::size_t k) {
    const auto* source = at<std::uint16_t>(job_.src[k], start_);
    if (count_ % kPerWord == 0) return source;
    std::memcpy(padded_[k % kMostFused], source, count_ * sizeof(std::uint16_t));
    return padded_[k % kMostFused];
  }

 private:
  const Job& job_;
  std::size_t start_, count_;
  std::uint16_t padded_[kMostFused][kPerWord] = {};
};

// float32 values of one block: the low and the high Parts of its Words.
struct Wide {
  float low[kHalvesPerBlock / 2], high[kHalvesPerBlock / 2];
};

struct Outcome {
  bool has_nan;
  std::size_t places;  // that hold the block
};

// As combine_block() for other dtypes. Returns whether a NaN came out.
template <class H, class O, bool kIsScaled, std::size_t... kNext, std::size_t... kPlace>
bool reduce_words(std::uint16_t* const* places, Sources<H>& sources, float scale, std::size_t words,
                  std::index_sequence<kNext...>, std::index_sequence<kPlace...>) {
  const void* const src[] = {sources[0], sources[kNext + 1]...};
  std::uint16_t* const dst[] = {places[kPlace]...};
  typename H::Noted noted{};
  RINGCOMM_INDEPENDENT
  for (std::size_t i = 0; i < words; ++i) {
    const typename H::Word first = H::load(src[0], i), next[] = {H::load(src[kNext + 1], i)...};
    typename H::Part low = H::low(first), high = H::high(first);
    ((low = O::of(low, H::low(next[kNext]))), ...);
    ((high = O::of(high, H::high(next[kNext]))), ...);
    if constexpr (kIsScaled) low = low * scale;
    if constexpr (kIsScaled) high = high * scale;
    noted = H::note_nan(noted, low, high);
    const typename H::Word joined = H::join(low, high);
    (H::store(dst[kPlace], i, joined), ...);
  }
  return H::is_any(noted);
}

template <class H>
void widen_words(Wide& wide, const void* source, std::size_t words) {
  for (std::size_t i = 0; i < words; ++i) {
    const typename H::Word word = H::load(source, i);
    H::store_part(wide.low, i, H::low(word));
    H::store_part(wide.high, i, H::high(word));
  }
}

template <class H, class O, std::size_t... kNext>
void combine_words(Wide& wide, Sources<H>& sources, std::size_t k, std::size_t words,
                   std::index_sequence<kNext...>) {
  const void* const src[] = {sources[k + kNext]...};
  RINGCOMM_INDEPENDENT
  for (std::size_t i = 0; i < words; ++i) {
    const typename H::Word next[] = {H::load(src[kNext], i)...};
    typename H::Part low = H::load_part(wide.low, i), high = H::load_part(wide.high, i);
    ((low = O::of(low, H::low(next[kNext]))), ...);
    ((high = O::of(high, H::high(next[kNext]))), ...);
    H::store_part(wide.low, i, low);
    H::store_part(wide.high, i, high);
  }
}

template <class H>
bool narrow_words(std::uint16_t* out, const Wide& wide, std::size_t words) {
  typename H::Noted noted{};
  for (std::size_t i = 0; i < words; ++i) {
    const typename H::Part low = H::load_part(wide.low, i), high = H::load_part(wide.high, i);
    noted = H::note_nan(noted, low, high);
    H::store(out, i, H::join(low, high));
  }
  return H::is_any(noted);
}

template <class H, class O>
Outcome reduce_in_passes(std::uint16_t* out, const Job& job, Sources<H>& sources,
                         std::size_t words) {
  Wide wide;
  widen_words<H>(wide, sources[0], words);
  std::size_t k = 1;
  for (; k + kMostFused <= job.n_src; k += kMostFused)
    combine_words<H, O>(wide, sources, k, words, std::make_index_sequence<kMostFused>());
  for (; k < job.n_src; ++k)
    combine_words<H, O>(wide, sources, k, words, std::make_index_sequence<1>());
  if (job.divisor != 1) {
    const std::size_t parts = words * sizeof(typename H::Part) / sizeof(float);
    job.divide(wide.low, parts, job.divisor);
    job.divide(wide.high, parts, job.divisor);
  }
  return {narrow_words<H>(out, wide, words), 1};
}

template <class H, class O, bool kIsScaled, std::size_t kSources>
Outcome reduce_sources(const Places<std::uint16_t>& places, const Job& job, Sources<H>& sources,
                       std::size_t words) {
  const float scale = 1.0f / static_cast<float>(job.divisor);
  using Next = std::make_index_sequence<kSources - 1>;
  using All = std::make_index_sequence<kSources>;
  using Two = std::make_index_sequence<2>;
  if constexpr (std::is_same_v<O, Sum> && kSources > 2)
    if (places.count >= kSources)
      return {reduce_words<H, O, kIsScaled>(places.at, sources, scale, words, Next(), All()),
              kSources};
  return {reduce_words<H, O, kIsScaled>(places.at, sources, scale, words, Next(), Two()),
          std::min<std::size_t>(places.count, 2)};
}

template <class H, class O, bool kIsScaled>
Outcome reduce_fused(const Places<std::uint16_t>& places, const Job& job, Sources<H>& sources,
                     std::size_t words) {
  if (job.n_src == 2) return reduce_sources<H, O, kIsScaled, 2>(places, job, sources, words);
  if (job.n_src == 3) return reduce_sources<H, O, kIsScaled, 3>(places, job, sources, words);
  return reduce_sources<H, O, kIsScaled, 4>(places, job, sources, words);
}

template <class H, class O>
Outcome reduce_halves_block(const Places<std::uint16_t>& places, const Job& job,
                            Sources<H>& sources, std::size_t words) {
  constexpr bool kMayScale = std::is_same_v<O, Sum>;
  const bool is_fusible = job.n_src >= 2 && job.n_src <= kMostFused;
  if (is_fusible && job.divisor == 1)
    return reduce_fused<H, O, false>(places, job, sources, words);
  if (is_fusible && kMayScale && is_power_of_two(job.divisor))
    return reduce_fused<H, O, kMayScale>(places, job, sources, words);
  return reduce_in_passes<H, O>(places.at[0], job, sources, words);
}

// As canonical(): one NaN for all. Where it is needed, which is rare, the block is in the cache.
template <class H>
void make_canonical(std::uint16_t* values, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i)
    values[i] = (values[i] & 0x7fffu) > H::kInf ? H::kNaN : values[i];
}

template <class H, class O>
void reduce_halves(const Job& job) {
  constexpr std::size_t kPerWord = Sources<H>::kPerWord;
  std::uint16_t padded[kPerWord];
  std::size_t n = 0;
  for (std::size_t start = 0; start < job.count; start += n) {
    const std::size_t rest = std::min(job.count - start, kHalvesPerBlock);
    const bool is_whole = rest >= kPerWord;
    n = is_whole ? rest / kPerWord * kPerWord : rest;
    const Places<std::uint16_t> wanted(job, start, job.n_dst);
    const auto places = is_whole ? wanted : Places<std::uint16_t>(padded);
    Sources<H> sources(job, start, n);
    Outcome outcome =
        reduce_halves_block<H, O>(places, job, sources, is_whole ? n / kPerWord : 1);
    std::uint16_t* const first = wanted.at[0];
    if (!is_whole) std::copy_n(padded, n, first);
    if (outcome.has_nan) make_canonical<H>(first, n);
    copy_on<std::uint16_t>(job, outcome.has_nan ? 1 : outcome.places, start, n);
  }
}

}  // namespace
}  // namespace ringcomm
