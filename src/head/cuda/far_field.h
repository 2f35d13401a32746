// The far field of a call on a GPU: its order, and the forward and backward of a chunk by tile
// masses.
//
// far:  the masses of all skipped tiles form one block, 128 times thinner than the vocabulary,
// whose rows of weight are the centroids.
// near: vocabulary blocks by position, with the gradients of selected tiles and their GEMMs.
#pragma once

#include "head/cuda/backward.h"
#include "kernels/device/far.h"

namespace logitless::cuda {

class FarField {
 public:
  // Throws InvalidArgument if the call's order does not fit. May copy the order to the device.
  explicit FarField(const Run& run);
  FarField(const FarField&) = delete;
  FarField& operator=(const FarField&) = delete;

  const FarCall& call() const { return far_; }
  const DeviceOrder& order() const { return order_; }
  float* total_mass() const { return estimate_.total; }
  // Returns the audit of the call's tokens; none without a plan for one.
  FarAudit audit() const;
  // Returns all tokens in the order of blocks, and the rows of hidden of a chunk in that order.
  TargetOrder token_order() const;
  void* hidden_rows() const { return run_.at<std::byte>(run_.layout.far.hidden_rows); }

  // Computes data of all tokens: their order, and sum_j omega_j w_j.
  void begin();
  ForwardCall chunk_call(std::int64_t first, std::int64_t count) const;
  // Runs the forward. far_both selects tiles by estimates and computes only those; the backward of
  // far_backward computes all and selects by their masses.
  void forward(const ForwardCall& chunk);
  void backward(const ForwardCall& chunk, const ChunkPlace& place);
  void round_weights() const { backward_.round_weights(); }

  // Steps of a chunk of a vocabulary over ranks, which exchange what lies between them.
  void sum_all_weights() const;
  // Sorts tokens of a chunk by the tiles that their targets are in, into `rows`.
  void order_chunk(const ForwardCall& chunk, std::int32_t* rows);
  void begin_forward(const ForwardCall& chunk);
  void estimate(const ForwardCall& chunk, bool first_chunk) const;
  // Selects tiles by the estimates and their totals, and computes them. target_logits [tokens, K].
  void forward_selected_tiles(const ForwardCall& chunk, float* target_logits);
  // Computes the gradients of the local vocabulary, with this chunk's sample.
  void gradients(const ForwardCall& chunk, const ChunkPlace& place, std::int64_t sample_chunk);

 private:
  void set_estimate(const VocabOrder& order);
  void use_own_order();
  void use_arranged_order(const ForwardCall& chunk);
  void sort_chunk(const ForwardCall& chunk) const;
  float* bound() const;
  // Sets the sample of a chunk's gradients.
  void set_sample(std::int64_t chunk);
  void far_gemms(const BlockCall& block, const LogitBlock& masses) const;
  GradientGemmsCall near_call(const ForwardCall& chunk, bool first_chunk,
                              std::int64_t position) const;
  void near_gemms(const BlockCall& block, bool first_chunk) const;

  const Run& run_;
  const Backward backward_;
  FarCall far_;
  DeviceOrder order_;  // the call's order; far_ has it or an arrangement of it
  FarEstimate estimate_;
};

}  // namespace logitless::cuda
