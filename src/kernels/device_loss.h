// Losses of tokens on a GPU: from the outputs of a forward to the loss and to the coefficients of
// the gradient (math/token_gradient.h).
#pragma once

#include "kernels/device_gradient.h"
#include "math/token_loss.h"

namespace logitless::cuda {

// What a loss returns beside its tensors, on the device.
struct DeviceStatistics {
  std::uint64_t bad_target;  // as ForwardCall's
  // Of tokens over ranks: the first rank that has one, or -1, and its position there.
  std::int64_t bad_rank;
  std::uint64_t bad_target_there;
  std::int64_t valid_tokens;
  std::int64_t correct;  // -1 without argmax
  double normalizer;
  double mean_lse;
  double mean_log_prob;
};

enum class LossReduction : std::uint8_t { none, mean, sum };

// Cross entropy by cross_entropy.h's formula. Pointers of the device, contiguous, of all tokens.
struct LossCall {
  std::int64_t tokens = 0;  // of all chunks
  LossReduction reduction = LossReduction::mean;
  LossTerms terms;
  double normalizer = 0.0;  // 0: the sum of weights
  bool nan_if_empty = false;
  const float* class_weight = nullptr;   // [vocab]
  const float* token_weight = nullptr;   // [tokens]
  const float* target_weight = nullptr;  // [tokens, K]
  double grad_loss = 1.0;
  const float* grad_losses = nullptr;   // [tokens], of reduction none; null: grad_loss
  float* loss = nullptr;                // one, or [tokens] with reduction none; null: not wanted
  bool argmax = false;                  // the forward calls have it: `correct` is counted
  std::int64_t* wide_argmax = nullptr;  // [tokens] i64 copy of the forward's; null: not wanted
  bool finishes = true;                 // finish_loss of these tokens alone follows
  // The sum of sum_shares over the ranks of the tokens; null: all tokens are here.
  const double* shares = nullptr;
  // bad_target is what the forward wrote. A bad target makes the loss NaN, of all tokens or its
  // own.
  DeviceStatistics* statistics = nullptr;
  void* workspace = nullptr;  // loss_workspace_bytes(tokens), aligned to 256
};
std::size_t loss_workspace_bytes(std::int64_t tokens);

// What ranks with tokens of their own tell one another of a loss.
struct RankLoss {
  double loss, lse, log_prob;
  std::int64_t valid, correct;
  std::uint64_t bad_target;
};

// In this order, on the stream of the forward calls; sums run in a fixed order, in double.
// Of `all` the targets and shape count, with all tokens and first_token 0.
void begin_loss(const LossCall& loss, const ForwardCall& all);
// The losses of a chunk's tokens, first_token a multiple of 256; rows [padded_tokens] and delta
// [tokens, K] get the coefficients of the gradient (null: not wanted).
void token_losses(const LossCall& loss, const ForwardCall& chunk, RowCoefficients* rows,
                  float* delta);
void finish_loss(const LossCall& loss, const ForwardCall& all);

// Of tokens over ranks. Before begin_loss: what a mean divides by, of the tokens here.
void sum_shares(const LossCall& loss, const ForwardCall& all, double* shares);
// In place of finish_loss, loss.finishes being false: the sums here, and then, of all ranks' in
// their order, the loss. The normalizer is begin_loss's.
void sum_losses(const LossCall& loss, const ForwardCall& all, RankLoss* mine);
void finish_loss(const LossCall& loss, const ForwardCall& all, const RankLoss* ranks, int count);

// Gradients of a scalar with respect to the forward's outputs, fp32 of all tokens; null: 0.
struct CotangentCall {
  const float* lse = nullptr;
  const float* target_logit = nullptr;  // [tokens, K]
  const float* log_prob = nullptr;      // [tokens, K]
  const float* entropy = nullptr;       // the chunk's forward must have entropy
  const float* weighted_sum = nullptr;
};
void token_cotangents(const CotangentCall& cotangents, const ForwardCall& chunk,
                      RowCoefficients* rows, float* delta);

}  // namespace logitless::cuda
