// Backward of the head on a GPU, one block of logits at a time.
//
// A block holds either 2^(z log2e - reference), as the forward stored it, or the gradient itself
// (then all factors are 1). The gradient of the raw logits is factor_i * block_ij (+ gamma_i
// omega_j without a softcap). Targets are the exception: they are zeroed in the block, and their
// gradients are separate fp32 coefficients. So neither the rounding to 16 bits nor the cancellation
// in p - 1 affects them.
#pragma once

#include "kernels/device/head.h"

namespace logitless::cuda {

// Gradient coefficients of a token (math/token_gradient.h): dz_j = p_j (alpha + beta (z_j - lse)) +
// gamma omega_j + targets. alpha, beta and gamma include the logit scale. All are 0 for ignored
// tokens.
struct RowCoefficients {
  float lse_log2;  // lse * log2(e), rounded
  float lse_rest;  // lse * log2(e) - lse_log2
  float alpha;
  float beta;
  float gamma;

  // Returns log2 of p for an exponent of 2 near lse_log2.
  LOGITLESS_HOST_DEVICE float less_lse(float bits) const { return (bits - lse_log2) - lse_rest; }
};

struct BlockCall {
  // The chunk's call. Operands and targets are read, and the outputs lse, log_prob and
  // target_logit.
  ForwardCall chunk;
  std::int64_t vocab_begin = 0;
  std::int64_t vocab_count = 0;
  LogitBlock block;  // or chunk.ranges; without either: coefficients and factors alone
  const void* weight_rows = nullptr;  // [rows of the block, dim], gathered for chunk.far
  bool from_forward = false;          // the block holds exponentials, relative to chunk.reference
  bool entropy_part = false;          // some beta is not 0
  bool smoothing = false;             // some gamma is not 0
  bool smoothing_apart = false;       // the GEMMs add gamma_i omega_j
  std::int32_t fixed_tokens = 0;      // GradientGemmsCall's
  const RowCoefficients* rows = nullptr;  // [padded_tokens]
  const float* delta = nullptr;           // [tokens, K]
  float* factor = nullptr;                // [padded_tokens], written by prepare_block
  // [tokens, K], written by prepare_block: gradient of the target's raw logit. 0 for targets
  // outside the block, ignored ones, and repeated targets of a token.
  float* coefficient = nullptr;
  // [tokens, dim] in the dtype of hidden, written by prepare_block: hidden_i, times factor_i in a
  // block of the forward; 0 for ignored tokens. Null: not wanted.
  void* scaled_hidden = nullptr;
  // [2], a power of two and its inverse, written by scale_block, for f16, whose range is small;
  // null: 1. gradient_block multiplies the block by it, or prepare_block scaled_hidden where the
  // block holds exponentials.
  float* scales = nullptr;
};

// Writes call.scales, before gradient_block and prepare_block.
void scale_block(const BlockCall& call);
// Zeroes targets and the rows of ignored tokens in the block, and writes factor, coefficient and
// scaled_hidden.
void prepare_block(const BlockCall& call);

// A chunk's targets sorted by vocabulary entry, then by token.
struct TargetOrder {
  std::int32_t* vocab_ids = nullptr;  // [tokens, K]: rows of weight; kNoVocabId where there is none
  std::int32_t* slots = nullptr;      // [tokens, K]: in order
  std::int32_t* places = nullptr;     // [tokens, K]: the inverse permutation of slots
  // [2 (vocab + 2)], for more than kFewTargets: how many targets come before each vocabulary entry
  std::int32_t* counts = nullptr;
};
inline constexpr std::int32_t kNoVocabId = 0x7fffffff;
// Up to this many targets are sorted by comparing all pairs, more of them by a counting sort.
inline constexpr std::int64_t kFewTargets = 16384;
// Sorts them where they are more than kSortedInBlock; list_targets sorts fewer.
void order_targets(const ForwardCall& chunk, const TargetOrder& order);
inline constexpr std::int64_t kSortedInBlock = 1024;
// Sorts any keys below `bound` (or kNoVocabId) in `order.vocab_ids`: slots [count] gets their
// order. counts [2 (bound + 2)].
void order_keys(const TargetOrder& order, std::int64_t count, std::int64_t bound, Stream stream);
// Targets of a block's vocabulary entries: [begin[j], begin[j + 1]) belong to entry j of the block.
struct TargetEntries {
  std::int32_t* begin = nullptr;      // [entries of the block + 1]
  std::int32_t* vocab_ids = nullptr;  // [tokens, K]: rows of the full weight, ascending
  std::int32_t* tokens = nullptr;     // [tokens, K]: rows of hidden, or of its original
  float* coefficients = nullptr;      // [tokens, K]
  // [many_rows(tokens * K), dim]: see sum_many_entries, for a 16-bit d_weight. Null: not wanted.
  float* many = nullptr;
};
// Lists the targets of a block after prepare_block, and sums those of frequent entries.
void list_targets(const BlockCall& block, const TargetOrder& order, const TargetEntries& entries);

// A gradient [rows, columns], f32, the dtype of hidden, or of 16 bits beside f32 hidden, with
// contiguous columns. The stride counts elements.
struct GradientOutput {
  void* data = nullptr;  // null: not wanted
  std::int64_t stride = 0;
  DType dtype = DType::f32;
  bool add = false;  // adds to the present contents; GEMMs do so in fp32 only
};

// Running sums of a 16-bit d_weight between the chunks of a call. d_weight's memory holds 16 bits
// of each in the kernel's own layout, the workspace 8 more. The last chunk rounds to nearest into
// d_weight.
enum class SumsFrom : int {
  nothing,  // the first chunk
  output,   // the first chunk of a call that adds to what d_weight holds
  sums,     // a later chunk
};
struct RunningSums {
  // [ceil(V / 128)][ceil(D / 256)] tiles of 128 x 256, counted from the block's first vocabulary
  // entry. Not read where a call has one chunk.
  std::uint8_t* low = nullptr;
  SumsFrom from = SumsFrom::nothing;
  bool last = true;  // no chunk comes after this one
};
// Bytes of `low` for `vocab_count` vocabulary entries: one for each element of their tiles, which
// come in pairs.
constexpr std::int64_t running_sum_bytes(std::int64_t vocab_count, std::int64_t dim) {
  return padded_vocab(vocab_count) * padded_vocab(dim);
}

// A vocabulary block of the far field: its selected tiles. d_hidden is accumulated; d_weight is
// scattered to the vocabulary entries of groups in the list (put_far_vocab does the others).
struct FarBlockGemms {
  const FarCall* call = nullptr;         // null: no far field
  std::int64_t vocab = 0;                // positions of the order
  std::int64_t first_position = 0;       // a multiple of 256
  const float* tile_gradient = nullptr;  // [T, dim]: d_weight_j += share_j of its tile's
};

// The two gradient GEMMs of a block:
//   d_hidden_i = factor_i block_i . weight (+ gamma_i weight_sum) + sum_k coefficient_ik weight_y
//   d_weight_j = block^T_j . factored_hidden (+ omega_j hidden_sum)
//                + sum of coefficient * hidden over the entries of j
struct GradientGemmsCall {
  std::int64_t tokens = 0;
  std::int64_t block_vocab = 0;
  std::int64_t dim = 0;
  DType dtype = DType::bf16;
  Precision precision = Precision::ieee;  // ForwardShape's
  DType weight_dtype = DType::bf16;       // of weight and target_weight; another beside f32 alone
  // Tokens [0, fixed_tokens) are multiplied in any case. Of the others nothing is read behind the
  // last 256 that are `active`. A multiple of 256, or `tokens`.
  std::int32_t fixed_tokens = 0;
  LogitBlock block;
  // Instead of `block`, for all vocabulary entries. Every range but the last may alias the memory
  // of d_weight's rows of the next range, which are written after its last read. Only for a kernel
  // that takes_ranges.
  VocabRanges ranges;
  const void* weight = nullptr;  // row of the block's first vocabulary entry
  std::int64_t weight_stride = 0;
  const void* target_weight = nullptr;  // rows of the targets, from vocab_begin on; null: weight
  std::int64_t target_stride = 0;
  const void* factored_hidden = nullptr;  // [tokens, dim]: factor_i hidden_i
  std::int64_t factored_stride = 0;
  const void* hidden = nullptr;
  std::int64_t hidden_stride = 0;
  int targets_per_token = 1;
  const std::int32_t* vocab_ids = nullptr;  // TargetOrder's, rows of the full weight
  std::int32_t vocab_begin = 0;             // of the block
  const float* coefficient = nullptr;
  TargetEntries entries;
  const float* factor = nullptr;
  const RowCoefficients* rows = nullptr;
  const float* weight_sum = nullptr;     // [dim]: sum_j omega_j weight_j; null: no such term
  const float* hidden_sum = nullptr;     // [dim]: sum_i gamma_i hidden_i
  const float* logit_weights = nullptr;  // from the block's first vocabulary entry on; null: 1
  GradientOutput d_hidden;
  GradientOutput d_weight;
  const float* weight_unscale = nullptr;  // a factor of the GEMM of d_weight; null: 1
  RunningSums running;                    // for a 16-bit d_weight and a kernel that splits_sums
  FarBlockGemms far;
  const int* active = nullptr;       // ForwardCall's, where the forward writes it
  void* kernel_workspace = nullptr;  // the forward call's
  std::size_t kernel_workspace_bytes = 0;
  // Event recorded when d_hidden is complete; with ranges this is before most of d_weight. Null:
  // none.
  void* hidden_done = nullptr;
  Stream stream = nullptr;
};

// out[c] (+)= sum_r weights[r * weight_stride] * matrix[r][c], in fp32 and a fixed order. Rows of
// weight 0 are skipped; weights null: 1.
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
  // Columns of the full matrix, if these are a part: they determine the order of the sums. 0: all.
  std::int64_t all_columns = 0;
  void* workspace = nullptr;  // column_sum_workspace_bytes(all columns)
  Stream stream = nullptr;
};
std::size_t column_sum_workspace_bytes(std::int64_t columns);
void sum_columns(const ColumnSumCall& call);
// A vocabulary entry with more targets than this has their sum computed by a separate kernel: a
// long epilogue of one row would hold up its tile. The sum is in row begin / (kFewEntries + 1),
// which is unique to the entry.
inline constexpr int kFewEntries = 8;
constexpr std::int64_t many_rows(std::int64_t slots) { return slots / (kFewEntries + 1) + 1; }
void sum_many_entries(const GradientGemmsCall& call);
// d_weight_j (fp32) += sum of coefficient * hidden over the entries of j.
void add_weight_targets(const GradientGemmsCall& call);
// d_bias[j] += sum of the coefficients of the entries of j.
void add_bias_targets(const TargetEntries& entries, std::int64_t vocab_count, float* d_bias,
                      Stream stream);
// d_bias[j] += omega_j sum_i gamma_i.
void add_bias_smoothing(const RowCoefficients* rows, std::int64_t tokens,
                        const float* logit_weights, std::int64_t vocab_count, float* d_bias,
                        Stream stream);

// out [rows, columns] = 0.
void zero_gradient(const GradientOutput& out, std::int64_t rows, std::int64_t columns,
                   Stream stream);

// Multiplies gradients by a number on the device, in one launch that writes nothing where it is 1.
// Rounds once.
struct ScaleCall {
  struct Gradient {
    GradientOutput out;  // without data: none
    std::int64_t rows = 0;
    std::int64_t columns = 0;
  };
  const float* factor = nullptr;
  Gradient gradients[3];
  Stream stream = nullptr;
};
void scale_gradients(const ScaleCall& call);

// to [rows, columns] = rows of bf16 or f16, `stride` elements apart.
void widen_rows(const void* from, DType dtype, std::int64_t stride, std::int64_t rows,
                std::int64_t columns, float* to, Stream stream);

// out = sums (+ out), cast to out.dtype. sums [rows, columns] contiguous; row i goes to row to[i]
// of out (null: i).
void round_sums(const float* sums, std::int64_t rows, std::int64_t columns,
                const GradientOutput& out, Stream stream, const std::int32_t* to = nullptr);

}  // namespace logitless::cuda
