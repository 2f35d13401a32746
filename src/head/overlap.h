// Detection of outputs that share memory with inputs or with each other.
#pragma once

#include <initializer_list>
#include <string_view>

#include "logitless/tensor_view.h"

namespace logitless {

struct NamedView {
  std::string_view name;
  ConstTensorView view;
};

// Throws InvalidArgument naming both tensors when an output certainly shares memory with an input
// or another output. Two contiguous views share if their ranges overlap. Other views share if their
// first element lies within the other view or coincides with its first element. Interleaved views,
// such as two columns of one matrix, do not share.
void require_apart(std::initializer_list<NamedView> outputs,
                   std::initializer_list<NamedView> inputs);

}  // namespace logitless
