// Conversion of XLA's arguments to the library's values.
//
// Buffers are named: the attribute "inputs" lists the names of the arguments and "outputs" those of
// the results, separated by commas and in the order of the buffers. Each is contiguous, last
// dimension fastest.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"
#include "logitless/logitless.h"
#include "xla/ffi/api/ffi.h"

namespace logitless::xla_handlers {

// A name, and the view that receives its buffer.
struct InputSlot {
  std::string_view name;
  ConstTensorView* view;
};
struct OutputSlot {
  std::string_view name;
  TensorView* view;
};

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
  void read_inputs(std::initializer_list<InputSlot> slots) const;
  // Assigns the results likewise. The one called "workspace" is reserved for workspace().
  void read_outputs(std::initializer_list<OutputSlot> slots);

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
