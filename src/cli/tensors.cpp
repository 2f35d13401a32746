#include "cli/tensors.h"

#include <fmt/core.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>

#include "cli/args.h"

namespace logitless::cli {
namespace {

struct Spec {
  std::string path;
  std::string name;
  std::string scale;  // empty: not quantised
};

Spec parse_spec(const std::string& text) {
  Spec spec;
  std::error_code ignored;
  const std::size_t colon = text.rfind(':');
  // A path may contain a colon itself.
  if (colon == std::string::npos || std::filesystem::exists(text, ignored)) {
    spec.path = text;
    return spec;
  }
  spec.path = text.substr(0, colon);
  spec.name = text.substr(colon + 1);
  const std::size_t star = spec.name.find('*');
  if (star == std::string::npos) return spec;
  spec.scale = spec.name.substr(star + 1);
  spec.name.resize(star);
  if (spec.name.empty() || spec.scale.empty()) {
    throw UsageError(fmt::format("'{}': expected FILE:NAME*SCALE, both names given", text));
  }
  return spec;
}

bool aligned(const ConstTensorView& view) {
  return reinterpret_cast<std::uintptr_t>(view.data()) % size_of(view.dtype()) == 0;
}

// Returns the name of the tensor; a file with a single tensor needs none.
const std::string& name_in(const TensorFile& file, const Spec& spec) {
  if (!spec.name.empty()) return spec.name;
  if (file.names().size() == 1) return file.names().front();
  throw UsageError(fmt::format("'{}' holds {} tensors, expected FILE:NAME; there are: '{}'",
                               spec.path, file.names().size(), fmt::join(file.names(), "', '")));
}

}  // namespace

const TensorFile& TensorLoader::file(const std::string& path) {
  const auto found = files_.find(path);
  if (found != files_.end()) return found->second;
  std::error_code error;
  if (path.empty() || !std::filesystem::exists(path, error))
    throw UsageError(fmt::format("there is no file '{}'", path));
  return files_.emplace(path, TensorFile(path)).first->second;
}

ConstTensorView TensorLoader::load(const std::string& option, const std::string& spec_text,
                                   std::optional<DType> dtype) {
  try {
    const Spec spec = parse_spec(spec_text);
    const TensorFile& source = file(spec.path);
    if (!spec.name.empty() && source.names() == std::vector<std::string>{""}) {
      throw UsageError(fmt::format("'{}': an npy file holds one tensor, without a name, got '{}'",
                                   spec.path, spec_text.substr(spec.path.size() + 1)));
    }
    ConstTensorView view = source.tensor(name_in(source, spec));
    if (!spec.scale.empty()) {
      return keep(dequantise(view, source.tensor(spec.scale), dtype.value_or(DType::bf16)));
    }
    const DType wanted = dtype.value_or(view.dtype());
    if (wanted == view.dtype() && aligned(view)) return view;
    return keep(convert(view, wanted));
  } catch (const InvalidArgument& e) {
    throw UsageError(fmt::format("{}: {}", option, e.what()));
  } catch (const UsageError& e) {
    throw UsageError(fmt::format("{}: {}", option, e.what()));
  }
}

void TensorLoader::check_not_loaded(const std::string& option, const std::string& path) const {
  for (const auto& [file, unused] : files_)
    check_other_file(option, path, file, "a file that is read");
}

TensorView TensorLoader::keep(OwnedTensor tensor) {
  owned_.push_back(std::move(tensor));
  return owned_.back().view;
}

ConstTensorView first_of(const ConstTensorView& view, std::int64_t count) {
  if (view.rank() < 1 || view.size(0) <= count) return view;
  std::vector<std::int64_t> shape = sizes(view);
  shape[0] = count;
  std::array<std::int64_t, kMaxRank> strides{};
  for (int d = 0; d < view.rank(); ++d) strides[static_cast<std::size_t>(d)] = view.stride(d);
  return ConstTensorView(view.data(), view.dtype(), shape, std::span(strides.data(), shape.size()));
}

ConstTensorView without_first(const ConstTensorView& view, std::int64_t count) {
  if (view.rank() < 1) return view;
  count = std::min(count, view.size(0));
  std::vector<std::int64_t> shape = sizes(view);
  shape[0] -= count;
  std::array<std::int64_t, kMaxRank> strides{};
  for (int d = 0; d < view.rank(); ++d) strides[static_cast<std::size_t>(d)] = view.stride(d);
  const auto* data = static_cast<const std::byte*>(view.data()) +
                     count * view.stride(0) * static_cast<std::int64_t>(size_of(view.dtype()));
  return ConstTensorView(data, view.dtype(), shape, std::span(strides.data(), shape.size()));
}

void check_selection(const ConstTensorView& hidden, std::int64_t skip, std::int64_t first) {
  if (skip == 0 && first == 0) return;
  if (hidden.rank() < 2) {
    throw UsageError(fmt::format("{}: expected hidden [..., D] of several tokens, got {}",
                                 skip > 0 ? "--skip" : "--first", describe(hidden)));
  }
  if (skip >= hidden.size(0)) {
    throw UsageError(
        fmt::format("--skip: expected fewer than the {} there are, got {}", hidden.size(0), skip));
  }
}

std::vector<std::int64_t> sizes(const ConstTensorView& view) {
  std::vector<std::int64_t> out;
  for (int d = 0; d < view.rank(); ++d) out.push_back(view.size(d));
  return out;
}

std::vector<std::int64_t> leading_sizes(const ConstTensorView& view) {
  std::vector<std::int64_t> out = sizes(view);
  if (!out.empty()) out.pop_back();
  return out;
}

}  // namespace logitless::cli
