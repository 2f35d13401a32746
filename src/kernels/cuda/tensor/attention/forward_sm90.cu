// Host side of the attention forward on Hopper: tensor maps and launches.
#include <algorithm>

#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/tensor_map.cuh"
#include "kernels/cuda/tensor/attention/attention.h"
#include "kernels/cuda/tensor/attention/forward_sm90.cuh"
#include "kernels/cuda/tensor/attention/maps_sm90.cuh"

namespace logitless::cuda {
namespace {

template <int kDim>
void launch(const AttentionCall& call) {
  using Shared = ForwardShared<kDim>;
  const AttentionArguments a = attention_arguments(call, false);
  AttentionOrder order{};
  order.heads = a.batch * a.heads;
  order.group = std::min(order.heads, processor_count());
  order.blocks = static_cast<int>(ceil_div(call.queries, Shared::kQueries));
  const auto kernel = attention_forward_kernel<kDim>;
  allow_shared(kernel, Shared::kBytes);
  kernel<<<static_cast<unsigned>(std::min(order.count(), processor_count())), 384, Shared::kBytes,
           static_cast<cudaStream_t>(call.stream)>>>(
      query_map(call, call.q, 64), key_map(call, call.k, kKeyTile), key_map(call, call.v, kKeyTile),
      query_map(call, call.result, 64), a, order);
  require_cuda(cudaGetLastError(), "attention forward");
}

}  // namespace

void attention_sm90_forward(const AttentionCall& call) {
  if (call.dim <= 64) {
    launch<64>(call);
  } else {
    launch<128>(call);
  }
}

}  // namespace logitless::cuda
