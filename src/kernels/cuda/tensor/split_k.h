// Split-K of fp32 GEMMs. cuBLASLt may leave a long inner dimension to the few SMs that have a tile
// of a small result, as it does in batches. Here stretches of that dimension are a batch: each has
// fp32 sums of its own in the workspace, which one kernel adds in order. No CUDA: plans are made
// without a device.
#pragma once

#include <cstdint>
#include <optional>

#include "kernels/device/gemm.h"

namespace logitless::cuda {

struct SplitK {
  std::int64_t parts = 0;
  std::int64_t k = 0;        // of a part; the terms behind the last part are added to the first
  std::int64_t sums_at = 0;  // in the workspace: [parts, m, n] f32, behind cuBLASLt's
  std::int64_t bytes = 0;    // of the workspace
};

// Returns how the GEMM of one batch is split within shape.workspace, by its sizes alone. Nothing:
// it is not.
std::optional<SplitK> split_k_of(const GemmShape& shape);

// Returns the GEMM of all parts: a batch of them.
GemmShape shape_of_parts(const GemmShape& shape, const SplitK& split);

}  // namespace logitless::cuda
