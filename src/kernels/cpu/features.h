// What this processor and operating system offer beyond what Highway tells.
#pragma once

#include <string>

namespace logitless::cpu {

// Empty, or why AMX bf16 tiles cannot be used. The first call asks the kernel for the tile state.
std::string amx_bf16_missing();
// Empty, or why AVX-512's bf16 dot product cannot be used.
std::string avx512_bf16_missing();

}  // namespace logitless::cpu
