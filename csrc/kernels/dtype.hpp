// The element types a kernel can be asked for. The order is the wire code of
// ringcomm/arrays/dtypes.py; a test compares the two.
#pragma once
#include <cstdint>

namespace ringcomm {

enum class DType : int { float16 = 0, bfloat16, float32, float64, int32, int64 };

}  // namespace ringcomm
