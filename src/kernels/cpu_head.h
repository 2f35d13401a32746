// Interface between the loss engine and the CPU kernels, and the ordered registry of kernels.
//
// The engine cuts the tokens into chunks, compacts ignored ones away, and calls `forward` and then
// `backward` of one kernel for each chunk. The structs below hold everything of a chunk; a kernel
// allocates nothing and holds no state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "logitless/dtype.h"
#include "logitless/head_shape.h"
#include "math/exact_sum.h"
#include "math/far_sample.h"
#include "math/far_sums.h"

namespace logitless {

// Vocabulary entries per tile: the unit of storage, statistics and tasks along the vocabulary.
inline constexpr std::int64_t kVocabTile = 128;

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

// Rows of a matrix in the caller's memory. Strides count elements.
struct MatrixRows {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
  // row i of the chunk is row rows[i] of the matrix; null: the identity
  const std::int64_t* rows = nullptr;
  std::int64_t row(std::int64_t i) const { return rows != nullptr ? rows[i] : i; }
};

// Positions of the vocabulary. A far-field call visits the vocabulary in an order of its own
// (logitless/vocab_order.h). `vocab_id` below is then a position of that order, and bias,
// logit_weights, targets and d_bias are indexed by position. `weight.rows` and
// WeightGradientSink::rows map back to the caller's rows.

// A target: one (token, vocabulary entry) pair with its own exact coefficient.
struct SparseEntry {
  std::int32_t token = 0;  // row of the chunk
  std::int32_t vocab_id = 0;
  std::int32_t slot = 0;  // token * targets_per_token + k: index of its logit and coefficient
};

// Targets of a chunk sorted by (vocabulary tile, token). At a target the dense gradient is 0, and
// its coefficient is applied separately in fp32. Equal targets of one token are separate entries.
struct SparseTargets {
  const SparseEntry* entries = nullptr;
  const std::int32_t* tile_begin = nullptr;  // [tiles + 1]
  const std::int32_t* vocab_ids = nullptr;   // [tokens * K]: entry of each slot, -1: none
};

// Sizes that determine a kernel's scratch layout.
struct ChunkSizes {
  std::int64_t tokens = 0;       // most tokens of a chunk
  std::int64_t block_vocab = 0;  // multiple of kVocabTile
  // leading entries with exp(z) saved from forward to backward; multiple of kVocabTile
  std::int64_t stored_vocab = 0;
  int threads = 1;
  bool forward_only = false;
  // Reserve scratch for the far field (tile masses, lists of selected tiles), and for its forward.
  bool far = false;
  bool far_forward = false;
  // Most rows of a call that covers a part of the vocabulary, gathered from several ranks. 0: calls
  // cover the full vocabulary.
  std::int64_t slice_rows = 0;
  // Vocabulary entries of separate d_weight calls. 0: calls cover the full vocabulary.
  std::int64_t weight_vocab = 0;
};

struct ChunkCommon {
  HeadShape shape;
  const HeadFeatures* features = nullptr;
  ChunkSizes sizes;                      // as laid out in scratch
  std::int64_t tokens = 0;               // of this chunk, 1 <= tokens <= sizes.tokens
  int threads = 1;                       // at most sizes.threads
  MatrixRows hidden;                     // [tokens, dim]
  MatrixRows weight;                     // [vocab, dim]
  const float* bias = nullptr;           // [vocab] or null
  const float* logit_weights = nullptr;  // [vocab] logit weights, or null: 1
  SparseTargets targets;
  // scratch_bytes(...), 64-byte aligned, preserved from forward to backward of a chunk
  std::byte* scratch = nullptr;
};

// z_ij = softcap(scale * (x_i . w_j + b_j)). All outputs are per token of the chunk.
struct ForwardChunk : ChunkCommon {
  // sum_j exp(z_ij) = sum[i] * 2^exponent[i], exponent integral (0 where the sum is 0)
  float* exponent = nullptr;
  float* sum = nullptr;
  float* target_logit = nullptr;  // [tokens * K]; slots without an entry are not written
  // Optional: sum_j p_ij log2 x_ij, with x_ij = exp(z_ij) 2^-exponent[i]; see entropy_of.
  double* entropy_sum = nullptr;
  double* weighted_sum = nullptr;  // optional: sum_j omega_j z_ij
  std::int32_t* argmax = nullptr;  // optional: lowest index of the largest z_ij
  float* best = nullptr;           // with argmax, optional: the largest z_ij
  // sum_j exp(z_ij) for a vocabulary-parallel head (features.vocab_ranks), else null. It is built
  // from the sums of tiles of kVocabTile entries, which do not depend on the sharding.
  ExactSum* wide = nullptr;
  bool store = false;      // save exp(z) of the first sizes.stored_vocab entries for backward
  bool tile_mass = false;  // save the mass of every tile for far_backward
};

// Destination of d_weight. Between chunks its value is fp32. An f32 output holds it itself;
// otherwise `accumulator` (fp32 [vocab, dim]) does. A bf16 output may instead hold the high half of
// the fp32 bits, and `low` the low half.
struct WeightGradientSink {
  void* data = nullptr;  // null: not wanted
  DType dtype = DType::f32;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
  const std::int64_t* rows = nullptr;  // entry j is row rows[j] of all three; null: the identity
  float* accumulator = nullptr;
  std::uint16_t* low = nullptr;  // [vocab, dim]
  bool accumulate = false;       // the first chunk adds to the output
  bool first_chunk = true;
  bool last_chunk = true;
  std::int64_t row(std::int64_t vocab_id) const {
    return rows != nullptr ? rows[vocab_id] : vocab_id;
  }
};

struct HiddenGradientSink {
  void* data = nullptr;                // null: not wanted
  const std::int64_t* rows = nullptr;  // token i goes to row rows[i]
  DType dtype = DType::f32;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
  bool accumulate = false;
};

// Gradient of the logits before scale, with the coefficients of math/token_gradient.h relative to
// e_ij instead of p_ij, and with scale factors folded in:
//   da_ij = (e_ij * (alpha_i + beta_i * log2 e_ij) + gamma_i * omega_j) * (1 - (z_ij / c)^2)
//   e_ij = exp2(z_ij log2(e) - exponent_i)
// At targets da is coefficient[slot].
struct BackwardChunk : ChunkCommon {
  const float* exponent = nullptr;  // [tokens]
  const float* alpha = nullptr;     // [tokens]
  const float* beta = nullptr;      // [tokens] or null: 0. Needs logits, so no saved exponentials
  // [tokens] or null: 0. With a softcap it needs logits, too
  const float* gamma = nullptr;
  const float* coefficient = nullptr;  // [tokens * K]
  bool stored = false;  // forward saved exp(z) of the first sizes.stored_vocab entries
  bool apart = false;   // the last forward was of other tokens: scratch holds nothing of these
  HiddenGradientSink d_hidden;
  WeightGradientSink d_weight;
  float* d_bias = nullptr;  // [vocab] fp32 or null: this chunk's sum is added
};

// Each tile of the vocabulary as one point, computed from the weights of this call.
struct TilePoints {
  const float* share = nullptr;    // [vocab] pi: an entry's share of its tile's average probability
  void* centroid = nullptr;        // [tiles, dim] sum_j pi_j w_j, in HeadKernel::far_dtype
  float* radius = nullptr;         // [tiles] max_j |w_j - centroid|
  float* centroid_norm = nullptr;  // [tiles]
  // [dim] sum_j omega_j w_j over the full vocabulary; null: not wanted
  float* weighted_total = nullptr;
  // Inputs of the estimates in the forward; null where it is exact.
  //   log2 sum_{j in J} exp(z_ij) ~ log2_base_J
  //       + (s x . mean_J + s^2 / 2 sum_a (x . axis_a)^2 variance_Ja) log2(e)
  // Entries of a tile are weighted by exp(s bias).
  void* mean = nullptr;                 // [tiles, dim] in far_dtype
  float* log2_base = nullptr;           // [tiles] log2 sum_j exp(s bias_j)
  const void* axes = nullptr;           // [dim, dim] in far_dtype, by rows
  const void* variance = nullptr;       // [tiles, dim] in far_dtype
  const float* log2_caution = nullptr;  // [tiles] >= 0: masses have exceeded estimates by this much
};

// Computes centroid and weighted_total, and either radius and centroid_norm, or mean and log2_base
// if those are wanted.
struct FarPrepare : ChunkCommon {
  TilePoints points;
};

// Forward of a chunk in which skipped tiles contribute their estimated mass. far_estimate computes
// the masses, far_forward the outputs. A tile is selected when its estimate, caution included, is
// above tau of the estimated total of a token of the block. A tile with a target of the block is
// selected, too. There is no argmax, no entropy and no `wide`.
struct FarForwardChunk : ForwardChunk {
  TilePoints points;
  // [tokens, in full panels] the estimated totals. far_estimate writes those of the local
  // vocabulary; far_forward reads those of the global one.
  float* log2_total = nullptr;
  float tau = 0.0f;
  double most_selected = 1.0;  // all tiles are selected when more than this part would be
};

// Backward of a chunk whose forward saved its tile masses P_iJ. A tile is selected for a block of
// far_row_block tokens when P_iJ > tau for one of them. Selected tiles are computed exactly. Of
// skipped tiles, the mass times the centroid goes to d_hidden, and times share to d_weight and
// d_bias. `gamma` is applied to the full vocabulary at once; coefficients must leave it out.
struct FarBackwardChunk : BackwardChunk {
  TilePoints points;
  bool preselected = false;  // far_forward has selected the tiles
  float tau = 0.0f;
  const float* log2_total = nullptr;    // [tokens] log2 sum_j exp z_ij
  const float* target_logit = nullptr;  // [tokens * K]
  // Importance sample of skipped pairs whose d_weight and d_bias are computed exactly as well.
  // `sample.every` times the difference from their mass's gradient is added, so that the mean over
  // all samples is exact. With `selected`, where masses are estimates, the sampled tile's exact
  // mass replaces its estimate in the tokens' totals. Otherwise a mass far above its estimate would
  // count many times over.
  FarSample sample;
  // All tiles are selected when more than this part would be: skipping would gain nothing.
  double most_selected = 1.0;
  // Rows of d_hidden to save in fp32 for the audit: token t goes to row audit_row[t], unless that
  // is negative.
  const std::int32_t* audit_row = nullptr;  // [tokens] or null
  float* audit = nullptr;                   // [audited, dim]
  // Results.
  float* bound = nullptr;            // [tokens] |error of d_hidden_i| is at most this
  double* norm_squared = nullptr;    // [tokens] |d_hidden_i|^2
  std::int64_t* selected = nullptr;  // (tile, block of tokens) pairs selected: one number, added to
  std::int64_t* sampled = nullptr;   // sampled pairs, likewise
  std::int64_t* pairs = nullptr;     // all pairs, likewise
  FarSampled* of_sample = nullptr;   // errors of the sample's estimates with `selected`, likewise
};

// Sorts a chunk's tokens so that blocks hold tokens that select similar tiles. It takes two calls,
// after the masses are computed and before far_forward or far_backward. The first writes a key
// below kFarKeys for each token. The key is the part of the order with the last tile that the token
// itself selects, then the mean position of its tiles. Tokens that select none come after all
// others, then those with a NaN total, so that they do not change the others' blocks.
inline constexpr std::int32_t kFarClasses = 64, kFarPositions = 1024;
inline constexpr std::int32_t kFarKeys = kFarClasses * kFarPositions + 2;
struct FarKeys : ChunkCommon {
  float tau = 0.0f;
  const float* alpha = nullptr;       // as in far_backward; null: masses are far_estimate's, with
  const float* caution = nullptr;     // this caution, TilePoints::log2_caution
  const float* log2_total = nullptr;  // [tokens]
  std::int32_t* keys = nullptr;       // [tokens], out
};
// The second call permutes the tokens in scratch; hidden and everything else is already in the new
// order.
struct FarMove : ChunkCommon {
  const std::int32_t* from = nullptr;  // [tokens]: token i was token from[i]
  float* scratch = nullptr;            // [threads, tokens]
};

// Reason why something is not supported, or empty: it is.
using Support = std::string;

struct HeadKernel {
  std::string_view name;
  // Reason why this machine cannot run it, or empty.
  Support (*runnable)();
  Support (*supports)(const HeadShape& shape, const HeadFeatures& features);
  double flops_per_second;  // nominal, of one core; used by the planner's estimate alone
  // Bytes of ChunkCommon::scratch. Pure.
  std::size_t (*scratch_bytes)(const HeadShape& shape, const HeadFeatures& features,
                               const ChunkSizes& sizes);
  // Bytes of exp(z) per saved logit, without the tile exponents. 0: cannot save.
  std::size_t (*stored_element_bytes)(DType dtype);
  void (*forward)(const ForwardChunk& chunk);
  void (*backward)(const BackwardChunk& chunk);
  // Far-field entry points; null and 0: the kernel has none.
  std::int64_t far_row_block = 0;
  DType far_dtype = DType::f32;
  void (*far_prepare)(const FarPrepare& prepare) = nullptr;
  void (*far_estimate)(const FarForwardChunk& chunk) = nullptr;
  void (*far_forward)(const FarForwardChunk& chunk) = nullptr;
  void (*far_backward)(const FarBackwardChunk& chunk) = nullptr;
  void (*far_keys)(const FarKeys& chunk) = nullptr;
  void (*far_move)(const FarMove& chunk) = nullptr;
};

// All kernels of this build, best first. The reference supports everything and comes last.
std::span<const HeadKernel> head_kernels();

// Returns a kernel by name. Throws InvalidArgument that lists the names.
const HeadKernel& find_head_kernel(std::string_view name);

// Returns the kernel called `wanted`, or the first that runs on this machine and supports the
// problem. `reasons` gets a line for each one declined. Throws Unsupported with the reason when a
// wanted one does not support the problem. Whether it runs on this machine is checked at the call.
const HeadKernel& choose_head_kernel(std::string_view wanted, const HeadShape& shape,
                                     const HeadFeatures& features, std::string* reasons);

}  // namespace logitless
