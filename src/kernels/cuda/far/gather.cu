// Gathers rows of weights and tokens by their orders, and computes centroids of tiles.
#include <utility>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/numbers.cuh"
#include "kernels/cuda/far/gather.h"
#include "kernels/cuda/far/narrow_type.cuh"
#include "kernels/device/far.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;     // elements of a 16-byte load
constexpr int kColumns = 512;  // of a thread block
constexpr int kRowGroups = kThreads * kVector / kColumns;

template <typename T>
struct alignas(16) Vector {
  T values[kVector];
};

template <typename T>
struct GatherArguments {
  const std::int32_t*
      vocab_ids;       // token ids from the block's first position on; null: the identity
  const float* share;  // by position, likewise
  const T* weight;
  std::int64_t stride;
  T* rows;               // null: no copy
  T* centroid;           // from the block's first tile on; null: not wanted
  const float* weights;  // weights of the mean, as share for the centroid
  T* mean;               // null: not wanted
  std::int64_t dim;
  int count;  // entries of the vocabulary block
  const int* wanted;
  const std::int32_t* list_begin;  // from the block's first group on; null: all groups
};

// A thread block for each tile and kColumns columns.
template <typename T>
__global__ void __launch_bounds__(kThreads) gather_tile(const GatherArguments<T> a) {
  __shared__ float parts[kRowGroups][kColumns];
  if (a.wanted != nullptr && *a.wanted == 0) return;
  if (a.list_begin != nullptr && a.list_begin[blockIdx.x / 2] == a.list_begin[blockIdx.x / 2 + 1])
    return;
  const int group = static_cast<int>(threadIdx.x) * kVector / kColumns;
  const int local = static_cast<int>(threadIdx.x) * kVector % kColumns;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.y) * kColumns + local;
  const int first = static_cast<int>(blockIdx.x * kFarTile);
  const int end = min(a.count, first + static_cast<int>(kFarTile));
  float sums[kVector] = {};
  float means[kVector] = {};
  if (column < a.dim) {
#pragma unroll 8
    for (int row = first + group; row < end; row += kRowGroups) {
      const std::int64_t vocab_id = a.vocab_ids == nullptr ? row : a.vocab_ids[row];
      const auto v = *reinterpret_cast<const Vector<T>*>(a.weight + vocab_id * a.stride + column);
      if (a.rows != nullptr) *reinterpret_cast<Vector<T>*>(a.rows + row * a.dim + column) = v;
      if (a.centroid == nullptr) continue;
      const float share = a.share[row];
#pragma unroll
      for (int i = 0; i < kVector; ++i) sums[i] = fmaf(share, as_float(v.values[i]), sums[i]);
      if (a.mean == nullptr) continue;
      const float weight = a.weights[row];
#pragma unroll
      for (int i = 0; i < kVector; ++i) means[i] = fmaf(weight, as_float(v.values[i]), means[i]);
    }
  }
  if (a.centroid == nullptr) return;
  const auto put = [&](const float(&values)[kVector], T* to) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kVector; ++i) parts[group][local + i] = values[i];
    __syncthreads();
    for (int c = static_cast<int>(threadIdx.x); c < kColumns; c += kThreads) {
      const std::int64_t at = static_cast<std::int64_t>(blockIdx.y) * kColumns + c;
      float sum = 0.0f;
      for (int g = 0; g < kRowGroups; ++g) sum += parts[g][c];
      if (at < a.dim) to[blockIdx.x * a.dim + at] = rounded<T>(sum);
    }
  };
  put(sums, a.centroid);
  if (a.mean != nullptr) put(means, a.mean);
}

__device__ float warp_sum(float v) {
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step);
  return v;
}

// Rows of a tile that a thread block measures, a warp for each.
constexpr int kMeasured = kThreads / 32;

// A thread block for each tile and kMeasured rows of it. atomicMax of the squared distance from the
// centroid into `radius`, initially 0: non-negative floats, and NaN above all, compare like
// integers. `groups` [2 groups]: the tiles' groups.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    measure_tile(const GatherArguments<T> a, const std::int32_t* groups, float* radius,
                 float* distance) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto row =
      static_cast<int>(blockIdx.x * kFarTile + blockIdx.y * kMeasured + threadIdx.x / 32);
  if (row >= a.count) return;
  const T* const centroid = a.centroid + blockIdx.x * a.dim;
  const std::int64_t vocab_id = a.vocab_ids == nullptr ? row : a.vocab_ids[row];
  float sum = 0.0f;
  float norm = 0.0f;
#pragma unroll 4
  for (std::int64_t c = lane * kVector; c < a.dim; c += 32 * kVector) {
    const auto v = *reinterpret_cast<const Vector<T>*>(a.weight + vocab_id * a.stride + c);
    const auto m = *reinterpret_cast<const Vector<T>*>(centroid + c);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float middle = as_float(m.values[i]);
      const float off = as_float(v.values[i]) - middle;
      sum = fmaf(off, off, sum);
      norm = fmaf(middle, middle, norm);
    }
  }
  sum = warp_sum(sum);
  norm = warp_sum(norm);
  if (lane > 0) return;
  const std::int64_t tile = 2 * groups[blockIdx.x / 2] + blockIdx.x % 2;
  atomicMax(reinterpret_cast<int*>(radius) + tile, __float_as_int(fabsf(sum)));
  if (row == static_cast<int>(blockIdx.x * kFarTile)) distance[tile] = sqrtf(norm);
}
__global__ void __launch_bounds__(kThreads)
    finish_radii(const std::int32_t* groups, int tiles, float* radius) {
  const int place = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (place >= tiles) return;
  float& of = radius[2 * groups[place / 2] + place % 2];
  of = sqrtf(of);
}

__global__ void __launch_bounds__(kThreads)
    gather_floats(const std::int32_t* vocab_ids, const float* from, std::int64_t count, float* to) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) to[i] = from[vocab_ids[i]];
}

template <typename T>
const void* gather_block_of(const ForwardCall& c, const FarVocabBlock& vocab_block, GatherPart part,
                            const int* wanted) {
  const FarCall& far = *c.far;
  const auto* const weight = static_cast<const T*>(c.weight);
  GatherArguments<T> a{};
  a.dim = c.shape.dim;
  a.count = static_cast<int>(vocab_block.vocab_count);
  a.wanted = wanted;
  a.stride = c.weight_stride;
  a.share = far.order.share + vocab_block.first;
  if (far.groups != nullptr) a.list_begin = far.list_begin + vocab_block.first / kFarGroup;
  const void* rows = far.gathered;
  if (far.order.identity) {
    rows = a.weight = weight + vocab_block.first * c.weight_stride;
  } else {
    a.weight = weight;
    a.vocab_ids = far.order.vocab_ids + vocab_block.first;
    a.rows = static_cast<T*>(far.gathered);
  }
  auto* const centroid = static_cast<T*>(far.centroid) + vocab_block.first / kFarTile * c.shape.dim;
  if (part == GatherPart::centroids) a.centroid = centroid;
  const auto stream = static_cast<cudaStream_t>(c.stream);
  const dim3 grid(static_cast<unsigned>(far_tile_count(vocab_block.vocab_count)),
                  static_cast<unsigned>((c.shape.dim + kColumns - 1) / kColumns));
  if (a.rows != nullptr || a.centroid != nullptr) gather_tile<<<grid, kThreads, 0, stream>>>(a);
  if (part == GatherPart::radii) {
    a.centroid = centroid;
    const std::int32_t* const groups = far.groups + vocab_block.first / kFarGroup;
    if (vocab_block.first == 0)
      require_cuda(
          cudaMemsetAsync(far.radius, 0,
                          static_cast<std::size_t>(far_tile_count(c.shape.vocab)) * 4, stream),
          "radii of the tiles");
    measure_tile<<<dim3(grid.x, kFarTile / kMeasured), kThreads, 0, stream>>>(a, groups, far.radius,
                                                                              far.distance);
    finish_radii<<<(grid.x + kThreads - 1) / kThreads, kThreads, 0, stream>>>(
        groups, static_cast<int>(grid.x), far.radius);
  }
  require_cuda(cudaGetLastError(), "rows of the weights by position");
  return rows;
}

template <typename T>
void gather_tokens_of(const ForwardCall& c, const void* hidden, std::int64_t stride, void* to) {
  GatherArguments<T> a{};
  a.vocab_ids = c.rows + c.first_token;
  a.weight = static_cast<const T*>(hidden);
  a.stride = stride;
  a.rows = static_cast<T*>(to);
  a.dim = c.shape.dim;
  a.count = static_cast<int>(c.shape.tokens);
  const dim3 grid(static_cast<unsigned>(far_tile_count(c.shape.tokens)),
                  static_cast<unsigned>((c.shape.dim + kColumns - 1) / kColumns));
  gather_tile<<<grid, kThreads, 0, static_cast<cudaStream_t>(c.stream)>>>(a);
  require_cuda(cudaGetLastError(), "hidden states in the tokens' order");
}

template <typename T>
void gather_points_of(const ForwardCall& c) {
  const FarCall& far = *c.far;
  GatherArguments<T> a{};
  a.vocab_ids = far.order.identity ? nullptr : far.order.vocab_ids;
  a.share = far.order.share;
  a.weight = static_cast<const T*>(c.weight);
  a.stride = c.weight_stride;
  a.centroid = static_cast<T*>(far.centroid);
  a.weights = far.estimate->target_weight_sum;
  a.mean = static_cast<T*>(far.estimate->mean);
  a.dim = c.shape.dim;
  a.count = static_cast<int>(c.shape.vocab);
  const dim3 grid(static_cast<unsigned>(far_tile_count(c.shape.vocab)),
                  static_cast<unsigned>((c.shape.dim + kColumns - 1) / kColumns));
  gather_tile<<<grid, kThreads, 0, static_cast<cudaStream_t>(c.stream)>>>(a);
  require_cuda(cudaGetLastError(), "centroids and means");
}

}  // namespace

const void* gather_block(const ForwardCall& c, const FarVocabBlock& vocab_block, GatherPart part,
                         const int* wanted) {
  const void* rows = nullptr;
  with_narrow_type(c.shape.dtype, [&](auto type) {
    rows = gather_block_of<decltype(type)>(c, vocab_block, part, wanted);
  });
  return rows;
}

void gather_tokens(const ForwardCall& c, const void* hidden, std::int64_t stride, void* to) {
  if (c.shape.tokens == 0) return;
  with_narrow_type(c.shape.dtype,
                   [&](auto type) { gather_tokens_of<decltype(type)>(c, hidden, stride, to); });
}

void gather_points(const ForwardCall& c) {
  with_narrow_type(c.shape.dtype, [&](auto type) { gather_points_of<decltype(type)>(c); });
}

void gather_vectors(const ForwardCall& c) {
  const FarCall& far = *c.far;
  const auto blocks = static_cast<unsigned>((c.shape.vocab + kThreads - 1) / kThreads);
  for (const auto& [from, to] :
       {std::pair{c.bias, far.bias}, {c.logit_weights, far.logit_weights}}) {
    if (from == nullptr || to == nullptr) continue;
    gather_floats<<<blocks, kThreads, 0, static_cast<cudaStream_t>(c.stream)>>>(
        far.order.vocab_ids, from, c.shape.vocab, to);
    require_cuda(cudaGetLastError(), "bias and logit weights by position");
  }
}

}  // namespace logitless::cuda
