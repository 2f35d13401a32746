// The chunk loop of every call of the head: forward of a chunk, a function of each token's outputs,
// backward.
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

// The loss's gradients with respect to a token's outputs. delta [K] is for target_logit, includes
// the part of log_prob, and starts at 0.
struct TokenCoefficients {
  TokenCotangent cotangent;
  double* delta = nullptr;
};

// Non-owning callable void(const TokenResult&, TokenCoefficients&). One thread calls it for the
// valid tokens, in their order, or with far-field plans in the order of their targets.
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

// Selected valid rows, for an audit, and the rows of d_hidden that they are written to.
struct ChosenRows {
  std::span<const std::int64_t> rows = {};
  const std::int64_t* to = nullptr;  // null: all valid rows

  bool chosen() const { return to != nullptr; }
};

class Engine {
 public:
  // Throws InvalidArgument if plan or workspace do not fit the call, or a target is out of range.
  // Writes no output.
  explicit Engine(const HeadCall& call, const ChosenRows& chosen = {});

  std::int64_t valid_tokens() const { return valid_; }
  // Returns the valid tokens after run: of all ranks if tokens are sharded, else of this call.
  std::int64_t all_valid_tokens() const { return all_valid_; }
  const std::int64_t* valid_rows() const { return at<std::int64_t>(layout_.rows); }

  const TargetReader& targets() const { return targets_; }

  // Computes lse and d_hidden of the audited tokens exactly and compares, after run of a far-field
  // plan. `function` as in run.
  void audit(TokenFunction function);
  // Returns the statistics after run and the audit.
  FarFieldStatistics far_statistics() const;

  // Runs all chunks. All requested gradients are then complete, including rows of ignored tokens.
  void run(TokenFunction function);

 private:
  template <typename T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(call_.workspace->data()) + offset);
  }
  // The tokens of a chunk. The local ones are [first, first + local_count) of this call's valid
  // rows. Without sharded tokens, all are local.
  struct ChunkTokens {
    std::int64_t first = 0, count = 0, local_count = 0;
  };
  // Returns the local index of a chunk's token; -1: it belongs to another rank.
  std::int64_t local_of(std::int64_t token) const {
    if (!exchanges_tokens()) return token;
    const std::int64_t own =
        at<std::int64_t>(layout_.shard.place)[token] - call_.shard.rank() * step_;
    return own >= 0 && own < step_ ? own : -1;
  }
  std::int64_t count_tokens();  // of the rank with the most
  ChunkTokens chunk_tokens(std::int64_t first) const;
  void set_common(ChunkCommon& chunk, const ChunkTokens& tokens) const;
  void set_outputs(ForwardChunk& chunk) const;
  void sort_chunk_targets(const ChunkCommon& chunk) const;
  void run_chunk(const ChunkTokens& tokens, bool first_chunk, bool last_chunk,
                 TokenFunction function);
  void set_coefficients_of_tokens(const ForwardChunk& chunk, const ChunkTokens& tokens,
                                  bool backward, TokenFunction function) const;
  void set_coefficients(const ForwardChunk& chunk, std::int64_t token,
                        const TokenCotangent& cotangent, const double* delta) const;
  void backward(const ForwardChunk& forward, const ChunkTokens& tokens, bool first_chunk,
                bool last_chunk);
  WeightGradientSink weight_sink(bool first_chunk, bool last_chunk) const;
  // Separate computation of d_weight (weight_pass.cpp).
  bool weight_apart() const { return sizes_.weight_vocab > 0; }
  void keep_coefficients(const ForwardChunk& chunk, std::int64_t first) const;
  void run_weight_pass() const;
  void weight_of_vocab(std::int64_t vocab_begin, std::int64_t vocab_count,
                       const ChunkTokens& tokens, bool first_chunk, bool last_chunk) const;
  // Vocabulary-parallel calls (shard_engine.cpp).
  bool sharded() const { return call_.shard.sharded(); }
  bool empty() const { return sharded() && vocab_.rows() == 0; }
  void gather_counts();
  void locate_targets(const ChunkTokens& tokens, std::int32_t* vocab_ids) const;
  void gather_tokens(const ChunkTokens& tokens) const;
  void forward_nothing(const ForwardChunk& chunk) const;
  void exchange_states(const ForwardChunk& chunk) const;
  std::byte* coefficients_of(std::int64_t place) const;
  void put_coefficients(std::int64_t own, const TokenCoefficients& token_coefficients) const;
  void exchange_coefficients(const ForwardChunk& chunk) const;
  void exchange_hidden(const ChunkTokens& tokens);
  // Vocabulary-parallel far field (shard_far_engine.cpp).
  void require_common_order() const;
  void sort_by_targets(const ChunkTokens& tokens) const;
  void exchange_estimates(float* log2_total, std::int64_t tokens) const;
  void keep_audited(const ForwardChunk& chunk, const ChunkTokens& tokens) const;
  void keep_far_hidden(const ChunkTokens& tokens, const float* rows, std::int64_t count);
  void exchange_bounds(const ChunkTokens& tokens);
  void choose_audited_of_ranks();
  FarFieldStatistics statistics_of_ranks() const;
  // Returns whether the local shard is so large that selecting all of its tiles gains nothing.
  bool holds_its_part() const;
  // Weight-gathered calls (gathered_engine.cpp).
  struct SliceBlock;
  bool gathered() const { return call_.shard.gathered != nullptr; }
  bool exchanges_tokens() const { return call_.shard.tokens_sharded && !gathered(); }
  void run_gathered(TokenFunction function);
  void gather_slice(std::int64_t slice) const;
  template <typename F>
  void each_block(std::int64_t slice, const F& function) const;
  SliceBlock block_of(int rank, std::int64_t slice) const;
  void set_block(ChunkCommon& chunk, const SliceBlock& block, std::int64_t first,
                 std::int64_t count) const;
  void absorb_block(const SliceBlock& block, std::int64_t first, std::int64_t count) const;
  ForwardChunk all_tokens() const;
  void finish_states(const ForwardChunk& chunk) const;
  void backward_block(const SliceBlock& block, std::int64_t first, std::int64_t count,
                      bool first_block) const;
  void exchange_sums(std::int64_t rows) const;
  void add_sums(std::int64_t slice) const;
  ShardState state_of(const ForwardChunk& chunk, std::int64_t token, const VocabShard& vocab) const;
  void store_hidden(std::int64_t first, std::int64_t count, const float* sums) const;
  // Far-field plans (far_engine.cpp).
  bool far() const { return sizes_.far; }
  // Returns the row of the weight at a position of the kernel's order.
  std::int64_t row_at(std::int64_t position) const {
    return far() ? call_.far.order->vocab_ids()[position] : position;
  }
  void start_far();
  std::int64_t audited_row(std::int64_t i) const;  // index among the valid rows
  void far_forward(const ForwardChunk& forward, std::int64_t first) const;
  void far_backward(const BackwardChunk& backward, std::int64_t first);
  // Sorting of tokens by their selected tiles (far_order.cpp): from the order of a chunk to that of
  // its blocks, and back.
  enum class Way : std::uint8_t { to_blocks, back };
  void sort_by_tiles(const ChunkCommon& chunk, std::int64_t first, const float* alpha,
                     const float* caution) const;
  void order_blocks(const BackwardChunk& chunk, std::int64_t first) const;
  void move_rows(const ChunkCommon& chunk, std::int64_t first, Way way) const;
  template <typename T>
  void move(T* values, std::int64_t tokens, Way way, std::int64_t each = 1) const;
  TilePoints tile_points() const;
  void clear_ignored() const;
  void finish_bias() const;

  HeadCall call_;
  ChosenRows chosen_;
  const LossPlan& plan_;
  const HeadKernel& kernel_;
  const Layout& layout_;
  const ChunkSizes& sizes_;
  TargetReader targets_;
  VocabShard vocab_;
  std::int64_t valid_ = 0;
  std::int64_t all_valid_ = 0;
  std::int64_t step_ = 0;  // valid rows from chunk to chunk
  const float* bias_ = nullptr;
  const float* logit_weights_ = nullptr;
  // Audited tokens of this call, and of all ranks; index of this call's first; valid tokens of
  // earlier ranks.
  std::int64_t audited_ = 0, all_audited_ = 0, first_audited_ = 0, valid_before_ = 0;
  FarSums far_sums_ = {};
  TokenOutput bound_;
};

}  // namespace logitless::cpu
