// Chooses the implementation for a call of attention.
#include "kernels/cuda/tensor/attention/attention.h"

namespace logitless::cuda {

bool attention_sm90_takes(const AttentionCall& call, bool backward) {
  // TMA's requirements on addresses and strides.
  const auto suits = [&](const auto& view, std::int64_t heads, std::int64_t rows) {
    const auto strided = [](std::int64_t size, std::int64_t stride) {
      return size == 1 || (stride > 0 && stride % 8 == 0 && stride < std::int64_t{1} << 38);
    };
    return reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 &&
           strided(call.batch, view.stride_b) && strided(heads, view.stride_h) &&
           strided(rows, view.stride_t);
  };
  if (!suits(call.q, call.heads, call.queries) || !suits(call.k, call.kv_heads, call.keys) ||
      !suits(call.v, call.kv_heads, call.keys))
    return false;
  if (!backward) return suits(call.result, call.heads, call.queries);
  return suits(call.out, call.heads, call.queries) && suits(call.d_out, call.heads, call.queries) &&
         suits(call.d_q, call.heads, call.queries) && suits(call.d_k, call.kv_heads, call.keys) &&
         suits(call.d_v, call.kv_heads, call.keys);
}

void attention_forward(const AttentionCall& call) {
  if (attention_sm90_takes_sizes(call, compute_capability(current_device())) &&
      attention_sm90_takes(call, false)) {
    attention_sm90_forward(call);
  } else {
    attention_any_forward(call);
  }
}

void attention_backward(const AttentionCall& call) {
  if (attention_sm90_takes_sizes(call, compute_capability(current_device())) &&
      attention_sm90_takes(call, true)) {
    attention_sm90_backward(call);
  } else {
    attention_any_backward(call);
  }
}

}  // namespace logitless::cuda
