// Blocks of floats as int8 with a scale each, rounded at random so that the mean is right.
#pragma once
#include <cstddef>
#include <cstdint>

#include "dtype_and_op_codes.hpp"

namespace ringcomm {

// Bytes of the scale of a block: float64 for float64, else float32. Throws std::invalid_argument
// for what is not float16, float32 or float64.
std::size_t scale_nbytes(DType dtype);

// For blocks of `block` elements, the last of which may be shorter: scales[b] = the largest
// magnitude / 127, but at least the smallest normal number; codes[i] = floor(x[i] / scale + u),
// with u uniform in [0, 1) from (seed, draw, i) alone. A block that holds NaN or inf has the scale
// NaN. The bits depend on the arguments alone, not on the instruction set. x is aligned; scales and
// codes, which may lie in a message, need not be. block is at least 1.
void encode_int8(void* scales, std::int8_t* codes, const void* x, DType dtype, std::size_t count,
                 std::size_t block, std::uint64_t seed, std::uint64_t draw);

// x[i] = codes[i] * scale.
void decode_int8(void* x, DType dtype, const void* scales, const std::int8_t* codes,
                 std::size_t count, std::size_t block);

}  // namespace ringcomm
