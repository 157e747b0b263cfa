// Rows copied to where a server reads them, and looked at on the way.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../kernels/dtype.hpp"

namespace ringcomm::ps {

// Copies n rows of `dim` floats, the order[i]-th first (null: in their order). Returns whether all
// of them are finite.
bool stage_rows(void* out, const void* rows, const std::int64_t* order, std::size_t n,
                std::size_t dim, DType dtype);

}  // namespace ringcomm::ps
