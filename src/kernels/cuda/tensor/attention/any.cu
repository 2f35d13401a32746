// Attention for every dtype, shape and stride: by mma.sync where possible, otherwise by plain
// arithmetic.
//
// The backward computes the scores twice, for d_k and d_v and for d_q. So every output belongs to
// one CTA and has a fixed order of sums.
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/tensor_map.cuh"
#include "kernels/cuda/tensor/attention/attention.h"
#include "kernels/cuda/tensor/attention/mma.cuh"
#include "kernels/cuda/tensor/attention/plain.cuh"

namespace logitless::cuda {
namespace {

constexpr int kDeltaThreads = 256;

// delta [B, H, T] = sum over D of out * d_out, which the softmax gradient subtracts. `lanes`
// threads a row, a power of two up to 32, take at most 8 columns at a time.
template <typename T>
__global__ void __launch_bounds__(kDeltaThreads)
    sum_deltas(const AttentionArguments a, int lanes, float* delta) {
  const std::int64_t row =
      (std::int64_t{blockIdx.x} * kDeltaThreads + static_cast<int>(threadIdx.x)) / lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const std::int64_t rows = static_cast<std::int64_t>(a.batch) * a.heads * a.queries;
  float sum = 0.0f;
  if (row < rows) {
    const int t = static_cast<int>(row % a.queries);
    const int head = static_cast<int>(row / a.queries);
    const T* const out = a.out.head<const T>(head / a.heads, head % a.heads) + t * a.out.stride_t;
    const T* const d_out =
        a.d_out.head<const T>(head / a.heads, head % a.heads) + t * a.d_out.stride_t;
    if (sizeof(T) == 2 && a.out.aligned && a.d_out.aligned) {
      for (int c = lane * 8; c < a.dim; c += lanes * 8) {
        const uint4 x = *reinterpret_cast<const uint4*>(out + c);
        const uint4 y = *reinterpret_cast<const uint4*>(d_out + c);
#pragma unroll
        for (int i = 0; i < 8; ++i)
          sum = fmaf(as_float(reinterpret_cast<const T*>(&x)[i]),
                     as_float(reinterpret_cast<const T*>(&y)[i]), sum);
      }
    } else {
      for (int c = lane; c < a.dim; c += lanes)
        sum = fmaf(as_float(out[c]), as_float(d_out[c]), sum);
    }
  }
  for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (row < rows && lane == 0) delta[row] = sum;
}

// most_shared: largest shared memory of any call of the kernel.
template <typename Kernel>
void launch(Kernel kernel, int blocks, int threads, int shared, int most_shared,
            const AttentionArguments& a, Stream stream, const char* what) {
  if (blocks == 0) return;
  allow_shared(kernel, most_shared);
  kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads),
           static_cast<std::size_t>(shared), static_cast<cudaStream_t>(stream)>>>(a);
  require_cuda(cudaGetLastError(), what);
}

bool by_mma(const AttentionCall& call) { return call.dtype != DType::f32 && call.scale > 0; }

// Calls f(T{}, dim) with the type of the call and 64, 128 or 256 as a constant.
template <typename F>
void with_mma_shape(const AttentionCall& call, F f) {
  const auto with_dim = [&](auto type) {
    if (call.dim <= 64) {
      f(type, std::integral_constant<int, 64>());
    } else if (call.dim <= 128) {
      f(type, std::integral_constant<int, 128>());
    } else {
      f(type, std::integral_constant<int, 256>());
    }
  };
  if (call.dtype == DType::bf16) {
    with_dim(__nv_bfloat16{});
  } else {
    with_dim(__half{});
  }
}

int blocks_of(std::int64_t rows, int owned, std::int64_t batch, std::int64_t heads) {
  return static_cast<int>(ceil_div(rows, owned) * batch * heads);
}

void make_deltas(const AttentionCall& call, float* delta) {
  const std::int64_t rows = call.batch * call.heads * call.queries;
  if (rows == 0) return;
  int lanes = 1;
  while (lanes < 32 && lanes * 8 < call.dim) lanes *= 2;
  with_type(call.dtype, [&]<typename T>(T) {
    sum_deltas<T>
        <<<static_cast<unsigned>(ceil_div(rows * lanes, kDeltaThreads)), kDeltaThreads, 0,
           static_cast<cudaStream_t>(call.stream)>>>(attention_arguments(call, true), lanes, delta);
  });
  require_cuda(cudaGetLastError(), "attention: sums of out * d_out");
}

}  // namespace

void attention_any_forward(const AttentionCall& call) {
  const AttentionArguments a = attention_arguments(call, false);
  if (by_mma(call)) {
    with_mma_shape(call, [&]<typename T, typename Dim>(T, Dim) {
      launch(forward_mma<T, Dim::value>,
             blocks_of(call.queries, ForwardTiles<Dim::value>::kOwned, call.batch, call.heads),
             kMmaThreads, kForwardMmaShared<Dim::value>, kForwardMmaShared<Dim::value>, a,
             call.stream, "attention forward");
    });
    return;
  }
  with_type(call.dtype, [&]<typename T>(T) {
    launch(forward_plain<T>, blocks_of(call.queries, kPlainWarps, call.batch, call.heads),
           kPlainWarps * 32, plain_shared(a.dim), plain_shared(kPlainMaxDim), a, call.stream,
           "attention forward");
  });
}

void attention_any_backward(const AttentionCall& call) {
  const AttentionArguments a = attention_arguments(call, true);
  make_deltas(call, a.delta);
  if (by_mma(call)) {
    with_mma_shape(call, [&]<typename T, typename Dim>(T, Dim) {
      launch(key_gradients_mma<T, Dim::value>,
             blocks_of(call.keys, KeyTiles<Dim::value>::kOwned, call.batch, call.kv_heads) *
                 (Dim::value / kKeyColumns<Dim::value>),
             kMmaThreads, kKeyMmaShared<Dim::value>, kKeyMmaShared<Dim::value>, a, call.stream,
             "attention d_k, d_v");
      launch(query_gradients_mma<T, Dim::value>,
             blocks_of(call.queries, QueryTiles<Dim::value>::kOwned, call.batch, call.heads),
             kMmaThreads, kQueryMmaShared<Dim::value>, kQueryMmaShared<Dim::value>, a, call.stream,
             "attention d_q");
    });
    return;
  }
  with_type(call.dtype, [&]<typename T>(T) {
    launch(key_gradients_plain<T>, blocks_of(call.keys, kPlainWarps, call.batch, call.kv_heads),
           kPlainWarps * 32, plain_shared(a.dim), plain_shared(kPlainMaxDim), a, call.stream,
           "attention d_k, d_v");
    launch(query_gradients_plain<T>, blocks_of(call.queries, kPlainWarps, call.batch, call.heads),
           kPlainWarps * 32, plain_shared(a.dim), plain_shared(kPlainMaxDim), a, call.stream,
           "attention d_q");
  });
}

}  // namespace logitless::cuda
