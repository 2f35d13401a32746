// Instruction set of the tensor kernels, chosen among the compiled ones.
#pragma once

#include <cstdint>
#include <string_view>

namespace logitless::cpu {

struct TensorLevel {
  std::int64_t targets = 0;  // Highway targets to choose the best from; 0: the portable one
  bool tiles = false;        // bf16 GEMM by AMX tiles,
  bool dot = false;          // by AVX-512's dot product,
  bool emulated = false;     // or by emulated tiles in plain C++
};

// Returns the level that a head kernel's name (kernel_names()) stands for; "": the best of this
// processor. The name must be known, and this processor must support it.
TensorLevel tensor_level_of(std::string_view kernel);

// Level of LOGITLESS_CPU at the first call. It then stays, since scratch sizes depend on it. Only
// tests set it, while no kernel runs.
const TensorLevel& tensor_level();
void set_tensor_level(const TensorLevel& level);

// Highway's name of the chosen instruction set.
std::string_view tensor_target();

}  // namespace logitless::cpu
