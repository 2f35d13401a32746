#include "kernels/cuda/train/adamw_tables.h"

#include <cstring>

namespace logitless::cuda {
namespace {

std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

AdamWOffsets adamw_offsets(std::span<const std::int64_t> counts) {
  AdamWOffsets p;
  for (const std::int64_t count : counts) p.blocks += (count + kAdamWBlock - 1) / kAdamWBlock;
  const auto blocks = static_cast<std::size_t>(p.blocks);
  p.cuts = aligned(counts.size() * sizeof(AdamWTensor));
  p.state = p.cuts + aligned(blocks * sizeof(AdamWCut));
  p.partial = p.state + aligned(sizeof(AdamWState));
  p.end = p.partial + aligned(blocks * sizeof(double));
  return p;
}

std::vector<std::byte> adamw_tables(std::span<const AdamWTensor> tensors) {
  std::vector<std::int64_t> counts;
  std::vector<AdamWCut> cuts;
  for (const AdamWTensor& tensor : tensors) {
    for (std::int64_t begin = 0; begin < tensor.count; begin += kAdamWBlock)
      cuts.push_back({static_cast<std::int64_t>(counts.size()), begin});
    counts.push_back(tensor.count);
  }
  const AdamWOffsets places = adamw_offsets(counts);
  std::vector<std::byte> bytes(places.state);
  if (!tensors.empty())
    std::memcpy(bytes.data() + places.tensors, tensors.data(), tensors.size_bytes());
  if (!cuts.empty())
    std::memcpy(bytes.data() + places.cuts, cuts.data(), cuts.size() * sizeof(AdamWCut));
  return bytes;
}

}  // namespace logitless::cuda
