// Sums over the tokens: sum_columns and add_bias_smoothing, for d_bias and for the terms of label
// smoothing.
//
// A sum is made in two launches. The first cuts the rows into parts and writes fp32 sums of each,
// partial [parts, columns]; the second adds the parts in fp64. The number of parts depends on sizes
// alone, so the order of the additions, and with it every bit, is the same on any GPU.
#include <algorithm>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"  // load_kernels() loads this file's kernels
#include "kernels/cuda/device/numbers.cuh"
#include "kernels/cuda/head/sizes.h"
#include "kernels/device/gradient.h"

namespace logitless::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kRowGroups = 8;  // warps of a thread block; each takes every eighth row of the part
constexpr int kColumns = 256;  // columns of a thread block
constexpr int kThreads = 256;  // of the kernels with a thread for each column
// After the sums of the row groups are in shared memory, each thread adds up one column.
static_assert(kWarp * kRowGroups == kColumns);

// partial [parts, columns]; a grid of [columns / kColumns, parts].
template <typename T>
__global__ void __launch_bounds__(kWarp* kRowGroups)
    sum_column_parts(const ColumnSumCall c, float* partial) {
  __shared__ float shared[kRowGroups][kColumns];
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kColumns;
  const std::int64_t part_rows = (c.rows + gridDim.y - 1) / gridDim.y;
  const std::int64_t begin = blockIdx.y * part_rows;
  const std::int64_t end = min(c.rows, begin + part_rows);
  float sums[kColumns / kWarp] = {};
  for (std::int64_t row = begin + threadIdx.y; row < end; row += kRowGroups) {
    const float weight = c.weights == nullptr ? 1.0f : c.weights[row * c.weight_stride];
    if (weight == 0.0f) continue;  // such a row may hold infinities or NaN
    const T* const values = static_cast<const T*>(c.matrix) + row * c.stride;
#pragma unroll
    for (int i = 0; i < kColumns / kWarp; ++i) {
      const std::int64_t column = first + i * kWarp + threadIdx.x;
      if (column < c.columns) sums[i] = fmaf(weight, as_float(values[column]), sums[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns / kWarp; ++i) shared[threadIdx.y][i * kWarp + threadIdx.x] = sums[i];
  __syncthreads();
  const int column = threadIdx.y * kWarp + threadIdx.x;
  float total = 0.0f;
  for (int g = 0; g < kRowGroups; ++g) total += shared[g][column];
  if (first + column < c.columns) partial[blockIdx.y * c.columns + first + column] = total;
}

__global__ void __launch_bounds__(kThreads)
    add_column_parts(const ColumnSumCall c, const float* partial, int parts) {
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= c.columns) return;
  double total = 0.0;
  for (int p = 0; p < parts; ++p) total += partial[p * c.columns + column];
  c.out[column] = static_cast<float>(c.add ? c.out[column] + total : total);
}

// d_bias[j] += logit_weight_j * sum of all gammas, which every thread block adds up again: so one
// launch is enough.
__global__ void __launch_bounds__(kThreads)
    add_gamma(const RowCoefficients* rows, std::int64_t tokens, const float* logit_weights,
              std::int64_t vocab_count, float* d_bias) {
  __shared__ double shared[kThreads];
  double mine = 0.0;
  for (std::int64_t i = threadIdx.x; i < tokens; i += kThreads) mine += rows[i].gamma;
  shared[threadIdx.x] = mine;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
    __syncthreads();
  }
  const std::int64_t entry = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (entry < vocab_count)
    d_bias[entry] +=
        static_cast<float>(shared[0] * (logit_weights == nullptr ? 1.0f : logit_weights[entry]));
}

unsigned thread_blocks(std::int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

}  // namespace

void sum_columns(const ColumnSumCall& c) {
  if (c.columns == 0) return;
  const auto stream = static_cast<cudaStream_t>(c.stream);
  auto* const partial = static_cast<float*>(c.workspace);
  // Some columns of a matrix get the bits that a call with all of them would give.
  const int parts = column_sum_parts(std::max(c.columns, c.all_columns));
  const dim3 grid(static_cast<unsigned>((c.columns + kColumns - 1) / kColumns),
                  static_cast<unsigned>(parts));
  with_type(c.dtype, [&](auto type) {
    sum_column_parts<decltype(type)><<<grid, dim3(kWarp, kRowGroups), 0, stream>>>(c, partial);
  });
  require_cuda(cudaGetLastError(), "launching sums over tokens");
  add_column_parts<<<thread_blocks(c.columns), kThreads, 0, stream>>>(c, partial, parts);
  require_cuda(cudaGetLastError(), "launching the second stage of sums over tokens");
}

void add_bias_smoothing(const RowCoefficients* rows, std::int64_t tokens,
                        const float* logit_weights, std::int64_t vocab_count, float* d_bias,
                        Stream stream) {
  add_gamma<<<thread_blocks(vocab_count), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      rows, tokens, logit_weights, vocab_count, d_bias);
  require_cuda(cudaGetLastError(), "launching d_bias of label smoothing");
}

}  // namespace logitless::cuda
