// What the launches of attention on Hopper share.
#pragma once

#include <algorithm>

#include "kernels/cuda/device/tensor_map.cuh"
#include "kernels/cuda/tensor/attention.h"

namespace logitless::cuda {

template <typename View>
CUtensorMap query_map(const AttentionCall& call, const View& view, int box_rows) {
  return head_map(view.data, call.batch, call.heads, call.queries, call.dim, view.stride_b,
                  view.stride_h, view.stride_t, box_rows);
}
template <typename View>
CUtensorMap key_map(const AttentionCall& call, const View& view, int box_rows) {
  return head_map(view.data, call.batch, call.kv_heads, call.keys, call.dim, view.stride_b,
                  view.stride_h, view.stride_t, box_rows);
}

// Heads whose blocks are taken before those of the next: as many as there are processors, so that
// each has blocks of like lengths, or fewer, so that head_bytes of each stay in the second-level
// cache.
inline int attention_group(const AttentionCall& call, std::int64_t head_bytes) {
  constexpr std::int64_t kCacheBytes = 36 << 20;
  const std::int64_t fitting =
      std::max<std::int64_t>(1, kCacheBytes / std::max<std::int64_t>(1, head_bytes));
  return static_cast<int>(
      std::min({fitting, static_cast<std::int64_t>(processor_count()), call.batch * call.heads}));
}

}  // namespace logitless::cuda
