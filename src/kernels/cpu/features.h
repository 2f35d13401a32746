// Features of this processor and operating system that Highway does not report.
#pragma once

#include <string>

namespace logitless::cpu {

// Returns why AMX bf16 tiles cannot be used, or empty. The first call requests the tile state.
std::string amx_bf16_missing();
// Returns why AVX-512's bf16 dot product cannot be used, or empty.
std::string avx512_bf16_missing();
// Returns true if that dot product beats fp32 multiply-adds: on AMD's cores, not on Intel's.
bool dot_product_is_fast();

}  // namespace logitless::cpu
