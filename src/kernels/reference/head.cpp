// Reference kernel of the head in float64, logit by logit, following the formulas of
// docs/explain/losses.md.
#include <algorithm>
#include <bit>
#include <cmath>

#include "core/element.h"
#include "core/parallel.h"
#include "kernels/reference/register_reference.h"
#include "math/lse_state.h"
#include "math/softcap.h"

namespace logitless::reference {
namespace {

double at(const MatrixRows& m, std::int64_t row, std::int64_t column) {
  return load_element(m.data, m.dtype, m.row(row) * m.row_stride + column * m.col_stride);
}

double logit(const ChunkCommon& chunk, std::int64_t token, std::int64_t vocab_id) {
  double sum = chunk.bias == nullptr ? 0.0 : chunk.bias[vocab_id];
  for (std::int64_t k = 0; k < chunk.shape.dim; ++k)
    sum += at(chunk.hidden, token, k) * at(chunk.weight, vocab_id, k);
  // Logits are rounded to fp32, as the returned target logit is: their differences are then exact.
  return static_cast<float>(
      softcap(sum * chunk.features->logit_scale, static_cast<double>(chunk.features->softcap)));
}

// Scratch of a thread, a row of doubles: the logits of a token, or a row of a gradient.
std::int64_t row_elements(const HeadShape& shape) {
  return round_up(std::max(shape.vocab, shape.dim), 8);
}

double* thread_row(const ChunkCommon& chunk, int thread) {
  return reinterpret_cast<double*>(chunk.scratch) + row_elements(chunk.shape) * thread;
}

std::size_t scratch_bytes(const HeadShape& shape, const HeadFeatures&, const ChunkSizes& sizes) {
  const std::int64_t rows =
      std::min<std::int64_t>(sizes.threads, row_elements(shape) + sizes.tokens);
  return static_cast<std::size_t>(row_elements(shape) * rows) * sizeof(double);
}

double exponent_of(double top) {
  if (top == -INFINITY) return 0.0;
  if (top == INFINITY) return kMostExponent;
  const double exponent = static_cast<float>(std::ceil(top * kLog2E));
  if (exponent > kMostExponent) return NAN;
  return std::max(exponent, static_cast<double>(kLeastExponent));
}

void forward_token(const ForwardChunk& chunk, std::int64_t token, double* z) {
  const std::int64_t vocab = chunk.shape.vocab;
  double top = -INFINITY;
  std::int32_t best = 0;
  double weighted = 0.0;
  for (std::int64_t j = 0; j < vocab; ++j) {
    z[j] = logit(chunk, token, j);
    if (z[j] > top) {
      top = z[j];
      best = static_cast<std::int32_t>(j);
    }
    weighted +=
        (chunk.logit_weights == nullptr ? 1.0 : static_cast<double>(chunk.logit_weights[j])) * z[j];
  }
  // Rounded to fp32, as it is stored, and within the bounds of all kernels.
  const double exponent = exponent_of(top);
  double sum = 0.0;
  double entropy = 0.0;
  for (std::int64_t j = 0; j < vocab; ++j) {
    const double bits = z[j] * kLog2E - exponent;
    const double e = std::exp2(bits);
    sum += e;
    if (e != 0.0) entropy += e * bits;
  }
  chunk.exponent[token] = static_cast<float>(exponent);
  chunk.sum[token] = static_cast<float>(sum);
  if (chunk.entropy_sum != nullptr) chunk.entropy_sum[token] = entropy / sum;
  if (chunk.weighted_sum != nullptr) chunk.weighted_sum[token] = weighted;
  if (chunk.argmax != nullptr) chunk.argmax[token] = best;
  if (chunk.best != nullptr) chunk.best[token] = static_cast<float>(top);
  if (chunk.wide != nullptr) {
    chunk.wide[token] = ExactSum();
    for (std::int64_t j = 0; j < vocab; ++j) {
      const double own = exponent_of(z[j]);
      chunk.wide[token].add(std::exp2(z[j] * kLog2E - own), own);
    }
  }
  const std::int64_t per_token = chunk.features->targets_per_token;
  for (std::int64_t slot = token * per_token; slot < (token + 1) * per_token; ++slot) {
    if (chunk.targets.vocab_ids[slot] >= 0)
      chunk.target_logit[slot] = static_cast<float>(z[chunk.targets.vocab_ids[slot]]);
  }
}

void forward(const ForwardChunk& chunk) {
  parallel_for(chunk.threads, chunk.tokens, [&](std::int64_t token, int thread) {
    forward_token(chunk, token, thread_row(chunk, thread));
  });
}

// Returns d loss / d (x . w + b) of a token and a vocabulary entry.
double logit_gradient(const BackwardChunk& chunk, std::int64_t token, std::int64_t vocab_id) {
  const std::int64_t per_token = chunk.features->targets_per_token;
  double exact = 0.0;
  bool target = false;
  for (std::int64_t slot = token * per_token; slot < (token + 1) * per_token; ++slot) {
    if (chunk.targets.vocab_ids[slot] != vocab_id) continue;
    target = true;
    exact += chunk.coefficient[slot];
  }
  if (target) return exact;
  const double z = logit(chunk, token, vocab_id);
  const double bits = z * kLog2E - chunk.exponent[token];
  const double e = std::exp2(bits);
  double g = e == 0.0 ? 0.0 : e * chunk.alpha[token];
  if (chunk.beta != nullptr && e != 0.0) g += e * chunk.beta[token] * bits;
  if (chunk.gamma != nullptr)
    g +=
        chunk.gamma[token] * (chunk.logit_weights == nullptr ? 1.0 : chunk.logit_weights[vocab_id]);
  return g * softcap_slope(z, static_cast<double>(chunk.features->softcap));
}

// Loads the fp32 value of d_weight between chunks; see WeightGradientSink.
double load_weight(const WeightGradientSink& sink, std::int64_t dim, std::int64_t vocab_id,
                   std::int64_t k) {
  const std::int64_t index = vocab_id * sink.row_stride + k * sink.col_stride;
  if (sink.first_chunk) return sink.accumulate ? load_element(sink.data, sink.dtype, index) : 0.0;
  if (sink.dtype == DType::f32) return static_cast<const float*>(sink.data)[index];
  if (sink.accumulator != nullptr) return sink.accumulator[vocab_id * dim + k];
  const std::uint32_t high = static_cast<const std::uint16_t*>(sink.data)[index];
  return std::bit_cast<float>(high << 16 | sink.low[vocab_id * dim + k]);
}

void store_weight(const WeightGradientSink& sink, std::int64_t dim, std::int64_t vocab_id,
                  std::int64_t k, double value) {
  const std::int64_t index = vocab_id * sink.row_stride + k * sink.col_stride;
  if (sink.last_chunk || sink.dtype == DType::f32) {
    store_element(sink.data, sink.dtype, index, value);
  } else if (sink.accumulator != nullptr) {
    sink.accumulator[vocab_id * dim + k] = static_cast<float>(value);
  } else {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(static_cast<float>(value));
    static_cast<std::uint16_t*>(sink.data)[index] = static_cast<std::uint16_t>(bits >> 16);
    sink.low[vocab_id * dim + k] = static_cast<std::uint16_t>(bits);
  }
}

void backward(const BackwardChunk& chunk) {
  const std::int64_t dim = chunk.shape.dim;
  parallel_for(chunk.threads, chunk.shape.vocab, [&](std::int64_t vocab_id, int thread) {
    double* row = thread_row(chunk, thread);
    std::fill(row, row + dim, 0.0);
    double bias = 0.0;
    for (std::int64_t token = 0; token < chunk.tokens; ++token) {
      const double g = logit_gradient(chunk, token, vocab_id);
      bias += g;
      for (std::int64_t k = 0; k < dim; ++k) row[k] += g * at(chunk.hidden, token, k);
    }
    if (chunk.d_bias != nullptr) chunk.d_bias[vocab_id] += static_cast<float>(bias);
    if (chunk.d_weight.data == nullptr) return;
    for (std::int64_t k = 0; k < dim; ++k) {
      store_weight(chunk.d_weight, dim, vocab_id, k,
                   row[k] + load_weight(chunk.d_weight, dim, vocab_id, k));
    }
  });
  const HiddenGradientSink& to = chunk.d_hidden;
  if (to.data == nullptr) return;
  parallel_for(chunk.threads, chunk.tokens, [&](std::int64_t token, int thread) {
    double* row = thread_row(chunk, thread);
    std::fill(row, row + dim, 0.0);
    for (std::int64_t vocab_id = 0; vocab_id < chunk.shape.vocab; ++vocab_id) {
      const double g = logit_gradient(chunk, token, vocab_id);
      for (std::int64_t k = 0; k < dim; ++k) row[k] += g * at(chunk.weight, vocab_id, k);
    }
    for (std::int64_t k = 0; k < dim; ++k) {
      const std::int64_t index = to.rows[token] * to.row_stride + k * to.col_stride;
      const double old = to.accumulate ? load_element(to.data, to.dtype, index) : 0.0;
      store_element(to.data, to.dtype, index, row[k] + old);
    }
  });
}

}  // namespace

HeadKernel reference_kernel() {
  return {"reference",
          [] { return Support(); },
          [](const HeadShape&, const HeadFeatures&) { return Support(); },
          0.2e9,
          scratch_bytes,
          [](DType) { return std::size_t{0}; },
          forward,
          backward};
}

}  // namespace logitless::reference
