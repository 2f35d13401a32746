// The text of the Hopper tile engine for generated kernels: GEMMs whose epilogue a compiler writes.
#pragma once

#include <string_view>

namespace logitless::cuda {

// Returns CUDA C++ without includes: kernels/cuda/device/product_sm90.cuh and the headers that it
// includes, for compute capability 9.0. Stand-ins replace the types of CUDA's headers. Beside them
// are two_bf16(low, high) and two_f16, which pack two numbers into 32 bits, and prefetch(address)
// into L2.
std::string_view tile_engine_text();

// Sizes of a launch of product_of_tiles (product_sm90.cuh), for code without CUDA's headers.
struct TileEngine {
  static constexpr int kRows = 128, kColumns = 256;  // of a CTA's tile
  static constexpr int kStep = 64;                   // along the contracted dimension
  static constexpr int kCtas = 2;                    // of a cluster, one above the other
  static constexpr int kThreads = 384;
  static constexpr unsigned kSharedBytes = 230464;
};

}  // namespace logitless::cuda
