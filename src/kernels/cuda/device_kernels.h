// The kernels that multiply: the table of device_gradient.h, and where its functions are.
#pragma once

#include "kernels/device_gradient.h"

namespace logitless::cuda {

// head_forward_sm90.cu, head_gradient_sm90.cu: with forward, of device_head.h.
void gradient_block(const BlockCall& call);
void gradient_products(const ProductsCall& call);
// What gradient_products needs of kernel_workspace for a chunk, and blocks of at most so many
// words.
std::size_t products_bytes(std::int64_t tokens, std::int64_t dim, std::int64_t words);

// far_estimate.cu: what estimate_masses needs of the words, once for all chunks: weights of words,
// and means and centroids of tiles.
void prepare_means(const ForwardCall& call);
// far_tiles.cu: centroids and means of all tiles; what is kept by the estimates, and where a target
// has more than tau, of target_logits [tokens, K].
void gather_points(const ForwardCall& call);
void select_estimated(const ForwardCall& call, const float* target_logits);

// head_cublas.cu.
std::string cublas_unsupported(const ForwardShape& shape);
std::size_t cublas_workspace_bytes(const ForwardShape& shape);
void cublas_forward(const ForwardCall& call);
void cublas_gradient_block(const BlockCall& call);
// What the gradient is times the block; of the device.
const float* cublas_block_unscale(const ForwardCall& call);
void cublas_gradient_products(const ProductsCall& call);

}  // namespace logitless::cuda
