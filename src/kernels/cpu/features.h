// What this processor and operating system offer beyond what Highway tells.
#pragma once

#include <string>

namespace logitless::cpu {

// Empty, or why AMX bf16 tiles cannot be used. The first call asks the kernel for the tile state.
std::string amx_bf16_missing();
// Empty, or why AVX-512's bf16 dot product cannot be used.
std::string avx512_bf16_missing();
// Whether that dot product beats multiply-adds in fp32: on AMD's cores, not on Intel's.
bool dot_product_is_fast();

}  // namespace logitless::cpu
