#include "kernels/cuda/head/sample_sizes.h"

#include <string_view>

#include "core/check.h"
#include "kernels/cuda/head/sizes.h"
#include "kernels/device/sample.h"

namespace logitless::cuda {

SampleLayout::SampleLayout(const ForwardShape& s) {
  const auto take = [&](std::size_t bytes) {
    const std::size_t at = total;
    total += (bytes + 255) / 256 * 256;
    return at;
  };
  const auto rows = static_cast<std::size_t>(padded_tokens(s.tokens));
  forward = take(TileLayout(s).total);
  bad_target = take(sizeof(std::uint64_t));
  greatest = take(rows * sizeof(float));
  best = take(rows * sizeof(std::uint64_t));
  logits = take(static_cast<std::size_t>(s.tokens * padded_vocab(s.vocab)) * sizeof(float));
}

std::size_t sample_bytes(const ForwardShape& shape) { return SampleLayout(shape).total; }

std::string sample_unsupported(const DeviceKernel& kernel) {
  const std::string_view name = kernel.name;
  if (name == "hopper" || name == "hopper_f16") return {};
  return concat("kernel ", name, " stores no logits");
}

}  // namespace logitless::cuda
