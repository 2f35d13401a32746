#include "kernels/cuda/head/sample_sizes.h"

#include <climits>

#include "core/check.h"
#include "kernels/cuda/device/tile_sizes.h"
#include "kernels/cuda/head/sizes.h"
#include "kernels/device/sample.h"

namespace logitless::cuda {

SampleLayout::SampleLayout(const DeviceKernel& kernel, const ForwardShape& s) {
  const auto take = [&](std::size_t bytes) {
    const std::size_t at = total;
    total += (bytes + 255) / 256 * 256;
    return at;
  };
  const auto rows = static_cast<std::size_t>(padded_tokens(s.tokens));
  forward = take(kernel.workspace_bytes(s));
  tile_tops =
      take(rows * static_cast<std::size_t>(ceil_div(s.vocab, kTileColumns)) * sizeof(float));
  bad_target = take(sizeof(std::uint64_t));
  greatest = take(rows * sizeof(float));
  least = take(rows * sizeof(float));
  best = take(rows * sizeof(std::uint64_t));
  logits = take(static_cast<std::size_t>(s.tokens * padded_vocab(s.vocab)) * sizeof(float));
}

std::size_t sample_bytes(const DeviceKernel& kernel, const ForwardShape& shape) {
  return SampleLayout(kernel, shape).total;
}

std::int64_t cublas_unit_tokens(const ForwardShape& shape) {
  ForwardShape many = shape;
  many.tokens = kStripTokens;
  return CublasLayout(many).strip_tokens;
}

}  // namespace logitless::cuda
