#include "kernels/cuda/head/sizes.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "core/check.h"
#include "kernels/cuda/cublas.h"
#include "kernels/cuda/device/tile_sizes.h"
#include "kernels/cuda/head/tile_kernel.h"
#include "kernels/device/kernel.h"
#include "kernels/device/loss.h"

namespace logitless::cuda {
namespace {

std::size_t aligned(std::int64_t bytes) {
  return static_cast<std::size_t>(ceil_div(bytes, 256) * 256);
}

}  // namespace

TileLayout::TileLayout(const ForwardShape& s)
    : rows(padded_tokens(s.tokens)),
      token_pairs(rows / kClusterRows),
      vocab_tiles(ceil_div(s.vocab, kTileColumns)) {
  const std::int64_t map = rows * vocab_tiles * 4;
  reference = take(rows * 4);
  target_logits = take(s.tokens * s.targets_per_token * 4);
  active = take((token_pairs + 1) * 4);
  repair = take((token_pairs + 1) * 4);
  repair_rows = take(rows);
  sums = take(map);
  entropy = take(s.entropy ? map : 0);
  weighted = take(s.weighted_sum ? map : 0);
  best = take(s.argmax ? map : 0);
  best_index = take(s.argmax ? map : 0);
  const bool half = s.dtype == DType::f16 && s.gradients;
  exponents = take(half ? rows * 4 : 0);
  sampled_bias = take(half ? kTileColumns * 4 : 0);
  lifts = take(half ? rows * 4 : 0);
  shifts = take(half ? map : 0);
}
std::size_t TileLayout::take(std::int64_t bytes) {
  const std::size_t at = total;
  total += aligned(bytes);
  return at;
}

std::string hopper_unsupported(const ForwardShape& s) {
  if (s.dtype != DType::bf16)
    return concat("multiplies bf16, hidden and weight are ", name_of(s.dtype));
  if (s.dim % 8 != 0) return concat("dim: expected a multiple of 8, got ", s.dim);
  return {};
}

std::string hopper_f16_unsupported(const ForwardShape& s) {
  if (s.dtype != DType::f16)
    return concat("multiplies f16, hidden and weight are ", name_of(s.dtype));
  if (s.dim % 8 != 0) return concat("dim: expected a multiple of 8, got ", s.dim);
  return {};
}

std::string rows_unsupported(const ForwardCall& c) {
  for (const auto& [name, data, stride] : {std::tuple{"hidden", c.hidden, c.hidden_stride},
                                           {"hidden", c.original.data, c.original.stride},
                                           {"weight", c.weight, c.weight_stride}}) {
    if (data == nullptr) continue;
    if (reinterpret_cast<std::uintptr_t>(data) % 16 != 0)
      return concat(name, ": expected an address that is a multiple of 16");
    if (stride % 8 != 0 || stride < c.shape.dim) {
      return concat(name, ": expected rows a multiple of 8 elements apart, at least ", c.shape.dim,
                    ", got ", stride);
    }
  }
  return {};
}

std::size_t hopper_workspace_bytes(const ForwardShape& shape) {
  const std::size_t forward = TileLayout(shape).total;
  // The gradient GEMMs reuse the forward's workspace.
  return shape.gradients ? std::max(forward, hopper_gemms_bytes(shape)) : forward;
}

int hopper_hidden_parts(std::int64_t tokens, std::int64_t dim) {
  constexpr double kClusters = 66.0;
  const auto columns = static_cast<double>(ceil_div(dim, kTileColumns));
  const auto tiles = static_cast<double>(ceil_div(tokens, kClusterRows)) * columns;
  // Steps of a tile relative to the steps of a cluster under perfect balance; both scale with the
  // vocabulary.
  const double share =
      kClusters /
      (tiles + columns * (static_cast<double>(ceil_div(tokens, kStep)) + kFinish) / 4.0);
  return share > 0.95 ? static_cast<int>(std::min(8.0, std::ceil(2.0 * share))) : 1;
}

std::size_t hopper_pace_bytes(std::int64_t tokens, std::int64_t dim, std::int64_t vocab_count) {
  const std::int64_t column_tiles = ceil_div(dim, kTileColumns);
  const std::int64_t hidden = ceil_div(tokens, kClusterRows) * column_tiles;
  const std::int64_t weight = ceil_div(vocab_count, kClusterRows) * column_tiles;
  const int stretches = stretches_of(static_cast<int>(ceil_div(vocab_count, kStep)));
  return aligned((hidden * stretches + weight) * static_cast<std::int64_t>(sizeof(unsigned)));
}

std::size_t hopper_gemms_bytes(std::int64_t tokens, std::int64_t dim, std::int64_t vocab_count,
                               int parts) {
  const std::int64_t sums = parts == 1 ? 0 : parts * padded_tokens(tokens) * dim;
  return hopper_pace_bytes(tokens, dim, vocab_count) * static_cast<std::size_t>(parts) +
         static_cast<std::size_t>(sums) * sizeof(float);
}
std::size_t hopper_gemms_bytes(const ForwardShape& s) {
  return hopper_gemms_bytes(s.tokens, s.dim, s.vocab, hopper_hidden_parts(s.tokens, s.dim));
}

std::int64_t strip_rows(std::int64_t most, std::int64_t tokens, std::int64_t vocab_count) {
  const std::int64_t rows = std::max(tokens, vocab_count);
  return std::min({most, rows, padded_vocab(ceil_div(rows, 4))});
}
std::size_t strip_floats(std::int64_t rows, std::int64_t dim) {
  return aligned(rows * dim * 4) / sizeof(float);
}

namespace {
std::string sizes_unsupported(const ForwardShape& s) {
  if (padded_vocab(s.vocab) > INT32_MAX || s.dim > INT32_MAX)
    return "sizes: cuBLAS takes less than 2^31 vocabulary entries and columns";
  return {};
}
}  // namespace

std::string sm80_unsupported(const ForwardShape& s) {
  if (s.dtype != DType::bf16 && s.dtype != DType::f16)
    return concat("multiplies bf16 and f16, hidden and weight are ", name_of(s.dtype));
  return sizes_unsupported(s);
}

std::string sm80_far_unsupported(const ForwardShape& s) {
  if (s.dim % 8 != 0) return concat("dim: expected a multiple of 8, got ", s.dim);
  return sm80_unsupported(s);
}

std::string sm80_far_call_unsupported(const ForwardCall& c) {
  const std::string reason = sm80_far_unsupported(c.shape);
  return reason.empty() ? rows_unsupported(c) : reason;
}

std::size_t sm80_workspace_bytes(const ForwardShape& shape) {
  const std::size_t forward = TileLayout(shape).total;
  return shape.gradients ? std::max(forward, cublas_gemms_bytes(shape)) : forward;
}

namespace {

constexpr std::int64_t kStripBytes = std::int64_t{16} << 20;

// Returns the multiple of kBlockPadding rows that so many bytes of fp32 hold, at least one.
std::int64_t rows_of(std::int64_t bytes, std::int64_t dim) {
  return std::max<std::int64_t>(1, bytes / (dim * 4) / kBlockPadding) * kBlockPadding;
}
bool widens(const ForwardShape& s) { return widens_weight(s.dtype, s.weight_dtype(), s.precision); }

}  // namespace

std::int64_t wide_rows(std::int64_t vocab_count, std::int64_t dim) {
  return std::min(rows_of(2 * kStripBytes, dim), padded_vocab(ceil_div(vocab_count, 4)));
}

// The entries of a strip do not depend on the tokens, whose bits would then depend on the chunk. A
// quarter of the vocabulary keeps the strips of small heads small.
CublasLayout::CublasLayout(const ForwardShape& s) {
  const bool splits = s.precision == Precision::bf16x3;  // and reads the weight for each strip
  strip_vocab = std::min<std::int64_t>(splits ? kMostSplitStripVocab : kMostStripVocab,
                                       padded_vocab(ceil_div(s.vocab, 4)));
  const bool wide = widens(s);
  if (wide) strip_vocab = std::min(strip_vocab, wide_rows(s.vocab, s.dim));
  strip_tokens = std::min(padded_tokens(s.tokens), kStripTokens);
  if (!splits)
    strip_tokens =
        std::min(strip_tokens, kStripBytes / (strip_vocab * 4 * kBlockPadding) * kBlockPadding);
  const std::int64_t bytes = strip_tokens * strip_vocab * 4;
  gemm_bytes = std::min(kCublasBytes, static_cast<std::size_t>(bytes));
  strip = take(bytes);
  gemm = take(static_cast<std::int64_t>(gemm_bytes));
  const std::int64_t tokens = std::max<std::int64_t>(s.tokens, 1);
  rows = take(tokens * static_cast<std::int64_t>(sizeof(CublasRow)));
  targets = take(tokens * s.targets_per_token * 4);
  // Any chunk has it, since the last one may have few tokens.
  padded = take(
      s.tokens > 0 ? kLeastCublasRows * s.dim * static_cast<std::int64_t>(size_of(s.dtype)) : 0);
  const auto take_splits = [&](std::size_t size) {
    return take(splits ? static_cast<std::int64_t>(size) : 0);
  };
  split_hidden = take_splits(shared_split_bytes(strip_tokens, s.dim));
  split_weight = take_splits(stretch_bytes(strip_vocab, s.dim));
  wide_weight = take(wide ? strip_vocab * s.dim * 4 : 0);
}
std::size_t CublasLayout::take(std::int64_t bytes) {
  const std::size_t at = total;
  total += aligned(bytes);
  return at;
}

std::size_t stretch_bytes(std::int64_t other, std::int64_t k) {
  const std::int64_t length = ceil_div(std::min(k, kSplitStretch), 8) * 8;
  return aligned(ceil_div(other, 8) * 8 * length * 3 * 2);
}
std::size_t split_bytes(std::int64_t other, std::int64_t k) {
  const std::int64_t whole = k / kSplitStretch, rest = k % kSplitStretch;
  return static_cast<std::size_t>(whole) * stretch_bytes(other, kSplitStretch) +
         stretch_bytes(other, rest);
}
namespace {
constexpr std::size_t kSharedSplitBytes = std::size_t{64} << 20;
}  // namespace
std::int64_t kept_stretches(std::int64_t other, std::int64_t k) {
  if (split_bytes(other, k) <= kSharedSplitBytes) return ceil_div(k, kSplitStretch);
  const auto fit = static_cast<std::int64_t>(kSharedSplitBytes / stretch_bytes(other, k));
  return std::max<std::int64_t>(fit - 1, 0);
}
std::size_t shared_split_bytes(std::int64_t other, std::int64_t k) {
  const std::size_t all = split_bytes(other, k);
  return all <= kSharedSplitBytes ? all : std::max(kSharedSplitBytes, stretch_bytes(other, k));
}

std::string cublas_unsupported(const ForwardShape& s) {
  if (s.precision == Precision::bf16x3) return "precision: is not of bf16x3";
  return sizes_unsupported(s);
}

std::string bf16x3_unsupported(const ForwardShape& s) {
  if (s.precision != Precision::bf16x3)
    return concat("precision: is of bf16x3 alone, got ", name_of(s.precision));
  return sizes_unsupported(s);
}

std::size_t cublas_workspace_bytes(const ForwardShape& shape) {
  const std::size_t forward = CublasLayout(shape).total;
  // The gradient GEMMs reuse the forward's workspace.
  return shape.gradients ? std::max(forward, cublas_gemms_bytes(shape)) : forward;
}

std::int64_t cublas_strip_rows(std::int64_t dim, Precision precision, bool widens_weight) {
  const bool splits = precision == Precision::bf16x3;
  const std::int64_t rows = rows_of((splits || widens_weight ? 2 : 1) * kStripBytes, dim);
  constexpr std::int64_t kMostSplit = 4 * kStripBytes / (kSplitStretch * 3 * 2);
  return splits ? std::min(rows, kMostSplit / kBlockPadding * kBlockPadding) : rows;
}

namespace {
std::int64_t gemm_rows(const ForwardShape& s) {
  const std::int64_t most = cublas_strip_rows(s.dim, s.precision, widens(s));
  return strip_rows(most, s.tokens, s.vocab);
}
// Bytes of a strip's sums and of cuBLAS.
std::size_t gemms_bytes(std::int64_t rows, std::int64_t dim) {
  const std::size_t strip = strip_floats(rows, dim) * sizeof(float);
  return strip + std::min(kCublasBytes, strip);
}
}  // namespace

std::size_t cublas_gemms_bytes(const ForwardShape& s) {
  const std::int64_t wide = widens(s) ? wide_rows(s.vocab, s.dim) * s.dim * 4 : 0;
  return gemms_bytes(gemm_rows(s), s.dim) + static_cast<std::size_t>(wide);
}

std::size_t bf16x3_workspace_bytes(const ForwardShape& shape) {
  const std::size_t forward = CublasLayout(shape).total;
  return shape.gradients ? std::max(forward, bf16x3_gemms_bytes(shape)) : forward;
}

std::size_t bf16x3_gemms_bytes(const ForwardShape& s) {
  const std::int64_t rows = gemm_rows(s);
  const std::size_t of_hidden = stretch_bytes(rows, s.vocab) + stretch_bytes(s.dim, s.vocab),
                    of_weight = stretch_bytes(rows, s.tokens) + shared_split_bytes(s.dim, s.tokens);
  return gemms_bytes(rows, s.dim) + std::max(of_hidden, of_weight);
}

int loss_blocks(std::int64_t tokens) {
  return static_cast<int>(std::max<std::int64_t>(1, ceil_div(tokens, kLossThreads)));
}
std::size_t loss_workspace_bytes(std::int64_t tokens) {
  return 256 + aligned(loss_blocks(tokens) * static_cast<std::int64_t>(sizeof(LossSums)));
}

namespace {
constexpr std::int64_t kColumnSums = std::int64_t{1} << 18;  // of all parts
constexpr std::int64_t kLeastParts = 2, kMostParts = 64;
}  // namespace

int column_sum_parts(std::int64_t columns) {
  return static_cast<int>(
      std::clamp(kColumnSums / std::max<std::int64_t>(columns, 1), kLeastParts, kMostParts));
}
std::size_t column_sum_workspace_bytes(std::int64_t columns) {
  // It serves fewer columns, too. They are cut into more parts and may take more than all columns.
  const std::int64_t most =
      std::max(kLeastParts * columns, std::min(kMostParts * columns, kColumnSums));
  return static_cast<std::size_t>(most) * sizeof(float);
}

}  // namespace logitless::cuda
