// Token losses on a GPU: from the outputs of a forward to the loss and to the gradient coefficients
// (math/token_gradient.h).
#pragma once

#include "kernels/device/gradient.h"
#include "math/token_loss.h"

namespace logitless::cuda {

// Statistics of a loss, on the device.
struct DeviceStatistics {
  std::uint64_t bad_target;  // as in ForwardCall
  // With sequence-parallel tokens: the first rank that has a bad target, or -1, and its index
  // there.
  std::int64_t bad_rank;
  std::uint64_t bad_target_of_rank;
  std::int64_t valid_tokens;
  std::int64_t correct;  // -1 without argmax
  double normalizer;
  double mean_lse;
  double mean_log_prob;
};

enum class LossReduction : std::uint8_t { none, mean, sum };

// Cross entropy by the formula of cross_entropy.h. Pointers are of the device, contiguous, for all
// tokens.
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
  const float* grad_losses = nullptr;  // [tokens], with reduction none; null: grad_loss
  float* loss = nullptr;               // one, or [tokens] with reduction none; null: not wanted
  bool argmax = false;                 // the forward calls compute it: `correct` is counted
  // [tokens] int64 copy of the forward's argmax; null: not wanted
  std::int64_t* int64_argmax = nullptr;
  bool finishes = true;  // finish_loss of the local tokens alone follows
  // Sum of sum_shares over the sequence-parallel ranks; null: all tokens are local.
  const double* shares = nullptr;
  // bad_target is the forward's. A bad target makes the loss NaN: the total, or its token's own.
  DeviceStatistics* statistics = nullptr;
  void* workspace = nullptr;  // loss_workspace_bytes(tokens), aligned to 256
};
std::size_t loss_workspace_bytes(std::int64_t tokens);

// Partial sums that sequence-parallel ranks exchange.
struct RankLoss {
  double loss, lse, log_prob;
  std::int64_t valid, correct;
  std::uint64_t bad_target;
};

// Called in this order on the stream of the forward calls. Sums are in double and have a fixed
// order. Only targets and shape of `all` are read, with all tokens and first_token 0.
void begin_loss(const LossCall& loss, const ForwardCall& all);
// Computes the losses of a chunk's tokens; first_token is a multiple of 256. rows [padded_tokens]
// and delta [tokens, K] get the gradient coefficients (null: not wanted).
void token_losses(const LossCall& loss, const ForwardCall& chunk, RowCoefficients* rows,
                  float* delta);
void finish_loss(const LossCall& loss, const ForwardCall& all);

// Computes the divisor of a mean over the local tokens, before begin_loss.
void sum_shares(const LossCall& loss, const ForwardCall& all, double* shares);
// Replace finish_loss where loss.finishes is false: the local sums, then the loss from all ranks'
// sums in rank order. The normalizer is begin_loss's, or token_losses' of few tokens.
void sum_losses(const LossCall& loss, const ForwardCall& all, RankLoss* mine);
void finish_loss(const LossCall& loss, const ForwardCall& all, const RankLoss* ranks, int count);

// Upstream gradients of the forward's outputs, fp32 for all tokens; null: 0.
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
