#include "halo.hpp"

#include <algorithm>
#include <cstring>

namespace ringcomm {
namespace {

template <std::size_t kNbytes>
void copy_runs(std::byte* to, std::ptrdiff_t to_stride, const std::byte* from, std::ptrdiff_t from_stride,
               std::size_t n) {
  for (std::size_t i = 0; i < n; ++i, to += to_stride, from += from_stride) std::memcpy(to, from, kNbytes);
}

// Copies n runs; those of a common size by one instruction each.
void copy_runs_of(std::size_t nbytes, std::byte* to, std::ptrdiff_t to_stride, const std::byte* from,
                  std::ptrdiff_t from_stride, std::size_t n) {
  switch (nbytes) {
    case 1: return copy_runs<1>(to, to_stride, from, from_stride, n);
    case 2: return copy_runs<2>(to, to_stride, from, from_stride, n);
    case 4: return copy_runs<4>(to, to_stride, from, from_stride, n);
    case 8: return copy_runs<8>(to, to_stride, from, from_stride, n);
    case 16: return copy_runs<16>(to, to_stride, from, from_stride, n);
    default:
      for (std::size_t i = 0; i < n; ++i, to += to_stride, from += from_stride) std::memcpy(to, from, nbytes);
  }
}

using Outer = std::vector<std::pair<std::size_t, std::ptrdiff_t>>;

// Calls copy(array, buffer, length, stride of the array) for each line of runs; returns the end of the buffer.
template <class Byte, class Other, class Copy>
Other* for_lines(const Outer& outer, std::size_t depth, Byte* array, Other* buffer, std::size_t run_nbytes,
                 const Copy& copy) {
  const auto [length, stride] = outer[depth];
  if (depth + 1 == outer.size()) {
    copy(array, buffer, length, stride);
    return buffer + length * run_nbytes;
  }
  for (std::size_t i = 0; i < length; ++i, array += stride)
    buffer = for_lines(outer, depth + 1, array, buffer, run_nbytes, copy);
  return buffer;
}

}  // namespace

void Cells::pack(const std::byte* array) const {
  if (buffer == nullptr) return;
  const auto run = static_cast<std::ptrdiff_t>(run_nbytes);
  for_lines(outer, 0, array + offset, buffer, run_nbytes,
            [&](const std::byte* from, std::byte* to, std::size_t n, std::ptrdiff_t stride) {
              copy_runs_of(run_nbytes, to, run, from, stride, n);
            });
}

void Cells::unpack(std::byte* array) const {
  if (buffer == nullptr) return;
  const auto run = static_cast<std::ptrdiff_t>(run_nbytes);
  for_lines(outer, 0, array + offset, buffer, run_nbytes,
            [&](std::byte* to, const std::byte* from, std::size_t n, std::ptrdiff_t stride) {
              copy_runs_of(run_nbytes, to, stride, from, run, n);
            });
}

std::optional<Refusal> KnownHalo::run(std::byte* array, std::int64_t limit_ns,
                                      std::vector<std::shared_ptr<PeerMessage>>& rests) const {
  const auto parcels_of = [&](const std::vector<Side>& sides) {
    std::vector<Parcel> parcels;
    parcels.reserve(sides.size());
    for (const Side& each : sides) {
      const Cells& cells = each.cells;
      parcels.push_back({each.envelope, each.tag, cells.buffer != nullptr ? cells.buffer : array + cells.offset});
    }
    return parcels;
  };
  for (const Side& each : sends_) each.cells.pack(array);
  auto refusal = messages_->exchange_all(parcels_of(sends_), parcels_of(receives_), limit_ns, rests);
  const bool is_over = std::all_of(rests.begin(), rests.end(), [](const auto& rest) { return rest == nullptr; });
  if (!refusal && is_over)
    for (const Side& each : receives_) each.cells.unpack(array);
  return refusal;
}

}  // namespace ringcomm
