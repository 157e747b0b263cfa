// Reduction kernels: plain loops over contiguous memory, no allocation, no locks.
// Pointers must be aligned for their element type; ranges must not overlap.
#pragma once
#include <cstddef>

#include "dtype.hpp"

namespace ringcomm {

std::size_t itemsize(DType dtype);
std::size_t alignment(DType dtype);

// dst[i] = dst[i] op src[i]. Integers wrap; bool: sum and max are "or", product and min are "and";
// NaN wins in min and max. Throws std::invalid_argument where op means nothing for dtype, and for
// 16-bit floats, which would be rounded at every step.
void combine(Op op, DType dtype, void* dst, const void* src, std::size_t count);

// data[i] /= divisor; integers truncate toward zero. divisor > 0. Not for bool and 16-bit floats.
void divide(DType dtype, void* data, std::size_t count, std::size_t divisor);

// out[i] = round16(((sources[0][i] op sources[1][i]) op ...) / divisor), in float32, rounded once.
// float16 and bfloat16; sum, product, min, max. out may be one of the sources.
void combine_rounded(Op op, DType dtype, void* out, const void* const* sources,
                     std::size_t n_sources, std::size_t count, std::size_t divisor);

// Every dst[j][i] = ((src[0][i] op src[1][i]) op ...) / divisor.
void reduce_many(Op op, DType dtype, void* const* dst, std::size_t n_dst, const void* const* src,
                 std::size_t n_src, std::size_t count, std::size_t divisor);

}  // namespace ringcomm
