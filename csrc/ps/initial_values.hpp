// The values of a row before its first update: a pure function of (seed, table, key), with the same
// bits on every machine, in any order, whether the row was touched before or not.
//
// A key has its own stream of SplitMix64 (Steele et al. 2014, doi:10.1145/2660193.2660195), column j
// the j-th number of it. Normal numbers come from the inverse of the distribution (Wichura 1988,
// AS 241, doi:10.2307/2347330) in float64 with + - * / and sqrt alone, which IEEE 754 defines to the
// last bit: a logarithm of the C library would differ between machines.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

namespace ringcomm::ps {

// The order is that of the codes in ringcomm/ps/initializers.py.
enum class Initializer : int { constant = 0, uniform, normal, truncated_normal };

// Parameters: constant (value); uniform (low, high); normal (mean, std); truncated_normal (mean,
// std, low, high, and the distribution function of the standard normal at both bounds).
struct Initial {
  Initializer initializer;
  std::array<double, 6> parameters;
  std::uint64_t seed, table;
};

// Throws invalid_argument for an unknown code or a wrong number of parameters.
Initial initial_of(int code, const double* parameters, std::size_t n, std::uint64_t seed,
                   std::uint64_t table);

template <class T>
void fill_row(const Initial& initial, std::uint64_t key, T* out, std::size_t dim);

}  // namespace ringcomm::ps
