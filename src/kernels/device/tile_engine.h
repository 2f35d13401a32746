// The texts of tile engines for generated kernels: GEMMs whose epilogue a compiler writes.
#pragma once

#include <string_view>

namespace logitless::cuda {

// Sizes of a launch of product_of_tiles, for code without CUDA's headers.
struct TileEngine {
  int rows, columns;  // of a CTA's tile
  int step;           // along the contracted dimension
  int ctas;           // of a cluster, one above the other
  int threads;        // of a CTA
  int consumers;      // the last of them, which have the sums
  unsigned shared_bytes;
};
inline constexpr TileEngine kSm90Engine = {128, 256, 64, 2, 384, 256, 230464};
inline constexpr TileEngine kSm80Engine = {128, 128, 32, 1, 128, 128, 49152};

// Return CUDA C++ without includes: kernels/cuda/device/product_sm90.cuh, for compute capability
// 9.0, or product_sm80.cuh, for 8.0 and later, and the headers that they include. Stand-ins replace
// the types of CUDA's headers. Beside them are two_bf16(low, high) and two_f16, which pack two
// numbers into 32 bits, and prefetch(address) into L2.
std::string_view sm90_engine_text();
std::string_view sm80_engine_text();

}  // namespace logitless::cuda
