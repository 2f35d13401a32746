// Cross entropy of a large vocabulary from hidden states and weights; the full logits never exist.
//
//   u_ij = logit_scale * (hidden_i . weight_j + bias_j)
//   z_ij = softcap * tanh(u_ij / softcap), or u_ij
//   lse_i = log sum_j exp z_ij
//   log p_ij = z_ij - lse_i
//   loss_i = token_weight_i * ((1 - eps) * c_y * -log p_iy
//                              + eps / V * sum_j c_j * -log p_ij
//                              + zeta * lse_i^2)
//
// with y the target, c the class weights, eps the label smoothing, zeta the z-loss. This is
// PyTorch's cross_entropy of z, with softcap, scale and z-loss added. `mean` divides by
// `normalizer` if given. Otherwise it divides by sum_i token_weight_i * c_y over the tokens not
// ignored. With K targets each it is sum_i token_weight_i, as in PyTorch for probabilities.
//
// Valid logits z lie between -7e8 and 7e8. An entry with a logit below is masked, as with -inf. A
// token with a logit above, or with all entries masked, has undefined results: NaN, infinite, or
// right. On a CPU a logit of +inf gives PyTorch's: lse is +inf, loss and gradients are NaN.
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
  // tokens of this target have loss 0 and no gradient; most kernels skip them
  std::int64_t ignore_index = -100;
  float label_smoothing = 0.0f;           // eps in [0, 1]
  float z_loss = 0.0f;                    // zeta >= 0
  float softcap = 0.0f;                   // c > 0, or 0: none
  float logit_scale = 1.0f;               // s, finite and not 0: 1 / temperature
  std::optional<double> normalizer = {};  // divisor of reduction mean; finite and > 0
  // Shifts the targets: hidden is [B, T, D], targets [B, T] are the tokens themselves, and position
  // t predicts target t + 1. The last position of each sequence is ignored.
  bool next_token = false;
  bool nan_if_empty = false;  // NaN for a mean over no token, as in PyTorch, instead of 0
  // Adds gradients to the contents of the output buffers.
  bool accumulate = false;
  Precision precision = Precision::ieee;  // others: f32 tensors on a GPU
};

// A numeric option of the formula, for callers that read options from a command line, a file or
// another language.
template <typename Number>
struct LossNumber {
  const char* name;
  Number* value;
  double least;  // the range, ends included
  double most;
  const char* help;
};

// Returns the numeric options of CrossEntropyOptions, or of another struct with the same field
// names.
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
// each row of hidden. With target_weight [..., K] f32, targets may be [..., K]: a loss against K
// weighted classes a token (top-k distillation). An entry that is ignore_index is ignored.
struct CrossEntropyInputs {
  ConstTensorView hidden = {};
  ConstTensorView weight = {};
  ConstTensorView targets = {};
  ConstTensorView bias = {};  // optional [V]: f32 or the dtype of weight; -inf masks an entry
  ConstTensorView class_weight = {};   // optional [V] f32
  ConstTensorView token_weight = {};   // optional [...] f32
  ConstTensorView target_weight = {};  // optional [..., K] f32
  // Upstream gradient of a mean or sum: gradients are d(grad_loss * loss).
  double grad_loss = 1.0;
  // Upstream gradients of reduction none, optional [...] f32; without it they are grad_loss.
  ConstTensorView grad_losses = {};
  // The order of a far-field plan, which needs one; other plans ignore it. It is made for about
  // these weights: the error grows as they move away from those of the order
  // (docs/use/far_field.md). With a sharding it covers this rank's rows and comes from share_order.
  VocabOrder order = {};
  // Seed of a far-field plan with sample_every: another number for each call, best the next one.
  std::uint64_t sample_seed = 0;
  Sharding sharding = {};  // vocabulary-parallel, and maybe sequence-parallel
};

// The axis of a weight of the loss: [V], [...] or [..., K].
enum class WeightAxis : std::uint8_t { vocab, tokens, targets };

// Calls visit(name, axis, fields...) for each optional weight of CrossEntropyInputs, with its field
// in each of the structs, which have the same field names.
template <typename Visit, typename... Structs>
void each_loss_weight(const Visit& visit, Structs&... s) {
  visit("class_weight", WeightAxis::vocab, s.class_weight...);
  visit("token_weight", WeightAxis::tokens, s.token_weight...);
  visit("target_weight", WeightAxis::targets, s.target_weight...);
}

// Defined outputs are written; the rest is not computed. Outputs must not overlap inputs or each
// other. Certain overlap throws InvalidArgument (intersecting contiguous tensors, equal first
// elements). Use f32 gradients for an f16 model whose gradients are later multiplied by a loss
// scale or divided by a token count: f16 lacks the range before that.
struct CrossEntropyOutputs {
  TensorView loss = {};          // f32 [] for mean and sum, f32 [...] for none
  TensorView d_hidden = {};      // [..., D] in the dtype of hidden or f32
  TensorView d_weight = {};      // [V, D]   in the dtype of weight or f32
  TensorView d_bias = {};        // [V]      f32 or the dtype of bias
  TensorView lse = {};           // f32 [...]; 0 for ignored tokens, as in all of these
  TensorView target_logit = {};  // f32 [...] (K = 1)
  TensorView log_prob = {};      // f32 [...]: target_logit - lse (K = 1)
  TensorView entropy = {};       // f32 [...]: -sum_j p_ij log p_ij
  // i32 or i64 [...]: the largest logit's index, the lowest of equal ones; -1 if ignored
  TensorView argmax = {};
  // f32 [...]: upper bound of the 2-norm of the error of d_hidden_i, roundings apart; 0 with exact
  // plans. Not with far_both, whose masses are estimates.
  TensorView d_hidden_bound = {};
};

// Statistics of the far field in a call; the defaults with exact plans.
struct FarFieldStatistics {
  double selected = 1.0;  // fraction k of pairs (tile, block of tokens) computed exactly
  double sampled = 0.0;   // fraction of pairs computed for d_weight and d_bias only (sample_every)
  double passes = 0.0;    // GEMMs of tokens * vocab * dim for both; 0 with exact plans
  // Some chunk selected more than 2/3 of its tiles, and all of it was computed exactly.
  bool dense_fallback = false;
  // Rigorous bound of the error of d_hidden relative to |d_hidden| over all tokens, sqrt(sum_i
  // bound_i^2). -1 with far_both, which has none.
  double bound = 0.0;
  // Measured |error| / |exact| of d_hidden over the audited tokens; -1: not audited.
  double audited_error = -1.0;
  std::int64_t audited_tokens = 0;
  // Errors of the lse of those tokens, in nats; 0 except with far_both.
  double audited_lse_error = 0.0;      // root mean square
  double audited_lse_error_max = 0.0;  // of one token
  // Estimates from the sampled tiles, whose masses are both estimated and computed: in each call of
  // far_both with sample_every, else 0. They often, but not always, reveal a call whose gradients
  // are far off.
  double sampled_lse_error = 0.0;  // of lse, over all skipped tiles: root mean square, in nats
  double sampled_most = 0.0;       // largest mass of one over the token's total; may exceed 1
  // Vocabulary-parallel: most selected pairs of a rank over the mean of the ranks, from 1 to the
  // number of ranks. It determines the time of a step. All other numbers are global then and the
  // same on each rank.
  double imbalance = 1.0;
};

// Token statistics, returned with every call. With sharded tokens they are global, except for
// `tokens`. On a GPU a call fills only `tokens`, and the rest is 0: device_statistics waits for it.
struct LossStatistics {
  std::int64_t tokens = 0;        // rows of hidden
  std::int64_t valid_tokens = 0;  // not ignored
  double normalizer = 0.0;        // divisor of reduction mean
  double mean_lse = 0.0;          // over valid tokens
  double mean_log_prob = 0.0;     // of the targets, unweighted (K = 1)
  std::int64_t correct = -1;  // tokens whose argmax is the target; -1 unless argmax was asked for
  FarFieldStatistics far = {};
};

// Returns the features of a call: the properties of options, inputs and outputs beyond the shape
// that plan_cross_entropy needs.
LOGITLESS_API HeadFeatures features_of(const CrossEntropyOptions& options,
                                       const CrossEntropyInputs& inputs,
                                       const CrossEntropyOutputs& outputs);
// Returns the sizes of a call. Throws InvalidArgument when hidden or weight is missing or their
// shapes or dtypes disagree.
LOGITLESS_API HeadShape shape_of(const CrossEntropyInputs& inputs);

// Plans such calls, for a context or for request.device. See plan.h.
LOGITLESS_API LossPlan plan_cross_entropy(const CrossEntropyOptions& options,
                                          const CrossEntropyInputs& inputs,
                                          const CrossEntropyOutputs& outputs,
                                          const PlanRequest& request = {});
LOGITLESS_API LossPlan plan_cross_entropy(const Context& context,
                                          const CrossEntropyOptions& options,
                                          const CrossEntropyInputs& inputs,
                                          const CrossEntropyOutputs& outputs,
                                          const PlanRequest& request = {});

// Computes the loss, statistics and the requested gradients in one call. With a GPU context every
// tensor is in its memory, vectors and outputs are contiguous, and bias and weights are fp32.
// Targets are then checked on the GPU (see device_statistics).
//
// Extra memory: only the workspace. Deterministic: the same inputs and kernel give the same bits
// for any number of threads and from run to run. A token's loss with reduction none, its log_prob
// and lse have the same bits in any batch and exact plan: on a CPU, and on a GPU with the kernels
// of 16-bit heads without a sharding (cublas is none of them).
//
// Throws InvalidArgument when a shape, dtype, option or target is wrong, or the workspace or plan
// does not match; then no output has been written. A target outside [0, V) that is not ignore_index
// is named with its position.
LOGITLESS_API LossStatistics cross_entropy(const Context& context, const LossPlan& plan,
                                           const CrossEntropyOptions& options,
                                           const CrossEntropyInputs& inputs,
                                           const CrossEntropyOutputs& outputs,
                                           const Workspace& workspace);

// Waits for the context's stream on a GPU and returns the statistics of the last cross_entropy that
// used the workspace. Throws InvalidArgument naming the position of a target that was neither in
// [0, V) nor ignore_index. The loss is NaN then, and the statistics exclude the token.
LOGITLESS_API LossStatistics device_statistics(const Context& context, const LossPlan& plan,
                                               const Workspace& workspace);

// The same with its own plan and workspace (one allocation a call). On a GPU it waits and returns
// the result of device_statistics. memory_budget is the ceiling of the workspace in bytes of
// PlanRequest; 0: none.
LOGITLESS_API LossStatistics cross_entropy(const Context& context,
                                           const CrossEntropyOptions& options,
                                           const CrossEntropyInputs& inputs,
                                           const CrossEntropyOutputs& outputs,
                                           std::size_t memory_budget = 0);

}  // namespace logitless
