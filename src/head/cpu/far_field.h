// The far field of a call on a CPU: the tokens' order, the forward and backward of a chunk by tile
// masses, and the audit.
#pragma once

#include <cstdint>
#include <span>

#include "head/cpu/run.h"

namespace logitless::cpu {

class FarField {
 public:
  explicit FarField(const Run& run) : run_(run), bound_(run.call.far.d_hidden_bound) {}

  // Prepares data shared by all chunks: tile centroids and the tokens to audit. all_valid: the
  // valid tokens of all ranks.
  void begin(std::int64_t all_valid);
  void forward(const ForwardChunk& forward, std::int64_t first) const;
  void backward(const BackwardChunk& backward, std::int64_t first);
  // Computes lse and d_hidden of the audited tokens exactly and compares.
  void audit(TokenFunction function);
  FarFieldStatistics statistics() const;

  // A vocabulary over ranks (shard_far_field.cpp). Each rank selects local tiles by itself, from
  // global totals. All exchanged data is global, and equal on all ranks.

  // Sorts similar tokens into the same blocks, whichever rank they come from.
  void sort_by_targets(const ChunkTokens& tokens) const;
  // Saves lse of the audited tokens, in double, as the token function receives it.
  void keep_audited(const ForwardChunk& chunk, const ChunkTokens& tokens) const;
  // Adds norms of d_hidden [count, D] over the global vocabulary before rounding, and saves the
  // rows of audited tokens.
  void keep_hidden(const ChunkTokens& tokens, std::span<const float> rows);
  // The error of a token's d_hidden is at most the sum of the ranks' bounds.
  void exchange_bounds(const ChunkTokens& tokens);

 private:
  std::int64_t audited_row(std::int64_t i) const;  // index among the valid rows
  TilePoints tile_points() const;
  void require_common_order() const;
  void exchange_estimates(float* log2_total, std::int64_t tokens) const;
  void choose_audited_of_ranks();
  FarFieldStatistics statistics_of_ranks() const;
  // Returns whether the local shard is so large that selecting all of its tiles
  // gains nothing.
  bool holds_its_part() const;
  // Sorting of tokens by their selected tiles (far_order.cpp): from the order
  // of a chunk to that of its blocks, and back.
  enum class Way : std::uint8_t { to_blocks, back };
  void sort_by_tiles(const ChunkCommon& chunk, std::int64_t first, const float* alpha,
                     const float* caution) const;
  void order_blocks(const BackwardChunk& chunk, std::int64_t first) const;
  void move_rows(const ChunkCommon& chunk, std::int64_t first, Way way) const;
  template <typename T>
  void move(T* values, std::int64_t tokens, Way way, std::int64_t each = 1) const;

  const Run& run_;
  std::int64_t all_valid_ = 0;
  // Audited tokens of this call, and of all ranks; index of this call's first;
  // valid tokens of earlier ranks.
  std::int64_t audited_ = 0, all_audited_ = 0, first_audited_ = 0, valid_before_ = 0;
  FarSums sums_ = {};
  TokenOutput bound_;
};

}  // namespace logitless::cpu
