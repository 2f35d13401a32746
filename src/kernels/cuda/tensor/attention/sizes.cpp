#include "kernels/cuda/tensor/attention/sizes.h"

#include <algorithm>

#include "core/check.h"
#include "kernels/cuda/device/tile_sizes.h"
#include "kernels/cuda/tensor/attention/attention.h"
#include "kernels/device/gpu_kernels.h"

namespace logitless::cuda {
namespace {

constexpr std::size_t round_up(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

std::size_t any_scratch_bytes(const AttentionCall& call, bool backward) {
  return backward ? static_cast<std::size_t>(call.batch * call.heads * call.queries) * 4 : 0;
}

}  // namespace

AttentionBackwardOffsets::AttentionBackwardOffsets(const AttentionCall& call) {
  const int width = attention_width(call.dim), tile = attention_query_tile(width);
  padded = ceil_div(call.queries, tile) * tile;
  rows = static_cast<std::size_t>(call.batch * call.heads * padded);
  counters = rows / static_cast<std::size_t>(tile) + 1;
  delta = round_up(rows * 4);
  counters_at = 2 * delta;
  d_q = counters_at + round_up(counters * 4);
  bytes = d_q + rows * static_cast<std::size_t>(width) * 4;
}

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
  // Row indices of a head are 32 bits, and block indices too.
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
  return instruction_capability(compute_capability) == 90 && call.dtype == DType::bf16 &&
         call.dim <= 128 && call.dim % 8 == 0 && call.scale > 0 && call.batch * call.heads > 0 &&
         call.queries > 0 && call.keys > 0;
}

std::size_t attention_scratch_bytes(const AttentionCall& call, bool backward,
                                    int compute_capability) {
  const std::size_t any = any_scratch_bytes(call, backward);
  if (!backward || !attention_sm90_takes_sizes(call, compute_capability)) return any;
  return std::max(any, AttentionBackwardOffsets(call).bytes);
}

}  // namespace logitless::cuda
