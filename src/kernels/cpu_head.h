// What the loss engine asks of a kernel, and the ordered registry of kernels.
//
// The engine cuts the tokens into chunks, compacts ignored ones away, and calls `forward` and then
// `backward` of one kernel for each chunk. Everything of a chunk is in plain structs below; a
// kernel allocates nothing and keeps nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "logitless/dtype.h"
#include "logitless/head_shape.h"
#include "math/far_sample.h"
#include "math/far_sums.h"
#include "math/wide_sum.h"

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

// Positions of the vocabulary. A far-field call walks it in an order of its own
// (logitless/vocab_order.h): "word" below is a position of that order then, `weight.rows` and
// WeightGradientSink::rows lead back to the caller's rows, and bias, omega, targets and d_bias are
// by position.

// One (token, word) pair with an exact coefficient of its own: a target.
struct SparseEntry {
  std::int32_t token = 0;  // row of the chunk
  std::int32_t word = 0;
  std::int32_t slot = 0;  // token * targets_per_token + k: where its logit and coefficient stand
};

// Targets of a chunk ordered by (vocabulary tile, token). An entry's word has its dense gradient
// set to 0 and its coefficient applied apart, in fp32. Equal words of one token are separate
// entries.
struct SparseTargets {
  const SparseEntry* entries = nullptr;
  const std::int32_t* tile_begin = nullptr;  // [tiles + 1]
  const std::int32_t* words = nullptr;  // [tokens * K]: word of each slot, -1 where there is none
};

// Sizes a kernel lays its scratch memory out by.
struct ChunkSizes {
  std::int64_t tokens = 0;      // the most a chunk holds
  std::int64_t slab_vocab = 0;  // multiple of kVocabTile
  // exp(z) kept from forward to backward: the first entries; multiple of kVocabTile
  std::int64_t stored_vocab = 0;
  int threads = 1;
  bool forward_only = false;
  // Room for the far field: tile masses, lists of kept tiles; and for its forward.
  bool far = false;
  bool far_forward = false;
  // Of words gathered from several ranks: the most rows of a call, which is for some of them. 0:
  // calls are for all words.
  std::int64_t piece_rows = 0;
  // Words whose d_weight is made at a time by calls of their own. 0: calls are for all words.
  std::int64_t weight_words = 0;
};

struct ChunkCommon {
  HeadShape shape;
  const HeadFeatures* features = nullptr;
  ChunkSizes sizes;              // as laid out
  std::int64_t tokens = 0;       // of this chunk, 1 <= tokens <= sizes.tokens
  int threads = 1;               // at most sizes.threads
  MatrixRows hidden;             // [tokens, dim]
  MatrixRows weight;             // [vocab, dim]
  const float* bias = nullptr;   // [vocab] or null
  const float* omega = nullptr;  // [vocab] or null: 1. Weights of the weighted logit sum
  SparseTargets targets;
  // scratch_bytes(...), 64-byte aligned, kept from forward to backward of a chunk
  std::byte* scratch = nullptr;
};

// z_ij = softcap(scale * (x_i . w_j + b_j)). All outputs are per token of the chunk.
struct ForwardChunk : ChunkCommon {
  // sum_j exp(z_ij) = sum[i] * 2^exponent[i], exponent integral (0 where the sum is 0)
  float* exponent = nullptr;
  float* sum = nullptr;
  float* target_logit = nullptr;  // [tokens * K]; slots of no entry keep what they hold
  // Optional: sum_j p_ij log2 x_ij of x_ij = exp(z_ij) 2^-exponent[i]; see entropy_of.
  double* entropy_sum = nullptr;
  double* weighted_sum = nullptr;  // optional: sum_j omega_j z_ij
  std::int32_t* argmax = nullptr;  // optional: lowest index of the largest z_ij
  float* best = nullptr;           // with argmax, optional: the largest z_ij
  // Of words spread over ranks (features.word_ranks), else null: sum_j exp(z_ij), made of the sums
  // of tiles of kVocabTile words, which do not depend on what other words there are.
  WideSum* wide = nullptr;
  bool store = false;      // keep exp(z) of the first sizes.stored_vocab words for backward
  bool tile_mass = false;  // keep the mass of every tile for far_backward
};

// Where d_weight goes. Its value between chunks is fp32: in the output itself when that is f32,
// else in `accumulator` (fp32 [vocab, dim]) or, for a bf16 output, in the pair (output = high half,
// `low` = low half of the fp32 bits).
struct WeightGradientSink {
  void* data = nullptr;  // null: not wanted
  DType dtype = DType::f32;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
  const std::int64_t* rows = nullptr;  // word j is row rows[j] of all three; null: the identity
  float* accumulator = nullptr;
  std::uint16_t* low = nullptr;  // [vocab, dim]
  bool accumulate = false;       // the first chunk adds to the output
  bool first_chunk = true;
  bool last_chunk = true;
  std::int64_t row(std::int64_t word) const { return rows != nullptr ? rows[word] : word; }
};

struct HiddenGradientSink {
  void* data = nullptr;                // null: not wanted
  const std::int64_t* rows = nullptr;  // token i goes to row rows[i]
  DType dtype = DType::f32;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
  bool accumulate = false;
};

// da_ij = (e_ij * (linear_i + slope_i * log2 e_ij) + flat_i * omega_j) * (1 - (z_ij / c)^2), e_ij =
// exp2(z_ij log2(e) - exponent_i), but 0 at sparse entries, whose da is coefficient[slot]. Scale
// factors are folded into the row coefficients.
struct BackwardChunk : ChunkCommon {
  const float* exponent = nullptr;  // [tokens]
  const float* linear = nullptr;    // [tokens]
  const float* slope = nullptr;     // [tokens] or null: 0. Stored words cannot serve it
  // [tokens] or null: 0. Stored words cannot serve it beside a softcap
  const float* flat = nullptr;
  const float* coefficient = nullptr;  // [tokens * K]
  bool stored = false;  // forward stored exp(z) of the first sizes.stored_vocab words
  bool apart = false;   // the last forward was of other tokens: scratch has nothing of these
  HiddenGradientSink d_hidden;
  WeightGradientSink d_weight;
  float* d_bias = nullptr;  // [vocab] fp32 or null: this chunk's sum is added
};

// Each tile of the vocabulary as one point, from the weights of this call.
struct TilePoints {
  const float* share = nullptr;     // [vocab] pi: a word's part of its tile's average probability
  void* centroid = nullptr;         // [tiles, dim] sum_j pi_j w_j, in HeadKernel::far_dtype
  float* radius = nullptr;          // [tiles] max_j |w_j - centroid|
  float* centroid_norm = nullptr;   // [tiles]
  float* weighted_total = nullptr;  // [dim] sum_j omega_j w_j over all words; null: not wanted
  // For the forward, null where it is exact. log2 sum_{j in J} exp(z_ij) is about log2_base_J +
  // (s x . mean_J + s^2 / 2 sum_a (x . axis_a)^2 variance_Ja) log2(e), words of a tile weighted by
  // exp(s bias).
  void* mean = nullptr;                 // [tiles, dim] in far_dtype
  float* log2_base = nullptr;           // [tiles] log2 sum_j exp(s bias_j)
  const void* axes = nullptr;           // [dim, dim] in far_dtype, by rows
  const void* variance = nullptr;       // [tiles, dim] in far_dtype
  const float* log2_caution = nullptr;  // [tiles] >= 0: a tile's mass has been this much larger
};

// Fills centroid and weighted_total; radius and centroid_norm, or mean and log2_base where those
// are wanted.
struct FarPrepare : ChunkCommon {
  TilePoints points;
};

// The forward of a chunk with far tiles by their estimated mass, in two steps: far_estimate makes
// the masses, far_forward the outputs. A tile is kept when its estimate, caution included, is above
// tau of the row's estimated total for a token of the block, and where a target lies. No argmax, no
// entropy, no `wide`.
struct FarForwardChunk : ForwardChunk {
  TilePoints points;
  // [tokens, in whole panels] the estimated totals: what far_estimate found, of the words here;
  // for far_forward of all words, where others are elsewhere.
  float* log2_total = nullptr;
  float tau = 0.0f;
  double most_kept = 1.0;  // above this part of the tiles, all are kept
};

// The backward of a chunk whose forward kept its tile masses P_iJ. A tile is kept for a block of
// far_row_block tokens when P_iJ > tau for one of them; kept tiles are computed exactly, of the
// others their mass times the centroid (d_hidden) and times share (d_weight, d_bias). `flat` is
// applied to all words at once; coefficients must leave it out.
struct FarBackwardChunk : BackwardChunk {
  TilePoints points;
  bool selected = false;  // far_forward has chosen the tiles
  float tau = 0.0f;
  const float* log2_total = nullptr;    // [tokens] log2 sum_j exp z_ij
  const float* target_logit = nullptr;  // [tokens * K]
  // Far pairs whose d_weight and d_bias are computed exactly as well: `every` times the difference
  // from what their mass gives is added, so that the mean over all samples is exact. With
  // `selected`, where masses are estimates, the sampled tile's exact mass takes its estimate's
  // place in the tokens' totals: else what is far above its estimate would count many times over.
  FarSample sample;
  // Above this part of the tiles, all are kept: nothing would be gained.
  double most_kept = 1.0;
  // Rows of d_hidden to keep in fp32 for the audit: token t goes to row audit_row[t], if that is
  // not negative.
  const std::int32_t* audit_row = nullptr;  // [tokens] or null
  float* audit = nullptr;                   // [audited, dim]
  // Results.
  float* bound = nullptr;           // [tokens] |error of d_hidden_i| is at most this
  double* norm_squared = nullptr;   // of d_hidden_i: [tokens]
  std::int64_t* kept = nullptr;     // pairs of a tile and a block of tokens: one number, added to
  std::int64_t* sampled = nullptr;  // those of the sample, likewise
  std::int64_t* pairs = nullptr;    // all there are, likewise
  FarSampled* of_sample = nullptr;  // of `selected`, likewise
};

// A chunk's tokens in an order in which blocks are of tokens that keep alike, in two calls after
// the masses are there and before far_forward or far_backward. The first: a key below kFarKeys of
// each token, by the part of the order that the last tile it keeps alone is in and the mean of its
// tiles' places; what keeps none comes after all others, and a token whose total is no number after
// those, so that the others' blocks are what they are without it.
inline constexpr std::int32_t kFarClasses = 64, kFarPlaces = 1024;
inline constexpr std::int32_t kFarKeys = kFarClasses * kFarPlaces + 2;
struct FarKeys : ChunkCommon {
  float tau = 0.0f;
  const float* linear = nullptr;      // as far_backward's; null: masses are far_estimate's, with
  const float* caution = nullptr;     // TilePoints::log2_caution
  const float* log2_total = nullptr;  // [tokens]
  std::int32_t* keys = nullptr;       // [tokens], out
};
// The second: what scratch has of tokens moves; hidden and everything else is in the new order.
struct FarMove : ChunkCommon {
  const std::int32_t* from = nullptr;  // [tokens]: token i was token from[i]
  float* room = nullptr;               // [threads, tokens]
};

// Reason against, or empty: yes.
using Support = std::string;

struct HeadKernel {
  std::string_view name;
  // Reason why this machine cannot run it, or empty.
  Support (*runnable)();
  Support (*supports)(const HeadShape& shape, const HeadFeatures& features);
  double flops_per_second;  // nominal, of one core: for the planner's estimate and nothing else
  // Bytes of ChunkCommon::scratch. Pure.
  std::size_t (*scratch_bytes)(const HeadShape& shape, const HeadFeatures& features,
                               const ChunkSizes& sizes);
  // Bytes of exp(z) per token and word kept when storing, tile exponents not counted. 0: cannot
  // store.
  std::size_t (*stored_element_bytes)(DType dtype);
  void (*forward)(const ForwardChunk& chunk);
  void (*backward)(const BackwardChunk& chunk);
  // The far field; null and 0: the kernel has none.
  std::int64_t far_row_block = 0;
  DType far_dtype = DType::f32;
  void (*far_prepare)(const FarPrepare& prepare) = nullptr;
  void (*far_estimate)(const FarForwardChunk& chunk) = nullptr;
  void (*far_forward)(const FarForwardChunk& chunk) = nullptr;
  void (*far_backward)(const FarBackwardChunk& chunk) = nullptr;
  void (*far_keys)(const FarKeys& chunk) = nullptr;
  void (*far_move)(const FarMove& chunk) = nullptr;
};

// All kernels built in, best first; the reference accepts everything and stands last.
std::span<const HeadKernel> head_kernels();

// By name. Throws InvalidArgument listing the names.
const HeadKernel& find_head_kernel(std::string_view name);

// The kernel called `wanted`, or the first that this machine runs and that accepts the problem.
// `reasons` gets a line for each one declined. Throws Unsupported with the reason when a wanted one
// does not take the problem; whether it runs on this machine is asked when a call is made.
const HeadKernel& choose_head_kernel(std::string_view wanted, const HeadShape& shape,
                                     const HeadFeatures& features, std::string* reasons);

}  // namespace logitless
