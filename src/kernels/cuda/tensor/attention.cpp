// Which implementation takes a call of attention.
#include "kernels/cuda/tensor/attention.h"

#include <algorithm>

#include "core/check.h"

namespace logitless::cuda {

std::string attention_unsupported(const AttentionCall& call, int compute_capability) {
  if (compute_capability < 80)
    return concat("attention: the device has compute capability ", compute_capability / 10, ".",
                  compute_capability % 10, ", expected 8.0 or more");
  if (call.dtype != DType::bf16 && call.dtype != DType::f16 && call.dtype != DType::f32)
    return concat("attention: expected bf16, f16 or f32, got ", name_of(call.dtype));
  if (call.dim < 1 || call.dim > 256)
    return concat("attention: dim: expected 1 to 256, got ", call.dim);
  if (call.kv_heads < 1 || call.heads % call.kv_heads != 0)
    return concat("attention: heads: expected a multiple of the ", call.kv_heads,
                  " heads of keys, got ", call.heads);
  // Places of a head's rows are 32 bits, those of blocks too.
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  for (const std::int64_t rows : {call.queries, call.keys}) {
    if (rows > kMost || call.batch * call.heads > kMost ||
        call.batch * call.heads * (rows / 8 + 1) > kMost)
      return concat("attention: expected at most ", kMost, " blocks of 8 rows, got ", call.batch,
                    " x ", call.heads, " heads of ", rows, " rows");
  }
  return {};
}

bool attention_sm90_takes_sizes(const AttentionCall& call, int compute_capability) {
  return compute_capability == 90 && call.dtype == DType::bf16 && call.dim <= 128 &&
         call.dim % 8 == 0 && call.scale > 0 && call.batch * call.heads > 0 && call.queries > 0 &&
         call.keys > 0;
}

bool attention_sm90_takes(const AttentionCall& call, bool backward) {
  // What the tensor memory accelerator asks of rows.
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

std::size_t attention_scratch_bytes(const AttentionCall& call, bool backward,
                                    int compute_capability) {
  const std::size_t any = attention_any_scratch_bytes(call, backward);
  if (!backward || !attention_sm90_takes_sizes(call, compute_capability)) return any;
  return std::max(any, attention_sm90_scratch_bytes(call));
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
