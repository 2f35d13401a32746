// Tensor maps of attention on Hopper.
#pragma once

#include "kernels/cuda/device/tensor_map.cuh"
#include "kernels/cuda/tensor/attention/attention.h"

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

}  // namespace logitless::cuda
