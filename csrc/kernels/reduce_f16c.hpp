#pragma once
#include "reduction_job.hpp"

namespace ringcomm {

bool has_f16c();

// Reduce float16 with the processor's own conversions; to be called only if has_f16c().
void sum_f16c(const Job& job);
void product_f16c(const Job& job);
void min_f16c(const Job& job);
void max_f16c(const Job& job);

// As float16_to_float32() and float32_to_float16() of convert.hpp.
void widen_f16c(float* dst, const void* src, std::size_t count);
void narrow_f16c(void* dst, const float* src, std::size_t count);

}  // namespace ringcomm
