// Token losses, their sums over all tokens in a fixed order, and the gradient coefficients.
#include <algorithm>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/head/sizes.h"
#include "kernels/cuda/head/targets.cuh"
#include "kernels/device/loss.h"
#include "math/lse_state.h"
#include "math/token_gradient.h"
#include "math/token_loss.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = kLossThreads;

using Sums = LossSums;
// The start of the workspace; partial sums [blocks] follow.
struct Totals {
  double class_weight;
  double upstream;
};

__device__ double plus(double a, double b) { return a + b; }
__device__ Sums plus(const Sums& a, const Sums& b) {
  return {a.loss + b.loss, a.lse + b.lse, a.log_prob + b.log_prob, a.valid + b.valid,
          a.correct + b.correct};
}

// Sums over the threads of a block by a fixed halving tree; all threads get the result.
template <typename T>
__device__ T block_sum(T mine) {
  __shared__ T shared[kThreads];
  shared[threadIdx.x] = mine;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half)
      shared[threadIdx.x] = plus(shared[threadIdx.x], shared[threadIdx.x + half]);
    __syncthreads();
  }
  return shared[0];
}

__device__ double class_weight(const LossCall& c, std::int64_t vocab_id) {
  return c.class_weight == nullptr ? 1.0 : c.class_weight[vocab_id];
}
__device__ double token_weight(const LossCall& c, std::int64_t token) {
  return c.token_weight == nullptr ? 1.0 : c.token_weight[token];
}

// A token's part of the divisor of `mean`.
__device__ double share_of(const LossCall& c, const ForwardCall& all, std::int64_t row) {
  if (row >= c.tokens || !has_target(all, row)) return 0.0;
  const double share = token_weight(c, row);
  return c.target_weight == nullptr ? share * class_weight(c, target_of(all, row)) : share;
}
// partial [blocks]: sums of 256 tokens each.
__global__ void __launch_bounds__(kThreads)
    shares_of_blocks(const LossCall c, const ForwardCall all, double* partial) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const double sum = block_sum(share_of(c, all, row));
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// Sums over all tokens, in one block. partial null: computes the sums of shares_of_blocks itself.
__device__ double all_shares(const LossCall& c, const ForwardCall& all, const double* partial,
                             int blocks) {
  double shares = 0.0;
  if (partial == nullptr) {
    for (int b = 0; b < blocks; ++b) {
      const double sum = block_sum(share_of(c, all, std::int64_t{b} * kThreads + threadIdx.x));
      if (threadIdx.x == b) shares = sum;
      __syncthreads();  // until all threads have read block_sum's memory
    }
  } else {
    for (int b = threadIdx.x; b < blocks; b += kThreads) shares += partial[b];
  }
  return block_sum(shares);
}

__global__ void __launch_bounds__(kThreads)
    write_shares(const LossCall c, const ForwardCall all, const double* partial, int blocks,
                 double* to) {
  const double shares = all_shares(c, all, partial, blocks);
  if (threadIdx.x == 0) *to = shares;
}

// Writes the statistics that are known before the losses, and returns the totals to all threads of
// a block.
__device__ Totals totals_of(const LossCall& c, const ForwardCall& all, const double* partial,
                            int blocks) {
  const std::int64_t vocab = all.vocab_of_targets();
  const double shares = c.shares != nullptr ? *c.shares : all_shares(c, all, partial, blocks);
  Totals totals{static_cast<double>(vocab), c.grad_loss};
  if (c.class_weight != nullptr && c.terms.label_smoothing != 0.0) {
    __syncthreads();
    double classes = 0.0;
    for (std::int64_t j = threadIdx.x; j < vocab; j += kThreads) classes += c.class_weight[j];
    totals.class_weight = block_sum(classes);
  }
  const double normalizer = c.normalizer > 0.0 ? c.normalizer : shares;
  // Nothing to average: gradients are 0, not 0 / 0.
  if (c.reduction == LossReduction::mean)
    totals.upstream = normalizer == 0.0 ? 0.0 : c.grad_loss / normalizer;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    c.statistics->normalizer = normalizer;
    c.statistics->bad_rank = -1;
  }
  return totals;
}

__global__ void __launch_bounds__(kThreads)
    set_totals(const LossCall c, const ForwardCall all, const double* partial, int blocks,
               Totals* to) {
  const Totals totals = totals_of(c, all, partial, blocks);
  if (threadIdx.x == 0) *to = totals;
}

// Returns the totals of a call from one of its chunks.
__device__ Totals totals_of(const LossCall& c, const ForwardCall& chunk) {
  ForwardCall all = chunk;
  all.first_token = 0;
  all.rows = nullptr;
  return totals_of(c, all, nullptr, static_cast<int>((c.tokens + kThreads - 1) / kThreads));
}

// Writes the loss from the sums of all tokens. single: one target for each token.
__device__ void write_loss(const LossCall& c, bool single, const Sums& all) {
  DeviceStatistics& s = *c.statistics;
  s.valid_tokens = all.valid;
  s.correct = c.argmax && single ? all.correct : -1;
  const double count = static_cast<double>(all.valid);
  s.mean_lse = all.valid == 0 ? 0.0 : all.lse / count;
  s.mean_log_prob = all.valid == 0 || !single ? 0.0 : all.log_prob / count;
  if (c.loss == nullptr || c.reduction == LossReduction::none) return;
  double loss = all.loss;
  if (c.reduction == LossReduction::mean) {
    loss = s.normalizer == 0.0 ? (c.nan_if_empty ? nan("") : 0.0) : loss / s.normalizer;
  }
  *c.loss = s.bad_target == kNoBadTarget && s.bad_rank < 0 ? static_cast<float>(loss) : nanf("");
}

// Returns the log-sum-exp with the digits that f.lse, rounded to fp32, lacks.
__device__ double exact_lse(const ForwardCall& f, std::int64_t row) {
  return static_cast<double>(f.lse[row]) + f.lse_rest[row];
}
// The softmax of a token with a logit of +inf is NaN, and so are its gradients.
__device__ void set_lse(RowCoefficients& to, double lse) {
  const double bits = isinf(lse) && lse > 0.0 ? nan("") : lse * kLog2E;
  to.lse_log2 = static_cast<float>(bits);
  to.lse_rest = isfinite(to.lse_log2) ? static_cast<float>(bits - to.lse_log2) : 0.0f;
}

// known null: each block computes the totals. partial null: a single block, which writes the loss
// itself.
__global__ void __launch_bounds__(kThreads)
    losses_of_tokens(const LossCall c, const ForwardCall f, const Totals* known, Sums* partial,
                     RowCoefficients* rows, float* deltas) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t token = row < f.shape.tokens ? token_of(f, row) : 0;
  const int per_token = f.shape.targets_per_token;
  const Totals totals = known != nullptr ? *known : totals_of(c, f);
  Sums mine{};
  RowCoefficients result{};
  bool bad = false;
  if (row < f.shape.tokens) {
    const double lse = f.lse[row];
    const double upstream =
        c.grad_losses != nullptr ? static_cast<double>(c.grad_losses[token]) : totals.upstream;
    TokenLoss loss(c.terms, token_weight(c, token), upstream);
    for (int k = 0; k < per_token; ++k) {
      const std::int64_t slot = row * per_token + k;
      const std::int64_t vocab_id = target_of(f, slot);
      double delta = 0.0;
      if (is_target(f, vocab_id)) {
        mine.valid = 1;
        delta = loss.add_target(
            class_weight(c, vocab_id),
            c.target_weight == nullptr ? 1.0 : c.target_weight[token * per_token + k],
            f.log_prob[slot]);
        mine.log_prob = f.log_prob[slot];
        if (f.argmax != nullptr && per_token == 1) mine.correct = f.argmax[row] == vocab_id;
      }
      bad |= is_bad(f, vocab_id);
      if (deltas != nullptr) deltas[slot] = static_cast<float>(delta * f.logit_scale);
    }
    if (mine.valid != 0) {
      if (loss.smooths()) {
        const double by_sum = loss.add_smoothing(lse, f.weighted_sum[row], totals.class_weight,
                                                 static_cast<double>(f.vocab_of_targets()));
        result.gamma = static_cast<float>(by_sum * f.logit_scale);
      }
      result.alpha = static_cast<float>(loss.add_lse(lse) * f.logit_scale);
      if (rows != nullptr) set_lse(result, exact_lse(f, row));
      mine.loss = loss.value();
      mine.lse = lse;
    }
    if (c.reduction == LossReduction::none && c.loss != nullptr)
      c.loss[token] = bad ? nanf("") : static_cast<float>(mine.loss);
    if (c.int64_argmax != nullptr) c.int64_argmax[token] = f.argmax[row];
  }
  if (rows != nullptr) rows[row] = result;  // padded_tokens of them
  const Sums sum = block_sum(mine);
  if (threadIdx.x > 0) return;
  if (partial == nullptr) {
    write_loss(c, per_token == 1, sum);
  } else {
    partial[f.first_token / kThreads + blockIdx.x] = sum;
  }
}

__global__ void __launch_bounds__(kThreads)
    reduce_losses(const LossCall c, bool single, const Sums* partial, int blocks) {
  Sums all{};
  for (int b = threadIdx.x; b < blocks; b += kThreads) all = plus(all, partial[b]);
  all = block_sum(all);
  if (threadIdx.x == 0) write_loss(c, single, all);
}

__global__ void __launch_bounds__(kThreads)
    write_sums(const LossCall c, const Sums* partial, int blocks, RankLoss* to) {
  Sums all{};
  for (int b = threadIdx.x; b < blocks; b += kThreads) all = plus(all, partial[b]);
  all = block_sum(all);
  if (threadIdx.x > 0) return;
  *to = {all.loss, all.lse, all.log_prob, all.valid, all.correct, c.statistics->bad_target};
}
// Run by one thread.
__global__ void add_ranks(const LossCall c, bool single, const RankLoss* ranks, int count) {
  Sums all{};
  for (int r = 0; r < count; ++r) {
    const RankLoss& of = ranks[r];
    all = plus(all, Sums{of.loss, of.lse, of.log_prob, of.valid, of.correct});
    if (of.bad_target == kNoBadTarget || c.statistics->bad_rank >= 0) continue;
    c.statistics->bad_rank = r;
    c.statistics->bad_target_of_rank = of.bad_target;
  }
  write_loss(c, single, all);
}

__global__ void __launch_bounds__(kThreads)
    set_cotangents(const CotangentCall g, const ForwardCall f, RowCoefficients* rows,
                   float* deltas) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t token = row < f.shape.tokens ? token_of(f, row) : 0;
  const int per_token = f.shape.targets_per_token;
  RowCoefficients result{};
  if (row < f.shape.tokens) {
    const auto of_token = [&](const float* values) {
      return values == nullptr ? 0.0f : values[token];
    };
    TokenCotangent cotangent{of_token(g.lse), of_token(g.entropy), of_token(g.weighted_sum)};
    bool valid = false;
    for (int k = 0; k < per_token; ++k) {
      const std::int64_t slot = row * per_token + k;
      const std::int64_t at = token * per_token + k;
      double delta = 0.0;
      if (is_target(f, target_of(f, slot))) {
        valid = true;
        const double share = g.log_prob == nullptr ? 0.0 : g.log_prob[at];
        cotangent.lse -= share;
        delta = share + (g.target_logit == nullptr ? 0.0 : g.target_logit[at]);
      }
      deltas[slot] = static_cast<float>(delta * f.logit_scale);
    }
    if (valid) {
      const TokenGradient t =
          token_gradient(cotangent, g.entropy == nullptr ? 0.0 : f.entropy[row]);
      set_lse(result, exact_lse(f, row));
      result.alpha = static_cast<float>(t.alpha * f.logit_scale);
      result.beta = static_cast<float>(t.beta * f.logit_scale);
      result.gamma = static_cast<float>(t.gamma * f.logit_scale);
    }
  }
  rows[row] = result;
}

constexpr int kFewBlocks = 4;  // blocks that one thread block sums in less time than a launch takes

template <typename T>
T* partials(const LossCall& c) {
  return reinterpret_cast<T*>(static_cast<std::byte*>(c.workspace) + 256);
}

// Sums of weights of 256 tokens each; null where there are few tokens.
const double* block_shares(const LossCall& c, const ForwardCall& all, int blocks) {
  if (blocks <= kFewBlocks) return nullptr;
  auto* const partial = partials<double>(c);
  shares_of_blocks<<<blocks, kThreads, 0, static_cast<cudaStream_t>(all.stream)>>>(c, all, partial);
  require_cuda(cudaGetLastError(), "weights of tokens");
  return partial;
}

// One thread block covers all tokens, which are then one chunk: chunks have at least 256.
bool finishes_at_once(const LossCall& c) { return c.finishes && c.tokens <= kThreads; }
// token_losses computes the totals of few tokens, which saves a launch.
bool begins_at_once(const LossCall& c) {
  return c.shares == nullptr && c.tokens > 0 && loss_blocks(c.tokens) <= kFewBlocks;
}

}  // namespace

void sum_shares(const LossCall& c, const ForwardCall& all, double* shares) {
  const int blocks = loss_blocks(c.tokens);
  write_shares<<<1, kThreads, 0, static_cast<cudaStream_t>(all.stream)>>>(
      c, all, block_shares(c, all, blocks), blocks, shares);
  require_cuda(cudaGetLastError(), "weights of tokens");
}

void begin_loss(const LossCall& c, const ForwardCall& all) {
  if (begins_at_once(c)) return;
  const int blocks = loss_blocks(c.tokens);
  const double* const partial = c.shares != nullptr ? nullptr : block_shares(c, all, blocks);
  set_totals<<<1, kThreads, 0, static_cast<cudaStream_t>(all.stream)>>>(
      c, all, partial, blocks, static_cast<Totals*>(c.workspace));
  require_cuda(cudaGetLastError(), "normalizer");
}

void token_losses(const LossCall& c, const ForwardCall& chunk, RowCoefficients* rows,
                  float* delta) {
  losses_of_tokens<<<loss_blocks(chunk.shape.tokens), kThreads, 0,
                     static_cast<cudaStream_t>(chunk.stream)>>>(
      c, chunk, begins_at_once(c) ? nullptr : static_cast<const Totals*>(c.workspace),
      finishes_at_once(c) ? nullptr : partials<Sums>(c), rows, delta);
  require_cuda(cudaGetLastError(), "losses of tokens");
}

void finish_loss(const LossCall& c, const ForwardCall& all) {
  if (finishes_at_once(c)) return;
  reduce_losses<<<1, kThreads, 0, static_cast<cudaStream_t>(all.stream)>>>(
      c, all.shape.targets_per_token == 1, partials<Sums>(c), loss_blocks(c.tokens));
  require_cuda(cudaGetLastError(), "loss");
}

void sum_losses(const LossCall& c, const ForwardCall& all, RankLoss* mine) {
  write_sums<<<1, kThreads, 0, static_cast<cudaStream_t>(all.stream)>>>(
      c, partials<Sums>(c), loss_blocks(c.tokens), mine);
  require_cuda(cudaGetLastError(), "sums of losses");
}

void finish_loss(const LossCall& c, const ForwardCall& all, const RankLoss* ranks, int count) {
  add_ranks<<<1, 1, 0, static_cast<cudaStream_t>(all.stream)>>>(c, all.shape.targets_per_token == 1,
                                                                ranks, count);
  require_cuda(cudaGetLastError(), "loss of all ranks");
}

void token_cotangents(const CotangentCall& cotangents, const ForwardCall& chunk,
                      RowCoefficients* rows, float* delta) {
  if (chunk.shape.tokens == 0) return;
  set_cotangents<<<loss_blocks(chunk.shape.tokens), kThreads, 0,
                   static_cast<cudaStream_t>(chunk.stream)>>>(cotangents, chunk, rows, delta);
  require_cuda(cudaGetLastError(), "cotangents of tokens");
}

}  // namespace logitless::cuda
