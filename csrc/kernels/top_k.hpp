// The elements of the largest magnitude.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ringcomm {

// Writes the indices of the k largest magnitudes of x, ascending. NaN is larger than inf; of equal
// magnitudes the lower index is taken. x holds floats of itemsize 2, 4 or 8, aligned; count is less
// than 2^32, k at most count. Throws std::invalid_argument for other sizes.
void top_k(std::uint32_t* indices, std::size_t k, const void* x, std::size_t itemsize,
           std::size_t count);

}  // namespace ringcomm
