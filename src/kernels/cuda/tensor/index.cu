// Indexed rows and elements: gather, pick, argmax, fill, and the targets of heads.
#include <type_traits>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/tensor/element.cuh"
#include "kernels/cuda/tensor/strided.cuh"
#include "kernels/device/index.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;

// A warp for each row; copies elements of type `Word`.
template <typename Word>
__global__ void __launch_bounds__(kThreads) take_kernel(const TakeCall c, std::int64_t words) {
  const auto* const table = static_cast<const Word*>(c.table);
  auto* const out = static_cast<Word*>(c.out);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t warps = std::int64_t{gridDim.x} * (kThreads / 32);
  for (std::int64_t i = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32; i < c.count;
       i += warps) {
    const std::int64_t row = index_at(c.index, c.index_dtype, i);
    const bool inside = row >= 0 && row < c.rows;
    for (std::int64_t k = lane; k < words; k += 32)
      out[i * words + k] = inside ? table[row * words + k] : Word{};
  }
}

template <typename Element, typename Int>
__global__ void __launch_bounds__(kThreads) pick_kernel(const PickCall c, std::int64_t count) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    std::int64_t at[3] = {};
    add_offsets(c.space, static_cast<Int>(i), at, c.index_strides, c.x_strides, c.out_strides);
    const std::int64_t k = index_at(c.index, c.index_dtype, at[0]);
    const bool inside = k >= 0 && k < c.size;
    static_cast<Element*>(c.out)[at[2]] =
        inside ? static_cast<const Element*>(c.x)[at[1] + k * c.step] : Element{};
  }
}
template <typename Element>
void pick(const PickCall& c, std::int64_t count) {
  const unsigned blocks = blocks_of(count, kThreads);
  if (count < std::int64_t{1} << 32) {
    pick_kernel<Element, std::uint32_t><<<blocks, kThreads, 0, stream_of(c.stream)>>>(c, count);
  } else {
    pick_kernel<Element, std::uint64_t><<<blocks, kThreads, 0, stream_of(c.stream)>>>(c, count);
  }
}

// An element of type T as a number that compares alike.
template <typename T>
__device__ auto number_of(T x) {
  if constexpr (std::is_same_v<T, double> || std::is_integral_v<T>) {
    return x;
  } else {
    return as_float(x);
  }
}

// The first of the largest elements so far, or the first NaN.
template <typename Number>
struct Largest {
  Number value = 0;
  std::int64_t at = -1;  // -1: none yet

  // Takes an element behind those so far.
  __device__ void take(Number x, std::int64_t k) {
    if (at >= 0 && (x <= value || value != value)) return;
    value = x;
    at = k;
  }
};
template <typename Number>
__device__ Largest<Number> larger(const Largest<Number>& a, const Largest<Number>& b) {
  if (a.at < 0) return b;
  if (b.at < 0) return a;
  const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
  if (a_nan != b_nan) return a_nan ? a : b;
  if (!a_nan && a.value != b.value) return a.value > b.value ? a : b;
  return a.at < b.at ? a : b;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) largest_kernel(const ArgMaxCall c, std::int64_t count) {
  using Number = decltype(number_of(T{}));
  constexpr int kLoads = 8;  // in flight
  __shared__ Largest<Number> found[kThreads];
  for (std::int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    const T* const x = static_cast<const T*>(c.x) + offset_of(c.space, c.x_strides, i);
    Largest<Number> best;
    for (std::int64_t k = threadIdx.x; k < c.size; k += kLoads * kThreads) {
      Number numbers[kLoads];
#pragma unroll
      for (int j = 0; j < kLoads; ++j)
        numbers[j] = number_of(x[min(k + j * kThreads, c.size - 1) * c.step]);
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        if (k + j * kThreads < c.size) best.take(numbers[j], k + j * kThreads);
      }
    }
    found[threadIdx.x] = best;
    __syncthreads();
    for (int half = kThreads / 2; half > 0; half /= 2) {
      if (static_cast<int>(threadIdx.x) < half)
        found[threadIdx.x] = larger(found[threadIdx.x], found[threadIdx.x + half]);
      __syncthreads();
    }
    if (threadIdx.x == 0)
      c.out[offset_of(c.space, c.out_strides, i)] = found[0].at < 0 ? 0 : found[0].at;
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kThreads) fill_kernel(const FillCall c, std::int64_t count) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step)
    store(c.out, c.dtype, offset_of(c.space, c.out_strides, i), c.number);
}

bool is_contiguous(const StridedSpace& space, const Strides& strides) {
  std::int64_t expected = 1;
  for (int d = space.rank - 1; d >= 0; --d) {
    if (space.sizes[d] != 1 && strides.of[d] != expected) return false;
    expected *= space.sizes[d];
  }
  return true;
}

__global__ void __launch_bounds__(kThreads) head_targets_kernel(const HeadTargetsCall c) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < c.tokens;
       i += step) {
    const std::int64_t vocab_id = index_at(c.targets, c.dtype, i);
    const bool hits = vocab_id >= 0 && vocab_id < c.vocab;
    c.vocab_ids[i] = c.has_ignored && vocab_id == c.ignored ? -1 : hits ? vocab_id : 0;
    if (c.d_logit != nullptr) c.deltas[i] = hits ? c.d_logit[i] : 0.0f;
  }
}
__global__ void __launch_bounds__(kThreads)
    clear_missing_kernel(const HeadTargetsCall c, float* logit) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < c.tokens;
       i += step) {
    const std::int64_t vocab_id = index_at(c.targets, c.dtype, i);
    if (vocab_id < 0 || vocab_id >= c.vocab) logit[i] = 0.0f;
  }
}

}  // namespace

void take_rows(const TakeCall& c) {
  if (c.count == 0 || c.row_bytes == 0) return;
  const auto places = reinterpret_cast<std::uintptr_t>(c.table) |
                      reinterpret_cast<std::uintptr_t>(c.out) |
                      static_cast<std::uintptr_t>(c.row_bytes);
  const unsigned blocks = blocks_of(c.count, kThreads / 32);
  cudaStream_t const stream = stream_of(c.stream);
  if (places % 16 == 0) {
    take_kernel<uint4><<<blocks, kThreads, 0, stream>>>(c, c.row_bytes / 16);
  } else if (places % 4 == 0) {
    take_kernel<std::uint32_t><<<blocks, kThreads, 0, stream>>>(c, c.row_bytes / 4);
  } else {
    take_kernel<std::uint8_t><<<blocks, kThreads, 0, stream>>>(c, c.row_bytes);
  }
  require_cuda(cudaGetLastError(), "take");
}

void pick_elements(const PickCall& c) {
  const std::int64_t count = count_of(c.space);
  if (count == 0) return;
  switch (c.element_bytes) {
    case 1:
      pick<std::uint8_t>(c, count);
      break;
    case 2:
      pick<std::uint16_t>(c, count);
      break;
    case 4:
      pick<std::uint32_t>(c, count);
      break;
    default:
      pick<std::uint64_t>(c, count);
  }
  require_cuda(cudaGetLastError(), "pick");
}

void find_largest(const ArgMaxCall& c) {
  const std::int64_t count = count_of(c.space);
  if (count == 0) return;
  const auto launch = [&](auto element) {
    largest_kernel<decltype(element)>
        <<<blocks_of(count, 1), kThreads, 0, stream_of(c.stream)>>>(c, count);
  };
  switch (c.dtype) {
    case DType::f32:
      launch(float{});
      break;
    case DType::f64:
      launch(double{});
      break;
    case DType::bf16:
      launch(__nv_bfloat16{});
      break;
    case DType::f16:
      launch(__half{});
      break;
    case DType::i32:
      launch(std::int32_t{});
      break;
    case DType::i64:
      launch(std::int64_t{});
      break;
    case DType::i8:
      launch(std::int8_t{});
      break;
  }
  require_cuda(cudaGetLastError(), "argmax");
}

void fill_elements(const FillCall& c) {
  const std::int64_t count = count_of(c.space);
  if (count == 0) return;
  if (c.number == 0.0 && is_contiguous(c.space, c.out_strides)) {
    require_cuda(cudaMemsetAsync(c.out, 0, static_cast<std::size_t>(count) * size_of(c.dtype),
                                 stream_of(c.stream)),
                 "fill");
    return;
  }
  fill_kernel<<<blocks_of(count, kThreads), kThreads, 0, stream_of(c.stream)>>>(c, count);
  require_cuda(cudaGetLastError(), "fill");
}

void head_targets(const HeadTargetsCall& c) {
  if (c.tokens == 0) return;
  head_targets_kernel<<<blocks_of(c.tokens, kThreads), kThreads, 0, stream_of(c.stream)>>>(c);
  require_cuda(cudaGetLastError(), "head's targets");
}
void clear_missing_logits(const HeadTargetsCall& c, float* logit) {
  if (c.tokens == 0) return;
  clear_missing_kernel<<<blocks_of(c.tokens, kThreads), kThreads, 0, stream_of(c.stream)>>>(c,
                                                                                            logit);
  require_cuda(cudaGetLastError(), "head's logits");
}

}  // namespace logitless::cuda
