// prepare_block: per-token work on a block of logits before its gradient GEMMs.
//
// A block is [tokens of a chunk, some vocabulary entries], of exponentials or of gradients
// (device/gradient.h). The GEMMs take it times a factor per token, and take the targets' gradients
// apart from it, in fp32. So this computes the factors and the targets' coefficients, and zeroes
// the targets' elements and the rows of tokens without a target. It also writes the scaled copy of
// hidden that the GEMM of d_weight reads.
#include <cmath>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"  // load_kernels() loads this file's kernels
#include "kernels/cuda/device/numbers.cuh"
#include "kernels/cuda/head/targets.cuh"
#include "kernels/device/entropy_block.h"
#include "kernels/device/far.h"
#include "math/token_gradient.h"

namespace logitless::cuda {
namespace {

constexpr int kRowThreads = 128;

// Slot row * K + k is target k of a row, with K = targets_per_token. Equal targets of a row have
// one element of the block: the first of their slots takes the sum of their deltas, the others 0.
__device__ double sum_of_deltas(const BlockCall& b, std::int64_t row, std::int64_t vocab_id) {
  const int per_token = b.chunk.shape.targets_per_token;
  const std::int64_t slot = row * per_token;
  double delta = 0.0;
  for (int other = 0; other < per_token; ++other)
    if (target_of(b.chunk, slot + other) == vocab_id)
      delta += static_cast<double>(b.delta[slot + other]);
  return delta;
}
__device__ bool repeats_earlier_target(const BlockCall& b, std::int64_t row, int k,
                                       std::int64_t vocab_id) {
  const std::int64_t slot = row * b.chunk.shape.targets_per_token;
  for (int other = 0; other < k; ++other)
    if (target_of(b.chunk, slot + other) == vocab_id) return true;
  return false;
}

// to = factor * x; 0 where the factor is 0, even if x is not finite. All threads of the thread
// block share the columns, 16 bytes at a time where both rows are aligned to that.
template <typename T>
__device__ void scale_row(const T* x, T* to, std::int64_t columns, float factor) {
  constexpr int kVector = 16 / sizeof(T);
  struct alignas(16) Vector {
    T values[kVector];
  };
  const auto address_bits =
      reinterpret_cast<std::uintptr_t>(x) | reinterpret_cast<std::uintptr_t>(to);
  const std::int64_t vectors = address_bits % 16 == 0 ? columns / kVector : 0;
  for (std::int64_t i = threadIdx.x; i < vectors; i += kRowThreads) {
    Vector v = reinterpret_cast<const Vector*>(x)[i];
    for (T& value : v.values) value = rounded<T>(factor == 0.0f ? 0.0f : factor * as_float(value));
    reinterpret_cast<Vector*>(to)[i] = v;
  }
  for (std::int64_t k = vectors * kVector + threadIdx.x; k < columns; k += kRowThreads)
    to[k] = rounded<T>(factor == 0.0f ? 0.0f : factor * as_float(x[k]));
}

// A token's row of the block. The block is one matrix, or split into vocabulary ranges
// (VocabRanges) in memories of their own; columns count through all ranges.
template <typename T>
class BlockRow {
 public:
  __device__ BlockRow(const BlockCall& b, std::int64_t row) : b_(b), row_(row) {}
  // Without a block, prepare_block only computes factors and coefficients.
  __device__ bool exists() const { return ranges().count > 0 || b_.block.data != nullptr; }
  // Zeroes one column, in [0, vocab_count of the call).
  __device__ void zero(std::int64_t column) const { *element(column) = rounded<T>(0.0f); }
  __device__ void zero_all() const {
    if (ranges().count == 0) return zero_elements(element(0), b_.vocab_count);
    for (int r = 0; r < ranges().count; ++r)
      zero_elements(element(ranges().first[r]), ranges().vocab_count(r));
  }

 private:
  __device__ const VocabRanges& ranges() const { return b_.chunk.ranges; }
  __device__ T* element(std::int64_t column) const {
    if (ranges().count == 0)
      return static_cast<T*>(b_.block.data) + row_ * b_.block.stride + column;
    int r = 0;
    while (column >= ranges().first[r + 1]) ++r;
    return static_cast<T*>(ranges().data[r]) + row_ * ranges().stride(r) + column -
           ranges().first[r];
  }
  __device__ static void zero_elements(T* elements, std::int64_t count) {
    for (std::int64_t j = threadIdx.x; j < count; j += kRowThreads) elements[j] = rounded<T>(0.0f);
  }

  const BlockCall& b_;
  std::int64_t row_;
};

// Returns the factor of a token's exponentials, after scale_by_logits where they have a part of the
// entropy.
__device__ float forward_factor(const RowCoefficients& r, float reference) {
  const float size = coefficient_size(r);
  return size == 0.0f ? 0.0f : size * exp2f(r.less_lse(reference));
}

// Returns the greatest of magnitude(i), i < count, to all threads of a thread block.
template <typename Magnitude>
__device__ float greatest(std::int64_t count, const Magnitude& magnitude) {
  __shared__ float tops[kRowThreads];
  float most = 0.0f;
  for (std::int64_t i = threadIdx.x; i < count; i += kRowThreads) most = fmaxf(most, magnitude(i));
  __syncthreads();  // an earlier result has been read
  tops[threadIdx.x] = most;
  __syncthreads();
  for (int half = kRowThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) tops[threadIdx.x] = fmaxf(tops[threadIdx.x], tops[threadIdx.x + half]);
    __syncthreads();
  }
  return tops[0];
}

// Sets b.scales so that the greatest factor of the tokens becomes about 1, where the block holds
// exponentials. Otherwise the greatest coefficient becomes about 2^of_gradients: those of a mean
// over many tokens are too small for f16. gamma counts times the greatest logit weight. One thread
// block.
__global__ void __launch_bounds__(kRowThreads) set_scales(const BlockCall b, int of_gradients) {
  const ForwardCall& c = b.chunk;
  float most;
  int exponent;
  if (b.from_forward) {
    most = greatest(c.shape.tokens, [&](std::int64_t row) {
      return fabsf(forward_factor(b.rows[row], c.reference[row]));
    });
    exponent = 0;
  } else {
    float weight = b.smoothing_apart ? 0.0f : 1.0f;
    if (b.smoothing && !b.smoothing_apart && c.logit_weights != nullptr)
      weight = greatest(b.vocab_count,
                        [&](std::int64_t j) { return fabsf(c.logit_weights[b.vocab_begin + j]); });
    most = greatest(c.shape.tokens, [&](std::int64_t row) {
      const RowCoefficients r = b.rows[row];
      return fmaxf(fabsf(r.alpha), fmaxf(fabsf(r.beta), weight * fabsf(r.gamma)));
    });
    exponent = of_gradients;
  }
  if (threadIdx.x > 0) return;
  const int by = most > 0.0f && isfinite(most) ? max(-100, min(100, exponent - ilogbf(most))) : 0;
  b.scales[0] = ldexpf(1.0f, by);
  b.scales[1] = ldexpf(1.0f, -by);
}

// A thread block for each token.
template <typename T>
__global__ void __launch_bounds__(kRowThreads) prepare_rows(const BlockCall b) {
  const ForwardCall& c = b.chunk;
  const std::int64_t row = blockIdx.x;
  const int per_token = c.shape.targets_per_token;
  if (row >= b.fixed_tokens && c.active != nullptr && c.active[row / kBlockPadding] == 0) {
    if (threadIdx.x == 0) b.factor[row] = 0.0f;
    for (int k = threadIdx.x; k < per_token; k += kRowThreads)
      b.coefficient[row * per_token + k] = 0.0f;
    return;
  }
  const BlockRow<T> block(b, row);
  const RowCoefficients r = b.rows[row];
  const bool valid = has_target(c, row);
  // Gradients need no factor beyond the inverse of their scale. Exponentials 2^(z log2e -
  // reference) become gradients alpha p = alpha 2^(z log2e - lse log2e), or see entropy_block.h.
  float factor = !valid ? 0.0f : b.scales == nullptr ? 1.0f : b.scales[1];
  if (valid && b.from_forward) factor = forward_factor(r, c.reference[row]);
  if (threadIdx.x == 0) b.factor[row] = factor;
  if (b.scaled_hidden != nullptr) {
    const T* const x = static_cast<const T*>(c.hidden) + row * c.hidden_stride;
    T* const to = static_cast<T*>(b.scaled_hidden) + row * c.shape.dim;
    const float scale = b.scales == nullptr ? 1.0f : b.scales[0];
    scale_row(x, to, c.shape.dim, b.from_forward ? factor * scale : valid ? 1.0f : 0.0f);
  }
  if (!valid && block.exists()) block.zero_all();
  const TokenGradient g{r.alpha, r.beta, b.smoothing_apart ? 0.0f : r.gamma};
  for (int k = threadIdx.x; k < per_token; k += kRowThreads) {
    const std::int64_t slot = row * per_token + k;
    const std::int64_t vocab_id = target_of(c, slot);
    float coefficient = 0.0f;
    const std::int64_t column = row_of_vocab_id(c, vocab_id) - b.vocab_begin;
    // One thread alone zeroes an element: later slots of an equal target are skipped.
    if (is_local(c, vocab_id) && column >= 0 && column < b.vocab_count &&
        !repeats_earlier_target(b, row, k, vocab_id)) {
      const double logit_weight =
          c.logit_weights == nullptr ? 1.0 : c.logit_weights[b.vocab_begin + column];
      constexpr double kScale = 1.0;  // alpha, beta, gamma and delta include the logit scale
      coefficient = static_cast<float>(
          target_coefficient(g, c.log_prob[slot], c.target_logit[slot], logit_weight,
                             sum_of_deltas(b, row, vocab_id), kScale, c.softcap));
      if (block.exists()) block.zero(column);
    }
    b.coefficient[slot] = coefficient;
  }
}

}  // namespace

void scale_block(const BlockCall& b) {
  if (b.chunk.shape.tokens == 0) return;
  // Sampled pairs of the far field have gradients sample.every times as large.
  const FarCall* const far = b.chunk.far;
  const int exponent = far == nullptr || far->sample.every < 2 ? 10 : 10 - ilogb(far->sample.every);
  set_scales<<<1, kRowThreads, 0, static_cast<cudaStream_t>(b.chunk.stream)>>>(b, exponent);
  require_cuda(cudaGetLastError(), "launching the scale of a block");
}

void prepare_block(const BlockCall& b) {
  const std::int64_t tokens = b.chunk.shape.tokens;
  if (tokens == 0) return;
  with_type(b.chunk.shape.dtype, [&](auto type) {
    prepare_rows<decltype(type)><<<static_cast<unsigned>(tokens), kRowThreads, 0,
                                   static_cast<cudaStream_t>(b.chunk.stream)>>>(b);
  });
  require_cuda(cudaGetLastError(), "launching the gradients of targets");
}

}  // namespace logitless::cuda
