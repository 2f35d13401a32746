// One call of the head on a CPU, bound to its plan's memory: checked operands,
// the valid rows, and the step from a chunk's outputs to the gradient
// coefficients of its tokens.
#pragma once

#include <cstdint>
#include <span>
#include <type_traits>

#include "head/cpu/layout.h"
#include "head/cpu/targets.h"
#include "head/far_work.h"
#include "head/head_call.h"
#include "head/validate.h"
#include "kernels/cpu_head.h"
#include "math/log_prob.h"
#include "math/token_gradient.h"

namespace logitless::cpu {

// Forward outputs of one token.
struct TokenResult {
  std::int64_t row = 0;  // of hidden
  double lse = 0.0;
  const float* target_logit = nullptr;      // [K]; undefined for ignored targets
  const std::int32_t* vocab_ids = nullptr;  // [K]; -1 where ignored
  double entropy = 0.0;                     // when requested
  double weighted_sum = 0.0;                // with label smoothing
  std::int32_t argmax = 0;                  // when requested

  double log_prob(int k) const { return log_prob_of(target_logit[k], lse); }
};

// The loss's gradients with respect to a token's outputs. delta [K] is for
// target_logit, includes the part of log_prob, and starts at 0.
struct TokenCoefficients {
  TokenCotangent cotangent;
  double* delta = nullptr;
};

// Non-owning callable void(const TokenResult&, TokenCoefficients&). One thread
// calls it for the valid tokens, in their order, or with far-field plans in the
// order of their targets.
class TokenFunction {
 public:
  template <typename F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, TokenFunction>)
      TokenFunction(F&& function)  // NOLINT: implicit on purpose
      : object_(const_cast<void*>(static_cast<const void*>(&function))),
        call_([](void* object, const TokenResult& result, TokenCoefficients& token_coefficients) {
          (*static_cast<std::remove_reference_t<F>*>(object))(result, token_coefficients);
        }) {}
  void operator()(const TokenResult& result, TokenCoefficients& token_coefficients) const {
    call_(object_, result, token_coefficients);
  }

 private:
  void* object_;
  void (*call_)(void*, const TokenResult&, TokenCoefficients&);
};

// Selected valid rows, for an audit, and the rows of d_hidden that they are
// written to.
struct ChosenRows {
  std::span<const std::int64_t> rows = {};
  const std::int64_t* to = nullptr;  // null: all valid rows

  bool chosen() const { return to != nullptr; }
};

// The tokens of a chunk. The local ones are [first, first + local_count) of
// this call's valid rows. Without sharded tokens, all are local.
struct ChunkTokens {
  std::int64_t first = 0, count = 0, local_count = 0;
  std::int64_t step = 0;  // valid rows from chunk to chunk
};

class Run {
 public:
  // Throws InvalidArgument if plan or workspace do not fit the call, or a
  // target is out of range. Writes no output. Copies the call; its plan and
  // workspace must outlive it.
  Run(const HeadCall& of, const ChosenRows& rows);

  const HeadCall call;
  const ChosenRows chosen;
  const LossPlan& plan;
  const HeadKernel& kernel;
  const Layout& layout;
  const ChunkSizes& sizes;
  const TargetReader targets;
  const VocabShard vocab;
  std::int64_t valid = 0;  // tokens of this call
  const float* bias = nullptr;
  const float* logit_weights = nullptr;

  template <typename T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(call.workspace->data()) + offset);
  }
  std::int64_t* valid_rows() const { return at<std::int64_t>(layout.rows); }
  bool wants_gradients() const { return plan.kind != PlanKind::forward; }
  bool sharded() const { return call.shard.sharded(); }
  bool empty() const { return sharded() && vocab.rows() == 0; }
  bool gathered() const { return call.shard.gathered != nullptr; }
  bool exchanges_tokens() const { return call.shard.tokens_sharded && !gathered(); }
  bool far() const { return sizes.far; }
  // Returns the row of the weight at a position of the kernel's order.
  std::int64_t row_at(std::int64_t position) const {
    return far() ? call.far.order->vocab_ids()[position] : position;
  }
  // Returns the local index of a chunk's token; -1: it belongs to another rank.
  std::int64_t local_of(const ChunkTokens& tokens, std::int64_t token) const;

  bool weight_apart() const { return sizes.weight_vocab > 0; }

  // Returns a chunk that takes at most `step` valid rows of each rank, from `first` on.
  ChunkTokens chunk_tokens(std::int64_t first, std::int64_t step) const;
  void set_common(ChunkCommon& chunk, const ChunkTokens& tokens) const;
  // Sorts the chunk's targets, whose token ids are already read.
  void sort_chunk_targets(const ChunkCommon& chunk) const;
  void set_outputs(ForwardChunk& chunk) const;
  // Returns the state of one token after the forward over `from`.
  ShardState state_of(const ForwardChunk& chunk, std::int64_t token, const VocabShard& from) const;
  // Calls the function for the local tokens, and computes the gradient
  // coefficients of all.
  void set_coefficients_of_tokens(const ForwardChunk& chunk, const ChunkTokens& tokens,
                                  TokenFunction function) const;
  // Clears gradients that no chunk writes: rows of ignored tokens, and d_weight
  // if there is no valid token of any rank.
  void clear_ignored(std::int64_t all_valid) const;
  WeightGradientSink weight_sink(bool first_chunk, bool last_chunk) const;
  // Rounds sums [count, D] of the valid rows from `first` on into d_hidden.
  void store_hidden(std::int64_t first, std::int64_t count, const float* sums) const;

 private:
  void set_coefficients(const ForwardChunk& chunk, std::int64_t token,
                        const TokenCotangent& cotangent, const double* delta) const;
  std::byte* coefficients_of(std::int64_t index) const;
  void put_coefficients(std::int64_t index, const TokenCoefficients& token_coefficients) const;
  void exchange_coefficients(const ForwardChunk& chunk, std::int64_t step) const;
};

// Runs a weight-gathered call (head/schedule/weight_gathered.h). all_valid: the valid tokens of all
// ranks.
void run_weight_gathered(const Run& run, std::int64_t all_valid, TokenFunction function);

// Separate computation of d_weight (weight_pass.cpp): saves what it reads of a chunk, and runs it
// after all chunks of `step` tokens.
void keep_coefficients(const Run& run, const ForwardChunk& chunk, std::int64_t first);
void run_weight_pass(const Run& run, std::int64_t step);

}  // namespace logitless::cpu
