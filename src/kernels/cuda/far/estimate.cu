// Estimates the masses of tiles from two moments of their rows: three thin cuBLAS GEMMs, and the
// kernels between them.
//
//   log2 M_iJ ~ log2_base_J + (s x_i . mean_J + s^2 / 2 sum_a (x_i . axis_a)^2 variance_Ja) log2 e
#include <algorithm>

#include "kernels/cuda/cublas.h"
#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/numbers.cuh"
#include "kernels/cuda/far/gather.h"
#include "kernels/cuda/far/narrow_type.cuh"
#include "kernels/cuda/far/selection.cuh"
#include "kernels/cuda/head/targets.cuh"
#include "kernels/device/far.h"
#include "math/lse_state.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = static_cast<int>(kFarTile);

// A thread block for each tile, a thread for each vocabulary entry. bias by position, or null.
__global__ void __launch_bounds__(kTile)
    weigh_vocab(const float* bias, float scale, int vocab, float* weights, float* log2_base) {
  __shared__ float values[kTile];
  const int vocab_id = static_cast<int>(blockIdx.x) * kTile + static_cast<int>(threadIdx.x);
  const bool real = vocab_id < vocab;
  const float b = !real ? -INFINITY : bias == nullptr ? 0.0f : scale * bias[vocab_id];
  values[threadIdx.x] = b;
  __syncthreads();
  float top = -INFINITY;
  for (const float value : values) top = fmaxf(top, value);
  double total = 0.0;
  for (const float value : values)
    total += top > -INFINITY ? exp(static_cast<double>(value - top)) : 0.0;
  if (real)
    weights[vocab_id] =
        total > 0.0 ? static_cast<float>(exp(static_cast<double>(b - top)) / total) : 0.0f;
  if (threadIdx.x == 0)
    log2_base[blockIdx.x] =
        total > 0.0 ? static_cast<float>(top * kLog2E + log2(total)) : -INFINITY;
}

__global__ void __launch_bounds__(kThreads)
    square(const float* from, std::int64_t count, __nv_bfloat16* to) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) to[i] = __float2bfloat16(from[i] * from[i]);
}

// to [rows, dim] = hidden in bf16, the type of the axes.
__global__ void __launch_bounds__(kThreads)
    to_bf16(const __half* hidden, std::int64_t stride, std::int64_t rows, std::int64_t dim,
            __nv_bfloat16* to) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < rows * dim) to[i] = __float2bfloat16(as_float(hidden[i / dim * stride + i % dim]));
}

// Turns mass [tiles][padded] from x . mean into log2 of the estimates.
__global__ void __launch_bounds__(kThreads)
    combine(float* mass, std::int64_t padded, const float* forms, std::int64_t rows,
            const float* log2_base, float scale) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= rows) return;
  const int tile = static_cast<int>(blockIdx.y);
  float& to = mass[tile * padded + row];
  const float log2e = static_cast<float>(kLog2E);
  const float form = 0.5f * scale * scale * log2e * forms[tile * rows + row];
  to = fmaf(scale * log2e, to, form + log2_base[tile]);
}

constexpr int kRows = 32;
constexpr int kParts = 32;

// Computes total and reference of each token, and its masses relative to the reference.
__global__ void __launch_bounds__(kRows* kParts)
    set_totals(const ForwardCall c, float* mass, std::int64_t padded, int tiles, float* total,
               float* reference) {
  __shared__ float tops[kParts][kRows];
  __shared__ double sums[kParts][kRows];
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRows + threadIdx.x;
  const bool real = row < c.shape.tokens;
  float top = -INFINITY;
  for (int t = threadIdx.y; real && t < tiles; t += kParts)
    top = fmaxf(top, mass[t * padded + row]);
  tops[threadIdx.y][threadIdx.x] = top;
  __syncthreads();
  for (int p = 0; p < kParts; ++p) top = fmaxf(top, tops[p][threadIdx.x]);
  double sum = 0.0;
  for (int t = threadIdx.y; real && top > -INFINITY && t < tiles; t += kParts)
    sum += static_cast<double>(exp2f(mass[t * padded + row] - top));
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  sum = 0.0;
  for (int p = 0; p < kParts; ++p) sum += sums[p][threadIdx.x];
  const float all = top + static_cast<float>(log2(sum));
  const float exponent = real && isfinite(all) ? ceilf(all) : 0.0f;
  if (threadIdx.y == 0) {
    reference[row] = exponent;
    total[row] = real && has_target(c, row) ? all : -INFINITY;
  }
  for (int t = threadIdx.y; real && t < tiles; t += kParts)
    mass[t * padded + row] = exp2f(mass[t * padded + row] - exponent);
}

// Sums the masses of the skipped tiles.
__global__ void __launch_bounds__(kRows* kParts)
    add_masses(const float* mass, std::int64_t padded, int tiles, std::int64_t tokens,
               const std::int32_t* groups, const std::uint32_t* block_groups, int bits,
               float* far_sum) {
  __shared__ double sums[kParts][kRows];
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRows + threadIdx.x;
  const std::uint32_t* const selected = block_groups + row / kFarBlock * bits;
  double sum = 0.0;
  for (int t = threadIdx.y; row < tokens && t < tiles; t += kParts) {
    const std::int64_t own = 2 * static_cast<std::int64_t>(groups[t / 2]) + t % 2;
    if (!has_bit(selected, t / 2)) sum += static_cast<double>(mass[own * padded + row]);
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0) return;
  sum = 0.0;
  for (int p = 0; p < kParts; ++p) sum += sums[p][threadIdx.x];
  far_sum[row] = static_cast<float>(sum);
}

__global__ void set_constants(float* to) {
  to[0] = 1.0f;
  to[1] = 0.0f;
}

__global__ void __launch_bounds__(kThreads)
    sum_biases(const float* bias, const float* logit_weights, std::int64_t vocab, float* to) {
  __shared__ double parts[kThreads];
  double sum = 0.0;
  for (std::int64_t j = threadIdx.x; bias != nullptr && j < vocab; j += kThreads)
    sum += static_cast<double>(bias[j]) * (logit_weights == nullptr ? 1.0 : logit_weights[j]);
  parts[threadIdx.x] = sum;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) *to = static_cast<float>(parts[0]);
}

// A warp for each token.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    weigh_tokens(const ForwardCall c, const float* weight_sum, const float* biases) {
  const std::int64_t row = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  if (row >= c.shape.tokens) return;
  const auto* const x = static_cast<const T*>(c.hidden) + row * c.hidden_stride;
  double sum = 0.0;
  for (std::int64_t k = threadIdx.x % 32; k < c.shape.dim; k += 32)
    sum += static_cast<double>(as_float(x[k])) * static_cast<double>(weight_sum[k]);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x % 32 == 0)
    c.weighted_sum[row] =
        has_target(c, row) ? static_cast<float>(c.logit_scale * (sum + *biases)) : 0.0f;
}

constexpr int kMeasureParts = 128;
static_assert(kMeasureParts * sizeof(FarSampled) <= kFarPartials * sizeof(double));

// Sums over the threads of a block by a fixed halving tree.
__device__ FarSampled sum_of_block(const FarSampled& mine) {
  __shared__ FarSampled parts[kThreads];
  parts[threadIdx.x] = mine;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) parts[threadIdx.x].add(parts[threadIdx.x + half]);
    __syncthreads();
  }
  return parts[0];
}

// A thread for each token of a block.
__global__ void __launch_bounds__(kThreads)
    add_sampled(const SelectArguments a, const RowCoefficients* rows, FarSampled* partial) {
  static_assert(kThreads == kFarBlock);
  FarSampled mine = {};
  for (int group = blockIdx.x; group < a.groups; group += kMeasureParts) {
    const float* const off = a.mass + 2 * a.order[group] * a.padded_tokens;
    for (int block = 0; block < a.blocks; ++block) {
      if (!has_bit(a.group_blocks + group * a.block_bits, block) ||
          has_bit(a.block_groups + block * a.group_bits, group))
        continue;
      const std::int64_t token = block * kFarBlock + threadIdx.x;
      if (token >= a.tokens || rows[token].alpha == 0.0f) continue;
      const auto by = static_cast<double>(off[token]);
      mine.add({1.0, by * by, static_cast<double>(off[a.padded_tokens + token])});
    }
  }
  const FarSampled sum = sum_of_block(mine);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}
__global__ void __launch_bounds__(kThreads)
    add_sampled_parts(const FarSampled* partial, FarSums* sums) {
  const FarSampled sum =
      sum_of_block(threadIdx.x < kMeasureParts ? partial[threadIdx.x] : FarSampled{});
  if (threadIdx.x == 0) sums->of_sample.add(sum);
}

unsigned blocks_of(std::int64_t count, std::int64_t each = kThreads) {
  return static_cast<unsigned>((count + each - 1) / each);
}

}  // namespace

static_assert(kEstimateBytes == kCublasBytes);

std::string estimates_unsupported() { return cublas_missing(); }
void prepare_estimates() { cublas_prepare(); }

void prepare_means(const ForwardCall& c) {
  const FarEstimate& e = *c.far->estimate;
  set_constants<<<1, 1, 0, static_cast<cudaStream_t>(c.stream)>>>(e.constants);
  weigh_vocab<<<static_cast<unsigned>(far_tile_count(c.shape.vocab)), kTile, 0,
                static_cast<cudaStream_t>(c.stream)>>>(c.far->bias, c.logit_scale,
                                                       static_cast<int>(c.shape.vocab),
                                                       e.target_weight_sum, e.log2_base);
  require_cuda(cudaGetLastError(), "weights of the means");
  gather_points(c);
}

namespace {

// Rows of hidden in bf16: as they are, or a copy in the memory of the squares, which come later.
struct Bf16Rows {
  const void* data;
  std::int64_t stride;
};
Bf16Rows bf16_rows(const ForwardCall& c, const void* hidden, std::int64_t rows) {
  if (c.shape.dtype == DType::bf16) return {hidden, c.hidden_stride};
  void* const copy = c.far->estimate->squares;
  to_bf16<<<blocks_of(rows * c.shape.dim), kThreads, 0, static_cast<cudaStream_t>(c.stream)>>>(
      static_cast<const __half*>(hidden), c.hidden_stride, rows, c.shape.dim,
      static_cast<__nv_bfloat16*>(copy));
  require_cuda(cudaGetLastError(), "hidden states in bf16");
  return {copy, c.shape.dim};
}

}  // namespace

void estimate_masses(const ForwardCall& c) {
  const FarCall& far = *c.far;
  const FarEstimate& e = *far.estimate;
  const auto stream = static_cast<cudaStream_t>(c.stream);
  const std::int64_t dim = c.shape.dim;
  const std::int64_t tiles = far_tile_count(c.shape.vocab);
  const std::int64_t padded = padded_tokens(c.shape.tokens);
  Gemm g;
  g.k = dim;
  g.b_transposed = true;
  g.alpha = e.constants;
  g.beta = e.constants + 1;
  const std::int64_t step = estimate_rows(c.shape.tokens);
  for (std::int64_t first = 0; first < c.shape.tokens; first += step) {
    const std::int64_t rows = std::min(step, c.shape.tokens - first);
    const void* const hidden =
        static_cast<const std::uint16_t*>(c.hidden) + first * c.hidden_stride;  // 16 bits each
    const Bf16Rows x = bf16_rows(c, hidden, rows);
    g.dtype = DType::bf16;
    g.m = rows;
    g.n = dim;
    g.a = x.data;
    g.a_stride = x.stride;
    g.b = e.moments.axes;
    g.b_stride = dim;
    g.c = e.along;
    g.c_stride = dim;
    cublas_multiply(g, e.products, c.stream);
    square<<<blocks_of(rows * dim), kThreads, 0, stream>>>(e.along, rows * dim,
                                                           static_cast<__nv_bfloat16*>(e.squares));
    g.m = tiles;
    g.n = rows;
    g.a = e.moments.variance;
    g.a_stride = dim;
    g.b = e.squares;
    g.c = e.forms;
    g.c_stride = rows;
    cublas_multiply(g, e.products, c.stream);
    g.dtype = c.shape.dtype;
    g.a = e.mean;
    g.b = hidden;
    g.b_stride = c.hidden_stride;
    g.c = far.mass + first;
    g.c_stride = padded;
    cublas_multiply(g, e.products, c.stream);
    const dim3 grid(blocks_of(rows), static_cast<unsigned>(tiles));
    combine<<<grid, kThreads, 0, stream>>>(far.mass + first, padded, e.forms, rows, e.log2_base,
                                           c.logit_scale);
    require_cuda(cudaGetLastError(), "estimates of the masses");
  }
  if (tiles % 2 != 0) {
    require_cuda(cudaMemsetAsync(far.mass + tiles * padded, 0,
                                 static_cast<std::size_t>(padded) * sizeof(float), stream),
                 "masses");
  }
  set_totals<<<blocks_of(padded, kRows), dim3(kRows, kParts), 0, stream>>>(
      c, far.mass, padded, static_cast<int>(tiles), e.total, c.reference);
  require_cuda(cudaGetLastError(), "totals of the estimates");
}

void sum_far_masses(const ForwardCall& c) {
  const FarCall& far = *c.far;
  const std::int64_t padded = padded_tokens(c.shape.tokens);
  add_masses<<<blocks_of(padded, kRows), dim3(kRows, kParts), 0,
               static_cast<cudaStream_t>(c.stream)>>>(
      far.mass, padded, static_cast<int>(far_tile_count(c.shape.vocab)), c.shape.tokens, far.groups,
      far.block_groups, static_cast<int>(far_bits(far_group_count(c.shape.vocab))),
      far.estimate->far_sum);
  require_cuda(cudaGetLastError(), "sum of the far masses");
}

void measure_sample(const ForwardCall& c, const RowCoefficients* rows, double* partial) {
  auto* const parts = reinterpret_cast<FarSampled*>(partial);
  const auto stream = static_cast<cudaStream_t>(c.stream);
  add_sampled<<<kMeasureParts, kThreads, 0, stream>>>(select_arguments(c), rows, parts);
  add_sampled_parts<<<1, kThreads, 0, stream>>>(parts, c.far->sums);
  require_cuda(cudaGetLastError(), "masses of the sample");
}

void estimate_weighted_sums(const ForwardCall& c, const float* weight_sum) {
  float* const biases = c.far->estimate->constants + 2;
  const auto stream = static_cast<cudaStream_t>(c.stream);
  sum_biases<<<1, kThreads, 0, stream>>>(c.bias, c.logit_weights, c.shape.vocab, biases);
  with_narrow_type(c.shape.dtype, [&](auto type) {
    weigh_tokens<decltype(type)>
        <<<blocks_of(c.shape.tokens * 32), kThreads, 0, stream>>>(c, weight_sum, biases);
  });
  require_cuda(cudaGetLastError(), "weighted sums");
}

}  // namespace logitless::cuda
