#include "top_k.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <vector>

#include "target_clones.hpp"

namespace ringcomm {
namespace {

constexpr std::size_t kGroup = 16;  // elements that are skipped together if all are too small

// The bits of a magnitude are ordered as magnitudes are, with inf and then NaN on top.
template <class Bits>
Bits magnitude(Bits bits) {
  return bits & (std::numeric_limits<Bits>::max() / 2);
}

// The k-th largest, which is then at place k - 1, with what is as large or larger before it.
template <class Bits>
Bits kth_largest(std::vector<Bits>& magnitudes, std::size_t k) {
  const auto kth = magnitudes.begin() + static_cast<std::ptrdiff_t>(k - 1);
  std::nth_element(magnitudes.begin(), kth, magnitudes.end(), std::greater<Bits>());
  return *kth;
}

// A magnitude that nearly always k elements reach, and not many more: from a sample, with four
// standard deviations to spare.
template <class Bits>
Bits guess_least(const Bits* x, std::size_t count, std::size_t k) {
  const std::size_t stride = count / std::clamp<std::size_t>(count / 64, 1024, 16384);
  if (stride < 2) return 0;
  std::vector<Bits> sample;
  for (std::size_t i = stride / 2; i < count; i += stride) sample.push_back(magnitude(x[i]));
  const double expected = static_cast<double>(k) / static_cast<double>(stride);
  const auto rank = static_cast<std::size_t>(expected + 4 * std::sqrt(expected) + 8);
  return rank < sample.size() ? kth_largest(sample, rank) : 0;
}

template <class Bits>
bool has_any(const Bits* x, std::size_t count, Bits least) {
  Bits found = 0;
  for (std::size_t i = 0; i < count; ++i) found |= magnitude(x[i]) >= least ? Bits{1} : Bits{0};
  return found != 0;
}

// Appends the indices of what is not smaller, ascending.
template <class Bits>
void collect(std::vector<std::uint32_t>& found, const Bits* x, std::size_t count, Bits least) {
  std::uint32_t group[kGroup];
  for (std::size_t start = 0, n; start < count; start += n) {
    n = std::min(kGroup, count - start);
    if (n == kGroup && !has_any(x + start, kGroup, least)) continue;
    std::size_t n_found = 0;
    for (std::size_t i = start; i < start + n; ++i) {  // no branch, for one would be mispredicted
      group[n_found] = static_cast<std::uint32_t>(i);
      n_found += magnitude(x[i]) >= least ? 1u : 0u;
    }
    found.insert(found.end(), group, group + n_found);
  }
}

RINGCOMM_CLONES void collect_16(std::vector<std::uint32_t>& found, const std::uint16_t* x,
                                std::size_t count, std::uint16_t least) {
  collect(found, x, count, least);
}
RINGCOMM_CLONES void collect_32(std::vector<std::uint32_t>& found, const std::uint32_t* x,
                                std::size_t count, std::uint32_t least) {
  collect(found, x, count, least);
}
RINGCOMM_CLONES void collect_64(std::vector<std::uint32_t>& found, const std::uint64_t* x,
                                std::size_t count, std::uint64_t least) {
  collect(found, x, count, least);
}

template <class Bits, class Collect>
void select(std::uint32_t* indices, std::size_t k, const void* data, std::size_t count,
            Collect collect_all) {
  if (k == 0) return;
  const auto* x = static_cast<const Bits*>(data);
  std::vector<std::uint32_t> found;
  found.reserve(2 * k);
  const Bits guess = guess_least(x, count, k);
  collect_all(found, x, count, guess);
  if (found.size() < k) {
    found.clear();
    collect_all(found, x, count, Bits{0});
  }
  std::vector<Bits> magnitudes;
  magnitudes.reserve(found.size());
  for (const std::uint32_t i : found) magnitudes.push_back(magnitude(x[i]));
  const Bits least = kth_largest(magnitudes, k);
  const auto kth = magnitudes.begin() + static_cast<std::ptrdiff_t>(k);
  auto n_equal = std::count(magnitudes.begin(), kth, least);
  for (const std::uint32_t i : found) {
    const Bits mine = magnitude(x[i]);
    if (mine > least || (mine == least && n_equal-- > 0)) *indices++ = i;
  }
}

}  // namespace

void top_k(std::uint32_t* indices, std::size_t k, const void* x, std::size_t itemsize,
           std::size_t count) {
  if (itemsize == 2) return select<std::uint16_t>(indices, k, x, count, collect_16);
  if (itemsize == 4) return select<std::uint32_t>(indices, k, x, count, collect_32);
  if (itemsize == 8) return select<std::uint64_t>(indices, k, x, count, collect_64);
  throw std::invalid_argument("top_k: elements of 2, 4 or 8 bytes only");
}

}  // namespace ringcomm
