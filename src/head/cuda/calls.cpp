#include "head/cuda/calls.h"

#include <span>
#include <vector>

#include "core/check.h"
#include "head/cuda/engine.h"
#include "head/cuda/exchange.h"
#include "head/cuda/shared_far_field.h"
#include "head/cuda/views.h"
#include "head/far_work.h"

namespace logitless {
namespace cuda {
namespace {

LossReduction reduction_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::none:
      return LossReduction::none;
    case Reduction::mean:
      return LossReduction::mean;
    case Reduction::sum:
      return LossReduction::sum;
  }
  return LossReduction::sum;
}

void require_narrow(const TensorView& argmax) {
  require(!argmax.defined() || argmax.dtype() == DType::i32, "argmax: expected i32 on a GPU, got ",
          name_of(argmax.dtype()));
}

CotangentCall cotangents_of(const HeadCotangents& cotangents) {
  CotangentCall g;
  g.lse = floats_of("cotangent of lse", cotangents.lse);
  g.target_logit = floats_of("cotangent of target_logit", cotangents.target_logit);
  g.log_prob = floats_of("cotangent of log_prob", cotangents.log_prob);
  g.entropy = floats_of("cotangent of entropy", cotangents.entropy);
  g.weighted_sum = floats_of("cotangent of weighted_logit_sum", cotangents.weighted_logit_sum);
  return g;
}

}  // namespace

LossStatistics cross_entropy(const HeadCall& call, const CrossEntropyOptions& options,
                             const CrossEntropyInputs& in, const TensorView& loss_output) {
  LossCall loss;
  loss.tokens = call.shape.tokens;
  each_loss_weight([](const char* name, WeightAxis, const float*& to,
                      const ConstTensorView& view) { to = floats_of(name, view); },
                   loss, in);
  loss.loss = floats_of("loss", loss_output);
  loss.grad_loss = in.grad_loss;
  loss.grad_losses = floats_of("grad_losses", in.grad_losses);
  Engine engine(call);
  const Run& bound = engine.bound();
  const ForwardCall& all = bound.all;
  loss.argmax = call.features.argmax;
  loss.int64_argmax = bound.int64_argmax;
  loss.reduction = reduction_of(options.reduction);
  loss.terms = loss_terms(options);
  loss.normalizer = options.normalizer.value_or(0.0);
  loss.nan_if_empty = options.nan_if_empty;
  loss.statistics = bound.statistics();
  loss.workspace = bound.loss_workspace();
  loss.finishes = !call.shard.tokens_sharded;
  const TensorView& error = call.far.d_hidden_bound;
  if (error.defined() && !is_far(call.plan->kind))
    fill_device(error.data(), 0, static_cast<std::size_t>(error.bytes()), all.stream);
  loss.shares = global_denominator(bound, loss);
  begin_loss(loss, all);
  engine.run([&](const ForwardCall& chunk, RowCoefficients* rows, float* delta) {
    token_losses(loss, chunk, rows, delta);
  });
  call.shard.tokens_sharded ? finish_sharded(bound, loss) : finish_loss(loss, all);
  // The audit needs only the coefficients. Totals are those of the loss, whether begin_loss or
  // token_losses made them.
  LossCall audit = loss;
  audit.loss = nullptr;
  audit.int64_argmax = nullptr;
  audit.finishes = false;
  engine.audit([&](const ForwardCall& chunk, RowCoefficients* rows, float* delta) {
    token_losses(audit, chunk, rows, delta);
  });
  if (is_far(call.plan->kind) && call.shard.sharded()) publish_far_sums(bound);
  LossStatistics stats;
  stats.tokens = call.shape.tokens;
  return stats;
}

FarFieldStatistics far_statistics(const Context& context, const LossPlan& plan,
                                  const Workspace& workspace) {
  const auto& layout = LossPlanAccess::layout<Layout>(plan);
  const auto fetch = [&](std::size_t offset, std::span<FarSums> sums) {
    copy_to_host(sums.data(), static_cast<const std::byte*>(workspace.data()) + offset,
                 sums.size_bytes(), context.stream());
  };
  if (plan.features.vocab_ranks > 0) {
    std::vector<FarSums> ranks(static_cast<std::size_t>(plan.features.vocab_ranks));
    fetch(layout.shard_far.sums, ranks);
    return far_statistics_of_ranks(plan, ranks, kFarGroup);
  }
  FarSums sums;
  fetch(layout.far.sums, {&sums, 1});
  return logitless::far_statistics(plan, sums, kFarGroup);
}

void head_forward(const HeadCall& call) {
  require_narrow(call.out.argmax);
  floats_of("vocab_weight", call.in.logit_weights);
  Engine(call).run([](const ForwardCall&, RowCoefficients*, float*) {});
}

void head_backward(const HeadCall& call, const HeadCotangents& cotangents) {
  floats_of("vocab_weight", call.in.logit_weights);
  const CotangentCall g = cotangents_of(cotangents);
  Engine(call).run([&](const ForwardCall& chunk, RowCoefficients* rows, float* delta) {
    token_cotangents(g, chunk, rows, delta);
  });
}

void head_forward_saved(const HeadCall& call, const TokenOutputs& out) {
  require_narrow(out.argmax);
  floats_of("vocab_weight", call.in.logit_weights);
  Engine engine(call);
  const ForwardCall made = engine.forward_saved();
  ForwardCall to = made;
  to.lse = floats_of("lse", out.lse);
  to.target_logit = floats_of("target_logit", out.target_logit);
  to.log_prob = floats_of("log_prob", out.log_prob);
  to.entropy = floats_of("entropy", out.entropy);
  to.weighted_sum = floats_of("weighted_logit_sum", out.weighted_sum);
  require_contiguous("argmax", out.argmax);
  to.argmax = static_cast<std::int32_t*>(out.argmax.defined() ? out.argmax.data() : nullptr);
  scatter_outputs(made, to);
}

void head_backward_saved(const HeadCall& call, const HeadCotangents& cotangents) {
  floats_of("vocab_weight", call.in.logit_weights);
  const CotangentCall g = cotangents_of(cotangents);
  Engine(call).backward_saved([&](const ForwardCall& chunk, RowCoefficients* rows, float* delta) {
    token_cotangents(g, chunk, rows, delta);
  });
}

}  // namespace cuda

LossStatistics device_statistics(const Context& context, const LossPlan& plan,
                                 const Workspace& workspace) {
  require(context.device().kind == DeviceKind::cuda,
          "context: expected a GPU's; on the CPU cross_entropy itself returns the statistics");
  require(workspace.bytes() >= plan.workspace_bytes(), "workspace: ", workspace.bytes(),
          " bytes, the plan needs ", plan.workspace_bytes());
  cuda::DeviceStatistics found;
  cuda::copy_to_host(&found, workspace.data(), sizeof(found), context.stream());
  const auto per_token = static_cast<std::uint64_t>(plan.features.targets_per_token);
  const HeadShape& shape = plan.shape;
  const auto require_vocab = [&](std::uint64_t bad, const std::string& where) {
    require(bad == cuda::kNoBadTarget, where, "targets: the one at position ", bad / per_token,
            per_token > 1 ? concat(", entry ", bad % per_token) : "", " is outside [0, ",
            shape.global_vocab > 0 ? shape.global_vocab : shape.vocab, ") and not ignore_index");
  };
  if (plan.features.tokens_sharded && found.bad_rank >= 0)
    require_vocab(found.bad_target_of_rank, concat("rank ", found.bad_rank, ": "));
  require_vocab(found.bad_target, "");
  LossStatistics stats;
  stats.valid_tokens = found.valid_tokens;
  stats.normalizer = found.normalizer;
  stats.mean_lse = found.mean_lse;
  stats.mean_log_prob = found.mean_log_prob;
  stats.correct = found.correct;
  if (is_far(plan.kind)) stats.far = cuda::far_statistics(context, plan, workspace);
  return stats;
}

}  // namespace logitless
