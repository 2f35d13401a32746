// The forward of compute capability 8.6 and others with less shared memory.
#include "kernels/cuda/device/kernels_to_load.h"
#include "kernels/cuda/head/launch_sm80.cuh"
#include "kernels/device/gpu_kernels.h"
#include "kernels/device/kernel.h"

namespace logitless::cuda {
namespace {

constexpr const TileKernel& kTiles = sm80::Launches<sm80::ShortSteps>::kTiles;

// GPUs with the shared memory for forward_sm80.cu run that, unless this is asked for. On some this
// file is PTX alone, which would be compiled.
__global__ void marks_this_file() {}
const KernelsOfFile kernels_of_this_file(reinterpret_cast<const void*>(&marks_this_file), [] {
  return most_shared_bytes() < sm80::LongSteps::kSharedBytes ||
         std::string_view(gpu_kernels().front()->name) == "sm86";
});

}  // namespace

void sm86_forward(const ForwardCall& c) { forward_by_tiles(kTiles, c); }
void sm86_target_logits(const ForwardCall& c, float* logits) {
  target_logits_by_tiles(kTiles, c, logits);
}
void sm86_begin_forward(const ForwardCall& c) { begin_forward_by_tiles(kTiles, c); }
void sm86_forward_tiles(const ForwardCall& c) { all_tiles(kTiles, c); }
void sm86_forward_selected(const ForwardCall& c) { selected_tiles(kTiles, c); }
void sm86_store(const ForwardCall& c, const float* logit_bias, float* results, float* tile_tops) {
  store_by_tiles(kTiles, c, logit_bias, results, tile_tops);
}
void sm86_gradient_block(const BlockCall& b) { gradient_block_by_tiles(kTiles, b); }

}  // namespace logitless::cuda
