// Kernel arguments of an attention call.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/device/attention.h"

namespace logitless::cuda {

// Rows [B, H, T, D] of an operand or an output.
struct AttentionRows {
  void* data;
  std::int64_t stride_b, stride_h, stride_t;
  bool aligned;  // every row starts at a multiple of 16 bytes and has a multiple of 8 elements

  template <typename T>
  __device__ __forceinline__ T* head(int b, int h) const {
    return static_cast<T*>(data) + b * stride_b + h * stride_h;
  }
};

struct AttentionArguments {
  int batch, heads, kv_heads, queries, keys, dim;
  bool causal;
  float scale;
  AttentionRows q, k, v, out, d_out, d_q, d_k, d_v;
  float* lse;
  float* delta;

  // Query t sees the keys before t + first_hidden(), and no key from `keys` on.
  __host__ __device__ int first_hidden() const { return causal ? keys - queries + 1 : keys; }
  // Number of keys that the queries before `end` see.
  __device__ __forceinline__ int keys_before(int end) const {
    return causal ? max(0, min(keys, end - 1 + first_hidden())) : keys;
  }
  // First query that sees a key from `key` on.
  __device__ __forceinline__ int first_query(int key) const {
    return causal ? max(0, key - first_hidden() + 1) : 0;
  }
  __device__ __forceinline__ bool sees(int query, int key) const {
    return key < keys && (!causal || key < query + first_hidden());
  }
};

template <typename View>
AttentionRows attention_rows(const AttentionCall& call, const View& view) {
  const auto bytes = static_cast<std::int64_t>(size_of(call.dtype));
  const auto whole = [&](std::int64_t size, std::int64_t stride) {
    return size <= 1 || stride * bytes % 16 == 0;
  };
  const bool aligned = call.dim % 8 == 0 && reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 &&
                       whole(call.batch, view.stride_b) && whole(call.heads, view.stride_h) &&
                       whole(2, view.stride_t);
  return {const_cast<void*>(view.data), view.stride_b, view.stride_h, view.stride_t, aligned};
}

inline AttentionArguments attention_arguments(const AttentionCall& call, bool backward) {
  AttentionArguments a{};
  a.batch = static_cast<int>(call.batch);
  a.heads = static_cast<int>(call.heads);
  a.kv_heads = static_cast<int>(call.kv_heads);
  a.queries = static_cast<int>(call.queries);
  a.keys = static_cast<int>(call.keys);
  a.dim = static_cast<int>(call.dim);
  a.causal = call.causal;
  a.scale = call.scale;
  a.q = attention_rows(call, call.q);
  a.k = attention_rows(call, call.k);
  a.v = attention_rows(call, call.v);
  a.lse = call.lse;
  if (!backward) {
    a.out = attention_rows(call, call.result);
    return a;
  }
  a.out = attention_rows(call, call.out);
  a.d_out = attention_rows(call, call.d_out);
  a.d_q = attention_rows(call, call.d_q);
  a.d_k = attention_rows(call, call.d_k);
  a.d_v = attention_rows(call, call.d_v);
  a.delta = static_cast<float*>(call.scratch);
  return a;
}

}  // namespace logitless::cuda
