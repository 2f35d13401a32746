// Detection of outputs that share memory with inputs or with each other.
#pragma once

#include <initializer_list>
#include <span>
#include <string_view>
#include <vector>

#include "logitless/tensor_view.h"

namespace logitless {

struct NamedView {
  std::string_view name;
  ConstTensorView view;
  std::string_view prefix = {};  // of the name
};

// A visitor of tensor_roles.h that lists the views of a call.
inline auto listed_in(std::vector<NamedView>& views, std::string_view prefix = {}) {
  return [&views, prefix](std::string_view name, const ConstTensorView& view) {
    views.push_back({name, view, prefix});
  };
}

// Throws InvalidArgument naming both tensors when an output certainly shares memory with an input
// or another output. Two contiguous views share if their ranges overlap. Other views share if their
// first element lies within the other view or coincides with its first element. Interleaved views,
// such as two columns of one matrix, do not share.
void require_apart(std::span<const NamedView> outputs, std::span<const NamedView> inputs);
inline void require_apart(std::initializer_list<NamedView> outputs,
                          std::initializer_list<NamedView> inputs) {
  require_apart(std::span(outputs.begin(), outputs.size()),
                std::span(inputs.begin(), inputs.size()));
}

}  // namespace logitless
