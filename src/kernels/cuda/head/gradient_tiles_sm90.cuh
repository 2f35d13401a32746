// Arguments of the gradient GEMMs, and the static schedule of their tiles.
#pragma once

#include "kernels/cuda/head/sizes.h"
#include "kernels/cuda/head/split_sums_sm90.cuh"

namespace logitless::cuda {

// One output: value = GEMM * factor[row] (d_hidden) + row_part[row] * column_part[column].
struct GemmArguments {
  int row_pairs;     // pairs of row tiles: ceil(rows / 256); 0: not wanted
  int column_tiles;  // ceil(columns / 256)
  int steps;         // steps of 64 along the contracted dimension
  int rows;
  int columns;
  const float* factor;    // for d_hidden
  const float* row_part;  // factor of the column part; null: 1
  int row_part_stride;
  const float* column_part;  // null: none
  bool add;                  // fp32: adds to the present contents
  bool narrow;               // 16 bits, else fp32
};

// A vocabulary block of the far field: its selected tiles, and the destination of d_weight.
struct FarVocabBlockArguments {
  const std::uint32_t* block_groups;  // [pairs of token tiles][group_bits]
  const std::uint32_t* group_blocks;  // [groups][block_bits]
  int group_bits;
  int block_bits;
  int first_group;
  int groups;
  int blocks;
  const std::int32_t* list_begin;   // FarCall's, from the block's first group on
  const std::int32_t* order_vocab;  // from the block's first position on
  const float* share;               // likewise
  const float* tile_gradient;  // [tiles of 128 entries][columns], from the block's first tile on
  void* d_weight;
  std::int64_t stride;
};

struct GradientArguments {
  // With split-K, each part contracts a run of the steps. The partial results are stacked, 256
  // row_pairs rows each: row_pairs counts those of all parts, steps those of one.
  GemmArguments hidden;
  int hidden_pairs;  // of one part
  int hidden_steps;  // of all parts
  GemmArguments weight;
  unsigned* pace;
  bool paced;  // pacing is worth it: the clusters read more than L2 holds
  // Targets, added in fp32 by the epilogue.
  int targets_per_token;
  int vocab_begin;
  const int* vocab_ids;      // [tokens, K]
  const float* coefficient;  // [tokens, K]
  const int* entry_begin;    // [entries of the block + 1]
  const int* entry_token;
  const float* entry_coefficient;
  const float* many;        // GradientGemmsCall's
  const void* weight_rows;  // of vocab_begin
  std::int64_t weight_stride;
  const void* hidden_rows;
  std::int64_t hidden_stride;
  const float* weight_unscale;  // GradientGemmsCall's, of f16
  // [token pairs + 1]: 0: all tokens ignored, the pair is skipped; the last: 1 + the last pair that
  // is not skipped. Null: all active.
  const int* active;
  SplitSums sums;  // running sums of a 16-bit d_weight
  FarVocabBlockArguments far;
};

// Returns the pairs of token tiles up to the last one with a target.
__device__ __forceinline__ int pairs_with_targets(const GradientArguments& a, int pairs) {
  return a.active == nullptr ? pairs : min(pairs, a.active[pairs]);
}
// Returns the steps of a d_weight tile.
__device__ __forceinline__ int weight_steps(const GradientArguments& a) {
  constexpr int kSteps = kClusterRows / kStep;
  return min(a.weight.steps,
             pairs_with_targets(a, (a.weight.steps + kSteps - 1) / kSteps) * kSteps);
}
// Returns the tiles of d_hidden that are computed; the rest is 0. With split-K all are.
__device__ __forceinline__ int hidden_tiles(const GradientArguments& a) {
  const bool split = a.hidden.row_pairs != a.hidden_pairs;
  return (split ? a.hidden.row_pairs : pairs_with_targets(a, a.hidden_pairs)) *
         a.hidden.column_tiles;
}

// A cluster's tiles in order. The last clusters have one tile of d_hidden less than the others:
// they have tiles of d_weight instead, which count as early, before all clusters share the rest.
class TileSchedule {
 public:
  // even: every cluster gets the same number of tiles, whatever their length.
  __device__ __forceinline__ TileSchedule(const GradientArguments& a, bool even, int cluster,
                                          int clusters)
      : hidden_tiles_(hidden_tiles(a)),
        weight_tiles_(a.weight.row_pairs * a.weight.column_tiles),
        clusters_(clusters),
        hidden_(cluster) {
    const int first = hidden_tiles_ % clusters;  // of those with one tile less
    early_count_ = clusters - first;
    early_ = cluster - first;
    early_tiles_ = 0;
    if (first > 0 && !even) {
      const long long early =
          static_cast<long long>(early_count_) * a.hidden.steps / (weight_steps(a) + kFinish);
      early_tiles_ = static_cast<int>(min(early, static_cast<long long>(weight_tiles_)));
    }
    late_ = early_tiles_ + (even ? (cluster + clusters - first) % clusters : cluster);
  }
  // Returns false at the end.
  __device__ __forceinline__ bool next(bool& is_hidden, int& tile) {
    is_hidden = hidden_ < hidden_tiles_;
    if (is_hidden) {
      tile = hidden_;
      hidden_ += clusters_;
      return true;
    }
    if (early_ >= 0 && early_ < early_tiles_) {
      tile = early_;
      early_ += early_count_;
      return true;
    }
    tile = late_;
    late_ += clusters_;
    return tile < weight_tiles_;
  }
  // Goes on, after the end, with the tiles of d_hidden that have no steps: they are 0.
  __device__ __forceinline__ bool next_empty(const GradientArguments& a, bool& is_hidden,
                                             int& tile) {
    is_hidden = true;
    tile = hidden_;
    hidden_ += clusters_;
    return tile < a.hidden.row_pairs * a.hidden.column_tiles;
  }
  __device__ __forceinline__ int early_tiles() const { return early_tiles_; }

 private:
  int hidden_tiles_, weight_tiles_, clusters_, early_tiles_, early_count_;
  int hidden_, early_, late_;
};

}  // namespace logitless::cuda
