// Tensors named on the command line: FILE:NAME, FILE of npy, FILE:NAME*SCALE of a weight quantised
// by rows.
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

// Opens each file once and owns what it hands out.
class TensorLoader {
 public:
  // The tensor as stored, or converted to `dtype` where that is given and differs. `option` stands
  // in messages. Throws UsageError when there is no such file or tensor, or it is of no use.
  ConstTensorView load(const std::string& option, const std::string& spec,
                       std::optional<DType> dtype = std::nullopt);
  // The same, undefined for an empty spec.
  ConstTensorView load_optional(const std::string& option, const std::string& spec,
                                std::optional<DType> dtype = std::nullopt) {
    return spec.empty() ? ConstTensorView() : load(option, spec, dtype);
  }
  // Throws UsageError when an answer to be written to `path` would replace a file that was loaded.
  void check_not_loaded(const std::string& option, const std::string& path) const;
  // Keeps a tensor made elsewhere.
  TensorView keep(OwnedTensor tensor);

 private:
  const TensorFile& file(const std::string& path);

  std::map<std::string, TensorFile> files_;
  std::vector<OwnedTensor> owned_;
};

// The first `count` entries of the first dimension; all of them if there are no more.
ConstTensorView first_of(const ConstTensorView& view, std::int64_t count);

// All but the first `count` entries; none if there are no more.
ConstTensorView without_first(const ConstTensorView& view, std::int64_t count);

// Throws UsageError unless the --skip and --first of these numbers, where they are not 0, leave
// tokens of hidden [..., D].
void check_selection(const ConstTensorView& hidden, std::int64_t skip, std::int64_t first);

// All sizes of a view, and all but the last.
std::vector<std::int64_t> leading_sizes(const ConstTensorView& view);
std::vector<std::int64_t> sizes(const ConstTensorView& view);

}  // namespace logitless::cli
