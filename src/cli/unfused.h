// The loss as one writes it without this library: fp32 logits of all tokens, softmax, three matrix
// products. The baseline of `logitless bench`, for time, memory and numbers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cli/convert.h"
#include "logitless/tensor_view.h"

namespace logitless::cli {

struct UnfusedSizes {
  std::int64_t tokens = 0;
  std::int64_t dim = 0;
  std::int64_t vocab = 0;
};

// Bytes it holds beyond inputs and gradients: the logits, and inputs that are not f32 as f32.
std::size_t unfused_workspace_bytes(const UnfusedSizes& sizes, bool converts);
// Seconds one run will take, from a small matrix product timed now.
double predict_unfused_seconds(const UnfusedSizes& sizes, int threads);
// Memory that this process can still take without swapping; 0 where unknown.
std::size_t available_bytes();

// Mean cross entropy; targets that are ignore_index count nothing.
class Unfused {
 public:
  // hidden [N, D] and weight [V, D] of f32, bf16 or f16, contiguous; targets [N]. They must outlive
  // the object if f32.
  Unfused(const ConstTensorView& hidden, const ConstTensorView& weight,
          const ConstTensorView& targets, std::int64_t ignore_index, int threads);

  // The loss; then d_hidden and d_weight hold its gradients. A target outside [0, V) throws
  // InvalidArgument.
  double run();
  // The same without gradients; what those held is lost.
  double run_loss();
  const float* d_hidden() const { return static_cast<const float*>(d_hidden_.view.data()); }
  const float* d_weight() const { return static_cast<const float*>(d_weight_.view.data()); }

 private:
  double loss(bool gradient);

  UnfusedSizes sizes_;
  std::int64_t ignore_index_;
  int threads_;
  OwnedTensor hidden_copy_, weight_copy_;
  const float* hidden_;
  const float* weight_;
  ConstTensorView targets_;
  OwnedTensor logits_, d_hidden_, d_weight_;
};

}  // namespace logitless::cli
