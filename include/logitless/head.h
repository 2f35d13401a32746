// The primitive of every loss: differentiable per-token outputs of softmax(hidden weight^T). Policy
// and preference losses (PPO, GRPO, DPO, ORPO, SimPO, KTO) are functions of log_prob, entropy and
// lse. Compute them from head_forward, and give their gradients to head_backward.
#pragma once

#include "logitless/cross_entropy.h"

namespace logitless {

struct HeadOptions {
  std::int64_t ignore_index = -100;
  float softcap = 0.0f;
  float logit_scale = 1.0f;
  bool accumulate = false;                // head_backward adds to the gradients' contents
  Precision precision = Precision::ieee;  // others: f32 tensors on a GPU
};

// hidden [..., D], weight [V, D]: f32 | bf16 | f16, equal. targets [...] or [..., K]: i32 | i64.
struct HeadInputs {
  ConstTensorView hidden = {};
  ConstTensorView weight = {};
  ConstTensorView targets = {};
  ConstTensorView bias = {};  // optional [V]
  // optional [V] f32: logit weights w of weighted_logit_sum; without it all are 1
  ConstTensorView vocab_weight = {};
  Sharding sharding = {};  // vocabulary-parallel, and maybe sequence-parallel
};

// f32 [...] each; defined outputs are written; 0 for ignored rows (all targets are ignore_index).
struct HeadOutputs {
  TensorView lse = {};                 // log sum_j exp z_ij
  TensorView target_logit = {};        // z_iy, [...] or [..., K]
  TensorView log_prob = {};            // z_iy - lse_i, [...] or [..., K]
  TensorView entropy = {};             // -sum_j p_ij log p_ij
  TensorView weighted_logit_sum = {};  // sum_j w_j z_ij
  TensorView argmax = {};              // i32 | i64 [...]
};

// Gradients of a scalar with respect to each output: f32, in the shape of the output. Undefined is
// 0.
struct HeadCotangents {
  ConstTensorView lse = {};
  ConstTensorView target_logit = {};
  ConstTensorView log_prob = {};
  ConstTensorView entropy = {};
  ConstTensorView weighted_logit_sum = {};
};

struct HeadGradients {
  TensorView d_hidden = {};  // [..., D] in the dtype of hidden or f32
  TensorView d_weight = {};  // [V, D]
  TensorView d_bias = {};    // [V]
};

// Plan the two calls; see plan.h. head_backward runs its own forward: 3 GEMMs where exp(z) may be
// saved, 4 where logits are recomputed, as for a gradient of the entropy on a CPU or with a
// softcap. With a context, the plan is for its device and threads.
LOGITLESS_API LossPlan plan_head_forward(const HeadOptions& options, const HeadInputs& inputs,
                                         const HeadOutputs& outputs,
                                         const PlanRequest& request = {});
LOGITLESS_API LossPlan plan_head_backward(const HeadOptions& options, const HeadInputs& inputs,
                                          const HeadCotangents& cotangents,
                                          const HeadGradients& gradients,
                                          const PlanRequest& request = {});
LOGITLESS_API LossPlan plan_head_forward(const Context& context, const HeadOptions& options,
                                         const HeadInputs& inputs, const HeadOutputs& outputs,
                                         const PlanRequest& request = {});
LOGITLESS_API LossPlan plan_head_backward(const Context& context, const HeadOptions& options,
                                          const HeadInputs& inputs,
                                          const HeadCotangents& cotangents,
                                          const HeadGradients& gradients,
                                          const PlanRequest& request = {});

// Run the head. Errors, memory and determinism are those of cross_entropy.
LOGITLESS_API void head_forward(const Context& context, const LossPlan& plan,
                                const HeadOptions& options, const HeadInputs& inputs,
                                const HeadOutputs& outputs, const Workspace& workspace);
LOGITLESS_API void head_backward(const Context& context, const LossPlan& plan,
                                 const HeadOptions& options, const HeadInputs& inputs,
                                 const HeadCotangents& cotangents, const HeadGradients& gradients,
                                 const Workspace& workspace);

// Multiplies gradients by factor, an f32 scalar, in place. It turns gradients for an upstream
// gradient of 1 into those for another one. With a GPU context factor and gradients are in its
// memory: one kernel is enqueued, which reads the factor there and writes nothing where it is 1.
// Products are fp32, rounded once. No extra memory. Undefined gradients are skipped; each is f32 |
// bf16 | f16 (d_hidden of any rank; on a GPU with contiguous rows). Throws InvalidArgument for
// other dtypes and shapes.
LOGITLESS_API void scale_gradients(const Context& context, const ConstTensorView& factor,
                                   const HeadGradients& gradients);

}  // namespace logitless
