// Row kernels on a block of logits: targets, ignored tokens, factors, sums over its rows.
#include <algorithm>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/numbers.cuh"
#include "kernels/cuda/head/sizes.h"
#include "kernels/cuda/head/targets.cuh"
#include "kernels/device_gradient.h"
#include "math/lse_state.h"
#include "math/token_gradient.h"

namespace logitless::cuda {
namespace {

constexpr int kRowThreads = 128;

// Sums delta over the slots of a row with the same target.
__device__ double delta_of_vocab_id(const BlockCall& b, std::int64_t row, std::int64_t vocab_id) {
  const int per_token = b.chunk.shape.targets_per_token;
  const std::int64_t slot = row * per_token;
  double delta = 0.0;
  for (int other = 0; other < per_token; ++other)
    if (target_of(b.chunk, slot + other) == vocab_id)
      delta += static_cast<double>(b.delta[slot + other]);
  return delta;
}
__device__ bool named_before(const BlockCall& b, std::int64_t row, int k, std::int64_t vocab_id) {
  const std::int64_t slot = row * b.chunk.shape.targets_per_token;
  for (int other = 0; other < k; ++other)
    if (target_of(b.chunk, slot + other) == vocab_id) return true;
  return false;
}

// to = factor * x; 0 where the factor is 0, even if x is not finite.
template <typename T>
__device__ void scale_row(const T* x, T* to, std::int64_t columns, float factor) {
  constexpr int kVector = 16 / sizeof(T);
  struct alignas(16) Vector {
    T values[kVector];
  };
  const auto places = reinterpret_cast<std::uintptr_t>(x) | reinterpret_cast<std::uintptr_t>(to);
  const std::int64_t vectors = places % 16 == 0 ? columns / kVector : 0;
  for (std::int64_t i = threadIdx.x; i < vectors; i += kRowThreads) {
    Vector v = reinterpret_cast<const Vector*>(x)[i];
    for (T& value : v.values) value = rounded<T>(factor == 0.0f ? 0.0f : factor * as_float(value));
    reinterpret_cast<Vector*>(to)[i] = v;
  }
  for (std::int64_t k = vectors * kVector + threadIdx.x; k < columns; k += kRowThreads)
    to[k] = rounded<T>(factor == 0.0f ? 0.0f : factor * as_float(x[k]));
}

// A token's row of the block, contiguous or in vocabulary ranges.
template <typename T>
class BlockRow {
 public:
  __device__ BlockRow(const BlockCall& b, std::int64_t row) : b_(b), row_(row) {}
  __device__ bool exists() const { return ranges().count > 0 || b_.block.data != nullptr; }
  // Clears a column in [0, `b.words`).
  __device__ void clear(std::int64_t vocab_id) const { *place(vocab_id) = rounded<T>(0.0f); }
  __device__ void clear_all() const {
    if (ranges().count == 0) return clear_words(place(0), b_.vocab_count);
    for (int r = 0; r < ranges().count; ++r)
      clear_words(place(ranges().first[r]), ranges().vocab_count(r));
  }

 private:
  __device__ const VocabRanges& ranges() const { return b_.chunk.ranges; }
  __device__ T* place(std::int64_t vocab_id) const {
    if (ranges().count == 0)
      return static_cast<T*>(b_.block.data) + row_ * b_.block.stride + vocab_id;
    int r = 0;
    while (vocab_id >= ranges().first[r + 1]) ++r;
    return static_cast<T*>(ranges().data[r]) + row_ * ranges().stride(r) + vocab_id -
           ranges().first[r];
  }
  __device__ static void clear_words(T* vocab_ids, std::int64_t count) {
    for (std::int64_t j = threadIdx.x; j < count; j += kRowThreads) vocab_ids[j] = rounded<T>(0.0f);
  }

  const BlockCall& b_;
  std::int64_t row_;
};

// A thread block for each token.
template <typename T>
__global__ void __launch_bounds__(kRowThreads) prepare_rows(const BlockCall b) {
  const ForwardCall& c = b.chunk;
  const std::int64_t row = blockIdx.x;
  const int per_token = c.shape.targets_per_token;
  const BlockRow<T> block(b, row);
  const RowCoefficients r = b.rows[row];
  const bool valid = counts(c, row);
  float factor = !valid ? 0.0f : b.unscale == nullptr ? 1.0f : *b.unscale;
  if (valid && b.from_forward)
    factor = r.alpha == 0.0f ? 0.0f : r.alpha * exp2f(c.reference[row] - r.lse_bits);
  if (threadIdx.x == 0) b.factor[row] = factor;
  if (b.scaled_hidden != nullptr) {
    const T* const x = static_cast<const T*>(c.hidden) + row * c.hidden_stride;
    T* const to = static_cast<T*>(b.scaled_hidden) + row * c.shape.dim;
    scale_row(x, to, c.shape.dim, b.from_forward ? factor : valid ? 1.0f : 0.0f);
  }
  if (!valid && block.exists()) block.clear_all();
  const TokenGradient g{r.alpha, r.beta, b.smoothing_apart ? 0.0f : r.gamma};
  for (int k = threadIdx.x; k < per_token; k += kRowThreads) {
    const std::int64_t slot = row * per_token + k;
    const std::int64_t vocab_id = target_of(c, slot);
    float coefficient = 0.0f;
    const std::int64_t place = row_of_vocab_id(c, vocab_id) - b.vocab_begin;  // column of the block
    if (is_local(c, vocab_id) && place >= 0 && place < b.vocab_count &&
        !named_before(b, row, k, vocab_id)) {
      const double logit_weights =
          c.logit_weights == nullptr ? 1.0 : c.logit_weights[b.vocab_begin + place];
      coefficient = static_cast<float>(
          target_coefficient(g, c.log_prob[slot], c.target_logit[slot], logit_weights,
                             delta_of_vocab_id(b, row, vocab_id), 1.0, c.softcap));
      if (block.exists()) block.clear(place);
    }
    b.coefficient[slot] = coefficient;
  }
}

constexpr int kColumns = 256;  // of a thread block of the column sums
constexpr int kRowGroups = 8;

// Writes partial [parts][columns].
template <typename T>
__global__ void __launch_bounds__(32 * kRowGroups)
    sum_column_parts(const ColumnSumCall c, float* partial) {
  __shared__ float shared[kRowGroups][kColumns];
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kColumns;
  const std::int64_t run = (c.rows + gridDim.y - 1) / gridDim.y;
  const std::int64_t begin = blockIdx.y * run;
  const std::int64_t end = min(c.rows, begin + run);
  float sums[kColumns / 32] = {};
  for (std::int64_t row = begin + threadIdx.y; row < end; row += kRowGroups) {
    const float weight = c.weights == nullptr ? 1.0f : c.weights[row * c.weight_stride];
    if (weight == 0.0f) continue;
    const T* const values = static_cast<const T*>(c.matrix) + row * c.stride;
#pragma unroll
    for (int i = 0; i < kColumns / 32; ++i) {
      const std::int64_t column = first + i * 32 + threadIdx.x;
      if (column < c.columns) sums[i] = fmaf(weight, as_float(values[column]), sums[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns / 32; ++i) shared[threadIdx.y][i * 32 + threadIdx.x] = sums[i];
  __syncthreads();
  const int mine = threadIdx.y * 32 + threadIdx.x;
  float total = 0.0f;
  for (int g = 0; g < kRowGroups; ++g) total += shared[g][mine];
  if (first + mine < c.columns) partial[blockIdx.y * c.columns + first + mine] = total;
}

__global__ void __launch_bounds__(256)
    add_column_parts(const ColumnSumCall c, const float* partial, int parts) {
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (column >= c.columns) return;
  double total = 0.0;
  for (int p = 0; p < parts; ++p) total += partial[p * c.columns + column];
  c.out[column] = static_cast<float>(c.add ? c.out[column] + total : total);
}

__global__ void __launch_bounds__(256)
    add_gamma(const RowCoefficients* rows, std::int64_t tokens, const float* logit_weights,
              std::int64_t vocab_count, float* d_bias) {
  __shared__ double shared[256];
  double mine = 0.0;
  for (std::int64_t i = threadIdx.x; i < tokens; i += 256) mine += rows[i].gamma;
  shared[threadIdx.x] = mine;
  __syncthreads();
  for (int half = 128; half > 0; half /= 2) {
    if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
    __syncthreads();
  }
  const std::int64_t vocab_id = static_cast<std::int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (vocab_id < vocab_count)
    d_bias[vocab_id] +=
        static_cast<float>(shared[0] * (logit_weights == nullptr ? 1.0f : logit_weights[vocab_id]));
}

template <typename T>
__global__ void __launch_bounds__(256)
    round_rows(const float* sums, std::int64_t rows, std::int64_t columns, const GradientOutput out,
               const std::int32_t* places) {
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const std::int64_t place = places == nullptr ? row : places[row];
    T* const to = static_cast<T*>(out.data) + place * out.stride;
    for (std::int64_t c = threadIdx.x; c < columns; c += 256) {
      const float value = sums[row * columns + c];
      to[c] = rounded<T>(out.add ? as_float(to[c]) + value : value);
    }
  }
}

constexpr int kScaleThreads = 256;
constexpr int kScaleLoads = 4;  // 16-byte loads of a thread in flight

template <typename T>
__device__ void scale_rows(const ScaleCall::Gradient& g, float factor) {
  constexpr int kPack = 16 / static_cast<int>(sizeof(T));
  const bool packs = reinterpret_cast<std::uintptr_t>(g.out.data) % 16 == 0 &&
                     (g.rows == 1 || g.out.stride % kPack == 0);
  const std::int64_t whole = packs ? g.columns / kPack : 0;  // 16-byte packs of a row
  constexpr std::int64_t kPart = kScaleThreads * kScaleLoads;
  const std::int64_t parts = (whole + kPart - 1) / kPart;
  for (std::int64_t i = blockIdx.x; i < g.rows * parts; i += gridDim.x) {
    auto* const row =
        reinterpret_cast<uint4*>(static_cast<T*>(g.out.data) + i / parts * g.out.stride);
    const std::int64_t first = i % parts * kPart + threadIdx.x;
    uint4 packed[kScaleLoads];
#pragma unroll
    for (int k = 0; k < kScaleLoads; ++k) {
      if (first + k * kScaleThreads < whole) packed[k] = row[first + k * kScaleThreads];
    }
#pragma unroll
    for (int k = 0; k < kScaleLoads; ++k) {
      if (first + k * kScaleThreads >= whole) continue;
      T* const values = reinterpret_cast<T*>(&packed[k]);
#pragma unroll
      for (int j = 0; j < kPack; ++j) values[j] = rounded<T>(as_float(values[j]) * factor);
      row[first + k * kScaleThreads] = packed[k];
    }
  }
  const std::int64_t rest = g.columns - whole * kPack;  // a row's tail, or all of it
  const std::int64_t threads = std::int64_t{gridDim.x} * kScaleThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kScaleThreads + threadIdx.x; i < g.rows * rest;
       i += threads) {
    T& value = static_cast<T*>(g.out.data)[i / rest * g.out.stride + whole * kPack + i % rest];
    value = rounded<T>(as_float(value) * factor);
  }
}

__global__ void __launch_bounds__(kScaleThreads) scale_all(const ScaleCall call) {
  const float factor = *call.factor;
  if (factor == 1.0f) return;
  for (const ScaleCall::Gradient& g : call.gradients) {
    if (g.out.data == nullptr) continue;
    if (g.out.dtype == DType::f32) {
      scale_rows<float>(g, factor);
    } else if (g.out.dtype == DType::bf16) {
      scale_rows<__nv_bfloat16>(g, factor);
    } else {
      scale_rows<__half>(g, factor);
    }
  }
}

}  // namespace

void scale_gradients(const ScaleCall& call) {
  ScaleCall c = call;
  std::int64_t blocks = 1;
  for (ScaleCall::Gradient& g : c.gradients) {
    if (g.rows * g.columns == 0) g.out.data = nullptr;
    if (g.out.data == nullptr) continue;
    if (g.out.stride == g.columns) {
      g.columns *= g.rows;
      g.rows = 1;
    }
    const std::int64_t bytes = g.rows * g.columns * static_cast<std::int64_t>(size_of(g.out.dtype));
    blocks = std::max(blocks, bytes / (kScaleThreads * 16 * kScaleLoads));
  }
  scale_all<<<static_cast<unsigned>(std::min<std::int64_t>(blocks, 132 * 8)), kScaleThreads, 0,
              static_cast<cudaStream_t>(c.stream)>>>(c);
  require_cuda(cudaGetLastError(), "scaling gradients");
}

void prepare_block(const BlockCall& b) {
  const std::int64_t tokens = b.chunk.shape.tokens;
  if (tokens == 0) return;
  with_type(b.chunk.shape.dtype, [&](auto type) {
    prepare_rows<decltype(type)><<<static_cast<unsigned>(tokens), kRowThreads, 0,
                                   static_cast<cudaStream_t>(b.chunk.stream)>>>(b);
  });
  require_cuda(cudaGetLastError(), "rows of the block");
}

void sum_columns(const ColumnSumCall& c) {
  if (c.columns == 0) return;
  const auto stream = static_cast<cudaStream_t>(c.stream);
  auto* const partial = static_cast<float*>(c.workspace);
  const int parts = column_sum_parts(std::max(c.columns, c.all_columns));
  const dim3 grid(static_cast<unsigned>((c.columns + kColumns - 1) / kColumns),
                  static_cast<unsigned>(parts));
  with_type(c.dtype, [&](auto type) {
    sum_column_parts<decltype(type)><<<grid, dim3(32, kRowGroups), 0, stream>>>(c, partial);
  });
  require_cuda(cudaGetLastError(), "column sums");
  add_column_parts<<<static_cast<unsigned>((c.columns + 255) / 256), 256, 0, stream>>>(c, partial,
                                                                                       parts);
  require_cuda(cudaGetLastError(), "column sums");
}

void add_bias_smoothing(const RowCoefficients* rows, std::int64_t tokens,
                        const float* logit_weights, std::int64_t vocab_count, float* d_bias,
                        Stream stream) {
  add_gamma<<<static_cast<unsigned>((vocab_count + 255) / 256), 256, 0,
              static_cast<cudaStream_t>(stream)>>>(rows, tokens, logit_weights, vocab_count,
                                                   d_bias);
  require_cuda(cudaGetLastError(), "d_bias");
}

void clear_gradient(const GradientOutput& out, std::int64_t rows, std::int64_t columns,
                    Stream stream) {
  const std::size_t element = size_of(out.dtype);
  require_cuda(cudaMemset2DAsync(out.data, static_cast<std::size_t>(out.stride) * element, 0,
                                 static_cast<std::size_t>(columns) * element,
                                 static_cast<std::size_t>(rows), static_cast<cudaStream_t>(stream)),
               "clearing a gradient");
}

void round_sums(const float* sums, std::int64_t rows, std::int64_t columns,
                const GradientOutput& out, Stream stream, const std::int32_t* to) {
  if (rows == 0) return;
  with_type(out.dtype, [&](auto type) {
    round_rows<decltype(type)><<<static_cast<unsigned>(std::min<std::int64_t>(rows, 65535)), 256, 0,
                                 static_cast<cudaStream_t>(stream)>>>(sums, rows, columns, out, to);
  });
  require_cuda(cudaGetLastError(), "rounding");
}

}  // namespace logitless::cuda
