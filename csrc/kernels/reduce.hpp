// Reduction kernels: plain loops over contiguous memory, no allocation, no locks.
// Pointers must be aligned for their element type. Ranges must not overlap, but a destination may
// be the very same range as a source.
#pragma once
#include <cstddef>

#include "dtype_and_op_codes.hpp"

namespace ringcomm {

constexpr std::size_t kMostAveraged = std::size_t{1} << 16;  // integers, see SumOf

std::size_t itemsize(DType dtype);
std::size_t alignment(DType dtype);

// Throws std::invalid_argument unless data is a whole number of aligned elements; returns how many.
std::size_t require_elements(DType dtype, const void* data, std::size_t nbytes);

// Every dst[j][i] = ((src[0][i] op src[1][i]) op src[2][i] ...) / divisor, computed once.
//
// Integers wrap, but not in an average, where divisor is n_src or more; quotients are truncated
// toward zero. bool: sum and max are "or", product and min are "and". NaN wins in min and max.
// 16-bit floats are reduced and divided in float32 and rounded once. The bits of an element depend
// on the bits of its sources alone, not on the instruction set, nor on where a range begins and
// ends: a NaN that was computed is always the same one. n_dst, n_src and divisor are at least 1.
// Throws std::invalid_argument where op or divisor mean nothing for dtype.
void reduce_many(Op op, DType dtype, void* const* dst, std::size_t n_dst, const void* const* src,
                 std::size_t n_src, std::size_t count, std::size_t divisor);

// dst[i] = dst[i] op src[i], as above. Throws std::invalid_argument also for 16-bit floats, which
// would be rounded at every step.
void combine(Op op, DType dtype, void* dst, const void* src, std::size_t count);

// data[i] /= divisor; integers truncate toward zero. divisor > 0. Not for bool and 16-bit floats.
void divide(DType dtype, void* data, std::size_t count, std::size_t divisor);

// dst[i] = (src[0][i] op src[1][i]) op ..., of 16-bit floats in float32, and not rounded. dst overlaps
// no source. Throws std::invalid_argument for other dtypes.
void reduce_to_float32(Op op, DType dtype, float* dst, const void* const* src, std::size_t n_src,
                       std::size_t count);

// reduce_many() to one destination.
void combine_at_once(Op op, DType dtype, void* out, const void* const* sources,
                     std::size_t n_sources, std::size_t count, std::size_t divisor);

}  // namespace ringcomm
