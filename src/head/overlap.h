// Outputs that share memory with inputs or each other.
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
// or another output: contiguous ones that meet, and others whose first element lies in them or at
// the same place. Views that interleave, such as two columns of one matrix, do not share.
void require_apart(std::initializer_list<NamedView> outputs,
                   std::initializer_list<NamedView> inputs);

}  // namespace logitless
