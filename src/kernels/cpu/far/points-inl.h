// Centroids and means of the vocabulary tiles, computed at the start of a far-field call.
#if defined(LOGITLESS_FAR_POINTS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITLESS_FAR_POINTS_INL_H
#undef LOGITLESS_FAR_POINTS_INL_H
#else
#define LOGITLESS_FAR_POINTS_INL_H
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/half.h"
#include "kernels/cpu/head/chunk-inl.h"
#include "math/lse_state.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {

template <class Engine>
constexpr DType FarDtype() {
  return sizeof(typename Engine::Element) == 2 ? DType::bf16 : DType::f32;
}

// Writes the weights exp(s bias) of a tile's entries, normalised to sum 1, to `share`. Returns log2
// of their sum.
inline float BiasShare(const ChunkCommon& chunk, std::int64_t first, std::int64_t vocab_count,
                       float* share) {
  if (chunk.bias == nullptr) {
    std::fill_n(share, vocab_count, 1.0f / static_cast<float>(vocab_count));
    return std::log2(static_cast<float>(vocab_count));
  }
  double weight[kVocabTile];
  double top = -INFINITY;
  for (std::int64_t r = 0; r < vocab_count; ++r) {
    weight[r] = static_cast<double>(chunk.features->logit_scale) * chunk.bias[first + r];
    top = std::max(top, weight[r]);
  }
  double total = 0.0;
  for (std::int64_t r = 0; r < vocab_count; ++r) {
    weight[r] = top > -INFINITY ? std::exp(weight[r] - top) : 0.0;
    total += weight[r];
  }
  for (std::int64_t r = 0; r < vocab_count; ++r)
    share[r] = total > 0.0 ? static_cast<float>(weight[r] / total) : 0.0f;
  return total > 0.0 ? static_cast<float>(top * kLog2E + std::log2(total)) : -INFINITY;
}

// Computes one column block of a tile's point, sum_r share_r row_r. Writes it to `out` in the
// kernel's dtype, and the rounded values to `point`.
template <class Engine>
void StorePoint(const float* HWY_RESTRICT rows, std::int64_t stride, std::int64_t vocab_count,
                std::int64_t columns, const float* HWY_RESTRICT share, void* out, std::int64_t at,
                float* HWY_RESTRICT point) {
  std::memset(point, 0, static_cast<std::size_t>(columns) * sizeof(float));
  for (std::int64_t r = 0; r < vocab_count; ++r)
    AddScaled(rows + r * stride, columns, share[r], point);
  StoreRow(out, FarDtype<Engine>(), at, 1, false, columns, point);
  if constexpr (sizeof(typename Engine::Element) == 2) {
    const auto* rounded = static_cast<const std::uint16_t*>(out) + at;
    for (std::int64_t k = 0; k < columns; ++k) point[k] = bf16_to_float(rounded[k]);
  }
}

// Computes a tile's centroid and radius. For a forward by moments it computes the mean instead:
// estimated masses have no rigorous bound.
template <class Engine>
void PrepareTile(const FarPrepare& chunk, std::int64_t tile) {
  constexpr std::int64_t kStep = 256;
  HWY_ALIGN float rows[kVocabTile * kStep];
  HWY_ALIGN float point[kStep];
  const std::int64_t dim = chunk.shape.dim;
  const std::int64_t first = tile * kVocabTile;
  const std::int64_t vocab_count = std::min(kVocabTile, chunk.shape.vocab - first);
  const TilePoints& points = chunk.points;
  float share[kVocabTile];
  if (points.mean != nullptr) points.log2_base[tile] = BiasShare(chunk, first, vocab_count, share);
  float squares[kVocabTile] = {};
  double norm = 0.0;
  for (std::int64_t at = 0; at < dim; at += kStep) {
    const std::int64_t n = std::min(kStep, dim - at);
    for (std::int64_t r = 0; r < vocab_count; ++r)
      LoadRow(chunk.weight, first + r, at, n, rows + r * kStep);
    const std::int64_t to = tile * dim + at;
    if (points.mean != nullptr)
      StorePoint<Engine>(rows, kStep, vocab_count, n, share, points.mean, to, point);
    StorePoint<Engine>(rows, kStep, vocab_count, n, points.share + first, points.centroid, to,
                       point);
    if (points.mean != nullptr) continue;
    norm += SquaredDistance(point, nullptr, n);
    for (std::int64_t r = 0; r < vocab_count; ++r)
      squares[r] += SquaredDistance(rows + r * kStep, point, n);
  }
  points.radius[tile] =
      std::sqrt(*std::max_element(squares, squares + vocab_count)) * (1.0f + 1e-5f);
  points.centroid_norm[tile] = static_cast<float>(std::sqrt(norm));
}

template <class Engine>
void RunFarPrepare(const FarPrepare& chunk) {
  const std::int64_t dim = chunk.shape.dim;
  parallel_for(chunk.threads, ceil_div(chunk.shape.vocab, kVocabTile),
               [&](std::int64_t tile, int) { PrepareTile<Engine>(chunk, tile); });
  if (chunk.points.weighted_total == nullptr) return;
  // Each task sums its columns over the full vocabulary, in order.
  constexpr std::int64_t kColumns = 64;
  parallel_for(chunk.threads, ceil_div(dim, kColumns), [&](std::int64_t task, int) {
    const std::int64_t at = task * kColumns;
    const std::int64_t n = std::min(kColumns, dim - at);
    double total[kColumns] = {};
    float part[kColumns];
    for (std::int64_t first = 0; first < chunk.shape.vocab; first += kVocabTile) {
      const std::int64_t end = std::min(first + kVocabTile, chunk.shape.vocab);
      std::memset(part, 0, sizeof(part));
      for (std::int64_t j = first; j < end; ++j)
        AddRow(chunk.weight, j, at, n,
               chunk.logit_weights == nullptr ? 1.0f : chunk.logit_weights[j], part);
      for (std::int64_t k = 0; k < n; ++k) total[k] += part[k];
    }
    for (std::int64_t k = 0; k < n; ++k)
      chunk.points.weighted_total[at + k] = static_cast<float>(total[k]);
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
