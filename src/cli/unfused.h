// The unfused loss, as written without this library: fp32 logits of all tokens, softmax, three
// GEMMs. It is the baseline of `logitless bench` for time, memory and results.
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

// Returns the bytes beyond inputs and gradients: the logits, and f32 copies of inputs in other
// dtypes.
std::size_t unfused_workspace_bytes(const UnfusedSizes& sizes, bool converts);
// Predicts the seconds of one run from a small GEMM that it times.
double predict_unfused_seconds(const UnfusedSizes& sizes, int threads);
// Returns the memory that this process can still take without swapping; 0 where unknown.
std::size_t available_bytes();

// Mean cross entropy; targets equal to ignore_index do not count.
class Unfused {
 public:
  // hidden [N, D] and weight [V, D] of f32, bf16 or f16, contiguous; targets [N]. f32 tensors must
  // outlive the object.
  Unfused(const ConstTensorView& hidden, const ConstTensorView& weight,
          const ConstTensorView& targets, std::int64_t ignore_index, int threads);

  // Computes the loss and its gradients, d_hidden and d_weight. Throws InvalidArgument for a target
  // outside [0, V).
  double run();
  // Computes the loss without gradients; earlier gradients are lost.
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

// --- gemm.cpp: a plain blocked GEMM in f32

// A matrix in memory; element (i, j) is data[i * row_stride + j * col_stride].
struct Matrix {
  const float* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
};

inline Matrix row_major(const float* data, std::int64_t rows, std::int64_t cols) {
  return {data, rows, cols, cols, 1};
}
inline Matrix transposed(Matrix m) { return {m.data, m.cols, m.rows, m.col_stride, m.row_stride}; }

// Computes c = a b; c is [a.rows, b.cols], row-major. Blocks are packed for the caches; the SIMD
// width is the processor's.
void gemm(Matrix a, Matrix b, float* c, int threads);

}  // namespace logitless::cli
