#include "head/cpu/calls.h"

#include <limits>
#include <vector>

#include "core/check.h"
#include "head/cpu/engine.h"
#include "math/token_loss.h"

namespace logitless::cpu {
namespace {

// Computes the losses of a call's tokens from their weights and the formula of math/token_loss.h.
class TokenLosses {
 public:
  TokenLosses(const CrossEntropyOptions& options, const CrossEntropyInputs& in,
              const TargetReader& targets, std::int64_t global_vocab)
      : terms_(loss_terms(options)),
        class_weight_(in.class_weight),
        token_weight_(in.token_weight),
        target_weight_(in.target_weight),
        targets_(targets),
        vocab_(global_vocab) {
    class_total_ = static_cast<double>(vocab_);
    if (!class_weight_.defined()) return;
    class_total_ = 0.0;
    for (std::int64_t j = 0; j < vocab_; ++j) class_total_ += class_weight(j);
  }

  double class_weight(std::int64_t vocab_id) const {
    if (!class_weight_.defined()) return 1.0;
    return static_cast<const float*>(class_weight_.data())[vocab_id * class_weight_.stride(0)];
  }
  double token_weight(std::int64_t row) const { return token_weight_.get(row, 1.0f); }
  double target_weight(std::int64_t row, int k) const {
    return target_weight_.get(row * targets_.per_token() + k, 1.0f);
  }
  // Returns a token's contribution to the divisor of `mean`.
  double share(std::int64_t row) const {
    if (target_weight_.defined()) return token_weight(row);
    return token_weight(row) * class_weight(targets_.vocab_id(row, 0));
  }

  // Returns the loss of a token. Writes its derivatives times `upstream` into the gradient
  // coefficients.
  double operator()(const TokenResult& r, double upstream,
                    TokenCoefficients& token_coefficients) const {
    TokenLoss loss(terms_, token_weight(r.row), upstream);
    for (int k = 0; k < targets_.per_token(); ++k) {
      if (r.vocab_ids[k] < 0) continue;
      token_coefficients.delta[k] =
          loss.add_target(class_weight(r.vocab_ids[k]), target_weight(r.row, k), r.log_prob(k));
    }
    if (loss.smooths()) {
      token_coefficients.cotangent.weighted_sum =
          loss.add_smoothing(r.lse, r.weighted_sum, class_total_, static_cast<double>(vocab_));
    }
    token_coefficients.cotangent.lse = loss.add_lse(r.lse);
    return loss.value();
  }

 private:
  LossTerms terms_;
  ConstTensorView class_weight_;
  TokenFloats token_weight_;
  TokenFloats target_weight_;
  const TargetReader& targets_;
  std::int64_t vocab_;
  double class_total_ = 0.0;
};

// Sums over the tokens of a call.
struct LossSums {
  double loss = 0.0, lse = 0.0, log_prob = 0.0;
  std::int64_t correct = 0;

  LossSums& operator+=(const LossSums& other) {
    loss += other.loss;
    lse += other.lse;
    log_prob += other.log_prob;
    correct += other.correct;
    return *this;
  }
};

// Sums over the ranks of the communicator, in their order.
template <typename Sum>
Sum sum_of_ranks(CollectiveCalls& calls, const Sum& mine) {
  std::vector<Sum> all(static_cast<std::size_t>(calls.communicator().size()));
  calls.all_gather(&mine, all.data(), sizeof(Sum));
  Sum sum{};
  for (const Sum& of_rank : all) sum += of_rank;
  return sum;
}

// Returns the divisor of `mean`: the sum over the ranks of sharded tokens, and over the replicas.
double normalizer_of(const ShardOperands& shard, double shares) {
  if (shard.tokens_sharded) shares = sum_of_ranks(*shard.calls, shares);
  if (shard.replicas != nullptr) shares = sum_of_ranks(*shard.replicas, shares);
  return shares;
}

// Writes per-token outputs by flat index.
struct Outputs {
  Outputs(const HeadCall& call, const TensorView& token_loss)
      : loss(token_loss),
        lse(call.out.lse),
        target_logit(call.out.target_logit),
        log_prob(call.out.log_prob),
        entropy(call.out.entropy),
        argmax(call.out.argmax),
        bound(call.far.d_hidden_bound) {}
  void clear(std::int64_t row) const {
    for (const TokenOutput* o : {&loss, &lse, &target_logit, &log_prob, &entropy, &bound})
      o->set(row, 0.0);
    argmax.set(row, -1.0);
  }
  TokenOutput loss, lse, target_logit, log_prob, entropy, argmax, bound;
};

}  // namespace

LossStatistics cross_entropy(const HeadCall& call, const CrossEntropyOptions& options,
                             const CrossEntropyInputs& in, const TensorView& loss) {
  Engine engine(call);
  const HeadFeatures& features = call.features;
  const HeadShape& shape = call.shape;
  const TokenLosses token_losses(options, in, engine.targets(),
                                 call.shard.sharded() ? shape.global_vocab : shape.vocab);

  LossStatistics stats;
  stats.tokens = shape.tokens;
  const std::int64_t valid = engine.valid_tokens();
  double shares = 0.0;
  for (std::int64_t i = 0; i < valid; ++i) shares += token_losses.share(engine.valid_rows()[i]);
  shares = normalizer_of(call.shard, shares);
  stats.normalizer = options.normalizer.value_or(shares);
  // Nothing to average: loss and gradients are 0 instead of 0 / 0.
  const bool empty = stats.normalizer == 0.0;
  const double divisor = options.reduction == Reduction::mean ? stats.normalizer : 1.0;
  const double upstream =
      options.reduction == Reduction::mean && empty ? 0.0 : in.grad_loss / divisor;
  const TokenFloats grad_losses(in.grad_losses);

  const Outputs to(call, options.reduction == Reduction::none ? loss : TensorView());
  const PlanKind kind = call.plan->kind;
  require(kind != PlanKind::far_both || !call.far.d_hidden_bound.defined(),
          "d_hidden_bound: plan far_both has none; its audit measures the error");
  if (!is_far(kind)) {
    for (std::int64_t row = 0; row < shape.tokens; ++row) to.bound.set(row, 0.0);
  }
  std::int64_t next = 0;
  for (std::int64_t row = 0; row < shape.tokens; ++row) {
    if (next < valid && engine.valid_rows()[next] == row) {
      ++next;
    } else {
      to.clear(row);
    }
  }

  LossSums sums;
  const bool single = features.targets_per_token == 1;
  const auto set_coefficients_of_token = [&](const TokenResult& r,
                                             TokenCoefficients& token_coefficients) {
    const double g =
        grad_losses.defined() ? static_cast<double>(grad_losses.get(r.row, 0.0f)) : upstream;
    return token_losses(r, g, token_coefficients);
  };
  engine.run([&](const TokenResult& r, TokenCoefficients& token_coefficients) {
    const double of_token = set_coefficients_of_token(r, token_coefficients);
    sums.loss += of_token;
    sums.lse += r.lse;
    to.loss.set(r.row, of_token);
    to.lse.set(r.row, r.lse);
    to.entropy.set(r.row, r.entropy);
    to.argmax.set(r.row, r.argmax);
    if (!single) return;
    sums.log_prob += r.log_prob(0);
    to.target_logit.set(r.row, r.target_logit[0]);
    to.log_prob.set(r.row, r.log_prob(0));
    if (features.argmax && r.argmax == r.vocab_ids[0]) ++sums.correct;
  });

  engine.audit([&](const TokenResult& r, TokenCoefficients& token_coefficients) {
    set_coefficients_of_token(r, token_coefficients);
  });
  stats.far = engine.far_statistics();
  if (call.shard.tokens_sharded) sums = sum_of_ranks(*call.shard.calls, sums);
  stats.valid_tokens = engine.all_valid_tokens();

  if (options.reduction != Reduction::none && loss.defined()) {
    double mean = sums.loss / divisor;
    if (options.reduction == Reduction::mean && empty) {
      mean = options.nan_if_empty ? std::numeric_limits<double>::quiet_NaN() : 0.0;
    }
    *static_cast<float*>(loss.data()) = static_cast<float>(mean);
  }
  if (stats.valid_tokens > 0) {
    const auto count = static_cast<double>(stats.valid_tokens);
    stats.mean_lse = sums.lse / count;
    stats.mean_log_prob = single ? sums.log_prob / count : 0.0;
  }
  if (features.argmax && single) stats.correct = sums.correct;
  return stats;
}

void head_forward(const HeadCall& call) {
  Engine engine(call);
  const int per_token = call.features.targets_per_token;
  const TokenOutput lse(call.out.lse), target_logit(call.out.target_logit),
      log_prob(call.out.log_prob), entropy(call.out.entropy), weighted(call.out.weighted_sum),
      argmax(call.out.argmax);
  std::int64_t next = 0;
  for (std::int64_t row = 0; row < call.shape.tokens; ++row) {
    if (next < engine.valid_tokens() && engine.valid_rows()[next] == row) {
      ++next;
      continue;
    }
    for (const TokenOutput* o : {&lse, &entropy, &weighted}) o->set(row, 0.0);
    argmax.set(row, -1.0);
    for (int k = 0; k < per_token; ++k) {
      target_logit.set(row * per_token + k, 0.0);
      log_prob.set(row * per_token + k, 0.0);
    }
  }
  engine.run([&](const TokenResult& r, TokenCoefficients&) {
    lse.set(r.row, r.lse);
    entropy.set(r.row, r.entropy);
    weighted.set(r.row, r.weighted_sum);
    argmax.set(r.row, r.argmax);
    for (int k = 0; k < per_token; ++k) {
      const bool valid = r.vocab_ids[k] >= 0;
      target_logit.set(r.row * per_token + k, valid ? static_cast<double>(r.target_logit[k]) : 0.0);
      log_prob.set(r.row * per_token + k, valid ? r.log_prob(k) : 0.0);
    }
  });
}

void head_backward(const HeadCall& call, const HeadCotangents& cotangents) {
  Engine engine(call);
  const int per_token = call.features.targets_per_token;
  const TokenFloats g_lse(cotangents.lse), g_target(cotangents.target_logit),
      g_log_prob(cotangents.log_prob), g_entropy(cotangents.entropy),
      g_weighted(cotangents.weighted_logit_sum);
  engine.run([&](const TokenResult& r, TokenCoefficients& token_coefficients) {
    token_coefficients.cotangent.lse = g_lse.get(r.row, 0.0f);
    token_coefficients.cotangent.entropy = g_entropy.get(r.row, 0.0f);
    token_coefficients.cotangent.weighted_sum = g_weighted.get(r.row, 0.0f);
    for (int k = 0; k < per_token; ++k) {
      if (r.vocab_ids[k] < 0) continue;
      const double share = g_log_prob.get(r.row * per_token + k, 0.0f);
      token_coefficients.cotangent.lse -= share;
      token_coefficients.delta[k] = share + g_target.get(r.row * per_token + k, 0.0f);
    }
  });
}

}  // namespace logitless::cpu
