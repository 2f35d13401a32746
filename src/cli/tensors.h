// Tensors named on the command line: FILE:NAME, FILE for npy, FILE:NAME*SCALE for a weight
// quantised by rows.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cli/convert.h"
#include "logitless/logitless.h"

namespace logitless::cli {

inline constexpr const char* kTensorHelp =
    "A tensor is FILE:NAME of a safetensors file, or FILE of an npy file or of a safetensors file "
    "of one tensor.\n"
    "FILE:NAME*SCALE is a weight quantised to i8 [V, D] with a factor f32 [V] for each row:\n"
    "weight = NAME * SCALE[:, None], rounded to bf16 (or --dtype).\n";

// Opens each file once, and owns the tensors that it returns.
class TensorLoader {
 public:
  // Returns the tensor as stored, or converted to `dtype` where that is given and differs. `option`
  // appears in messages. Throws UsageError when the file or tensor is missing or unusable.
  ConstTensorView load(const std::string& option, const std::string& spec,
                       std::optional<DType> dtype = std::nullopt);
  // Does the same; returns an undefined tensor for an empty spec.
  ConstTensorView load_optional(const std::string& option, const std::string& spec,
                                std::optional<DType> dtype = std::nullopt) {
    return spec.empty() ? ConstTensorView() : load(option, spec, dtype);
  }
  // Throws UsageError when an output to `path` would replace a file that was loaded.
  void check_not_loaded(const std::string& option, const std::string& path) const;
  // Takes ownership of a tensor.
  TensorView keep(OwnedTensor tensor);

 private:
  const TensorFile& file(const std::string& path);

  std::map<std::string, TensorFile> files_;
  std::vector<OwnedTensor> owned_;
};

// Returns the first `count` entries of the first dimension, or all of them if there are fewer.
ConstTensorView first_of(const ConstTensorView& view, std::int64_t count);

// Returns all but the first `count` entries; none if there are fewer.
ConstTensorView without_first(const ConstTensorView& view, std::int64_t count);

// Throws UsageError unless these values of --skip and --first, 0 if not given, leave tokens of
// hidden [..., D].
void check_selection(const ConstTensorView& hidden, std::int64_t skip, std::int64_t first);

// leading_sizes() returns all sizes of a view but the last; sizes() returns all.
std::vector<std::int64_t> leading_sizes(const ConstTensorView& view);
std::vector<std::int64_t> sizes(const ConstTensorView& view);

}  // namespace logitless::cli
