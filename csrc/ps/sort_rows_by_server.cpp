#include "sort_rows_by_server.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "../kernels/target_clones.hpp"
#include "key_map.hpp"

namespace ringcomm::ps {
namespace {

// A number is finite unless all bits of its exponent are set: then no exponent is greater. (Counting
// those that are not is a sum of wide integers, which took twice as long as the copy.)
template <class Bits>
bool has_unbounded(const void* x, std::size_t n, Bits exponent) {
  const auto* const bits = static_cast<const Bits*>(x);
  Bits most = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const auto here = static_cast<Bits>(bits[i] & exponent);
    most = here > most ? here : most;
  }
  return most == exponent;
}

RINGCOMM_CLONES bool has_unbounded64(const void* x, std::size_t n) {
  return has_unbounded<std::uint64_t>(x, n, 0x7ff0000000000000u);
}
RINGCOMM_CLONES bool has_unbounded32(const void* x, std::size_t n) {
  return has_unbounded<std::uint32_t>(x, n, 0x7f800000u);
}
RINGCOMM_CLONES bool has_unbounded16(const void* x, std::size_t n, std::uint16_t exponent) {
  return has_unbounded<std::uint16_t>(x, n, exponent);
}

bool has_unbounded(const void* x, std::size_t n, DType dtype) {
  if (dtype == DType::float64) return has_unbounded64(x, n);
  if (dtype == DType::float32) return has_unbounded32(x, n);
  return has_unbounded16(x, n, dtype == DType::float16 ? 0x7c00u : 0x7f80u);
}

}  // namespace

bool all_finite(const void* x, std::size_t n, DType dtype) { return !has_unbounded(x, n, dtype); }

bool stage_rows(void* out, const void* rows, const std::int64_t* order, std::size_t n,
                std::size_t dim, DType dtype) {
  const std::size_t item = dtype == DType::float64 ? 8 : dtype == DType::float32 ? 4 : 2;
  const std::size_t nbytes = dim * item;
  // What is looked at is in the cache when it is copied.
  const std::size_t step = order == nullptr ? std::max<std::size_t>(1, 8192 / nbytes) : 1;
  bool is_finite = true;
  for (std::size_t i = 0; i < n; i += step) {
    const std::size_t some = std::min(step, n - i);
    const std::size_t from = order == nullptr ? i : static_cast<std::size_t>(order[i]);
    const std::byte* const x = static_cast<const std::byte*>(rows) + from * nbytes;
    is_finite &= !has_unbounded(x, some * dim, dtype);
    std::memcpy(static_cast<std::byte*>(out) + i * nbytes, x, some * nbytes);
  }
  return is_finite;
}

void deal_keys(const std::vector<CallKeys>& calls, std::uint32_t n_parts, std::size_t n_servers,
               std::uint64_t* keys, std::int64_t* order, std::int64_t* counts) {
  std::size_t n = 0;
  for (const CallKeys& call : calls) n += call.n;
  std::vector<std::uint32_t> owner(n);
  std::vector<std::size_t> next(n_servers * calls.size());
  std::fill_n(counts, next.size(), 0);
  std::size_t at = 0;
  for (std::size_t c = 0; c < calls.size(); ++c)
    for (std::size_t i = 0; i < calls[c].n; ++i, ++at) {
      owner[at] = calls[c].owners[partition_of(calls[c].keys[i], n_parts)];
      if (owner[at] >= n_servers) throw std::out_of_range("owners: there are not so many servers");
      ++counts[owner[at] * calls.size() + c];
    }
  for (std::size_t k = 1; k < next.size(); ++k)
    next[k] = next[k - 1] + static_cast<std::size_t>(counts[k - 1]);
  at = 0;
  for (std::size_t c = 0; c < calls.size(); ++c)
    for (std::size_t i = 0; i < calls[c].n; ++i, ++at) {
      const std::size_t to = next[owner[at] * calls.size() + c]++;
      keys[to] = calls[c].keys[i];
      order[to] = static_cast<std::int64_t>(i);
    }
}

}  // namespace ringcomm::ps
