// Cross entropy of a large vocabulary from hidden states and weights; the logits never exist as a
// whole.
//
//   u_ij = logit_scale * (hidden_i . weight_j + bias_j)
//   z_ij = softcap * tanh(u_ij / softcap), or u_ij
//   lse_i = log sum_j exp z_ij
//   log p_ij = z_ij - lse_i
//   loss_i = token_weight_i * ((1 - eps) * c_y * -log p_iy
//                              + eps / V * sum_j c_j * -log p_ij
//                              + zeta * lse_i^2)
//
// with y the target, c the class weights, eps the label smoothing, zeta the z-loss: PyTorch's
// cross_entropy of z, softcap, scale and z-loss added. `mean` divides by sum_i token_weight_i * c_y
// over the tokens not ignored (by sum_i token_weight_i with K targets each, as PyTorch does for
// probabilities), or by `normalizer`.
//
// Logits z count from -7e8 to 7e8. Below, a word is masked, as with -inf; a token with a logit
// above has results that are NaN or infinite, or right, and so has one whose words are all masked.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <type_traits>

#include "logitless/context.h"
#include "logitless/export.h"
#include "logitless/memory.h"
#include "logitless/plan.h"
#include "logitless/sharding.h"
#include "logitless/tensor_view.h"
#include "logitless/vocab_order.h"
#include "logitless/workspace.h"

namespace logitless {

enum class Reduction : std::uint8_t { none = 0, mean = 1, sum = 2 };

struct CrossEntropyOptions {
  Reduction reduction = Reduction::mean;
  // tokens of this target have loss 0, no gradient, and cost nothing
  std::int64_t ignore_index = -100;
  float label_smoothing = 0.0f;           // eps in [0, 1]
  float z_loss = 0.0f;                    // zeta >= 0
  float softcap = 0.0f;                   // c > 0, or 0: none
  float logit_scale = 1.0f;               // s, finite and not 0: 1 / temperature
  std::optional<double> normalizer = {};  // mean divides by this instead; finite and > 0
  // hidden is [B, T, D] and targets [B, T] are the tokens themselves: position t predicts target t
  // + 1, and the last position of each sequence is ignored.
  bool next_token = false;
  bool nan_if_empty = false;  // mean over no token: NaN as PyTorch, instead of 0
  // Gradients are added to what the output buffers hold.
  bool accumulate = false;
};

// An option that is a number of the formula, for what takes options from elsewhere: a command line,
// a file, another language.
template <typename Number>
struct LossNumber {
  const char* name;
  Number* value;
  double least;  // the range, ends included
  double most;
  const char* help;
};

// Those of CrossEntropyOptions, or of another struct that has them under these names.
template <typename Options>
auto loss_numbers(Options& options) {
  using Number = std::remove_reference_t<decltype((options.label_smoothing))>;
  constexpr double kMost = std::numeric_limits<float>::max();
  return std::array{
      LossNumber<Number>{"label_smoothing", &options.label_smoothing, 0.0, 1.0, "in [0, 1]"},
      LossNumber<Number>{"z_loss", &options.z_loss, 0.0, kMost, "X * lse^2 is added"},
  };
}

// hidden [..., D] and weight [V, D]: f32 | bf16 | f16, equal. targets [...]: i32 | i64, one for
// each row of hidden, or with target_weight [..., K] f32 also [..., K]: loss against K weighted
// classes a token (top-k distillation); an entry that is ignore_index counts nothing.
struct CrossEntropyInputs {
  ConstTensorView hidden = {};
  ConstTensorView weight = {};
  ConstTensorView targets = {};
  ConstTensorView bias = {};          // optional [V]: f32 or the dtype of weight; -inf masks a word
  ConstTensorView class_weight = {};  // optional [V] f32
  ConstTensorView token_weight = {};  // optional [...] f32
  ConstTensorView target_weight = {};  // optional [..., K] f32
  // Upstream gradient of a mean or sum: gradients are d(grad_loss * loss).
  double grad_loss = 1.0;
  // Upstream gradients of reduction none, optional [...] f32; without it they are grad_loss.
  ConstTensorView grad_losses = {};
  // Of far-field plans, which need one; others leave it alone. Made for about these weights: the
  // error grows as they move away from those of the order (docs/far_field.md). With a sharding: of
  // this rank's rows, from share_order.
  VocabOrder order = {};
  // Of far-field plans with sample_every: another number for each call, best the next one.
  std::uint64_t sample_seed = 0;
  Sharding sharding = {};  // words, and maybe tokens, spread over ranks
};

// Whatever is defined is written; the rest is not computed. Outputs must not overlap inputs or each
// other: InvalidArgument where it is certain that they do (contiguous tensors that meet, and first
// elements that are the same). Gradients of f16 that are multiplied by a loss scale afterwards, or
// divided by a number of tokens, want f32: f16 has not the range for them before.
struct CrossEntropyOutputs {
  TensorView loss = {};          // f32 [] for mean and sum, f32 [...] for none
  TensorView d_hidden = {};      // [..., D] in the dtype of hidden or f32
  TensorView d_weight = {};      // [V, D]   in the dtype of weight or f32
  TensorView d_bias = {};        // [V]      f32 or the dtype of bias
  TensorView lse = {};           // f32 [...]; 0 for ignored tokens, as in all of these
  TensorView target_logit = {};  // f32 [...] (K = 1)
  TensorView log_prob = {};      // f32 [...]: target_logit - lse (K = 1)
  TensorView entropy = {};       // f32 [...]: -sum_j p_ij log p_ij
  TensorView argmax = {};  // i32 or i64 [...]: index of the largest logit, the lowest among equals;
                           // -1 where ignored
  // f32 [...]: |error of d_hidden_i|, its 2-norm, is at most this, roundings apart; 0 with exact
  // plans. Not with far_both, whose masses are estimates.
  TensorView d_hidden_bound = {};
};

// What the far field did in a call; the defaults with exact plans.
struct FarFieldStatistics {
  double kept = 1.0;     // fraction k of pairs (tile of words, block of tokens) computed exactly
  double sampled = 0.0;  // of those pairs, for d_weight and d_bias alone (sample_every)
  double passes = 0.0;   // over tokens * vocab * dim, from both; 0 with exact plans
  // more than 2/3 to keep in some chunk: all of it kept, so exact there
  // Relative to |d_hidden| over all tokens: the rigorous bound of its error, sqrt(sum_i bound_i^2).
  // -1 where there is none: with far_both.
  bool dense_fallback = false;
  double bound = 0.0;
  // |error| / |exact|, measured over d_hidden of the tokens audited; -1: not audited.
  double audited_error = -1.0;
  std::int64_t audited_tokens = 0;
  // Of the lse of those tokens, in nats; 0 but with far_both.
  double audited_lse_error = 0.0;      // root mean square
  double audited_lse_error_max = 0.0;  // of one token
  // Of far_both with sample_every, in each call, from the tiles sampled alone, whose masses are
  // estimated and computed; 0 without. A call whose gradients are far off shows here, or does not.
  double sampled_lse_error = 0.0;  // of lse, by all far tiles: root mean square, in nats
  double sampled_most = 0.0;       // the most mass of one, of a token's total; may be over 1
  // Of words spread over ranks, whose numbers all of the above are, the same on each: the most that
  // one rank keeps over the mean of them, 1 to the number of ranks; what a step takes goes by it.
  double imbalance = 1.0;
};

// Token statistics, returned with every call; those of sharded tokens are of all ranks, but for
// `tokens`. On a GPU only `tokens` is filled by then, the rest is
// 0: device_statistics waits for it.
struct LossStatistics {
  std::int64_t tokens = 0;        // rows of hidden
  std::int64_t valid_tokens = 0;  // not ignored
  double normalizer = 0.0;        // what mean divided by (or would)
  double mean_lse = 0.0;          // over valid tokens
  double mean_log_prob = 0.0;     // of the targets, unweighted (K = 1)
  std::int64_t correct = -1;  // tokens whose argmax is the target; -1 unless argmax was asked for
  FarFieldStatistics far = {};
};

// The features of a call: what plan_cross_entropy needs to know of options, inputs and outputs
// beyond the shape.
LOGITLESS_API HeadFeatures features_of(const CrossEntropyOptions& options,
                                       const CrossEntropyInputs& inputs,
                                       const CrossEntropyOutputs& outputs);
// Sizes of a call. Throws InvalidArgument when hidden or weight is missing or their shapes or
// dtypes disagree.
LOGITLESS_API HeadShape shape_of(const CrossEntropyInputs& inputs);

// The plan of such calls, for a context or for request.device. See plan.h.
LOGITLESS_API LossPlan plan_cross_entropy(const CrossEntropyOptions& options,
                                          const CrossEntropyInputs& inputs,
                                          const CrossEntropyOutputs& outputs,
                                          const PlanRequest& request = {});
LOGITLESS_API LossPlan plan_cross_entropy(const Context& context,
                                          const CrossEntropyOptions& options,
                                          const CrossEntropyInputs& inputs,
                                          const CrossEntropyOutputs& outputs,
                                          const PlanRequest& request = {});

// Loss, statistics and the gradients asked for, in one call. With a GPU's context every tensor is
// in its memory, vectors and outputs are contiguous, bias and weights fp32; targets are checked
// there (see device_statistics).
//
// Extra memory: the workspace, nothing else. Deterministic: the same inputs and kernel give the
// same bits for any number of threads and from run to run. Throws InvalidArgument when a shape,
// dtype, option or target is wrong (a target outside [0, V) that is not ignore_index is named with
// its position) or the workspace or plan does not match; then no output has been written.
LOGITLESS_API LossStatistics cross_entropy(const Context& context, const LossPlan& plan,
                                           const CrossEntropyOptions& options,
                                           const CrossEntropyInputs& inputs,
                                           const CrossEntropyOutputs& outputs,
                                           const Workspace& workspace);

// On a GPU: waits for the context's stream and returns the statistics of the last cross_entropy
// that used the workspace. Throws InvalidArgument naming the position of a target that was neither
// in [0, V) nor ignore_index (the loss is NaN then, and the token had no part in the statistics).
LOGITLESS_API LossStatistics device_statistics(const Context& context, const LossPlan& plan,
                                               const Workspace& workspace);

// The same with a plan and a workspace of its own (one allocation a call). On a GPU it waits, and
// returns what device_statistics does. memory_budget: as PlanRequest has it, a ceiling of the
// workspace in bytes; 0: none.
LOGITLESS_API LossStatistics cross_entropy(const Context& context,
                                           const CrossEntropyOptions& options,
                                           const CrossEntropyInputs& inputs,
                                           const CrossEntropyOutputs& outputs,
                                           std::size_t memory_budget = 0);

}  // namespace logitless
