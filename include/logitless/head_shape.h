// The shape and features of a head, before any tensor or plan.
#pragma once

#include <cstdint>
#include <string_view>

#include "logitless/dtype.h"

namespace logitless {

// Sizes of one head: hidden [tokens, dim], weight [vocab, dim]. tokens is an upper bound for the
// calls of a plan; dim and vocab are exact. With a sharding, vocab is that of the local shard.
struct HeadShape {
  std::int64_t tokens = 0;
  std::int64_t dim = 0;
  std::int64_t vocab = 0;
  DType dtype = DType::f32;       // of hidden and weight: f32, bf16 or f16; f32 if they differ
  std::int64_t global_vocab = 0;  // global vocabulary; 0: vocab

  bool operator==(const HeadShape&) const = default;
};

// Products of f32 tensors on a GPU, summed in fp32 (docs/explain/losses.md). ieee: fp32. tf32:
// operands are rounded to the 10 bits after the binary point of TF32. bf16x3: operands are the sum
// of two bf16, 16 bits in all, and a product is three of bf16. Other tensors are not rounded, and
// take ieee alone.
enum class Precision : std::uint8_t { ieee = 0, tf32 = 1, bf16x3 = 2 };
constexpr std::string_view name_of(Precision precision) {
  return precision == Precision::ieee ? "ieee" : precision == Precision::tf32 ? "tf32" : "bf16x3";
}

// The features of a call that change its work, apart from the shape.
struct HeadFeatures {
  int targets_per_token = 1;  // K: 1 for class indices, more for weighted sparse targets
  bool bias = false;
  float logit_scale = 1.0f;  // s: logit = softcap(s * (x . w + b))
  float softcap = 0.0f;      // c: logit = c tanh(u / c); 0 = off
  Precision precision = Precision::ieee;
  bool label_smoothing = false;  // a term sum_j w_j z_ij over the whole vocabulary
  bool vocab_weight = false;     // class weights, or logit weights
  bool entropy = false;          // output requested
  bool argmax = false;
  bool d_hidden = false;  // gradients requested
  bool d_weight = false;
  bool d_bias = false;
  DType d_hidden_dtype = DType::f32;
  DType d_weight_dtype = DType::f32;
  bool d_weight_strided = false;  // gaps between its rows
  bool entropy_gradient = false;  // a cotangent of entropy: dz has a term in p_ij z_ij
  bool accumulate = false;        // gradients are added to what the outputs hold
  // The dtype of the one with 16 bits beside f32 (the shape's dtype); f32: both have the shape's.
  DType narrow_hidden = DType::f32;
  DType narrow_weight = DType::f32;
  int vocab_ranks = 0;          // ranks that share the vocabulary; 0: no sharding
  bool tokens_sharded = false;  // over the same ranks
  // Weight-gathered: most vocabulary entries of a rank, whose rows are gathered slice by slice. 0:
  // not gathered
  std::int64_t gathered_rows = 0;
  // Weight-gathered by columns: most columns of a rank. 0: by rows, or not at all.
  std::int64_t gathered_columns = 0;

  bool operator==(const HeadFeatures&) const = default;
};

}  // namespace logitless
