// Where things lie in the workspaces of the head's kernels. No CUDA: plans are made without a
// device, and in a build without CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device_gradient.h"
#include "math/host_device.h"

namespace logitless::cuda {

// Offsets in bytes of the workspace of Hopper's forward.
struct HopperLayout {
  explicit HopperLayout(const ForwardShape& shape);

  std::int64_t rows, token_pairs, word_tiles;
  std::size_t total = 0;
  std::size_t reference, target_logits, active, repair, sums, entropy, weighted, best, best_index;

 private:
  std::size_t take(std::int64_t bytes);
};

// Of Hopper's products.
inline constexpr int kFinish = 5;    // steps of d_weight that the end of a tile takes as long as
inline constexpr int kStretch = 16;  // steps of d_hidden between two looks at the others
constexpr LOGITLESS_HOST_DEVICE int stretches_of(int steps) {
  return (steps + kStretch - 1) / kStretch;
}
// Parts of d_hidden: more than one where its tiles are so few and so long that the clusters with
// none would be done with d_weight before them. From sizes alone, for 66 clusters (an H200).
int hopper_hidden_parts(std::int64_t tokens, std::int64_t dim);
// Counters of Pace, whatever the number of multiprocessors.
std::size_t hopper_pace_bytes(std::int64_t tokens, std::int64_t dim, std::int64_t words);
// Of so many parts.
std::size_t hopper_products_bytes(std::int64_t tokens, std::int64_t dim, std::int64_t words,
                                  int parts);

// Offsets in bytes of the workspace of the head by cuBLAS.
struct CublasLayout {
  explicit CublasLayout(const ForwardShape& shape);

  std::int64_t stride;
  std::size_t total = 0;
  std::size_t scalars, gemm, tops, inverse_sums, logits;

 private:
  std::size_t take(std::int64_t bytes);
};
// Why cuBLAS takes no such head; empty if it does, where it is.
std::string cublas_refuses(const ForwardShape& shape);

// Of the losses: threads of a block, one token each; and what each block sums up.
inline constexpr int kLossThreads = 256;
struct LossSums {
  double loss, lse, log_prob;
  long long valid, correct;
};
int loss_blocks(std::int64_t tokens);

// Runs of rows that column sums are summed in, apart: many where there are few columns.
int column_sum_parts(std::int64_t columns);

}  // namespace logitless::cuda
