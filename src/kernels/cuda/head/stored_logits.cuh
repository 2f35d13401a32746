// Logits from stored results of the head's GEMM, with the bits of its epilogue.
#pragma once

#include "kernels/cuda/head/logit_epilogue.cuh"

namespace logitless::cuda {

// Stored results of a chunk, and the numbers that make logits of them.
struct StoredRows {
  const float* results;  // [tokens, stride]
  std::int64_t stride;
  int vocab;
  float scale, cap;
  const float* bias;        // [vocab], or null
  const float* logit_bias;  // [vocab], added at last; or null
  // The greatest logit of each tile of 256 entries, [vocabulary tiles][padded tokens].
  const float* tile_tops;
  std::int64_t padded_tokens;
  int vocab_tiles;

  bool general() const { return bias != nullptr || cap != 0.0f || logit_bias != nullptr; }
  __device__ __forceinline__ float tile_top(std::int64_t row, int tile) const {
    return tile_tops[static_cast<std::int64_t>(tile) * static_cast<int>(padded_tokens) + row];
  }
};
// Returns the rows of a chunk whose results are stored, beside the greatest logit of each tile.
inline StoredRows stored_rows(const ForwardCall& c, const float* tile_tops, const float* results,
                              const float* logit_bias) {
  const ForwardShape& s = c.shape;
  return {.results = results,
          .stride = padded_vocab(s.vocab),
          .vocab = static_cast<int>(s.vocab),
          .scale = c.logit_scale,
          .cap = c.softcap,
          .bias = c.bias,
          .logit_bias = logit_bias,
          .tile_tops = tile_tops,
          .padded_tokens = padded_tokens(s.tokens),
          .vocab_tiles = static_cast<int>(ceil_div(s.vocab, kTileColumns))};
}

inline constexpr int kReadEntries = 4;  // of a thread at a time

// Reads 1, 2 or 4 adjacent logits of a row from an entry on, a multiple of their count; -inf past
// the vocabulary's end. Products are rounded before sums, so that equal logits stay equal.
// kGeneral: s.general().
template <bool kGeneral>
class LogitReader {
 public:
  __device__ __forceinline__ LogitReader(const StoredRows& s, std::int64_t row)
      : results_(s.results + row * s.stride),
        factor_(kGeneral && s.cap > 0.0f ? factor_of<true>(s.scale, s.cap)
                                         : factor_of<false>(s.scale, s.cap)) {}
  template <int kCount>
  __device__ __forceinline__ void read(float (&v)[kCount], const StoredRows& s, int first) const {
    struct alignas(4 * kCount) Results {
      float at[kCount];
    };
    const Results results = *reinterpret_cast<const Results*>(results_ + first);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int vocab_id = first + j;
      const bool exists = vocab_id < s.vocab;
      float z = results.at[j];
      if constexpr (kGeneral) {
        if (s.bias != nullptr && exists) z += s.bias[vocab_id];
        z = s.cap > 0.0f ? scaled_and_capped<true>(z, factor_, s.cap)
                         : scaled_and_capped<false>(z, factor_, s.cap);
        if (s.logit_bias != nullptr && exists) z = __fadd_rn(z, s.logit_bias[vocab_id]);
      } else {
        z *= factor_;
      }
      v[j] = exists ? z : -INFINITY;
    }
  }

 private:
  const float* results_;
  float factor_;
};

}  // namespace logitless::cuda
