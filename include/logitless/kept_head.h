// head_forward and head_backward as a pair of 3 passes instead of 4: exp(z) of all tokens, in 16
// bit (32 for f32 inputs), stays from the one to the other. For losses that are functions of all
// log-probabilities of a batch, so that no gradient can begin before the last of them is known. On
// a GPU.
//
//   const LossPlan plan = plan_head_kept(context, options, inputs, outputs, gradients, request);
//   head_forward_kept(context, plan, options, inputs, outputs, gradients, workspace);
//   ... the loss of outputs, and its derivatives by them: cotangents ...
//   head_backward_kept(context, plan, options, inputs, cotangents, gradients, workspace);
//
// In between, workspace and the memory of d_weight hold what the backward needs: nothing else may
// write there, and d_weight holds no number before the backward is done. That writes over it, so
// there is one backward to a forward; head_backward with a plan of its own makes gradients again.
#pragma once

#include "logitless/head.h"

namespace logitless {

// A dense plan with all tokens in one chunk, for both calls. Memory: that of the plan, of which
// part lies in d_weight where it may be (contiguous rows, no accumulation). memory_budget 0: at
// most three tenths of the fp32 logits, or 19 MiB. request.kind is dense or none. Throws
// InvalidArgument naming the least one where none fits; Unsupported on the CPU, for words on
// several ranks, the far field, and a softcap beside weighted_logit_sum.
LOGITLESS_API LossPlan plan_head_kept(const HeadOptions& options, const HeadInputs& inputs,
                                      const HeadOutputs& outputs, const HeadGradients& gradients,
                                      const PlanRequest& request = {});
LOGITLESS_API LossPlan plan_head_kept(const Context& context, const HeadOptions& options,
                                      const HeadInputs& inputs, const HeadOutputs& outputs,
                                      const HeadGradients& gradients,
                                      const PlanRequest& request = {});

// Writes the outputs. `gradients` are those of the backward: d_weight's memory is used. Errors and
// determinism as for head_forward.
LOGITLESS_API void head_forward_kept(const Context& context, const LossPlan& plan,
                                     const HeadOptions& options, const HeadInputs& inputs,
                                     const HeadOutputs& outputs, const HeadGradients& gradients,
                                     const Workspace& workspace);

// Writes the gradients: of outputs without entropy and argmax the bits of head_backward with this
// plan. Inputs, gradients and workspace are those of the forward, unchanged. There is one backward.
// Throws InvalidArgument, too, for a cotangent of the entropy, whose gradient needs the logits
// again, and of weighted_logit_sum where the forward was planned without that output: there is
// nothing of it in the workspace.
LOGITLESS_API void head_backward_kept(const Context& context, const LossPlan& plan,
                                      const HeadOptions& options, const HeadInputs& inputs,
                                      const HeadCotangents& cotangents,
                                      const HeadGradients& gradients, const Workspace& workspace);

}  // namespace logitless
