// Heads of a trained language model, which the tests of them look for in LOGITLESS_DATA_DIR.
#pragma once

#include <string>

#include "logitless/tensor_file.h"
#include "support/problem.h"

namespace logitless::test {

// Of real_head_<name>.safetensors, which may not be there.
std::string real_head_path(const std::string& name);

// weight = bf16(weight_q * weight_scale[:, None]), as the files' metadata says.
Tensor dequantised_weight(const TensorFile& file);

}  // namespace logitless::test
