// The calls of the head on a CPU; head/cuda/calls.h declares the same for a GPU.
#pragma once

#include "head/head_call.h"
#include "logitless/cross_entropy.h"

namespace logitless::cpu {

// loss: one f32, or [...] with reduction none; or none.
LossStatistics cross_entropy(const HeadCall& call, const CrossEntropyOptions& options,
                             const CrossEntropyInputs& in, const TensorView& loss);
void head_forward(const HeadCall& call);
void head_backward(const HeadCall& call, const HeadCotangents& cotangents);

}  // namespace logitless::cpu
