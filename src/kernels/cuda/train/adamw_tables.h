// The optimizer's tables as its kernels read them.
#pragma once

#include <cstdint>

#include "kernels/device_adamw.h"

namespace logitless::cuda {

inline constexpr std::int64_t kAdamWBlock = 8192;  // elements of a block of threads, at most

// What a block of threads works on: elements [begin, begin + kAdamWBlock) of a tensor, as far as
// there are.
struct AdamWCut {
  std::int64_t tensor = 0, begin = 0;
};

struct AdamWState {
  double loss = 0.0;         // sum over micro-batches
  std::int64_t failed = 0;   // 1: a loss or norm was no finite number
  float gradient_scale = 0;  // of clipping
};

}  // namespace logitless::cuda
