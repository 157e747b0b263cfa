#include "initial_values.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <stdexcept>
#include <string>

#include "../kernels/target_clones.hpp"
#include "../kernels/fp_environment.hpp"

namespace ringcomm::ps {
namespace {

constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15ull;

inline std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// Where the stream of a key begins; different keys of a table begin at different places.
std::uint64_t start_of(const Initial& initial, std::uint64_t key) {
  return mix(mix(mix(initial.seed + kGolden) + initial.table) + key);
}

inline std::uint64_t bits_at(std::uint64_t start, std::size_t column) {
  return mix(start + (column + 1) * kGolden);
}

// log(x) of a positive number, to 2 units in the last place: log(m) = 2 artanh((m - 1) / (m + 1)).
double log_of(double x) {
  int exponent;
  double m = std::frexp(x, &exponent);
  if (m < 0.70710678118654752) {
    m = m * 2;
    exponent -= 1;
  }
  const double s = (m - 1) / (m + 1), z = s * s;
  double sum = 0;
  for (int k = 23; k >= 3; k -= 2) sum = (sum + 1.0 / k) * z;
  return exponent * 0.69314718055994531 + 2 * (s + s * sum);
}

inline double ratio(const double (&num)[8], const double (&den)[8], double r) {
  double n = num[0], d = den[0];
  for (int k = 1; k < 8; ++k) {
    n = n * r + num[k];
    d = d * r + den[k];
  }
  return n / d;
}

// The coefficients of AS 241's PPND16, highest power first.
constexpr double kMiddleNum[] = {2.5090809287301226727e+3, 3.3430575583588128105e+4,
                                 6.7265770927008700853e+4, 4.5921953931549871457e+4,
                                 1.3731693765509461125e+4, 1.9715909503065514427e+3,
                                 1.3314166789178437745e+2, 3.3871328727963666080e+0};
constexpr double kMiddleDen[] = {5.2264952788528545610e+3, 2.8729085735721942674e+4,
                                 3.9307895800092710610e+4, 2.1213794301586595867e+4,
                                 5.3941960214247511077e+3, 6.8718700749205790830e+2,
                                 4.2313330701600911252e+1, 1.0};
constexpr double kTailNum[] = {7.74545014278341407640e-4, 2.27238449892691845833e-2,
                               2.41780725177450611770e-1, 1.27045825245236838258e+0,
                               3.64784832476320460504e+0, 5.76949722146069140550e+0,
                               4.63033784615654529590e+0, 1.42343711074968357734e+0};
constexpr double kTailDen[] = {1.05075007164441684324e-9, 5.47593808499534494600e-4,
                               1.51986665636164571966e-2, 1.48103976427480074590e-1,
                               6.89767334985100004550e-1, 1.67638483018380384940e+0,
                               2.05319162663775882187e+0, 1.0};
constexpr double kFarNum[] = {2.01033439929228813265e-7, 2.71155556874348757815e-5,
                              1.24266094738807843860e-3, 2.65321895265761230930e-2,
                              2.96560571828504891230e-1, 1.78482653991729133580e+0,
                              5.46378491116411436990e+0, 6.65790464350110377720e+0};
constexpr double kFarDen[] = {2.04426310338993978564e-15, 1.42151175831644588870e-7,
                              1.84631831751005468180e-5, 7.86869131145613259100e-4,
                              1.48753612908506148525e-2, 1.36929880922735805310e-1,
                              5.99832206555887937690e-1, 1.0};
constexpr double kMiddle = 0.425;  // |p - 0.5| up to which the first quotient holds

double tail(double p) {
  const double q = p - 0.5;
  const double r = std::sqrt(-log_of(q <= 0 ? p : 1 - p));
  const double x = r <= 5 ? ratio(kTailNum, kTailDen, r - 1.6) : ratio(kFarNum, kFarDen, r - 5);
  return q < 0 ? -x : x;
}

constexpr std::size_t kChunk = 64;

// Columns start + [0, n) of a stream: the points of the standard normal distribution where it
// reaches `low` + u * `width`, u uniform in (0, 1). Five of six lie in the middle, whose loop
// vectorises; the others are mended after it.
RINGCOMM_CLONES void normal_points(double* out, std::uint64_t stream, std::size_t start,
                                   std::size_t n, double low, double width) {
  double p[kChunk];
  for (std::size_t j = 0; j < n; ++j) {
    const std::uint64_t bits = bits_at(stream, start + j) >> 12;
    p[j] = low + (static_cast<double>(bits) + 0.5) * 0x1p-52 * width;
  }
  for (std::size_t j = 0; j < n; ++j) {
    const double q = p[j] - 0.5;
    out[j] = ratio(kMiddleNum, kMiddleDen, 0.180625 - q * q) * q;
  }
  for (std::size_t j = 0; j < n; ++j)
    if (std::abs(p[j] - 0.5) > kMiddle) out[j] = tail(p[j]);
}

template <class T>
void fill_uniform(const Initial& initial, std::uint64_t key, T* out, std::size_t dim) {
  const std::uint64_t stream = start_of(initial, key);
  const double low = initial.parameters[0], width = initial.parameters[1] - low;
  for (std::size_t j = 0; j < dim; ++j) {
    const auto u = static_cast<double>(bits_at(stream, j) >> 11) * 0x1p-53;
    out[j] = static_cast<T>(low + u * width);
  }
}

template <class T>
void fill_normal(const Initial& initial, std::uint64_t key, T* out, std::size_t dim) {
  const auto& [mean, std, least, most, low, high] = initial.parameters;
  const bool is_cut = initial.initializer == Initializer::truncated_normal;
  const std::uint64_t stream = start_of(initial, key);
  double x[kChunk];
  for (std::size_t start = 0; start < dim; start += kChunk) {
    const std::size_t n = std::min(kChunk, dim - start);
    normal_points(x, stream, start, n, is_cut ? low : 0, is_cut ? high - low : 1);
    for (std::size_t j = 0; j < n; ++j) {
      const double value = mean + std * x[j];
      out[start + j] = static_cast<T>(is_cut ? std::clamp(value, least, most) : value);
    }
  }
}

constexpr std::size_t kParametersOf[] = {1, 2, 2, 6};

}  // namespace

Initial initial_of(int code, const double* parameters, std::size_t n, std::uint64_t seed,
                   std::uint64_t table) {
  if (code < 0 || static_cast<std::size_t>(code) >= std::size(kParametersOf))
    throw std::invalid_argument("initializer: no code " + std::to_string(code));
  if (n != kParametersOf[code])
    throw std::invalid_argument("initializer: code " + std::to_string(code) + " has " +
                                std::to_string(kParametersOf[code]) + " parameters, got " +
                                std::to_string(n));
  Initial initial{static_cast<Initializer>(code), {}, seed, table};
  std::copy_n(parameters, n, initial.parameters.begin());
  return initial;
}

template <class T>
void fill_row(const Initial& initial, std::uint64_t key, T* out, std::size_t dim) {
  const DefaultFpEnvironment here;
  if (initial.initializer == Initializer::constant)
    std::fill_n(out, dim, static_cast<T>(initial.parameters[0]));
  else if (initial.initializer == Initializer::uniform)
    fill_uniform(initial, key, out, dim);
  else
    fill_normal(initial, key, out, dim);
}
template void fill_row<float>(const Initial&, std::uint64_t, float*, std::size_t);
template void fill_row<double>(const Initial&, std::uint64_t, double*, std::size_t);

}  // namespace ringcomm::ps
