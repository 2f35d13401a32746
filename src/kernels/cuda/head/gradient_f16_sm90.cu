// The gradient GEMMs of Hopper in f16.
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/head/gradient_sm90.cuh"

namespace logitless::cuda {

GradientTiles f16_tiles_of(bool rank_one, bool entries, bool sums) {
  return dense_tiles_of<__half>(rank_one, entries, sums);
}

}  // namespace logitless::cuda
