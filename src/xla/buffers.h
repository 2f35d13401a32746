// Conversion of XLA's arguments to the library's values.
//
// Buffers are named: the attribute "inputs" lists the names of the arguments and "outputs" those of
// the results, separated by commas and in the order of the buffers. Each is contiguous, last
// dimension fastest.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"
#include "logitless/logitless.h"
#include "xla/ffi/api/ffi.h"

namespace logitless::xla_handlers {

// The view that receives the buffer of a name: `prefix` and then `name`.
template <typename View>
struct Slot {
  std::string_view prefix, name;
  View* view;
};
struct Slots {
  std::vector<Slot<ConstTensorView>> inputs;
  std::vector<Slot<TensorView>> outputs;
};

// A visitor of the tensor_roles.h of the head and of samples. It lists the views of a call.
struct SlotVisitor {
  Slots* slots;
  std::string_view prefix = {};

  void operator()(std::string_view name, ConstTensorView& view) const {
    slots->inputs.push_back({prefix, name, &view});
  }
  void operator()(std::string_view name, TensorView& view) const {
    slots->outputs.push_back({prefix, name, &view});
  }
  SlotVisitor prefixed(std::string_view with) const { return {slots, with}; }
};

// Memory of an argument or a result.
struct Buffer {
  void* data;
  std::size_t bytes;
};

// Alignment in bytes that the library requires on a GPU. XLA guarantees less.
inline constexpr std::size_t kAlignment = 256;

// Returns the memory of a buffer from its first multiple of kAlignment on.
Workspace aligned_workspace(Buffer buffer);

// One call of a handler.
class Call {
 public:
  Call(xla::ffi::RemainingArgs arguments, xla::ffi::RemainingRets results,
       xla::ffi::Dictionary attributes)
      : arguments_(arguments), results_(results), attributes_(attributes) {}

  // Throws InternalError when there is no attribute of this name and type.
  template <typename T>
  T attribute(std::string_view name) const {
    const auto value = attributes_.get<T>(name);
    check(value.has_value(), "attribute ", name, ": ",
          value.has_value() ? "" : value.error().message());
    return *value;
  }

  // Assigns every argument and result to the view of its name; list(SlotVisitor) lists the views.
  // Reserves the result called "workspace" for workspace(). Throws InternalError when a buffer has
  // no view, or names and buffers differ in number.
  template <typename List>
  void read(const List& list) {
    Slots slots;
    list(SlotVisitor{&slots});
    fill(slots);
  }

  Workspace workspace() const;

  // All buffers in order, regardless of names.
  std::vector<Buffer> arguments() const;
  std::vector<Buffer> results() const;

  // Returns dtypes and shapes of all buffers: equal for equal programs.
  std::string signature() const;

 private:
  void fill(const Slots& slots);

  xla::ffi::RemainingArgs arguments_;
  xla::ffi::RemainingRets results_;
  xla::ffi::Dictionary attributes_;
  TensorView workspace_;
};

}  // namespace logitless::xla_handlers
