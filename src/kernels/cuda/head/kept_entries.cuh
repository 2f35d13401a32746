// The entries of stored rows that filters keep, by select.cuh.
#pragma once

#include "kernels/cuda/head/select.cuh"
#include "kernels/cuda/head/stored_logits.cuh"

namespace logitless::cuda {

// The greatest logits of a row's tiles, as entries.
struct TileEntries {
  const StoredRows& rows;
  std::int64_t row;

  template <typename F>
  __device__ void for_each(const F& f) const {
    for (int t = static_cast<int>(threadIdx.x); t < rows.vocab_tiles; t += kSelectThreads)
      f(scored_entry(rows.tile_top(row, t) + 0.0f, t));
  }
};

// A row's entries from `least` on. Tiles whose greatest logit is below it are not read.
template <bool kGeneral>
struct RowEntries {
  const StoredRows& rows;
  std::int64_t row;
  ScoredEntry least = 0;

  template <typename F>
  __device__ void for_each(const F& f) const {
    const LogitReader<kGeneral> reader(rows, row);
    const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
    for (int base = warp; base < rows.vocab_tiles; base += 32 * kSelectWarps) {
      const int own = base + lane * kSelectWarps;
      // Id 0 comes first among equal logits.
      const bool reaches =
          own < rows.vocab_tiles && scored_entry(rows.tile_top(row, own) + 0.0f, 0) >= least;
      for (unsigned tiles = __ballot_sync(~0u, reaches); tiles != 0; tiles &= tiles - 1) {
        const int tile = base + (__ffs(static_cast<int>(tiles)) - 1) * kSelectWarps;
        visit(f, reader, tile * kTileColumns + lane * kReadEntries);
        visit(f, reader, tile * kTileColumns + (32 + lane) * kReadEntries);
      }
    }
  }

 private:
  // f of four entries. Adding 0 makes -0 equal to 0.
  template <typename F>
  __device__ __forceinline__ void visit(const F& f, const LogitReader<kGeneral>& reader,
                                        int first) const {
    float v[kReadEntries];
    reader.read(v, rows, first);
#pragma unroll
    for (int j = 0; j < kReadEntries; ++j) {
      const ScoredEntry entry = scored_entry(v[j] + 0.0f, first + j);
      if (first + j < rows.vocab && entry >= least) f(entry);
    }
  }
};

// Each entry counts.
struct CountWeights {
  Weight count;

  __device__ Weight of(ScoredEntry) const { return 1; }
  __device__ Weight target(Weight) const { return count; }
};

// Probabilities relative to the greatest one, fp32, as integers: multiples of a power of two that
// keep the sum of all entries below 2^63.
class ProbabilityWeights {
 public:
  // part: of the sum, that is looked for.
  __device__ ProbabilityWeights(float greatest, float temperature, int vocab, float part)
      : greatest_(greatest), temperature_(temperature), part_(part) {
    bits_ = static_cast<float>(31 + __clz(vocab));
    scale_ = exp2f(bits_);
  }

  __device__ Weight of(ScoredEntry entry) const {
    const float s = __fsub_rn(score_of(entry), greatest_) / temperature_;
    return __float2ull_rn(fminf(expf(s), 1.0f) * scale_);
  }
  __device__ Weight target(Weight total) const {
    const double sum = ceil(static_cast<double>(part_) * static_cast<double>(total));
    return max(Weight{1}, min(total, static_cast<Weight>(sum)));
  }
  // Entries further below the greatest have no weight.
  __device__ float range() const {
    return (bits_ + 2.0f) * static_cast<float>(kLn2) * temperature_;
  }

 private:
  float greatest_, temperature_, bits_, scale_, part_;
};

// The greatest logit of a row, and the least one of its tiles' greatest.
struct Span {
  float top, least_top;
};
__device__ inline Span span_of(const StoredRows& rows, std::int64_t row, Selection& m) {
  const TileEntries tiles{rows, row};
  ScoredEntry least = ~ScoredEntry{0}, greatest = 0;
  tiles.for_each([&](ScoredEntry entry) {
    least = min(least, entry);
    greatest = max(greatest, entry);
  });
  if (threadIdx.x == 0) {
    m.least = ~ScoredEntry{0};
    m.greatest = 0;
  }
  __syncthreads();
  for (int step = 16; step > 0; step /= 2) {
    least = min(least, __shfl_xor_sync(~0u, least, step));
    greatest = max(greatest, __shfl_xor_sync(~0u, greatest, step));
  }
  if (threadIdx.x % 32 == 0) {
    atomicMin(&m.least, least);
    atomicMax(&m.greatest, greatest);
  }
  __syncthreads();
  const Span span{score_of(m.greatest), score_of(m.least)};
  __syncthreads();  // before the next use of m
  return span;
}

// Returns bins over some `width` of logits below the greatest, if less is not enough: a tile's
// greatest logit is a few standard deviations above the mean.
__device__ inline LinearBins bins_of(const Span& span, float width) {
  constexpr float kSpread = 8.0f;
  const float spread = kSpread * (span.top - span.least_top);
  const float all = spread > 0.0f && spread < width ? spread : width;
  return {span.top, isfinite(all) ? static_cast<float>(kSelectBins - 1) / all : 0.0f};
}

// Returns the least of the k greatest entries of a row, of equal ones those of lower ids.
//
// The k greatest tiles have k entries of at least the least one of their greatest logits. Others
// are not read.
template <bool kGeneral>
__device__ ScoredEntry least_of_best(const StoredRows& rows, std::int64_t row, const Span& span,
                                     std::int64_t k, Selection& m) {
  const CountWeights weights{static_cast<Weight>(k)};
  RowEntries<kGeneral> entries{rows, row};
  if (k > rows.vocab_tiles) return m.select(entries, weights, bins_of(span, INFINITY));
  constexpr ScoredEntry kScore = ~ScoredEntry{0xFFFFFFFF};
  entries.least = m.select(TileEntries{rows, row}, weights, LinearBins{}) & kScore;
  return m.select(entries, weights, LinearBins{});
}

}  // namespace logitless::cuda
