// Host side of the attention backward on Hopper: scratch, tensor maps and launches.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/tensor_map.cuh"
#include "kernels/cuda/tensor/attention/attention.h"
#include "kernels/cuda/tensor/attention/backward_sm90.cuh"
#include "kernels/cuda/tensor/attention/maps_sm90.cuh"
#include "kernels/cuda/tensor/attention/sizes.h"

namespace logitless::cuda {
namespace {

template <int kDim>
void launch(const AttentionCall& call) {
  using Shared = BackwardShared<kDim>;
  const AttentionArguments a = attention_arguments(call, true);
  const auto stream = static_cast<cudaStream_t>(call.stream);
  const AttentionBackwardOffsets layout(call);
  auto* const bytes = static_cast<std::byte*>(call.scratch);
  BackwardScratch scratch{};
  scratch.reference = reinterpret_cast<float*>(bytes);
  scratch.delta = reinterpret_cast<float*>(bytes + layout.delta);
  scratch.counters = reinterpret_cast<unsigned*>(bytes + layout.counters_at);
  scratch.d_q = reinterpret_cast<float*>(bytes + layout.d_q);
  scratch.padded = static_cast<int>(layout.padded);
  const std::int64_t threads = static_cast<std::int64_t>(layout.rows) * (kDim / 8);
  prepare_backward<kDim><<<static_cast<unsigned>(ceil_div(threads, 256)), 256, 0, stream>>>(
      a, scratch, static_cast<int>(layout.counters));
  require_cuda(cudaGetLastError(), "attention backward: sums of rows");

  AttentionOrder order{};
  order.heads = a.batch * a.kv_heads;
  // A group has as many heads as there are SMs: consecutive blocks of a head do not wait for each
  // other.
  order.group = std::min(order.heads, processor_count());
  order.blocks = static_cast<int>(ceil_div(call.keys, Shared::kBlock));
  const auto kernel = attention_backward_kernel<kDim>;
  allow_shared(kernel, Shared::kBytes);
  kernel<<<static_cast<unsigned>(std::min(order.count(), processor_count())), 384, Shared::kBytes,
           stream>>>(query_map(call, call.q, Shared::kQueryTile),
                     query_map(call, call.d_out, Shared::kQueryTile),
                     key_map(call, call.k, Shared::kBlock), key_map(call, call.v, Shared::kBlock),
                     a, order, scratch, scratch.counters + layout.counters - 1);
  require_cuda(cudaGetLastError(), "attention backward");
}

}  // namespace

void attention_sm90_backward(const AttentionCall& call) {
  if (call.dim <= 64) {
    launch<64>(call);
  } else {
    launch<128>(call);
  }
}

}  // namespace logitless::cuda
