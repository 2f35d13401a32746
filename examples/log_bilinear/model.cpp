#include "model.h"

#include <algorithm>
#include <cmath>

#include "logitless/parallel.h"
#include "matrix.h"
#include "train/hash.h"

namespace log_bilinear {

using logitless::train::mix;
using logitless::train::normal;
namespace {

constexpr float kWordScale = 0.1f;  // standard deviation of an element of a new token vector

std::size_t float_bytes(std::int64_t count) {
  return static_cast<std::size_t>(count) * sizeof(float);
}

void fill_normal(Parameter& parameter, std::uint64_t seed, float scale) {
  for (std::int64_t i = 0; i < parameter.numel(); ++i) {
    parameter.value()[i] = scale * normal(seed, static_cast<std::uint64_t>(i));
  }
}

}  // namespace

Parameter::Parameter(std::string parameter_name, std::int64_t row_count, std::int64_t column_count,
                     logitless::MemoryMeter* meter)
    : name(std::move(parameter_name)),
      rows(row_count),
      columns(column_count),
      value_memory(float_bytes(row_count * column_count), meter),
      gradient_memory(float_bytes(row_count * column_count), meter) {
  std::fill_n(value(), numel(), 0.0f);
  std::fill_n(gradient(), numel(), 0.0f);
}

Model::Model(const ModelShape& shape, std::int64_t batch, int threads,
             logitless::MemoryMeter* meter)
    : shape_(shape), threads_(threads) {
  const std::int64_t inner = shape.context * shape.dim;
  parameters_.emplace_back(shape.shared_vectors ? "word_vectors" : "output_vectors", shape.vocab,
                           shape.dim, meter);
  parameters_.emplace_back("biases", shape.vocab, 1, meter);
  parameters_.emplace_back("context_matrices", shape.full_matrices ? inner : shape.context,
                           shape.dim, meter);
  if (!shape.shared_vectors) {
    parameters_.emplace_back("context_vectors", shape.vocab, shape.dim, meter);
    context_vectors().row_sparse = true;
    is_touched_.assign(static_cast<std::size_t>(shape.vocab), 0);
  }
  biases().decayed = false;
  gathered_ = logitless::Buffer(float_bytes(batch * inner), meter);
  hidden_ = logitless::Buffer(float_bytes(batch * shape.dim), meter);
  hidden_gradient_ = logitless::Buffer(float_bytes(batch * shape.dim), meter);
  if (shape.full_matrices) transposed_ = logitless::Buffer(float_bytes(inner * shape.dim), meter);
}

void Model::initialise(std::uint64_t seed, const std::vector<float>& unigram_log_probability) {
  fill_normal(word_vectors(), mix(seed, 1), kWordScale);
  if (!shape_.shared_vectors) fill_normal(context_vectors(), mix(seed, 2), kWordScale);
  std::copy(unigram_log_probability.begin(), unigram_log_probability.end(), biases().value());
  std::fill_n(matrices().value(), matrices().numel(), 0.0f);
  for (std::int64_t k = 0; k < shape_.context; ++k) {
    const float scale = 1.0f / static_cast<float>(1 + k);
    for (std::int64_t d = 0; d < shape_.dim; ++d) {
      const std::int64_t at =
          shape_.full_matrices ? (k * shape_.dim + d) * shape_.dim + d : k * shape_.dim + d;
      matrices().value()[at] = scale;
    }
  }
}

std::int64_t Model::parameter_count() const {
  std::int64_t count = 0;
  for (const Parameter& parameter : parameters_) count += parameter.numel();
  return count;
}

void Model::gather(const std::int32_t* contexts, std::int64_t rows) {
  const std::int64_t dim = shape_.dim;
  const std::int64_t count = rows * shape_.context;
  const float* from = context_vectors().value();
  float* to = gathered_.as<float>();
  constexpr std::int64_t kRows = 64;  // rows of a task
  logitless::parallel_ranges(threads_, count, kRows, [&](std::int64_t i, std::int64_t last) {
    for (; i < last; ++i) std::copy_n(from + contexts[i] * dim, dim, to + i * dim);
  });
}

const float* Model::forward(const std::int32_t* contexts, std::int64_t rows) {
  gather(contexts, rows);
  const std::int64_t dim = shape_.dim;
  const std::int64_t inner = shape_.context * dim;
  const float* in = gathered_.as<float>();
  const float* c = matrices().value();
  float* h = hidden_.as<float>();
  if (shape_.full_matrices) {
    multiply(threads_, rows, dim, inner, {in, inner, 1}, c, h);
    return h;
  }
  logitless::parallel_for(threads_, rows, [&](std::int64_t i, int) {
    float* out = h + i * dim;
    std::fill_n(out, dim, 0.0f);
    for (std::int64_t k = 0; k < shape_.context; ++k) {
      for (std::int64_t d = 0; d < dim; ++d) out[d] += c[k * dim + d] * in[i * inner + k * dim + d];
    }
  });
  return h;
}

void Model::backward(const std::int32_t* contexts, std::int64_t rows) {
  const std::int64_t dim = shape_.dim;
  const std::int64_t inner = shape_.context * dim;
  float* in = gathered_.as<float>();
  const float* dh = hidden_gradient();
  const float* c = matrices().value();
  float* dc = matrices().gradient();
  if (shape_.full_matrices) {
    // Computes dC = in^T dh, then overwrites `in` with the gradients of the gathered vectors, dh
    // C^T.
    multiply(threads_, inner, dim, rows, {in, 1, inner}, dh, dc);
    float* ct = transposed_.as<float>();
    transpose(threads_, inner, dim, c, ct);
    multiply(threads_, rows, inner, dim, {dh, dim, 1}, ct, in);
  } else {
    logitless::parallel_for(threads_, shape_.context, [&](std::int64_t k, int) {
      float* out = dc + k * dim;
      std::fill_n(out, dim, 0.0f);
      for (std::int64_t i = 0; i < rows; ++i) {
        float* x = in + i * inner + k * dim;
        const float* g = dh + i * dim;
        for (std::int64_t d = 0; d < dim; ++d) {
          out[d] += g[d] * x[d];
          x[d] = g[d] * c[k * dim + d];
        }
      }
    });
  }
  if (!shape_.shared_vectors) note_touched(contexts, rows * shape_.context);
  scatter(contexts, rows);
}

// Replaces the rows of the last step by those of this one; rows of the last step become zero again.
void Model::note_touched(const std::int32_t* contexts, std::int64_t count) {
  Parameter& vectors = context_vectors();
  for (const std::int32_t word : vectors.touched) {
    std::fill_n(vectors.gradient() + word * shape_.dim, shape_.dim, 0.0f);
    is_touched_[word] = 0;
  }
  vectors.touched.clear();
  for (std::int64_t i = 0; i < count; ++i) {
    if (is_touched_[contexts[i]] != 0) continue;
    is_touched_[contexts[i]] = 1;
    vectors.touched.push_back(contexts[i]);
  }
}

// Adds the gradients of a repeated token in a fixed order: threads split the columns, not the rows.
void Model::scatter(const std::int32_t* contexts, std::int64_t rows) {
  constexpr std::int64_t kSlice = 16;  // columns of one cache line
  const std::int64_t dim = shape_.dim;
  const std::int64_t count = rows * shape_.context;
  const float* from = gathered_.as<float>();
  float* to = context_vectors().gradient();
  logitless::parallel_ranges(threads_, dim, kSlice, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = 0; i < count; ++i) {
      const float* in = from + i * dim;
      float* out = to + contexts[i] * dim;
      for (std::int64_t d = first; d < last; ++d) out[d] += in[d];
    }
  });
}

}  // namespace log_bilinear
