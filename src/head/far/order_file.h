// Vocabulary orders as tensors of a safetensors file, several per file by prefix.
#pragma once

#include <string>
#include <vector>

#include "logitless/tensor_file.h"
#include "logitless/vocab_order.h"

namespace logitless {

// Appends views of the order's data, whose names are prefix + `vocab_ids`, `average`, `axes`, ...
void append_order(const VocabOrder& order, const std::string& prefix,
                  std::vector<NamedTensor>& tensors);
// Reads an order. Throws InvalidArgument naming the file and the invalid tensor.
VocabOrder order_of(const TensorFile& file, const std::string& path, const std::string& prefix);

}  // namespace logitless
