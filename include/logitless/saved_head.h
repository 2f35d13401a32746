// head_forward and head_backward as a pair of 3 GEMMs instead of 4, on a GPU. exp(z) of all tokens,
// in 16 bit (32 for f32 inputs), stays from one to the other. It serves losses that need all
// log-probabilities of a batch before any gradient can begin.
//
//   const LossPlan plan = plan_head_saved(context, options, inputs, outputs, gradients, request);
//   head_forward_saved(context, plan, options, inputs, outputs, gradients, workspace);
//   ... the loss of outputs, and its derivatives by them: cotangents ...
//   head_backward_saved(context, plan, options, inputs, cotangents, gradients, workspace);
//
// Between the two calls nothing else may write to the workspace or to d_weight, which holds no
// gradient until the backward is done. The backward overwrites the saved exponentials, so a forward
// has only one. head_backward with its own plan recomputes gradients.
#pragma once

#include "logitless/head.h"

namespace logitless {

// Makes a dense plan with all tokens in one chunk, for both calls. Part of the saved exponentials
// lies in d_weight where possible (contiguous rows, no accumulation). memory_budget is a ceiling as
// in plan.h; 0 is at most three tenths of the fp32 logits, or 19 MiB. request.kind is dense or
// none. Throws InvalidArgument naming the least plan where none fits. Throws Unsupported on the
// CPU, for a vocabulary over several ranks, the far field, and a softcap beside weighted_logit_sum.
LOGITLESS_API LossPlan plan_head_saved(const HeadOptions& options, const HeadInputs& inputs,
                                       const HeadOutputs& outputs, const HeadGradients& gradients,
                                       const PlanRequest& request = {});
LOGITLESS_API LossPlan plan_head_saved(const Context& context, const HeadOptions& options,
                                       const HeadInputs& inputs, const HeadOutputs& outputs,
                                       const HeadGradients& gradients,
                                       const PlanRequest& request = {});

// Writes the outputs. `gradients` are those of the backward: d_weight's memory is used. Errors and
// determinism are those of head_forward.
LOGITLESS_API void head_forward_saved(const Context& context, const LossPlan& plan,
                                      const HeadOptions& options, const HeadInputs& inputs,
                                      const HeadOutputs& outputs, const HeadGradients& gradients,
                                      const Workspace& workspace);

// Writes the gradients, once for each forward. Without entropy and argmax outputs they have the
// bits of head_backward with this plan. Inputs, gradients and workspace are those of the forward,
// unchanged. Also throws InvalidArgument for a cotangent of the entropy under a softcap, whose
// gradient needs the logits again. The same holds for one of entropy or weighted_logit_sum where
// the forward was planned without that output.
LOGITLESS_API void head_backward_saved(const Context& context, const LossPlan& plan,
                                       const HeadOptions& options, const HeadInputs& inputs,
                                       const HeadCotangents& cotangents,
                                       const HeadGradients& gradients, const Workspace& workspace);

}  // namespace logitless
