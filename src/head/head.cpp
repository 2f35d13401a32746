#include "logitless/head.h"

#include "core/check.h"
#include "core/described.h"
#include "head/cpu/calls.h"
#include "head/cuda/calls.h"
#include "head/overlap.h"
#include "head/plan/choose.h"
#include "head/plan_sizes.h"
#include "head/shard_plan.h"
#include "head/tensor_roles.h"
#include "head/validate.h"
#include "logitless/saved_head.h"

namespace logitless {
namespace {

// Returns K for targets [..., K], and 1 for targets [...].
int targets_per_token(const HeadInputs& in) {
  return in.targets.rank() == in.hidden.rank()
             ? static_cast<int>(in.targets.size(in.targets.rank() - 1))
             : 1;
}

std::int64_t last_of(const HeadInputs& in) {
  return in.targets.rank() == in.hidden.rank() ? targets_per_token(in) : -1;
}

HeadShape check_inputs(const HeadOptions& options, const HeadInputs& in) {
  const bool sharded = is_sharded(in.sharding);
  const HeadShape shape =
      require_head(in.hidden, in.weight, in.bias, sharded ? 0 : 1, columns_of(in.sharding));
  if (sharded) {
    require_one_dtype(in.hidden, in.weight, "with a sharding");
    require_sharding(in.sharding, shape.vocab);
  }
  require_transform(options.logit_scale, options.softcap);
  require(in.targets.defined(), "targets: expected a tensor, got none");
  require(last_of(in) != 0, "targets: ", described(in.targets), " has no entries per token");
  require_per_token("targets", in.targets, in.hidden, true, last_of(in));
  require_vector("vocab_weight", in.vocab_weight, global_vocab(in.sharding, shape.vocab),
                 DType::f32);
  return shape;
}

HeadFeatures base_features(const HeadOptions& options, const HeadInputs& in) {
  HeadFeatures f;
  f.targets_per_token = targets_per_token(in);
  f.bias = in.bias.defined();
  f.logit_scale = options.logit_scale;
  f.softcap = options.softcap;
  f.precision = options.precision;
  f.vocab_weight = in.vocab_weight.defined();
  set_operands(in.hidden, in.weight, f);
  set_sharding(in.sharding, f);
  return f;
}

HeadFeatures forward_features(const HeadOptions& options, const HeadInputs& in,
                              const HeadOutputs& out) {
  require_per_token_output("lse", out.lse, in.hidden, false);
  require_per_token_output("target_logit", out.target_logit, in.hidden, false, last_of(in));
  require_per_token_output("log_prob", out.log_prob, in.hidden, false, last_of(in));
  require_per_token_output("entropy", out.entropy, in.hidden, false);
  require_per_token_output("weighted_logit_sum", out.weighted_logit_sum, in.hidden, false);
  require_per_token_output("argmax", out.argmax, in.hidden, true);
  HeadFeatures f = base_features(options, in);
  f.entropy = out.entropy.defined();
  f.argmax = out.argmax.defined();
  f.label_smoothing = out.weighted_logit_sum.defined();
  return f;
}

HeadFeatures backward_features(const HeadOptions& options, const HeadInputs& in,
                               const HeadCotangents& g, const HeadGradients& to) {
  require_per_token("cotangent of lse", g.lse, in.hidden, false);
  require_per_token("cotangent of target_logit", g.target_logit, in.hidden, false, last_of(in));
  require_per_token("cotangent of log_prob", g.log_prob, in.hidden, false, last_of(in));
  require_per_token("cotangent of entropy", g.entropy, in.hidden, false);
  require_per_token("cotangent of weighted_logit_sum", g.weighted_logit_sum, in.hidden, false);
  require_gradient("d_hidden", to.d_hidden, in.hidden);
  require_gradient("d_weight", to.d_weight, in.weight);
  require(!to.d_bias.defined() || in.bias.defined(), "d_bias: asked for without a bias");
  if (to.d_bias.defined()) require_gradient("d_bias", to.d_bias, in.bias);
  HeadFeatures f = base_features(options, in);
  f.entropy = g.entropy.defined();
  f.entropy_gradient = g.entropy.defined();
  f.label_smoothing = g.weighted_logit_sum.defined();
  f.d_hidden = to.d_hidden.defined();
  f.d_weight = to.d_weight.defined();
  f.d_bias = to.d_bias.defined();
  require(f.d_hidden || f.d_weight || f.d_bias,
          "gradients: expected d_hidden, d_weight or d_bias, got none");
  if (f.d_hidden) f.d_hidden_dtype = to.d_hidden.dtype();
  if (f.d_weight) f.d_weight_dtype = to.d_weight.dtype();
  f.d_weight_strided = f.d_weight && !to.d_weight.contiguous();
  f.accumulate = options.accumulate;
  return f;
}

// Throws unless the outputs are apart from the inputs and from each other. `d_weight` is given for
// a forward that uses its memory.
void require_own_memory(const HeadInputs& in, const HeadOutputs& out,
                        const ConstTensorView& d_weight = {}) {
  NamedViews outputs, inputs;
  each_head_output(outputs.adder(), out);
  each_head_input(inputs.adder(), in);
  inputs.add({"d_weight", d_weight});
  require_apart(outputs, inputs);
}

void require_own_memory(const HeadInputs& in, const HeadCotangents& g, const HeadGradients& to) {
  NamedViews outputs, inputs;
  each_head_gradient(outputs.adder(), to);
  each_head_input(inputs.adder(), in);
  each_head_cotangent(inputs.adder("cotangent of "), g);
  require_apart(outputs, inputs);
}

HeadCall make_call(const Context& context, const LossPlan& plan, const HeadOptions& options,
                   const HeadInputs& in, const Workspace& workspace, const HeadShape& shape,
                   const HeadFeatures& features) {
  HeadCall call;
  call.context = &context;
  call.plan = &plan;
  call.workspace = &workspace;
  call.shape = shape;
  call.features = features;
  call.in = {.hidden = in.hidden,
             .weight = in.weight,
             .bias = in.bias,
             .logit_weights = in.vocab_weight,
             .targets = in.targets,
             .ignore_index = options.ignore_index,
             .sequence = 0};
  set_shard(plan, in.sharding, call);
  return call;
}

TokenOutputs token_outputs(const HeadOutputs& out) {
  return {.lse = out.lse,
          .target_logit = out.target_logit,
          .log_prob = out.log_prob,
          .entropy = out.entropy,
          .weighted_sum = out.weighted_logit_sum,
          .argmax = out.argmax};
}

// Plans the calls; collective if the inputs are sharded. `features()` is called after all checks.
template <typename Features>
LossPlan plan_calls(const LocalPlanner& planner, const HeadOptions& options, const HeadInputs& in,
                    const PlanRequest& request, const Features& features) {
  if (!is_sharded(in.sharding)) {
    const HeadShape shape = check_inputs(options, in);
    return planner.plan(shape, features(), request);
  }
  const auto head = [&]() -> ShardedHead {
    const HeadShape shape = check_inputs(options, in);
    return {
        .shape = shape,
        .features = features(),
        .device = planner.device(request),
        .options = [&](PlanDigest& digest) { digest.same("ignore_index", options.ignore_index); }};
  };
  return plan_sharded(planner, in.sharding, request, head);
}
LossPlan plan_forward(const LocalPlanner& planner, const HeadOptions& options, const HeadInputs& in,
                      const HeadOutputs& out, const PlanRequest& request) {
  return plan_calls(planner, options, in, request,
                    [&] { return forward_features(options, in, out); });
}
LossPlan plan_backward(const LocalPlanner& planner, const HeadOptions& options,
                       const HeadInputs& in, const HeadCotangents& cotangents,
                       const HeadGradients& gradients, const PlanRequest& request) {
  return plan_calls(planner, options, in, request,
                    [&] { return backward_features(options, in, cotangents, gradients); });
}

// --- A forward whose exponentials are saved until the backward.

// Features of a saved head. An output of the entropy may have a cotangent, unless a softcap is in
// the way.
HeadFeatures saved_features(const HeadOptions& options, const HeadInputs& in,
                            const HeadOutputs& out, const HeadGradients& to) {
  if (is_sharded(in.sharding))
    throw Unsupported(
        "sharding: a saved head takes no sharded vocabulary; use head_forward and head_backward");
  const HeadFeatures forward = forward_features(options, in, out);
  HeadFeatures f = backward_features(options, in, {}, to);
  f.entropy = forward.entropy;
  f.entropy_gradient = forward.entropy && options.softcap == 0.0f;
  f.argmax = forward.argmax;
  f.label_smoothing = forward.label_smoothing;
  return f;
}

// Features of the backward of a saved head. The plan determines what the forward has saved.
HeadFeatures saved_features(const LossPlan& plan, const HeadOptions& options, const HeadInputs& in,
                            const HeadCotangents& g, const HeadGradients& to) {
  require(!g.entropy.defined() || options.softcap == 0.0f,
          "cotangent of entropy: expected none with a softcap, since its gradient needs the logits "
          "again; use head_backward");
  require(!g.entropy.defined() || plan.features.entropy,
          "cotangent of entropy: expected none, since the forward was planned without that output");
  require(!g.weighted_logit_sum.defined() || plan.features.label_smoothing,
          "cotangent of weighted_logit_sum: expected none, since the forward was planned without "
          "that output");
  HeadFeatures f = backward_features(options, in, g, to);
  f.entropy = plan.features.entropy;
  f.entropy_gradient = plan.features.entropy_gradient;
  f.argmax = plan.features.argmax;
  f.label_smoothing = plan.features.label_smoothing;
  return f;
}

LossPlan plan_saved(const LocalPlanner& planner, const HeadOptions& options, const HeadInputs& in,
                    const HeadOutputs& out, const HeadGradients& gradients,
                    const PlanRequest& request) {
  const HeadShape shape = check_inputs(options, in);
  return planner.plan_in_one_chunk(shape, saved_features(options, in, out, gradients), request);
}

void require_saved(const Context& context, const LossPlan& plan) {
  if (context.device().kind != DeviceKind::cuda)
    throw Unsupported(
        "context: exp(z) is saved from forward to backward on a GPU; on the CPU use head_forward "
        "and head_backward");
  require(is_dense_in_one_chunk(plan),
          "plan: expected one of plan_head_saved, dense with all tokens in one chunk, got ",
          name_of(plan.kind), " with chunks of ", plan.chunk_tokens);
}

}  // namespace

LossPlan plan_head_saved(const HeadOptions& options, const HeadInputs& in, const HeadOutputs& out,
                         const HeadGradients& gradients, const PlanRequest& request) {
  return plan_saved({}, options, in, out, gradients, request);
}

LossPlan plan_head_saved(const Context& context, const HeadOptions& options, const HeadInputs& in,
                         const HeadOutputs& out, const HeadGradients& gradients,
                         const PlanRequest& request) {
  return plan_saved(context, options, in, out, gradients, request);
}

void head_forward_saved(const Context& context, const LossPlan& plan, const HeadOptions& options,
                        const HeadInputs& in, const HeadOutputs& out,
                        const HeadGradients& gradients, const Workspace& workspace) {
  require_saved(context, plan);
  const HeadShape shape = check_inputs(options, in);
  const HeadFeatures features = saved_features(options, in, out, gradients);
  require_own_memory(in, out, gradients.d_weight);
  require_own_memory(in, HeadCotangents{}, gradients);
  HeadCall call = make_call(context, plan, options, in, workspace, shape, features);
  call.gradients = gradients;
  cuda::head_forward_saved(call, token_outputs(out));
}

void head_backward_saved(const Context& context, const LossPlan& plan, const HeadOptions& options,
                         const HeadInputs& in, const HeadCotangents& cotangents,
                         const HeadGradients& gradients, const Workspace& workspace) {
  require_saved(context, plan);
  const HeadShape shape = check_inputs(options, in);
  const HeadFeatures features = saved_features(plan, options, in, cotangents, gradients);
  require_own_memory(in, cotangents, gradients);
  HeadCall call = make_call(context, plan, options, in, workspace, shape, features);
  call.gradients = gradients;
  cuda::head_backward_saved(call, cotangents);
}

LossPlan plan_head_forward(const HeadOptions& options, const HeadInputs& in, const HeadOutputs& out,
                           const PlanRequest& request) {
  return plan_forward({}, options, in, out, request);
}

LossPlan plan_head_backward(const HeadOptions& options, const HeadInputs& in,
                            const HeadCotangents& cotangents, const HeadGradients& gradients,
                            const PlanRequest& request) {
  return plan_backward({}, options, in, cotangents, gradients, request);
}

LossPlan plan_head_forward(const Context& context, const HeadOptions& options, const HeadInputs& in,
                           const HeadOutputs& out, const PlanRequest& request) {
  return plan_forward(context, options, in, out, request);
}

LossPlan plan_head_backward(const Context& context, const HeadOptions& options,
                            const HeadInputs& in, const HeadCotangents& cotangents,
                            const HeadGradients& gradients, const PlanRequest& request) {
  return plan_backward(context, options, in, cotangents, gradients, request);
}

void head_forward(const Context& context, const LossPlan& plan, const HeadOptions& options,
                  const HeadInputs& in, const HeadOutputs& out, const Workspace& workspace) {
  run_call(plan, in.sharding, [&] {
    const HeadShape shape = check_inputs(options, in);
    const HeadFeatures features = forward_features(options, in, out);
    require_own_memory(in, out);
    HeadCall call = make_call(context, plan, options, in, workspace, shape, features);
    call.out = token_outputs(out);
    context.device().kind == DeviceKind::cuda ? cuda::head_forward(call) : cpu::head_forward(call);
  });
}

void head_backward(const Context& context, const LossPlan& plan, const HeadOptions& options,
                   const HeadInputs& in, const HeadCotangents& cotangents,
                   const HeadGradients& gradients, const Workspace& workspace) {
  run_call(plan, in.sharding, [&] {
    const HeadShape shape = check_inputs(options, in);
    const HeadFeatures features = backward_features(options, in, cotangents, gradients);
    require_own_memory(in, cotangents, gradients);
    HeadCall call = make_call(context, plan, options, in, workspace, shape, features);
    call.gradients = gradients;
    context.device().kind == DeviceKind::cuda ? cuda::head_backward(call, cotangents)
                                              : cpu::head_backward(call, cotangents);
  });
}

}  // namespace logitless
