// Reduction kernels: plain loops over contiguous memory, no allocation, no locks.
// Pointers must be aligned for their element type; ranges must not overlap.
#pragma once
#include <cstddef>

#include "dtype.hpp"

namespace ringcomm {

std::size_t itemsize(DType dtype);

// dst[i] += src[i]; integers wrap. float32, float64, int32, int64.
void add(DType dtype, void* dst, const void* src, std::size_t count);

// data[i] /= divisor; integers truncate toward zero. divisor > 0. Same dtypes as add.
void divide(DType dtype, void* data, std::size_t count, std::size_t divisor);

// out[i] = round16(((sources[0][i] + sources[1][i]) + ...) / divisor), accumulated in float32
// and rounded once. float16 and bfloat16. out may be one of the sources.
void sum_rounded(DType dtype, void* out, const void* const* sources, std::size_t n_sources,
                 std::size_t count, std::size_t divisor);

}  // namespace ringcomm
