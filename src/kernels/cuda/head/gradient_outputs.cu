// Writes gradients into the caller's tensors: zero_gradient, round_sums (fp32 sums cast to the
// tensor's dtype) and scale_gradients (times the upstream gradient of the loss). And the cast the
// other way, widen_rows.
#include <algorithm>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"  // load_kernels() loads this file's kernels
#include "kernels/cuda/device/numbers.cuh"
#include "kernels/device/gradient.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kScaleLoads = 4;  // 16-byte loads of a thread in flight
// Thread blocks of a launch that scales: those that an H100 or H200 runs at a time, 8 on each of
// its 132 SMs. More would only wait.
constexpr std::int64_t kMostScaleBlocks = std::int64_t{132} * 8;
constexpr std::int64_t kMostRowBlocks = 65535;  // thread blocks of round_rows, a row each at a time

// A thread block for each row at a time. output_rows: row of out for each row of sums; null: equal.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    round_rows(const float* sums, std::int64_t rows, std::int64_t columns, const GradientOutput out,
               const std::int32_t* output_rows) {
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const std::int64_t output_row = output_rows == nullptr ? row : output_rows[row];
    T* const to = static_cast<T*>(out.data) + output_row * out.stride;
    for (std::int64_t c = threadIdx.x; c < columns; c += kThreads) {
      const float value = sums[row * columns + c];
      to[c] = rounded<T>(out.add ? as_float(to[c]) + value : value);
    }
  }
}

constexpr int kWiden = 8;  // adjacent elements of a thread, 16 bytes of 16 bits

// to [rows, columns], a thread for kWiden columns of some rows. aligned: all rows of both begin at
// multiples of 16 bytes, and end at multiples of kWiden columns.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    widen(const T* from, std::int64_t stride, std::int64_t rows, std::int64_t columns, float* to,
          bool aligned) {
  struct alignas(16) Pack {
    T values[kWiden];
  };
  const std::int64_t first = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWiden;
  if (first >= columns) return;
  for (std::int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const T* const x = from + row * stride + first;
    float* const y = to + row * columns + first;
    if (!aligned) {
      for (int i = 0; i < kWiden && first + i < columns; ++i) y[i] = as_float(x[i]);
      continue;
    }
    const Pack pack = *reinterpret_cast<const Pack*>(x);
#pragma unroll
    for (int i = 0; i < kWiden; i += 4) {
      *reinterpret_cast<float4*>(y + i) =
          make_float4(as_float(pack.values[i]), as_float(pack.values[i + 1]),
                      as_float(pack.values[i + 2]), as_float(pack.values[i + 3]));
    }
  }
}

// Multiplies a gradient in place. Aligned rows go in packs of 16 bytes, which thread blocks take
// kThreads * kScaleLoads at a time; the rest of each row, or all of an unaligned one, goes element
// by element.
template <typename T>
__device__ void scale_rows(const ScaleCall::Gradient& g, float factor) {
  constexpr int kPack = 16 / static_cast<int>(sizeof(T));
  const bool aligned = reinterpret_cast<std::uintptr_t>(g.out.data) % 16 == 0 &&
                       (g.rows == 1 || g.out.stride % kPack == 0);
  const std::int64_t packs = aligned ? g.columns / kPack : 0;  // of a row
  constexpr std::int64_t kPart = kThreads * kScaleLoads;
  const std::int64_t parts = (packs + kPart - 1) / kPart;
  for (std::int64_t i = blockIdx.x; i < g.rows * parts; i += gridDim.x) {
    auto* const row =
        reinterpret_cast<uint4*>(static_cast<T*>(g.out.data) + i / parts * g.out.stride);
    const std::int64_t first = i % parts * kPart + threadIdx.x;
    uint4 packed[kScaleLoads];
#pragma unroll
    for (int k = 0; k < kScaleLoads; ++k) {
      if (first + k * kThreads < packs) packed[k] = row[first + k * kThreads];
    }
#pragma unroll
    for (int k = 0; k < kScaleLoads; ++k) {
      if (first + k * kThreads >= packs) continue;
      T* const values = reinterpret_cast<T*>(&packed[k]);
#pragma unroll
      for (int j = 0; j < kPack; ++j) values[j] = rounded<T>(as_float(values[j]) * factor);
      row[first + k * kThreads] = packed[k];
    }
  }
  const std::int64_t rest = g.columns - packs * kPack;
  const std::int64_t threads = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < g.rows * rest;
       i += threads) {
    T& value = static_cast<T*>(g.out.data)[i / rest * g.out.stride + packs * kPack + i % rest];
    value = rounded<T>(as_float(value) * factor);
  }
}

__global__ void __launch_bounds__(kThreads) scale_all(const ScaleCall call) {
  const float factor = *call.factor;
  if (factor == 1.0f) return;  // the usual case, as of loss.backward()
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
    if (g.out.stride == g.columns) {  // contiguous: one long row has one unaligned tail
      g.columns *= g.rows;
      g.rows = 1;
    }
    const std::int64_t bytes = g.rows * g.columns * static_cast<std::int64_t>(size_of(g.out.dtype));
    blocks = std::max(blocks, bytes / (kThreads * 16 * kScaleLoads));
  }
  scale_all<<<static_cast<unsigned>(std::min(blocks, kMostScaleBlocks)), kThreads, 0,
              static_cast<cudaStream_t>(c.stream)>>>(c);
  require_cuda(cudaGetLastError(), "launching the scaling of gradients");
}

void zero_gradient(const GradientOutput& out, std::int64_t rows, std::int64_t columns,
                   Stream stream) {
  const std::size_t element = size_of(out.dtype);
  require_cuda(cudaMemset2DAsync(out.data, static_cast<std::size_t>(out.stride) * element, 0,
                                 static_cast<std::size_t>(columns) * element,
                                 static_cast<std::size_t>(rows), static_cast<cudaStream_t>(stream)),
               "zeroing a gradient");
}

void round_sums(const float* sums, std::int64_t rows, std::int64_t columns,
                const GradientOutput& out, Stream stream, const std::int32_t* to) {
  if (rows == 0) return;
  with_type(out.dtype, [&](auto type) {
    round_rows<decltype(type)><<<static_cast<unsigned>(std::min(rows, kMostRowBlocks)), kThreads, 0,
                                 static_cast<cudaStream_t>(stream)>>>(sums, rows, columns, out, to);
  });
  require_cuda(cudaGetLastError(), "launching the cast of a gradient's sums");
}

void widen_rows(const void* from, DType dtype, std::int64_t stride, std::int64_t rows,
                std::int64_t columns, float* to, Stream stream) {
  if (rows == 0) return;
  const bool aligned = reinterpret_cast<std::uintptr_t>(from) % 16 == 0 && stride % kWiden == 0 &&
                       columns % kWiden == 0;
  constexpr std::int64_t kPart = std::int64_t{kThreads} * kWiden;
  const dim3 grid(static_cast<unsigned>((columns + kPart - 1) / kPart),
                  static_cast<unsigned>(std::min(rows, kMostRowBlocks)));
  const auto launch = [&](auto type) {
    using T = decltype(type);
    widen<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(from), stride, rows, columns, to, aligned);
  };
  dtype == DType::bf16 ? launch(__nv_bfloat16{}) : launch(__half{});
  require_cuda(cudaGetLastError(), "launching the cast of 16-bit rows");
}

}  // namespace logitless::cuda
