// float16 as processors without F16C reduce it, for test_kernel_reduce_many.py.
#include "reduce_half_loops.hpp"
#include "reduce_loops.hpp"

extern "C" void reduce_float16(int op, void* dst, const void* const* src, int n_src, int count,
                               int divisor) {
  using namespace ringcomm;
  constexpr void (*kByOp[])(const Job&) = {
      reduce_halves<Float16Pair, Sum>, reduce_halves<Float16Pair, Product>,
      reduce_halves<Float16Pair, Min>, reduce_halves<Float16Pair, Max>};
  const auto size = [](int n) { return static_cast<std::size_t>(n); };
  kByOp[op]({&dst, 1, src, size(n_src), size(count), size(divisor), divide_range<float>});
}
