// Strips of logits by cuBLAS, some tokens x some vocabulary entries, in fp32 in the workspace: the
// GEMMs of cublas_kernel.cu.
#pragma once

#include <algorithm>

#include "kernels/cuda/cublas.h"
#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/head/sizes.h"
#include "kernels/device/gradient.h"

namespace logitless::cuda {

template <typename T>
T* at(void* workspace, std::size_t offset) {
  return reinterpret_cast<T*>(static_cast<std::byte*>(workspace) + offset);
}

// Logits [tokens, vocab_count] of tokens from first_token and entries from vocab_begin on, without
// scale, bias and softcap.
struct Strip {
  const float* logits;
  std::int64_t stride;
  std::int64_t first_token;
  std::int64_t vocab_begin;
  int vocab_count;
};

// The rows that are multiplied: the hidden state, or a copy of few tokens with rows of zeros.
struct Hidden {
  const void* data;
  std::int64_t stride, rows;
};
inline Hidden hidden_rows(const ForwardCall& c, const CublasLayout& layout) {
  const std::int64_t tokens = c.shape.tokens, dim = c.shape.dim;
  if (tokens >= kLeastCublasRows) return {c.hidden, c.hidden_stride, tokens};
  const std::size_t element = size_of(c.shape.dtype), row = static_cast<std::size_t>(dim) * element;
  auto* const copy = at<std::byte>(c.workspace, layout.padded);
  const auto stream = static_cast<cudaStream_t>(c.stream);
  const auto count = static_cast<std::size_t>(tokens);
  require_cuda(
      cudaMemcpy2DAsync(copy, row, c.hidden, static_cast<std::size_t>(c.hidden_stride) * element,
                        row, count, cudaMemcpyDeviceToDevice, stream),
      "copy of few tokens");
  require_cuda(cudaMemsetAsync(copy + count * row, 0, (kLeastCublasRows - count) * row, stream),
               "rows of zeros");
  return {copy, dim, kLeastCublasRows};
}

// The strips of a chunk's tokens and of a range of the vocabulary.
class LogitStrips {
 public:
  LogitStrips(const ForwardCall& call, std::int64_t vocab_begin, std::int64_t vocab_count)
      : c_(call),
        layout_(call.shape),
        hidden_(hidden_rows(call, layout_)),
        begin_(vocab_begin),
        end_(vocab_begin + vocab_count),
        widens_(widens_weight(call.shape.dtype, call.shape.weight_dtype(), call.shape.precision)) {}

  // Multiplies the strips, ascending for each token, and calls finish(strip, tokens) after each.
  // Rows of the weight are widened once for all tokens; otherwise bf16x3 keeps the splits of a
  // strip's tokens.
  template <typename Finish>
  void each(const Finish& finish) const {
    const auto run = [&](std::int64_t token, std::int64_t entry) {
      finish(multiply(token, entry), static_cast<unsigned>(tokens_from(token)));
      require_cuda(cudaGetLastError(), "strip of logits");
    };
    if (!widens_) {
      each_token(
          [&](std::int64_t token) { each_entry([&](std::int64_t entry) { run(token, entry); }); });
      return;
    }
    each_entry([&](std::int64_t entry) {
      widen_rows(weight_from(entry), c_.shape.weight_dtype(), c_.weight_stride, count_from(entry),
                 c_.shape.dim, at<float>(c_.workspace, layout_.wide_weight), c_.stream);
      each_token([&](std::int64_t token) { run(token, entry); });
    });
  }

 private:
  template <typename F>
  void each_token(const F& f) const {
    for (std::int64_t token = 0; token < c_.shape.tokens; token += layout_.strip_tokens) f(token);
  }
  template <typename F>
  void each_entry(const F& f) const {
    for (std::int64_t entry = begin_; entry < end_; entry += layout_.strip_vocab) f(entry);
  }
  std::int64_t tokens_from(std::int64_t token) const {
    return std::min(layout_.strip_tokens, c_.shape.tokens - token);
  }
  std::int64_t count_from(std::int64_t entry) const {
    return std::min(layout_.strip_vocab, end_ - entry);
  }
  static const std::byte* from(const void* data, std::int64_t elements, DType dtype) {
    return static_cast<const std::byte*>(data) +
           elements * static_cast<std::int64_t>(size_of(dtype));
  }
  const void* weight_from(std::int64_t entry) const {
    return from(c_.weight, entry * c_.weight_stride, c_.shape.weight_dtype());
  }

  Strip multiply(std::int64_t token, std::int64_t entry) const {
    const std::int64_t tokens = tokens_from(token);
    // A last strip of few tokens begins with tokens of the one before.
    const std::int64_t before =
        std::clamp<std::int64_t>(kLeastCublasRows - tokens, 0, hidden_.rows - tokens);
    const std::int64_t first = std::max<std::int64_t>(token - before, 0);
    Gemm g;
    g.dtype = c_.shape.dtype;
    g.precision = c_.shape.precision;
    g.m = std::max(tokens, std::min(kLeastCublasRows, hidden_.rows));
    g.n = count_from(entry);
    g.k = c_.shape.dim;
    g.a = from(hidden_.data, first * hidden_.stride, c_.shape.dtype);
    g.a_stride = hidden_.stride;
    g.b = widens_ ? at<float>(c_.workspace, layout_.wide_weight) : weight_from(entry);
    g.b_stride = widens_ ? c_.shape.dim : c_.weight_stride;
    g.b_transposed = true;
    g.c = at<float>(c_.workspace, layout_.strip);
    g.c_stride = layout_.strip_vocab;
    multiply(g, entry > begin_);
    return {g.c + (token - first) * g.c_stride, g.c_stride, token, entry, static_cast<int>(g.n)};
  }

  void multiply(const Gemm& g, bool hidden_is_split) const {
    void* const of_gemm = at<void>(c_.workspace, layout_.gemm);
    if (g.precision != Precision::bf16x3)
      return cublas_multiply(g, of_gemm, c_.stream, layout_.gemm_bytes);
    const Splits of_hidden = {at<void>(c_.workspace, layout_.split_hidden),
                              kept_stretches(layout_.strip_tokens, g.k), hidden_is_split};
    const Splits of_weight = {.data = at<void>(c_.workspace, layout_.split_weight),
                              .dtype = c_.shape.weight_dtype()};
    multiply_split(g, of_hidden, of_weight, of_gemm, c_.stream, layout_.gemm_bytes);
  }

  const ForwardCall& c_;
  const CublasLayout layout_;
  const Hidden hidden_;
  const std::int64_t begin_, end_;  // of the vocabulary
  const bool widens_;
};

}  // namespace logitless::cuda
