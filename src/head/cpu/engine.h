// The chunk loop of every call of the head: forward of a chunk, a function of
// each token's outputs, backward.
#pragma once

#include <cstdint>

#include "head/cpu/run.h"

namespace logitless::cpu {

class Engine {
 public:
  // Throws InvalidArgument if plan or workspace do not fit the call, or a
  // target is out of range. Writes no output.
  explicit Engine(const HeadCall& call, const ChosenRows& chosen = {});

  std::int64_t valid_tokens() const { return run_.valid; }
  // Returns the valid tokens after run: of all ranks if tokens are sharded,
  // else of this call.
  std::int64_t all_valid_tokens() const { return all_valid_; }
  const std::int64_t* valid_rows() const { return run_.valid_rows(); }

  const TargetReader& targets() const { return run_.targets; }

  // Computes lse and d_hidden of the audited tokens exactly and compares, after
  // run of a far-field plan. `function` as in run.
  void audit(TokenFunction function);
  // Returns the statistics after run and the audit.
  FarFieldStatistics far_statistics() const;

  // Runs all chunks. All requested gradients are then complete, including rows
  // of ignored tokens.
  void run(TokenFunction function);

 private:
  std::int64_t count_tokens();  // of the rank with the most
  ChunkTokens chunk_tokens(std::int64_t first) const;
  void set_common(ChunkCommon& chunk, const ChunkTokens& tokens) const;
  void sort_chunk_targets(const ChunkCommon& chunk) const;
  void run_chunk(const ChunkTokens& tokens, bool first_chunk, bool last_chunk,
                 TokenFunction function);
  void backward(const ForwardChunk& forward, const ChunkTokens& tokens, bool first_chunk,
                bool last_chunk);
  WeightGradientSink weight_sink(bool first_chunk, bool last_chunk) const;
  // Separate computation of d_weight (weight_pass.cpp).
  bool weight_apart() const { return run_.sizes.weight_vocab > 0; }
  void keep_coefficients(const ForwardChunk& chunk, std::int64_t first) const;
  void run_weight_pass() const;
  void weight_of_vocab(std::int64_t vocab_begin, std::int64_t vocab_count,
                       const ChunkTokens& tokens, bool first_chunk, bool last_chunk) const;
  // Vocabulary-parallel calls (shard_engine.cpp).
  void gather_counts();
  void locate_targets(const ChunkTokens& tokens, std::int32_t* vocab_ids) const;
  void gather_tokens(const ChunkTokens& tokens) const;
  void forward_nothing(const ForwardChunk& chunk) const;
  void exchange_states(const ForwardChunk& chunk) const;
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
  // Returns whether the local shard is so large that selecting all of its tiles
  // gains nothing.
  bool holds_its_part() const;
  // Far-field plans (far_engine.cpp).
  void start_far();
  std::int64_t audited_row(std::int64_t i) const;  // index among the valid rows
  void far_forward(const ForwardChunk& forward, std::int64_t first) const;
  void far_backward(const BackwardChunk& backward, std::int64_t first);
  // Sorting of tokens by their selected tiles (far_order.cpp): from the order
  // of a chunk to that of its blocks, and back.
  enum class Way : std::uint8_t { to_blocks, back };
  void sort_by_tiles(const ChunkCommon& chunk, std::int64_t first, const float* alpha,
                     const float* caution) const;
  void order_blocks(const BackwardChunk& chunk, std::int64_t first) const;
  void move_rows(const ChunkCommon& chunk, std::int64_t first, Way way) const;
  template <typename T>
  void move(T* values, std::int64_t tokens, Way way, std::int64_t each = 1) const;
  TilePoints tile_points() const;
  void finish_bias() const;

  const Run run_;
  std::int64_t all_valid_ = 0;
  std::int64_t step_ = 0;  // valid rows from chunk to chunk
  // Audited tokens of this call, and of all ranks; index of this call's first;
  // valid tokens of earlier ranks.
  std::int64_t audited_ = 0, all_audited_ = 0, first_audited_ = 0, valid_before_ = 0;
  FarSums far_sums_ = {};
  TokenOutput bound_;
};

}  // namespace logitless::cpu
