// The softmax over the whole vocabulary, by logitless: the logits [batch, V] never exist.
#pragma once

#include <logitless/logitless.h>

#include <cstdint>
#include <memory>

namespace log_bilinear {

struct HeadShape {
  std::int64_t vocab = 0;
  std::int64_t dim = 0;
  std::int64_t batch = 0;  // most tokens of a call
  // dtype of hidden and weight in the GEMMs: f32 or bf16
  logitless::DType dtype = logitless::DType::bf16;
};

// Options of the far field: the wanted relative error of gradients, 0 for exact ones. `both` lets
// it compute the loss, too.
struct FarField {
  double error = 0.0;
  bool both = false;
};

struct HeadGradients {
  float* hidden;  // [tokens, D]
  float* weight;  // [V, D]
  float* bias;    // [V]
};

class Head {
 public:
  // A memory budget of 0 is the library's default. The head's own buffers count in `meter`, the
  // workspaces in the context's; both must outlive the head.
  Head(const logitless::Context& context, const HeadShape& shape, std::size_t memory_budget,
       const FarField& far, logitless::MemoryMeter* meter);

  // Uses the fp32 weights [V, D] from now on. They are read until the next call: do not change them
  // without calling it.
  void set_weight(const float* weight);

  // Returns the mean loss of the tokens and writes its gradients. hidden [tokens, D], targets
  // [tokens], bias [V].
  double train(const float* hidden, const std::int32_t* targets, std::int64_t tokens,
               const float* bias, const HeadGradients& gradients);

  // Returns token statistics without gradients; validation needs mean_log_prob and correct.
  logitless::LossStatistics evaluate(const float* hidden, const std::int32_t* targets,
                                     std::int64_t tokens, const float* bias);

  const logitless::LossPlan& train_plan() const { return train_plan_; }
  // Workspaces of exact training and of validation.
  std::size_t workspace_bytes() const { return train_space_.bytes() + evaluate_space_.bytes(); }
  // Null without the far field.
  logitless::FarFieldHead* far() { return far_.get(); }
  const logitless::FarFieldHead* far() const { return far_.get(); }

 private:
  logitless::CrossEntropyInputs inputs(const float* hidden, const std::int32_t* targets,
                                       std::int64_t tokens, const float* bias);
  logitless::LossPlan plan(bool gradients, std::size_t memory_budget);

  const logitless::Context& context_;
  HeadShape shape_;
  logitless::CrossEntropyOptions options_;
  logitless::Buffer rounded_weight_;  // [V, D] bf16
  logitless::Buffer rounded_hidden_;  // [batch, D] bf16
  logitless::Buffer best_;            // [batch] i32: the likeliest token
  const void* weight_ = nullptr;
  logitless::LossPlan train_plan_;
  logitless::LossPlan evaluate_plan_;
  logitless::Workspace train_space_{nullptr, 0};
  logitless::Workspace evaluate_space_;
  std::unique_ptr<logitless::FarFieldHead> far_;
};

}  // namespace log_bilinear
