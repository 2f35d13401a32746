// The far field on a GPU (docs/far_field.md): what the engine asks of the kernels beyond a dense
// call. Words are positions of an order; tiles of 128 of them have masses, groups of two tiles are
// kept or not for blocks of 256 tokens.
#pragma once

#include <span>

#include "kernels/device_gradient.h"
#include "math/far_sample.h"
#include "math/far_sums.h"

namespace logitless::cuda {

inline constexpr std::int64_t kFarTile = 128;   // words
inline constexpr std::int64_t kFarGroup = 256;  // words
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

// An entry of the list of pairs: the group, whether it is sampled, not kept, and the block.
inline constexpr std::int64_t kMostFarGroups = 1 << 16;
// Tokens of a chunk: what the shared memory of a multiprocessor holds a float of.
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

// An order of the vocabulary, of the device. Runs of kFarGroup words of it are groups.
struct DeviceOrder {
  const std::int32_t* words = nullptr;      // [vocab] the word at each position
  const std::int32_t* positions = nullptr;  // [vocab]
  const float* share = nullptr;             // [vocab] by position, see VocabOrder
  bool identity = false;                    // the words are their positions
  // [whole vocab], of words over ranks: by which tokens are ordered. Null: positions.
  const std::int32_t* places = nullptr;
  std::int64_t place_count = 0;
};

// Of an order with moments, of the device.
struct DeviceMoments {
  const void* axes = nullptr;      // [dim, dim] bf16, by rows
  const void* variance = nullptr;  // [T, dim] bf16
  const float* caution = nullptr;  // [T] log2, >= 0
};

// What the masses of tiles are estimated from, and in.
struct FarEstimate {
  DeviceMoments moments;
  float* word_weight = nullptr;  // [vocab] by position: exp(s bias) / its sum over the tile
  float* log2_base = nullptr;    // [T] log2 sum_j exp(s bias_j)
  void* mean = nullptr;          // [T, dim] bf16
  float* along = nullptr;        // [R, dim] of R = estimate_rows(tokens) tokens at a time
  void* squares = nullptr;       // [R, dim] bf16
  float* forms = nullptr;        // [T, R]
  float* total = nullptr;        // [padded tokens] log2 of the sum of all estimates
  float* far_sum = nullptr;      // [padded tokens] of what is not kept, against the reference
  float* constants = nullptr;    // 1, 0, sum of omega bias
  void* products = nullptr;      // kEstimateBytes
};
constexpr std::int64_t estimate_rows(std::int64_t tokens) { return tokens < 1024 ? tokens : 1024; }
inline constexpr std::size_t kEstimateBytes = std::size_t{32} << 20;

// Tokens of a call computed exactly as well: evenly spaced among those with a target, in the order
// of FarTokens::rows, as many of `tokens` as there are.
struct FarAudit {
  std::int64_t tokens = 0;
  const std::int32_t* order = nullptr;  // [all tokens] FarTokens::rows
  std::int32_t* valid = nullptr;        // one: tokens with a target
  std::int32_t* rows = nullptr;         // [tokens]: those audited, then others without a target
  float* d_hidden = nullptr;            // [tokens, dim]
  float* lse = nullptr;                 // [tokens]
  double* partial = nullptr;            // [tokens, 2]
};
// How many tokens have a target; and, once all chunks have their order, which are audited.
void count_audited(const ForwardCall& all, const FarAudit& audit);
void list_audited(const FarAudit& audit, Stream stream);
// Keeps what there is of a chunk's tokens that are audited: their lse, and d_hidden [chunk's
// tokens, dim].
void keep_audited(const ForwardCall& call, const FarAudit& audit, const GradientOutput& d_hidden);
// exact: the call whose rows are audit.rows, with its lse; d_hidden [tokens, dim] f32 contiguous.
void compare_audited(const ForwardCall& exact, const FarAudit& audit, const float* d_hidden,
                     FarSums* sums);

// What sort_tokens changes, and its room.
constexpr std::int64_t chunk_keys(std::int64_t tokens) { return (1 << 16) + 2 * tokens; }
struct FarTokens {
  const void* hidden = nullptr;  // of all tokens, as they come
  std::int64_t hidden_stride = 0;
  void* hidden_rows = nullptr;   // [tokens, dim]: ForwardCall::hidden
  std::int32_t* rows = nullptr;  // [all tokens]: ForwardCall::rows
  TargetOrder order;             // of tokens, and chunk_keys of them
};

// An order whose groups of 256 words go otherwise: those that a chunk keeps first, so that slabs
// are of many of them, then the others; each as they are among themselves, the last one last where
// it is not whole. Room, filled by select_tiles or select_estimated; but for `groups` not where the
// order is the words' own, whose groups stay where they are.
struct FarArrangement {
  std::int32_t* groups = nullptr;     // [G] the group of the order at each place
  std::int32_t* words = nullptr;      // [vocab] as DeviceOrder's, likewise the next two
  std::int32_t* positions = nullptr;  // [vocab]
  float* share = nullptr;             // [vocab]
  void* centroid = nullptr;           // [T, dim] bf16
};

// Of a chunk. T = far_tile_count(vocab), G = far_group_count(vocab), B = padded tokens / 256.
struct FarCall {
  DeviceOrder order;
  FarArrangement arranged;
  // Null until tiles are chosen: then order, centroid and all bits, lists, bias and omega are as
  // arranged, while masses, radii and distances stay by the order's own groups, these.
  const std::int32_t* groups = nullptr;
  float tau = 0.0f;
  float most_kept = 1.0f;        // above this part of the pairs all of them are kept
  bool tells_fallback = true;    // and the sums say so
  FarSample sample;              // of pairs of a group and a block, for d_weight and d_bias
  std::int64_t slab_words = 0;   // words gathered at a time: a multiple of 256
  std::int64_t swept_words = 0;  // the same of the forward: slab_words or more
  void* gathered = nullptr;      // [those, dim] in the dtype of weight; unused with identity
  float* bias = nullptr;         // [vocab] by position; null: none
  float* omega = nullptr;        // [vocab] by position; null: 1
  // Out, by the forward: sum_{j in J} 2^(z log2e - reference), times the slope of the softcap.
  float* mass = nullptr;      // [2 G, padded tokens]
  void* centroid = nullptr;   // [T, dim] bf16: sum_j share_j w_j
  float* radius = nullptr;    // [T] max_j |w_j - centroid|
  float* distance = nullptr;  // [T] |centroid|
  // Out, by select_tiles or the forward's estimates; those of the groups and the list have the
  // sample, too, after select_tiles or sample_tiles.
  std::uint32_t* block_groups = nullptr;  // [B, far_bits(G)] the groups a block keeps
  std::uint32_t* group_blocks = nullptr;  // [G, far_bits(B)]
  std::uint32_t* list = nullptr;          // [G * B] far_entry(), ascending
  std::int32_t* list_begin = nullptr;     // [G + 1] a group's part of the list
  FarSums* sums = nullptr;                // zeroed before the first chunk
  const FarEstimate* estimate = nullptr;  // the forward, too, computes what is kept alone
  FarTokens tokens;
};

// What a sampled pair's estimates are off by is found with its gradients (BlockCall), which leaves
// in the masses of its two tiles, for each token, what both are off by and what they are, of the
// token's total.
inline bool samples_estimates(const FarCall& far) {
  return far.estimate != nullptr && far.sample.every > 0;
}
// Adds that to the sums' of_sample, for tokens of a gradient. partial: kFarPartials.
void measure_sample(const ForwardCall& call, const RowCoefficients* rows, double* partial);

// Empty, or why masses cannot be estimated; what that sets up once for a thread.
std::string estimates_unsupported();
void prepare_estimates();
// What estimate_masses needs of the words, once for all chunks: weights of words, and means and
// centroids of tiles.
void prepare_means(const ForwardCall& call);
// Estimates masses, totals and references of a chunk's tokens.
void estimate_masses(const ForwardCall& call);
// far_sum of what is not kept.
void sum_far_masses(const ForwardCall& call);
// weighted_sum of a chunk's tokens: s (x_i . weight_sum + sum_j omega_j bias_j).
void estimate_weighted_sums(const ForwardCall& call, const float* weight_sum);

// Vectors of a value of 32 bits for each of a chunk's tokens.
struct TokenValues {
  void* data = nullptr;
  std::int64_t vectors = 1;
  std::int64_t vector_stride = 0;  // elements from one to the next
  std::int64_t stride = 1;         // from token to token
};
// Puts a chunk's tokens in the order of the tiles they keep, so that blocks are of like tokens: by
// the part of the order that their last one is in, of 64 parts, then by the mean of their places;
// those that keep none after them, those without a target last; as they are among equals. Moves
// far.tokens, masses, references and `values`. rows: as in select_tiles; null: by estimates. At
// most kMostFarTokens.
void sort_tokens(const ForwardCall& call, const RowCoefficients* rows,
                 std::span<const TokenValues> values);

// Tokens by the position of their first target: room.slots [tokens] gets them, those without a
// target last. Keys are below token_keys of vocab, or of all places.
void order_tokens(const ForwardCall& all, const DeviceOrder& order, const TargetOrder& room);
constexpr std::int64_t token_keys(std::int64_t vocab, std::int64_t tokens) {
  return vocab + tokens + 1;
}
// The same of a chunk, roughly, by the places of all words; keys are chunk_keys.
void order_chunk_tokens(const ForwardCall& chunk, const DeviceOrder& order,
                        const TargetOrder& room);
// to [tokens of the chunk, dim] = rows of `hidden` by call.rows.
void gather_tokens(const ForwardCall& call, const void* hidden, std::int64_t stride, void* to);
// The chunk's outputs to the rows of their tokens in all's.
void scatter_outputs(const ForwardCall& call, const ForwardCall& all);

// A run of positions [first, first + words): first a multiple of 256, words at most slab_words, of
// the forward swept_words.
struct FarSlab {
  std::int64_t first = 0;
  std::int64_t words = 0;
};
// What gather_slab leaves besides the rows.
enum class GatherPart : std::uint8_t { rows, centroids, radii };
// Rows of weight by position; with `centroids`, those of its tiles too; with `radii`, radius and
// distance of tiles whose centroids there are. Nothing where *wanted is 0 (null: always); once
// tiles are chosen only rows of groups that the list has. Returns the rows: far.gathered, or weight
// itself.
const void* gather_slab(const ForwardCall& call, const FarSlab& slab, GatherPart part,
                        const int* wanted);
// bias and omega by position.
void gather_vectors(const ForwardCall& call);

// Chooses what is kept: where a mass is above tau of a token's total, for a token with alpha; and
// arranges the groups. Adds to the sums' kept, sampled, pairs and fallback.
void select_tiles(const ForwardCall& call, const RowCoefficients* rows);
// The same by the estimates, and where a target has more than tau, of target_logits [tokens, K].
void select_estimated(const ForwardCall& call, const float* target_logits);
// Adds the sample to what select_estimated has chosen.
void sample_tiles(const ForwardCall& call);

// block [tokens, T] bf16: alpha P of the tiles that are far, 0 of the others, without the targets'
// part; columns up to its stride are 0. For words what is sampled has a factor of 1 - sample.every:
// it stands for itself and takes back its part of what it is a sample of.
enum class FarBlockFor : std::uint8_t { tokens, words };
void far_block(const BlockCall& call, const LogitBlock& block, FarBlockFor products);
// bound [tokens]: sum_J |block_iJ| radius_J and what 16 bits lose, of a block for tokens.
void far_bounds(const BlockCall& call, const LogitBlock& block, float* bound);

// 0 where a target stands in a kept or sampled tile of the slab.
void clear_targets(const BlockCall& call);

// d_weight of the words whose group is in no block's list, which the products of a slab leave out:
// share_j of their tile's, smoothing, targets of a 16-bit one. far.first_position 0, entries and
// omega of the whole order.
void put_far_words(const ProductsCall& call);

// d_bias_j (+)= sum over the kept and sampled blocks of the slab's gradients + share_j tile_sum_J,
// by word.
void far_bias(const BlockCall& call, const float* tile_sum, bool add, float* d_bias);

// Adds |bound|^2 and |d_hidden|^2 of the tokens with a target to the sums, in a fixed order.
// d_hidden [tokens, dim]; bound null: none; bound_output [all tokens], 0 for ignored ones; null:
// not wanted.
void finish_far(const ForwardCall& call, const GradientOutput& d_hidden, const float* bound,
                float* bound_output, double* partial);
inline constexpr std::int64_t kFarPartials = 512;  // doubles of `partial`

}  // namespace logitless::cuda
