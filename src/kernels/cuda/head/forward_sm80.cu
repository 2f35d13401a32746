// The forward of compute capability 8.0 and others with as much shared memory.
#include "kernels/cuda/device/kernels_to_load.h"
#include "kernels/cuda/head/launch_sm80.cuh"

namespace logitless::cuda {
namespace {

constexpr const TileKernel& kTiles = sm80::Launches<sm80::LongSteps>::kTiles;

__global__ void marks_this_file() {}
const KernelsOfFile kernels_of_this_file(reinterpret_cast<const void*>(&marks_this_file), [] {
  return most_shared_bytes() >= sm80::LongSteps::kSharedBytes;
});

}  // namespace

const TileKernel& sm80_tiles() { return kTiles; }

void sm80_forward(const ForwardCall& c) { forward_by_tiles(kTiles, c); }
void sm80_target_logits(const ForwardCall& c, float* logits) {
  target_logits_by_tiles(kTiles, c, logits);
}
void sm80_begin_forward(const ForwardCall& c) { begin_forward_by_tiles(kTiles, c); }
void sm80_forward_tiles(const ForwardCall& c) { all_tiles(kTiles, c); }
void sm80_forward_selected(const ForwardCall& c) { selected_tiles(kTiles, c); }
void sm80_store(const ForwardCall& c, const float* logit_bias, float* results, float* tile_tops) {
  store_by_tiles(kTiles, c, logit_bias, results, tile_tops);
}
void sm80_gradient_block(const BlockCall& b) { gradient_block_by_tiles(kTiles, b); }

}  // namespace logitless::cuda
