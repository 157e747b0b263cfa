// Floating-point dtypes into each other, rounded once, to nearest, ties to even.
#pragma once
#include <cstddef>
#include <cstdint>

#include "dtype_and_op_codes.hpp"

namespace ringcomm {

// dst[i] = src[i], one of them float32 or float64, the other float16 or bfloat16. What is too large
// becomes inf. Every NaN becomes the dtype's quiet one when narrowed, so that the bits do not
// depend on the processor. The 16-bit side, which may lie in a message, needs no alignment; ranges
// must not overlap. Throws std::invalid_argument for other dtypes.
void convert(void* dst, DType to, const void* src, DType from, std::size_t count);

// As above, for kernels that work on float32 piece by piece.
void float16_to_float32(float* dst, const void* src, std::size_t count);
void float32_to_float16(void* dst, const float* src, std::size_t count);

}  // namespace ringcomm
