// The calls of the head on a GPU, like head/cpu/calls.h for a CPU. They enqueue and return, after
// checks that are specific to GPUs.
#pragma once

#include "head/head_call.h"
#include "logitless/cross_entropy.h"

namespace logitless::cuda {

// loss: one f32, or [...] with reduction none; or none. Only `tokens` of the statistics is known.
LossStatistics cross_entropy(const HeadCall& call, const CrossEntropyOptions& options,
                             const CrossEntropyInputs& in, const TensorView& loss);
// Returns the statistics of an audited far-field plan's last run in the workspace. Waits for it.
FarFieldStatistics far_statistics(const Context& context, const LossPlan& plan,
                                  const Workspace& workspace);
void head_forward(const HeadCall& call);
void head_backward(const HeadCall& call, const HeadCotangents& cotangents);
// Saved heads, see saved_head.h: call.out is none.
void head_forward_saved(const HeadCall& call, const TokenOutputs& out);
void head_backward_saved(const HeadCall& call, const HeadCotangents& cotangents);

}  // namespace logitless::cuda
