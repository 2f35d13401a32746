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

// A name with its prefix, and the view that receives its buffer.
template <typename View>
struct Slot {
  std::string_view name;
  View* view;
  std::string_view prefix = {};
};
template <typename View>
using Slots = std::vector<Slot<View>>;

// A visitor of head/tensor_roles.h that lists the views of a call.
template <typename View>
auto listed_in(Slots<View>& slots, std::string_view prefix = {}) {
  return [&slots, prefix](std::string_view name, View& view) {
    slots.push_back({name, &view, prefix});
  };
}

// Memory of an argument or a result.
struct Buffer {
  void* data;
  std::size_t bytes;
};

// Returns the memory of a buffer from its first multiple of 256 on: the alignment that the library
// requires on a GPU. XLA guarantees less.
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

  // Assigns every argument to the slot of its name. Throws InternalError when there is no such
  // slot, or names and buffers differ in number.
  void read_inputs(const Slots<ConstTensorView>& slots) const;
  // Assigns the results likewise. The one called "workspace" is reserved for workspace().
  void read_outputs(const Slots<TensorView>& slots);

  Workspace workspace() const;

  // All buffers in order, regardless of names.
  std::vector<Buffer> arguments() const;
  std::vector<Buffer> results() const;

  // Returns dtypes and shapes of all buffers: equal for equal programs.
  std::string signature() const;

 private:
  xla::ffi::RemainingArgs arguments_;
  xla::ffi::RemainingRets results_;
  xla::ffi::Dictionary attributes_;
  TensorView workspace_;
};

}  // namespace logitless::xla_handlers
