// d_weight of vocabulary entries that no block of tokens selects: their share of the tile's
// centroid gradient, and their targets.
#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/numbers.cuh"
#include "kernels/device/far.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;                            // columns of a thread
constexpr int kColumns = 512;                         // of a thread block
constexpr int kRows = kThreads * kVector / kColumns;  // rows at a time

template <typename T>
struct alignas(16) Vector {
  T values[kVector];
};

struct VocabArguments {
  const std::int32_t* vocab_ids;   // token ids by position
  const float* share;              // by position
  const float* logit_weights;      // logit weights by position; null: 1
  const std::int32_t* list_begin;  // list offsets of the groups
  const float* tile_gradient;      // [T, dim]
  const float* hidden_sum;         // [dim]; null: none
  TargetEntries entries;           // begin null: the GEMM's epilogue does not add targets
  const float* many;
  const void* hidden;  // in the dtype of a 16-bit output
  std::int64_t hidden_stride;
  std::int64_t dim;  // a multiple of kVector
  std::int64_t vocab;
  std::int64_t stride;  // of the output
  bool add;             // fp32 only
};

// sums += the targets' part of an entry's row, as in the epilogue of the GEMM.
template <typename T>
__device__ __forceinline__ void add_targets(float (&sums)[kVector], const VocabArguments& a,
                                            std::int32_t vocab_id, std::int64_t column) {
  const int begin = a.entries.begin[vocab_id];
  const int end = a.entries.begin[vocab_id + 1];
  if (end - begin > kFewEntries) {
    const float* const row = a.many + begin / (kFewEntries + 1) * a.dim + column;
#pragma unroll
    for (int i = 0; i < kVector; ++i) sums[i] += row[i];
    return;
  }
  for (int e = begin; e < end; ++e) {
    const float factor = a.entries.coefficients[e];
    const auto v = *reinterpret_cast<const Vector<T>*>(
        static_cast<const T*>(a.hidden) + a.entries.tokens[e] * a.hidden_stride + column);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sums[i] = fmaf(factor, as_float(v.values[i]), sums[i]);
  }
}

// A thread block for each tile and kColumns columns.
template <typename T>
__global__ void __launch_bounds__(kThreads) put_vocab(const VocabArguments a, T* d_weight) {
  if (a.list_begin[blockIdx.x / 2] != a.list_begin[blockIdx.x / 2 + 1]) return;
  const int local = static_cast<int>(threadIdx.x) * kVector % kColumns;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.y) * kColumns + local;
  if (column >= a.dim) return;
  float tile[kVector];
  float smoothing[kVector] = {};
#pragma unroll
  for (int i = 0; i < kVector; ++i) tile[i] = a.tile_gradient[blockIdx.x * a.dim + column + i];
  if (a.hidden_sum != nullptr) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) smoothing[i] = a.hidden_sum[column + i];
  }
  const std::int64_t first = blockIdx.x * kFarTile;
  const std::int64_t end = min(a.vocab, first + kFarTile);
  for (std::int64_t at = first + threadIdx.x * kVector / kColumns; at < end; at += kRows) {
    const std::int32_t vocab_id = a.vocab_ids[at];
    const float share = a.share[at];
    float sums[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) sums[i] = share * tile[i];
    if (a.hidden_sum != nullptr) {
      const float logit_weight = a.logit_weights == nullptr ? 1.0f : a.logit_weights[at];
#pragma unroll
      for (int i = 0; i < kVector; ++i) sums[i] = fmaf(logit_weight, smoothing[i], sums[i]);
    }
    if constexpr (!std::is_same_v<T, float>) {
      if (a.entries.begin != nullptr) add_targets<T>(sums, a, vocab_id, column);
    }
    auto* const to = reinterpret_cast<Vector<T>*>(d_weight + vocab_id * a.stride + column);
    if (a.add) {
      const Vector<T> before = *to;
#pragma unroll
      for (int i = 0; i < kVector; ++i) sums[i] += as_float(before.values[i]);
    }
    Vector<T> out;
#pragma unroll
    for (int i = 0; i < kVector; ++i) out.values[i] = rounded<T>(sums[i]);
    *to = out;
  }
}

}  // namespace

void put_far_vocab(const GradientGemmsCall& c) {
  const FarCall& far = *c.far.call;
  VocabArguments a{};
  a.vocab_ids = far.order.vocab_ids;
  a.share = far.order.share;
  a.logit_weights = c.logit_weights;
  a.list_begin = far.list_begin;
  a.tile_gradient = c.far.tile_gradient;
  a.hidden_sum = c.hidden_sum;
  // for f32 add_weight_targets adds them
  if (c.d_weight.dtype != DType::f32) a.entries = c.entries;
  a.many = c.entries.many;
  a.hidden = c.hidden;
  a.hidden_stride = c.hidden_stride;
  a.dim = c.dim;
  a.vocab = c.far.vocab;
  a.stride = c.d_weight.stride;
  a.add = c.d_weight.add;
  const dim3 grid(static_cast<unsigned>(far_tile_count(c.far.vocab)),
                  static_cast<unsigned>((c.dim + kColumns - 1) / kColumns));
  const auto stream = static_cast<cudaStream_t>(c.stream);
  with_type(c.d_weight.dtype, [&](auto type) {
    put_vocab<<<grid, kThreads, 0, stream>>>(a, static_cast<decltype(type)*>(c.d_weight.data));
  });
  require_cuda(cudaGetLastError(), "d_weight of far vocabulary entries");
}

}  // namespace logitless::cuda
