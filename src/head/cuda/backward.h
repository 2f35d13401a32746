// The exact gradients of a chunk on a GPU: one vocabulary block after another. Its parts serve the
// far field as well.
#pragma once

#include "head/cuda/run.h"

namespace logitless::cuda {

// Outputs of a backward for its vocabulary entries; without data: not requested.
struct VocabGradients {
  GradientOutput d_weight, d_bias;
  float* bias_sums = nullptr;  // f32: the sums that d_bias is rounded from
};

class Backward {
 public:
  // Gradients that are made together. With Sizes::weight_apart, d_weight is apart from the rest.
  enum class Part { all, rest, weight };

  // Gradients go to the caller's outputs.
  explicit Backward(const Run& run)
      : Backward(run, run.sizes.weight_apart ? Part::rest : Part::all) {}
  Backward(const Run& run, Part part);
  // Gradients of the vocabulary go to `to`. If `adds_hidden`, d_hidden already has the sums of
  // other entries.
  Backward(const Run& run, const VocabGradients& to, bool adds_hidden);

  void chunk(const ForwardCall& chunk, const ChunkPlace& place) const;
  // One vocabulary block of a chunk, from an entry on that is not saved.
  void vocab_block(const ForwardCall& chunk, std::int64_t vocab_begin,
                   const ChunkPlace& place) const;
  // Rounds d_weight and d_bias after the last chunk, and d_hidden after each.
  void round_weights() const;
  void round_hidden(const ForwardCall& chunk) const;

  TargetOrder target_order() const;
  TargetEntries target_entries() const;
  BlockCall block_call(const ForwardCall& chunk) const;
  // Returns the operands that all GEMMs of a chunk share.
  GradientGemmsCall gemms_call(const ForwardCall& chunk) const;
  // Returns the output of the chunk's d_hidden GEMMs. The first one overwrites, unless the call
  // accumulates.
  GradientOutput hidden_sums(const ForwardCall& chunk, bool first) const;
  GradientOutput weight_sums(bool first_chunk) const;
  // Computes sum_j omega_j w_j over rows of the weights, for d_hidden.
  void sum_weights(const ForwardCall& chunk, const void* rows, std::int64_t count,
                   const float* logit_weights) const;
  // Computes sum_i gamma_i x_i, for d_weight.
  void sum_hidden(const ForwardCall& chunk) const;
  // Adds the parts of targets and smoothing to d_bias.
  void add_bias_parts(const BlockCall& block, float* sums) const;

 private:
  BlockCall begin_chunk(const ForwardCall& chunk) const;
  // Returns GradientGemmsCall::fixed_tokens.
  std::int32_t fixed_tokens(const ForwardCall& chunk) const;
  bool rows_are_aligned(const ForwardCall& chunk) const;
  void* scaled_hidden(const BlockCall& block) const;
  void set_vocab_block(BlockCall& block) const;
  void run_block(BlockCall& block, const ChunkPlace& place) const;
  void products(const BlockCall& block, const ChunkPlace& place, bool first_vocab_block) const;
  RunningSums running_sums(const BlockCall& block, const ChunkPlace& place) const;
  void sum_bias(const BlockCall& block, bool first_chunk) const;

  const Run& run_;
  VocabGradients to_;
  bool hidden_;  // d_hidden is made
  bool adds_hidden_ = false;
  // If set, sums go to fp32 buffers of the workspace, which are rounded into the output at the end.
  bool round_hidden_ = false;
  bool round_weight_ = false;
};

}  // namespace logitless::cuda
