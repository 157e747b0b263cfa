#pragma once
#include "job.hpp"

namespace ringcomm {

bool has_f16c();

// Reduce float16 with the processor's own conversions; to be called only if has_f16c().
void sum_f16c(const Job& job);
void product_f16c(const Job& job);
void min_f16c(const Job& job);
void max_f16c(const Job& job);

}  // namespace ringcomm
