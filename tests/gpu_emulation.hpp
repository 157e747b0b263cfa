// CUDA on the CPU, as far as ringcomm/gpu/kernels/kernels.cu uses it. Threads run one after the other.
#pragma once
#include <cstddef>
#include <cstring>
#include <utility>

// Of csrc/kernels, for the conversions that kernels.cu has in PTX.
#define widen_float16 widen_float16_of_cpu
#define narrow_float16 narrow_float16_of_cpu
#include "half.hpp"
#undef widen_float16
#undef narrow_float16

#define RC_EMULATED
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

struct Triple {
  unsigned x = 0, y = 0, z = 0;
};
static Triple blockIdx, threadIdx, blockDim, gridDim;

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
inline double __longlong_as_double(long long x) { return bits_as<double>(x); }
inline long long __double_as_longlong(double x) { return bits_as<long long>(x); }

// A vector that is not at a multiple of 16 bytes ends a program on a GPU, as it does here.
inline void require_aligned(const void* at) {
  if (reinterpret_cast<std::size_t>(at) % sizeof(uint4) != 0) __builtin_trap();
}
inline uint4 __ldcs(const uint4* from) {
  require_aligned(from);
  uint4 x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline void __stcs(uint4* to, uint4 x) {
  require_aligned(to);
  std::memcpy(static_cast<void*>(to), &x, sizeof x);
}

namespace ringcomm {

// As a GPU's instructions: a NaN loses its sign and its payload.
inline float widen_float16(std::uint16_t half) {
  const bool is_nan = (half & 0x7fffu) > 0x7c00u;
  return is_nan ? __uint_as_float(0x7fffffffu) : widen_float16_of_cpu(half);
}
inline std::uint16_t narrow_float16(float value) {
  return value != value ? 0x7fffu : static_cast<std::uint16_t>(narrow_float16_of_cpu(value));
}

}  // namespace ringcomm

namespace emulated {

// `arguments` are the addresses of the kernel's parameters.
template <class... A, std::size_t... k>
void run(void (*kernel)(A...), void** arguments, std::index_sequence<k...>) {
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x)
      kernel(*static_cast<A*>(arguments[k])...);
}
// As cuLaunchKernel(), with parameters in one buffer. Returns false if it has another length.
template <class... A>
bool run(void (*kernel)(A...), unsigned grid, unsigned block, char* parameters, std::size_t nbytes) {
  std::size_t end = 0;
  const auto place = [&](std::size_t size, std::size_t alignment) -> void* {
    const std::size_t begin = (end + alignment - 1) / alignment * alignment;
    end = begin + size;
    return parameters + begin;
  };
  void* arguments[] = {place(sizeof(A), alignof(A))...};
  if (end != nbytes) return false;
  gridDim.x = grid;
  blockDim.x = block;
  run(kernel, arguments, std::index_sequence_for<A...>());
  return true;
}

}  // namespace emulated
