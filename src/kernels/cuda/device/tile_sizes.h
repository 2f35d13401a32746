// Tile sizes of the Hopper kernels. No CUDA: plans are made without a device.
#pragma once

#include <cstdint>

namespace logitless::cuda {

inline constexpr int kTileRows = 128;  // rows of a CTA
inline constexpr int kTileColumns = 256;
inline constexpr int kStep = 64;  // along the contracted dimension
inline constexpr int kClusterCtas = 2;
inline constexpr int kClusterRows = kClusterCtas * kTileRows;

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace logitless::cuda
