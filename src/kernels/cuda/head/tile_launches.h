// How the tiles of a forward are split over launches.
#pragma once

#include <algorithm>
#include <climits>

#include "kernels/cuda/device/tile_sizes.h"
#include "kernels/cuda/head/tile_kernel.h"

namespace logitless::cuda {

// enqueue(arguments, tiles) for each launch; `workers` compute its tiles in turn. Each group of
// token tiles is launched separately if it is long enough: within a short launch the workers stay
// close enough together to share operands in L2, over a long one they drift apart. A list of tiles
// has one launch, whose number of tiles only the device knows: INT_MAX.
template <typename Enqueue>
void for_launches(const ForwardArguments& all, int workers, const Enqueue& enqueue) {
  if (all.list != nullptr) return enqueue(all, INT_MAX);
  constexpr int kLeastRounds = 16;  // tiles of a worker in a launch, or its tail costs too much
  ForwardArguments a = all;
  const auto groups = static_cast<int>(ceil_div(all.token_pairs, all.group));
  a.group = static_cast<int>(ceil_div(all.token_pairs, groups));
  const bool apart = a.group * all.vocab_tiles >= kLeastRounds * workers;
  const int step = apart ? a.group : all.token_pairs;
  for (a.first_pair = 0; a.first_pair < all.token_pairs; a.first_pair += step) {
    a.launch_pairs = std::min(step, all.token_pairs - a.first_pair);
    enqueue(a, a.launch_pairs * a.vocab_tiles);
  }
}

}  // namespace logitless::cuda
