// Implementations of kernels/device/attention.h. No CUDA headers here.
#pragma once

#include "kernels/device/attention.h"

namespace logitless::cuda {

// Any dtype, shape and stride, compute capability 8.0 or later.
void attention_any_forward(const AttentionCall& call);
void attention_any_backward(const AttentionCall& call);

// bf16 with the instructions of compute capability 9.0 (instruction_capability), dim a multiple of
// 8 up to 128, scale > 0.
bool attention_sm90_takes_sizes(const AttentionCall& call, int compute_capability);
// Also checks addresses and strides of the operands and outputs.
bool attention_sm90_takes(const AttentionCall& call, bool backward);
void attention_sm90_forward(const AttentionCall& call);
void attention_sm90_backward(const AttentionCall& call);

}  // namespace logitless::cuda
