// Workspace layout of a call on a CPU: one pure function for the planner and the engine.
#pragma once

#include <cstddef>
#include <cstdint>

#include "head/plan_layout.h"
#include "head/plan_sizes.h"
#include "kernels/cpu_head.h"
#include "math/shard_state.h"

namespace logitless::cpu {

ChunkSizes chunk_sizes(PlanKind kind, const PlanSizes& sizes, int threads);
ChunkSizes chunk_sizes(const LossPlan& plan);

// Far-field buffers, as offsets in bytes. C = tokens of a chunk, K = targets per token.
struct FarLayout {
  std::size_t positions = 0;       // i32 [C K]: of the targets
  std::size_t centroid = 0;        // [tiles, D] in the kernel's far_dtype
  std::size_t radius = 0;          // f32 [tiles]
  std::size_t centroid_norm = 0;   // f32 [tiles]
  std::size_t weighted_total = 0;  // f32 [D] with label smoothing
  std::size_t mean = 0;            // far_both: [tiles, D] in far_dtype
  std::size_t log2_base = 0;       // f32 [tiles]
  std::size_t axes = 0;            // [D, D] and [tiles, D] in far_dtype, unless that is f32
  std::size_t variance = 0;
  std::size_t log2_total = 0;    // f32 [C]
  std::size_t bound = 0;         // f32 [C]
  std::size_t norm_squared = 0;  // f64 [C]
  // Sorting of tokens by selected tiles
  std::size_t keys = 0;     // i32 [C]
  std::size_t from = 0;     // i32 [C]: index in the chunk of each sorted token
  std::size_t scratch = 0;  // f32 [threads, C], or the bytes of the largest per-token array
};
// Buffers of the audited tokens.
struct AuditLayout {
  std::size_t row = 0;    // i32 [C]
  std::size_t far = 0;    // f32 [audited, D]: d_hidden of the far field
  std::size_t exact = 0;  // f32 [audited, D]: exact d_hidden
  std::size_t rows = 0;   // i64 [2, audited]: rows of hidden; 0, 1, 2, ...
  std::size_t lse = 0;    // f64 [audited]
};
// Cotangents of a token that its rank sends to all ranks with sharded tokens, as in TokenCotangent.
// K derivatives with respect to the target logits follow.
struct TokenCoefficientsRecord {
  double lse, entropy, weighted_sum;
};
// Buffers of a vocabulary sharded over G ranks. B = ceil(C / G): tokens of a rank.
struct ShardLayout {
  std::size_t counts = 0;   // i64 [G]: valid tokens of each rank
  std::size_t place = 0;    // i64 [C]: index of each token in the exchanged buffers
  std::size_t rows = 0;     // i32 [C K]: local rows of the targets
  std::size_t best = 0;     // f32 [C]
  std::size_t wide = 0;     // ExactSum [C]
  std::size_t records = 0;  // [G], C TokenRecords and C K ShardTargets each
  // With sharded tokens, of all ranks:
  std::size_t hidden = 0;              // [G, B, D]
  std::size_t vocab_ids = 0;           // i32 [G, B, K]
  std::size_t token_coefficients = 0;  // [G, B], a TokenCoefficientsRecord and K doubles each
  std::size_t far = 0;                 // far field, f32 [G, C]: estimated totals, bounds
  // With d_hidden, f32 [G, B, D] each: sent to all ranks, received from all ranks
  std::size_t slices = 0;
  std::size_t received = 0;
};
// Buffers of a weight gathered from G ranks, B rows of each at a time. N = local tokens of the
// plan. The arrays of Layout for a chunk, except entries and tile_begin, then have all N tokens.
struct GatheredLayout {
  std::size_t states = 0;   // TokenRecord [N]: merged over the slices so far
  std::size_t places = 0;   // i32 [C K]: rows of the targets in the slice
  std::size_t outside = 0;  // i64 [C]: 0, 1, 2, ...: rows of sums of d_hidden
  // Buffers of a chunk and one rank's rows of a slice: outputs of the forward kernel, then inputs
  // of its backward
  std::size_t exponent = 0, sum = 0, alpha = 0, beta = 0, gamma = 0;  // f32 [C + panel]
  std::size_t entropy = 0, weighted = 0;                              // f64 [C]
  std::size_t argmax = 0, best = 0;                                   // i32 [C], f32 [C]
  std::size_t wide = 0;                                               // ExactSum [C]
  std::size_t logit_weights = 0;                                      // f32 [B]
  std::size_t slice = 0;                                              // [G] of SliceLayout
  std::size_t sums = 0;       // [G] of SliceSums: sent to all ranks
  std::size_t received = 0;   // [G] of SliceSums: from all ranks; reuses the slice
  std::size_t whole = 0;      // bytes of full_slice
  std::size_t full_sums = 0;  // bytes of full_sums
  std::size_t d_hidden = 0;   // f32 [N, D]: sums over slices of a 16-bit d_hidden
};
// Data of all N tokens that is saved for a separate computation of d_weight.
struct SavedLayout {
  std::size_t exponent = 0, alpha = 0, beta = 0, gamma = 0;  // f32 [N]
  std::size_t coefficient = 0;                               // f32 [N K]
  std::size_t vocab_ids = 0;                                 // i32 [N K]
  std::size_t places = 0;  // i32 [C K]: indices of the targets in the current block
};
struct Layout : PlanLayout {
  ChunkSizes sizes;
  std::size_t rows = 0;           // int64 [tokens]: rows of hidden that are not ignored
  std::size_t exponent = 0;       // f32 [C]
  std::size_t sum = 0;            // f32 [C]
  std::size_t alpha = 0;          // f32 [C]
  std::size_t beta = 0;           // f32 [C]
  std::size_t gamma = 0;          // f32 [C]
  std::size_t entropy = 0;        // f64 [C]
  std::size_t weighted = 0;       // f64 [C]
  std::size_t argmax = 0;         // i32 [C]
  std::size_t target_logit = 0;   // f32 [C K]
  std::size_t coefficient = 0;    // f32 [C K]
  std::size_t vocab_ids = 0;      // i32 [C K]
  std::size_t entries = 0;        // SparseEntry [C K]
  std::size_t tile_begin = 0;     // i32 [tiles + 1]
  std::size_t delta = 0;          // f64 [K]
  std::size_t bias = 0;           // f32 [V] with a bias
  std::size_t logit_weights = 0;  // f32 [V] with class weights; by token id if weights are gathered
  std::size_t d_bias = 0;         // f32 [V] when requested
  // fp32 sums [V, D], or their low halves, for a 16-bit d_weight over several chunks. Of
  // weight_vocab rows if d_weight is computed separately.
  std::size_t d_weight = 0;
  SavedLayout saved;
  FarLayout far;
  AuditLayout audit;
  ShardLayout shard;
  GatheredLayout gathered;
  std::size_t scratch = 0;  // kernel's scratch
  std::size_t total = 0;
};

Layout layout_of(const HeadKernel& kernel, const HeadShape& shape, const HeadFeatures& features,
                 const ChunkSizes& sizes, std::int64_t audited = 0);
Layout layout_of(const LossPlan& plan);

// Returns the bytes of the additional sums for a 16-bit d_weight that several chunks add to: of the
// rows that are computed at a time; else 0.
std::size_t weight_sum_bytes(const HeadShape& shape, const HeadFeatures& features,
                             const ChunkSizes& sizes);

}  // namespace logitless::cpu
