// The body of the log-bilinear language model (Mnih and Hinton, 2007) and its parameters.
//
//   h_t = sum_{k=1..n} r_{w(t-k)} C_k
//   P(w(t) = v) = softmax_v(h_t . q_v + b_v)   the head: see head.h
//
// with a vector r for each context token and a matrix C_k for each position. C_k is a full [D, D]
// matrix or a diagonal. With shared token vectors q = r, as in the paper.
#pragma once

#include <logitless/memory.h>

#include <cstdint>
#include <string>
#include <vector>

namespace log_bilinear {

struct ModelShape {
  std::int64_t vocab = 0;
  std::int64_t dim = 0;
  std::int64_t context = 0;  // n: tokens of context
  bool full_matrices = true;
  bool shared_vectors = true;
};

// A matrix [rows, columns] of fp32 weights with its gradient.
struct Parameter {
  Parameter(std::string parameter_name, std::int64_t row_count, std::int64_t column_count,
            logitless::MemoryMeter* meter);
  float* value() const { return value_memory.as<float>(); }
  float* gradient() const { return gradient_memory.as<float>(); }
  std::int64_t numel() const { return rows * columns; }

  std::string name;
  std::int64_t rows;
  std::int64_t columns;
  bool decayed = true;      // weight decay applies
  bool row_sparse = false;  // only rows in `touched` have a gradient; the others hold zeros
  std::vector<std::int32_t> touched;
  logitless::Buffer value_memory;
  logitless::Buffer gradient_memory;
};

class Model {
 public:
  // Makes a model for at most `batch` tokens at a time. Weights and activations count in `meter`,
  // which must outlive the model.
  Model(const ModelShape& shape, std::int64_t batch, int threads, logitless::MemoryMeter* meter);

  // Initialises small random token vectors, and matrices that weight near tokens most. Biases alone
  // give the unigram model.
  void initialise(std::uint64_t seed, const std::vector<float>& unigram_log_probability);

  // Computes h. contexts [rows, n], the nearest token first. Returns h [rows, D], valid until the
  // next call.
  const float* forward(const std::int32_t* contexts, std::int64_t rows);

  // Runs after forward with the same contexts, and after the head has written its gradients of
  // token vectors, biases and h (see hidden_gradient). Writes the gradients of the matrices, and
  // adds to (shared) or writes (separate) those of context vectors.
  void backward(const std::int32_t* contexts, std::int64_t rows);

  const ModelShape& shape() const { return shape_; }
  std::vector<Parameter>& parameters() { return parameters_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  std::int64_t parameter_count() const;

  Parameter& word_vectors() { return parameters_[0]; }                     // q [V, D]
  Parameter& biases() { return parameters_[1]; }                           // b [V, 1]
  float* hidden_gradient() const { return hidden_gradient_.as<float>(); }  // [batch, D]

 private:
  Parameter& matrices() { return parameters_[2]; }  // C [n D, D], or [n, D] for diagonals
  Parameter& context_vectors() { return parameters_[shape_.shared_vectors ? 0 : 3]; }
  void gather(const std::int32_t* contexts, std::int64_t rows);
  void scatter(const std::int32_t* contexts, std::int64_t rows);
  void note_touched(const std::int32_t* contexts, std::int64_t count);

  ModelShape shape_;
  int threads_;
  std::vector<Parameter> parameters_;
  std::vector<std::uint8_t> is_touched_;  // [V]: only for separate context vectors
  logitless::Buffer gathered_;            // [batch, n D]: context vectors, then their gradients
  logitless::Buffer hidden_;              // [batch, D]
  logitless::Buffer hidden_gradient_;     // [batch, D]
  logitless::Buffer transposed_;          // [D, n D]: the matrices, only full ones
};

}  // namespace log_bilinear
