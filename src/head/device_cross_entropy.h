// The calls of the head on a GPU. Arguments have been checked as for the CPU; what the GPU asks
// beyond is checked here.
#pragma once

#include "logitless/head.h"

namespace logitless {

LossStatistics device_cross_entropy(const Context& context, const LossPlan& plan,
                                    const CrossEntropyOptions& options,
                                    const CrossEntropyInputs& in, const CrossEntropyOutputs& out,
                                    const HeadFeatures& features, const Workspace& workspace);
void device_head_forward(const Context& context, const LossPlan& plan, const HeadOptions& options,
                         const HeadInputs& in, const HeadOutputs& out, const HeadFeatures& features,
                         const Workspace& workspace);
void device_head_backward(const Context& context, const LossPlan& plan, const HeadOptions& options,
                          const HeadInputs& in, const HeadCotangents& cotangents,
                          const HeadGradients& gradients, const HeadFeatures& features,
                          const Workspace& workspace);

}  // namespace logitless
