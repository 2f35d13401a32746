// The backward pass on a GPU, a block of logits at a time.
//
// A block holds either 2^(z log2e - reference) as the forward left it, or the gradient itself. In
// both cases (with factors of 1 in the second) the gradient of the raw logits is factor_i *
// block_ij (+ gamma_i omega_j without a softcap), but for the targets: they are cleared in the
// block, and what the logit of a target gets is an fp32 coefficient of its own, so that neither
// rounding to 16 bit nor p - 1 takes from it.
#pragma once

#include <span>
#include <string_view>

#include "kernels/device_head.h"

namespace logitless::cuda {

// Of one token, see math/token_gradient.h: dz_j = p_j (alpha + beta z_j) + gamma omega_j + targets.
// alpha, beta and gamma include the logit scale. All 0 for ignored tokens.
struct RowCoefficients {
  float lse_bits;  // lse * log2(e)
  float alpha;
  float beta;
  float gamma;
};

struct BlockCall {
  // The chunk's call: matrices, bias, omega, targets; its outputs lse, log_prob and target_logit
  // are read.
  ForwardCall chunk;
  std::int64_t first_word = 0;
  std::int64_t words = 0;
  LogitBlock block;  // chunk.ranges in its place, or without data: coefficients and factors alone
  const void* weight_rows = nullptr;      // [words, dim], of chunk.far
  bool from_forward = false;              // holds exponentials, of chunk.reference
  bool entropy_part = false;              // some beta is not 0
  bool smoothing = false;                 // some gamma is not 0
  bool smoothing_apart = false;           // gamma_i omega_j is left to the products
  const RowCoefficients* rows = nullptr;  // [padded_tokens]
  const float* delta = nullptr;           // [tokens, K]
  const float* unscale = nullptr;  // what a block of gradients is to be multiplied by; null: 1
  float* factor = nullptr;         // [padded_tokens], out: prepare_block
  // [tokens, K], out: prepare_block. Gradient of the target's raw logit; 0 for targets beyond the
  // block, ignored ones, and those that name a word again.
  float* coefficient = nullptr;
  // [tokens, dim] in the dtype of hidden: hidden_i, times factor_i of a forward's block; 0 for
  // ignored tokens. Out: prepare_block; null: not wanted.
  void* scaled_hidden = nullptr;
};

// Clears targets and the rows of ignored tokens, and writes factor, coefficient and scaled_hidden.
void prepare_block(const BlockCall& call);

// A chunk's targets by word, and among equals by token.
struct TargetOrder {
  std::int32_t* words = nullptr;   // [tokens, K]: rows of weight; kNoWord where there is none
  std::int32_t* slots = nullptr;   // [tokens, K]: in order
  std::int32_t* places = nullptr;  // [tokens, K]: the inverse of slots
  // [2 (vocab + 2)], for more than kFewTargets: how many targets lie before a word
  std::int32_t* counts = nullptr;
};
inline constexpr std::int32_t kNoWord = 0x7fffffff;
// Few targets are ordered by comparing all pairs, more of them by counting their words.
inline constexpr std::int64_t kFewTargets = 16384;
void order_targets(const ForwardCall& chunk, const TargetOrder& order);
// The same of any keys below `bound` (or kNoWord) in order.words: slots [count] in their order.
// counts [2 (bound + 2)].
void order_keys(const TargetOrder& order, std::int64_t count, std::int64_t bound, Stream stream);
// Of a block's words: entries [begin[j], begin[j + 1]) belong to its word j.
struct TargetEntries {
  std::int32_t* begin = nullptr;   // [words + 1]
  std::int32_t* words = nullptr;   // [tokens, K]: rows of the whole weight, ascending
  std::int32_t* tokens = nullptr;  // [tokens, K]: rows of hidden
  float* coefficients = nullptr;   // [tokens, K]
};
void list_targets(const BlockCall& block, const TargetOrder& order, const TargetEntries& entries);

// A gradient of [rows, columns], f32 or the dtype of hidden, contiguous columns; stride in
// elements.
struct GradientOutput {
  void* data = nullptr;  // null: not wanted
  std::int64_t stride = 0;
  DType dtype = DType::f32;
  bool add = false;  // to what is there; of products fp32 alone
};

// The sums of a 16-bit d_weight between the chunks of a call: 16 bits in d_weight's memory, in an
// order of the kernel's own, and 8 in the workspace. The last chunk leaves d_weight rounded to
// nearest.
enum class SumsFrom : int {
  nothing,  // the first chunk
  output,   // the first chunk of a call that adds to what d_weight holds
  sums,     // a later one
};
struct RunningSums {
  // [ceil(V / 128)][ceil(D / 256)] tiles of 128 x 256, from the block's first word on; not looked
  // at where a call has one chunk.
  std::uint8_t* low = nullptr;
  SumsFrom from = SumsFrom::nothing;
  bool last = true;  // no chunk comes after this one
};
// Bytes of low for so many words: a byte for each element of their tiles, of which two follow one
// another.
constexpr std::int64_t running_sum_bytes(std::int64_t words, std::int64_t dim) {
  return (words + 255) / 256 * 256 * ((dim + 255) / 256 * 256);
}

// A slab of the far field: the tiles kept alone, d_hidden added to, d_weight by word of the groups
// that the list has (put_far_words: of the others).
struct FarSlabProducts {
  const FarCall* call = nullptr;         // null: no far field
  std::int64_t vocab = 0;                // of the order
  std::int64_t first_position = 0;       // a multiple of 256
  const float* tile_gradient = nullptr;  // [T, dim]: d_weight_j += share_j of its tile's
};

// d_hidden_i = factor_i block_i . weight (+ gamma_i weight_sum) + sum_k coefficient_ik weight_y;
// d_weight_j = block^T_j . factored_hidden (+ omega_j hidden_sum) + sum of coefficient * hidden
// over the entries of j.
struct ProductsCall {
  std::int64_t tokens = 0;
  std::int64_t block_words = 0;
  std::int64_t dim = 0;
  DType dtype = DType::bf16;
  LogitBlock block;
  // Instead of block, of all words. Every range but the last may lie in the memory of d_weight's
  // rows of the next range: these are written when it has been read for the last time. Only by a
  // kernel that takes_ranges.
  WordRanges ranges;
  const void* weight = nullptr;  // of the block's first word
  std::int64_t weight_stride = 0;
  const void* target_weight = nullptr;  // rows of the targets, of first_word on; null: weight
  std::int64_t target_stride = 0;
  const void* factored_hidden = nullptr;  // [tokens, dim]: factor_i hidden_i
  std::int64_t factored_stride = 0;
  const void* hidden = nullptr;
  std::int64_t hidden_stride = 0;
  int targets_per_token = 1;
  const std::int32_t* words = nullptr;  // TargetOrder's, of the whole weight
  std::int32_t first_word = 0;          // of the block
  const float* coefficient = nullptr;
  TargetEntries entries;
  // Of a 16-bit d_weight, [many_rows(tokens * K), dim]: sum_many_entries', which the products add
  // in place of the entries themselves.
  const float* many = nullptr;
  const float* factor = nullptr;
  const RowCoefficients* rows = nullptr;
  const float* weight_sum = nullptr;  // [dim]: sum_j omega_j weight_j; null: no such term
  const float* hidden_sum = nullptr;  // [dim]: sum_i gamma_i hidden_i
  const float* omega = nullptr;       // of the block's first word; null: 1
  GradientOutput d_hidden;
  GradientOutput d_weight;
  RunningSums running;  // of a 16-bit d_weight, by a kernel that splits_sums
  FarSlabProducts far;
  const int* active = nullptr;       // ForwardCall's; null: all
  void* kernel_workspace = nullptr;  // the forward call's
  std::size_t kernel_workspace_bytes = 0;
  // Recorded when d_hidden is complete, which of ranges it is before most of d_weight; null: none.
  void* hidden_done = nullptr;
  Stream stream = nullptr;
};

// The parts of a far-field forward, between which the engine decides what is kept.
struct FarForward {
  // Target logits and references.
  void (*begin)(const ForwardCall& call);
  // Where begin leaves the logits [tokens, K], for those who move tokens.
  float* (*target_logits)(const ForwardCall& call);
  // All tiles, whose masses are left; the outputs.
  void (*all_tiles)(const ForwardCall& call);
  // The tiles of call.far->list alone, and the outputs with the estimates of the others.
  void (*kept_tiles)(const ForwardCall& call);
};

// Seconds of the parts of a plan, for the planner: nominal, fitted with bench_head --device cuda
// (docs/benchmarks.md).
struct DeviceRates {
  double forward_flops;
  double product_flops;
  double logit_seconds;     // of each exponential that the products do not hide
  double bytes_per_second;  // of what is written and read beyond the operands, partly hidden
  double sum_seconds;       // of each element of split sums between two chunks, beside their bytes
  double chunk_seconds;     // small kernels and launches
  double slab_seconds;
};

// The kernels that multiply, of one kind of GPU.
struct DeviceKernel {
  const char* name;
  // Keeps the logits of a forward call in its workspace, so that gradients need no second product,
  // and none is stored by the way. Otherwise logits are multiplied again for blocks not stored.
  bool keeps_logits;
  // Sums a 16-bit d_weight over chunks, or onto what it holds, by ProductsCall::running. Otherwise
  // it is summed in fp32 and rounded in the end.
  bool splits_sums;
  // Takes the exponentials of the forward in ranges of words.
  bool takes_ranges;
  // Compute capabilities it runs on, 10 * major + minor.
  int least_capability;
  int most_capability;
  DeviceRates (*rates)(DType dtype);
  // Why it does not take such a head; empty if it does.
  std::string (*unsupported)(const ForwardShape& shape);
  std::size_t (*workspace_bytes)(const ForwardShape& shape);
  // Enqueues the forward of a chunk. Deterministic: the same inputs give the same bits. Throws
  // DeviceError when a launch is refused.
  void (*forward)(const ForwardCall& call);
  // Of a chunk, before its forward: logits [tokens, K] = z of the targets here, 0 of all others;
  // what another call takes as given_logits. Uses no workspace. Null: the forward needs no
  // references, and takes none.
  void (*target_logits)(const ForwardCall& call, float* logits);
  const FarForward* far;  // the forward of far-field calls, in parts; null: it takes none
  // Fills the block with the gradient of the logits of [first_word, first_word + words), the
  // targets' own part left out.
  void (*gradient_block)(const BlockCall& call);
  // Where on the device it keeps what its blocks of gradients are to be multiplied by; null: 1.
  const float* (*block_unscale)(const ForwardCall& chunk);
  void (*gradient_products)(const ProductsCall& call);
  // What it needs of kernel_workspace for a chunk and blocks of at most so many words; null: all.
  std::size_t (*products_bytes)(std::int64_t tokens, std::int64_t dim, std::int64_t words);
  // What it sets up once for a thread and must not set up while a graph is captured; null: nothing.
  void (*prepare)();
};
// Best first.
std::span<const DeviceKernel> device_kernels();
// Throws InvalidArgument naming the kernels there are.
const DeviceKernel& find_device_kernel(std::string_view name);

// out[c] (+)= sum_r weights[r * weight_stride] * matrix[r][c], rows of weight 0 left out; weights
// null: 1. In a fixed order, fp32.
struct ColumnSumCall {
  const void* matrix = nullptr;
  DType dtype = DType::bf16;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t stride = 0;
  const float* weights = nullptr;
  int weight_stride = 1;
  float* out = nullptr;
  bool add = false;
  // Of how many columns these are some: what the order of the sums goes by. 0: all of them.
  std::int64_t all_columns = 0;
  void* workspace = nullptr;  // column_sum_workspace_bytes(all columns)
  Stream stream = nullptr;
};
std::size_t column_sum_workspace_bytes(std::int64_t columns);
void sum_columns(const ColumnSumCall& call);
// A word with more entries than this has their sum made apart: rows whose end takes long would hold
// up a tile. The sum stands in row begin / (kFewEntries + 1), which no other such word has.
inline constexpr int kFewEntries = 8;
constexpr std::int64_t many_rows(std::int64_t slots) { return slots / (kFewEntries + 1) + 1; }
void sum_many_entries(const ProductsCall& call, float* many);
// d_weight_j (fp32) += sum of coefficient * hidden over the entries of j.
void add_weight_targets(const ProductsCall& call);
// d_bias[j] += sum of the entries' coefficients of j.
void add_bias_targets(const TargetEntries& entries, std::int64_t words, float* d_bias,
                      Stream stream);
// d_bias[j] += omega_j sum_i gamma_i.
void add_bias_smoothing(const RowCoefficients* rows, std::int64_t tokens, const float* omega,
                        std::int64_t words, float* d_bias, Stream stream);

// out = 0, rows x columns of it.
void clear_gradient(const GradientOutput& out, std::int64_t rows, std::int64_t columns,
                    Stream stream);

// Gradients times a number on the device, in one launch that writes nothing where it is 1. Rounded
// once.
struct ScaleCall {
  struct Gradient {
    GradientOutput out;  // without data: nothing
    std::int64_t rows = 0;
    std::int64_t columns = 0;
  };
  const float* factor = nullptr;
  Gradient gradients[3];
  Stream stream = nullptr;
};
void scale_gradients(const ScaleCall& call);

// out = round(sums (+ what out holds)). sums [rows, columns] contiguous; row i goes to row to[i] of
// out (null: i).
void round_sums(const float* sums, std::int64_t rows, std::int64_t columns,
                const GradientOutput& out, Stream stream, const std::int32_t* to = nullptr);

}  // namespace logitless::cuda
