// scale_by_logits: the gradient through the entropy in a block of exponentials, bound by memory.
#include <type_traits>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"  // load_kernels() loads this file's kernels
#include "kernels/cuda/device/numbers.cuh"
#include "kernels/device/entropy_block.h"
#include "math/lse_state.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// The factor of a token's exponentials.
struct Scaling {
  __device__ Scaling(const RowCoefficients& r, float reference)
      : alpha(r.alpha / coefficient_size(r)),
        slope(r.beta / coefficient_size(r) * static_cast<float>(kLn2)),
        shift(r.less_lse(reference)) {}
  __device__ float of(float log2_p) const { return fmaf(slope, log2_p, alpha); }

  float alpha, slope;  // slope: beta, of an exponent of 2
  float shift;         // log2 p - log2 e
};

// Entries with at least this part of a token's sum get exact logits. Rounded exponentials are not
// so much larger that there could be more than kMostLeaders of them.
constexpr float kLeaderShare = 1.0f / 15;
constexpr int kMostLeaders = 16;
template <typename T>
struct Leaders {
  int count;
  int columns[kMostLeaders];
  T* at[kMostLeaders];
};

// Columns of a token's row that lie together.
template <typename T>
struct Columns {
  T* elements;
  std::int64_t count;
  int first;  // column of element 0
};

// Scales columns and lists the leaders, which have more than `least`. All threads share the
// columns, 16 bytes at a time where they are aligned.
template <typename T>
__device__ void scale_columns(const Columns<T>& columns, const Scaling& by, float least,
                              Leaders<T>& leaders) {
  constexpr int kVector = 16 / sizeof(T);
  struct alignas(16) Vector {
    T values[kVector];
  };
  const auto scaled = [&](std::int64_t j, T element) {
    const float e = as_float(element);
    if (e > least) {
      const int slot = atomicAdd(&leaders.count, 1);
      if (slot < kMostLeaders) {
        leaders.columns[slot] = columns.first + static_cast<int>(j);
        leaders.at[slot] = columns.elements + j;
      }
    }
    return rounded<T>(e == 0.0f ? 0.0f : e * by.of(__log2f(e) + by.shift));
  };
  const bool aligned = reinterpret_cast<std::uintptr_t>(columns.elements) % sizeof(Vector) == 0;
  const std::int64_t vectors = aligned ? columns.count / kVector : 0;
#pragma unroll 4
  for (std::int64_t i = threadIdx.x; i < vectors; i += kThreads) {
    Vector v = reinterpret_cast<const Vector*>(columns.elements)[i];
#pragma unroll
    for (int k = 0; k < kVector; ++k) v.values[k] = scaled(i * kVector + k, v.values[k]);
    reinterpret_cast<Vector*>(columns.elements)[i] = v;
  }
  for (std::int64_t j = vectors * kVector + threadIdx.x; j < columns.count; j += kThreads)
    columns.elements[j] = scaled(j, columns.elements[j]);
}

// Returns a logit to all lanes of a warp.
template <typename T>
__device__ float logit_of(const ForwardCall& c, std::int64_t row, std::int64_t vocab_id) {
  const T* const x = static_cast<const T*>(c.hidden) + row * c.hidden_stride;
  const T* const w = static_cast<const T*>(c.weight) + vocab_id * c.weight_stride;
  float z = 0.0f;
  for (std::int64_t k = threadIdx.x % 32; k < c.shape.dim; k += 32)
    z = fmaf(as_float(x[k]), as_float(w[k]), z);
  for (int step = 16; step > 0; step /= 2) z += __shfl_xor_sync(~0u, z, step);
  if (c.bias != nullptr) z += c.bias[vocab_id];
  return z * c.logit_scale;
}

// A thread block for each token.
template <typename T>
__global__ void __launch_bounds__(kThreads) scale_rows(const BlockCall b) {
  __shared__ Leaders<T> leaders;
  const ForwardCall& c = b.chunk;
  const std::int64_t row = blockIdx.x;
  const RowCoefficients r = b.rows[row];
  if (r.beta == 0.0f) return;  // ignored tokens too
  if (threadIdx.x == 0) leaders.count = 0;
  __syncthreads();
  const Scaling by(r, c.reference[row]);
  // fp32 exponentials have their logits.
  const float least =
      std::is_same_v<T, float> ? INFINITY : kLeaderShare * exp2f(-by.shift);  // of the sum
  if (c.ranges.count == 0) {
    T* const elements = static_cast<T*>(b.block.data) + row * b.block.stride;
    scale_columns<T>({elements, b.vocab_count, 0}, by, least, leaders);
  }
  for (int i = 0; i < c.ranges.count; ++i) {
    T* const elements = static_cast<T*>(c.ranges.data[i]) + row * c.ranges.stride(i);
    scale_columns<T>({elements, c.ranges.vocab_count(i), c.ranges.first[i]}, by, least, leaders);
  }
  __syncthreads();
  const int count = min(leaders.count, kMostLeaders);
  for (int i = static_cast<int>(threadIdx.x) / 32; i < count; i += kWarps) {
    const float z = logit_of<T>(c, row, b.vocab_begin + leaders.columns[i]);
    const float log2_p = fmaf(z, static_cast<float>(kLog2E), -r.lse_log2) - r.lse_rest;
    if (threadIdx.x % 32 == 0)
      *leaders.at[i] = rounded<T>(exp2f(log2_p - by.shift) * by.of(log2_p));
  }
}

}  // namespace

void scale_by_logits(const BlockCall& b) {
  const std::int64_t tokens = b.chunk.shape.tokens;
  if (tokens == 0) return;
  with_type(b.chunk.shape.dtype, [&](auto type) {
    scale_rows<decltype(type)>
        <<<static_cast<unsigned>(tokens), kThreads, 0, static_cast<cudaStream_t>(b.chunk.stream)>>>(
            b);
  });
  require_cuda(cudaGetLastError(), "gradients through the entropy");
}

}  // namespace logitless::cuda
