// Which implementation takes a call of attention.
#include "kernels/cuda/tensor/attention.h"

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

std::size_t attention_scratch_bytes(const AttentionCall& call, bool backward, int) {
  return attention_any_scratch_bytes(call, backward);
}

void attention_forward(const AttentionCall& call) { attention_any_forward(call); }

void attention_backward(const AttentionCall& call) { attention_any_backward(call); }

}  // namespace logitless::cuda
