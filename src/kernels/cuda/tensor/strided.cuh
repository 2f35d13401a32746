// Launches over the elements of strided tensors, and their offsets.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "kernels/device/index.h"

namespace logitless::cuda {

// Thread blocks for so many items; kernels go on in strides beyond kMostBlocks of them.
inline constexpr std::int64_t kMostBlocks = std::int64_t{1} << 20;
inline unsigned blocks_of(std::int64_t items, std::int64_t per_block) {
  return static_cast<unsigned>(
      std::clamp<std::int64_t>((items + per_block - 1) / per_block, 1, kMostBlocks));
}
inline cudaStream_t stream_of(Stream stream) { return static_cast<cudaStream_t>(stream); }

inline std::int64_t count_of(const StridedSpace& space) {
  std::int64_t count = 1;
  for (int d = 0; d < space.rank; ++d) count *= space.sizes[d];
  return count;
}

// Returns the offset of element `flat`.
__device__ inline std::int64_t offset_of(const StridedSpace& space, const Strides& strides,
                                         std::int64_t flat) {
  std::int64_t at = 0;
  for (int d = space.rank - 1; d >= 0; --d) {
    at += flat % space.sizes[d] * strides.of[d];
    flat /= space.sizes[d];
  }
  return at;
}

// Adds the offsets of element `flat` in several tensors to at[0], at[1], ... Int: unsigned, and of
// 32 bits if all elements fit, since divisions of 64 bits are slow.
template <typename Int, typename... Tensors>
__device__ void add_offsets(const StridedSpace& space, Int flat, std::int64_t* at,
                            const Tensors&... strides) {
  for (int d = space.rank - 1; d >= 0; --d) {
    if (space.sizes[d] == 1) continue;
    const auto size = static_cast<Int>(space.sizes[d]);
    const auto i = static_cast<std::int64_t>(flat % size);
    flat /= size;
    int tensor = 0;
    ((at[tensor++] += i * strides.of[d]), ...);
  }
}

}  // namespace logitless::cuda
