// Head by cuBLAS and row kernels over each token's logits, which a chunk stores in fp32. For every
// dtype, width and GPU that the Hopper kernels do not support. It is slower and needs more memory.
#include <algorithm>

#include "kernels/cuda/cublas.h"
#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/numbers.cuh"
#include "kernels/cuda/head/sizes.h"
#include "kernels/cuda/head/targets.cuh"
#include "kernels/device/gradient.h"
#include "math/log_prob.h"
#include "math/lse_state.h"
#include "math/softcap.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;

// Device scalars: 0, 1, the scale of f16 blocks, and its inverse.
struct Scalars {
  float zero, one, block_scale, block_unscale;
};

template <typename T>
T* at(void* workspace, std::size_t offset) {
  return reinterpret_cast<T*>(static_cast<std::byte*>(workspace) + offset);
}

__device__ __forceinline__ float transformed(float raw, const ForwardCall& c,
                                             std::int64_t vocab_id) {
  if (c.bias != nullptr) raw += c.bias[vocab_id];
  return softcap(raw * c.logit_scale, c.softcap);
}

struct RowSums {
  double sum, entropy, weighted;
  float top;
  int index;
};
// Merges disjoint sets of vocabulary entries: sums of x = exp(z - top), and of x log x.
__device__ RowSums merged(const RowSums& a, const RowSums& b) {
  const bool first = a.top > b.top || (a.top == b.top && a.index < b.index) || b.index < 0;
  const float top = first ? a.top : b.top;
  const double fa = a.top == top ? 1.0 : exp(static_cast<double>(a.top) - top);
  const double fb = b.top == top ? 1.0 : exp(static_cast<double>(b.top) - top);
  const auto entropy = [&](const RowSums& of, double factor) {
    if (of.sum == 0.0 || factor == 0.0) return 0.0;
    return entropy_against(top, of.top, of.sum, of.entropy) * factor;
  };
  return {a.sum * fa + b.sum * fb, entropy(a, fa) + entropy(b, fb), a.weighted + b.weighted, top,
          first ? a.index : b.index};
}

// A thread block for each token.
__global__ void __launch_bounds__(kThreads)
    finish_rows(const ForwardCall c, const float* logits, std::int64_t stride, float* tops,
                float* inverse_sums) {
  __shared__ RowSums shared[kThreads];
  const std::int64_t row = blockIdx.x;
  const float* const z = logits + row * stride;
  const bool valid = has_target(c, row);
  RowSums mine{0.0, 0.0, 0.0, -INFINITY, -1};
  if (valid) {
    for (std::int64_t j = threadIdx.x; j < c.shape.vocab; j += kThreads) {
      const float v = transformed(z[j], c, j);
      if (mine.index < 0 || v > mine.top) {
        mine.top = v;
        mine.index = static_cast<int>(j);
      }
      if (c.shape.weighted_sum)
        mine.weighted += (c.logit_weights == nullptr ? 1.0f : c.logit_weights[j]) * v;
    }
    // If all entries are masked, the sum is 0 for any reference.
    const float top = isfinite(mine.top) ? mine.top : 0.0f;
    float sum = 0.0f;
    for (std::int64_t j = threadIdx.x, n = 0; j < c.shape.vocab; j += kThreads) {
      const float v = transformed(z[j], c, j);
      const float e = expf(v - top);
      sum += e;
      if (c.shape.entropy) mine.entropy += e == 0.0f ? 0.0 : static_cast<double>(e) * (v - top);
      if (++n % 64 == 0) {
        mine.sum += sum;
        sum = 0.0f;
      }
    }
    mine.sum += sum;
  }
  shared[threadIdx.x] = mine;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half)
      shared[threadIdx.x] = merged(shared[threadIdx.x], shared[threadIdx.x + half]);
    __syncthreads();
  }
  const RowSums all = shared[0];
  const double lse = static_cast<double>(all.top) + log(all.sum);
  const int per_token = c.shape.targets_per_token;
  for (int k = threadIdx.x; k < per_token; k += kThreads) {
    const std::int64_t slot = row * per_token + k;
    const std::int64_t vocab_id = target_of(c, slot);
    const bool named = is_local(c, vocab_id);
    const std::int64_t place = row_of_vocab_id(c, vocab_id);
    const float v = named ? transformed(z[place], c, place) : 0.0f;
    if (c.target_logit != nullptr) c.target_logit[slot] = v;
    if (c.log_prob != nullptr)
      c.log_prob[slot] =
          named ? static_cast<float>(log_prob_of(v, lse)) : without_logit(c, vocab_id);
    if (is_bad(c, vocab_id)) {
      const std::int64_t position = place_of(c, slot) + (c.sequence > 0 ? 1 : 0);
      atomicMin(reinterpret_cast<unsigned long long*>(c.bad_target),
                static_cast<unsigned long long>(position));
    }
  }
  if (threadIdx.x > 0) return;
  tops[row] = all.top;
  inverse_sums[row] = static_cast<float>(1.0 / all.sum);
  if (c.lse != nullptr) c.lse[row] = valid ? static_cast<float>(lse) : 0.0f;
  if (c.entropy != nullptr)
    c.entropy[row] = valid ? static_cast<float>(log(all.sum) - all.entropy / all.sum) : 0.0f;
  if (c.weighted_sum != nullptr)
    c.weighted_sum[row] = valid ? static_cast<float>(all.weighted) : 0.0f;
  if (c.argmax != nullptr) c.argmax[row] = valid ? all.index + static_cast<int>(c.vocab_begin) : -1;
}

// f16 has too little range for gradients of a mean over many tokens. A power of two scales its
// blocks so that the greatest coefficient is near 2^10.
__global__ void __launch_bounds__(kThreads)
    set_scale(const RowCoefficients* rows, std::int64_t tokens, bool narrow, Scalars* scalars) {
  __shared__ float shared[kThreads];
  float most = 0.0f;
  for (std::int64_t i = threadIdx.x; i < tokens; i += kThreads)
    most =
        fmaxf(most, fmaxf(fabsf(rows[i].alpha), fmaxf(fabsf(rows[i].beta), fabsf(rows[i].gamma))));
  shared[threadIdx.x] = most;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half)
      shared[threadIdx.x] = fmaxf(shared[threadIdx.x], shared[threadIdx.x + half]);
    __syncthreads();
  }
  if (threadIdx.x > 0) return;
  most = shared[0];
  const int exponent =
      narrow && most > 0.0f && isfinite(most) ? max(-100, min(100, 10 - ilogbf(most))) : 0;
  scalars->block_scale = ldexpf(1.0f, exponent);
  scalars->block_unscale = ldexpf(1.0f, -exponent);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    fill_block(const BlockCall b, const float* logits, std::int64_t stride, const float* tops,
               const float* inverse_sums, const Scalars* scalars) {
  const ForwardCall& c = b.chunk;
  const std::int64_t row = blockIdx.x;
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (at >= b.vocab_count) return;
  const std::int64_t vocab_id = b.vocab_begin + at;
  const RowCoefficients r = b.rows[row];
  const float z = transformed(logits[row * stride + vocab_id], c, vocab_id);
  // Relative to the greatest logit, not to lse: their difference is exact where it matters.
  const float p =
      r.alpha == 0.0f && r.beta == 0.0f ? 0.0f : expf(z - tops[row]) * inverse_sums[row];
  float dz = r.alpha * p;
  if (r.beta != 0.0f && p != 0.0f)
    dz = fmaf(r.beta * p, z - tops[row] + logf(inverse_sums[row]), dz);
  if (r.gamma != 0.0f && !b.smoothing_apart)
    dz = fmaf(r.gamma, c.logit_weights == nullptr ? 1.0f : c.logit_weights[vocab_id], dz);
  static_cast<T*>(b.block.data)[row * b.block.stride + at] =
      rounded<T>(dz * softcap_slope(z, c.softcap) * scalars->block_scale);
}

__global__ void set_scalars(Scalars* scalars) { *scalars = {0.0f, 1.0f, 1.0f, 1.0f}; }

// d_hidden (fp32) += coefficient * row of weight. A thread block for each token.
template <typename T>
__global__ void __launch_bounds__(kThreads) add_hidden_targets(const GradientGemmsCall c) {
  const std::int64_t row = blockIdx.x;
  float* const out = static_cast<float*>(c.d_hidden.data) + row * c.d_hidden.stride;
  if (c.weight_sum != nullptr) {
    for (std::int64_t d = threadIdx.x; d < c.dim; d += kThreads)
      out[d] = fmaf(c.rows[row].gamma, c.weight_sum[d], out[d]);
  }
  for (int k = 0; k < c.targets_per_token; ++k) {
    const std::int64_t slot = row * c.targets_per_token + k;
    const float share = c.coefficient[slot];
    if (share == 0.0f) continue;
    const T* const w =
        static_cast<const T*>(c.weight) + (c.vocab_ids[slot] - c.vocab_begin) * c.weight_stride;
    for (std::int64_t d = threadIdx.x; d < c.dim; d += kThreads)
      out[d] = fmaf(share, as_float(w[d]), out[d]);
  }
}

// d_weight (fp32) += logit weight * hidden_sum. A thread block for each vocabulary entry.
__global__ void __launch_bounds__(kThreads) add_weight_smoothing(const GradientGemmsCall c) {
  const std::int64_t vocab_id = blockIdx.x;
  const float logit_weight = c.logit_weights == nullptr ? 1.0f : c.logit_weights[vocab_id];
  float* const out = static_cast<float*>(c.d_weight.data) + vocab_id * c.d_weight.stride;
  for (std::int64_t d = threadIdx.x; d < c.dim; d += kThreads)
    out[d] = fmaf(logit_weight, c.hidden_sum[d], out[d]);
}

}  // namespace

void cublas_forward(const ForwardCall& c) {
  const auto stream = static_cast<cudaStream_t>(c.stream);
  if (c.first_token == 0)
    require_cuda(cudaMemsetAsync(c.bad_target, 0xff, sizeof(*c.bad_target), stream), "bad_target");
  const CublasLayout layout(c.shape);
  auto* const scalars = at<Scalars>(c.workspace, layout.scalars);
  set_scalars<<<1, 1, 0, stream>>>(scalars);
  require_cuda(cudaGetLastError(), "scalars");
  if (c.shape.tokens == 0) return;
  auto* const logits = at<float>(c.workspace, layout.logits);
  Gemm g;
  g.dtype = c.shape.dtype;
  g.m = c.shape.tokens;
  g.n = c.shape.vocab;
  g.k = c.shape.dim;
  g.a = c.hidden;
  g.a_stride = c.hidden_stride;
  g.b = c.weight;
  g.b_stride = c.weight_stride;
  g.b_transposed = true;
  g.c = logits;
  g.c_stride = layout.stride;
  g.alpha = &scalars->one;
  g.beta = &scalars->zero;
  cublas_multiply(g, at<void>(c.workspace, layout.gemm), c.stream);
  finish_rows<<<static_cast<unsigned>(c.shape.tokens), kThreads, 0, stream>>>(
      c, logits, layout.stride, at<float>(c.workspace, layout.tops),
      at<float>(c.workspace, layout.inverse_sums));
  require_cuda(cudaGetLastError(), "rows of logits");
}

void cublas_gradient_block(const BlockCall& b) {
  const ForwardCall& c = b.chunk;
  if (c.shape.tokens == 0) return;
  const auto stream = static_cast<cudaStream_t>(c.stream);
  const CublasLayout layout(c.shape);
  auto* const scalars = at<Scalars>(c.workspace, layout.scalars);
  set_scale<<<1, kThreads, 0, stream>>>(b.rows, c.shape.tokens, c.shape.dtype == DType::f16,
                                        scalars);
  require_cuda(cudaGetLastError(), "scale of the block");
  const dim3 grid(static_cast<unsigned>(c.shape.tokens),
                  static_cast<unsigned>((b.vocab_count + kThreads - 1) / kThreads));
  with_type(c.shape.dtype, [&](auto type) {
    fill_block<decltype(type)><<<grid, kThreads, 0, stream>>>(
        b, at<float>(c.workspace, layout.logits), layout.stride,
        at<float>(c.workspace, layout.tops), at<float>(c.workspace, layout.inverse_sums), scalars);
  });
  require_cuda(cudaGetLastError(), "block");
}

const float* cublas_block_unscale(const ForwardCall& c) {
  const CublasLayout layout(c.shape);
  return &at<Scalars>(c.workspace, layout.scalars)->block_unscale;
}

void cublas_gradient_gemms(const GradientGemmsCall& c) {
  if (c.tokens == 0) return;
  const auto stream = static_cast<cudaStream_t>(c.stream);
  ForwardShape shape;
  shape.tokens = c.tokens;
  shape.vocab = c.block_vocab;
  const CublasLayout layout(shape);
  auto* const scalars = at<Scalars>(c.kernel_workspace, layout.scalars);
  void* const workspace = at<void>(c.kernel_workspace, layout.gemm);
  Gemm g;
  g.dtype = c.dtype;
  g.n = c.dim;
  g.a = c.block.data;
  g.a_stride = c.block.stride;
  g.alpha = &scalars->block_unscale;
  if (c.d_hidden.data != nullptr) {
    g.m = c.tokens;
    g.k = c.block_vocab;
    g.b = c.weight;
    g.b_stride = c.weight_stride;
    g.c = static_cast<float*>(c.d_hidden.data);
    g.c_stride = c.d_hidden.stride;
    g.beta = c.d_hidden.add ? &scalars->one : &scalars->zero;
    cublas_multiply(g, workspace, c.stream);
    with_type(c.dtype, [&](auto type) {
      add_hidden_targets<decltype(type)>
          <<<static_cast<unsigned>(c.tokens), kThreads, 0, stream>>>(c);
    });
    require_cuda(cudaGetLastError(), "targets of d_hidden");
  }
  if (c.d_weight.data != nullptr) {
    g.m = c.block_vocab;
    g.k = c.tokens;
    g.a_transposed = true;
    g.b = c.factored_hidden;
    g.b_stride = c.factored_stride;
    g.c = static_cast<float*>(c.d_weight.data);
    g.c_stride = c.d_weight.stride;
    g.beta = c.d_weight.add ? &scalars->one : &scalars->zero;
    cublas_multiply(g, workspace, c.stream);
    add_weight_targets(c);
    if (c.hidden_sum == nullptr) return;
    add_weight_smoothing<<<static_cast<unsigned>(c.block_vocab), kThreads, 0, stream>>>(c);
    require_cuda(cudaGetLastError(), "smoothing of d_weight");
  }
}

}  // namespace logitless::cuda
