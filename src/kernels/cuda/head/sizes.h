// Layouts of the workspaces of the head's kernels. No CUDA: plans are made without a device, and in
// a build without CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/device/gradient.h"
#include "math/host_device.h"

namespace logitless::cuda {

// The Hopper kernels (forward_sm90.cu, gradient_sm90.cu): bf16, dim a multiple of 8.
//
// Returns why they do not support such a head, or empty.
std::string hopper_unsupported(const ForwardShape& shape);
// The forward of Hopper with the gradient GEMMs of gradient_sm80.cu: f16, dim a multiple of 8.
std::string hopper_f16_unsupported(const ForwardShape& shape);
// tokens / 256 x vocab / 256 tiles write 4 bytes for each token and tile of 256 entries, plus a few
// bytes a token. Entropy and weighted_sum add a float each, argmax two.
std::size_t hopper_workspace_bytes(const ForwardShape& shape);
// kernel_workspace bytes of the gradient GEMMs for a chunk and blocks of at most so many vocabulary
// entries.
std::size_t hopper_gemms_bytes(const ForwardShape& shape);

// Gradient GEMMs by strips of fp32 results (gradient_sm80.cu): rows of a strip, at most `most`. A
// small head has four strips, so that they need little memory.
std::int64_t strip_rows(std::int64_t most, std::int64_t tokens, std::int64_t vocab_count);
// Floats of a strip of rows. As many bytes beyond it are cuBLAS's, up to kCublasBytes: no more than
// a small head can afford.
std::size_t strip_floats(std::int64_t rows, std::int64_t dim);

// The kernels of compute capability 8.0 (forward_sm80.cu, gradient_sm80.cu): bf16 and f16, any dim.
std::string sm80_unsupported(const ForwardShape& shape);
// They are laid out as those of hopper_workspace_bytes.
std::size_t sm80_workspace_bytes(const ForwardShape& shape);

// cublas_kernel.cu: any dtype, width and GPU with cuBLAS.
std::string cublas_unsupported(const ForwardShape& shape);
std::size_t cublas_workspace_bytes(const ForwardShape& shape);
std::size_t cublas_gemms_bytes(const ForwardShape& shape);
// The same in Precision::bf16x3, of f32 products alone.
std::string bf16x3_unsupported(const ForwardShape& shape);
std::size_t bf16x3_workspace_bytes(const ForwardShape& shape);
std::size_t bf16x3_gemms_bytes(const ForwardShape& shape);
// Most rows of a strip of gradient GEMMs: 16 MiB of fp32, or 32 where the weight is split or
// widened again for each strip of d_hidden, and in bf16x3 64 of its own splits.
std::int64_t cublas_strip_rows(std::int64_t dim, Precision precision, bool widens_weight);
// Returns whether rows of a 16-bit weight are widened to fp32 before they are multiplied. bf16x3
// splits them as they are.
inline bool widens_weight(DType dtype, DType weight_dtype, Precision precision) {
  return weight_dtype != dtype && precision != Precision::bf16x3;
}
// Rows that are widened at a time: 32 MiB of fp32, or a quarter of a small vocabulary.
std::int64_t wide_rows(std::int64_t vocab_count, std::int64_t dim);

// Byte offsets in the workspace of a forward by tiles (tile_kernel.h).
struct TileLayout {
  explicit TileLayout(const ForwardShape& shape);

  std::int64_t rows, token_pairs, vocab_tiles;
  std::size_t total = 0;
  std::size_t reference, target_logits, active, repair, repair_rows, sums, entropy, weighted, best,
      best_index;
  // f16 alone: log2 of the sums of tokens, the bias of the sampled entries, and
  // ForwardArguments::lifts and shifts.
  std::size_t exponents, sampled_bias, lifts, shifts;

 private:
  std::size_t take(std::int64_t bytes);
};

// Schedule of the Hopper gradient GEMMs.
inline constexpr int kFinish = 5;    // epilogue of a d_weight tile, in mainloop steps
inline constexpr int kStretch = 16;  // mainloop steps of d_hidden between two waits of Pace
constexpr LOGITLESS_HOST_DEVICE int stretches_of(int steps) {
  return (steps + kStretch - 1) / kStretch;
}
// Split-K factor of d_hidden. It is more than 1 where tiles are so few and long that clusters
// without one would finish d_weight first. It depends on sizes alone, for 66 clusters (an H200).
int hopper_hidden_parts(std::int64_t tokens, std::int64_t dim);
// Bytes of Pace's counters, for any number of SMs.
std::size_t hopper_pace_bytes(std::int64_t tokens, std::int64_t dim, std::int64_t vocab_count);
// Workspace with a split-K factor of `parts`.
std::size_t hopper_gemms_bytes(std::int64_t tokens, std::int64_t dim, std::int64_t vocab_count,
                               int parts);

// Sums of a token over the strips of its logits so far, by the cuBLAS head: sum and entropy are
// those of 2^(z log2e - exponent).
struct CublasRow {
  double sum, entropy, weighted;
  float exponent;
  float best;
  std::int32_t index;  // of the best logit
};
// Vocabulary entries of a strip of logits, at most; and in bf16x3, whose strips have more tokens.
inline constexpr int kMostStripVocab = 8192;
inline constexpr int kMostSplitStripVocab = 4096;

// Byte offsets in the workspace of the cuBLAS head's forward and blocks of gradients.
struct CublasLayout {
  explicit CublasLayout(const ForwardShape& shape);

  std::int64_t strip_tokens, strip_vocab;
  std::size_t gemm_bytes;
  std::size_t total = 0;
  std::size_t strip, gemm, rows, targets, padded, split_hidden, split_weight;
  std::size_t wide_weight;  // f32 [strip_vocab, dim], where widens_weight

 private:
  std::size_t take(std::int64_t bytes);
};

// Contracted elements of the operands that multiply_split (split_gemm.cu) splits at a time.
inline constexpr std::int64_t kSplitStretch = 2048;
// Bytes of the splits of an operand [k, other] or [other, k]: of all stretches, one behind the
// other, or of the longest.
std::size_t split_bytes(std::int64_t other, std::int64_t k);
std::size_t stretch_bytes(std::int64_t other, std::int64_t k);
// Returns how many stretches of an operand that several products read are split once for all of
// them: those whose splits take 64 MiB, as of 2048 tokens x 5461 columns. The others are split for
// each product, into the memory of one stretch behind them.
std::int64_t kept_stretches(std::int64_t other, std::int64_t k);
// Bytes of the operand's splits by that rule. They do not shrink as `other` or k grows.
std::size_t shared_split_bytes(std::int64_t other, std::int64_t k);

// cuBLAS multiplies fewer rows by other kernels, whose sums have another order. Calls of fewer
// tokens multiply a copy of their hidden state with rows of zeros. A token's bits then do not
// depend on the number of tokens.
inline constexpr std::int64_t kLeastCublasRows = 64;

// Losses: threads of a block, one token each; and the sums of each block.
inline constexpr int kLossThreads = 256;
struct LossSums {
  double loss, lse, log_prob;
  long long valid, correct;
};
int loss_blocks(std::int64_t tokens);

// Row slices that column sums are split into (split-K): many where there are few columns.
int column_sum_parts(std::int64_t columns);

}  // namespace logitless::cuda
