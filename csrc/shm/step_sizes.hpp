// The sizes in which steps move what they move.
#pragma once
#include <cstddef>

namespace ringcomm {

constexpr std::size_t kPiece = 256u << 10;    // of each buffer, before other work gets its turn
constexpr std::size_t kSegment = 256u << 10;  // of each buffer, on its way through the lanes
constexpr std::size_t kReadable = 64u << 10;  // of private memory that is read where it is
constexpr std::size_t kLine = 64;             // of a processor's cache, at which shares begin

constexpr std::size_t n_parts(std::size_t nbytes, std::size_t part) {
  return (nbytes + part - 1) / part;
}

}  // namespace ringcomm
