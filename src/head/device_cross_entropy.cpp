#include "head/device_cross_entropy.h"

#include <cmath>

#include "core/check.h"
#include "head/device_engine.h"
#include "head/far_field.h"
#include "head/validate.h"

namespace logitless {

LossStatistics device_cross_entropy(const Context& context, const LossPlan& plan,
                                    const CrossEntropyOptions& options,
                                    const CrossEntropyInputs& in, const CrossEntropyOutputs& out,
                                    const HeadFeatures& features, const Workspace& workspace) {
  const HeadShape shape = require_head(in.hidden, in.weight, in.bias);
  DeviceEngine engine(context, plan, shape, features, workspace);
  engine.set_matrices(in.hidden, in.weight);
  engine.set_targets(in.targets, options.ignore_index);
  engine.set_gradients(out.d_hidden, out.d_weight, out.d_bias);
  cuda::ForwardCall& all = engine.all;
  all.bias = device_floats("bias", in.bias);
  all.sequence = options.next_token ? in.hidden.size(1) : 0;
  all.lse = device_floats("lse", out.lse);
  all.log_prob = device_floats("log_prob", out.log_prob);
  all.target_logit = device_floats("target_logit", out.target_logit);
  all.entropy = device_floats("entropy", out.entropy);

  cuda::LossCall loss;
  loss.tokens = shape.tokens;
  loss.class_weight = device_floats("class_weight", in.class_weight);
  loss.token_weight = device_floats("token_weight", in.token_weight);
  loss.target_weight = device_floats("target_weight", in.target_weight);
  loss.loss = device_floats("loss", out.loss);
  loss.grad_loss = in.grad_loss;
  loss.grad_losses = device_floats("grad_losses", in.grad_losses);
  loss.argmax = features.argmax;
  loss.wide_argmax = engine.set_argmax(out.argmax);
  if (features.label_smoothing) all.omega = loss.class_weight;
  float* const bound = device_floats("d_hidden_bound", out.d_hidden_bound);
  engine.set_far(in.order, bound, in.sample_seed);
  if (bound != nullptr && !is_far(plan.kind))
    cuda::fill_device(bound, 0, static_cast<std::size_t>(shape.tokens) * 4, context.stream());
  loss.reduction = options.reduction == Reduction::none   ? cuda::LossReduction::none
                   : options.reduction == Reduction::mean ? cuda::LossReduction::mean
                                                          : cuda::LossReduction::sum;
  loss.label_smoothing = options.label_smoothing;
  loss.z_loss = options.z_loss;
  loss.normalizer = options.normalizer.value_or(0.0);
  loss.nan_if_empty = options.nan_if_empty;
  loss.statistics = engine.statistics();
  loss.workspace = engine.loss_workspace();
  cuda::begin_loss(loss, all);
  engine.run([&](const cuda::ForwardCall& chunk, cuda::RowCoefficients* rows, float* delta) {
    cuda::token_losses(loss, chunk, rows, delta);
  });
  cuda::finish_loss(loss, all);
  // Of the audit the coefficients are wanted alone; what begin_loss has left is of all tokens.
  cuda::LossCall audit = loss;
  audit.loss = nullptr;
  audit.wide_argmax = nullptr;
  engine.audit(context, plan, workspace,
               [&](const cuda::ForwardCall& chunk, cuda::RowCoefficients* rows, float* delta) {
                 cuda::token_losses(audit, chunk, rows, delta);
               });
  LossStatistics stats;
  stats.tokens = shape.tokens;
  return stats;
}

namespace {

FarFieldStatistics far_statistics(const Context& context, const LossPlan& plan,
                                  const Workspace& workspace) {
  const DeviceLayout layout = layout_device(cuda::find_device_kernel(plan.kernel), plan.shape,
                                            plan.features, device_sizes(plan));
  cuda::FarSums sums;
  cuda::copy_to_host(&sums, static_cast<const std::byte*>(workspace.data()) + layout.far_sums,
                     sizeof(sums), context.stream());
  FarFieldStatistics out;
  if (sums.pairs > 0) {
    out.kept = static_cast<double>(sums.kept) / static_cast<double>(sums.pairs);
    out.sampled = static_cast<double>(sums.sampled) / static_cast<double>(sums.pairs);
  }
  out.passes = far_passes(plan.kind, out.kept, out.sampled, plan.shape, plan.features);
  out.dense_fallback = sums.fallback != 0;
  if (sums.norm_squared > 0.0) out.bound = std::sqrt(sums.bound_squared / sums.norm_squared);
  if (plan.kind == PlanKind::far_both) out.bound = -1.0;
  if (plan.audit == nullptr || sums.audited == 0) return out;
  out.audited_tokens = sums.audited;
  out.audited_error = sums.audit_norm_squared == 0.0
                          ? 0.0
                          : std::sqrt(sums.audit_error_squared / sums.audit_norm_squared);
  out.audited_lse_error = std::sqrt(sums.lse_error_squared / static_cast<double>(sums.audited));
  out.audited_lse_error_max = sums.lse_error_max;
  return out;
}

}  // namespace

LossStatistics device_statistics(const Context& context, const LossPlan& plan,
                                 const Workspace& workspace) {
  require(context.device().kind == DeviceKind::cuda,
          "context: expected a GPU's; on the CPU cross_entropy itself returns the statistics");
  require(workspace.bytes() >= plan.workspace_bytes(), "workspace: ", workspace.bytes(),
          " bytes, the plan needs ", plan.workspace_bytes());
  cuda::DeviceStatistics found;
  cuda::copy_to_host(&found, workspace.data(), sizeof(found), context.stream());
  const auto per_token = static_cast<std::uint64_t>(plan.features.targets_per_token);
  require(found.bad_target == cuda::kNoBadTarget, "targets: the one at position ",
          found.bad_target / per_token,
          per_token > 1 ? concat(", entry ", found.bad_target % per_token) : "", " is outside [0, ",
          plan.shape.vocab, ") and not ignore_index");
  LossStatistics stats;
  stats.valid_tokens = found.valid_tokens;
  stats.normalizer = found.normalizer;
  stats.mean_lse = found.mean_lse;
  stats.mean_log_prob = found.mean_log_prob;
  stats.correct = found.correct;
  if (is_far(plan.kind)) stats.far = far_statistics(context, plan, workspace);
  return stats;
}

namespace {

void set_inputs(DeviceEngine& engine, const HeadOptions& options, const HeadInputs& in) {
  engine.set_matrices(in.hidden, in.weight);
  engine.set_targets(in.targets, options.ignore_index);
  engine.all.bias = device_floats("bias", in.bias);
  engine.all.omega = device_floats("vocab_weight", in.vocab_weight);
}

}  // namespace

void device_head_forward(const Context& context, const LossPlan& plan, const HeadOptions& options,
                         const HeadInputs& in, const HeadOutputs& out, const HeadFeatures& features,
                         const Workspace& workspace) {
  const HeadShape shape = require_head(in.hidden, in.weight, in.bias);
  DeviceEngine engine(context, plan, shape, features, workspace);
  set_inputs(engine, options, in);
  cuda::ForwardCall& all = engine.all;
  all.lse = device_floats("lse", out.lse);
  all.log_prob = device_floats("log_prob", out.log_prob);
  all.target_logit = device_floats("target_logit", out.target_logit);
  all.entropy = device_floats("entropy", out.entropy);
  all.weighted_sum = device_floats("weighted_logit_sum", out.weighted_logit_sum);
  require(!out.argmax.defined() || out.argmax.dtype() == DType::i32,
          "argmax: expected i32 on a GPU, got ", name_of(out.argmax.dtype()));
  engine.set_argmax(out.argmax);
  engine.run([](const cuda::ForwardCall&, cuda::RowCoefficients*, float*) {});
}

void device_head_backward(const Context& context, const LossPlan& plan, const HeadOptions& options,
                          const HeadInputs& in, const HeadCotangents& cotangents,
                          const HeadGradients& gradients, const HeadFeatures& features,
                          const Workspace& workspace) {
  const HeadShape shape = require_head(in.hidden, in.weight, in.bias);
  DeviceEngine engine(context, plan, shape, features, workspace);
  set_inputs(engine, options, in);
  engine.set_gradients(gradients.d_hidden, gradients.d_weight, gradients.d_bias);
  cuda::CotangentCall g;
  g.lse = device_floats("cotangent of lse", cotangents.lse);
  g.target_logit = device_floats("cotangent of target_logit", cotangents.target_logit);
  g.log_prob = device_floats("cotangent of log_prob", cotangents.log_prob);
  g.entropy = device_floats("cotangent of entropy", cotangents.entropy);
  g.weighted_sum = device_floats("cotangent of weighted_logit_sum", cotangents.weighted_logit_sum);
  engine.run([&](const cuda::ForwardCall& chunk, cuda::RowCoefficients* rows, float* delta) {
    cuda::token_cotangents(g, chunk, rows, delta);
  });
}

}  // namespace logitless
