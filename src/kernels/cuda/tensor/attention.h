// The implementations behind kernels/device_attention.h. No CUDA headers here.
#pragma once

#include "kernels/device_attention.h"

namespace logitless::cuda {

// Every dtype, shape and stride, compute capability 8.0 and more.
std::size_t attention_any_scratch_bytes(const AttentionCall& call, bool backward);
void attention_any_forward(const AttentionCall& call);
void attention_any_backward(const AttentionCall& call);

}  // namespace logitless::cuda
