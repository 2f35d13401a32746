#include "logitless/cross_entropy.h"

#include <cmath>
#include <limits>

#include "core/check.h"
#include "head/device_cross_entropy.h"
#include "head/engine.h"
#include "head/overlap.h"
#include "kernels/device_gradient.h"

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
  require(options.label_smoothing >= 0.0f && options.label_smoothing <= 1.0f,
          "label_smoothing: expected a number in [0, 1], got ", options.label_smoothing);
  require(std::isfinite(options.z_loss) && options.z_loss >= 0.0f,
          "z_loss: expected a number >= 0, got ", options.z_loss);
  if (options.normalizer.has_value()) {
    require(std::isfinite(*options.normalizer) && *options.normalizer > 0.0,
            "normalizer: expected a number > 0, got ", *options.normalizer);
    require(options.reduction == Reduction::mean, "normalizer: only reduction mean divides by it");
  }
  require(!in.grad_losses.defined() || options.reduction == Reduction::none,
          "grad_losses: only reduction none has a gradient for each token; give grad_loss");
  require(std::isfinite(in.grad_loss), "grad_loss: expected a finite number, got ", in.grad_loss);
  require(!options.next_token || in.hidden.rank() == 3,
          "next_token: expected hidden [B, T, D], got ", describe(in.hidden));
  require(!options.next_token || !in.target_weight.defined(),
          "next_token: cannot be combined with target_weight");
}

void check_arguments(const CrossEntropyOptions& options, const CrossEntropyInputs& in,
                     const CrossEntropyOutputs& out) {
  const HeadShape shape = require_head(in.hidden, in.weight, in.bias);
  check_options(options, in);
  require(in.targets.defined(), "targets: expected a tensor, got none");
  const std::int64_t last = in.target_weight.defined() ? targets_per_token(in) : -1;
  require(last != 0, "target_weight: ", describe(in.target_weight), " has no entries per token");
  require_per_token("targets", in.targets, in.hidden, true, last);
  require_per_token("target_weight", in.target_weight, in.hidden, false, last);
  require_per_token("token_weight", in.token_weight, in.hidden, false);
  require_per_token("grad_losses", in.grad_losses, in.hidden, false);
  require_vector("class_weight", in.class_weight, shape.vocab, DType::f32);

  if (options.reduction == Reduction::none) {
    require_per_token_output("loss", out.loss, in.hidden, false);
  } else if (out.loss.defined()) {
    require(out.loss.numel() == 1 && out.loss.dtype() == DType::f32, "loss: expected one f32, got ",
            describe(out.loss));
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
  require_apart({{"loss", out.loss},
                 {"d_hidden", out.d_hidden},
                 {"d_weight", out.d_weight},
                 {"d_bias", out.d_bias},
                 {"lse", out.lse},
                 {"target_logit", out.target_logit},
                 {"log_prob", out.log_prob},
                 {"entropy", out.entropy},
                 {"argmax", out.argmax},
                 {"d_hidden_bound", out.d_hidden_bound}},
                {{"hidden", in.hidden},
                 {"weight", in.weight},
                 {"targets", in.targets},
                 {"bias", in.bias},
                 {"class_weight", in.class_weight},
                 {"token_weight", in.token_weight},
                 {"target_weight", in.target_weight},
                 {"grad_losses", in.grad_losses}});
}

TargetReader reader(const CrossEntropyOptions& options, const CrossEntropyInputs& in) {
  return TargetReader(in.targets, targets_per_token(in), options.ignore_index,
                      options.next_token ? in.hidden.size(1) : 0);
}

// The weights of one token's loss, in doubles.
class TokenLoss {
 public:
  TokenLoss(const CrossEntropyOptions& options, const CrossEntropyInputs& in,
            const TargetReader& targets)
      : options_(options),
        class_weight_(in.class_weight),
        token_weight_(in.token_weight),
        target_weight_(in.target_weight),
        targets_(targets),
        vocab_(in.weight.size(0)) {
    class_total_ = static_cast<double>(vocab_);
    if (!class_weight_.defined()) return;
    class_total_ = 0.0;
    for (std::int64_t j = 0; j < vocab_; ++j) class_total_ += class_weight(j);
  }

  double class_weight(std::int64_t word) const {
    if (!class_weight_.defined()) return 1.0;
    return static_cast<const float*>(class_weight_.data())[word * class_weight_.stride(0)];
  }
  double token_weight(std::int64_t row) const { return token_weight_.get(row, 1.0f); }
  double target_weight(std::int64_t row, int k) const {
    return target_weight_.get(row * targets_.per_token() + k, 1.0f);
  }
  // What `mean` divides by, of one token.
  double share(std::int64_t row) const {
    if (target_weight_.defined()) return token_weight(row);
    return token_weight(row) * class_weight(targets_.word(row, 0));
  }

  // The loss; its derivatives times `upstream` into the answer.
  double operator()(const TokenResult& r, double upstream, TokenAnswer& answer) const {
    const double eps = options_.label_smoothing;
    const double zeta = options_.z_loss;
    const double weight = token_weight(r.row);
    double loss = 0.0;
    double mass = 0.0;
    for (int k = 0; k < targets_.per_token(); ++k) {
      if (r.words[k] < 0) continue;
      const double w = (1.0 - eps) * class_weight(r.words[k]) * target_weight(r.row, k);
      if (w == 0.0) continue;  // and not 0 * inf for a masked word
      loss -= w * r.log_prob(k);
      mass += w;
      answer.delta[k] = -upstream * weight * w;
    }
    double g_lse = mass;
    if (eps != 0.0) {
      const double each = eps / static_cast<double>(vocab_);
      loss += each * (class_total_ * r.lse - r.weighted_sum);
      g_lse += each * class_total_;
      answer.cotangent.weighted_sum = -upstream * weight * each;
    }
    if (zeta != 0.0) {
      loss += zeta * r.lse * r.lse;
      g_lse += 2.0 * zeta * r.lse;
    }
    answer.cotangent.lse = upstream * weight * g_lse;
    // A token of weight 0 has no part in the loss, whatever its logits are.
    return weight == 0.0 ? 0.0 : weight * loss;
  }

 private:
  const CrossEntropyOptions& options_;
  ConstTensorView class_weight_;
  TokenFloats token_weight_;
  TokenFloats target_weight_;
  const TargetReader& targets_;
  std::int64_t vocab_;
  double class_total_ = 0.0;
};

// Per-token outputs by flat index.
struct TokenOutputs {
  explicit TokenOutputs(const CrossEntropyOptions& options, const CrossEntropyOutputs& out)
      : loss(options.reduction == Reduction::none ? out.loss : TensorView()),
        lse(out.lse),
        target_logit(out.target_logit),
        log_prob(out.log_prob),
        entropy(out.entropy),
        argmax(out.argmax),
        bound(out.d_hidden_bound) {}
  void clear(std::int64_t row) const {
    for (const TokenOutput* o : {&loss, &lse, &target_logit, &log_prob, &entropy, &bound})
      o->set(row, 0.0);
    argmax.set(row, -1.0);
  }
  TokenOutput loss, lse, target_logit, log_prob, entropy, argmax, bound;
};

}  // namespace

HeadFeatures features_of(const CrossEntropyOptions& options, const CrossEntropyInputs& in,
                         const CrossEntropyOutputs& out) {
  HeadFeatures f;
  f.targets_per_token = targets_per_token(in);
  f.bias = in.bias.defined();
  f.logit_scale = options.logit_scale;
  f.softcap = options.softcap;
  f.label_smoothing = options.label_smoothing != 0.0f;
  // Class weights enter the kernel as weights of the smoothing term alone.
  f.vocab_weight = in.class_weight.defined() && f.label_smoothing;
  f.entropy = out.entropy.defined();
  f.argmax = out.argmax.defined();
  f.d_hidden = out.d_hidden.defined();
  f.d_weight = out.d_weight.defined();
  f.d_bias = out.d_bias.defined();
  if (f.d_hidden) f.d_hidden_dtype = out.d_hidden.dtype();
  if (f.d_weight) f.d_weight_dtype = out.d_weight.dtype();
  f.accumulate = options.accumulate;
  return f;
}

HeadShape shape_of(const CrossEntropyInputs& in) {
  return require_head(in.hidden, in.weight, in.bias);
}

LossPlan plan_cross_entropy(const CrossEntropyOptions& options, const CrossEntropyInputs& in,
                            const CrossEntropyOutputs& out, const PlanRequest& request) {
  check_arguments(options, in, out);
  return plan_head(shape_of(in), features_of(options, in, out), request);
}

LossPlan plan_cross_entropy(const Context& context, const CrossEntropyOptions& options,
                            const CrossEntropyInputs& in, const CrossEntropyOutputs& out,
                            const PlanRequest& request) {
  check_arguments(options, in, out);
  return plan_head(context, shape_of(in), features_of(options, in, out), request);
}

Workspace::Workspace(const Context& context, const LossPlan& plan)
    : bytes_(plan.workspace_bytes()) {
  if (context.device().kind == DeviceKind::cpu) {
    owned_ = Buffer(bytes_, &context.memory());
    data_ = owned_.data();
    return;
  }
  const cuda::DeviceKernel& kernel = cuda::find_device_kernel(plan.kernel);
  if (kernel.prepare != nullptr) kernel.prepare();
  auto memory = std::make_unique<cuda::DeviceMemory>(bytes_);
  data_ = memory->data();
  MemoryMeter* const meter = &context.memory();
  meter->add(bytes_);
  device_memory_ = std::shared_ptr<void>(memory.release(), [meter, bytes = bytes_](void* held) {
    delete static_cast<cuda::DeviceMemory*>(held);
    meter->remove(bytes);
  });
}

LossStatistics cross_entropy(const Context& context, const LossPlan& plan,
                             const CrossEntropyOptions& options, const CrossEntropyInputs& in,
                             const CrossEntropyOutputs& out, const Workspace& workspace) {
  check_arguments(options, in, out);
  require_own_memory(in, out);
  const HeadShape shape = shape_of(in);
  const HeadFeatures features = features_of(options, in, out);
  if (context.device().kind == DeviceKind::cuda)
    return device_cross_entropy(context, plan, options, in, out, features, workspace);
  const TargetReader targets = reader(options, in);
  const TokenLoss token_loss(options, in, targets);

  EngineCall call{&context,          &plan, &workspace, shape,        in.hidden,    in.weight,
                  in.bias,           {},    &targets,   out.d_hidden, out.d_weight, out.d_bias,
                  options.accumulate};
  if (features.vocab_weight) call.omega = in.class_weight;
  call.order = &in.order;
  call.sample_seed = in.sample_seed;
  Engine engine(call, features);

  LossStatistics stats;
  stats.tokens = shape.tokens;
  stats.valid_tokens = engine.valid_tokens();
  double shares = 0.0;
  for (std::int64_t i = 0; i < stats.valid_tokens; ++i)
    shares += token_loss.share(engine.valid_rows()[i]);
  stats.normalizer = options.normalizer.value_or(shares);
  // Nothing to average: loss and gradients are 0 and not 0 / 0.
  const bool empty = stats.normalizer == 0.0;
  const double divisor = options.reduction == Reduction::mean ? stats.normalizer : 1.0;
  const double upstream =
      options.reduction == Reduction::mean && empty ? 0.0 : in.grad_loss / divisor;
  const TokenFloats grad_losses(in.grad_losses);

  const TokenOutputs to(options, out);
  if (is_far(plan.kind)) {
    require(plan.kind == PlanKind::far_backward || !out.d_hidden_bound.defined(),
            "d_hidden_bound: plan far_both has none; its audit measures the error");
    engine.set_bound_output(&to.bound);
  } else {
    for (std::int64_t row = 0; row < shape.tokens; ++row) to.bound.set(row, 0.0);
  }
  std::int64_t next = 0;
  for (std::int64_t row = 0; row < shape.tokens; ++row) {
    if (next < stats.valid_tokens && engine.valid_rows()[next] == row) {
      ++next;
    } else {
      to.clear(row);
    }
  }

  double total = 0.0;
  double lse_total = 0.0;
  double log_prob_total = 0.0;
  std::int64_t correct = 0;
  const bool single = features.targets_per_token == 1;
  const auto answer_token = [&](const TokenResult& r, TokenAnswer& answer) {
    const double g =
        grad_losses.defined() ? static_cast<double>(grad_losses.get(r.row, 0.0f)) : upstream;
    return token_loss(r, g, answer);
  };
  engine.run([&](const TokenResult& r, TokenAnswer& answer) {
    const double loss = answer_token(r, answer);
    total += loss;
    lse_total += r.lse;
    to.loss.set(r.row, loss);
    to.lse.set(r.row, r.lse);
    to.entropy.set(r.row, r.entropy);
    to.argmax.set(r.row, r.argmax);
    if (!single) return;
    log_prob_total += r.log_prob(0);
    to.target_logit.set(r.row, r.target_logit[0]);
    to.log_prob.set(r.row, r.log_prob(0));
    if (features.argmax && r.argmax == r.words[0]) ++correct;
  });

  stats.far = engine.far_statistics();
  engine.audit([&](const TokenResult& r, TokenAnswer& answer) { answer_token(r, answer); },
               stats.far);

  if (options.reduction != Reduction::none && out.loss.defined()) {
    double loss = total / divisor;
    if (options.reduction == Reduction::mean && empty) {
      loss = options.nan_if_empty ? std::numeric_limits<double>::quiet_NaN() : 0.0;
    }
    *static_cast<float*>(out.loss.data()) = static_cast<float>(loss);
  }
  if (stats.valid_tokens > 0) {
    stats.mean_lse = lse_total / static_cast<double>(stats.valid_tokens);
    stats.mean_log_prob = single ? log_prob_total / static_cast<double>(stats.valid_tokens) : 0.0;
  }
  if (features.argmax && single) stats.correct = correct;
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
