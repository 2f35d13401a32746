// Detection of outputs that share memory with inputs or with each other.
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <span>
#include <string_view>

#include "core/check.h"
#include "logitless/tensor_view.h"

namespace logitless {

struct NamedView {
  std::string_view name;
  ConstTensorView view;
  std::string_view prefix = {};  // of the name
};

// The views of a call, without an allocation.
class NamedViews {
 public:
  // Returns a visitor of tensor_roles.h that adds the views.
  auto adder(std::string_view prefix = {}) {
    return [this, prefix](std::string_view name, const ConstTensorView& view) {
      add({name, view, prefix});
    };
  }
  void add(const NamedView& view) {
    check(count_ < views_.size(), "more views than a call has");
    views_[count_++] = view;
  }
  operator std::span<const NamedView>() const {  // NOLINT: implicit on purpose
    return {views_.data(), count_};
  }

 private:
  std::array<NamedView, 16> views_;
  std::size_t count_ = 0;
};

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
