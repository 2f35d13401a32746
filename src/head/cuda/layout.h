// Workspace layout of a call on a GPU: one pure function for the planner and the engine.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "head/cuda/vocab_ranges.h"
#include "head/gathered_vocab.h"
#include "head/plan_layout.h"
#include "head/plan_sizes.h"
#include "kernels/device/kernel.h"
#include "kernels/device/loss.h"
#include "kernels/device/token_list.h"
#include "logitless/plan.h"

namespace logitless::cuda {

// Sizes of a plan on a GPU. Logits of entries beyond `stored` are recomputed, `vocab_block` at a
// time.
struct Sizes {
  std::int64_t chunk = 0;  // tokens: all, or a multiple of 256
  std::int64_t vocab_block =
      0;  // entries of a vocabulary block in the workspace, 0 without gradients
  std::int64_t stored =
      0;  // entries whose exponentials the forward saves; without ranges, at most `vocab_block`
  int ranges = 0;          // blocks of the first chunk's saved entries, see vocab_ranges.h; 0: none
  std::int64_t first = 0;  // tokens of the first chunk, with ranges
  bool far = false;        // entries by position, gathered one block at a time
  bool both = false;       // the forward estimates masses
  std::int64_t audited = 0;  // tokens; the workspace of their exact plan follows this one's
  // With gathered weights, the rows of each rank in a slice; a kernel call has no other entries,
  // and a chunk has all tokens. 0: weights are not gathered.
  std::int64_t slice = 0;
  // d_weight is made after all chunks, of `vocab_block` entries at a time over all tokens, whose
  // logits are recomputed once more. Sums between the chunks are those of the entries alone.
  bool weight_apart = false;

  std::int64_t first_chunk() const { return ranges > 0 ? first : chunk; }
  std::int64_t largest_chunk() const { return std::max(first_chunk(), chunk); }
};
Sizes sizes_for(PlanKind kind, const PlanSizes& sizes, std::int64_t audited);
Sizes sizes_of(const LossPlan& plan);

// Offsets in bytes. C = tokens of the largest chunk, P = C padded to 256, N = tokens of the plan, K
// = targets per token. With Sizes::weight_apart, each chunk has its own rows, delta and active.
struct GradientLayout {
  std::size_t rows = 0;           // RowCoefficients [P]
  std::size_t delta = 0;          // f32 [C, K]
  std::size_t factor = 0;         // f32 [P]
  std::size_t coefficient = 0;    // f32 [C, K]
  std::size_t vocab_ids = 0;      // i32 [C, K], of TargetOrder
  std::size_t slots = 0;          // i32 [C, K]
  std::size_t places = 0;         // i32 [C, K]
  std::size_t counts = 0;         // i32 [2 (V + 2)], with many targets
  std::size_t entry_begin = 0;    // i32 [max_vocab + 1], of TargetEntries
  std::size_t entry_vocab = 0;    // i32 [C, K]
  std::size_t entry_tokens = 0;   // i32 [C, K]
  std::size_t entry_values = 0;   // f32 [C, K]
  std::size_t many = 0;           // f32 [many_rows(C K), D], see adds_entries
  std::size_t reference = 0;      // f32 [P]
  std::size_t active = 0;         // i32 [P / 256 + 1]
  std::size_t block = 0;          // block_bytes
  std::size_t scaled_hidden = 0;  // [C, D] in the dtype of hidden, see scales_hidden
  std::size_t scales = 0;         // f32 [2]: BlockCall::scales of f16
  std::size_t d_hidden = 0;       // f32 [C, D]: sums over vocabulary blocks of a 16-bit d_hidden
  std::size_t d_weight = 0;       // f32 [V, D]: sums over chunks of a 16-bit d_weight
  std::size_t weight_low = 0;     // running_sum_bytes: lower bytes of the sums in d_weight
  std::size_t d_bias = 0;         // f32 [V]
  std::size_t weight_sum = 0;     // f32 [D], of smoothing
  std::size_t hidden_sum = 0;     // f32 [D]
  std::size_t column_sums = 0;    // workspace of sum_columns
};
// Buffers of a call whose chunks have the tokens with a target first, see lists_tokens.
struct ListLayout {
  bool wanted = false;
  std::size_t rows = 0;    // i32 [N], of TokenList
  std::size_t counts = 0;  // i32 [list_blocks(N) + 1]
  std::size_t hidden = 0;  // [C, D] in the dtype of hidden; vocabulary-parallel: ShardLayout's
};
// Buffers of kernels/device/far.h. T = far_tile_count(V), G = far_group_count(V), B = P / 256.
struct FarLayout {
  // FarArrangement: [G], [V], [V], [V], bf16 [T, D]
  std::size_t groups = 0, arranged_vocab = 0, arranged_positions = 0, arranged_share = 0,
              arranged_centroid = 0;
  std::size_t sums = 0;             // FarSums
  std::size_t partial = 0;          // f64 [kFarPartials]
  std::size_t token_keys = 0;       // i32 [N]
  std::size_t token_rows = 0;       // i32 [N]: tokens in the order of blocks
  std::size_t token_positions = 0;  // i32 [N]
  std::size_t token_counts = 0;     // i32 [2 (token_keys(V, N) + 2)], with many tokens
  std::size_t chunk_keys = 0;       // i32 [C], of sort_tokens
  std::size_t chunk_rows = 0;       // i32 [C]
  std::size_t chunk_positions = 0;  // i32 [C]
  std::size_t chunk_counts = 0;     // i32 [2 (chunk_keys(C) + 2)], with many tokens
  std::size_t hidden_rows = 0;      // [C, D] in the dtype of hidden
  std::size_t gathered = 0;         // [`vocab_block`, D] in the dtype of hidden
  std::int64_t swept = 0;           // entries that fit there in the forward, when the following
                                    // block, scaled_hidden and d_hidden are free
  std::size_t bias = 0;             // f32 [V] with a bias
  std::size_t logit_weights = 0;    // f32 [V] with logit weights
  std::size_t mass = 0;             // f32 [2 G, P]
  std::size_t centroid = 0;         // bf16 [T, D]
  std::size_t radius = 0;           // f32 [T]
  std::size_t distance = 0;         // f32 [T]
  std::size_t block_groups = 0;     // u32 [B, G / 32]
  std::size_t group_blocks = 0;     // u32 [G, B / 32]
  std::size_t list = 0;             // u32 [G * B]
  std::size_t list_begin = 0;       // i32 [G + 1]
  std::size_t block = 0;            // bf16 [C, T padded to 256]
  std::size_t tile_gradient = 0;    // f32 [T, D] with d_weight
  std::size_t tile_sum = 0;         // f32 [T] with d_bias
  std::size_t bound = 0;            // f32 [C]
};
// Buffers of far_both's estimates. R = estimate_rows(C).
struct EstimateLayout {
  std::size_t target_weight_sum = 0;  // f32 [V]
  std::size_t log2_base = 0;          // f32 [T]
  std::size_t mean = 0;               // bf16 [T, D]
  std::size_t along = 0;              // f32 [R, D]
  std::size_t squares = 0;            // bf16 [R, D]
  std::size_t forms = 0;              // f32 [T, R]
  std::size_t total_mass = 0;         // f32 [P]
  std::size_t far_sum = 0;            // f32 [P]
  std::size_t constants = 0;          // f32 [3]
  std::size_t products = 0;           // kEstimateBytes
};
// Buffers of a vocabulary sharded over G ranks. B = C / G tokens of a rank in a chunk, with sharded
// tokens. With several chunks, their inputs are double-buffered: those of the next chunk arrive
// during the current one.
struct ShardLayout {
  std::size_t logits = 0;             // f32 [G, C, K]: of the targets, from each rank
  std::size_t merged_logits[2] = {};  // f32 [C, K]: their sums over the ranks
  std::size_t records = 0;            // TokenRecord [G, C]
  std::size_t logit_weights = 0;      // f32 [V] with logit weights: of the local rows, by vocab_ids
  // With d_hidden; the buffer of sums_hidden then has G ceil(C / G) tokens
  std::size_t received = 0;  // f32 [G, ceil(C / G), D]
  // With sharded tokens; the first three also with the far field or a list of tokens
  std::size_t hidden[2] = {};          // [C, D] in the dtype of hidden
  std::size_t targets[2] = {};         // i64 [C, K]
  std::size_t bad_target = 0;          // u64, of the chunk
  std::size_t local_coefficients = 0;  // RowCoefficients [B padded to 256]
  std::size_t local_delta = 0;         // f32 [B, K]
  std::size_t losses = 0;              // RankLoss [G]
  std::size_t denominators = 0;        // f64 [kMostRanks + 1]: of each rank, and their sum
};
// Buffers of a vocabulary-parallel far field. Exchanges use the ranks' common order of a chunk's
// tokens. Computations use the local order, by selected tiles. P = C padded to 256.
struct ShardFarLayout {
  std::size_t sums = 0;                // FarSums [G]
  std::size_t values = 0;              // f32 [G, C]: totals or bounds of each rank's shard
  std::size_t merged = 0;              // f32 [C]: of the global vocabulary
  std::size_t token_coefficients = 0;  // RowCoefficients [P]
  std::size_t delta = 0;               // f32 [C, K]
  std::size_t rows = 0;                // i32 [C]: tokens in the local order, as in the following:
  std::size_t merged_logits = 0;       // f32 [C, K]
  std::size_t records = 0;             // TokenRecord [C]
  std::size_t lse = 0;                 // f32 [C]
  std::size_t log_prob = 0;            // f32 [C, K]
  std::size_t target_logit = 0;        // f32 [C, K]
};
// Buffers of a weight gathered from G ranks, with N local tokens.
struct GatheredLayout {
  std::size_t records = 0;    // TokenRecord [N]: of one call's rows
  std::size_t vocab_ids = 0;  // i32 [vocab_of_call], if one call takes the rows of all ranks
  std::size_t states = 0;     // TokenRecord [N]: merged over the calls so far
  std::size_t found = 0;      // f32 [N, K]: logits of the targets in a call
  std::size_t logits = 0;     // f32 [N, K]: of all targets
  std::size_t no_logits = 0;  // f32 [N, K]: NaN, which makes 1 the reference of exponentials
  std::size_t bias = 0;       // f32 [G, bias_rows], with a bias; not by columns
  // Double-buffered with several slices, except `received`, which with one slice reuses its buffer.
  std::size_t slice = 0;      // [G] of SliceLayout, without bias and ids
  std::size_t sums = 0;       // [G] of SliceSums: sent to all ranks
  std::size_t received = 0;   // [G] of SliceSums: received from all ranks
  std::size_t whole = 0;      // full_slice up to its bias; two with several slices
  std::size_t full_sums = 0;  // bytes of full_sums
  SliceParts parts;           // the full bias is gathered at once, so no slice has any
};
// Returns the rows of bias per rank: those of the largest shard, rounded up to 16 bytes.
inline std::int64_t bias_rows(const HeadFeatures& f) { return (f.gathered_rows + 3) / 4 * 4; }
bool several_slices(const HeadFeatures& f, const Sizes& sizes);
// Returns the entries of the largest kernel call with gathered weights.
std::int64_t vocab_of_call(const HeadFeatures& f, std::int64_t slice);
// Returns the features of kernel calls with gathered weights: sums of a slice's d_weight are fp32
// and overwritten.
HeadFeatures features_of_slices(HeadFeatures features);

// Most ranks of a group that a mean is over.
inline constexpr int kMostRanks = 4096;

// Buffers of A audited tokens.
struct AuditLayout {
  std::size_t rows = 0;       // i32 [A]
  std::size_t valid = 0;      // i32
  std::size_t tokens = 0;     // [A, D] in the dtype of hidden
  std::size_t lse = 0;        // f32 [A]
  std::size_t partial = 0;    // f64 [A, 2]
  std::size_t hidden = 0;     // f32 [A, D]
  std::size_t exact = 0;      // f32 [A, D]
  std::size_t exact_lse = 0;  // f32 [A]
};
struct Layout : PlanLayout {
  Sizes sizes;
  std::size_t statistics = 0;     // DeviceStatistics
  std::size_t loss = 0;           // workspace of the loss kernels
  std::size_t lse = 0;            // f32 [C]
  std::size_t lse_rest = 0;       // f32 [C] with gradients
  std::size_t log_prob = 0;       // f32 [C, K]
  std::size_t target_logit = 0;   // f32 [C, K] with gradients, sharded tokens, or listed ones
  std::size_t weighted_sum = 0;   // f32 [C] with label smoothing
  std::size_t entropy = 0;        // f32 [C] with a gradient through it
  std::size_t argmax = 0;         // i32 [C] when requested
  std::size_t forward = 0;        // workspace of the forward kernel
  std::size_t forward_bytes = 0;  // without what only GEMMs use
  AliasedRanges ranges;  // of the first chunk, without data pointers; none if no entry is saved
  std::size_t wide_hidden = 0;  // f32 [C, D]: of 16-bit hidden states beside an f32 weight
  ListLayout list;
  GradientLayout gradients;
  FarLayout far;
  EstimateLayout estimates;
  AuditLayout audit;
  ShardLayout shard;
  ShardFarLayout shard_far;
  GatheredLayout gathered;
  // Start of the receive buffers of a vocabulary sharded over ranks, which may lie in a
  // communicator's memory instead. They hold data of dim numbers per token or entry: hidden, sums
  // of d_hidden, and rows and sums of d_weight. With several chunks, they also hold a chunk's
  // inputs, targets and their logits.
  std::size_t exchange = 0;
  std::size_t total = 0;

  std::size_t exchange_bytes() const { return total - exchange; }
};
// Returns Layout::exchange_bytes.
std::size_t exchange_bytes(const HeadShape& shape, const HeadFeatures& features,
                           const Sizes& sizes);
// Returns the blocks of the first chunk, without data pointers; none without ranges or if no entry
// is saved.
AliasedRanges ranges_of(const DeviceKernel& kernel, const HeadShape& shape,
                        const HeadFeatures& features, const Sizes& sizes);
// Returns the block of entries from `first` on, which are not saved.
AliasedBlock vocab_block_of(const HeadShape& shape, const HeadFeatures& features,
                            const Sizes& sizes, std::int64_t first);
Layout layout_of(const DeviceKernel& kernel, const HeadShape& shape, const HeadFeatures& features,
                 const Sizes& sizes);
Layout layout_of(const LossPlan& plan);

// Returns whether the GEMM of d_weight reads a copy of hidden in every block. Ignored tokens are 0
// in it: among the others' they may hold NaN, which the zeros of the block would not hide.
inline bool clears_hidden(const DeviceKernel& kernel, bool lists, const Sizes& sizes) {
  return kernel.copies_hidden || (!lists && !sizes.far);
}
// Returns whether it reads such a copy in some block. The copy is scaled by a factor per token for
// saved exponentials, and 0 for ignored tokens.
inline bool scales_hidden(const DeviceKernel& kernel, bool lists, const HeadFeatures& f,
                          const Sizes& sizes) {
  return f.d_weight && (sizes.stored > 0 || clears_hidden(kernel, lists, sizes));
}
// Returns whether that copy is in place of hidden, which is a copy of this call's alone.
inline bool scales_in_place(bool lists, const HeadFeatures& f) {
  return lists && !f.tokens_sharded;
}
// Returns whether a 16-bit d_weight holds the sums over chunks itself, except for 8 bits each in
// the workspace.
inline bool splits_weight(const DeviceKernel& kernel, std::int64_t tokens, const HeadFeatures& f,
                          const Sizes& sizes) {
  return f.d_weight && f.d_weight_dtype != DType::f32 && kernel.splits_sums && !sizes.far &&
         sizes.first_chunk() < tokens;
}
// Returns whether d_hidden is first summed in fp32 in the workspace: a 16-bit one over vocabulary
// blocks, and any onto present values, whose rows may be in another order.
inline bool sums_hidden(std::int64_t vocab, const HeadFeatures& f, const Sizes& sizes) {
  if (sizes.far) return f.d_hidden;          // its rows are in another order
  if (f.vocab_ranks > 0) return f.d_hidden;  // partial sums for other ranks
  return f.d_hidden &&
         (f.accumulate || (f.d_hidden_dtype != DType::f32 && sizes.vocab_block < vocab));
}
// Returns whether a 16-bit d_weight is first summed in fp32, over chunks of tokens or onto present
// values.
inline bool sums_weight(const DeviceKernel& kernel, std::int64_t tokens, const HeadFeatures& f,
                        const Sizes& sizes) {
  return f.d_weight && f.d_weight_dtype != DType::f32 && (!kernel.splits_sums || sizes.far) &&
         (sizes.first_chunk() < tokens || f.accumulate);
}
// Returns whether the GEMM's epilogue adds targets to a 16-bit d_weight before it is rounded.
inline bool adds_entries(const DeviceKernel& kernel, std::int64_t tokens, const HeadFeatures& f,
                         const Sizes& sizes) {
  return f.d_weight && f.d_weight_dtype != DType::f32 && !sums_weight(kernel, tokens, f, sizes);
}
// Returns whether hidden states of 16 bits are widened to f32, a chunk at a time.
inline bool widens_hidden(const HeadFeatures& f) { return f.narrow_hidden != DType::f32; }
inline bool wants_gradients(const HeadFeatures& f) { return f.d_hidden || f.d_weight || f.d_bias; }
// Returns whether chunks have the tokens with a target first, so that ignored ones cost nothing.
// The far field orders its tokens itself. A separate pass for d_weight would copy hidden again for
// each of its blocks. Rows of d_hidden over ranks move at the end, when nothing can be added to
// them.
inline bool lists_tokens(const DeviceKernel& kernel, std::int64_t tokens, const HeadFeatures& f,
                         const Sizes& sizes) {
  return kernel.skips_ignored && tokens > kBlockPadding && !sizes.far && !sizes.weight_apart &&
         !(f.vocab_ranks > 0 && f.gathered_rows == 0 && f.d_hidden && f.accumulate);
}
// Returns the tokens that are expected to count (PlanRequest::expected_ignored), in whole blocks.
inline std::int64_t expected_tokens(std::int64_t tokens, float ignored) {
  const std::int64_t counted =
      tokens - std::llround(static_cast<double>(ignored) * static_cast<double>(tokens));
  return counted == 0 ? 0 : std::min(tokens, padded_tokens(counted));
}
// Returns whether smoothing is computed separately and exactly, as two outer products. With a
// softcap it is part of the block.
inline bool smooths_apart(const HeadFeatures& f) {
  return f.label_smoothing && f.softcap == 0.0f && wants_gradients(f);
}

ForwardShape forward_shape(const HeadShape& shape, const HeadFeatures& features);

}  // namespace logitless::cuda
