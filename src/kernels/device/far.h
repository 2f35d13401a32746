// Interface of the far-field kernels on a GPU (docs/use/far_field.md): block-sparse softmax beyond
// a dense call. Columns are positions of a vocabulary order. A tile of 128 positions has a mass; a
// group of two tiles is selected or skipped for each block of 256 tokens.
#pragma once

#include <span>

#include "kernels/device/gradient.h"
#include "math/far_sample.h"
#include "math/far_sums.h"

namespace logitless::cuda {

inline constexpr std::int64_t kFarTile = 128;   // vocabulary entries
inline constexpr std::int64_t kFarGroup = 256;  // vocabulary entries
inline constexpr std::int64_t kFarBlock = 256;  // tokens
constexpr std::int64_t far_tile_count(std::int64_t vocab) {
  return (vocab + kFarTile - 1) / kFarTile;
}
constexpr std::int64_t far_group_count(std::int64_t vocab) {
  return (vocab + kFarGroup - 1) / kFarGroup;
}
constexpr std::int64_t far_bits(std::int64_t count) {
  return (count + 31) / 32;
}  // in 32-bit words

// An entry of the list of pairs: the group (16 bits), whether it is sampled rather than selected (1
// bit), and the block (15 bits).
inline constexpr std::int64_t kMostFarGroups = 1 << 16;
// Tokens of a chunk: one float of each has to fit into the shared memory of an SM.
inline constexpr std::int64_t kMostFarTokens = 48 * 1024;
LOGITLESS_HOST_DEVICE inline std::uint32_t far_entry(int group, bool sampled, int block) {
  return static_cast<std::uint32_t>(group) << 16 | (sampled ? 1u << 15 : 0u) |
         static_cast<std::uint32_t>(block);
}
LOGITLESS_HOST_DEVICE inline int group_of_entry(std::uint32_t e) {
  return static_cast<int>(e >> 16);
}
LOGITLESS_HOST_DEVICE inline bool sampled_entry(std::uint32_t e) { return (e >> 15 & 1u) != 0; }
LOGITLESS_HOST_DEVICE inline int block_of_entry(std::uint32_t e) {
  return static_cast<int>(e & 0x7fffu);
}

// An order of the vocabulary, on the device. Runs of kFarGroup entries of it are groups.
struct DeviceOrder {
  const std::int32_t* vocab_ids = nullptr;  // [vocab] the vocabulary entry at each position
  const std::int32_t* positions = nullptr;  // [vocab]
  const float* share = nullptr;             // [vocab] by position, see VocabOrder
  bool identity = false;                    // each entry is its own position
  // With a vocabulary-parallel head, [global vocab]: the global positions that tokens are sorted
  // by. Null: `positions`.
  const std::int32_t* places = nullptr;
  std::int64_t position_count = 0;
};

// Moments of an order's tiles, on the device.
struct DeviceMoments {
  const void* axes = nullptr;      // [dim, dim] bf16, by rows
  const void* variance = nullptr;  // [T, dim] bf16
  const float* caution = nullptr;  // [T] log2, >= 0
};

// Inputs and scratch of the estimates of tile masses.
struct FarEstimate {
  DeviceMoments moments;
  float* target_weight_sum = nullptr;  // [vocab] by position: exp(s bias) / its sum over the tile
  float* log2_base = nullptr;          // [T] log2 sum_j exp(s bias_j)
  void* mean = nullptr;                // [T, dim] in the dtype of weight
  float* along = nullptr;              // [R, dim], R = estimate_rows(tokens) tokens at a time
  void* squares = nullptr;             // [R, dim] bf16
  float* forms = nullptr;              // [T, R]
  float* total = nullptr;              // [padded tokens] log2 of the sum of all estimates
  float* far_sum = nullptr;    // [padded tokens] the skipped mass, relative to the reference
  float* constants = nullptr;  // 1, 0, sum of logit weight times bias
  void* products = nullptr;    // kEstimateBytes of cuBLAS workspace
};
constexpr std::int64_t estimate_rows(std::int64_t tokens) { return tokens < 1024 ? tokens : 1024; }
inline constexpr std::size_t kEstimateBytes = std::size_t{32} << 20;

// Tokens that are computed exactly as well, to measure the error. They are evenly spaced among the
// tokens with a target, in the order of FarTokens::rows; at most `tokens` of them.
struct FarAudit {
  std::int64_t tokens = 0;
  const std::int32_t* order = nullptr;  // [all tokens] FarTokens::rows
  std::int32_t* valid = nullptr;        // one number: tokens with a target
  std::int32_t* rows = nullptr;         // [tokens] the audited ones, then others without a target
  float* d_hidden = nullptr;            // [tokens, dim]
  float* lse = nullptr;                 // [tokens]
  double* partial = nullptr;            // [tokens, 2]
};
// Counts the tokens with a target. Once all chunks are ordered, list_audited() picks the audited
// ones.
void count_audited(const ForwardCall& all, const FarAudit& audit);
void list_audited(const FarAudit& audit, Stream stream);
// Saves lse and d_hidden [chunk's tokens, dim] of the chunk's audited tokens.
void keep_audited(const ForwardCall& call, const FarAudit& audit, const GradientOutput& d_hidden);
// Adds the errors to `sums`. `exact` is the call whose rows are audit.rows, with its lse; d_hidden
// [tokens, dim] is contiguous f32.
void compare_audited(const ForwardCall& exact, const FarAudit& audit, const float* d_hidden,
                     FarSums* sums);

// The arrays that sort_tokens permutes, and its scratch.
constexpr std::int64_t chunk_keys(std::int64_t tokens) { return (1 << 16) + 2 * tokens; }
struct FarTokens {
  const void* hidden = nullptr;  // of all tokens, in the caller's order
  std::int64_t hidden_stride = 0;
  void* hidden_rows = nullptr;   // [tokens, dim]: ForwardCall::hidden
  std::int32_t* rows = nullptr;  // [all tokens]: ForwardCall::rows
  TargetOrder order;             // scratch for the tokens, with chunk_keys() counts
};

// The order with its groups of 256 entries rearranged: those that a chunk selects come first, so
// that a vocabulary block holds many of them, then the others. Each part keeps its relative order,
// and a partial last group stays last. select_tiles or select_estimated fill it; with an identity
// order, whose groups stay in place, they fill `groups` alone.
struct FarArrangement {
  std::int32_t* groups = nullptr;     // [G] the group of the order at each position
  std::int32_t* vocab_ids = nullptr;  // [vocab] as in DeviceOrder, like the next two
  std::int32_t* positions = nullptr;  // [vocab]
  float* share = nullptr;             // [vocab]
  void* centroid = nullptr;           // [T, dim] in the dtype of weight
};

// Far-field arguments of a chunk. T = far_tile_count(vocab), G = far_group_count(vocab), B = padded
// tokens / 256.
struct FarCall {
  DeviceOrder order;
  FarArrangement arranged;
  // Null until tiles are selected. Then order, centroid, bits, lists, `bias` and `logit_weights`
  // are in the arranged order. Masses, radii and distances stay in the groups' original order,
  // which this maps to.
  const std::int32_t* groups = nullptr;
  float tau = 0.0f;
  float most_selected = 1.0f;          // all pairs are selected when more than this part would be
  bool reports_fallback = true;        // and the sums count that as a fallback
  FarSample sample;                    // sample of (group, block) pairs, for d_weight and d_bias
  std::int64_t block_vocab_count = 0;  // rows gathered at a time: a multiple of 256
  std::int64_t swept_vocab = 0;        // the same in the forward: block_vocab_count or more
  void* gathered = nullptr;        // [those rows, dim] in the dtype of weight; unused with identity
  float* bias = nullptr;           // [vocab] by position; null: none
  float* logit_weights = nullptr;  // [vocab] by position; null: 1
  // Written by the forward: sum_{j in J} 2^(z log2e - reference), times the slope of the softcap.
  float* mass = nullptr;      // [2 G, padded tokens]
  void* centroid = nullptr;   // [T, dim] in the dtype of weight: sum_j share_j w_j
  float* radius = nullptr;    // [T] max_j |w_j - centroid|
  float* distance = nullptr;  // [T] |centroid|
  // Written by select_tiles or by the forward's estimates. group_blocks and the list include the
  // sample after select_tiles or sample_tiles.
  std::uint32_t* block_groups = nullptr;  // [B, far_bits(G)] groups that a block selects
  std::uint32_t* group_blocks = nullptr;  // [G, far_bits(B)]
  std::uint32_t* list = nullptr;          // [G * B] far_entry(), ascending
  std::int32_t* list_begin = nullptr;     // [G + 1] where a group's entries begin in the list
  FarSums* sums = nullptr;                // zeroed before the first chunk
  const FarEstimate* estimate = nullptr;  // not null: the forward computes selected tiles alone
  FarTokens tokens;
};

// True if the errors of a sampled pair's estimates are measured. BlockCall finds them with the
// pair's gradients. It stores the error and the exact mass in the masses of the pair's two tiles,
// as parts of each token's total.
inline bool samples_estimates(const FarCall& far) {
  return far.estimate != nullptr && far.sample.every > 0;
}
// Adds these errors to of_sample of the sums, for tokens with a gradient. partial: kFarPartials.
void measure_sample(const ForwardCall& call, const RowCoefficients* rows, double* partial);

// Returns why masses cannot be estimated, or empty. prepare_estimates() sets up the thread's
// handles once.
std::string estimates_unsupported();
void prepare_estimates();
// Prepares the inputs of estimate_masses once for all chunks: weights of vocabulary entries, means
// and centroids of tiles.
void prepare_means(const ForwardCall& call);
// Estimates masses, totals and references of a chunk's tokens.
void estimate_masses(const ForwardCall& call);
// Computes far_sum, the mass of the skipped tiles.
void sum_far_masses(const ForwardCall& call);
// Writes weighted_sum of a chunk's tokens: s (x_i . weight_sum + sum_j omega_j bias_j).
void estimate_weighted_sums(const ForwardCall& call, const float* weight_sum);

// Vectors with one 32-bit value for each of a chunk's tokens.
struct TokenValues {
  void* data = nullptr;
  std::int64_t vectors = 1;
  std::int64_t vector_stride = 0;  // elements from one vector to the next
  std::int64_t stride = 1;         // elements from token to token
};
// Sorts a chunk's tokens by the tiles that they select, so that a block holds similar tokens. The
// key is the 64th of the order that the token's last tile is in, then the mean position of its
// tiles. Tokens that select none follow, those without a target come last; the sort is stable.
// Permutes far.tokens, masses, references and `values`. rows: as in select_tiles; null: by
// estimates. At most kMostFarTokens.
void sort_tokens(const ForwardCall& call, const RowCoefficients* rows,
                 std::span<const TokenValues> values);

// Sorts tokens by the position of their first target into `scratch.slots` [tokens]; those without a
// target come last. Keys are below token_keys() of vocab, or of position_count.
void order_tokens(const ForwardCall& all, const DeviceOrder& order, const TargetOrder& scratch);
constexpr std::int64_t token_keys(std::int64_t vocab, std::int64_t tokens) {
  return vocab + tokens + 1;
}
// The same for one chunk, roughly, by global positions; counts are chunk_keys().
void order_chunk_tokens(const ForwardCall& chunk, const DeviceOrder& order,
                        const TargetOrder& scratch);
// to [tokens of the chunk, dim] = rows of `hidden`, gathered by call.rows.
void gather_tokens(const ForwardCall& call, const void* hidden, std::int64_t stride, void* to);

// A vocabulary block: positions [`first`, `first + vocab_count`). `first` is a multiple of 256;
// `vocab_count` is at most block_vocab_count, or swept_vocab in the forward.
struct FarVocabBlock {
  std::int64_t first = 0;
  std::int64_t vocab_count = 0;
};
// The outputs of gather_block besides the rows.
enum class GatherPart : std::uint8_t { rows, centroids, radii };
// Gathers rows of weight by position. `centroids` also computes those of its tiles; `radii` also
// the radius and distance of tiles whose centroids exist. Does nothing where *wanted is 0 (null:
// always runs). Once tiles are selected it gathers only rows of groups in the list. Returns the
// rows: far.gathered, or weight itself.
const void* gather_block(const ForwardCall& call, const FarVocabBlock& vocab_block, GatherPart part,
                         const int* wanted);
// Gathers bias and logit weights by position.
void gather_vectors(const ForwardCall& call);

// Selects the tiles with a mass above tau of the total of a token with nonzero alpha, and arranges
// the groups. Adds to the sums' kept, sampled, pairs and fallback.
void select_tiles(const ForwardCall& call, const RowCoefficients* rows);
// Selects by the estimates, and also where a target has more than tau, by target_logits [tokens,
// K].
void select_estimated(const ForwardCall& call, const float* target_logits);
// Adds the sample to the selection of select_estimated.
void sample_tiles(const ForwardCall& call);

// Writes block [tokens, T] in the dtype of hidden, times call.scales: alpha P of skipped tiles
// without the targets' part, 0 of selected ones; columns up to its stride are 0. In a block for
// `vocab` (d_weight) a sampled pair has the factor 1 - sample.every, because `sample.every` times
// its exact gradient is added elsewhere.
enum class FarBlockFor : std::uint8_t { tokens, vocab };
void far_block(const BlockCall& call, const LogitBlock& block, FarBlockFor products);
// bound [tokens]: sum_J |block_iJ| radius_J plus the rounding to 16 bits, of a block for tokens.
void far_bounds(const BlockCall& call, const LogitBlock& block, float* bound);

// Clears the block at targets in a selected or sampled tile of the vocabulary block.
void clear_targets(const BlockCall& call);

// Writes d_weight of the entries whose group is in no block's list, which the GEMMs of vocabulary
// blocks leave out. It is share_j of their tile's gradient, plus smoothing, plus targets of a
// 16-bit d_weight. far.first_position is 0; entries and logit weights are of the full order.
void put_far_vocab(const GradientGemmsCall& call);

// d_bias_j (+)= sum over the selected and sampled blocks of the gradients + share_j tile_sum_J,
// scattered to vocabulary entries.
void far_bias(const BlockCall& call, const float* tile_sum, bool add, float* d_bias);

// Adds |bound|^2 and |d_hidden|^2 of the tokens with a target to the sums, in a fixed order.
// d_hidden [tokens, dim]; bound null: none; bound_output [all tokens], 0 for ignored tokens, null:
// not wanted.
void finish_far(const ForwardCall& call, const GradientOutput& d_hidden, const float* bound,
                float* bound_output, double* partial);
inline constexpr std::int64_t kFarPartials = 512;  // doubles of `partial`

}  // namespace logitless::cuda
