// Head kernels on GPUs: functions of the kernel table in device_gradient.h, and their files.
#pragma once

#include "kernels/device_gradient.h"

namespace logitless::cuda {

// forward_sm90.cu, gradient_sm90.cu: bf16, dim a multiple of 8.
//
// Returns why such a head is not supported, or empty.
std::string hopper_unsupported(const ForwardShape& shape);
// tokens / 256 x vocab / 256 tiles write 4 bytes for each token and tile of 256 entries, plus a few
// bytes a token. Entropy and weighted_sum add a float each, argmax two.
std::size_t hopper_workspace_bytes(const ForwardShape& shape);
void hopper_forward(const ForwardCall& call);
void hopper_target_logits(const ForwardCall& call, float* logits);
// Stages of FarForward.
void hopper_begin_forward(const ForwardCall& call);
float* hopper_local_target_logits(const ForwardCall& call);
void hopper_forward_tiles(const ForwardCall& call);
void hopper_forward_saved(const ForwardCall& call);
void hopper_gradient_block(const BlockCall& call);
void hopper_gradient_gemms(const GradientGemmsCall& call);
// kernel_workspace bytes of hopper_gradient_gemms for a chunk and blocks of at most so many
// vocabulary entries.
std::size_t hopper_gemms_bytes(std::int64_t tokens, std::int64_t dim, std::int64_t vocab_count);

// cublas_kernel.cu: any dtype, width and GPU.
std::string cublas_unsupported(const ForwardShape& shape);
std::size_t cublas_workspace_bytes(const ForwardShape& shape);
void cublas_forward(const ForwardCall& call);
void cublas_gradient_block(const BlockCall& call);
// Returns the device address of the factor that undoes the block's scaling.
const float* cublas_block_unscale(const ForwardCall& call);
void cublas_gradient_gemms(const GradientGemmsCall& call);

}  // namespace logitless::cuda
