// Heads of a trained language model, which tests read from LOGITLESS_DATA_DIR.
#pragma once

#include <string>

#include "logitless/tensor_file.h"
#include "support/problem.h"

namespace logitless::test {

// Returns the path of real_head_<name>.safetensors, which may not exist.
std::string real_head_path(const std::string& name);

// weight = bf16(weight_q * weight_scale[:, None]), see the files' metadata.
Tensor dequantised_weight(const TensorFile& file);

}  // namespace logitless::test
