// The kernels that multiply: the table of device_gradient.h, and where its functions are.
#pragma once

#include "kernels/device_gradient.h"

namespace logitless::cuda {

// forward_sm90.cu, gradient_sm90.cu: bf16, dim a multiple of 8.
//
// Why it does not take such a head; empty if it does.
std::string hopper_unsupported(const ForwardShape& shape);
// tokens / 256 x vocab / 256 tiles leave 4 bytes for each token and tile of 256 words (one float
// more for each of entropy and weighted_sum, two for argmax), and a few bytes a token.
std::size_t hopper_workspace_bytes(const ForwardShape& shape);
void hopper_forward(const ForwardCall& call);
void hopper_target_logits(const ForwardCall& call, float* logits);
// FarForward's.
void hopper_begin_forward(const ForwardCall& call);
float* hopper_own_target_logits(const ForwardCall& call);
void hopper_forward_tiles(const ForwardCall& call);
void hopper_forward_kept(const ForwardCall& call);
void hopper_gradient_block(const BlockCall& call);
void hopper_gradient_products(const ProductsCall& call);
// What hopper_gradient_products needs of kernel_workspace for a chunk, and blocks of at most so
// many words.
std::size_t hopper_products_bytes(std::int64_t tokens, std::int64_t dim, std::int64_t words);

// cublas_kernel.cu.
std::string cublas_unsupported(const ForwardShape& shape);
std::size_t cublas_workspace_bytes(const ForwardShape& shape);
void cublas_forward(const ForwardCall& call);
void cublas_gradient_block(const BlockCall& call);
// What the gradient is times the block; of the device.
const float* cublas_block_unscale(const ForwardCall& call);
void cublas_gradient_products(const ProductsCall& call);

}  // namespace logitless::cuda
