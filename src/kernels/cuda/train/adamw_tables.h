// Tables of the optimizer, as its kernels read them.
#pragma once

#include <cstdint>

#include "kernels/device/adamw.h"

namespace logitless::cuda {

inline constexpr std::int64_t kAdamWBlock = 8192;  // most elements of a thread block

// The elements of a thread block: [begin, begin + kAdamWBlock) of a tensor, clipped to its end.
struct AdamWCut {
  std::int64_t tensor = 0, begin = 0;
};

struct AdamWState {
  double loss = 0.0;         // sum over micro-batches
  std::int64_t failed = 0;   // 1: a loss or norm was not finite
  float gradient_scale = 0;  // factor that clips the gradients
};

}  // namespace logitless::cuda
