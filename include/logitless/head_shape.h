// What a head is, before any tensor or plan: its sizes, and what is asked of it.
#pragma once

#include <cstdint>

#include "logitless/dtype.h"

namespace logitless {

// Sizes of one head: hidden [tokens, dim], weight [vocab, dim]. tokens is an upper bound for the
// calls of a plan; dim and vocab are exact. Of words spread over ranks, vocab is this rank's.
struct HeadShape {
  std::int64_t tokens = 0;
  std::int64_t dim = 0;
  std::int64_t vocab = 0;
  DType dtype = DType::f32;      // of hidden and weight: f32, bf16 or f16
  std::int64_t whole_vocab = 0;  // of all ranks; 0: vocab

  bool operator==(const HeadShape&) const = default;
};

// Everything of a call that changes the work to be done, but for the shape.
struct HeadFeatures {
  int targets_per_token = 1;  // K: 1 for class indices, more for weighted sparse targets
  bool bias = false;
  float logit_scale = 1.0f;      // s: logit = softcap(s * (x . w + b))
  float softcap = 0.0f;          // c: logit = c tanh(u / c); 0 = off
  bool label_smoothing = false;  // a term omega_j z_ij over the whole vocabulary
  bool vocab_weight = false;     // class weights, or omega
  bool entropy = false;          // entropy is asked for
  bool argmax = false;
  bool d_hidden = false;  // the gradients asked for
  bool d_weight = false;
  bool d_bias = false;
  DType d_hidden_dtype = DType::f32;
  DType d_weight_dtype = DType::f32;
  bool d_weight_strided = false;  // its rows do not follow one another without gaps
  bool entropy_gradient = false;  // a cotangent of entropy: dz has a term in p_ij z_ij
  bool accumulate = false;        // gradients are added to what the outputs hold
  int word_ranks = 0;             // that the words are spread over; 0: no sharding
  bool tokens_sharded = false;    // over the same ranks
  // Weights move: the most words of a rank, whose rows are gathered piece by piece. 0: they stay
  std::int64_t gathered_rows = 0;
  // Weights by columns move: the most columns of a rank. 0: rows move, or nothing.
  std::int64_t gathered_columns = 0;

  bool operator==(const HeadFeatures&) const = default;
};

}  // namespace logitless
