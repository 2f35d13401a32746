// Merges of far-field values that ranks exchange: a few microseconds each, small beside the GEMMs.
#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/head/targets.cuh"
#include "kernels/device/shard_far.h"
#include "math/shard_state.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ std::int64_t place() {
  return static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

__global__ void __launch_bounds__(kThreads) set_no_totals(float* totals, std::int64_t tokens) {
  if (place() < tokens) totals[place()] = -INFINITY;
}

__global__ void __launch_bounds__(kThreads)
    sum_totals(const float* all, int ranks, std::int64_t tokens, float* totals) {
  const std::int64_t token = place();
  if (token >= tokens) return;
  totals[token] = log2_of_sum(ranks, [&](int r) { return all[r * tokens + token]; });
}

__global__ void __launch_bounds__(kThreads)
    move_rows(const ForwardCall c, const float* from, int each, bool back, float* to) {
  const std::int64_t i = place();
  if (i >= c.shape.tokens * each) return;
  const std::int64_t common = token_of(c, i / each) * each + i % each;
  to[back ? common : i] = from[back ? i : common];
}

__global__ void __launch_bounds__(kThreads)
    move_records(const ForwardCall c, const TokenRecord* from, const float* weighted,
                 TokenRecord* to) {
  const std::int64_t row = place();
  if (row >= c.shape.tokens) return;
  TokenRecord record = from[row];
  if (weighted != nullptr) record.state.weighted = weighted[row];
  to[token_of(c, row)] = record;
}

// One thread block.
__global__ void __launch_bounds__(kThreads)
    sum_bounds(const float* all, int ranks, std::int64_t tokens, float* bounds, FarSums* sums) {
  __shared__ double parts[kThreads];
  double squares = 0.0;
  for (std::int64_t token = threadIdx.x; token < tokens; token += kThreads) {
    double bound = 0.0;
    for (int r = 0; r < ranks; ++r) bound += static_cast<double>(all[r * tokens + token]);
    bounds[token] = static_cast<float>(bound);
    squares += bound * bound;
  }
  parts[threadIdx.x] = squares;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) sums->bound_squared += parts[0];
}

__global__ void __launch_bounds__(kThreads)
    write_bounds(const ForwardCall c, const float* bounds, float* output) {
  const std::int64_t row = place();
  if (row < c.shape.tokens) output[token_of(c, row)] = has_target(c, row) ? bounds[row] : 0.0f;
}

// Launches kernel(arguments...) with `count` threads.
template <typename Kernel, typename... Arguments>
void launch(const char* what, Kernel kernel, std::int64_t count, Stream stream,
            const Arguments&... arguments) {
  if (count == 0) return;
  const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(arguments...);
  require_cuda(cudaGetLastError(), what);
}

}  // namespace

void no_totals(float* totals, std::int64_t tokens, Stream stream) {
  launch("totals of no vocabulary entries", set_no_totals, tokens, stream, totals, tokens);
}

void merge_totals(const float* all, int ranks, std::int64_t tokens, float* totals, Stream stream) {
  launch("totals of the ranks", sum_totals, tokens, stream, all, ranks, tokens, totals);
}

void take_rows(const ForwardCall& c, const float* from, int each, float* to) {
  launch("tokens by the tiles they keep", move_rows, c.shape.tokens * each, c.stream, c, from, each,
         false, to);
}
void put_rows(const ForwardCall& c, const float* from, int each, float* to) {
  launch("tokens in the ranks' order", move_rows, c.shape.tokens * each, c.stream, c, from, each,
         true, to);
}
void put_records(const ForwardCall& c, const TokenRecord* from, const float* weighted,
                 TokenRecord* to) {
  launch("records in the ranks' order", move_records, c.shape.tokens, c.stream, c, from, weighted,
         to);
}

void merge_bounds(const float* all, int ranks, std::int64_t tokens, float* bounds, FarSums* sums,
                  Stream stream) {
  launch("bounds of the ranks", sum_bounds, tokens > 0 ? 1 : 0, stream, all, ranks, tokens, bounds,
         sums);
}
void give_bounds(const ForwardCall& c, const float* bounds, float* output) {
  launch("bounds by token", write_bounds, c.shape.tokens, c.stream, c, bounds, output);
}

}  // namespace logitless::cuda
