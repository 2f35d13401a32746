// Centroids and means of vocabulary tiles, for the estimates of their masses.
#pragma once

#include "kernels/device/head.h"

namespace logitless::cuda {

// Computes the centroids and means of all tiles: FarCall::centroid and FarEstimate::mean, from
// FarEstimate::target_weight_sum.
void gather_points(const ForwardCall& call);

}  // namespace logitless::cuda
