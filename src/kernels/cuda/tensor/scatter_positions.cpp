#include "kernels/cuda/tensor/scatter_positions.h"

namespace logitless::cuda {

ScatterPositions positions_of(const ScatterCall& c) {
  std::size_t used = 0;
  const auto take = [&](std::int64_t count, std::size_t bytes) {
    const std::size_t at = used;
    used = (used + static_cast<std::size_t>(count) * bytes + 255) / 256 * 256;
    return at;
  };
  ScatterPositions p{};
  for (int i = 0; i < 2; ++i) {
    p.keys[i] = take(c.count, 4);
    p.positions[i] = take(c.count, 4);
  }
  p.counts = take(kDigits * tiles_of(c.count, kSortTile), 4);
  const std::int64_t parts = tiles_of(c.count, kRun) * c.width;
  p.heads = take(parts, size_of(c.out_dtype));
  p.tails = take(parts, size_of(c.out_dtype));
  p.end = used;
  return p;
}

std::size_t scatter_workspace_bytes(const ScatterCall& call) { return positions_of(call).end; }

}  // namespace logitless::cuda
