#include "xla/buffers.h"

#include <cstdint>
#include <span>

namespace logitless::xla_handlers {
namespace {

namespace ffi = xla::ffi;

DType dtype_of(std::string_view name, const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::F32:
      return DType::f32;
    case ffi::DataType::BF16:
      return DType::bf16;
    case ffi::DataType::F16:
      return DType::f16;
    case ffi::DataType::S32:
      return DType::i32;
    case ffi::DataType::S64:
      return DType::i64;
    case ffi::DataType::S8:
      return DType::i8;
    default:
      throw InvalidArgument(concat(name, ": XLA's data type ",
                                   static_cast<int>(buffer.element_type()), " is not supported"));
  }
}

TensorView view_of(std::string_view name, const ffi::AnyBuffer& buffer) {
  const auto sizes = buffer.dimensions();
  return TensorView(buffer.untyped_data(), dtype_of(name, buffer),
                    std::span(sizes.begin(), sizes.size()));
}

// Removes and returns the first of the names.
std::string_view next_name(std::string_view* names) {
  const std::size_t end = names->find(',');
  const std::string_view name = names->substr(0, end);
  names->remove_prefix(end == std::string_view::npos ? names->size() : end + 1);
  return name;
}

template <typename View>
void assign(const std::vector<Slot<View>>& slots, std::string_view name, const TensorView& view) {
  for (const auto& slot : slots) {
    if (name.starts_with(slot.prefix) && name.substr(slot.prefix.size()) == slot.name) {
      *slot.view = view;
      return;
    }
  }
  throw InternalError(concat("no buffer called ", name, " is known to this handler"));
}

}  // namespace

void Call::fill(const Slots& slots) {
  auto names = attribute<std::string_view>("inputs");
  for (std::size_t i = 0; i < arguments_.size(); ++i) {
    const std::string_view name = next_name(&names);
    assign(slots.inputs, name, view_of(name, *arguments_.get<ffi::AnyBuffer>(i)));
  }
  check(names.empty(), "inputs: no buffers for ", names);
  names = attribute<std::string_view>("outputs");
  for (std::size_t i = 0; i < results_.size(); ++i) {
    const std::string_view name = next_name(&names);
    const TensorView view = view_of(name, **results_.get<ffi::AnyBuffer>(i));
    if (name == "workspace") {
      workspace_ = view;
    } else {
      assign(slots.outputs, name, view);
    }
  }
  check(names.empty(), "outputs: no buffers for ", names);
}

Workspace aligned_workspace(Buffer buffer) {
  const auto begin = reinterpret_cast<std::uintptr_t>(buffer.data);
  const std::uintptr_t skipped = (kAlignment - begin % kAlignment) % kAlignment;
  check(buffer.data != nullptr && buffer.bytes >= skipped, "workspace: ", buffer.bytes,
        " bytes at ", begin);
  return Workspace(static_cast<char*>(buffer.data) + skipped, buffer.bytes - skipped);
}

Workspace Call::workspace() const {
  check(workspace_.defined(), "workspace: no buffer of this name");
  return aligned_workspace({workspace_.data(), static_cast<std::size_t>(workspace_.bytes())});
}

std::vector<Buffer> Call::arguments() const {
  std::vector<Buffer> all;
  for (std::size_t i = 0; i < arguments_.size(); ++i) {
    const ffi::AnyBuffer buffer = *arguments_.get<ffi::AnyBuffer>(i);
    all.push_back({buffer.untyped_data(), buffer.size_bytes()});
  }
  return all;
}

std::vector<Buffer> Call::results() const {
  std::vector<Buffer> all;
  for (std::size_t i = 0; i < results_.size(); ++i) {
    const ffi::AnyBuffer buffer = **results_.get<ffi::AnyBuffer>(i);
    all.push_back({buffer.untyped_data(), buffer.size_bytes()});
  }
  return all;
}

std::string Call::signature() const {
  std::string out =
      concat(attribute<std::string_view>("inputs"), " -> ", attribute<std::string_view>("outputs"));
  for (std::size_t i = 0; i < arguments_.size(); ++i)
    out += concat(" ", describe(view_of("argument", *arguments_.get<ffi::AnyBuffer>(i))));
  for (std::size_t i = 0; i < results_.size(); ++i)
    out += concat(" ", describe(view_of("result", **results_.get<ffi::AnyBuffer>(i))));
  return out;
}

}  // namespace logitless::xla_handlers
