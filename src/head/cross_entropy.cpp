#include "logitless/cross_entropy.h"

#include <charconv>
#include <cmath>
#include <string>

#include "core/check.h"
#include "core/described.h"
#include "head/cpu/calls.h"
#include "head/cuda/calls.h"
#include "head/overlap.h"
#include "head/plan/choose.h"
#include "head/shard_plan.h"
#include "head/tensor_roles.h"
#include "head/validate.h"

namespace logitless {
namespace {

int targets_per_token(const CrossEntropyInputs& in) {
  return in.target_weight.defined() && in.target_weight.rank() > 0
             ? static_cast<int>(in.target_weight.size(in.target_weight.rank() - 1))
             : 1;
}

void check_options(const CrossEntropyOptions& options, const CrossEntropyInputs& in) {
  require_transform(options.logit_scale, options.softcap);
  require(options.reduction <= Reduction::sum, "reduction: ", static_cast<int>(options.reduction),
          " is no Reduction");
  require_loss_numbers(options);
  if (options.normalizer.has_value()) {
    require(std::isfinite(*options.normalizer) && *options.normalizer > 0.0,
            "normalizer: expected a number > 0, got ", *options.normalizer);
    require(options.reduction == Reduction::mean, "normalizer: only reduction mean divides by it");
  }
  require(!in.grad_losses.defined() || options.reduction == Reduction::none,
          "grad_losses: only reduction none has a gradient for each token; give grad_loss");
  require(std::isfinite(in.grad_loss), "grad_loss: expected a finite number, got ", in.grad_loss);
  require(!options.next_token || in.hidden.rank() == 3,
          "next_token: expected hidden [B, T, D], got ", described(in.hidden));
  require(!options.next_token || !in.target_weight.defined(),
          "next_token: cannot be combined with target_weight");
}

void check_arguments(const CrossEntropyOptions& options, const CrossEntropyInputs& in,
                     const CrossEntropyOutputs& out) {
  const HeadShape shape = shape_of(in);
  check_options(options, in);
  require(in.targets.defined(), "targets: expected a tensor, got none");
  const std::int64_t last = in.target_weight.defined() ? targets_per_token(in) : -1;
  require(last != 0, "target_weight: ", described(in.target_weight), " has no entries per token");
  require_per_token("targets", in.targets, in.hidden, true, last);
  require_per_token("grad_losses", in.grad_losses, in.hidden, false);
  if (is_sharded(in.sharding)) {
    require_one_dtype(in.hidden, in.weight, "with a sharding");
    require_sharding(in.sharding, shape.vocab);
    require(
        !options.next_token || !in.sharding.tokens,
        "next_token: the last target of a rank's tokens is its neighbour's; give shifted targets");
  }
  each_loss_weight(
      [&](const char* name, WeightAxis axis, const ConstTensorView& view) {
        if (axis == WeightAxis::vocab) {
          require_vector(name, view, global_vocab(in.sharding, shape.vocab), DType::f32);
        } else {
          require_per_token(name, view, in.hidden, false, axis == WeightAxis::targets ? last : -1);
        }
      },
      in);

  if (options.reduction == Reduction::none) {
    require_per_token_output("loss", out.loss, in.hidden, false);
  } else if (out.loss.defined()) {
    require(out.loss.numel() == 1 && out.loss.dtype() == DType::f32, "loss: expected one f32, got ",
            described(out.loss));
    require_data("loss", out.loss);
  }
  require_per_token_output("lse", out.lse, in.hidden, false);
  require_per_token_output("target_logit", out.target_logit, in.hidden, false);
  require_per_token_output("log_prob", out.log_prob, in.hidden, false);
  require_per_token_output("entropy", out.entropy, in.hidden, false);
  require_per_token_output("argmax", out.argmax, in.hidden, true);
  require_per_token_output("d_hidden_bound", out.d_hidden_bound, in.hidden, false);
  require(!out.d_hidden_bound.defined() || out.d_hidden.defined(),
          "d_hidden_bound: asked for without d_hidden");
  const bool single = targets_per_token(in) == 1;
  require(
      single || (!out.target_logit.defined() && !out.log_prob.defined()),
      "target_logit, log_prob: defined for one target a token; head_forward returns them for K");
  require_gradient("d_hidden", out.d_hidden, in.hidden);
  require_gradient("d_weight", out.d_weight, in.weight);
  if (out.d_bias.defined()) {
    require(in.bias.defined(), "d_bias: asked for without a bias");
    require_gradient("d_bias", out.d_bias, in.bias);
  }
}

void require_own_memory(const CrossEntropyInputs& in, const CrossEntropyOutputs& out) {
  NamedViews outputs, inputs;
  each_loss_output(outputs.adder(), out);
  each_loss_input(inputs.adder(), in);
  require_apart(outputs, inputs);
}

// Returns the weights of a sum of all logits: those of classes, for label smoothing.
ConstTensorView logit_weights_of(const CrossEntropyOptions& options, const CrossEntropyInputs& in) {
  return options.label_smoothing != 0.0f ? in.class_weight : ConstTensorView();
}

}  // namespace

HeadFeatures features_of(const CrossEntropyOptions& options, const CrossEntropyInputs& in,
                         const CrossEntropyOutputs& out) {
  HeadFeatures f;
  f.targets_per_token = targets_per_token(in);
  f.bias = in.bias.defined();
  f.logit_scale = options.logit_scale;
  f.softcap = options.softcap;
  f.precision = options.precision;
  f.label_smoothing = options.label_smoothing != 0.0f;
  f.vocab_weight = logit_weights_of(options, in).defined();
  f.entropy = out.entropy.defined();
  f.argmax = out.argmax.defined();
  f.d_hidden = out.d_hidden.defined();
  f.d_weight = out.d_weight.defined();
  f.d_bias = out.d_bias.defined();
  if (f.d_hidden) f.d_hidden_dtype = out.d_hidden.dtype();
  if (f.d_weight) f.d_weight_dtype = out.d_weight.dtype();
  f.d_weight_strided = f.d_weight && !out.d_weight.contiguous();
  f.accumulate = options.accumulate;
  set_operands(in.hidden, in.weight, f);
  set_sharding(in.sharding, f);
  return f;
}

HeadShape shape_of(const CrossEntropyInputs& in) {
  return require_head(in.hidden, in.weight, in.bias, is_sharded(in.sharding) ? 0 : 1,
                      columns_of(in.sharding));
}

namespace {

// Returns the shortest text that reads as this number again, so that ranks compare every digit.
template <typename Number>
std::string exact_text(Number value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof(text), value).ptr};
}

// Plans the calls; collective if the inputs are sharded.
LossPlan plan_calls(const LocalPlanner& planner, const CrossEntropyOptions& options,
                    const CrossEntropyInputs& in, const CrossEntropyOutputs& out,
                    const PlanRequest& request) {
  if (!is_sharded(in.sharding)) {
    check_arguments(options, in, out);
    return planner.plan(shape_of(in), features_of(options, in, out), request);
  }
  const auto head = [&]() -> ShardedHead {
    check_arguments(options, in, out);
    return {.shape = shape_of(in),
            .features = features_of(options, in, out),
            .device = planner.device(request),
            .options = [&](PlanDigest& digest) {
              digest.same("reduction", static_cast<int>(options.reduction));
              for (const auto& number : loss_numbers(options))
                digest.same(number.name, exact_text(*number.value));
              digest.same("normalizer",
                          options.normalizer ? exact_text(*options.normalizer) : "none");
              digest.same("ignore_index", options.ignore_index);
              digest.same("next_token", options.next_token);
            }};
  };
  return plan_sharded(planner, in.sharding, request, head);
}

}  // namespace

LossPlan plan_cross_entropy(const CrossEntropyOptions& options, const CrossEntropyInputs& in,
                            const CrossEntropyOutputs& out, const PlanRequest& request) {
  return plan_calls({}, options, in, out, request);
}

LossPlan plan_cross_entropy(const Context& context, const CrossEntropyOptions& options,
                            const CrossEntropyInputs& in, const CrossEntropyOutputs& out,
                            const PlanRequest& request) {
  return plan_calls(context, options, in, out, request);
}

namespace {

LossStatistics call_cross_entropy(const Context& context, const LossPlan& plan,
                                  const CrossEntropyOptions& options, const CrossEntropyInputs& in,
                                  const CrossEntropyOutputs& out, const Workspace& workspace) {
  check_arguments(options, in, out);
  require_own_memory(in, out);
  HeadCall call;
  call.context = &context;
  call.plan = &plan;
  call.workspace = &workspace;
  call.shape = shape_of(in);
  call.features = features_of(options, in, out);
  call.in = {.hidden = in.hidden,
             .weight = in.weight,
             .bias = in.bias,
             .logit_weights = logit_weights_of(options, in),
             .targets = in.targets,
             .ignore_index = options.ignore_index,
             .sequence = options.next_token ? in.hidden.size(1) : 0};
  call.out = {.lse = out.lse,
              .target_logit = out.target_logit,
              .log_prob = out.log_prob,
              .entropy = out.entropy,
              .weighted_sum = {},
              .argmax = out.argmax};
  call.gradients = {.d_hidden = out.d_hidden, .d_weight = out.d_weight, .d_bias = out.d_bias};
  call.far = {
      .order = &in.order, .sample_seed = in.sample_seed, .d_hidden_bound = out.d_hidden_bound};
  set_shard(plan, in.sharding, call);
  return context.device().kind == DeviceKind::cuda
             ? cuda::cross_entropy(call, options, in, out.loss)
             : cpu::cross_entropy(call, options, in, out.loss);
}

}  // namespace

LossStatistics cross_entropy(const Context& context, const LossPlan& plan,
                             const CrossEntropyOptions& options, const CrossEntropyInputs& in,
                             const CrossEntropyOutputs& out, const Workspace& workspace) {
  LossStatistics stats;
  run_call(plan, in.sharding,
           [&] { stats = call_cross_entropy(context, plan, options, in, out, workspace); });
  return stats;
}

LossStatistics cross_entropy(const Context& context, const CrossEntropyOptions& options,
                             const CrossEntropyInputs& in, const CrossEntropyOutputs& out,
                             std::size_t memory_budget) {
  const LossPlan plan =
      plan_cross_entropy(context, options, in, out, {.memory_budget = memory_budget});
  context.trace(plan.explain());
  const Workspace workspace(context, plan);
  LossStatistics stats = cross_entropy(context, plan, options, in, out, workspace);
  if (context.device().kind == DeviceKind::cpu) return stats;
  const std::int64_t tokens = stats.tokens;
  stats = device_statistics(context, plan, workspace);
  stats.tokens = tokens;
  return stats;
}

}  // namespace logitless
