// Which of the instruction sets they are compiled for the tensor kernels run with.
#pragma once

#include <cstdint>
#include <string_view>

namespace logitless::cpu {

struct TensorLevel {
  std::int64_t targets = 0;  // of Highway, to choose the best from; 0: the portable one
  bool tiles = false;        // bf16 products by AMX tiles,
  bool dot = false;          // by AVX-512's dot product,
  bool emulated = false;     // or by tiles in plain C++
};

// What a kernel of the head is named after (kernel_names()), for those of tensors; "": the best of
// this processor. The name is known, and this processor can run it.
TensorLevel tensor_level_of(std::string_view kernel);

// That of LOGITLESS_CPU when first asked for. Scratch sizes depend on it, so it stays, but for
// tests, which set it while no kernel runs.
const TensorLevel& tensor_level();
void set_tensor_level(const TensorLevel& level);

// Highway's name of the instruction set that this leads to.
std::string_view tensor_target();

}  // namespace logitless::cpu
