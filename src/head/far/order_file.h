// Orders as tensors of a safetensors file, several in one file by prefix.
#pragma once

#include <string>
#include <vector>

#include "logitless/tensor_file.h"
#include "logitless/vocab_order.h"

namespace logitless {

// Views of the order's data, named prefix + words, average, axes, ...
void append_order(const VocabOrder& order, const std::string& prefix,
                  std::vector<NamedTensor>& tensors);
// Throws InvalidArgument naming the file and the tensor that is not as it should be.
VocabOrder order_of(const TensorFile& file, const std::string& path, const std::string& prefix);

}  // namespace logitless
