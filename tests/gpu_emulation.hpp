// CUDA on the CPU, as far as ringcomm/gpu/kernels/kernels.cu uses it. Threads run one after the other;
// those of a warp in turns, if they talk to each other.
#pragma once
#include <math.h>
#include <ucontext.h>

#include <cstddef>
#include <cstring>
#include <utility>

#include "half.hpp"  // of csrc/kernels, for the conversions that stand there in PTX

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

namespace emulated {

constexpr unsigned kWarp = 32;

// The threads of a warp, each with a stack of its own: they take turns at every shuffle.
class Warp {
 public:
  template <class Body>
  static void run(unsigned first_thread, Body& body) {
    static char stacks[kWarp][1 << 16];
    body_ = [](void* it) { (*static_cast<Body*>(it))(); };
    argument_ = &body;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      is_done_[lane] = false;
      getcontext(&threads_[lane]);
      threads_[lane].uc_stack.ss_sp = stacks[lane];
      threads_[lane].uc_stack.ss_size = sizeof stacks[lane];
      threads_[lane].uc_link = &caller_;
      makecontext(&threads_[lane], &Warp::main, 0);
    }
    for (unsigned n_done = 0; n_done < kWarp;) {
      if (n_done > 0) __builtin_trap();  // some lanes are no more, others wait for them
      for (lane_ = 0; lane_ < kWarp; ++lane_) {
        threadIdx.x = first_thread + lane_;
        swapcontext(&caller_, &threads_[lane_]);
        n_done += is_done_[lane_];
      }
    }
  }

  static unsigned exchange(unsigned value, unsigned distance) {
    slots_[lane_] = value;
    yield();
    const unsigned other = slots_[lane_ ^ distance];
    yield();
    return other;
  }

 private:
  static void main() {
    body_(argument_);
    is_done_[lane_] = true;
  }
  static void yield() { swapcontext(&threads_[lane_], &caller_); }

  inline static void (*body_)(void*);
  inline static void* argument_;
  inline static unsigned lane_;
  inline static unsigned slots_[kWarp];
  inline static bool is_done_[kWarp];
  inline static ucontext_t caller_, threads_[kWarp];
};

// As cuLaunchKernel(): `arguments` are the addresses of what the kernel takes by value.
template <class... A, std::size_t... k>
void run(void (*kernel)(A...), void** arguments, std::index_sequence<k...>, bool has_warps) {
  auto body = [&] { kernel(*static_cast<A*>(arguments[k])...); };
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
    for (unsigned thread = 0; thread < blockDim.x; thread += has_warps ? kWarp : 1) {
      threadIdx.x = thread;
      has_warps ? Warp::run(thread, body) : body();
    }
}
template <class... A>
void run(void (*kernel)(A...), unsigned grid, unsigned block, void** arguments, bool has_warps) {
  gridDim.x = grid;
  blockDim.x = block;
  run(kernel, arguments, std::index_sequence_for<A...>(), has_warps);
}

// The sizes of what the kernel takes; returns how many there are.
template <class... A>
std::size_t parameters(void (*)(A...), std::size_t* sizes) {
  ((*sizes++ = sizeof(A)), ...);
  return sizeof...(A);
}

}  // namespace emulated

inline unsigned __shfl_xor_sync(unsigned, unsigned value, int distance) {
  return emulated::Warp::exchange(value, static_cast<unsigned>(distance));
}
