// The element types and operators a kernel can be asked for. The orders are the codes of
// ringcomm/arrays/dtypes.py and ringcomm/collectives/operators.py; a test compares them.
#pragma once
#include "../checked_enum_cast.hpp"

namespace ringcomm {

enum class DType : int {
  float16 = 0, bfloat16, float32, float64, int8, int16, int32, int64,
  uint8, uint16, uint32, uint64, boolean, complex64, complex128
};
constexpr DType last(DType) { return DType::complex128; }

enum class Op : int { sum = 0, product, min, max, band, bor, bxor };
constexpr Op last(Op) { return Op::bxor; }

}  // namespace ringcomm
